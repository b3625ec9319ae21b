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
RECENT_MINUTES: Final = 5
"""How far back the percentiles for people reach. Those of other windows are for Prometheus to work out."""


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


class _Tally:
    """Observations that are counted together: all of them, or those of one minute."""

    def __init__(self, minute: int = -1) -> None:
        self.minute = minute
        self.buckets = [0] * (len(BOUNDS_S) + 1)
        self.sum_s = 0.0

    def add(self, place: int, seconds: float) -> None:
        self.buckets[place] += 1
        self.sum_s += seconds


class Timing:
    """One histogram of all calls, and one of each of the last minutes. Thread-safe; an observation takes one or two
    microseconds. ``now_s`` is the store's clock, the same for all calls of one object."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._all = _Tally()
        self._ring = [_Tally() for _ in range(RECENT_MINUTES)]

    def observe(self, seconds: float, now_s: float) -> None:
        """A call that ended now took so long."""
        place, minute = bisect_left(BOUNDS_S, seconds), _minute(now_s)
        at = minute % RECENT_MINUTES
        with self._lock:
            if self._ring[at].minute != minute:
                self._ring[at] = _Tally(minute)
            self._all.add(place, seconds)
            self._ring[at].add(place, seconds)

    def times(self) -> Times:
        """Of all calls."""
        with self._lock:
            return _sum([self._all])

    def recent(self, now_s: float) -> Times:
        """Of those that ended in this minute and the ``RECENT_MINUTES - 1`` before it."""
        oldest = _minute(now_s) - RECENT_MINUTES + 1
        with self._lock:
            return _sum([tally for tally in self._ring if tally.minute >= oldest])

    def facts(
        self, now_s: float, shares: Sequence[float] = (0.5, 0.95, 0.99)
    ) -> dict[str, float | int | None]:
        """For people: ``{"count": 120, "recent_count": 12, "p50_s": 0.002, ...}``, of the recent calls."""
        recent = self.recent(now_s)
        quantiles = {f"p{share * 100:g}_s": recent.quantile_s(share) for share in shares}
        return {"count": self.times().calls, "recent_count": recent.calls, **quantiles}


def _minute(now_s: float) -> int:
    return int(now_s // 60.0)


def _sum(tallies: Sequence[_Tally]) -> Times:
    buckets = [sum(column) for column in zip(*(tally.buckets for tally in tallies), strict=True)]
    return Times(tuple(buckets) or (0,) * (len(BOUNDS_S) + 1), sum(tally.sum_s for tally in tallies))
