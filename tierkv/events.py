"""What happened, for people and schedulers: one event for each change that others can notice.

A block is an event only as a whole family: ``stored`` when its last part makes it usable, ``removed`` when it can no
longer be had from any tier. Between them ``arrived`` and ``left`` say in which tier a copy is. The log is a ring: a
reader that is too slow sees a gap in the sequence numbers, never a stall.
"""

from __future__ import annotations

import threading
from collections import deque
from typing import Literal, NamedTuple

from tierkv.ids import BlockHash, NamespaceDigest

Kind = Literal["stored", "removed", "arrived", "left", "cleared"]


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


_Raw = tuple[int, float, Kind, NamespaceDigest, BlockHash | None, BlockHash | None, str | None, str | None]


class EventLog:
    """A bounded ring of events. ``append`` is called under the catalog's lock; readers only take the log's own."""

    def __init__(self, capacity: int = 65_536) -> None:
        self._ring: deque[_Raw] = deque(maxlen=capacity)
        self._changed = threading.Condition()
        self._last = 0
        self._waiting = 0

    def append(
        self,
        at_s: float,
        kind: Kind,
        namespace: NamespaceDigest,
        block_hash: BlockHash | None,
        parent_hash: BlockHash | None = None,
        tier: str | None = None,
        reason: str | None = None,
    ) -> None:
        self._last += 1
        # A plain tuple: an event is made of it only when somebody reads.
        self._ring.append((self._last, at_s, kind, namespace, block_hash, parent_hash, tier, reason))
        if self._waiting:
            with self._changed:
                self._changed.notify_all()

    @property
    def last(self) -> int:
        """The sequence number of the newest event."""
        return self._last

    def since(self, seq: int, limit: int = 10_000) -> list[Event]:
        """Up to ``limit`` events after ``seq``, oldest first."""
        found: list[Event] = []
        missing = self._last - seq
        if missing <= 0:
            return found
        ring = self._ring
        for raw in _snapshot(ring)[-missing:]:
            if raw[0] > seq:
                found.append(Event._make(raw))
                if len(found) == limit:
                    break
        return found

    def wait(self, seq: int, timeout_s: float) -> list[Event]:
        """Like ``since``, but waits up to ``timeout_s`` for the first one."""
        with self._changed:
            self._waiting += 1
            try:
                self._changed.wait_for(lambda: self._last > seq, timeout_s)
            finally:
                self._waiting -= 1
        return self.since(seq)


def _snapshot(ring: deque[_Raw]) -> list[_Raw]:
    while True:
        try:
            return list(ring)
        except RuntimeError:  # it changed meanwhile; the copy takes microseconds, the next one will do
            continue
