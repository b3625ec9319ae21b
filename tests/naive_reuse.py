"""Reference implementation of what ``ReuseTable`` learns: hazards, and worths by age, one sum after the other."""

from bisect import bisect_right
from itertools import pairwise

from tierkv.policies import reuse

BINS = reuse.BINS
EDGES = [0] + [(2 + bin_ % 2) << bin_ // 2 + 3 for bin_ in range(1, BINS)]
WIDTHS = [end - begin for begin, end in pairwise([*EDGES, 2 * EDGES[-2]])]


def bin_of(age: int) -> int:
    return bisect_right(EDGES, age) - 1


def hazards_of(uses: list[list[float]], seen: list[list[float]]) -> list[list[float]]:
    at_large: list[float] = []
    for bin_ in range(BINS):
        before = at_large[-1] if at_large else reuse.PRIOR_HAZARD
        used, risked = sum(row[bin_] for row in uses), sum(row[bin_] for row in seen)
        at_large.append((used + reuse.SMOOTHING * before) / (risked + reuse.SMOOTHING))
    found = []
    for used_row, seen_row in zip(uses, seen, strict=True):
        expected = sum(risked * hazard for risked, hazard in zip(seen_row, at_large, strict=True))
        factor = (sum(used_row) + reuse.KIND_WEIGHT) / (expected + reuse.KIND_WEIGHT)
        cells = zip(used_row, seen_row, at_large, strict=True)
        own = [(u + reuse.CELL_WEIGHT * factor * h) / (r + reuse.CELL_WEIGHT) for u, r, h in cells]
        found.append([min(hazard, reuse.MOST_HAZARD) for hazard in own])
    return found


def worth_of(hazards: list[float], bins: int) -> list[float]:
    """By age the most uses for each block of time, over all times for which a block of that age may be kept."""
    worth = [float("inf")]
    born = 1.0
    for age in range(bins):
        if born <= 1e-9:  # nobody has lived to see it
            worth.append(worth[-1])
            continue
        born *= 1 - hazards[age]
        alive, used, time, best = 1.0, 0.0, 0.0, 0.0
        for bin_ in range(age, bins):
            spent = WIDTHS[bin_] * alive * (1 - hazards[bin_] / 2)
            used += alive * hazards[bin_]
            time += spent / 2 if bin_ == age else spent
            best = max(best, used / time)
            alive *= 1 - hazards[bin_]
        worth.append(min(worth[-1], best))
    return worth[1:] + [worth[-1] * EDGES[bins - 1] / EDGES[bin_] for bin_ in range(bins, BINS)]
