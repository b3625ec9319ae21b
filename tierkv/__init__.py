"""tierkv: a tiered store for the KV cache of LLM inference engines.

`import tierkv` is light: each public name loads its module, and with it numpy and the like, on first use.
"""

from importlib import import_module

__version__ = "0.1.0"

_EXPORTS: dict[str, tuple[str, str]] = {  # public name -> the module and the name in it
    "open": ("tierkv.assembly", "open_store"),
    "connect": ("tierkv.daemon.connect", "connect"),
    **{
        name: (module, name)
        for module, names in {
            "tierkv.client": ("Client",),
            "tierkv.namespaces": ("OpenNamespace",),
            "tierkv.reading": ("Match",),
            "tierkv.copier": ("CopyPart", "HostCopier", "LayerPages", "PagedKV"),
            "tierkv.digest": ("adapter_from_path", "weights_from_path"),
            "tierkv.errors": ("Away", "ConfigError", "TierKVError"),
            "tierkv.handles": ("Draft", "Lease", "Sealed"),
            "tierkv.intake": ("Stored",),
            "tierkv.keys": (
                "Adapter",
                "Chain",
                "Extras",
                "MultimodalItem",
                "Namespace",
                "NamespaceSpec",
                "Weights",
            ),
            "tierkv.retention": ("Retention",),
            "tierkv.watching": ("Announcement", "Watched"),
            "tierkv.layout": ("GroupKind", "LayerGroup", "Layout", "engine_blocks_for"),
        }.items()
        for name in names
    },
}


def __getattr__(name: str) -> object:
    if name not in _EXPORTS:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module, attribute = _EXPORTS[name]
    value: object = getattr(import_module(module), attribute)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_EXPORTS})
