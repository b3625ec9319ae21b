"""What is remembered of blocks that have left: some of them, by their hash, so that one that comes back is not new.

One in sixteen is remembered, chosen by its hash, and the last block of each run that came in. When a remembered block
comes in again, all blocks before it in its prompt have been there as well, so a few ghosts vouch for many blocks.
Sampling by hash is from "SHARDS" (Waldspurger, Park, Garthwaite, Ahmad, FAST 2015).
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import NamedTuple

from tierkv.policies.segments import Segment

SAMPLED_BELOW = 16
"""Of 256: a block whose hash begins with a smaller byte is remembered when it leaves."""
STANDS_FOR = 256 // SAMPLED_BELOW
GHOSTS_PER_RESIDENT = 2
MOST_GHOSTS = 1 << 17


class Ghost(NamedTuple):
    """What is remembered of a block that left."""

    hits: int
    kind: int
    last: int
    stretch: int
    stands_for: int
    """So many blocks that left; 0 for the end of a run, which was not chosen by chance."""


class Ghosts:
    """At most two for each resident block. ``forgotten`` is told of each that is dropped. Memory: some 240 bytes a
    ghost, and a hash for each resident block that will be one."""

    def __init__(self, forgotten: Callable[[Ghost], None]) -> None:
        self._forgotten = forgotten
        self._marks: dict[int, bytes] = {}
        """Hashes of resident blocks that shall be remembered, by id."""
        self._ghosts: OrderedDict[bytes, Ghost] = OrderedDict()

    def __len__(self) -> int:
        return len(self._ghosts)

    def mark(self, ids: Sequence[int], hashes: Sequence[bytes]) -> None:
        """A run comes in. Blocks without a hash are not remembered."""
        marks = self._marks
        for ident, named in zip(ids, hashes, strict=True):
            if named and named[0] < SAMPLED_BELOW:
                marks[ident] = named
        if hashes[-1]:
            marks[ids[-1]] = hashes[-1]

    def is_no_end(self, ident: int) -> None:
        """The run of that block goes on."""
        if ident in self._marks and self._marks[ident][0] >= SAMPLED_BELOW:
            del self._marks[ident]

    def recall(self, hashes: Sequence[bytes]) -> list[tuple[int, Ghost]]:
        """Those of a run that comes in, by place, the deepest first. They are ghosts no more."""
        ghosts = self._ghosts
        if not ghosts:
            return []
        places = [place for place, named in enumerate(hashes) if named in ghosts]
        return [(place, ghosts.pop(hashes[place])) for place in reversed(places)]

    def leave(self, ident: int, segment: Segment, resident: int, *, evicted: bool) -> Ghost | None:
        """A block of that segment has left, and so many are there. Returns its ghost, if there is one now."""
        named = self._marks.pop(ident, None)
        if named is None or not evicted:
            return None
        ghost = Ghost(
            segment.hits,
            segment.kind,
            segment.last,
            segment.stretch,
            STANDS_FOR if named[0] < SAMPLED_BELOW else 0,
        )
        old = self._ghosts.pop(named, None)  # the same block of another namespace
        if old is not None:
            self._forgotten(old)
        self._ghosts[named] = ghost
        most = min(GHOSTS_PER_RESIDENT * resident, MOST_GHOSTS)
        while len(self._ghosts) > most:
            self._forgotten(self._ghosts.popitem(last=False)[1])
        return ghost
