"""A blob tier that fails as real ones do, by a seed: misses, damaged bytes, time-outs, outages, lies of a probe.

It wraps a ``MemoryBlobTier`` that holds the truth. Other events may happen inside each of its calls, before, between
and after the blocks of a batch.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from enum import Enum

from tierkv.clock import Deadline
from tierkv.frame import HEADER_BYTES, FrameHeader
from tierkv.ids import BlockKey, KeyPrefix
from tierkv.testing.memory import MemoryBlobTier
from tierkv.testing.sim import SimExecutor
from tierkv.tier import ClearResult, DoneCallback, Item, Outcome, Presence, Usage, Want


@dataclass(frozen=True)
class Faults:
    """Chances, each for one block."""

    lost: float = 0.0
    """A read finds that the tier has forgotten the block."""
    damaged: float = 0.0
    """A read brings bytes that are not the block, and says ``DONE``."""
    corrupt: float = 0.0
    """A read notices by itself that the block is damaged."""
    timeout: float = 0.0
    unavailable: float = 0.0
    full: float = 0.0
    """A write is refused although there may be room."""
    false_presence: float = 0.0
    """A probe says that a block is there that is not."""
    false_absence: float = 0.0
    outage: float = 0.0
    """A call begins an outage of a few calls, during which nothing works."""

    @staticmethod
    def some(scale: float = 1.0) -> Faults:
        """A bit of everything."""
        return Faults(
            lost=0.02 * scale,
            damaged=0.04 * scale,
            corrupt=0.02 * scale,
            timeout=0.03 * scale,
            unavailable=0.03 * scale,
            full=0.03 * scale,
            false_presence=0.05 * scale,
            false_absence=0.05 * scale,
            outage=0.01 * scale,
        )


class Mood(Enum):
    """What a tier is like for a while."""

    WELL = "well"
    OUT = "out"
    """Every call fails."""
    FULL = "full"
    READ_ONLY = "read-only"
    LYING = "lying"
    """Probes and reads tell tales: presence that is not, flipped bits, another key's bytes, lengths that are wrong."""
    HUNG = "hung"
    """Nothing of it moves (see ``SimExecutor.stall``)."""


_LIES = Faults(lost=0.1, damaged=0.6, corrupt=0.1, false_presence=0.5, false_absence=0.5)


