"""What is given to a verb is looked at before anything is done: an ``ArgumentError`` names the argument, the value and
what it should be, instead of a Python error from somewhere inside after half of the work.

Arguments are told by their names: ``timeout_s`` is a time wherever it stands. A call costs well under a microsecond
more.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from functools import wraps
from inspect import isfunction, signature
from typing import Any, NamedTuple, TypeVar

import numpy as np

from tierkv.copier import PagedKV
from tierkv.errors import ArgumentError
from tierkv.handles import Lease, Sealed
from tierkv.intake import Stored
from tierkv.keys import Chain, Namespace, NamespaceSpec
from tierkv.namespaces import OpenNamespace
from tierkv.retention import Retention

Verbs = TypeVar("Verbs", bound=type)


class Kind(NamedTuple):
    """What an argument may be."""

    fits: Callable[[Any], bool]
    words: str
    usual: type | None = None
    """What it nearly always is, and then fits: spares the hot verbs the question."""


def _of(*classes: type) -> Callable[[Any], bool]:
    return lambda value: isinstance(value, classes)


def _is_number(value: object) -> bool:
    return isinstance(value, float | int | np.floating | np.integer) and not isinstance(value, bool)


def _is_time(value: Any) -> bool:
    if not _is_number(value):
        return False
    try:
        return not math.isnan(value)
    except OverflowError:  # an integer of hundreds of digits
        return False


def _is_integer(value: object) -> bool:
    return isinstance(value, int | np.integer) and not isinstance(value, bool)


def _is_list(value: object) -> bool:
    return isinstance(value, Sequence | np.ndarray) and not isinstance(
        value, str | bytes | bytearray | memoryview
    )


def _are_integers(value: Any) -> bool:
    if type(value) in (list, tuple) and not value:
        return True
    return isinstance(value, Sequence | set | frozenset | range | np.ndarray) and all(map(_is_integer, value))


_TIME = Kind(_is_time, "seconds, as a number")
_COUNT = Kind(lambda value: _is_integer(value) and value >= 0, "an integer, at least 0")
_INTEGER = Kind(_is_integer, "an integer", int)
_WORD = Kind(_of(str), "a string", str)
_NAMESPACE = Kind(_of(Namespace, OpenNamespace), "what open_namespace gave")
_GROUPS = Kind(_are_integers, "a list of integers")
_CALL = Kind(callable, "a function")

KINDS: Mapping[str, Kind] = {
    "absent": _GROUPS,
    "after": _COUNT,
    "chain": Kind(_of(Chain), "a chain, made by the chain() of a namespace that was opened", Chain),
    "count": _INTEGER,
    "first": _INTEGER,
    "grace_s": _TIME,
    "hashes": Kind(_is_list, "a list of block hashes"),
    "keep": Kind(_of(bool), "True or False"),
    "kv": Kind(_of(PagedKV), "a PagedKV"),
    "lease": Kind(_of(Lease), "a lease, as load gives it"),
    "local_computed": _COUNT,
    "namespace": _NAMESPACE,
    "on_layer": _CALL,
    "owner": _WORD,
    "pages": Kind(_is_list, "a list with the pages of each block"),
    "payloads": Kind(_is_list, "a list with the bytes of each block", list),
    "rank": _INTEGER,
    "ranks": _GROUPS,
    "ready": Kind(lambda value: hasattr(value, "synchronize"), "an event with a method synchronize()"),
    "result": Kind(_of(Stored), "a Stored", Stored),
    "retention": Kind(_of(Retention), "a Retention", Retention),
    "sealed": Kind(_of(Sealed), "sealed blocks, as Draft.seal gives them"),
    "seconds": _TIME,
    "skip": _COUNT,
    "spec": Kind(_of(NamespaceSpec), "a NamespaceSpec"),
    "tenant_salt": _WORD,
    "tier": Kind(_of(str), "a tier's name"),
    "timeout_s": _TIME,
    "tokens": _COUNT,
    "ttl_s": _TIME,
}
"""By the argument's name. Where ``None`` is the default it may be given too. Whether an integer is too large or
negative is left to those who know the bounds."""


def checked(verbs: Verbs) -> Verbs:
    """Decorates a class: in each public method an argument whose name is in ``KINDS`` must be of that kind, else it
    raises ``ArgumentError``."""
    for name, verb in list(vars(verbs).items()):
        if isfunction(verb) and not name.startswith("_"):
            setattr(verbs, name, _checked(verb))
    return verbs


def _checked(verb: Callable[..., Any]) -> Callable[..., Any]:
    parameters = list(signature(verb).parameters.values())[1:]
    kinds = {one.name: KINDS[one.name] for one in parameters if one.name in KINDS}
    if not kinds:
        return verb
    optional = {one.name for one in parameters if one.default is None}
    usual_of = {name: kind.usual for name, kind in kinds.items() if kind.usual is not None}
    by_place = [
        (one.name, usual_of.get(one.name)) for one in parameters if one.kind is one.POSITIONAL_OR_KEYWORD
    ]

    def look(name: str, value: object) -> None:
        if name in kinds and not (value is None and name in optional) and not kinds[name].fits(value):
            raise ArgumentError(verb.__name__, name, value, kinds[name].words)

    first_usual = by_place[0][1] if by_place else None

    @wraps(verb)
    def call(self: object, *arguments: Any, **named: Any) -> Any:
        if len(arguments) == 1 and not named and type(arguments[0]) is first_usual:
            return verb(self, arguments[0])
        for (name, usual), value in zip(by_place, arguments):  # noqa: B905 - Python itself complains about too many
            if type(value) is not usual:
                look(name, value)
        for name, value in named.items():
            if type(value) is not usual_of.get(name):
                look(name, value)
        return verb(self, *arguments, **named)

    return call
