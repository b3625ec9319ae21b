"""Walking from leaf to leaf in the order of several queues, without changing anything.

A queue is a heap of segments by their last use, of which some are leaves no more (or have changed their kind); such
entries are passed over. What the walk has given away counts as gone, so that a parent whose last child was given comes
next in its own queue.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from heapq import heapify, heappop, heappush
from itertools import count

from tierkv.ids import FamilyId
from tierkv.policies.segments import NONE, Segment, Segments

Entry = tuple[int, int, int, Segment]
"""(last use, minus order, serial number, segment): the least recently used first, of one use the tail first."""

_EXTRA = -1
_FEW = 64


class LeafQueues:
    """A queue for each kind of segment. Memory: 100 bytes for each leaf, and as much for some that are none."""

    def __init__(self, segments: Segments, kinds: int) -> None:
        self.segments = segments
        self.queues: list[list[Entry]] = [[] for _ in range(kinds)]
        self._most = [_FEW] * kinds
        """So many entries there may be before a queue is cleaned."""
        self._serials = count()

    def push(self, segment: Segment) -> None:
        """Puts a segment into the queue of its kind, if it is a leaf and not there."""
        if segment.queued != segment.order and segment.ids and self.segments.is_leaf(segment):
            segment.queued = segment.order
            kind = segment.kind
            heappush(self.queues[kind], (segment.last, -segment.order, next(self._serials), segment))
            if len(self.queues[kind]) > self._most[kind]:
                self._clean(kind)

    def is_valid(self, entry: Entry, kind: int) -> bool:
        """True for a segment that is still what it was when it was queued, and a leaf."""
        segment = entry[3]
        return (
            segment.order == -entry[1]
            and segment.kind == kind
            and bool(segment.ids)
            and segment.ids[-1] not in self.segments.hanging
        )

    def settle(self) -> None:
        """Drops what is not valid from the top of each queue."""
        for kind, queue in enumerate(self.queues):
            while queue and not self.is_valid(queue[0], kind):
                _dropped(heappop(queue))

    def _clean(self, kind: int) -> None:
        valid = []
        for entry in self.queues[kind]:
            if self.is_valid(entry, kind):
                valid.append(entry)
            else:
                _dropped(entry)
        heapify(valid)
        self.queues[kind] = valid
        self._most[kind] = 2 * len(valid) + _FEW


def _dropped(entry: Entry) -> None:
    segment = entry[3]
    if segment.queued == -entry[1]:
        segment.queued = NONE


class LeafWalk:
    """One walk. ``worth(kind, last)`` says what a place is worth to a block of that kind and last use; ``clearly``: how
    much less it must be than that of the least recently used leaf."""

    def __init__(
        self,
        leaves: LeafQueues,
        worth: Callable[[int, int], float],
        clearly: float,
    ) -> None:
        self._leaves = leaves
        self._segments, self._queues = leaves.segments, leaves.queues
        self._worth = worth
        self._clearly = clearly
        self._fronts: dict[int, list[tuple[int, int, int, int]]] = {}
        """By kind: (last use, minus order, serial, place in the queue or ``_EXTRA``), a heap over the heap."""
        self._extra: dict[int, Segment] = {}
        """By serial number: segments that are leaves only in this walk."""
        self._last_extra = 0
        self._gone: dict[int, int] = {}
        """By id: children that were given away."""
        self._ends: dict[Segment, int] = {}
        """Of segments whose blocks were given away down to one with other children: where that one ends."""
        for kind, queue in enumerate(leaves.queues):
            if queue:
                last, order, serial, _ = queue[0]
                self._fronts[kind] = [(last, order, serial, 0)]

    def next(self) -> Segment | None:
        """The leaf that should leave first, and takes it out of the walk."""
        best = oldest = NONE
        best_worth = oldest_worth = 0.0
        best_last = oldest_last = 0
        for kind in list(self._fronts):
            front = self._settled(kind)
            if not front:
                continue
            last = front[0][0]
            worth = self._worth(kind, last)
            if best == NONE or worth < best_worth or (worth == best_worth and last < best_last):
                best, best_worth, best_last = kind, worth, last
            if oldest == NONE or last < oldest_last:
                oldest, oldest_worth, oldest_last = kind, worth, last
        if best == NONE:
            return None
        if best_worth > self._clearly * oldest_worth:
            best = oldest
        return self._take(best)

    def _settled(self, kind: int) -> list[tuple[int, int, int, int]]:
        """The front of a queue, with an entry that is valid at its top, or empty."""
        front, queue = self._fronts[kind], self._queues[kind]
        while front:
            place = front[0][3]
            if place == _EXTRA or self._leaves.is_valid(queue[place], kind):
                return front
            self._step(front, queue)
        del self._fronts[kind]
        return front

    def _step(self, front: list[tuple[int, int, int, int]], queue: list[Entry]) -> int:
        """Takes the top of the front off; those below it in the queue come in its place. Returns its place."""
        place = heappop(front)[3]
        if place != _EXTRA:
            for below in (2 * place + 1, 2 * place + 2):
                if below < len(queue):
                    last, order, serial, _ = queue[below]
                    heappush(front, (last, order, serial, below))
        return place

    def _take(self, kind: int) -> Segment:
        front, queue = self._fronts[kind], self._queues[kind]
        serial = front[0][2]
        place = self._step(front, queue)
        return self._extra.pop(serial) if place == _EXTRA else queue[place][3]

    def given_up(self, segment: Segment, place: int) -> None:
        """All blocks of a segment down to ``place`` count as gone; with 0 its parent may be a leaf now."""
        if place or segment.up == NONE:
            return
        gone = self._gone.get(segment.up, 0) + 1
        self._gone[segment.up] = gone
        if gone == len(self._segments.hanging[segment.up]):
            above = self._segments.of[segment.up]
            assert above is not None
            if self.left_of(above)[-1] == segment.up:
                self._last_extra -= 1
                serial = self._last_extra
                self._extra[serial] = above
                front = self._fronts.setdefault(above.kind, [])
                heappush(front, (above.last, -above.order, serial, _EXTRA))

    def stops_at(self, ident: int) -> bool:
        """True when something hangs from the block that was not given away."""
        children = self._segments.hanging.get(ident)
        return children is not None and self._gone.get(ident, 0) < len(children)

    def stopped(self, segment: Segment, end: int) -> None:
        """The blocks of a segment from place ``end`` on count as gone; the one before waits for its other children."""
        self._ends[segment] = end

    def left_of(self, segment: Segment) -> list[int]:
        """The blocks of a segment that were not given away, as far as the walk was told."""
        return segment.ids[: self._ends[segment]] if segment in self._ends else segment.ids


def offer(
    walk: LeafWalk, segments: Segments, looks: int, evictable: Callable[[FamilyId], bool]
) -> Iterator[FamilyId]:
    """Asks about leaves in the order of the walk, each segment from its end on, and yields those that may leave, after
    at most so many questions. One that may not leave keeps the blocks before it, so these come last of all."""
    refused: list[tuple[Segment, list[int]]] = []
    asked: set[int] = set()
    while looks and (segment := walk.next()) is not None:
        left = walk.left_of(segment)
        ids = left[-looks:]
        before = len(left) - len(ids)
        for place in range(len(ids) - 1, -1, -1):
            ident = ids[place]
            if ident in asked:
                break
            if place < len(ids) - 1 and walk.stops_at(ident):
                walk.stopped(segment, before + place + 1)
                break
            asked.add(ident)
            looks -= 1
            family = FamilyId(ident)
            if not evictable(family):
                refused.append((segment, ids[:place]))
                break
            yield family
            if not looks:
                return
        else:
            walk.given_up(segment, before)
    for segment, ids in refused:
        up: Segment | None = segment
        while up is not None and looks:
            for ident in reversed(ids):
                if not looks or ident in asked:
                    break
                asked.add(ident)
                looks -= 1
                if evictable(FamilyId(ident)):
                    yield FamilyId(ident)
            above = up.up
            up = segments.get(above) if above != NONE else None
            if up is not None:
                ids = up.ids[: up.ids.index(above) + 1] if above in up.ids else []
