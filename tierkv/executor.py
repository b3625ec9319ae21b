"""Threads are injected: the store hands work to lanes, and an ``Executor`` decides when and where it runs.

A lane is a named pool of a fixed number of workers. Work is two events, its start and its finish: ``work()`` does the
blocking call, ``done(result)`` takes it up. ``ThreadExecutor`` runs both on one of the lane's threads;
``tierkv.testing.SimExecutor`` runs everything in one thread in an order that a seed chooses.
"""

from __future__ import annotations

import heapq
import itertools
import logging
import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Protocol, TypeVar

from tierkv.clock import Clock
from tierkv.errors import ClosedError

T = TypeVar("T")
log = logging.getLogger("tierkv")

_POLL_S = 0.005


class Timer(Protocol):
    """A call that was put off."""

    def cancel(self) -> None:
        """The call is not made, unless it has begun. Harmless afterwards."""
        ...


class Executor(Protocol):
    """Where work runs. Thread-safe; nothing here blocks except ``wait_until`` and ``close``."""

    def open_lane(self, lane: str, workers: int) -> None:
        """Makes a lane. The caller never has more than ``workers`` pieces of work in it at once."""
        ...

    def run(self, lane: str, work: Callable[[], T], done: Callable[[T], None]) -> None:
        """Runs ``work`` and then ``done`` with its result on the lane. Neither may raise."""
        ...

    def call_later(self, delay_s: float, call: Callable[[], None]) -> Timer:
        """Makes a short call after ``delay_s``, on a thread of the executor's own; when it is closed, at once."""
        ...

    def wait_until(self, condition: Callable[[], bool], timeout_s: float) -> bool:
        """Returns when the condition holds (True) or after that time (False). Not for the lanes' own threads."""
        ...

    def close(self, timeout_s: float) -> list[str]:
        """Ends all threads once their present work is over; returns the names of those that are still stuck. Calls that
        were put off are made then, before their time: somebody may be waiting for the deadline that they are."""
        ...


def deliver(future: Future[T], result: T) -> bool:
    """Gives a future its result. False when its taker has cancelled it: then the result is still the caller's."""
    if not future.set_running_or_notify_cancel():
        return False
    try:
        future.set_result(result)
    except SystemExit as error:  # the future keeps other errors of its callbacks to itself
        log.warning("a callback of a future raised %r; a thread of the store does not end for it", error)
    return True


class ThreadExecutor:
    """Real threads, made when a lane is opened, all daemons (a disk that hangs must not keep a process alive)."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._lanes: dict[str, queue.SimpleQueue[Callable[[], None] | None]] = {}
        self._threads: list[tuple[threading.Thread, queue.SimpleQueue[Callable[[], None] | None]]] = []
        self._timers = _TimerThread(clock)
        self._closed = False

    def open_lane(self, lane: str, workers: int) -> None:
        if lane in self._lanes:
            raise ValueError(f"lane {lane!r} is open already")
        inbox: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._lanes[lane] = inbox
        for number in range(workers):
            self._hire(inbox, f"tierkv-{lane}-{number}")

    def _hire(self, inbox: queue.SimpleQueue[Callable[[], None] | None], name: str) -> None:
        thread = threading.Thread(target=self._work_off, args=(inbox, name), name=name, daemon=True)
        self._threads.append((thread, inbox))
        thread.start()

    def _work_off(self, inbox: queue.SimpleQueue[Callable[[], None] | None], name: str) -> None:
        ended = False
        try:
            while (call := inbox.get()) is not None:
                call()
                del call  # a waiting worker must not keep the last job's buffers alive
            ended = True
        finally:
            if (
                not ended and not self._closed
            ):  # what a plug-in or a callback raises ends this thread, not the lane
                self._hire(inbox, name)

    def run(self, lane: str, work: Callable[[], T], done: Callable[[T], None]) -> None:
        if self._closed:
            raise ClosedError("the executor is closed")
        self._lanes[lane].put(lambda: done(work()))

    def call_later(self, delay_s: float, call: Callable[[], None]) -> Timer:
        return self._timers.call_later(delay_s, call)

    def wait_until(self, condition: Callable[[], bool], timeout_s: float) -> bool:
        until_s = self._clock.now_s() + timeout_s
        pause = threading.Event()
        while not condition():
            if self._clock.now_s() >= until_s:
                return False
            pause.wait(_POLL_S)
        return True

    def close(self, timeout_s: float) -> list[str]:
        self._closed = True
        for _, inbox in self._threads:
            inbox.put(None)
        self._timers.close()
        until_s = self._clock.now_s() + timeout_s
        for thread in [thread for thread, _ in self._threads] + [self._timers.thread]:
            if thread is not threading.current_thread():
                thread.join(min(max(0.0, until_s - self._clock.now_s()), threading.TIMEOUT_MAX))
        self._timers.fire_all()
        return [thread.name for thread, _ in self._threads if thread.is_alive()]


class _TimerThread:
    """One thread that makes calls when their time has come."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._heap: list[tuple[float, int, _ThreadTimer]] = []
        self._order = itertools.count()
        self._changed = threading.Condition()
        self._closed = False
        self._over = False
        self._hire()

    def _hire(self) -> None:
        self.thread = threading.Thread(target=self._loop, name="tierkv-timers", daemon=True)
        self.thread.start()

    def call_later(self, delay_s: float, call: Callable[[], None]) -> Timer:
        timer = _ThreadTimer(call)
        with self._changed:
            over = self._over
            if not over:
                heapq.heappush(self._heap, (self._clock.now_s() + delay_s, next(self._order), timer))
                if self._heap[0][2] is timer:
                    self._changed.notify()
        if over:
            timer.fire()
        return timer

    def close(self) -> None:
        with self._changed:
            self._closed = True
            self._changed.notify()

    def fire_all(self) -> None:
        """Makes the calls that are left, now that nobody else will, and from now on each at once."""
        with self._changed:
            self._over = True
            left, self._heap = sorted(self._heap), []
        for _, _, timer in left:
            timer.fire()

    def _loop(self) -> None:
        ended = False
        try:
            while (timer := self._next()) is not None:
                timer.fire()
                del timer
            ended = True
        finally:
            if not ended and not self._closed:  # all deadlines hang on this thread
                self._hire()

    def _next(self) -> _ThreadTimer | None:
        with self._changed:
            while not self._closed:
                now_s = self._clock.now_s()
                while self._heap and self._heap[0][2].call is None:
                    heapq.heappop(self._heap)
                if self._heap and self._heap[0][0] <= now_s:
                    return heapq.heappop(self._heap)[2]
                self._changed.wait(
                    min(self._heap[0][0] - now_s, threading.TIMEOUT_MAX) if self._heap else None
                )
            return None


class _ThreadTimer:
    __slots__ = ("call",)

    def __init__(self, call: Callable[[], None]) -> None:
        self.call: Callable[[], None] | None = call

    def cancel(self) -> None:
        self.call = None

    def fire(self) -> None:
        call, self.call = self.call, None
        if call is not None:
            call()
