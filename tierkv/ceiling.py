"""The hit ceiling of the traffic seen: what an endless cache would have hit.

An endless cache misses a block only the first time that anybody asks for it, and not even then when it was stored
before (what an engine has just decoded comes back in the next turn of a conversation). So all that is needed is how
many blocks that were asked for had been neither asked for nor stored before: a count of distinct things, for which a
sketch of 16 KiB is enough, however long the traffic.

HyperLogLog (Flajolet, Fusy, Gandouet, Meunier 2007) keeps, for each of m groups of hashes, the longest run of zero bits
seen. Here each change of the sketch counts as 1 / (chance that a new hash changes it) new blocks, which is unbiased
from the first block on, less noisy, and tells *which* request brought the new ones (Cohen, "All-Distances Sketches,
Revisited: HIP Estimators", 2014; Ting, "Streamed Approximate Counting of Distinct Elements", 2014). Block hashes are
sha256 digests, so their own bits serve as the hash.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from itertools import groupby
from operator import itemgetter
from typing import Any, Final

import numpy as np

from tierkv.ids import BlockHash

REGISTER_BITS: Final = 14
"""16,384 registers of one byte: an error of 0.65 % (one standard deviation)."""

MOST_WAITING: Final = 2048
"""Blocks that were stored and not taken into the sketch yet: many at a time are twenty times cheaper."""

Words = np.ndarray[Any, np.dtype[np.uint64]]


class Sketch:
    """Counts distinct 64-bit hashes. Not thread-safe."""

    def __init__(self, register_bits: int = REGISTER_BITS) -> None:
        self._shift = np.uint64(64 - register_bits)
        self._bits = np.uint64(register_bits)
        self._registers: np.ndarray[Any, np.dtype[np.uint8]] = np.zeros(1 << register_bits, np.uint8)
        self._chance = float(1 << register_bits)
        """Sum over the registers of 2 ** -register; divided by their number, the chance that a new hash changes one."""

    def add(self, hashes: Words) -> float:
        """Takes hashes in; returns an estimate of how many of them are new."""
        # Within a batch the order of changes is lost, which is harmless while it is small against the registers.
        size = max(1, len(self._registers) // 4)
        return sum(self._add(hashes[start : start + size]) for start in range(0, len(hashes), size))

    def _add(self, hashes: Words) -> float:
        rest = hashes << self._bits
        places = (hashes >> self._shift).astype(np.int64)
        # The number of leading zeros and one: what the exponent of a float says, kept from rounding up by the mask.
        _, exponents = np.frexp((rest & ~(rest >> np.uint64(1))).astype(np.float64))
        ranks = (65 - exponents).astype(np.uint8)
        registers, new = self._registers, 0.0
        while True:
            higher = ranks > registers[places]
            if not higher.any():
                return new
            places, ranks = places[higher], ranks[higher]
            _, first = np.unique(
                places, return_index=True
            )  # one hash for each register, the rest next time round
            at, to = places[first], ranks[first]
            steps = np.ldexp(1.0, -to.astype(np.int64)) - np.ldexp(1.0, -registers[at].astype(np.int64))
            chances = self._chance + np.cumsum(steps) - steps
            new += float((len(registers) / chances).sum())
            self._chance += float(steps.sum())
            registers[at] = to


class Tally:
    """Sums over requests, of one namespace, one client, or all. Read without a lock."""

    __slots__ = ("asked", "first_seen", "hit")

    def __init__(self) -> None:
        self.asked = 0
        """Blocks asked for."""
        self.hit = 0
        """Blocks given."""
        self.first_seen = 0.0
        """About how many of the blocks asked for nobody had asked for or stored before."""

    def values(self) -> dict[str, float | None]:
        """Plain values. ``ceiling``: the share that an endless cache would have hit, ``None`` before any request. What
        was given came from somewhere, so the ceiling is never said to be lower than that."""
        ceiling = None
        if self.asked:
            ceiling = min(1.0, max(self.hit / self.asked, 1.0 - self.first_seen / self.asked))
        return {"asked_blocks": self.asked, "hit_blocks": self.hit, "ceiling": ceiling}


class Question:
    """What was counted of one chain, from the first look at it to its load."""

    __slots__ = ("first_seen", "hit", "own")

    def __init__(self, own: int, hit: int, first_seen: float) -> None:
        self.own = own
        """Leading blocks that the engine had itself."""
        self.hit = hit
        """Leading blocks that were to be had when it was asked."""
        self.first_seen = first_seen
        """About how many of those behind were new."""


class Ceiling:
    """What was asked, what was given, and what an endless cache would have given. Thread-safe.

    One request may look at its chain many times (``match`` while it waits, ``prefetch``) before it loads it once. It is
    counted at the first look, since many engines go no further when there is nothing to be had, and what it got is
    added when it loads. The next look at the same chain, or the next load without one, is another request. Hits in host
    RAM, which are most of all, cost one addition: such a block was stored before, so it is not new to the sketch.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._sketch = Sketch()
        self._waiting: list[tuple[int, Sequence[BlockHash], Sequence[int]]] = []
        self._waiting_blocks = 0

    def look(
        self, tallies: Sequence[Tally], mark: int, hashes: Sequence[BlockHash], own: int, hit: int
    ) -> Question | None:
        """A request asks for blocks of which it has the first ``own``; the first ``hit`` are to be had. ``None`` when
        it asks for nothing. ``mark``: a number of its namespace."""
        if own >= len(hashes):
            return None
        with self._lock:
            new = self._take_in(mark, hashes[max(own, hit) :])
            self._count(tallies, len(hashes) - own, 0, new)
        return Question(own, hit, new)

    def give(
        self,
        tallies: Sequence[Tally],
        mark: int,
        hashes: Sequence[BlockHash],
        hit: int,
        question: Question | None,
    ) -> None:
        """A request has loaded the first ``hit`` blocks."""
        with self._lock:
            if question is None:
                new = self._take_in(mark, hashes[hit:])
                self._count(tallies, len(hashes), hit, new)
            else:
                # Some that were not known to be anywhere were somewhere after all (a server was asked): not new then.
                behind = len(hashes) - max(question.own, question.hit)
                found = min(behind, hit - max(question.own, question.hit))
                back = question.first_seen * found / behind if found > 0 else 0.0
                self._count(tallies, 0, max(0, hit - question.own), -back)

    def give_all(self, tallies: Sequence[Tally], count: int, question: Question | None) -> None:
        """A request has got all that it asked for from host RAM."""
        asked, hit = (count, count) if question is None else (0, count - question.own)
        with self._lock:
            for tally in tallies:
                tally.asked += asked
                tally.hit += hit

    def stored(self, mark: int, hashes: Sequence[BlockHash], positions: Sequence[int]) -> None:
        """Blocks of a chain were stored: who asks for them later asks for nothing new."""
        with self._lock:
            self._waiting.append((mark, hashes, positions))
            self._waiting_blocks += len(positions)
            if self._waiting_blocks >= MOST_WAITING:
                self._catch_up()

    def _take_in(self, mark: int, hashes: Sequence[BlockHash]) -> float:
        if not hashes:
            return 0.0
        self._catch_up()
        return self._sketch.add(_words(mark, hashes))

    def _catch_up(self) -> None:
        if self._waiting:
            waiting, self._waiting, self._waiting_blocks = self._waiting, [], 0
            for mark, same in groupby(waiting, key=itemgetter(0)):
                blocks = [hashes[i] for _, hashes, positions in same for i in positions]
                self._sketch.add(_words(mark, blocks))

    def _count(self, tallies: Sequence[Tally], asked: int, hit: int, first_seen: float) -> None:
        for tally in tallies:
            tally.asked += asked
            tally.hit += hit
            tally.first_seen += first_seen


def _words(mark: int, hashes: Sequence[BlockHash]) -> Words:
    """Eight bytes of each hash; the mark tells apart what two namespaces call by one name."""
    table = np.frombuffer(b"".join(hashes), np.uint64).reshape(-1, 4)
    return table[:, 1] ^ np.uint64(mark)
