"""A slot tier in plain memory: regions of equal size, each carved into slots of one size. The contract's reference."""

from __future__ import annotations

import threading
from collections.abc import Iterable
from dataclasses import dataclass, field

from tierkv.errors import ConfigError, HandleError
from tierkv.ids import Slot
from tierkv.testing.payloads import aligned
from tierkv.units import ALIGN_BYTES, MIB, align_up


@dataclass(slots=True)
class _Region:
    start: int
    stride_bytes: int = 0
    """0 while the region is in the pool."""
    free: list[int] = field(default_factory=list)
    """Numbers of free pieces."""
    used: set[int] = field(default_factory=set)


class MemorySlotTier:
    """Thread-safe, never blocks. A slot's number is its offset in pages."""

    def __init__(self, capacity_bytes: int, *, region_bytes: int = MIB) -> None:
        if capacity_bytes % region_bytes or region_bytes % ALIGN_BYTES:
            raise ConfigError(
                "capacity_bytes", capacity_bytes, f"give a multiple of the region's {region_bytes} bytes"
            )
        self._memory = aligned(capacity_bytes)
        self._region_bytes = region_bytes
        self._regions = [_Region(start) for start in range(0, capacity_bytes, region_bytes)]
        self._lock = threading.Lock()

    def reserve(self, count: int, slot_bytes: int) -> list[Slot] | None:
        stride_bytes = align_up(max(1, slot_bytes))
        if stride_bytes > self._region_bytes:
            return None
        with self._lock:
            slots: list[Slot] = []
            for region in [r for r in self._regions if r.stride_bytes == stride_bytes] + [
                r for r in self._regions if r.stride_bytes == 0
            ]:
                if len(slots) < count:
                    slots += self._take(region, stride_bytes, count - len(slots))
            if len(slots) == count:
                return slots
            self._give_back(slots)
            return None

    def release(self, slots: Iterable[Slot]) -> None:
        """Raises ``HandleError`` for a slot that is not in use; then none of ``slots`` is released."""
        with self._lock:
            self._give_back(list(slots))

    def view(self, slot: Slot) -> memoryview:
        region, start = self._region_of(slot)
        return self._memory[start : start + region.stride_bytes]

    def used_bytes(self) -> int:
        with self._lock:
            return sum(region.stride_bytes * len(region.used) for region in self._regions)

    def free_bytes(self) -> int:
        return len(self._memory) - self.used_bytes()

    def _take(self, region: _Region, stride_bytes: int, count: int) -> list[Slot]:
        if region.stride_bytes == 0:
            region.stride_bytes = stride_bytes
            region.free = list(range(self._region_bytes // stride_bytes))
        taken = [region.free.pop() for _ in range(min(count, len(region.free)))]
        region.used.update(taken)
        return [Slot((region.start + piece * stride_bytes) // ALIGN_BYTES) for piece in taken]

    def _give_back(self, slots: list[Slot]) -> None:
        places = []
        for slot in slots:
            region, start = self._region_of(slot)
            piece, rest = divmod(start - region.start, region.stride_bytes or 1)
            if rest or piece not in region.used:
                raise HandleError(f"slot {slot} is not in use")
            places.append((region.start, piece))
        if len(set(places)) < len(places):
            raise HandleError(f"a slot is released twice at once: {slots}")
        for region_start, piece in places:
            region = self._regions[region_start // self._region_bytes]
            region.used.remove(piece)
            region.free.append(piece)
            if not region.used:
                region.stride_bytes, region.free = 0, []

    def _region_of(self, slot: Slot) -> tuple[_Region, int]:
        start = slot * ALIGN_BYTES
        if not 0 <= start < len(self._memory):
            raise HandleError(f"slot {slot} does not exist")
        return self._regions[start // self._region_bytes], start
