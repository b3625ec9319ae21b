"""Host memory that the copy engines reach by themselves: pinned with ``cudaHostRegister``, in the process that
copies.

Pinning takes about a second for 4 to 10 GiB, so it is done in the background, stretch by stretch; a stretch that is
not pinned yet is copied through small pinned buffers meanwhile. A limit on locked memory ends it early, with a clear
line in the log, and never with an error in an engine.

When a daemon was started anew its arena is another one. The old one is unpinned as soon as no copy uses it any more
(``CallsUnderWay`` tells), since pinned memory is memory that nobody else gets, and then the new one is pinned.
"""

from __future__ import annotations

import itertools
import logging
import resource
import threading
from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from tierkv.units import MIB

log = logging.getLogger("tierkv")

Longs = NDArray[np.int64]
Done = Callable[[str | None], None]
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


class CallsUnderWay:
    """Which copies have begun and are not over. Thread-safe; what it calls must not take a lock that its callers
    hold."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._numbers = itertools.count()
        self._open: set[int] = set()
        self._waiting: list[tuple[set[int], Callable[[], None]]] = []

    def around(self, done: Done) -> Done:
        """A copy begins; it is over when what is returned has been called."""
        with self._lock:
            number = next(self._numbers)
            self._open.add(number)

        def over(error: str | None) -> None:
            try:
                done(error)
            finally:
                self._end(number)

        return over

    def after(self, call: Callable[[], None]) -> None:
        """Calls it when all copies that have begun by now are over: at once when there are none, else on the thread of
        the last."""
        with self._lock:
            begun = set(self._open)
            if begun:
                self._waiting.append((begun, call))
        if not begun:
            call()

    def _end(self, number: int) -> None:
        with self._lock:
            self._open.discard(number)
            for begun, _ in self._waiting:
                begun.discard(number)
            calls = [call for begun, call in self._waiting if not begun]
            self._waiting = [one for one in self._waiting if one[0]]
        for call in calls:
            call()


class Pinning:
    """Pins stretches in the order in which they are given. ``run`` is for a thread of its own."""

    def __init__(self, reach: Reach, register: Register, unregister: Callable[[int], None]) -> None:
        self._reach = reach
        self._register = register
        self._unregister = unregister
        self._stop = threading.Event()
        self._lock = threading.Lock()
        self._pinned: list[int] = []
        self._reached: list[int] = []
        """Those that copies may still be begun with."""
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
                self._reached.append(start)
                self.pinned_bytes += length

    def withdraw(self) -> None:
        """Ends it; copies that begin from now on do not rely on it. Harmless the second time."""
        self._stop.set()
        with self._lock:
            while self._reached:
                self._reach.remove(self._reached.pop())

    def close(self) -> None:
        """The same, and unpins everything: nothing that relies on it may be under way any more."""
        self.withdraw()
        with self._lock:
            while self._pinned:
                address = self._pinned.pop()
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