class SimTier:
    """A ``BlobTier`` over ``truth``. ``faults`` may be changed at any time."""

    def __init__(
        self, name: str, truth: MemoryBlobTier, sim: SimExecutor, seed: int, faults: Faults | None = None
    ) -> None:
        self.name = name
        self.truth = truth
        self.caps = truth.caps
        self.faults = faults or Faults()
        self.mood = Mood.WELL
        self.injected: dict[str, int] = {}
        """How often each fault happened."""
        self._deleting: list[Sequence[BlockKey]] = []
        self._sim = sim
        self._dice = random.Random(f"{name} {seed}")
        self._calls_out = 0

    def start(self) -> None:
        self.truth.start()

    def close(self, deadline: Deadline) -> None:
        self.truth.close(deadline)

    # -- the calls of the store -----------------------------------------------------------------------------------

    def probe(self, keys: Sequence[BlockKey], deadline: Deadline) -> list[Presence]:
        self._enter()
        if self._is_out():
            return [Presence.UNKNOWN] * len(keys)
        found = [self._answer(presence) for presence in self.truth.probe(keys, deadline)]
        self._sim.interleave()
        return found

    def _answer(self, truth: Presence) -> Presence:
        if truth is Presence.ABSENT and self._happens("false_presence"):
            return Presence.PRESENT
        if truth is Presence.PRESENT and self._happens("false_absence"):
            return self._dice.choice((Presence.ABSENT, Presence.PENDING, Presence.UNKNOWN))
        return truth

    def get_into(self, wants: Sequence[Want], deadline: Deadline, on_done: DoneCallback) -> None:
        self._enter()
        out = self._is_out()
        self._each(wants, on_done, lambda want: self._get(want, deadline, out))

    def _get(self, want: Want, deadline: Deadline, out: bool) -> Outcome:
        failure = self._failure(deadline, out)
        if failure is not None:
            _scribble(want.payload)  # a transfer that broke off may have written anything
            return failure
        if self._happens("lost"):
            self.truth.delete([want.key])
        if self._happens("corrupt"):
            _scribble(want.payload)
            return Outcome.CORRUPT
        outcome = self._one(self.truth.get_into, want, deadline)
        if outcome is Outcome.DONE and self._happens("damaged"):
            self._damage(want)
        return outcome

    def put_from(self, items: Sequence[Item], deadline: Deadline, on_done: DoneCallback) -> None:
        self._enter()
        out = self._is_out()
        self._each(items, on_done, lambda item: self._put(item, deadline, out))

    def _put(self, item: Item, deadline: Deadline, out: bool) -> Outcome:
        deleted = any(item.key in keys for keys in self._deleting)
        assert not deleted, f"{self.name}: a block is written while a call to delete it is going on"
        failure = self._failure(deadline, out)
        if failure is not None:
            if self.caps.evicts_itself and self._dice.random() < 0.5:
                self._one(self.truth.put_from, item, deadline)  # the server did it, only its answer was lost
            return failure
        if self.mood is Mood.READ_ONLY:
            return Outcome.UNAVAILABLE
        if self.mood is Mood.FULL or self._happens("full"):
            return Outcome.FULL
        return self._one(self.truth.put_from, item, deadline)

    def delete(self, keys: Sequence[BlockKey]) -> None:
        self._deleting.append(keys)
        for _ in range(8):  # the rarest of races are with deletes, so they take long
            self._enter()
        self.truth.delete(keys)
        self._deleting.remove(keys)

    def clear(self, prefix: KeyPrefix, deadline: Deadline) -> ClearResult:
        self._enter()
        if self._is_out() or deadline.over():
            return ClearResult(0, False, "out of order")
        return self.truth.clear(prefix, deadline)

    def scan(self) -> Iterator[FrameHeader]:
        return self.truth.scan()

    def usage(self) -> Usage:
        usage = self.truth.usage()
        if self.mood is Mood.FULL:
            return replace(usage, largest_free_bytes=0)
        return replace(usage, writable=False) if self.mood is Mood.READ_ONLY else usage

    def status(self) -> dict[str, object]:
        return self.truth.status()

    def _enter(self) -> None:
        """A call that may take its time, so that others come first."""
        assert not self._sim.held, f"{self.name}: a tier is called under a lock"
        self._sim.interleave()

    # -- faults ---------------------------------------------------------------------------------------------------

    def _each(
        self, batch: Sequence[Want] | Sequence[Item], on_done: DoneCallback, do: Callable[..., Outcome]
    ) -> None:
        order = list(range(len(batch)))
        self._dice.shuffle(order)
        for i in order:
            on_done(i, do(batch[i]))
            self._sim.interleave()

    def _one(self, call: Callable[..., None], block: Want | Item, deadline: Deadline) -> Outcome:
        outcomes: list[Outcome] = []
        call([block], deadline, lambda _, outcome: outcomes.append(outcome))
        return outcomes[0]

    def _is_out(self) -> bool:
        if self.mood is Mood.OUT:
            return True
        if self._calls_out:
            self._calls_out -= 1
        elif self._happens("outage"):
            self._calls_out = self._dice.randrange(1, 12)
        return self._calls_out > 0

    def _failure(self, deadline: Deadline, out: bool) -> Outcome | None:
        if deadline.cancelled:
            return Outcome.CANCELLED
        if deadline.over():
            return Outcome.TIMEOUT
        if out or self._happens("unavailable"):
            return Outcome.UNAVAILABLE
        return Outcome.TIMEOUT if self._happens("timeout") else None

    def _happens(self, fault: str) -> bool:
        chance: float = getattr(_LIES if self.mood is Mood.LYING else self.faults, fault)
        if not chance or self._dice.random() >= chance:
            return False
        self.injected[fault] = self.injected.get(fault, 0) + 1
        return True

    def _damage(self, want: Want) -> None:
        """Changes what was read into something else that is not the block."""
        choice = self._dice.randrange(5)
        others = [raw for key, raw in self.truth.storage.frames.items() if key != want.key]
        if choice == 0 and others:  # the whole frame of another block, as from an index that went wrong
            raw = self._dice.choice(others)
            if len(raw) - HEADER_BYTES <= len(want.payload):
                want.header[:HEADER_BYTES] = raw[:HEADER_BYTES]
                want.payload[: len(raw) - HEADER_BYTES] = raw[HEADER_BYTES:]
                want.stored_bytes = len(raw) - HEADER_BYTES
                return
        if choice == 1 and others:  # the right header before the bytes of another block
            raw = self._dice.choice(others)[HEADER_BYTES : HEADER_BYTES + want.stored_bytes]
            want.payload[: len(raw)] = raw
            return
        if choice == 2:  # a length that is not true
            want.stored_bytes = max(0, want.stored_bytes + self._dice.choice((-4096, -1, 1, 4096, 1 << 40)))
            return
        where = want.header[:HEADER_BYTES] if choice == 3 else want.payload[: want.stored_bytes]
        where[self._dice.randrange(len(where))] ^= 1 << self._dice.randrange(8)


def _scribble(payload: memoryview) -> None:
    payload[:64] = b"\x5c" * 64
