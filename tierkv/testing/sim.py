"""The whole store in one thread, in an order that a seed chooses: a failing seed is the reproduction.

Every piece of work is two events, its start (``work`` is called) and its finish (``done`` is called), and any number of
other events may come between the two, as with a disk or a server that takes its time. Timers fire in the order of their
time, and time moves only when the simulation says so.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import TypeVar

from tierkv.clock import FakeClock
from tierkv.errors import ClosedError
from tierkv.executor import Timer

T = TypeVar("T")
Event = Callable[[], None]


class SimTimer:
    """A call at a point in time of the fake clock."""

    def __init__(self, at_s: float, call: Event) -> None:
        self.at_s = at_s
        self.call: Event | None = call

    def cancel(self) -> None:
        self.call = None


class SimExecutor:
    """An ``Executor`` without threads. Nothing happens until ``step`` or one of its loops is called, by one thread.

    ``advance_chance``: how often a step lets time pass up to the next timer although other events are waiting.
    """

    def __init__(self, clock: FakeClock, seed: int, *, advance_chance: float = 0.05) -> None:
        self.clock = clock
        self.steps = 0
        self._dice = random.Random(seed)
        self._advance_chance = advance_chance
        self._events: list[Event] = []
        self._timers: list[SimTimer] = []
        self._workers: dict[str, int] = {}
        self._busy: dict[str, int] = {}
        self._closed = False

    # ---- the protocol

    def open_lane(self, lane: str, workers: int) -> None:
        if lane in self._workers:
            raise ValueError(f"lane {lane!r} is open already")
        self._workers[lane] = workers
        self._busy[lane] = 0

    def run(self, lane: str, work: Callable[[], T], done: Callable[[T], None]) -> None:
        if self._closed:
            raise ClosedError("the executor is closed")
        # As a pool of threads does it: more work than workers waits its turn.
        self._events.append(lambda: self._start(lane, work, done))

    def call_later(self, delay_s: float, call: Event) -> Timer:
        timer = SimTimer(self.clock.now_s() + delay_s, call)
        self._timers.append(timer)
        return timer

    def close(self, timeout_s: float) -> list[str]:
        """What was begun is finished, as threads would do it; timers fire no more."""
        self._closed = True
        self._timers.clear()
        while self._events:
            self._take_any()()
        return []

    # ---- what a test calls

    def step(self) -> bool:
        """Lets one event happen, or time pass up to the next timer. False when there is neither."""
        self._timers = [timer for timer in self._timers if timer.call is not None]
        if not self._events and not self._timers:
            return False
        self.steps += 1
        if self._timers and (not self._events or self._dice.random() < self._advance_chance):
            self._fire_next()
        else:
            self._take_any()()
        return True

    def run_until(self, condition: Callable[[], bool], limit: int = 100_000) -> None:
        """Steps until ``condition`` holds. ``AssertionError`` when nothing is left to do, or after ``limit`` steps."""
        for _ in range(limit):
            if condition():
                return
            assert self.step() or condition(), "nothing is left to do, and the condition does not hold"
        raise AssertionError(f"the condition does not hold after {limit} steps")

    def settle(self, limit: int = 100_000) -> None:
        """Lets all waiting events happen, and those that they bring, without letting time pass."""
        for _ in range(limit):
            if not self._events:
                return
            self.steps += 1
            self._take_any()()
        raise AssertionError(f"still busy after {limit} steps")

    def pass_time(self, seconds: float) -> None:
        """Moves the clock, firing on the way what is due, and lets events happen in between."""
        until_s = self.clock.now_s() + seconds
        while due := [timer for timer in self._timers if timer.call is not None and timer.at_s <= until_s]:
            if self._events and self._dice.random() < 0.5:
                self._take_any()()
            else:
                self._fire(min(due, key=lambda timer: timer.at_s))
        self.clock.advance(max(0.0, until_s - self.clock.now_s()))

    # ---- inside

    def _start(self, lane: str, work: Callable[[], T], done: Callable[[T], None]) -> None:
        if self._busy[lane] >= self._workers[lane]:
            self._events.append(lambda: self._start(lane, work, done))
            return
        self._busy[lane] += 1
        result = work()
        self._events.append(lambda: self._finish(lane, result, done))

    def _finish(self, lane: str, result: T, done: Callable[[T], None]) -> None:
        self._busy[lane] -= 1
        done(result)

    def _take_any(self) -> Event:
        return self._events.pop(self._dice.randrange(len(self._events)))

    def _fire_next(self) -> None:
        self._fire(min(self._timers, key=lambda timer: timer.at_s))

    def _fire(self, timer: SimTimer) -> None:
        self._timers.remove(timer)
        self.clock.advance(max(0.0, timer.at_s - self.clock.now_s()))
        call, timer.call = timer.call, None
        if call is not None:
            call()
