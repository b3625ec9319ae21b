"""Host memory that the copy engines reach by themselves: pinned with ``cudaHostRegister``, in the process that
copies.

Pinning takes about a second for 4 to 10 GiB, so it is done in the background, stretch by stretch; a stretch that is
not pinned yet is copied through small pinned buffers meanwhile. A limit on locked memory ends it early, with a clear
line in the log, and never with an error in an engine.
"""

from __future__ import annotations

import logging
import resource
import threading
from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from tierkv.units import MIB

log = logging.getLogger("tierkv")

Longs = NDArray[np.int64]
Register = Callable[[int, int], None]
"""(address, bytes). Raises ``RuntimeError``."""


class Reach:
    """Which addresses a device reaches. Thread-safe; looked at for every copy, so by two binary searches."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._ends: dict[int, int] = {}
        self._table: tuple[Longs, Longs] = (np.zeros(0, np.int64), np.zeros(0, np.int64))

    def add(self, address: int, size_bytes: int) -> None:
        with self._lock:
            self._ends[address] = address + size_bytes
            self._renew()

    def remove(self, address: int) -> None:
        with self._lock:
            del self._ends[address]
            self._renew()

    def _renew(self) -> None:
        starts = sorted(self._ends)
        self._table = (np.array(starts, np.int64), np.array([self._ends[at] for at in starts], np.int64))

    def holds(self, address: Longs, size: Longs) -> NDArray[np.bool_]:
        """For each stretch: whether it lies in *one* that was added. Copies must not cross from one registration into
        the next, even where they touch."""
        starts, ends = self._table
        if not len(starts):
            return np.zeros(len(address), np.bool_)
        at = np.searchsorted(starts, address, side="right") - 1
        inside: NDArray[np.bool_] = (at >= 0) & (address + size <= ends[np.maximum(at, 0)])
        return inside


class Pinning:
    """Pins stretches in the order in which they are given. ``run`` is for a thread of its own."""

    def __init__(self, reach: Reach, register: Register, unregister: Callable[[int], None]) -> None:
        self._reach = reach
        self._register = register
        self._unregister = unregister
        self._stop = threading.Event()
        self._lock = threading.Lock()
        self._pinned: list[int] = []
        self.pinned_bytes = 0
        self.trouble: str | None = None
        """Why not all could be pinned."""

    def run(self, address: int, size_bytes: int, stretch_bytes: int) -> None:
        """Pins ``size_bytes`` from ``address`` on, ``stretch_bytes`` at a time: no slot may lie across two of
        them."""
        for start in range(address, address + size_bytes, stretch_bytes):
            length = min(stretch_bytes, address + size_bytes - start)
            with self._lock:
                if self._stop.is_set():
                    return
                try:
                    self._register(start, length)
                except RuntimeError as error:
                    self.trouble = _explained(error, self.pinned_bytes, size_bytes)
                    log.warning("%s", self.trouble)
                    return
                self._pinned.append(start)
                self._reach.add(start, length)
                self.pinned_bytes += length

    def close(self) -> None:
        """Ends it and unpins everything. Nothing may be copied any more."""
        self._stop.set()
        with self._lock:
            while self._pinned:
                address = self._pinned.pop()
                self._reach.remove(address)
                try:
                    self._unregister(address)
                except RuntimeError as error:  # the device is gone, and its pins with it
                    log.warning("unpinning host memory: %s", error)


def _explained(error: RuntimeError, done_bytes: int, wanted_bytes: int) -> str:
    soft, hard = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    said = "unlimited" if soft == resource.RLIM_INFINITY else f"{soft / MIB:.1f} MiB"
    text = f"{done_bytes / MIB:.0f} of {wanted_bytes / MIB:.0f} MiB of host RAM are pinned for the GPU, then: {error}. "
    if soft == resource.RLIM_INFINITY:
        return f"{text}The rest is copied through small pinned buffers, at about half the speed."
    allowed = " (`ulimit -l unlimited` is allowed here)" if hard == resource.RLIM_INFINITY else ""
    return (
        f"{text}This process may lock {said}: raise the limit{allowed}, with LimitMEMLOCK=infinity in a systemd "
        "unit or --ulimit memlock=-1 for a container. The rest is copied through small pinned buffers, at about "
        "half the speed."
    )
