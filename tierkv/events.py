"""What happened, for people and schedulers: one event for each change that others can notice.

A block is an event only as a whole family: ``stored`` when its last part makes it usable, ``removed`` when it can no
longer be had from any tier. Between them ``arrived`` and ``left`` say in which tier a copy is. The log is a ring: a
reader that is too slow sees a gap in the sequence numbers, never a stall.
"""

from __future__ import annotations

import threading
from bisect import bisect_right
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Literal, NamedTuple

from tierkv.ids import BlockHash, NamespaceDigest

Kind = Literal["stored", "removed", "arrived", "left", "cleared"]

_OF_A_TIER = ("arrived", "left")
_WITH_A_REASON = ("left", "removed")

MOST_EVENTS = 16_384
"""So many moments are kept, in some 5 MiB: a listener that looks ten times a second has never missed any."""


class Event(NamedTuple):
    """One change. ``seq`` counts from 1 without gaps as long as none was lost to a slow reader."""

    seq: int
    at_s: float
    kind: Kind
    namespace: NamespaceDigest
    block_hash: BlockHash | None
    parent_hash: BlockHash | None
    tier: str | None
    reason: str | None


_Raw = tuple[
    int,
    float,
    tuple[Kind, ...],
    NamespaceDigest,
    Sequence[BlockHash | None],
    Sequence[BlockHash | None],
    str | None,
    str | None,
]
"""What happened to some blocks at one moment: to each one event or several, the first of all with this number."""


BlockName = tuple[NamespaceDigest, BlockHash]


class EventLog:
    """A bounded ring of events. ``append`` is called under the catalog's lock; readers only take the log's own."""

    def __init__(self, capacity: int = MOST_EVENTS) -> None:
        self._capacity = capacity
        self._ring: deque[_Raw] = deque()
        self._kept = 0
        """Blocks in the ring: at least the last ``capacity``, and at most one run more."""
        self._changed = threading.Condition()
        self._last = 0
        self._counts: dict[tuple[tuple[Kind, ...], str | None, str | None], list[int]] = {}
        """By what happened: so often, in a list of one that stays the same."""
        self._waiting = 0
        self._closed = False
        self.awaited: Mapping[BlockName, object] = {}
        """Blocks whose ``stored`` somebody waits for."""
        self.on_awaited: Callable[[BlockName], None] = lambda name: None
        """Told, under the catalog's lock, that one of them is usable."""

    def append(
        self,
        at_s: float,
        kinds: tuple[Kind, ...],
        namespace: NamespaceDigest,
        block_hash: BlockHash | None,
        parent_hash: BlockHash | None = None,
        tier: str | None = None,
        reason: str | None = None,
    ) -> None:
        """Several ``kinds`` are as many events, in this order. Each says of ``tier`` and ``reason`` what it can."""
        self.append_run(at_s, kinds, namespace, (block_hash,), (parent_hash,), tier, reason)

    def append_run(
        self,
        at_s: float,
        kinds: tuple[Kind, ...],
        namespace: NamespaceDigest,
        hashes: Sequence[BlockHash | None],
        parents: Sequence[BlockHash | None],
        tier: str | None = None,
        reason: str | None = None,
    ) -> None:
        """The same happened to several blocks of one namespace, in this order. The log keeps the two sequences."""
        # A plain tuple: events are made of it only when somebody reads.
        ring, count = self._ring, len(hashes)
        counted = self._counts.get((kinds, tier, reason))
        if counted is None:
            counted = self._counts[kinds, tier, reason] = [0]
        counted[0] += count
        last = self._last
        ring.append((last + 1, at_s, kinds, namespace, hashes, parents, tier, reason))
        self._last = last + count * len(kinds)
        spare = self._kept + count - self._capacity
        while spare >= (oldest := len(ring[0][4])):
            ring.popleft()
            spare -= oldest
        self._kept = spare + self._capacity
        if self._waiting:
            with self._changed:
                self._changed.notify_all()
        if self.awaited and kinds[-1] == "stored":
            for block_hash in hashes:
                name = (namespace, block_hash)
                if name in self.awaited:
                    self.on_awaited(name)  # type: ignore[arg-type]

    def counts(self) -> dict[tuple[Kind, str | None, str | None], int]:
        """How many events there were so far, by kind, tier and reason: also of those that the ring has forgotten."""
        counts: dict[tuple[Kind, str | None, str | None], int] = {}
        for (kinds, tier, reason), counted in self._counts.copy().items():
            for kind in kinds:
                name = (kind, *_said_of(kind, tier, reason))
                counts[name] = counts.get(name, 0) + counted[0]
        return counts

    @property
    def last(self) -> int:
        """The sequence number of the newest event."""
        return self._last

    def since(self, seq: int, limit: int = 10_000) -> list[Event]:
        """Up to ``limit`` events after ``seq``, oldest first."""
        found: list[Event] = []
        if self._last <= seq:
            return found
        ring = _snapshot(self._ring)
        first = bisect_right(ring, seq, key=_number_of)
        for raw in ring[max(0, first - 1) :]:
            found += (event for event in _events_of(raw) if event.seq > seq)
            if len(found) >= limit:
                break
        return found[:limit]

    def wait(self, seq: int, timeout_s: float) -> list[Event]:
        """Like ``since``, but waits up to ``timeout_s`` for the first one, or until the log is closed."""
        with self._changed:
            self._waiting += 1
            try:
                self._changed.wait_for(lambda: self._last > seq or self._closed, timeout_s)
            finally:
                self._waiting -= 1
        return self.since(seq)

    def close(self) -> None:
        """Nobody waits any longer."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()


def _events_of(raw: _Raw) -> Iterator[Event]:
    seq, at_s, kinds, namespace, hashes, parents, tier, reason = raw
    for block_hash, parent_hash in zip(hashes, parents, strict=True):
        for kind in kinds:
            yield Event(seq, at_s, kind, namespace, block_hash, parent_hash, *_said_of(kind, tier, reason))
            seq += 1


def _said_of(kind: Kind, tier: str | None, reason: str | None) -> tuple[str | None, str | None]:
    return tier if kind in _OF_A_TIER else None, reason if kind in _WITH_A_REASON else None


def _number_of(raw: _Raw) -> int:
    return raw[0]


def _snapshot(ring: deque[_Raw]) -> list[_Raw]:
    while True:
        try:
            return list(ring)
        except RuntimeError:  # it changed meanwhile; the copy takes microseconds, the next one will do
            continue
