"""Only blocks of a size that is worth the trip go to the colder tier.

A small block costs a page for its header and a round trip of its own, a large one fills a queue for long. An admission
filter by size is the simplest of those that the web's caches have ("AdaptSize", Berger, Sitaraman, Harchol-Balter, NSDI
2017, moves the bound by itself).
"""

from __future__ import annotations

from collections.abc import Mapping

from tierkv.errors import ConfigError
from tierkv.policy import BlockInfo, Verdict
from tierkv.tier import Usage
from tierkv.units import KIB, MIB


class SizeRangePolicy:
    """Admits blocks of ``least_bytes`` to ``most_bytes``, all parts of a family together. Memory: none. Not
    thread-safe: the store calls it under its lock."""

    name = "size_range"

    def __init__(self, *, least_bytes: int = 64 * KIB, most_bytes: int = 64 * MIB) -> None:
        if not 0 <= least_bytes <= most_bytes:
            raise ConfigError(
                "size_range", (least_bytes, most_bytes), "the least size must not be above the largest"
            )
        self._least, self._most = least_bytes, most_bytes
        self._admitted = self._too_small = self._too_large = 0

    def admit(self, info: BlockInfo, block_hash: bytes, usage: Usage) -> Verdict:
        if info.bytes < self._least:
            self._too_small += 1
            return Verdict.REJECT
        if info.bytes > self._most:
            self._too_large += 1
            return Verdict.REJECT
        self._admitted += 1
        return Verdict.ADMIT

    def counters(self) -> Mapping[str, int]:
        return {"admitted": self._admitted, "too_small": self._too_small, "too_large": self._too_large}
