"""How namespaces, chains, retentions and results are said in messages, and understood again.

What a peer says is checked here: a wrong type or length is a ``WireError`` that names it, never an exception from deep
inside. What the values mean (an impossible layout, an unknown tier) is judged by the types themselves.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any, TypeVar

from tierkv.daemon.wire import WireError
from tierkv.events import Event
from tierkv.ids import HASH_BYTES, BlockHash, NamespaceDigest
from tierkv.intake import Stored
from tierkv.keys import Chain, Namespace, NamespaceSpec, Weights
from tierkv.layout import GroupKind, LayerGroup, Layout, Segment
from tierkv.retention import KEEP, Retention

T = TypeVar("T")
Words = Mapping[str, Any]

MOST_NAME = 100
MOST_BLOCKS = 262_144
"""Blocks of one call."""


def take(words: Words, name: str, kind: type[T]) -> T:
    """An argument that must be there."""
    value = words.get(name)
    if not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
        raise WireError(f"{name} = {value!r}: {kind.__name__} expected")
    return value


def take_if(words: Words, name: str, kind: type[T], otherwise: T) -> T:
    """An argument that may be left out."""
    return otherwise if words.get(name) is None else take(words, name, kind)


def name_of(text: str) -> str:
    """A name for people that a peer chose: short, and nothing in it that a log or a terminal would obey."""
    return "".join([sign if sign.isprintable() else "?" for sign in text[:MOST_NAME]])


_MOST_S = 1e8
"""Three years: more than that is for ever."""


def say_seconds(timeout_s: float) -> float:
    """A time as a message takes it: callers may give any, also less than none and infinity."""
    return min(max(0.0, timeout_s), _MOST_S)


def seconds(words: Words, name: str) -> float | None:
    """A number of seconds, or nothing."""
    value = words.get(name)
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < 1e9:
        raise WireError(f"{name} = {value!r}: seconds expected")
    return float(value)


def ints(words: Words, name: str) -> list[int]:
    """A list of small integers; empty when it is left out."""
    values = take_if(words, name, list, [])
    if not all(isinstance(value, int) for value in values):
        raise WireError(f"{name} = {values!r}: a list of integers expected")
    return values


# -- namespaces and chains ----------------------------------------------------------------------------------------


def say_spec(spec: NamespaceSpec) -> dict[str, Any]:
    words = asdict(spec)
    for group in words["layout"]["groups"]:
        group["kind"] = group["kind"].value
    return words


def hear_spec(words: Words) -> NamespaceSpec:
    """Raises ``WireError`` for a wrong shape, ``LayoutError`` and ``IdentityError`` for what it says."""
    layout = dict(take(words, "layout", dict))
    groups = take(layout, "groups", list)
    kinds = [kind.value for kind in GroupKind]
    if not all(isinstance(group, dict) and group.get("kind") in kinds for group in groups):
        raise WireError(f"this is no namespace: each layer group is of a kind, {', '.join(kinds)}")
    try:
        layout["groups"] = tuple(
            LayerGroup(
                **{
                    **group,
                    "kind": GroupKind(group.get("kind")),
                    "inside": tuple(Segment(**segment) for segment in group.get("inside", ())),
                }
            )
            for group in groups
        )
        rest = {name: value for name, value in words.items() if name not in ("layout", "weights")}
        return NamespaceSpec(weights=Weights(**take(words, "weights", dict)), layout=Layout(**layout), **rest)
    except (TypeError, AttributeError) as error:
        raise WireError(f"this is no namespace: {error}") from error


def say_chain(chain: Chain) -> dict[str, Any]:
    return {
        "namespace": chain.namespace.digest,
        "hashes": chain.joined[: MOST_BLOCKS * HASH_BYTES],
        "tokens": chain.num_tokens,
    }


def hear_digest(words: Words) -> NamespaceDigest:
    digest = take(words, "namespace", bytes)
    if len(digest) != 32:
        raise WireError(f"a namespace digest of {len(digest)} bytes; it has 32")
    return NamespaceDigest(digest)


def hear_chain(words: Words, namespace: Namespace) -> Chain:
    blob = take(words, "hashes", bytes)
    count, rest = divmod(len(blob), HASH_BYTES)
    if rest or count > MOST_BLOCKS:
        raise WireError(f"hashes of {len(blob)} bytes: at most {MOST_BLOCKS} of {HASH_BYTES} expected")
    hashes = tuple([BlockHash(blob[start : start + HASH_BYTES]) for start in range(0, len(blob), HASH_BYTES)])
    return Chain(namespace, hashes, take(words, "tokens", int))


def say_retention(retention: Retention) -> dict[str, Any] | None:
    return None if retention == KEEP else asdict(retention)


def hear_retention(words: Words) -> Retention:
    said = take_if(words, "retention", dict, {})
    try:
        return Retention(**said) if said else KEEP
    except TypeError as error:
        raise WireError(f"retention = {said!r}: {error}") from error


# -- results ------------------------------------------------------------------------------------------------------


def say_stored(stored: Stored) -> dict[str, Any]:
    return {
        "stored": stored.stored,
        "resident": stored.resident,
        "dropped": stored.dropped,
        "kept_beyond": stored.kept_beyond,
    }


def hear_stored(words: Words, into: Stored) -> Stored:
    """Adds what was said, all of it or nothing. Raises ``WireError``."""
    stored, resident, kept_beyond = (take(words, name, int) for name in ("stored", "resident", "kept_beyond"))
    dropped = take(words, "dropped", dict)
    counts = {reason: take(dropped, reason, int) for reason in dropped}
    into.stored += stored
    into.resident += resident
    into.kept_beyond += kept_beyond
    for reason, count in counts.items():
        into.drop(reason, count)
    return into


def say_event(event: Event) -> Sequence[Any]:
    return tuple(event)


def hear_event(words: Sequence[Any]) -> Event:
    return Event(*words)
