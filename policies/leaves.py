"""Walking from leaf to leaf in the order of several queues, without changing anything.

A queue is a heap of segments by their last use. A segment stands in the queue of its kind once. When it is used again
it keeps its entry there, which says then when it was used at the earliest, and is put right when it comes up; some are
leaves no more (or have changed their kind), and are passed over. What the walk has given away counts as gone, so that a
parent whose last child was given comes next in its own queue.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from heapq import heapify, heappop, heappush, heapreplace
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
        kind = segment.kind
        if segment.queue == kind and (segment.queued_last < segment.last or segment.queued == segment.order):
            return
        if segment.ids and segment.ids[-1] not in self.segments.hanging:
            heappush(self.queues[kind], self._entry_of(segment))
            if len(self.queues[kind]) > self._most[kind]:
                self._clean(kind)

    def _entry_of(self, segment: Segment) -> Entry:
        segment.queue, segment.queued, segment.queued_last = segment.kind, segment.order, segment.last
        return segment.last, -segment.order, next(self._serials), segment

    def stands_for(self, entry: Entry, kind: int) -> bool:
        """True when the segment stands in this queue by this entry, and is a leaf."""
        segment = entry[3]
        return (
            segment.queued == -entry[1]
            and segment.queue == kind == segment.kind
            and bool(segment.ids)
            and segment.ids[-1] not in self.segments.hanging
        )

    def settle(self) -> None:
        """Puts the top of each queue right, and drops what is not valid there."""
        for kind, queue in enumerate(self.queues):
            while queue:
                entry = queue[0]
                if not self.stands_for(entry, kind):
                    _dropped(heappop(queue))
                elif entry[3].order == -entry[1]:
                    break
                else:
                    heapreplace(queue, self._entry_of(entry[3]))

    def _clean(self, kind: int) -> None:
        valid = []
        for entry in self.queues[kind]:
            if self.stands_for(entry, kind):
                valid.append(self._entry_of(entry[3]))
            else:
                _dropped(entry)
        heapify(valid)
        self.queues[kind] = valid
        self._most[kind] = 2 * len(valid) + _FEW


def _dropped(entry: Entry) -> None:
    segment = entry[3]
    if segment.queued == -entry[1]:
        segment.queue = segment.queued = NONE


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
        self._ranks: dict[int, tuple[float, int]] = {}
        """By kind: worth and last use of what is at the top of its front, as long as that is known."""
        self._extra: dict[int, Segment] = {}
        """By serial number: segments that are leaves only in this walk, or stand too early in their queue."""
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
            rank = self._ranks.get(kind) or self._ranked(kind)
            if rank is None:
                continue
            worth, last = rank
            if best == NONE or worth < best_worth or (worth == best_worth and last < best_last):
                best, best_worth, best_last = kind, worth, last
            if oldest == NONE or last < oldest_last:
                oldest, oldest_worth, oldest_last = kind, worth, last
        if best == NONE:
            return None
        if best_worth > self._clearly * oldest_worth:
            best = oldest
        return self._take(best)

    def _ranked(self, kind: int) -> tuple[float, int] | None:
        front = self._settled(kind)
        if not front:
            return None
        last = front[0][0]
        rank = self._ranks[kind] = self._worth(kind, last), last
        return rank

    def _settled(self, kind: int) -> list[tuple[int, int, int, int]]:
        """The front of a queue, with an entry that is valid at its top, or empty."""
        front, queue = self._fronts[kind], self._queues[kind]
        while front:
            place = front[0][3]
            if place == _EXTRA:
                return front
            entry = queue[place]
            if self._leaves.stands_for(entry, kind):
                segment = entry[3]
                if segment.order == -entry[1]:
                    return front
                self._add_extra(front, segment)  # used since it was put there: its turn comes later
            self._step(front, queue)
        del self._fronts[kind]
        return front

    def _add_extra(self, front: list[tuple[int, int, int, int]], segment: Segment) -> None:
        self._last_extra -= 1
        self._extra[self._last_extra] = segment
        heappush(front, (segment.last, -segment.order, self._last_extra, _EXTRA))

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
        del self._ranks[kind]
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
                self._add_extra(self._fronts.setdefault(above.kind, []), above)
                self._ranks.pop(above.kind, None)

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
