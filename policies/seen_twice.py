"""A block goes to the colder tier when it is seen for the second time.

Most prompts never come back. Writing their blocks wears the disk, fills the link and evicts what does come back; one
sighting of patience keeps them out (the "doorkeeper" of TinyLFU, by Einziger, Friedman and Manes, 2017, here an exact
set instead of a Bloom filter).
"""

from __future__ import annotations

from collections.abc import Mapping

from tierkv.errors import ConfigError
from tierkv.policy import BlockInfo, Verdict
from tierkv.tier import Usage

MARK_BYTES = 8
"""Of a block hash this much is remembered. A chance match (1 in 2**47 for the default history) only admits early."""

SHARDS = 64
"""A set that grows stops the world for as long as it copies itself; one of 64 does so for a millisecond at most."""


class SeenTwicePolicy:
    """Admits a block from its second sighting on; a sighting is a question to ``admit``.

    Two generations of marks are kept. New and renewed ones go to the young generation; when that holds ``history``
    marks it becomes the old one, and what was old is forgotten. So a block is recognised when it comes again within
    the next ``history`` different blocks, and is forgotten after at most twice as many. Tenants do not see each
    other's sightings. Memory: about 70 bytes for each mark, so up to 140 bytes times ``history`` (9 MiB by default).

    The first sighting is not written anywhere: a block that leaves host RAM before its second one is dropped. Not
    thread-safe: the store calls it under its lock.
    """

    name = "seen_twice"

    def __init__(self, *, history: int = 65_536) -> None:
        if history < 1:
            raise ConfigError("history", history, "seen_twice remembers at least 1 block")
        self._history = history
        self._young = _empty_generation()
        self._old = _empty_generation()
        self._young_marks = 0
        self._admitted = self._rejected = self._rotations = 0

    def admit(self, info: BlockInfo, block_hash: bytes, usage: Usage) -> Verdict:
        mark = int.from_bytes(block_hash[:MARK_BYTES], "big") ^ (info.tenant << 8 * MARK_BYTES)
        shard = mark % SHARDS
        if mark in self._young[shard]:
            known = True
        else:
            known = mark in self._old[shard]
            self._remember(shard, mark)
        if known:
            self._admitted += 1
            return Verdict.ADMIT
        self._rejected += 1
        return Verdict.REJECT

    def _remember(self, shard: int, mark: int) -> None:
        if self._young_marks == self._history:
            self._old, self._young = self._young, _empty_generation()
            self._young_marks = 0
            self._rotations += 1
        self._young[shard].add(mark)
        self._young_marks += 1

    def __len__(self) -> int:
        """Marks that are kept, those of both generations twice."""
        return sum(map(len, self._young)) + sum(map(len, self._old))

    def counters(self) -> Mapping[str, int]:
        return {"admitted": self._admitted, "rejected": self._rejected, "rotations": self._rotations}


def _empty_generation() -> list[set[int]]:
    return [set() for _ in range(SHARDS)]
