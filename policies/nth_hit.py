"""A run is kept in host RAM from the second time on that it is wanted from a colder tier; before it is only served.

What is served leaves host RAM first again. So a prompt that is wanted once more and never again does not push out what
is in use: the "second chance" of two-queue caches ("2Q", Johnson and Shasha, VLDB 1994) between tiers.
"""

from __future__ import annotations

from collections.abc import Mapping

from tierkv.errors import ConfigError
from tierkv.policies.sightings import Sightings
from tierkv.policy import LoadQuote, Promotion
from tierkv.tier import Usage


class NthHitPolicy:
    """PROMOTE from the ``nth`` load of a run on, SERVE before. A run is recognised by its last block, within the last
    ``history`` to twice as many runs; one without a name is promoted. Memory: 110 to 220 bytes times ``history``, 3.6
    MB at most by default. Not thread-safe: the store calls it under its lock."""

    name = "nth_hit"

    def __init__(self, *, nth: int = 2, history: int = 16_384) -> None:
        if nth < 1 or history < 1:
            raise ConfigError("nth_hit", (nth, history), "both the hit and the history must be at least 1")
        self._nth = nth
        self._loads = Sightings(history)
        self._promoted = self._served = 0

    def decide(self, quote: LoadQuote, usage: Usage) -> Promotion:
        mark = int.from_bytes(quote.last_hash[:8], "big")
        loads = self._nth
        if quote.last_hash:
            loads = 1 + (self._loads.see(mark, 0) or 0)
            self._loads.see(mark, loads)
        if loads >= self._nth:
            self._promoted += 1
            return Promotion.PROMOTE
        self._served += 1
        return Promotion.SERVE

    def counters(self) -> Mapping[str, int]:
        return {"promoted": self._promoted, "served": self._served}
