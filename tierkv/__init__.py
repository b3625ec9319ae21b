"""tierkv: a tiered store for the KV cache of LLM inference engines.

`import tierkv` is light: each public name loads its module, and with it numpy and the like, on first use.
"""

from importlib import import_module

__version__ = "0.1.0"

_EXPORTS: dict[str, str] = {}  # public name -> the module that defines it


def __getattr__(name: str) -> object:
    module = _EXPORTS.get(name)
    if module is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value: object = getattr(import_module(module), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_EXPORTS})
