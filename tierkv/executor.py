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
from tierkv.supervision import Caught, ThreadBook

T = TypeVar("T")
log = logging.getLogger("tierkv")

TIMERS = "timers"
"""Name of the lane of calls that were put off."""

_POLL_S = 0.005
_TIMER_PATIENCE_S = 5.0
"""All deadlines wait behind a call that takes longer."""

Inbox = queue.SimpleQueue[Callable[[], None] | None]


class Timer(Protocol):
    """A call that was put off."""

    def cancel(self) -> None:
        """The call is not made, unless it has begun. Harmless afterwards."""
        ...


class Executor(Protocol):
    """Where work runs. Thread-safe; nothing here blocks except ``wait_until`` and ``close``."""

    threads: ThreadBook
    """Who died, and who is stuck."""

    def open_lane(self, lane: str, workers: int) -> None:
        """Makes a lane. The caller never has more than ``workers`` pieces of work in it at once."""
        ...

    def run(self, lane: str, work: Callable[[], T], done: Callable[[T], None]) -> None:
        """Runs ``work`` and then ``done`` with its result on the lane. Neither should raise: it ends the thread, which
        is replaced, and after a ``work`` that raises nobody calls ``done``."""
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
    caught = Caught(in_generator=False)
    with caught:
        future.set_result(result)
    if caught.error is not None:  # the future keeps to itself only what is an ``Exception``
        log.warning("a callback of a future raised %r; nobody else shall wait for it", caught.error)
        caught.error.__traceback__ = None  # its frames hold the result
    return True


def await_result(future: Future[T], give_back: Callable[[T], object]) -> T:
    """Waits for a result that holds something. Who is interrupted meanwhile (Ctrl-C, a signal handler that raises) gets
    nothing, so what comes later is given back."""
    whole = False
    try:
        result = future.result()
        whole = True
    finally:
        if not whole:
            abandon(future, give_back)
    return result


def abandon(future: Future[T], give_back: Callable[[T], object]) -> None:
    """Nobody wants the result any more: what has come already, or comes yet, is given back."""

    def over(done: Future[T]) -> None:
        if not done.cancelled() and done.exception() is None:
            give_back(done.result())

    if not future.cancel():
        future.add_done_callback(over)


class ThreadExecutor:
    """Real threads, made when a lane is opened, all daemons (a disk that hangs must not keep a process alive)."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self.threads = ThreadBook(clock)
        self._lanes: dict[str, Inbox] = {}
        self._hired: list[tuple[threading.Thread, Inbox]] = []
        self._closing = threading.Event()
        self._timers = _TimerThread(clock, self.threads)

    def open_lane(self, lane: str, workers: int) -> None:
        if lane in self._lanes:
            raise ValueError(f"lane {lane!r} is open already")
        inbox: Inbox = queue.SimpleQueue()
        self._lanes[lane] = inbox
        for number in range(workers):
            self._hire(inbox, lane, f"tierkv-{lane}-{number}")

    def _hire(self, inbox: Inbox, lane: str, name: str) -> None:
        thread = threading.Thread(target=self._serve, args=(inbox, lane, name), name=name, daemon=True)
        self._hired.append((thread, inbox))
        self.threads.hired(lane, thread)
        thread.start()

    def _serve(self, inbox: Inbox, lane: str, name: str) -> None:
        """Works until the end. What a plug-in or a callback raises ends the work at hand, not the lane: the thread goes
        on as its own successor, which cannot fail as the start of another one could."""
        ended = False
        try:
            while (error := self._work_off(inbox, lane, name)) is not None:
                rest_s = self.threads.died(lane, name, error)
                self._closing.wait(rest_s)
            ended = True
        finally:
            if not ended and not self._closing.is_set():  # even the line in the log was too much
                self._hire(inbox, lane, name)

    def _work_off(self, inbox: Inbox, lane: str, name: str) -> BaseException | None:
        """Does what comes in, up to the end (``None``) or the first error."""
        caught = Caught(in_generator=False)
        begins, ends = self.threads.begins, self.threads.ends
        with caught:
            while (call := inbox.get()) is not None:
                begins(lane, name)
                call()
                ends(name)
                del call  # a waiting worker must not keep the last job's buffers alive
        error, caught.error = caught.error, None
        return error

    def run(self, lane: str, work: Callable[[], T], done: Callable[[T], None]) -> None:
        if self._closing.is_set():
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
        self.threads.dismiss()
        self._closing.set()
        for _, inbox in self._hired:
            inbox.put(None)
        self._timers.close()
        until_s = self._clock.now_s() + timeout_s
        for thread in [thread for thread, _ in self._hired] + [self._timers.thread]:
            if thread is not threading.current_thread():
                thread.join(min(max(0.0, until_s - self._clock.now_s()), threading.TIMEOUT_MAX))
        self._timers.fire_all()
        return [thread.name for thread, _ in self._hired if thread.is_alive()]


class _TimerThread:
    """One thread that makes calls when their time has come. It never rests, for all deadlines hang on it."""

    def __init__(self, clock: Clock, threads: ThreadBook) -> None:
        self._clock = clock
        self._threads = threads
        threads.be_patient(TIMERS, _TIMER_PATIENCE_S)
        self._heap: list[tuple[float, int, _ThreadTimer]] = []
        self._order = itertools.count()
        self._changed = threading.Condition()
        self._closed = False
        self._over = False
        self._hire()

    def _hire(self) -> None:
        self.thread = threading.Thread(target=self._serve, name=f"tierkv-{TIMERS}", daemon=True)
        self._threads.hired(TIMERS, self.thread)
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
        caught = Caught(in_generator=False)
        for _, _, timer in left:
            with caught:
                timer.fire()
            if caught.error is not None:  # the others may be somebody's deadline
                self._threads.died(TIMERS, self.thread.name, caught.error)

    def _serve(self) -> None:
        ended = False
        try:
            while (error := self._loop()) is not None:
                self._threads.died(TIMERS, self.thread.name, error)
            ended = True
        finally:
            if not ended and not self._closed:
                self._hire()

    def _loop(self) -> BaseException | None:
        caught = Caught(in_generator=False)
        name = self.thread.name
        with caught:
            while (timer := self._next()) is not None:
                self._threads.begins(TIMERS, name)
                timer.fire()
                self._threads.ends(name)
                del timer
        error, caught.error = caught.error, None
        return error

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
