"""When a policy learns: its ``ReuseTable`` what blocks are worth, its ``Caution`` how far to trust that."""

from __future__ import annotations

from tierkv.policies.caution import Caution
from tierkv.policies.reuse import ReuseTable

LESSON_BLOCKS = 4096
"""Blocks used between two lessons, or a fourth of the resident ones if that is more."""
STRETCHES = 8
"""For each lesson."""
LOOKS = 8
"""Of the caution, for each lesson."""
MOST_LATE = 64
"""Lessons are taken when somebody asks who should leave. If nobody does, one is taken after so many were left out, so
that what is noted of times gone by stays bounded."""


class Lessons:
    """Tells the table and the caution of the time, which is counted in blocks that were used or came in."""

    def __init__(self, kinds: int) -> None:
        self.table = ReuseTable(kinds)
        self.caution = Caution()
        self.next_stretch = 0
        """When ``begin_stretch`` is to be called."""
        self._next_lesson = LESSON_BLOCKS
        self._last_look = 0

    def begin_stretch(self, now: int, resident: int) -> None:
        self.table.begin_stretch(now)
        lesson = max(LESSON_BLOCKS, resident // 4)
        self.next_stretch = now + min(lesson, max(512, resident)) // STRETCHES
        if now >= self._last_look + lesson // LOOKS:
            self.caution.look(now - self._last_look)
            self._last_look = now
        self.caution.edge_at(*self.table.edge_of(resident))
        if now >= self._next_lesson + MOST_LATE * lesson:
            self._learn(now, resident)

    def learn_if_due(self, now: int, resident: int) -> None:
        if now >= self._next_lesson:
            self._learn(now, resident)

    def _learn(self, now: int, resident: int) -> None:
        self.table.learn(now)
        self._next_lesson = now + max(LESSON_BLOCKS, resident // 4)
