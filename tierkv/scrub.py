"""The scrub: what lies in host RAM is compared, slowly and for ever, with the checksums taken when it was sealed.

Blocks from a blob tier are verified at every load. Blocks in host RAM are read by engines as they are, so a flipped bit
or a stray write there would be served for as long as the block stays. The scrub walks over all registered slots, about
once an hour, in small steps: a look at up to 256 slots under the catalog's lock, then their checksums outside it, at
most 4 MiB, then the lock again for those that differ. It pins nothing: a slot whose generation has not changed between
the two looks held the same registered block all the time, and nobody writes to those.

A damaged block leaves host RAM at once and cannot be matched there any more; copies in colder tiers stay, for they are
verified when they are loaded. Where it is leased, its slots go when the last lease ends, and until then nothing new is
stored under its name. ZFS and ECC memory have such scrubs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Final, NamedTuple

import numpy as np

from tierkv.catalog import HOST, LOCK_BATCH, Catalog
from tierkv.clock import Clock
from tierkv.executor import Executor, Timer
from tierkv.frame import checksum
from tierkv.ids import FamilyId, Slot
from tierkv.index import DOOMED
from tierkv.logs import RareLog
from tierkv.units import MIB

LANE = "scrub"
STEP_BYTES: Final = 4 * MIB
MAX_BYTES_PER_S: Final = 32 * MIB
"""Less than one per cent of a core; an arena of more than 112 GiB takes longer than an hour."""

PERIOD_S: Final = 1.0
_SLOTS_AT_ONCE: Final = 65_536


class _Look(NamedTuple):
    """A slot as it was under the lock."""

    slot: Slot
    generation: int
    family: FamilyId
    part: int
    payload: memoryview
    checksum: int


class Scrub:
    """Goes round and round over host RAM, ``pass_s`` for each round; 0 turns it off. Thread-safe."""

    def __init__(
        self,
        catalog: Catalog,
        executor: Executor,
        clock: Clock,
        owners_of: Callable[[Iterable[FamilyId]], tuple[str, ...]],
        pass_s: float,
    ) -> None:
        """``owners_of(families)``: in words, who holds leases over them."""
        self._catalog = catalog
        self._executor = executor
        self._clock = clock
        self._owners_of = owners_of
        self._pass_s = pass_s
        self._log = RareLog(clock)
        self._owner = np.frombuffer(catalog.owner, dtype=np.int32)
        self._cursor = 0
        self._credit_bytes = 0.0
        self._at_s = clock.now_s()
        self._running = False
        self._closed = False
        self._timer: Timer | None = None
        self.passes = 0
        """Rounds over all of host RAM so far."""
        self.damaged_at_s: float | None = None
        """When a damaged block was last found, on the clock."""

    @property
    def progress(self) -> float:
        """How far the present round has come, from 0 to 1."""
        return self._cursor / len(self._owner)

    def start(self) -> None:
        if self._pass_s > 0:
            self._executor.open_lane(LANE, 1)
            self._timer = self._executor.call_later(PERIOD_S, self._tick)

    def close(self) -> None:
        """Starts no further step."""
        self._closed = True
        if self._timer is not None:
            self._timer.cancel()

    def check_all(self) -> int:
        """One whole round now, in the calling thread; returns how many damaged blocks it has found."""
        self._cursor = found = 0
        while True:
            found += self._step_over(LOCK_BATCH * STEP_BYTES)
            if not self._cursor:
                return found

    # -- pace -----------------------------------------------------------------------------------------------------

    def _tick(self) -> None:
        if self._closed:
            return
        self._timer = self._executor.call_later(PERIOD_S, self._tick)
        now_s = self._clock.now_s()
        rate = min(MAX_BYTES_PER_S, self._catalog.host.arena.used_bytes / self._pass_s)
        due = self._credit_bytes + rate * (now_s - self._at_s)
        self._credit_bytes = min(
            due, max(float(STEP_BYTES), 2 * PERIOD_S * rate)
        )  # time that jumps is not made up
        self._at_s = now_s
        if self._credit_bytes > 0 and not self._running:
            self._running = True
            self._executor.run(LANE, self._step, self._stepped)

    def _step(self) -> None:
        whole = False
        try:
            self._step_over(STEP_BYTES)
            whole = True
        finally:
            if not whole:  # this thread ends; the next tick begins with another one
                self._running = False

    def _stepped(self, _: None) -> None:
        if self._credit_bytes > 0 and not self._closed:
            self._executor.run(LANE, self._step, self._stepped)
        else:
            self._running = False

    # -- looking --------------------------------------------------------------------------------------------------

    def _step_over(self, most_bytes: int) -> int:
        """Checks the next slots, at least one; returns how many damaged blocks they held."""
        with self._catalog.gate, self._catalog.lock:
            looks = self._look(most_bytes)
        checked = sum(len(look.payload) for look in looks)
        self._credit_bytes -= checked
        suspects = [look for look in looks if checksum(look.payload) != look.checksum]
        counters = self._catalog.counters
        if looks:
            counters.add(len(looks), "scrubbed_blocks_total", "host")
            counters.add(checked, "scrubbed_bytes_total", "host")
        if not self._cursor:
            self.passes += 1
            self._credit_bytes = min(
                self._credit_bytes, 0.0
            )  # at most one round a tick, also where nothing is to see
            if not looks:
                self._credit_bytes = 0.0  # there may be nothing at all to spend it on
        return self._take_out(suspects) if suspects else 0

    def _look(self, most_bytes: int) -> list[_Look]:
        """The next registered slots, up to that many bytes; moves the cursor, back to 0 at the end."""
        end = min(self._cursor + _SLOTS_AT_ONCE, len(self._owner))
        found = np.flatnonzero(self._owner[self._cursor : end])[:LOCK_BATCH] + self._cursor
        if len(found) == LOCK_BATCH:
            end = int(found[-1]) + 1
        looks: list[_Look] = []
        for number in found.tolist():
            if most_bytes <= 0:
                end = number
                break
            look = self._look_at(Slot(number))
            if look is not None:
                looks.append(look)
                most_bytes -= len(look.payload)
        self._cursor = end % len(self._owner)
        return looks

    def _look_at(self, slot: Slot) -> _Look | None:
        catalog, index, host = self._catalog, self._catalog.index, self._catalog.host
        family = FamilyId(catalog.owner[slot])
        if index.state[family] & DOOMED or family in catalog.damaged:
            return None  # nobody can find it any more
        part = index.slots[family].tolist().index(slot)
        size = index.spaces[index.space_of[family]].part_bytes[part]
        payload = host.view(slot)[:size]
        return _Look(slot, host.generation(slot), family, part, payload, host.checksum(slot))

    # -- damage ---------------------------------------------------------------------------------------------------

    def _take_out(self, suspects: Sequence[_Look]) -> int:
        """Those that still hold what they held at the first look are damaged."""
        catalog = self._catalog
        damaged: list[FamilyId] = []
        leased: list[FamilyId] = []
        with catalog.gate, catalog.lock:
            catalog._catch_up()
            for look in suspects:
                same = catalog.owner[look.slot] == look.family
                if not same or catalog.host.generation(look.slot) != look.generation:
                    continue  # it left meanwhile, and what was read is somebody else's
                if look.family not in damaged and look.family not in catalog.damaged:
                    damaged.append(look.family)
                    if catalog.index.pins[look.family]:
                        leased.append(look.family)
                    self._lose(look.family)
        for _ in damaged:
            catalog.counters.add(1, "corrupt_blocks_total", "host", "checksum")
        if damaged:
            self.damaged_at_s = self._clock.now_s()
            owners = "; ".join(self._owners_of(leased)) or "nobody"
            self._log.error(
                "damaged",
                "%d damaged blocks in host RAM were taken out: their bytes are not those that were sealed (leased by "
                "%s). The memory is faulty, or something writes to it",
                len(damaged),
                owners,
            )
        return len(damaged)

    def _lose(self, family: FamilyId) -> None:
        catalog = self._catalog
        if catalog.index.pins[family]:
            catalog.damaged.add(family)
        if not catalog.index.whole_in[family] & ~(1 << HOST):
            catalog.counters.add(1, "dropped_blocks_total", "host", "corrupt")
        catalog._lose(family, HOST, evicted=False, reason="corrupt")
