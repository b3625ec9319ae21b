"""How long calls took, in the buckets of a Prometheus histogram, and the percentiles that can be told from them.

The bounds are the same everywhere, so that histograms of several daemons can be added up. A percentile is a straight
line inside its bucket, as ``histogram_quantile`` of Prometheus has it: good to about half a bucket.
"""

from __future__ import annotations

import threading
from bisect import bisect_left
from collections.abc import Sequence
from itertools import accumulate
from typing import Final, NamedTuple

BOUNDS_S: Final = (
    0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0
)  # fmt: skip
"""Upper bounds of all buckets but the last, which has none."""


class Times(NamedTuple):
    """What was observed up to a moment."""

    buckets: tuple[int, ...]
    """Calls by bucket: one more than ``BOUNDS_S``."""
    sum_s: float

    @property
    def calls(self) -> int:
        return sum(self.buckets)

    def quantile_s(self, share: float) -> float | None:
        """So long took at most this share of the calls; ``None`` when there was none. What is beyond the last bound
        counts as that bound."""
        wanted, before = share * self.calls, 0
        if not self.calls:
            return None
        for place, reached in enumerate(accumulate(self.buckets)):
            if reached >= wanted and reached > before:
                if place == len(BOUNDS_S):
                    break
                low_s = BOUNDS_S[place - 1] if place else 0.0
                return low_s + (BOUNDS_S[place] - low_s) * max(0.0, wanted - before) / (reached - before)
            before = reached
        return BOUNDS_S[-1]


class Timing:
    """One histogram. Thread-safe; an observation takes about a microsecond."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._buckets = [0] * (len(BOUNDS_S) + 1)
        self._sum_s = 0.0

    def observe(self, seconds: float) -> None:
        place = bisect_left(BOUNDS_S, seconds)
        with self._lock:
            self._buckets[place] += 1
            self._sum_s += seconds

    def times(self) -> Times:
        with self._lock:
            return Times(tuple(self._buckets), self._sum_s)


def facts(times: Times, shares: Sequence[float] = (0.5, 0.95, 0.99)) -> dict[str, float | int | None]:
    """For people: ``{"count": 12, "p50_s": 0.002, ...}``."""
    return {"count": times.calls, **{f"p{share * 100:g}_s": times.quantile_s(share) for share in shares}}
