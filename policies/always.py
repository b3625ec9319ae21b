"""Every block may go to the colder tier."""

from __future__ import annotations

from collections.abc import Mapping

from tierkv.policy import BlockInfo, Verdict
from tierkv.tier import Usage


class AlwaysPolicy:
    """Admits every block, whatever the tier's usage: the tier makes room by its own eviction, and a write that finds
    none is an outcome of the edge, not of admission. Not thread-safe: the store calls it under its lock.
    """

    name = "always"

    def __init__(self) -> None:
        self._admitted = 0

    def admit(self, info: BlockInfo, block_hash: bytes, usage: Usage) -> Verdict:
        self._admitted += 1
        return Verdict.ADMIT

    def counters(self) -> Mapping[str, int]:
        return {"admitted": self._admitted}
