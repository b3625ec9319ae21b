"""A daemon's arena, mapped into this process: where the bytes of slots are, without asking."""

from __future__ import annotations

import mmap
import os
from typing import Any

import numpy as np

from tierkv.handles import Lease, SlotMemory
from tierkv.ids import FamilyId, Slot
from tierkv.slot_table import MappedSlotTable


class MappedArena:
    """Any thread. The mapping lives as long as this object, or a view of it, whatever becomes of the daemon."""

    def __init__(self, fds: list[int], facts: dict[str, Any]) -> None:
        self.instance: bytes = facts["instance"]
        self._region_bytes: int = facts["region_bytes"]
        self._slots_per_region: int = facts["slots_per_region"]
        regions: int = facts["regions"]
        try:
            memory = mmap.mmap(fds[0], regions * self._region_bytes)
            memory.madvise(mmap.MADV_DONTFORK)
            self._memory = memoryview(memory)
            self.table = MappedSlotTable(fds[1], regions, regions * self._slots_per_region)
        finally:
            for fd in fds:
                os.close(fd)

    def view(self, slot: Slot) -> memoryview:
        """The whole slot, writable."""
        region, position = divmod(slot, self._slots_per_region)
        stride = self.table.strides[region]
        start = region * self._region_bytes + position * stride
        return self._memory[start : start + stride]

    def generation(self, slot: Slot) -> int:
        return int(self.table.generations[slot])


class RemoteRun:
    """The blocks of one lease: the lessor of a lease that a daemon gave. Family i is block i of the run."""

    def __init__(self, memory: MappedArena, number: int, parts: int, words: dict[str, Any], end: Any) -> None:
        self.memory: SlotMemory = memory
        self.number = number
        blocks = words["blocks"]
        self._slots = np.frombuffer(words["slots"], dtype=np.int32).reshape(blocks, parts)
        self._generations = np.frombuffer(words["generations"], dtype=np.uint32).reshape(blocks, parts)
        self._expected = np.frombuffer(words["expected"], dtype=np.int64)
        self._end = end

    def slot_of(self, family: FamilyId, part: int) -> Slot:
        return Slot(int(self._slots[family, part]))

    def expects(self, family: FamilyId) -> int:
        return int(self._expected[family])

    def still_holds(self, family: FamilyId, part: int) -> bool:
        """After a copy: whether the slot still held what was leased when it ended."""
        slot = self.slot_of(family, part)
        return self.memory.generation(slot) == int(self._generations[family, part])

    def take_back(self, lease: Lease) -> None:
        self._end(self)

    def let_go(self, families: Any) -> None:
        """The tail of a lease that was shortened: it stays pinned until the rest goes."""
