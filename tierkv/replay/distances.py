"""Stack distances: how many different blocks were used since a block's own last use.

A tier of c blocks under LRU, with the tail of a prompt before its head, hits exactly the uses whose distance is below
c (Mattson, Gecsei, Slutz, Traiger, "Evaluation techniques for storage hierarchies", 1970). One pass finds all of them,
with a tree that counts (Fenwick 1994) who was used last when. A block is never used without those before it in its
prompt, so within a request distances never fall.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Final

import numpy as np
from numpy.typing import NDArray

from tierkv.replay.traces import Trace

FIRST_USE: Final = -1
_TELL_EVERY: Final = 256


class _Counts:
    """Numbers in a row of which sums are asked and changed, both in a logarithm of its length."""

    def __init__(self, size: int) -> None:
        self._tree = [0] * (size + 1)

    def add(self, place: int, change: int) -> None:
        tree = self._tree
        place += 1
        while place < len(tree):
            tree[place] += change
            place += place & -place

    def before(self, place: int) -> int:
        """The sum of all before a place."""
        tree, total = self._tree, 0
        while place:
            total += tree[place]
            place &= place - 1
        return total


def stack_distances(
    requests: Sequence[Sequence[int]], progress: Callable[[float], None] = lambda share: None
) -> Iterator[list[int]]:
    """Of each request's blocks; ``FIRST_USE`` for those that were not used before."""
    # Places in the order of use: a request's blocks take a row of them, its head the newest.
    counts = _Counts(sum(map(len, requests)))
    last: dict[int, int] = {}
    now, used = 0, 0
    for number, ids in enumerate(requests):
        if number % _TELL_EVERY == 0:
            progress(number / len(requests))
        stop = now + len(ids)
        found = []
        for ident in ids:
            before = last.get(ident)
            found.append(FIRST_USE if before is None else used - counts.before(before + 1))
        for depth, ident in enumerate(ids):
            before = last.get(ident)
            if before is None:
                used += 1
            else:
                counts.add(before, -1)
            last[ident] = stop - 1 - depth
            counts.add(stop - 1 - depth, 1)
        now = stop
        yield found


class Reach:
    """How many leading blocks each request of a trace hits, for any capacity, after one pass. Not thread-safe."""

    def __init__(self, trace: Trace, progress: Callable[[float], None] = lambda share: None) -> None:
        requests = [request.ids for request in trace.requests]
        far = np.iinfo(np.int64).max
        self._distances = np.fromiter(
            (
                far if distance == FIRST_USE else distance
                for found in stack_distances(requests, progress)
                for distance in found
            ),
            dtype=np.int64,
            count=trace.references,
        )
        self._ends = np.cumsum([len(ids) for ids in requests])
        self._known: dict[int, NDArray[np.int64]] = {}

    def hits(self, capacity: int) -> NDArray[np.int64]:
        """By request, of a tier of so many blocks."""
        if capacity not in self._known:
            below = np.concatenate(([0], np.cumsum(self._distances < capacity)))
            self._known[capacity] = np.diff(below[self._ends], prepend=0)
        return self._known[capacity]
