"""A daemon's arena, mapped into this process: where the bytes of slots are, without asking."""

from __future__ import annotations

import os
from typing import Any

from tierkv.errors import ClosedError, ForkError
from tierkv.ids import Slot
from tierkv.pages import shared_memory
from tierkv.slot_table import MappedSlotTable


class MappedArena:
    """Any thread. The mapping lives as long as this object, or a view of it, whatever becomes of the daemon."""

    def __init__(self, fds: list[int], facts: dict[str, Any]) -> None:
        self.instance: bytes = facts["instance"]
        self._pid = os.getpid()
        self._region_bytes: int = facts["region_bytes"]
        self._slots_per_region: int = facts["slots_per_region"]
        regions: int = facts["regions"]
        self._size_bytes = regions * self._region_bytes
        try:
            self._map = shared_memory(fds[0], regions * self._region_bytes)
            self._memory: memoryview | _Gone = self._map.view()
            self._table = MappedSlotTable(fds[1], regions, regions * self._slots_per_region)
        finally:
            for fd in fds:
                os.close(fd)

    def view(self, slot: Slot) -> memoryview:
        """The whole slot, writable. Raises ``ClosedError`` and ``ForkError``."""
        if self._pid != os.getpid():
            raise ForkError(f"the memory of process {self._pid} is not mapped in its child {os.getpid()}")
        region, position = divmod(slot, self._slots_per_region)
        try:
            stride = self._table.strides[region]
        except ValueError:
            raise ClosedError("this client was closed") from None
        start = region * self._region_bytes + position * stride
        return self._memory[start : start + stride]

    @property
    def region_bytes(self) -> int:
        return self._region_bytes

    def memory(self) -> memoryview:
        """All of it, to register with a GPU. Raises ``ClosedError``."""
        return self._memory[0 : self._size_bytes]

    def generation(self, slot: Slot) -> int:
        """Raises ``ClosedError``."""
        try:
            return int(self._table.generations[slot])
        except ValueError:
            raise ClosedError("this client was closed") from None

    def close(self) -> None:
        """No view is given any more; those that are out keep the memory mapped until they are gone."""
        memory, self._memory = self._memory, _Gone()
        if isinstance(memory, memoryview):
            memory.release()
            self._table.close()
            self._map.close()


class _Gone:
    """In the place of the memory of a client that was closed."""

    def __getitem__(self, _: slice) -> memoryview:
        raise ClosedError("this client was closed")
