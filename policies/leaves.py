"""Walking from leaf to leaf in the order of several queues, without changing anything.

A queue is a heap of segments by their last use. A segment stands in the queue of its kind once. When it is used again
it keeps its entry there, which says then when it was used at the earliest, and is put right when it comes up; some are
leaves no more (or have changed their kind), and are passed over. What the walk has given away counts as gone, so that a
parent whose last child was given comes next in its own queue.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from heapq import heapify, heappop, heappush, heapreplace
from itertools import count

from tierkv.ids import FamilyId
from tierkv.policies.segments import NONE, Segment, Segments

Entry = tuple[int, int, int, Segment]
"""(last use, minus order, serial number, segment): the least recently used first, of one use the tail first."""

_EXTRA = -1
_FEW = 64
_MOST_WRONG = 4096
"""So many entries that stand too early are put right in one go, and a walk passes over so many and no more where it has
found a leaf: after many uses without an eviction the first one shall not stall. It takes the coldest leaf of those that
it has met; a few evictions later the order is right again."""


class LeafQueues:
    """A queue for each kind of segment. Memory: 100 bytes for each leaf, and as much for some that are none."""

    def __init__(self, segments: Segments, kinds: int) -> None:
        self.segments = segments
        self.queues: list[list[Entry]] = [[] for _ in range(kinds)]
        self.passed = [0] * kinds
        """So many entries of a queue the last walk went past until it found no more wrong ones among them."""
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
        """Puts right what comes first in each queue: down to the first entry that is right, and those among which the
        last walk met others. So nothing is passed over by one walk after the other."""
        left = _MOST_WRONG
        for kind, queue in enumerate(self.queues):
            passed, self.passed[kind] = self.passed[kind], 0
            right: list[Entry] = []
            dropped = 0
            while queue:
                entry = queue[0]
                if not self.stands_for(entry, kind):
                    _dropped(heappop(queue))
                    dropped += 1
                    if dropped == _MOST_WRONG:
                        self._clean(kind)
                        queue = self.queues[kind]
                elif entry[3].order != -entry[1]:
                    if not left:
                        break
                    heapreplace(queue, self._entry_of(entry[3]))
                    left -= 1
                elif passed > 0:
                    right.append(heappop(queue))
                else:
                    break
                passed -= 1
            for entry in right:
                heappush(queue, entry)

    def oldest(self) -> int:
        """The last use of the least recently used leaf, once the queues are right; 0 without one."""
        return min([queue[0][0] for queue in self.queues if queue], default=0)

    def _clean(self, kind: int) -> None:
        valid: list[Entry] = []
        wrong: list[Entry] = []
        for entry in self.queues[kind]:
            (valid if self.stands_for(entry, kind) else wrong).append(entry)
        if 3 * len(wrong) > len(valid):
            for entry in wrong:
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
        self._stepped = [0] * len(leaves.queues)
        """By kind: entries that the walk is past."""
        self._wrong = 0
        for kind, queue in enumerate(leaves.queues):
            if queue:
                last, order, serial, _ = queue[0]
                self._fronts[kind] = [(last, order, serial, 0)]

    def next(self) -> Segment | None:
        """The leaf that should leave first, and takes it out of the walk."""
        if len(self._fronts) == 1:  # nothing to compare: what it is worth does not matter
            (kind,) = self._fronts
            return self._take(kind) if self._settled(kind) else None
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
            self._step(kind, front)
            self._leaves.passed[kind] = self._stepped[kind]
            self._wrong += 1
            if self._wrong % _MOST_WRONG == 0:
                self._leave_the_queue(front)
        del self._fronts[kind]
        return front

    def _leave_the_queue(self, front: list[tuple[int, int, int, int]]) -> None:
        """Goes on with what was found, if anything was: the coldest of many."""
        found = [entry for entry in front if entry[3] == _EXTRA]
        if found:
            heapify(found)
            front[:] = found

    def _add_extra(self, front: list[tuple[int, int, int, int]], segment: Segment) -> None:
        self._last_extra -= 1
        self._extra[self._last_extra] = segment
        heappush(front, (segment.last, -segment.order, self._last_extra, _EXTRA))

    def _step(self, kind: int, front: list[tuple[int, int, int, int]]) -> int:
        """Takes the top of the front off; those below it in the queue come in its place. Returns its place."""
        place = heappop(front)[3]
        if place != _EXTRA:
            self._stepped[kind] += 1
            queue = self._queues[kind]
            for below in (2 * place + 1, 2 * place + 2):
                if below < len(queue):
                    last, order, serial, _ = queue[below]
                    heappush(front, (last, order, serial, below))
        return place

    def _take(self, kind: int) -> Segment:
        front = self._fronts[kind]
        self._ranks.pop(kind, None)
        serial = front[0][2]
        place = self._step(kind, front)
        return self._extra.pop(serial) if place == _EXTRA else self._queues[kind][place][3]

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
    walk: LeafWalk,
    segments: Segments,
    looks: int,
    evictable: Callable[[FamilyId], bool],
    asked: dict[int, bool],
) -> Iterator[FamilyId]:
    """Asks about leaves in the order of the walk, each segment from its end on, and yields those that may leave, after
    at most so many questions. One that may not leave keeps the blocks before it, so these come last of all. ``asked``:
    the answers, also those of an earlier walk; nobody is asked about again."""
    refused: list[tuple[Segment, list[int]]] = []
    while looks and (segment := walk.next()) is not None:
        left = walk.left_of(segment)
        ids = left[-looks:]
        before = len(left) - len(ids)
        for place in range(len(ids) - 1, -1, -1):
            ident = ids[place]
            if place < len(ids) - 1 and walk.stops_at(ident):
                walk.stopped(segment, before + place + 1)
                break
            known = asked.get(ident)
            if known is None:
                looks -= 1
                known = asked[ident] = evictable(FamilyId(ident))
                if known:
                    yield FamilyId(ident)
                    if not looks:
                        return
            if not known:
                refused.append((segment, ids[:place]))
                break
        else:
            walk.given_up(segment, before)
    yield from _above(refused, segments, looks, evictable, asked)


def _above(
    refused: Sequence[tuple[Segment, list[int]]],
    segments: Segments,
    looks: int,
    evictable: Callable[[FamilyId], bool],
    asked: dict[int, bool],
) -> Iterator[FamilyId]:
    """What lies before blocks that may not leave, from there to the head."""
    climbed: set[int] = set()
    for segment, ids in refused:
        up = segment.up
        while looks:
            for ident in reversed(ids):
                if not looks or ident in asked:
                    break
                looks -= 1
                asked[ident] = evictable(FamilyId(ident))
                if asked[ident]:
                    yield FamilyId(ident)
            above = segments.get(up) if up != NONE and up not in climbed else None
            if above is None:
                break
            climbed.add(up)
            ids, up = above.ids[: above.ids.index(up) + 1], above.up
