"""A block that a request wants is loaded and kept."""

from __future__ import annotations

from collections.abc import Mapping

from tierkv.policy import LoadQuote, Promotion
from tierkv.tier import Usage


class OnHitPolicy:
    """Promotes every run that was hit, without a look at its price. Right where loading is known to be quicker than
    computing (a local disk, a large model); ``break_even`` compares. Not thread-safe: the store calls it under its
    lock.
    """

    name = "on_hit"

    def __init__(self) -> None:
        self._promoted = 0

    def decide(self, quote: LoadQuote, usage: Usage) -> Promotion:
        self._promoted += 1
        return Promotion.PROMOTE

    def counters(self) -> Mapping[str, int]:
        return {"promoted": self._promoted}
