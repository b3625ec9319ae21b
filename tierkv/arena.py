"""The host arena: one stretch of memory, cut into regions of equal size, each carved into slots of one size.

Slots of one region are alike, so several models and layer groups share an arena without external fragmentation: an
empty region goes back to the pool and can be carved for another size. A slot is an integer,
``region * slots_per_region + position``; its stride is a multiple of 4096, so that it can be read from and written to
a disk directly.

Not thread-safe: its owner (``tierkv.tiers.host``) locks. Views may be used from any thread.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable, Iterable

from tierkv.errors import ClosedError, ConfigError, HandleError
from tierkv.ids import Slot
from tierkv.pages import private_memory, shared_memory
from tierkv.slot_table import SlotTable, sealed_memfd
from tierkv.units import ALIGN_BYTES, align_up, format_bytes


class Arena:
    """``capacity_bytes`` of page-aligned memory in regions of ``region_bytes``.

    ``memfd`` backs it with a sealed memory file, so that other processes can map it. Nothing is touched at start: see
    ``populate``. Raises ``ConfigError`` when not even one region fits.
    """

    def __init__(self, capacity_bytes: int, region_bytes: int, *, memfd: bool = False) -> None:
        if region_bytes < ALIGN_BYTES or region_bytes % ALIGN_BYTES:
            raise ConfigError("host.region", region_bytes, f"a region is a multiple of {ALIGN_BYTES} bytes")
        self.regions = capacity_bytes // region_bytes
        if self.regions < 1:
            raise ConfigError(
                "host.capacity",
                format_bytes(capacity_bytes),
                f"smaller than one region of {format_bytes(region_bytes)}; raise it or lower host.region",
            )
        self.region_bytes = region_bytes
        self.capacity_bytes = self.regions * region_bytes
        self.slots_per_region = region_bytes // ALIGN_BYTES
        self.fd: int | None = sealed_memfd("tierkv-arena", self.capacity_bytes) if memfd else None
        self._map = (
            private_memory(self.capacity_bytes)
            if self.fd is None
            else shared_memory(self.fd, self.capacity_bytes)
        )
        self._memory: memoryview | _Unmapped = self._map.view()
        self._pool = list(range(self.regions - 1, -1, -1))
        self._stride = [0] * self.regions
        slots = self.regions * self.slots_per_region
        self.table = SlotTable(self.regions, slots, shared=memfd)
        self._used = [0] * self.regions
        self._free: dict[int, list[Slot]] = {}
        self._strides: dict[int, int] = {}
        """By size, of slots that were asked for."""
        self._empty: dict[int, int] = {}
        """Regions by stride that are carved and have no slot in use."""
        self.used_bytes = 0

    def reserve(self, count: int, slot_bytes: int) -> list[Slot] | None:
        """``count`` slots of the size class of ``slot_bytes``; all or nothing."""
        stride = self._strides.get(slot_bytes) or self.stride_for(slot_bytes)
        free = self._free.setdefault(stride, [])
        while len(free) < count:
            if not self._carve(stride):
                return None
            self._strides[slot_bytes] = stride
        taken = free[len(free) - count :]
        del free[len(free) - count :]
        used, per_region = self._used, self.slots_per_region
        for slot in taken:
            region = slot // per_region
            if not used[region]:
                self._empty[stride] -= 1
            used[region] += 1
        self.used_bytes += count * stride
        return taken

    def release(self, slots: Iterable[Slot]) -> None:
        """Gives slots back. The caller makes sure that nobody reads or writes them any more."""
        used, per_region, strides, free = self._used, self.slots_per_region, self._stride, self._free
        freed_bytes = 0
        for slot in slots:
            region = slot // per_region
            left = used[region] - 1
            if left < 0:
                self.used_bytes -= freed_bytes
                raise HandleError(f"slot {slot} is released twice: its region {region} has no slot in use")
            used[region] = left
            stride = strides[region]
            if not left:
                self._empty[stride] += 1
            free[stride].append(slot)
            freed_bytes += stride
        self.used_bytes -= freed_bytes

    def stride_for(self, slot_bytes: int) -> int:
        """The size class of a slot. Raises ``ConfigError`` for one that no region can hold."""
        stride = max(ALIGN_BYTES, align_up(slot_bytes))
        if stride > self.region_bytes:
            raise ConfigError(
                "host.region",
                format_bytes(self.region_bytes),
                f"a block of {format_bytes(slot_bytes)} does not fit; give host.region at least {stride} bytes, "
                f"host.capacity (now {format_bytes(self.capacity_bytes)}) several times that, or use smaller blocks",
            )
        return stride

    def check_fit(self, payloads_bytes: Iterable[int]) -> None:
        """Raises ``ConfigError`` when blocks with parts of these sizes could never be stored together."""
        strides = {self.stride_for(size) for size in payloads_bytes}
        if len(strides) > self.regions:
            raise ConfigError(
                "host.region",
                format_bytes(self.region_bytes),
                f"the parts of a block have {len(strides)} sizes and the arena only {self.regions} regions, each for "
                "one size; lower host.region or raise host.capacity",
            )

    def stride_of(self, slot: Slot) -> int:
        return self._stride[slot // self.slots_per_region]

    def strides_of(self, slots: Iterable[Slot]) -> set[int]:
        per_region, strides = self.slots_per_region, self._stride
        return {strides[slot // per_region] for slot in slots}

    def region_of(self, slot: Slot) -> int:
        return slot // self.slots_per_region

    def offset(self, slot: Slot) -> int:
        """Where the slot begins, in bytes from the start of the arena."""
        region, position = divmod(slot, self.slots_per_region)
        return region * self.region_bytes + position * self._stride[region]

    def view(self, slot: Slot) -> memoryview:
        """The whole slot, writable, page-aligned."""
        region, position = divmod(slot, self.slots_per_region)
        stride = self._stride[region]
        start = region * self.region_bytes + position * stride
        return self._memory[start : start + stride]

    def memory(self) -> memoryview:
        """All of it, to register with a GPU: region after region, and no slot lies across two of them. Raises
        ``ClosedError``."""
        return self._memory[0 : self.capacity_bytes]

    def used_in(self, region: int) -> int:
        """Slots of a region that are handed out."""
        return self._used[region]

    def slots_of_region(self, region: int) -> range:
        """All slots of a carved region, used and free."""
        first = region * self.slots_per_region
        stride = self._stride[region]
        return range(first, first + (self.region_bytes // stride if stride else 0))

    def free_slots(self, slot_bytes: int) -> int:
        """Slots of this size that could be reserved now."""
        stride = self.stride_for(slot_bytes)
        spare = len(self._pool) + sum(self._empty.values()) - self._empty.get(stride, 0)
        return len(self._free.get(stride, ())) + spare * (self.region_bytes // stride)

    def populate(self, stop: Callable[[], bool]) -> int:
        """Faults all pages in, until done or ``stop()``; returns the bytes done. May run beside readers and writers."""
        return self._map.populate(stop)

    def close(self) -> None:
        """Unmaps the memory. Views that are still alive keep it mapped until they are gone."""
        memory, self._memory = self._memory, _Unmapped()
        if isinstance(memory, memoryview):
            memory.release()
        self._map.close()
        if self.fd is not None:
            os.close(self.fd)
            self.fd = None
        self.table.close()

    def _carve(self, stride: int) -> bool:
        if not self._pool and not self._reclaim_empty(stride):
            return False
        region = self._pool.pop()
        self._stride[region] = self.table.strides[region] = stride
        self._empty[stride] = self._empty.get(stride, 0) + 1
        # Highest first, so that slots are handed out from the start of the region.
        self._free[stride].extend(Slot(slot) for slot in reversed(self.slots_of_region(region)))
        return True

    def _reclaim_empty(self, wanted_stride: int) -> bool:
        """Takes one empty region of another size back into the pool."""
        if sum(self._empty.values()) == self._empty.get(wanted_stride, 0):
            return False
        for region, used in enumerate(self._used):
            stride = self._stride[region]
            if used or stride in (0, wanted_stride):
                continue
            first = region * self.slots_per_region
            self._free[stride] = [
                slot for slot in self._free[stride] if not first <= slot < first + self.slots_per_region
            ]
            self._empty[stride] -= 1
            self._stride[region] = self.table.strides[region] = 0
            self._pool.append(region)
            return True
        return False


class _Unmapped:
    """In the place of the memory when it is gone."""

    def __getitem__(self, _: slice) -> memoryview:
        raise ClosedError("the store was closed, its memory is gone")


def address_of(view: memoryview) -> int:
    """The memory address at which a writable view begins (to check alignment, to register with CUDA)."""
    return ctypes.addressof(ctypes.c_char.from_buffer(view))
