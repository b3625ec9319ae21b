"""A daemon's arena, mapped into this process: where the bytes of slots are, without asking."""

from __future__ import annotations

import fcntl
import os
from typing import Any

from tierkv.daemon.wire import WireError
from tierkv.daemon.words import seconds, take
from tierkv.errors import ClosedError, ForkError
from tierkv.ids import Slot
from tierkv.pages import shared_memory
from tierkv.slot_table import MappedSlotTable, table_bytes


class MappedArena:
    """Any thread. The mapping lives as long as this object, or a view of it, whatever becomes of the daemon."""

    def __init__(self, fds: list[int], facts: dict[str, Any]) -> None:
        """Closes ``fds``. Raises ``WireError`` for what a daemon does not say, and ``OSError``."""
        try:
            self.instance = take(facts, "instance", bytes)
            self._pid = os.getpid()
            self._region_bytes = _count(facts, "region_bytes")
            self._slots_per_region = _count(facts, "slots_per_region")
            regions = _count(facts, "regions")
            slots = regions * self._slots_per_region
            self._size_bytes = regions * self._region_bytes
            self.load_s, self.lease_s = _seconds(facts, "load_s"), _seconds(facts, "lease_s")
            if len(fds) != 2:
                raise WireError(f"{len(fds)} descriptors came with the answer instead of 2")
            for fd, size_bytes in zip(fds, (self._size_bytes, table_bytes(regions, slots)), strict=True):
                _check_file(fd, size_bytes)
            self._map = shared_memory(fds[0], self._size_bytes)
            self._memory: memoryview | _Gone = self._map.view()
            self._table = MappedSlotTable(fds[1], regions, slots)
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


def _count(facts: dict[str, Any], name: str) -> int:
    found = take(facts, name, int)
    if found < 1:
        raise WireError(f"{name} = {found}: at least 1 expected")
    return found


def _seconds(facts: dict[str, Any], name: str) -> float:
    found = seconds(facts, name)
    if found is None:
        raise WireError(f"{name} is missing")
    return found


def _check_file(fd: int, size_bytes: int) -> None:
    """Whoever touches the mapping of a file that got shorter is killed: it must be long enough, and stay so."""
    found_bytes = os.fstat(fd).st_size
    if found_bytes < size_bytes:
        raise WireError(f"a memory file of {found_bytes} bytes came, {size_bytes} are needed")
    if not fcntl.fcntl(fd, fcntl.F_GET_SEALS) & fcntl.F_SEAL_SHRINK:
        raise WireError("a memory file came that can get shorter at any time")


class _Gone:
    """In the place of the memory of a client that was closed."""

    def __getitem__(self, _: slice) -> memoryview:
        raise ClosedError("this client was closed")
