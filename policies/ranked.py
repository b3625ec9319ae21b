"""Families by a rank that changes: the lowest first, of equal ones the one that was ranked earlier."""

from __future__ import annotations

from collections.abc import Iterator
from heapq import heapify, heappop, heappush
from itertools import count

_FEW = 64


class Ranked:
    """A heap with entries that are true no more, which are passed over. Memory: some 250 bytes for each family."""

    def __init__(self) -> None:
        self._heap: list[tuple[float, int, int]] = []
        """(rank, when it was given, family)"""
        self._now: dict[int, tuple[float, int]] = {}
        self._ticks = count()

    def __contains__(self, ident: int) -> bool:
        return ident in self._now

    def __len__(self) -> int:
        return len(self._now)

    def rank(self, ident: int) -> float:
        return self._now[ident][0]

    def set(self, ident: int, rank: float) -> None:
        tick = next(self._ticks)
        self._now[ident] = rank, tick
        heappush(self._heap, (rank, tick, ident))
        if len(self._heap) > 3 * len(self._now) + _FEW:
            self._heap = [(rank, tick, ident) for ident, (rank, tick) in self._now.items()]
            heapify(self._heap)

    def discard(self, ident: int) -> None:
        self._now.pop(ident, None)

    def order(self) -> Iterator[int]:
        """A heap over the heap, so that nothing is moved; what has changed since it began is not followed."""
        heap = self._heap
        while heap and not self._is_true(heap[0]):
            heappop(heap)
        front = [(heap[0], 0)] if heap else []
        while front:
            entry, place = heappop(front)
            for below in (2 * place + 1, 2 * place + 2):
                if below < len(heap):
                    heappush(front, (heap[below], below))
            if self._is_true(entry):
                yield entry[2]

    def _is_true(self, entry: tuple[float, int, int]) -> bool:
        return self._now.get(entry[2]) == entry[:2]
