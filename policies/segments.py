"""Stretches of prompts that were used together, kept as one: what a policy by kinds has to move at a use.

A request uses a prompt's blocks from the first one on, so its blocks have the same last use, and stay neighbours. A
*segment* is such a stretch: ids of families, each the parent of the next. Using all of a segment again changes one
record, however long it is; using its front, or losing its end, cuts it. Only the last block of a segment can be without
children, so the segments whose last block has none are all that an eviction has to look at.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from tierkv.policy import BlockInfo, InfoRun

NONE = -1


class Segment:
    """``ids`` from head to tail, never empty while it is in use."""

    __slots__ = ("hits", "ids", "kind", "last", "order", "queue", "queued", "queued_last", "stretch", "up")

    def __init__(
        self, ids: list[int], up: int, kind: int, hits: int, last: int, stretch: int, order: int
    ) -> None:
        self.ids = ids
        self.up = up
        """The parent of the first block; ``NONE`` for the head of a prompt, or when it is not here."""
        self.kind = kind
        self.hits = hits
        """How often these blocks have been used again, as far as the policy counts."""
        self.last = last
        """When they were used last."""
        self.stretch = stretch
        self.order = order
        """Another one after each change that moves it to another place in the queues; grows."""
        self.queue = NONE
        """The kind in whose queue of leaves it stands,"""
        self.queued = NONE
        """under this order"""
        self.queued_last = NONE
        """and this last use."""

    def alike(self, ids: list[int], up: int) -> Segment:
        """Another segment with the same past."""
        return Segment(ids, up, self.kind, self.hits, self.last, self.stretch, self.order)


class Segments:
    """Which segment holds each family, and which segments hang from it. Memory: 8 bytes for each id up to the highest
    one, and for each family 8 bytes and its share of a segment's 250."""

    def __init__(self) -> None:
        self.of: list[Segment | None] = [None] * 1024
        """By id."""
        self.hanging: dict[int, dict[Segment, None]] = {}
        """By id: segments whose first block is a child of that family."""

    def widen(self, highest: int) -> None:
        if highest >= len(self.of):
            self.of.extend([None] * (max(2 * len(self.of), highest + 1) - len(self.of)))

    def get(self, ident: int) -> Segment | None:
        return self.of[ident] if ident < len(self.of) else None

    def add(self, segment: Segment) -> None:
        of = self.of
        for ident in segment.ids:
            of[ident] = segment
        self.hang(segment)

    def is_leaf(self, segment: Segment) -> bool:
        return segment.ids[-1] not in self.hanging

    def lies_inside(self, ident: int) -> bool:
        """True for a block that is here and has others of its segment behind it."""
        segment = self.get(ident)
        return segment is not None and segment.ids[-1] != ident

    def hang(self, segment: Segment) -> None:
        if segment.up != NONE:
            children = self.hanging.get(segment.up)
            if children is None:
                self.hanging[segment.up] = {segment: None}
            else:
                children[segment] = None

    def unhang(self, segment: Segment) -> bool:
        """Takes a segment off its parent; True when it was the last child there."""
        if segment.up == NONE:
            return False
        children = self.hanging[segment.up]
        del children[segment]
        if children:
            return False
        del self.hanging[segment.up]
        return True

    def cut(self, segment: Segment, at: int) -> tuple[Segment, Segment]:
        """Cuts before the block at place ``at``; returns the front and the rest. The longer one stays the same object,
        so that little has to be noted."""
        ids = segment.ids
        if 2 * at > len(ids):
            rest = segment.alike(ids[at:], ids[at - 1])
            del ids[at:]
            self.add(rest)
            return segment, rest
        front = segment.alike(ids[:at], segment.up)
        if segment.up != NONE:
            children = self.hanging[segment.up]
            del children[segment]
            children[front] = None
        del ids[:at]
        segment.up = front.ids[-1]
        self.hang(segment)
        of = self.of
        for ident in front.ids:
            of[ident] = front
        return front, segment

    def join(self, front: Segment, rest: Segment) -> Segment:
        """Makes one of two that follow each other; the past is that of ``rest``. Returns the one that is left."""
        self.unhang(rest)
        if len(front.ids) < len(rest.ids):
            if front.up != NONE:
                children = self.hanging[front.up]
                del children[front]
                children[rest] = None
            rest.ids[0:0] = front.ids
            rest.up = front.up
            of = self.of
            for ident in front.ids:
                of[ident] = rest
            front.ids = []
            return rest
        front.ids += rest.ids
        of = self.of
        for ident in rest.ids:
            of[ident] = front
        front.kind, front.hits = rest.kind, rest.hits
        front.last, front.stretch, front.order = rest.last, rest.stretch, rest.order
        rest.ids = []
        return front

    def take_out(self, ident: int) -> tuple[Segment, list[Segment]] | None:
        """Takes one family out, wherever it lies, and returns the segment that held it (now without it, maybe empty, in
        which case it hangs no more) and the segments that have lost their parent by it."""
        segment = self.get(ident)
        if segment is None:
            return None
        if segment.ids[-1] != ident:
            segment, _ = self.cut(segment, segment.ids.index(ident) + 1)
        orphans = list(self.hanging.pop(ident, ()))
        for orphan in orphans:
            orphan.up = NONE
        segment.ids.pop()
        self.of[ident] = None
        return segment, orphans


Run = tuple[list[int], int | None, Sequence[bytes]]
"""Ids, each the parent of the next and none twice; the parent of the first; their hashes."""


def in_runs(infos: Sequence[BlockInfo]) -> Iterable[Run]:
    """What came in by one call, cut where a block does not hang from the one before."""
    if type(infos) is InfoRun:
        whole = list[int](infos.ids)
        if len(whole) == 1 or len(set(whole)) == len(whole):
            return ((whole, infos.parent, infos.hashes),) if whole else ()
    return _found_runs(infos)


def _found_runs(infos: Sequence[BlockInfo]) -> Iterator[Run]:
    run: list[int] = []
    hashes: list[bytes] = []
    known = set[int]()
    parent = None
    for info in infos:
        if run and (info.parent != run[-1] or info.id in known):
            yield run, parent, hashes
            run, hashes, known = [], [], set()
        if not run:
            parent = info.parent
        run.append(info.id)
        known.add(info.id)
        hashes.append(info.block_hash)
    if run:
        yield run, parent, hashes


def common(some: Sequence[int], others: Sequence[int]) -> int:
    """How many ids at the front of both are the same."""
    for place, (one, other) in enumerate(zip(some, others, strict=False)):
        if one != other:
            return place
    return min(len(some), len(others))
