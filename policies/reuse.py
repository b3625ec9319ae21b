"""How soon blocks of a kind are used again, learnt from what happens to them; and what a place is worth to them.

For each kind of block the table counts, by age (blocks that were used since its own last use, in half octaves), how
many uses ended in another use at that age and how many were under observation when they reached it. The quotient is
the hazard: the chance to be used again at this age. What was evicted is no longer observed, what is still there is
observed until now; both are counted as such (Kaplan and Meier, "Nonparametric estimation from incomplete
observations", 1958), so the table is not fooled by the cache that it steers.

What a place is worth to a block of some age is the most uses for each unit of time that keeping it for some time can
bring: the largest quotient, over all further ages, of the chance to be used by then and the time that it will take.
That is the index of Gittins (1979); "hit density" is what Beckmann, Chen and Cidon call its relative in "LHD" (NSDI
2018). The worth is then made to fall with age: within a kind the least recently used block always counts least, so
that a policy with a single kind is LRU, and what may be learnt wrongly is only how kinds compare.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

BINS = 48
"""Half octaves of age: the last one begins beyond 200 million blocks."""

PRIOR_HAZARD = 0.03
"""Of a half octave of which nothing is known. The same for all of them, it makes the worth fall as 1 / age: LRU."""
SMOOTHING = 50.0
"""A half octave counts as if so many more blocks had been seen in it, with the hazard of the one before."""
KIND_WEIGHT = 20.0
"""A kind counts as if so many uses more had been expected of it, and seen."""
CELL_WEIGHT = 100.0
"""A half octave of one kind counts as if so many more blocks had been seen, that behave as the kind does at large."""
MOST_HAZARD = 0.9
KEPT = 0.98
"""Of what was counted this much is kept at each lesson: the table forgets, since traffic changes."""
MOST_BACK = 64
"""LRU's edge is looked for in so many stretches of time and no more: few blocks are so old, and what they do is told
apart little by it."""
_SURE = 1e-9
"""Survivors fewer than this say nothing."""

Table = NDArray[np.floating[Any]]


def bin_of(age: int) -> int:
    """The half octave of an age in blocks: 0 is below 24, then 24, 32, 48, 64, 96 and so on."""
    if age < 16:
        return 0
    bits = age.bit_length()
    return min(2 * bits - 10 + (age >> bits - 2 & 1), BINS - 1)


def _edges() -> Table:
    """Where the bins begin, and where the last one ends."""
    return np.array(
        [0.0, *(float((2 + (b & 1)) << b // 2 + 3) for b in range(1, BINS + 1))], dtype=np.float64
    )


class ReuseTable:
    """Counts, and the worth of each kind by age. ``worth[kind][bin]``: uses a block of time, in uses for each block
    that is used elsewhere meanwhile. Memory: some 25 KiB for 12 kinds, and one number for each kind and stretch of
    time of which something is still under observation.
    """

    def __init__(self, kinds: int) -> None:
        shape = (kinds, BINS)
        self._uses: list[list[float]] = np.zeros(shape).tolist()
        self._ends: list[list[float]] = np.zeros(shape).tolist()
        """Observation ended without a use."""
        self._starts: list[list[float]] = np.zeros(shape).tolist()
        """Observation began at that age."""
        self._watched: list[dict[int, float]] = [{} for _ in range(kinds)]
        """Blocks under observation, by the number of the stretch of time of their last use."""
        self._stretches: dict[int, int] = {}
        """When each began."""
        self.stretch = 0
        self._edges: Table = _edges()
        self._widths: Table = np.diff(self._edges)
        self.worth: list[list[float]] = []
        self.lessons = 0
        self.learn(0)

    def begin_stretch(self, now: int) -> None:
        """What is used from now on counts as used at this time, while it is under observation."""
        self.stretch += 1
        self._stretches[self.stretch] = now

    def watch(self, kind: int, count: float) -> None:
        """So many blocks were used just now."""
        watched = self._watched[kind]
        watched[self.stretch] = watched.get(self.stretch, 0.0) + count

    def unwatch(self, kind: int, stretch: int, count: float) -> None:
        """That use was none of its own: it is taken back."""
        self._watched[kind][stretch] -= count

    def used_again(self, kind: int, stretch: int, age: int, to: int, count: float) -> None:
        """So many, last used in that stretch, are used again, and are of another kind from now on."""
        self._uses[kind][bin_of(age) if age >= 16 else 0] += count
        now = self.stretch
        if kind != to or stretch != now:
            self._watched[kind][stretch] -= count
            watched = self._watched[to]
            watched[now] = watched.get(now, 0.0) + count

    def used(self, kind: int, stretch: int, age: int, count: float) -> None:
        """So many, last used in that stretch, are used again; they are watched no longer."""
        self._uses[kind][bin_of(age)] += count
        self._watched[kind][stretch] -= count

    def lost(self, kind: int, stretch: int, age: int, count: float) -> None:
        """Nobody will know whether they are used again."""
        self._ends[kind][bin_of(age)] += count
        self._watched[kind][stretch] -= count

    def resume(self, kind: int, stretch: int, age: int, count: float) -> None:
        """From this age on so many are watched: one of them stands for others that were lost."""
        self._starts[kind][bin_of(age)] += count
        watched = self._watched[kind]
        watched[stretch] = watched.get(stretch, 0.0) + count

    def change(self, kind: int, to: int, stretch: int, count: float) -> None:
        """They are of another kind than was thought when they were used."""
        self._watched[kind][stretch] -= count
        watched = self._watched[to]
        watched[stretch] = watched.get(stretch, 0.0) + count

    def edge_of(self, count: int) -> tuple[float, float, float]:
        """Where the block was used last that has so many others used after it, which LRU would evict now, had it so
        many places: the beginning of that stretch of time, its end, and which share of the blocks that were used last
        in it is among so many. Zeros before so many were used."""
        left, end, share = float(count), float("inf"), 0.0
        empty: list[int] = []
        seen = 0
        for stretch in reversed(self._stretches):
            here = sum([watched.get(stretch, 0.0) for watched in self._watched])
            start = self._stretches[stretch]
            if here < 0.5:
                empty.append(stretch)
                end = start
                continue
            seen += 1
            if here >= left > 0 or seen == MOST_BACK:
                share = min(1.0, left / here)
                break
            left -= here
            end = start
        for stretch in empty:
            if stretch != self.stretch:
                del self._stretches[stretch]
        return (start, end - 0.5, share) if share else (0.0, 0.0, 0.0)

    # -- learning -------------------------------------------------------------------------------------------------

    def learn(self, now: int) -> None:
        """Makes ``worth`` anew. Takes some 0.3 ms."""
        uses = np.array(self._uses)
        ends, starts = np.array(self._ends), np.array(self._starts)
        watched = self._watched_by_age(now)
        # At risk in a bin: whoever is used in it or later, is lost or alive beyond it, less who came in beyond it.
        beyond = ends + watched - starts
        at_risk = _from_here(uses) + _from_here(beyond) - beyond
        np.maximum(at_risk, uses, out=at_risk)
        known = BINS - int(at_risk.any(axis=0)[::-1].argmax()) if at_risk.any() else 0
        self.worth = self._worth(self._hazards(uses, at_risk)[:, : known + 2]).tolist()
        for counts in (uses, ends, starts):
            counts *= KEPT
        self._uses, self._ends, self._starts = uses.tolist(), ends.tolist(), starts.tolist()
        self.lessons += 1

    def _watched_by_age(self, now: int) -> Table:
        found = np.zeros((len(self._watched), BINS))
        used = set[int]()
        for kind, watched in enumerate(self._watched):
            for stretch, count in list(watched.items()):
                if count > 0.5:
                    found[kind, bin_of(now - self._stretches[stretch])] += count
                    used.add(stretch)
                elif stretch != self.stretch:
                    del watched[stretch]
        for stretch in self._stretches.keys() - used - {self.stretch}:
            del self._stretches[stretch]
        return found

    def _hazards(self, uses: Table, at_risk: Table) -> Table:
        """Of each kind and bin: counted where enough was seen, as the kind does at large where not."""
        at_large = np.empty(BINS)
        before = PRIOR_HAZARD
        for place, (used, seen) in enumerate(zip(uses.sum(0).tolist(), at_risk.sum(0).tolist(), strict=True)):
            before = (used + SMOOTHING * before) / (seen + SMOOTHING)
            at_large[place] = before
        factor = (uses.sum(1) + KIND_WEIGHT) / ((at_risk * at_large).sum(1) + KIND_WEIGHT)
        expected = factor[:, None] * at_large
        hazards: Table = np.minimum((uses + CELL_WEIGHT * expected) / (at_risk + CELL_WEIGHT), MOST_HAZARD)
        return hazards

    def _worth(self, hazards: Table) -> Table:
        kinds, bins = hazards.shape
        left = np.cumprod(1 - hazards, axis=1)
        alive = np.concatenate((np.ones((kinds, 1)), left[:, :-1]), axis=1)
        time = self._widths[:bins] * alive * (1 - hazards / 2)
        ends = alive * hazards
        used_by, time_by = np.cumsum(ends, axis=1), np.cumsum(time, axis=1)
        # Of each age the best later one. A block of some age is in the middle of its bin.
        best: Table = np.zeros((kinds, bins))
        for ahead in range(bins):
            stop = bins - ahead
            gained = used_by[:, ahead:] - used_by[:, :stop] + ends[:, :stop]
            spent = time_by[:, ahead:] - time_by[:, :stop] + time[:, :stop] / 2
            np.maximum(best[:, :stop], gained / spent, out=best[:, :stop])
        best = np.minimum.accumulate(np.where(alive > _SURE, best, np.inf), axis=1)
        # Beyond what anybody has lived to see the worth falls as 1 / age.
        edges = self._edges[bins - 1] / self._edges[bins:BINS]
        worth: Table = np.concatenate((best, best[:, -1:] * edges), axis=1)
        return worth


def _from_here(counts: Table) -> Table:
    summed: Table = counts[:, ::-1].cumsum(axis=1)[:, ::-1]
    return summed
