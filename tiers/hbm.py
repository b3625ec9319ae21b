"""The hbm tier: slots in a GPU's memory, in the engine's process. On a build of torch without GPUs, in CPU tensors.

One pool, allocated at start, cut into regions of equal size, each carved into slots of one size when it is first
needed; a region whose slots are all free goes back. The daemon has none of this: it holds no GPU context.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from tierkv.errors import ConfigError, HandleError
from tierkv.ids import Slot
from tierkv.tier import Usage
from tierkv.units import ALIGN_BYTES, MIB, align_up

if TYPE_CHECKING:
    from torch import Tensor

REGION_BYTES = 32 * MIB


class _Region:
    def __init__(self, start: int) -> None:
        self.start = start
        self.stride_bytes = 0
        """0 while the region is carved into nothing."""
        self.free: list[int] = []
        self.used: set[int] = set()


class HbmTier:
    """A ``SlotTier``. Thread-safe; no call but the first blocks. A slot's number is its offset in pages of 4096 bytes.

    ``device``: torch's name for it (``"cuda:0"``, ``"cpu"``). ``capacity_bytes`` is rounded down to whole regions; one
    below 256 MiB is cut into eight. ``slot_bytes``: the largest slot that will be wanted; a region holds one at least,
    and several without a rest. Raises ``ConfigError`` for a capacity that holds no region, and what torch raises where
    that much memory is not to be had.
    """

    name = "hbm"

    def __init__(
        self,
        capacity_bytes: int,
        device: Any = "cpu",
        *,
        region_bytes: int = REGION_BYTES,
        slot_bytes: int = ALIGN_BYTES,
    ) -> None:
        if not isinstance(capacity_bytes, int):
            raise ConfigError("hbm_bytes", capacity_bytes, "give a whole number of bytes, such as 2 << 30")
        stride_bytes = align_up(max(1, slot_bytes))
        region_bytes = min(region_bytes, max(ALIGN_BYTES, capacity_bytes // 8 // ALIGN_BYTES * ALIGN_BYTES))
        region_bytes = max(1, region_bytes // stride_bytes) * stride_bytes
        regions = capacity_bytes // region_bytes
        if regions < 1:
            raise ConfigError(
                "hbm_bytes",
                capacity_bytes,
                f"give at least {region_bytes}, the bytes of one block, or much more",
            )
        import torch

        self.region_bytes = region_bytes
        self.capacity_bytes = regions * region_bytes
        self._pool = torch.empty(self.capacity_bytes + ALIGN_BYTES, dtype=torch.uint8, device=device)
        self._first = -int(self._pool.data_ptr()) % ALIGN_BYTES
        if self._pool.device.type == "cuda":
            torch.cuda.current_stream(self._pool.device).synchronize()
        self._lock = threading.Lock()
        self._regions = [_Region(start) for start in range(0, self.capacity_bytes, region_bytes)]
        self._used_bytes = 0

    @property
    def device(self) -> Any:
        """Where the slots are: a ``torch.device``."""
        return self._pool.device

    @property
    def address(self) -> int:
        """Where the first slot begins."""
        return int(self._pool.data_ptr()) + self._first

    def reserve(self, count: int, slot_bytes: int) -> list[Slot] | None:
        """All or nothing; ``None`` also for slots that are larger than a region."""
        stride_bytes = align_up(max(1, slot_bytes))
        if stride_bytes > self.region_bytes:
            return None
        with self._lock:
            slots: list[Slot] = []
            fitting = [
                region for region in self._regions if region.stride_bytes == stride_bytes and region.free
            ]
            empty = [region for region in self._regions if region.stride_bytes == 0]
            for region in fitting + empty:
                if len(slots) == count:
                    break
                slots += self._take(region, stride_bytes, count - len(slots))
            if len(slots) == count:
                return slots
            self._give_back(slots)
            return None

    def release(self, slots: Iterable[Slot]) -> None:
        """Raises ``HandleError`` for a slot that is not in use; then none of ``slots`` is released."""
        with self._lock:
            self._give_back(list(slots))

    def tensor(self, slot: Slot) -> Tensor:
        """The slot's bytes, one-dimensional, uint8. Raises ``HandleError``."""
        region, start = self._region_of(slot)
        first = self._first + start
        return self._pool[first : first + region.stride_bytes]

    def view(self, slot: Slot) -> memoryview:
        """The same as host memory. Raises ``HandleError`` on a GPU, whose memory is not."""
        if self._pool.device.type != "cpu":
            raise HandleError(f"slot {slot} is on {self._pool.device}: take its `tensor`")
        return memoryview(self.tensor(slot).numpy())

    def usage(self) -> Usage:
        with self._lock:
            free = self.capacity_bytes - self._used_bytes
            return Usage(self.capacity_bytes, self._used_bytes, 0, min(free, self.region_bytes))

    def _take(self, region: _Region, stride_bytes: int, count: int) -> list[Slot]:
        if region.stride_bytes == 0:
            region.stride_bytes = stride_bytes
            region.free = list(range(self.region_bytes // stride_bytes))
        taken = [region.free.pop() for _ in range(min(count, len(region.free)))]
        region.used.update(taken)
        self._used_bytes += stride_bytes * len(taken)
        return [Slot((region.start + piece * stride_bytes) // ALIGN_BYTES) for piece in taken]

    def _give_back(self, slots: list[Slot]) -> None:
        places = []
        for slot in slots:
            region, start = self._region_of(slot)
            piece, rest = divmod(start - region.start, region.stride_bytes or 1)
            if rest or piece not in region.used:
                raise HandleError(f"slot {slot} is not handed out, or released twice")
            places.append((region, piece))
        if len({(region.start, piece) for region, piece in places}) < len(places):
            raise HandleError(f"a slot is released twice at once: {slots}")
        for region, piece in places:
            region.used.remove(piece)
            region.free.append(piece)
            self._used_bytes -= region.stride_bytes
            if not region.used:
                region.stride_bytes, region.free = 0, []

    def _region_of(self, slot: Slot) -> tuple[_Region, int]:
        start = slot * ALIGN_BYTES
        if not 0 <= start < self.capacity_bytes:
            raise HandleError(f"slot {slot} does not exist")
        return self._regions[start // self.region_bytes], start
