"""What the words after ``--policy`` and ``--capacity`` mean."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from typing import Any

from tierkv import registry
from tierkv.errors import ConfigError
from tierkv.policy import EvictionPolicy
from tierkv.replay.traces import Trace

POLICY, CAPACITY = "--policy", "--capacity"
_PARTS = ("on_insert", "on_hit", "on_remove", "victims", "counters")
_HOW = "give a share of the trace's different blocks, such as 5%, or a number of blocks, such as 20000"


@dataclass(frozen=True)
class Capacity:
    """How large a tier is, as it was asked for: a share of a trace's different blocks, or a number of blocks."""

    text: str
    percent: float | None
    count: int | None

    def blocks(self, trace: Trace) -> int:
        """At least one."""
        if self.percent is None:
            assert self.count is not None
            return self.count
        return max(1, int(trace.blocks * self.percent / 100))


def capacities(text: str) -> list[Capacity]:
    """Of ``1%,5%,20000``. Raises ``ConfigError``."""
    return [_capacity(word) for word in _words(text, CAPACITY, _HOW)]


def _capacity(word: str) -> Capacity:
    try:
        if not word.endswith("%"):
            count = int(word)
            if count > 0:
                return Capacity(word, None, count)
        else:
            percent = float(word[:-1])
            if 0 < percent <= 100:
                return Capacity(f"{percent:g}%", percent, None)
    except ValueError:
        pass
    raise ConfigError(CAPACITY, word, f"{_HOW}; a share is above 0 and up to 100%")


def policies(text: str) -> dict[str, Callable[[], EvictionPolicy]]:
    """Of ``lru,my_module:MyPolicy``: by name how one is made. A class that is no plug-in yet is named with its module.
    Raises ``ConfigError``."""
    how = f"there are {', '.join(registry.names('eviction'))}"
    return {word: _checked(word) for word in _words(text, POLICY, how)}


def _checked(word: str) -> Callable[[], EvictionPolicy]:
    make: Callable[..., Any] = _class(word) if ":" in word else registry.load("eviction", word, POLICY)
    try:
        made = make()
    except TypeError as error:
        raise ConfigError(
            POLICY, word, f"it cannot be made: {error}; a policy is made without arguments"
        ) from error
    lacking = [part for part in _PARTS if not callable(getattr(made, part, None))]
    if lacking:
        raise ConfigError(
            POLICY,
            word,
            f"it is no eviction policy, since it has no {', '.join(lacking)}; see docs/policies.md",
        )
    return make


def _class(word: str) -> Callable[..., Any]:
    module, _, attribute = word.partition(":")
    try:
        found: Any = getattr(import_module(module), attribute)
    except (ImportError, ValueError) as error:
        hint = f"{error}; a module in this folder is found with PYTHONPATH=. before the command"
        raise ConfigError(POLICY, word, hint) from error
    except AttributeError as error:
        raise ConfigError(POLICY, word, f"{error}; name it module:Class") from error
    if not callable(found):
        raise ConfigError(POLICY, word, f"{attribute} is no class; name it module:Class")
    made: Callable[..., Any] = found
    return made


def _words(text: str, key: str, how: str) -> list[str]:
    words = [word.strip() for word in text.split(",")]
    if not all(words):
        raise ConfigError(key, text, f"a word is empty; {how}")
    return list(dict.fromkeys(words))
