"""Does a policy do better than LRU would, on the traffic of late? If not, it should rather do as LRU does.

LRU holds a block for as long as fewer others are used than it has places, so of every use it can be said whether LRU
would have had the block: when the block's age is below that of LRU's oldest. Of the blocks that are not here only those
that are remembered by a ghost are known, each of which stands for others.
"""

from __future__ import annotations

FULL = 0.9
"""Without reasons for caution: a block may leave before the least recently used one when it is worth less than this
part of what that is worth."""
STEP_DOWN, STEP_UP = 0.3, 0.1
TOLERATED = 0.002
"""Of the blocks that were asked for; LRU may seem to have so many more, which is noise."""
KEPT = 0.8
"""Of what was counted, from lesson to lesson."""


class Caution:
    """``clearly``: from ``FULL`` down to 0, which is LRU."""

    def __init__(self) -> None:
        self.clearly = FULL
        self.age = 0
        """Of the oldest block that LRU would hold, in blocks that were used since; 0 when it is not known yet."""
        self._asked = self._ours = self._lru = 0.0

    def used_here(self, count: int, young: int) -> None:
        """So many resident blocks were used again, of which so many were younger than ``age``."""
        self._ours += count
        self._lru += young

    def used_gone(self, age: int, count: float) -> None:
        """So many blocks that are not here, for which a ghost speaks, were used again at that age."""
        if age < self.age:
            self._lru += count

    def learn(self, age: int, asked: int) -> None:
        """``age``: of the oldest block that LRU would hold now. ``asked``: blocks that were used or came in since the
        last time."""
        self._asked += asked
        if self.age:
            better = self._ours - self._lru
            if better < -TOLERATED * self._asked:
                self.clearly = max(0.0, self.clearly - STEP_DOWN)
            else:
                self.clearly = min(FULL, self.clearly + STEP_UP)
            self._asked, self._ours, self._lru = (
                KEPT * self._asked,
                KEPT * self._ours,
                KEPT * self._lru,
            )
        self.age = age
