"""The blocks that bring the fewest hits for their place leave first, by what was learnt of others of their kind.

Most prompts never come back, and LRU keeps each of them for as long as those that do. This policy puts blocks into
twelve kinds, by what is cheap to know and tells much:

- how often the block has been used again: not yet, once, twice, more often;
- how far it lies from the end of the last request that used it: among the last two blocks, the last eight, or before.
  The end of a prompt is the part that the next one most often does not share. A request ends with its last block that
  was used or came in; with one that has others behind it already it does not end, but goes another way, unseen. One
  that comes in behind a leaf goes on with the leaf's request: what lay near its end lies further from it now, and what
  of that was not used again yet counts as used now.

Each kind is an LRU queue. ``ReuseTable`` learns how soon blocks of each kind come back, and so what the coldest block
of each queue is worth. The least valuable one leaves; where the difference is small it is the least recently used one
of all, so that without anything to learn this is LRU. ``Caution`` makes it LRU where LRU does better.

A block that comes back after it was evicted shall not count as new: ``Ghosts`` remembers some of those that left. Each
of them stands for sixteen, and tells the table what would have happened to blocks that left.

The idea of hit density by classes is from "LHD: Improving Cache Hit Rate by Maximizing Hit Density" (Beckmann, Chen,
Cidon, NSDI 2018); how it is estimated here is told in ``tierkv.policies.reuse``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence

from tierkv.ids import FamilyId
from tierkv.policies import lessons
from tierkv.policies.ghosts import Ghost, Ghosts
from tierkv.policies.leaves import LeafQueues, LeafWalk, offer
from tierkv.policies.lessons import Lessons
from tierkv.policies.reuse import bin_of
from tierkv.policies.segments import NONE, Segment, Segments, common, in_runs
from tierkv.policies.zones import (
    FAR,
    MIDDLE,
    MIDDLE_BLOCKS,
    NEAR,
    NEAR_BLOCKS,
    ZONES,
    end_in_one_zone,
    in_zones,
    is_near,
)
from tierkv.policy import BlockInfo

MOST_HITS = 3
"""More often counts as this often."""
KINDS = (MOST_HITS + 1) * ZONES


class DensityPolicy:
    """Least hit density first; see above. A use of a run takes 1 us and 1.5 us for each of its segments (three, if the
    same was used before), a new block 0.3 us and a victim 1 us (three and four where a request has one block), and a
    lesson 0.3 ms once in 4096 blocks or more.

    Memory: for each resident block 16 bytes, its share of a segment (250 bytes for some 10 blocks) and at most two
    ghosts (240 bytes each). An id that is not resident is passed over in ``on_hit`` and ``on_remove``, one that is
    given twice counts once; inserting one that is resident renews it. Of leaves that are worth the same and were used
    last together (a block between them has left) any may come first. Not thread-safe: the store calls it under its
    lock.
    """

    name = "density"

    def __init__(self) -> None:
        self._segments = Segments()
        self._lessons = Lessons(KINDS)
        self._table, self._caution = self._lessons.table, self._lessons.caution
        self._leaves = LeafQueues(self._segments, KINDS)
        self._now = 0
        """Blocks that were used so far."""
        self._order = 0
        self._ghosts = Ghosts(self._forget)
        self._resident = 0
        self._inserted = self._hit = self._removed = self._evicted = self._recognised = 0

    def __len__(self) -> int:
        """Resident families."""
        return self._resident

    @property
    def ghosts(self) -> int:
        """Families that have left and are remembered."""
        return len(self._ghosts)

    def counters(self) -> Mapping[str, int]:
        return {
            "inserted": self._inserted,
            "hit": self._hit,
            "removed": self._removed,
            "evicted": self._evicted,
            "recognised": self._recognised,
            "lessons": self._table.lessons,
        }

    # -- uses -----------------------------------------------------------------------------------------------------

    def on_hit(self, ids: Sequence[FamilyId]) -> None:
        count = len(ids)
        if not count:
            return
        self._now += count
        if self._now >= self._lessons.next_stretch:
            self._lessons.begin_stretch(self._now, self._resident)
        its = ids if type(ids) is list else list(ids)
        segment = self._segments.get(its[0])
        if (
            segment is not None
            and segment.ids == its
            and (count <= NEAR_BLOCKS or not self._segments.is_leaf(segment))
        ):
            # What most hits of few blocks are: one that is hit whole and lies in one zone.
            zone = NEAR if self._segments.is_leaf(segment) else FAR
            self._use(segment, count, self._now - segment.last, zone)
            segment.last = self._now
            self._stamp(segment)
            return
        hit, ages = self._cut_out(its)
        if hit:
            self._use_again(hit, ages)

    def _use(self, segment: Segment, length: int, age: int, zone: int) -> None:
        """Counts the use of a segment of that length and age, which lies in that zone now."""
        hits = segment.hits + 1 if segment.hits < MOST_HITS else MOST_HITS
        kind = hits * ZONES + zone
        self._table.used_again(segment.kind, segment.stretch, age, kind, length)
        self._caution.used_here(length, self._now - age)
        self._hit += length
        segment.hits, segment.kind, segment.stretch = hits, kind, self._table.stretch

    def _cut_out(self, ids: list[FamilyId]) -> tuple[list[Segment], list[int]]:
        """The segments that hold exactly the blocks which were hit, and how old each was."""
        segments, now = self._segments, self._now
        of, highest = segments.of, len(segments.of)
        found: list[Segment] = []
        ages: list[int] = []
        place, count = 0, len(ids)
        while place < count:
            ident = ids[place]
            segment = of[ident] if ident < highest else None
            if segment is None or segment.last == now:  # not here, or given twice
                place += 1
                continue
            if segment.ids[0] != ident:
                front, segment = segments.cut(segment, segment.ids.index(ident))
                self._leaves.push(segment)
                self._leaves.push(front)
            its = segment.ids
            length = len(its)
            if length > count - place or its != ids[place : place + length]:
                length = common(its, ids[place : place + length])
                if length < len(its):
                    segment, rest = segments.cut(segment, length)
                    self._leaves.push(rest)
            ages.append(now - segment.last)
            segment.last = now
            found.append(segment)
            place += length
        return found, ages

    def _use_again(self, hit: list[Segment], ages: list[int]) -> None:
        """Counts the use of each, from the last one on, and says what kind it is now: if nothing hangs from the last
        one, the request ends with it. Those of a kind that follow each other become one."""
        segments = self._segments
        done: list[Segment] = []
        behind: Segment | None = None
        gap = 0 if segments.is_leaf(hit[-1]) else MIDDLE_BLOCKS
        for place in range(len(hit) - 1, -1, -1):
            segment: Segment | None = hit[place]
            while segment is not None:
                if behind is not None and behind.up != segment.ids[-1]:
                    gap, behind = MIDDLE_BLOCKS, None
                piece, segment, zone = end_in_one_zone(segments, segment, gap)
                length = len(piece.ids)
                self._use(piece, length, ages[place], zone)
                gap += length
                if behind is not None and behind.kind == piece.kind:
                    piece = done[-1] = segments.join(piece, behind)
                else:
                    done.append(piece)
                behind = piece
        for piece in reversed(done):
            self._stamp(piece)

    def _stamp(self, segment: Segment) -> None:
        self._order += 1
        segment.order = self._order
        self._leaves.push(segment)

    def _rezone(self, ident: int, gap: int) -> None:
        """That block has so many behind it in the request that used it last. It and those before it, as far as they
        were used with it, come into the zones where they lie now."""
        segment = self._segments.get(ident)
        last = segment.last if segment is not None else 0
        while segment is not None and segment.last == last and (gap < MIDDLE_BLOCKS or is_near(segment)):
            segment, _, zone = end_in_one_zone(self._segments, self._ending_with(ident), gap)
            self._change_kind(segment, segment.hits * ZONES + zone)
            gap += len(segment.ids)
            ident = segment.up
            segment = self._segments.get(ident) if ident != NONE else None

    def _ending_with(self, ident: int) -> Segment:
        """The segment of a block that is here, cut behind it."""
        segment = self._segments.of[ident]
        assert segment is not None
        if segment.ids[-1] != ident:
            segment, rest = self._segments.cut(segment, segment.ids.index(ident) + 1)
            self._leaves.push(rest)
        return segment

    def _change_kind(self, segment: Segment, kind: int) -> None:
        if kind != segment.kind:
            self._table.change(segment.kind, kind, segment.stretch, len(segment.ids))
            segment.kind = kind
        self._stamp(segment)

    # -- arrivals -------------------------------------------------------------------------------------------------

    def on_insert(self, infos: Sequence[BlockInfo]) -> None:
        for ids, parent, hashes in in_runs(infos):
            self._insert_run(ids, parent, hashes)

    def _insert_run(self, ids: list[int], parent: int | None, hashes: Sequence[bytes]) -> None:
        segments = self._segments
        segments.widen(max(ids))
        of = segments.of
        known = [ident for ident in ids if of[ident] is not None]
        if known:
            self.on_remove([FamilyId(ident) for ident in known], evicted=False)
        self._now += len(ids)
        if self._now >= self._lessons.next_stretch:
            self._lessons.begin_stretch(self._now, self._resident)
        self._resident += len(ids)
        self._inserted += len(ids)
        above = segments.get(parent) if parent is not None else None
        before: list[int] = []
        up = NONE if above is None or parent is None else parent
        if above is not None and above.ids[-1] == up and segments.is_leaf(above):
            before, up = self._taken_from(above, len(ids))
        recalled = self._recall(hashes)
        if hashes:
            self._ghosts.mark(ids, hashes)
        if above is not None and parent is not None and not above.hits:
            self._ghosts.is_no_end(parent)
        if before or recalled:
            self._place(before, ids, up, recalled)
        else:
            self._place_new(ids, up)

    def _taken_from(self, above: Segment, more: int) -> tuple[list[int], int]:
        """The request of a leaf goes on (chunked prefill, decoding): its last blocks, which lay near its end, come to
        lie ``more`` blocks further from it. Those that were not used again are placed anew, with the new ones: they are
        returned, and the parent of the first."""
        before: list[int] = []
        segment: Segment | None = above
        last, up = above.last, above.ids[-1]
        while (
            segment is not None
            and is_near(segment)
            and not segment.hits
            and segment.last == last
            and segment.ids[-1] == up
        ):
            before[0:0] = segment.ids
            up = segment.up
            segment = self._segments.get(up) if up != NONE else None
        if segment is not None and is_near(segment):
            self._rezone(up, len(before) + more)
        return before, up

    def _recall(self, hashes: Sequence[bytes]) -> list[tuple[int, int]]:
        """How often the new blocks were used before they left: (stop, hits) of stretches, from the deepest one on. A
        ghost vouches for all blocks before it."""
        found: list[tuple[int, int]] = []
        for place, ghost in self._ghosts.recall(hashes):
            age = self._now - ghost.last
            if ghost.stands_for:
                self._table.used(ghost.kind, ghost.stretch, age, ghost.stands_for)
                self._caution.used_gone(ghost.stands_for, ghost.last)
            hits = min(ghost.hits + 1, MOST_HITS)
            if not found or hits > found[-1][1]:
                found.append((place + 1, hits))
            self._recognised += 1
        return found

    def _place(self, before: list[int], ids: list[int], up: int, recalled: list[tuple[int, int]]) -> None:
        """Makes segments of a run: cut where the number of uses changes, and the zone."""
        if before:
            self._dissolve(before)
            ids = before + ids
        end = len(ids)
        last: Segment | None = None
        start = 0
        for stop, hits in (*((len(before) + stop, hits) for stop, hits in reversed(recalled)), (end, 0)):
            for zone, zone_stop in (FAR, end - MIDDLE_BLOCKS), (MIDDLE, end - NEAR_BLOCKS), (NEAR, end):
                here = min(stop, zone_stop)
                if here > start:
                    last = self._new_segment(ids[start:here], up, hits, zone)
                    if before and not start:
                        last = self._joined_with_above(last)
                    up, start = last.ids[-1], here
        assert last is not None
        self._leaves.push(last)

    def _place_new(self, ids: list[int], up: int) -> None:
        """The same for a run of which nothing is known."""
        for zone, part in in_zones(ids):
            segment = self._new_segment(part, up, 0, zone)
            up = part[-1]
        self._leaves.push(segment)

    def _new_segment(self, ids: list[int], up: int, hits: int, zone: int) -> Segment:
        self._order += 1
        kind, table = hits * ZONES + zone, self._table
        segment = Segment(ids, up, kind, hits, self._now, table.stretch, self._order)
        table.watch(kind, len(ids))
        self._segments.add(segment)
        return segment

    def _dissolve(self, ids: list[int]) -> None:
        """These are placed anew."""
        for segment in dict.fromkeys(self._segments.of[ident] for ident in ids):
            assert segment is not None
            self._table.unwatch(segment.kind, segment.stretch, len(segment.ids))
            self._segments.unhang(segment)
            segment.ids = []

    def _joined_with_above(self, segment: Segment) -> Segment:
        """A prompt that comes in small pieces shall not lie in small segments: what was used together not long ago,
        lies before this one and is of its kind counts as used with it."""
        above = self._segments.get(segment.up) if segment.up != NONE else None
        if above is None or self._now - above.last > lessons.LESSON_BLOCKS:
            return segment
        last = above.last
        while above is not None and above.last == last and above.kind == segment.kind:
            above = self._ending_with(segment.up)
            self._table.unwatch(above.kind, above.stretch, len(above.ids))
            self._table.watch(segment.kind, len(above.ids))
            segment = self._segments.join(above, segment)
            above = self._segments.get(segment.up) if segment.up != NONE else None
        return segment

    # -- departures -----------------------------------------------------------------------------------------------

    def on_remove(self, ids: Sequence[FamilyId], *, evicted: bool) -> None:
        segments, ghosts, hanging = self._segments, self._ghosts, self._segments.hanging
        of, highest = segments.of, len(segments.of)
        segment: Segment | None = None
        before, taken = self._resident, 0
        if not evicted and len(ids) > 1 and self._segments.lies_inside(ids[0]):
            ids = ids[::-1]  # from the tail on it is not cut at each block; nothing else depends on the order
        for ident in ids:
            its = of[ident] if ident < highest else None
            if its is None:
                continue
            if its is not segment:
                if segment is not None:
                    self._after_loss(segment, taken)
                segment, taken = its, 0
            if its.ids[-1] == ident and ident not in hanging:
                its.ids.pop()
                of[ident] = None
            else:
                if taken:
                    self._after_loss(its, taken)
                    taken = 0
                segment = self._take_from_inside(ident)
            taken += 1
            ghost = ghosts.leave(ident, segment, self._resident - taken, evicted=evicted)
            if ghost is not None and ghost.stands_for:
                self._table.resume(ghost.kind, ghost.stretch, self._now - ghost.last, ghost.stands_for)
            if not segment.ids:
                self._after_loss(segment, taken)
                segment = None
        if segment is not None:
            self._after_loss(segment, taken)
        if evicted:
            self._evicted += before - self._resident

    def _take_from_inside(self, ident: int) -> Segment:
        """One that is not a leaf leaves: what was behind it hangs from nothing any more."""
        found = self._segments.take_out(ident)
        assert found is not None
        segment, orphans = found
        for orphan in orphans:
            self._leaves.push(orphan)
        return segment

    def _after_loss(self, segment: Segment, taken: int) -> None:
        """So many blocks have left the segment's end."""
        self._resident -= taken
        self._removed += taken
        self._table.lost(segment.kind, segment.stretch, self._now - segment.last, taken)
        if segment.ids:
            self._leaves.push(segment)
        elif self._segments.unhang(segment):
            above = self._segments.of[segment.up]
            if above is not None:
                self._leaves.push(above)

    def _forget(self, ghost: Ghost) -> None:
        if ghost.stands_for:
            self._table.lost(ghost.kind, ghost.stretch, self._now - ghost.last, ghost.stands_for)

    # -- leaving --------------------------------------------------------------------------------------------------

    def victims(self, need: int, evictable: Callable[[FamilyId], bool]) -> Iterator[FamilyId]:
        asked: dict[int, bool] = {}
        looks = 4 * need + 64
        while len(asked) < looks:
            self._lessons.learn_if_due(self._now, self._resident)
            self._leaves.settle()
            self._caution.oldest_is(self._leaves.oldest())
            walk = LeafWalk(self._leaves, self._worth, self._caution.clearly)
            began = self._now, self._removed
            for family in offer(walk, self._segments, looks - len(asked), evictable, asked):
                yield family
                if (self._now, self._removed) != began:
                    break  # the caller took it at once, or somebody came in between
            else:
                return

    def _worth(self, kind: int, last: int) -> float:
        return self._table.worth[kind][bin_of(self._now - last)]
