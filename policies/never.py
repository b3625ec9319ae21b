"""Nothing is loaded from a colder tier: a run is computed again."""

from __future__ import annotations

from collections.abc import Mapping

from tierkv.policy import LoadQuote, Promotion
from tierkv.tier import Usage


class NeverPolicy:
    """Says RECOMPUTE of every run. For measuring what the colder tiers bring, and for one that only other hosts read
    from. Not thread-safe: the store calls it under its lock."""

    name = "never"

    def __init__(self) -> None:
        self._recomputed = 0

    def decide(self, quote: LoadQuote, usage: Usage) -> Promotion:
        self._recomputed += 1
        return Promotion.RECOMPUTE

    def counters(self) -> Mapping[str, int]:
        return {"recomputed": self._recomputed}
