"""A run is loaded where that is quicker than computing it again, by the store's own measurements.

What is loaded passes through host RAM in any case (it is the gateway), so the choice between keeping and serving costs
no extra copy, only the place that the run takes from others. A run that is loaded has been used before and is used
now: it earns a place as a block does that was just computed, and so does a run that is hit for the first time: a
conversation's next turn asks for it again. Only a run that would push out most of what host RAM holds is served
without keeping it, so that one huge prompt does not cost everybody else's blocks.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

from tierkv.errors import ConfigError
from tierkv.policy import LoadQuote, Promotion
from tierkv.tier import Usage

TRY_AGAIN_EVERY = 32
"""Of so many refusals in a row at one tier the last is loaded all the same."""

KEEP_FRACTION = 0.5
"""A run above this share of host RAM is served, not promoted."""


class BreakEvenPolicy:
    """RECOMPUTE when loading is expected to take more than ``factor`` times as long as computing; else PROMOTE, or
    SERVE when the run is larger than half of host RAM (``usage`` is that of host RAM, the tier that would keep it).

    An edge or an engine that was not measured yet gets PROMOTE, so that it is measured. An edge that was slow once
    would never be measured again, so every 32nd refusal in a row at a tier is loaded as well. ``factor`` below 1
    spares the link and the disk, above 1 spares the GPU. Memory: one number for each tier. Not thread-safe: the store
    calls it under its lock.
    """

    name = "break_even"

    def __init__(self, *, factor: float = 1.0) -> None:
        if not 0 < factor < math.inf:
            raise ConfigError(
                "factor", factor, "break_even takes a positive number, 1.0 compares as measured"
            )
        self._factor = factor
        self._refused_in_a_row: dict[str, int] = {}
        self._counts = dict.fromkeys(("promoted", "served", "recomputed", "tried_again"), 0)

    def decide(self, quote: LoadQuote, usage: Usage) -> Promotion:
        if self._too_dear(quote):
            refused = self._refused_in_a_row.get(quote.tier, 0) + 1
            if refused < TRY_AGAIN_EVERY:
                self._refused_in_a_row[quote.tier] = refused
                self._counts["recomputed"] += 1
                return Promotion.RECOMPUTE
            self._counts["tried_again"] += 1
        self._refused_in_a_row[quote.tier] = 0
        if quote.bytes > KEEP_FRACTION * usage.capacity_bytes:
            self._counts["served"] += 1
            return Promotion.SERVE
        self._counts["promoted"] += 1
        return Promotion.PROMOTE

    def _too_dear(self, quote: LoadQuote) -> bool:
        if quote.load_s is None or quote.compute_s is None:
            return False
        return quote.load_s > quote.compute_s * self._factor

    def counters(self) -> Mapping[str, int]:
        return dict(self._counts)
