"""Pages of large memory: huge where the kernel gives them, and touched before somebody needs them.

First touch of a page costs more than ten microseconds, which nobody should pay in the middle of a copy. In huge pages a
process that maps what another one has touched pays it once for 2 MiB, not 512 times.
"""

from __future__ import annotations

import ctypes
import mmap
import os
from collections.abc import Callable
from typing import Final

from tierkv.units import ALIGN_BYTES, MIB

HUGE_BYTES: Final = 2 * MIB
_STEP_BYTES: Final = MIB
"""While the kernel faults in so much nobody else can map or unmap memory in this process."""
_HUGE_STEP_BYTES: Final = 16 * HUGE_BYTES
"""Huge pages are made by so much at once: each call first waits for all processors, and lets others in between."""
_HUGE_TRIES: Final = 3
"""Steps that may fail (no memory in one piece, pages that a device holds) until the rest gets ordinary pages."""
_MAP_FIXED: Final = 0x10
_MAP_NORESERVE: Final = 0x4000
_MADV_POPULATE_WRITE: Final = 23
"""Linux 5.14: fault pages in for writing without changing what they hold, so it may run beside other writers."""
_MADV_COLLAPSE: Final = 25
"""Linux 6.1: make huge pages of what is there, and of holes beside it, also where shmem_enabled says ``never`` (the
usual setting; ``deny`` refuses). It changes nothing that the pages hold."""


class Stretch:
    """``view``: mapped memory, page-aligned. It is unmapped by ``close``, or with the last view that is out then."""

    def __init__(self, memory: mmap.mmap, start_bytes: int, size_bytes: int, *, collapse: bool) -> None:
        self._map = memory
        self._start_bytes = start_bytes
        self._collapse = collapse
        self.size_bytes = size_bytes
        self.huge_bytes = 0
        """Made huge by ``populate``."""

    def view(self) -> memoryview:
        """All of it, writable."""
        return memoryview(self._map)[self._start_bytes : self._start_bytes + self.size_bytes]

    def populate(self, stop: Callable[[], bool]) -> int:
        """Faults all pages in, until done or ``stop()``; returns the bytes done. May run beside readers and writers,
        and lets other threads run, which ``mmap.madvise`` does not. Keeps the memory mapped meanwhile."""
        try:
            begin = ctypes.c_char.from_buffer(self._map, self._start_bytes)
        except ValueError:  # it was closed
            return 0
        address, done, tries = ctypes.addressof(begin), 0, _HUGE_TRIES if self._collapse else 0
        while done < self.size_bytes and not stop():
            step = min(_HUGE_STEP_BYTES if tries else _STEP_BYTES, self.size_bytes - done)
            if tries and _make_huge(address + done, step):
                self.huge_bytes += step // HUGE_BYTES * HUGE_BYTES
            elif tries:
                tries -= 1
            if not _advise(address + done, step, _MADV_POPULATE_WRITE):
                break  # an older kernel: pages come at first touch, as ever
            done += step
        return done

    def close(self) -> None:
        try:
            self._map.close()
        except BufferError:  # it goes with the last view
            pass


def private_memory(size_bytes: int) -> Stretch:
    """Anonymous memory, in huge pages where there are any: the pages of a MiB are then found and pinned for the disk at
    once instead of 256 times, which is a third of the CPU of a direct read."""
    memory = mmap.mmap(-1, size_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    return Stretch(_prepared(memory), 0, size_bytes, collapse=False)


def shared_memory(fd: int, size_bytes: int) -> Stretch:
    """A memory file, mapped where huge pages of it fit, which ``populate`` makes. Raises ``OSError``.

    ``mmap.mmap`` takes no address: it maps a little more than is wanted, and the file takes the place of that from the
    first multiple of a huge page on."""
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_NORESERVE
    room = mmap.mmap(-1, size_bytes + HUGE_BYTES, flags=flags)
    address = ctypes.addressof(ctypes.c_char.from_buffer(room))
    start_bytes = -address % HUGE_BYTES
    _map_over(address + start_bytes, fd, size_bytes)
    return Stretch(_prepared(room), start_bytes, size_bytes, collapse=True)


def shared_pages_can_be_huge() -> bool:
    """Tries it, with one page."""
    fd = os.memfd_create("tierkv-try", os.MFD_CLOEXEC)
    try:
        os.ftruncate(fd, HUGE_BYTES)
        memory = shared_memory(fd, HUGE_BYTES)
    finally:
        os.close(fd)
    memory.populate(lambda: False)
    memory.close()
    return memory.huge_bytes == HUGE_BYTES


def _make_huge(address: int, size_bytes: int) -> bool:
    """Whole huge pages from there on, which begin on a multiple of one. It needs a page in each to begin with."""
    for start in range(address, address + size_bytes, HUGE_BYTES):
        if not _advise(start, ALIGN_BYTES, _MADV_POPULATE_WRITE):
            return False
    return _advise(address, size_bytes, _MADV_COLLAPSE)


def _advise(address: int, size_bytes: int, advice: int) -> bool:
    """True when the kernel takes it. Lets other threads run."""
    madvise = ctypes.CDLL(None).madvise
    madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    return not madvise(address, size_bytes, advice)


def _map_over(address: int, fd: int, size_bytes: int) -> None:
    """In the place of memory that is mapped there. Raises ``OSError``."""
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mmap.restype = ctypes.c_void_p
    libc.mmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t, *(3 * [ctypes.c_int]), ctypes.c_long)
    found = libc.mmap(
        address, size_bytes, mmap.PROT_READ | mmap.PROT_WRITE, mmap.MAP_SHARED | _MAP_FIXED, fd, 0
    )
    if found != address:
        number = ctypes.get_errno()
        raise OSError(number, f"a memory file of {size_bytes} bytes cannot be mapped: {os.strerror(number)}")


def _prepared(memory: mmap.mmap) -> mmap.mmap:
    try:
        memory.madvise(mmap.MADV_HUGEPAGE)
    except OSError:  # a kernel without huge pages: ordinary ones do the same, dearer
        pass
    # A child that is forked gets none of it: else each page that is written afterwards would first be copied.
    memory.madvise(mmap.MADV_DONTFORK)
    return memory
