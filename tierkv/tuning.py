"""What a process that serves others sets in its interpreter, its malloc and where it runs. A library must not: the
daemon calls this.

Measured: a thread in pure Python lifts its neighbour's p99 from 0.08 to 6.2 ms, and a switch interval of 0.5 ms brings
it to 0.8. A garbage collection of the oldest generation looks at every object of a full index.
"""

from __future__ import annotations

import ctypes
import gc
import os
import sys
from contextlib import suppress
from pathlib import Path

from tierkv.units import GIB, MIB

SWITCH_INTERVAL_S = 0.0005
YOUNG_OBJECTS = 10_000
"""Objects that come before the collector looks for cycles: the store makes hardly any, so it need not look often. To
look at so many takes 2 to 3 ms, for which all threads wait."""

_M_TRIM_THRESHOLD = -1
_M_MMAP_THRESHOLD = -3
_M_ARENA_MAX = -8
_MOST_ARENAS = 2
"""glibc gives threads heaps of their own, up to eight a core, and each keeps what was once needed in it; the
interpreter's lock lets hardly two threads allocate at once."""


def tune_malloc() -> None:
    """Keeps glibc from giving big buffers back, which would be faulted in again, and from keeping a heap for each
    thread that comes and goes."""
    libc = ctypes.CDLL(None)
    if hasattr(libc, "mallopt"):
        libc.mallopt(_M_MMAP_THRESHOLD, 32 * MIB)
        libc.mallopt(_M_TRIM_THRESHOLD, GIB)
        libc.mallopt(_M_ARENA_MAX, _MOST_ARENAS)


def leave_the_parents_cores(parent: int) -> None:
    """Lets this process run where all the processes of its engine may: ``parent`` and its own ancestors that run the
    same program. An engine's worker binds itself to one core and spins there; a sidecar that it starts would inherit
    that core and get what the spinning leaves."""
    cores: set[int] = set()
    program = os.path.realpath(sys.executable)
    while parent > 1 and (found := _program_and_parent(parent)) is not None and found[0] == program:
        try:
            cores |= os.sched_getaffinity(parent)
        except OSError:  # it has ended
            break
        parent = found[1]
    if cores:
        with suppress(OSError):  # it may run on none of them: then it stays where it is
            os.sched_setaffinity(0, cores)


def _program_and_parent(pid: int) -> tuple[str, int] | None:
    """``None``: it has ended, or is another user's."""
    try:
        program = os.readlink(f"/proc/{pid}/exe")
        after_name = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2]
    except OSError:
        return None
    return program, int(after_name.split()[1])


def tune_interpreter() -> None:
    """Threads give way sooner, and the garbage collector, which stays on, looks less often and not at what was there
    at the start."""
    sys.setswitchinterval(SWITCH_INTERVAL_S)
    gc.collect()
    gc.freeze()
    gc.set_threshold(YOUNG_OBJECTS, 20, 100)
