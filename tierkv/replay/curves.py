"""Hit ratio for all capacities at once, under LRU with the tail of a prompt before its head.

One pass over the trace finds the stack distances of all uses (``tierkv.replay.distances``); how many of them are below
a capacity is what a tier of that capacity hits. With ``sample`` below 1 only so many prompts of each family of prompts
are looked at, chosen by their first block that they do not share with all others, and the distances are scaled
("SHARDS", Waldspurger and others, FAST 2015): prompts are kept whole, since a block alone does not say whether its
prefix is there.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from tierkv.replay.distances import FIRST_USE, stack_distances
from tierkv.replay.traces import NO_PARENT, Trace, mix

_COMMON = 0.02
"""A block that is in more of all requests than this belongs to no family of prompts."""


class Curve:
    """``hits_at[c]``: share of the references that a tier of c blocks hits, in percent."""

    def __init__(self, distances: NDArray[np.int64], references: float, blocks: int, sample: float) -> None:
        """``distances``: of the references that were looked at and are uses again, by stack distance."""
        self.blocks = blocks
        self._cumulated = np.cumsum(distances)
        self._references = references
        self._sample = sample

    def hit_percent(self, capacity: int) -> float:
        if not self._references or not len(self._cumulated):
            return 0.0
        place = min(int(capacity * self._sample), len(self._cumulated)) - 1
        return float(100 * self._cumulated[place] / self._references) if place >= 0 else 0.0

    def points(self, count: int = 60) -> list[tuple[int, float]]:
        """Capacities, evenly spread by their logarithm, and what they hit."""
        if self.blocks < 1:
            return []
        steps = np.unique(np.geomspace(1, self.blocks, count).astype(int))
        return [(int(capacity), self.hit_percent(int(capacity))) for capacity in steps]


def miss_ratio_curve(
    trace: Trace, *, sample: float = 1.0, progress: Callable[[float], None] = lambda share: None
) -> Curve:
    """Of a whole trace. With ``sample`` 0.1 it takes a tenth of the time."""
    chosen = _chosen(trace, sample)
    requests = [request.ids for request in trace.requests]
    kept = [[ident for ident in ids if chosen[ident]] for ids in requests] if sample < 1 else requests
    total = sum(map(len, kept))
    blocks = int(chosen.sum())
    distances = np.zeros(blocks + 1, dtype=np.int64)
    for request in stack_distances(kept, progress):
        for distance in request:
            if distance != FIRST_USE:
                distances[distance] += 1
    return Curve(distances, float(total), trace.blocks, blocks / max(1, trace.blocks))


def _chosen(trace: Trace, sample: float) -> NDArray[np.bool_]:
    """Blocks of the families of prompts that are looked at."""
    if sample >= 1:
        return np.ones(trace.blocks, bool)
    uses = np.zeros(trace.blocks, np.int64)
    for request in trace.requests:
        uses[request.ids] += 1
    common = uses > max(2.0, _COMMON * len(trace.requests))
    family = np.arange(trace.blocks, dtype=np.uint64)
    parents = trace.parents
    for ident in range(trace.blocks):
        parent = parents[ident]
        if parent != NO_PARENT and not common[parent]:
            family[ident] = family[parent]
    chosen = (mix(family) >> np.uint64(11)).astype(np.float64) / 2**53 < sample
    return np.asarray(chosen | common)


def knee(points: Sequence[tuple[int, float]], *, enough: float = 0.9) -> int:
    """The least capacity that hits this part of what the largest does."""
    if not points:
        return 0
    most = points[-1][1]
    for (capacity, hit), _ in pairwise([*points, points[-1]]):
        if hit >= enough * most:
            return capacity
    return points[-1][0]
