"""Policies by the words of the command line: built-in ones, plug-ins, and ``module:Class`` for one that is no plug-in.

Those of third parties are held to the protocol (``tierkv.replay.held``)."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from importlib import import_module
from typing import Any, Literal

from tierkv import registry
from tierkv.clock import Clock
from tierkv.errors import ConfigError
from tierkv.policy import AdmissionPolicy, EvictionPolicy, PromotionPolicy
from tierkv.replay.asked import words_of
from tierkv.replay.held import HeldAdmission, HeldEviction, HeldPromotion
from tierkv.supervision import Caught

POLICY, ADMISSION, PROMOTION = "--policy", "--admission", "--promotion"

Kind = Literal["eviction", "admission", "promotion"]
AdmissionMaker = Callable[[Clock], AdmissionPolicy]
"""Given the time of the trace."""

_METHODS: dict[Kind, tuple[str, ...]] = {
    "eviction": ("on_insert", "on_hit", "on_remove", "victims", "counters"),
    "admission": ("admit", "counters"),
    "promotion": ("decide", "counters"),
}


def evictions(text: str) -> dict[str, Callable[[], EvictionPolicy]]:
    """Of ``lru,my_module:MyPolicy``: by name how one is made. Raises ``ConfigError``."""
    return {word: _eviction(word) for word in _words("eviction", POLICY, text)}


def admissions(text: str) -> dict[str, AdmissionMaker]:
    """Of ``always,seen_twice``: the same. Raises ``ConfigError``."""
    return {word: _admission(word) for word in _words("admission", ADMISSION, text)}


def promotion(word: str) -> Callable[[], PromotionPolicy]:
    """How the one of that name is made. Raises ``ConfigError``."""
    make, is_own = _found("promotion", PROMOTION, word)
    return (lambda: HeldPromotion(make(), PROMOTION, word)) if is_own else make


def _eviction(word: str) -> Callable[[], EvictionPolicy]:
    make, is_own = _found("eviction", POLICY, word)
    return (lambda: HeldEviction(make(), POLICY, word)) if is_own else make


def _admission(word: str) -> AdmissionMaker:
    make, is_own = _found("admission", ADMISSION, word)
    timed = "clock" in inspect.signature(make).parameters

    def made(clock: Clock) -> AdmissionPolicy:
        policy: AdmissionPolicy = make(clock=clock) if timed else make()
        return HeldAdmission(policy, ADMISSION, word) if is_own else policy

    return made


def _words(kind: Kind, option: str, text: str) -> list[str]:
    return words_of(text, option, f"there are {', '.join(registry.names(kind))}")


def _found(kind: Kind, option: str, word: str) -> tuple[Callable[..., Any], bool]:
    """The class, and whether a third party wrote it. It has been tried: it can be made and has all methods."""
    if ":" in word:
        make, is_own = _class(option, word), True
    else:
        plugin = registry.find(kind, word, option)
        make, is_own = plugin.load(option), plugin.package != registry.BUILT_IN
    caught = Caught()
    made: Any = None
    with caught:
        made = make()
    if caught.error is not None:
        hint = f"it cannot be made: {_said(caught.error)}; a policy is made without arguments"
        raise ConfigError(option, word, hint) from caught.error
    lacking = [name for name in _METHODS[kind] if not callable(getattr(made, name, None))]
    if lacking:
        raise ConfigError(
            option,
            word,
            f"it is no {kind} policy, since it has no {', '.join(lacking)}; see docs/policies.md",
        )
    return make, is_own


def _class(option: str, word: str) -> Callable[..., Any]:
    module, _, attribute = word.partition(":")
    caught = Caught()
    found: Any = None
    with caught:
        found = getattr(import_module(module), attribute)
    error = caught.error
    if isinstance(error, AttributeError):
        raise ConfigError(option, word, f"{error}; name it module:Class") from error
    if error is not None:
        hint = f"{_said(error)}; a module in this folder is found with PYTHONPATH=. before the command"
        raise ConfigError(option, word, hint) from error
    if not callable(found):
        raise ConfigError(option, word, f"{attribute} is no class; name it module:Class")
    made: Callable[..., Any] = found
    return made


def _said(error: BaseException) -> str:
    return str(error) if isinstance(error, ImportError | ValueError) else f"{type(error).__name__}: {error}"
