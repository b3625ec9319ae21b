"""Does a policy do better than LRU would, on the traffic of late? If not, it should rather do as LRU does.

LRU holds the blocks that were used last, as many as it has places. So of every use it can be said whether LRU would
have had the block, by the time of its last use: LRU's *edge* lies where so many blocks were used since. Of the blocks
that are not here only those that are remembered by a ghost are known, each of which stands for others.

It begins as LRU, and differs from it the more the longer that does no harm. A harm makes it LRU again at once, long
before a lesson is over; the way back is slow, and takes the longer the more was lost.
"""

from __future__ import annotations

FULL = 0.8
"""Without reasons for caution: a block may leave before the least recently used one when it is worth less than this
part of what that is worth."""
STEP_DOWN, STEP_UP = 0.3, 0.0125
TOLERATED = 0.002
"""Of the blocks that were asked for; LRU may seem to have so many more, which is noise."""
KEPT = 0.97
"""Of what was counted, from look to look."""


class Caution:
    """``clearly``: from 0, which is LRU, to ``FULL``."""

    def __init__(self) -> None:
        self.clearly = 0.0
        self._since = self._sure = 0.0
        """LRU's edge: what was used last before the first is not there, what was used later than the second is. 0: it
        is not known yet."""
        self._share = 1.0
        """LRU holds this much of what was used last between the two."""
        self._oldest = 0
        self._asked = self._ours = self._lru = 0.0

    def used_here(self, count: int, last: int) -> None:
        """So many resident blocks, last used at that time, were used again."""
        self._ours += count
        if last >= self._sure:
            self._lru += count
        elif last >= self._since:
            self._lru += count * self._share

    def used_gone(self, count: int, last: int) -> None:
        """So many blocks that are not here, for which a ghost speaks, were used again."""
        if last > self._sure:
            self._lru += count
        elif self._since <= last < self._sure:
            self._lru += count * self._share

    def edge_at(self, since: float, sure: float, share: float) -> None:
        """Where LRU's edge is now, as far as is known from what was counted."""
        self._since, self._sure, self._share = since, sure, share
        self.oldest_is(self._oldest)

    def oldest_is(self, last: int) -> None:
        """No resident block is older. If it lies beyond LRU's edge, LRU can hold nothing older either: that is where
        the edge is, exactly. So who does as LRU does never seems to do worse."""
        self._oldest = last
        if 0 < self._since <= last:
            self._since = self._sure = last

    def look(self, asked: int) -> None:
        """``asked``: blocks that were used or came in since the last look."""
        if not self._since:
            self._ours = self._lru = 0.0
            return
        self._asked += asked
        if self._ours - self._lru < -TOLERATED * self._asked:
            self.clearly = max(0.0, self.clearly - STEP_DOWN)
        else:
            self.clearly = min(FULL, self.clearly + STEP_UP)
        self._asked, self._ours, self._lru = (
            KEPT * counted for counted in (self._asked, self._ours, self._lru)
        )
