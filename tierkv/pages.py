"""Pages of large memory: huge where the kernel gives them, and touched before somebody needs them.

First touch of a page costs more than ten microseconds, which nobody should pay in the middle of a copy.
"""

from __future__ import annotations

import ctypes
import mmap
from collections.abc import Callable

from tierkv.units import MIB

_STEP_BYTES = MIB
"""While the kernel faults in so much nobody else can map or unmap memory in this process."""
_MADV_POPULATE_WRITE = 23
"""Linux 5.14: fault pages in for writing without changing what they hold, so it may run beside other writers."""


def private_memory(size_bytes: int) -> mmap.mmap:
    """Anonymous memory, in huge pages where there are any: the pages of a MiB are then found and pinned for the disk at
    once instead of 256 times, which is a third of the CPU of a direct read. Private, since the kernel's usual setting
    has no huge pages for shared memory."""
    return _prepared(mmap.mmap(-1, size_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS))


def shared_memory(fd: int, size_bytes: int) -> mmap.mmap:
    """A memory file, mapped. In huge pages where /sys/kernel/mm/transparent_hugepage/shmem_enabled says ``advise``."""
    return _prepared(mmap.mmap(fd, size_bytes))


def _prepared(memory: mmap.mmap) -> mmap.mmap:
    try:
        memory.madvise(mmap.MADV_HUGEPAGE)
    except OSError:  # a kernel without huge pages: ordinary ones do the same, dearer
        pass
    # A child that is forked gets none of it: else each page that is written afterwards would first be copied.
    memory.madvise(mmap.MADV_DONTFORK)
    return memory


def populate(memory: mmap.mmap, stop: Callable[[], bool]) -> int:
    """Faults all pages in, until done or ``stop()``; returns the bytes done. May run beside readers and writers, and
    lets other threads run, which ``mmap.madvise`` does not. Keeps the memory mapped meanwhile."""
    try:
        begin = ctypes.c_char.from_buffer(memory)
    except ValueError:  # it was closed
        return 0
    madvise = ctypes.CDLL(None).madvise
    madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    address, size_bytes, done = ctypes.addressof(begin), len(memory), 0
    while done < size_bytes and not stop():
        step = min(_STEP_BYTES, size_bytes - done)
        if madvise(address + done, step, _MADV_POPULATE_WRITE):
            break  # an older kernel: pages come at first touch, as ever
        done += step
    return done
