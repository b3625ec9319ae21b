"""Facts about slots that other processes may look at: how far apart they lie in each region, and their generations.

The owner of an arena in a memory file keeps them in a second one beside it, which others map for reading. So a process
can find a slot's bytes, and see after a copy whether they were still what it was promised, without a question.

    bytes 0 .. 4 R         stride of each of the R regions, uint32, in pages of 4096; 0: not carved
    bytes 4 R .. 4 (R + S) generation of each of the S slots, uint32
"""

from __future__ import annotations

import errno
import fcntl
import mmap
import os
from typing import Any, Final

from tierkv.units import ALIGN_BYTES, align_up

F_SEAL_FUTURE_WRITE: Final = 0x10
"""Linux 5.1 and later; ``fcntl`` has no name for it before Python 3.13."""


class SlotTable:
    """``strides`` in bytes by region and ``generations`` by slot, for reading and writing by the owner.

    Not thread-safe for writers. ``shared``: in a sealed memory file, ``fd``, which nobody else can write to: a process
    that is served from it must not be able to tell others that their slots are still what they were.
    """

    def __init__(self, regions: int, slots: int, *, shared: bool) -> None:
        size_bytes = table_bytes(regions, slots)
        self.fd: int | None = _sized_memfd("tierkv-slots", size_bytes) if shared else None
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS if self.fd is None else mmap.MAP_SHARED
        self._map = mmap.mmap(-1 if self.fd is None else self.fd, size_bytes, flags=flags)
        if self.fd is not None:
            _forbid_other_writers(self.fd)
        cells: memoryview[Any] = memoryview(self._map).cast("I")
        self.strides = _Pages(cells[:regions])
        self.generations: memoryview[Any] = cells[regions : regions + slots]

    def close(self) -> None:
        """Closes the file; the columns can still be read."""
        if self.fd is not None:
            os.close(self.fd)
            self.fd = None


class MappedSlotTable:
    """The same from the file of another process, for reading. Any thread."""

    def __init__(self, fd: int, regions: int, slots: int) -> None:
        self._map = mmap.mmap(fd, table_bytes(regions, slots), prot=mmap.PROT_READ)
        cells: memoryview[Any] = memoryview(self._map).cast("I")
        self.strides = _Pages(cells[:regions])
        self.generations: memoryview[Any] = cells[regions : regions + slots]
        self._cells = cells

    def close(self) -> None:
        """Nothing can be read afterwards (``ValueError``)."""
        self.strides.close()
        self.generations.release()
        self._cells.release()
        self._map.close()


class _Pages:
    """Sizes in bytes over a column that counts pages, since a region may have more bytes than 32 bits can tell."""

    def __init__(self, cells: memoryview[Any]) -> None:
        self._cells = cells

    def __getitem__(self, region: int) -> int:
        return int(self._cells[region]) * ALIGN_BYTES

    def __setitem__(self, region: int, stride_bytes: int) -> None:
        self._cells[region] = stride_bytes // ALIGN_BYTES

    def close(self) -> None:
        self._cells.release()


def table_bytes(regions: int, slots: int) -> int:
    return align_up(4 * (regions + slots))


def sealed_memfd(name: str, size_bytes: int) -> int:
    """A memory file whose size is fixed for good: whoever maps it never meets SIGBUS."""
    fd = _sized_memfd(name, size_bytes)
    fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SEAL)
    return fd


def _sized_memfd(name: str, size_bytes: int) -> int:
    """The same, and seals can be added."""
    fd = os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.ftruncate(fd, size_bytes)
    fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW)
    return fd


def _forbid_other_writers(fd: int) -> None:
    """From now on it can be mapped for reading only. What is mapped already can be written."""
    try:
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, F_SEAL_FUTURE_WRITE)
    except OSError as error:
        if error.errno != errno.EINVAL:  # a kernel before 5.1
            raise
    fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SEAL)
