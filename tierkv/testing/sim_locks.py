"""Locks for a store that runs in one thread: they find deadlocks, and they are where another thread would come first.

While ``simulated_locks`` is in force, ``threading.Lock`` makes locks that belong to the simulation. Taking one that is
held is an error at once, for nobody could ever give it back; taking a free one may let other events happen before, as
long as no lock is held at all. So an order of steps that takes two real threads and bad luck is found by a seed.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from unittest.mock import patch

from tierkv.testing.sim import SimExecutor

_LOST = 5.0
"""How much more often than interleaved it is lost to another thread by who would not wait for it for ever."""


class SimLock:
    """Stands in for ``threading.Lock``."""

    def __init__(self, sim: SimExecutor, chance: float) -> None:
        self._sim = sim
        self._chance = chance
        self._held = False

    def acquire(self, blocking: bool = True, timeout: float = -1) -> bool:
        if not self._held:
            self._sim.interleave(self._chance)
        impatient = not blocking or 0 <= timeout < threading.TIMEOUT_MAX
        if impatient and (self._held or self._sim.loses_race(_LOST * self._chance)):
            return False
        if self._held:
            raise AssertionError(f"deadlock: the lock is taken again while it is held; {self._sim}")
        self._held = True
        self._sim.held += 1
        return True

    def release(self) -> None:
        assert self._held, "a lock is released that nobody holds"
        self._held = False
        self._sim.held -= 1

    def locked(self) -> bool:
        return self._held

    def __enter__(self) -> bool:
        return self.acquire()

    def __exit__(self, *_: object) -> None:
        self.release()


@contextmanager
def simulated_locks(sim: SimExecutor, chance: float = 0.02) -> Iterator[None]:
    """Until the end of the block every new ``threading.Lock()`` is a lock of ``sim``. Only for code in one thread.

    ``chance``: how often other events come before a lock is taken.
    """
    with patch.object(threading, "Lock", lambda: SimLock(sim, chance)):
        yield
