"""Time is injected: the store asks a ``Clock``, never the system, so that tests own time.

``Deadline`` is the one way to bound a wait. It also carries the cancel flag of the work that it bounds.
"""

from __future__ import annotations

import threading
import time
from typing import Protocol


class Clock(Protocol):
    """Where time comes from. Thread-safe."""

    def now_s(self) -> float:
        """Seconds on a monotonic scale of no particular start."""
        ...

    def unix_s(self) -> float:
        """Seconds since 1970, for what outlives the process (expiry in a stored frame)."""
        ...


class SystemClock:
    """The machine's clocks."""

    def now_s(self) -> float:
        return time.monotonic()

    def unix_s(self) -> float:
        return time.time()


class FakeClock:
    """A clock that moves only when a test says so."""

    def __init__(self, start_s: float = 1000.0) -> None:
        self._now_s = start_s

    def now_s(self) -> float:
        return self._now_s

    def unix_s(self) -> float:
        return 1.7e9 + self._now_s

    def advance(self, seconds: float) -> None:
        if seconds < 0:
            raise ValueError(f"{seconds!r}: time does not run backwards")
        self._now_s += seconds


LOCK_GRACE_S = 0.010
"""So long after its deadline a wait for a lock ends: others want the lock for microseconds each, and who gives no time
at all would else get nothing whenever somebody has just lost his turn at the interpreter with the lock in his hands."""


def patience_s(left_s: float) -> float:
    """How long to wait for a lock, with so much time left (negative: the deadline has passed)."""
    return float(min(max(0.0, left_s + LOCK_GRACE_S), threading.TIMEOUT_MAX))


class Deadline:
    """A point in time by which work must be over, and a flag that ends it sooner. Thread-safe.

    Work that is bounded by a deadline looks at ``over()`` between steps and gives ``remaining_s()`` to every
    blocking call that takes a timeout.
    """

    __slots__ = ("_at_s", "_cancelled", "_clock")

    def __init__(self, clock: Clock, timeout_s: float) -> None:
        self._clock = clock
        self._at_s = clock.now_s() + timeout_s
        self._cancelled = False

    def remaining_s(self) -> float:
        """Seconds that are left, never negative; 0 after a cancel."""
        if self._cancelled:
            return 0.0
        return max(0.0, self._at_s - self._clock.now_s())

    def patience_s(self) -> float:
        """How long to wait for a lock: until a little after the deadline."""
        return patience_s(self._at_s - self._clock.now_s())

    def over(self) -> bool:
        """True once the time has passed or the work was cancelled."""
        return self._cancelled or self._clock.now_s() >= self._at_s

    def restart(self, timeout_s: float) -> None:
        """The work begins only now and has this much time. A cancel stays."""
        self._at_s = self._clock.now_s() + timeout_s

    def cancel(self) -> None:
        """Ends the time now. Cannot be undone."""
        self._cancelled = True

    @property
    def cancelled(self) -> bool:
        return self._cancelled

    @property
    def at_s(self) -> float:
        """The point in time on the clock's own scale."""
        return self._at_s
