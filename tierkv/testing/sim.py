"""The whole store in one thread, in an order that a seed chooses: a failing seed is the reproduction.

Every piece of work is two events, its start and its finish (``done`` is called), and any number of other events may
come between the two, as with a disk or a server that takes its time. Whether ``work`` does its deed at the start or at
the finish is the seed's choice as well. Timers fire at or after their time, and time moves only when the simulation
says so. Where the code under test lets go of the thread in real life (at a lock, inside a tier's call), ``interleave``
lets other events happen right there; see ``tierkv.testing.sim_locks`` and ``tierkv.testing.sim_tier``.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

from tierkv.clock import FakeClock
from tierkv.errors import ClosedError
from tierkv.executor import Timer
from tierkv.supervision import ThreadBook

T = TypeVar("T")

MAX_DEPTH = 5
"""Events that may happen inside each other."""

SMALL_STEP_S = 0.01
"""Mean of a step of time when it does not lead up to a timer."""


class SimTimer:
    """A call that is due at a point in time of the fake clock."""

    def __init__(self, at_s: float, call: Callable[[], None]) -> None:
        self.at_s = at_s
        self.call: Callable[[], None] | None = call

    def cancel(self) -> None:
        self.call = None


class _Piece:
    """One piece of work between its start and its finish."""

    __slots__ = ("_done", "_result", "_work", "lane")

    def __init__(self, lane: _Lane, work: Callable[[], Any], done: Callable[[Any], None]) -> None:
        self.lane = lane
        self._work: Callable[[], Any] | None = work
        self._done = done
        self._result: Any = None

    def do(self) -> None:
        work, self._work = self._work, None
        if work is not None:
            self._result = work()

    def finish(self) -> None:
        self.do()
        self.lane.busy -= 1
        self._done(self._result)


class _Lane:
    __slots__ = ("busy", "name", "waiting", "workers")

    def __init__(self, name: str, workers: int) -> None:
        self.name = name
        self.workers = workers
        self.busy = 0
        self.waiting: deque[_Piece] = deque()


class SimExecutor:
    """An ``Executor`` without threads. Nothing happens until ``step`` or one of its loops is called, by one thread.

    ``advance_chance``: how often a step lets time pass although other events are waiting. ``early_chance``: how often
    work does its deed at its start, not at its finish. ``nest_chance``: how often ``interleave`` lets an event happen
    (and then asks again).
    """

    def __init__(
        self,
        clock: FakeClock,
        seed: int,
        *,
        advance_chance: float = 0.05,
        early_chance: float = 0.5,
        nest_chance: float = 0.0,
    ) -> None:
        self.clock = clock
        self.threads = ThreadBook(clock)
        self.seed = seed
        self.steps = 0
        self.held = 0
        """Simulated locks that are held: no other event may come between now."""
        self.nested = 0
        """Events that happened inside others."""
        self._dice = random.Random(seed)
        self._advance_chance = advance_chance
        self._early_chance = early_chance
        self._nest_chance = nest_chance
        self._lanes: dict[str, _Lane] = {}
        self._under_way: list[_Piece] = []
        self._timers: list[SimTimer] = []
        self._depth = 0
        self._closed = False
        self._stalled: dict[str, float] = {}

    # -- the protocol ---------------------------------------------------------------------------------------------

    def open_lane(self, lane: str, workers: int) -> None:
        if lane in self._lanes:
            raise ValueError(f"lane {lane!r} is open already")
        self._lanes[lane] = _Lane(lane, workers)

    def run(self, lane: str, work: Callable[[], T], done: Callable[[T], None]) -> None:
        if self._closed:
            raise ClosedError("the executor is closed")
        # As a pool of threads does it: what is more than the workers can do waits its turn, in order.
        line = self._lanes[lane]
        line.waiting.append(_Piece(line, work, done))

    def call_later(self, delay_s: float, call: Callable[[], None]) -> Timer:
        timer = SimTimer(self.clock.now_s() + delay_s, call)
        self._timers.append(timer)
        if self._closed:
            self._fire(timer)
        return timer

    def wait_until(self, condition: Callable[[], bool], timeout_s: float) -> bool:
        until_s = self.clock.now_s() + timeout_s
        while not condition():
            if self.clock.now_s() >= until_s or not self.step():
                return False
        return True

    def close(self, timeout_s: float) -> list[str]:
        """What was handed over is finished, as threads would do it; then the calls that were put off are made. Returns
        the lanes whose work cannot end because it waits for this very call."""
        self._closed = True
        self._stalled.clear()
        timers, self._timers = self._timers, []
        while self._move():
            pass
        for timer in sorted(timers, key=lambda timer: timer.at_s):
            if timer.call is not None:
                self._timers.append(timer)
                self._fire(timer)
        return [lane.name for lane in self._lanes.values() if lane.busy]

    # -- what a test calls ----------------------------------------------------------------------------------------

    def step(self) -> bool:
        """Lets one event happen, or time pass. False when there is neither work nor a timer."""
        self._forget_cancelled()
        if self._timers and (not self._can_move() or self._dice.random() < self._advance_chance):
            self._pass_some_time()
            return True
        return self._move()

    def run_until(self, condition: Callable[[], bool], limit: int = 100_000, seconds: float = 3600.0) -> None:
        """Steps until ``condition`` holds. ``AssertionError`` when nothing is left to do, after ``limit`` steps, or
        after that much simulated time: somebody waits for what nobody is going to do."""
        end_s = self.clock.now_s() + seconds
        for _ in range(limit):
            if condition():
                return
            if not self.step() and not condition():
                raise AssertionError(f"nothing is left to do, and the condition does not hold; {self}")
            if self.clock.now_s() > end_s and not condition():
                raise AssertionError(
                    f"the condition does not hold after {seconds:g} simulated seconds; {self}"
                )
        raise AssertionError(f"the condition does not hold after {limit} steps; {self}")

    def settle(self, limit: int = 100_000) -> None:
        """Lets all waiting work happen, and the work that it brings, without letting time pass."""
        for _ in range(limit):
            if not self._move():
                return
        raise AssertionError(f"still busy after {limit} steps; {self}")

    def pass_time(self, seconds: float) -> None:
        """Moves the clock, firing on the way what is due, and lets events happen in between."""
        until_s = self.clock.now_s() + seconds
        while True:
            self._forget_cancelled()
            due = [timer for timer in self._timers if timer.at_s <= until_s]
            if self._can_move() and self._dice.random() < 0.5:
                self._move()
            elif due:
                self._fire(min(due, key=lambda timer: timer.at_s))
            else:
                break
        self.clock.advance(max(0.0, until_s - self.clock.now_s()))

    def stall(self, lane: str, seconds: float) -> None:
        """A disk or a server that hangs: nothing in this lane starts or ends for that long, or until ``unstall``."""
        self._stalled[lane] = self.clock.now_s() + seconds

    def unstall(self) -> None:
        self._stalled.clear()

    def _moves(self, lane: _Lane) -> bool:
        return self._stalled.get(lane.name, 0.0) <= self.clock.now_s()

    def interleave(self, chance: float | None = None) -> None:
        """Lets some other events happen here, inside the one that is going on. Does nothing while a lock is held."""
        if self._depth >= MAX_DEPTH or self.held or self._closed:
            return
        if self._dice.random() >= (self._nest_chance if chance is None else chance):
            return
        self._depth += 1
        try:
            while self._happen_inside():
                self.nested += 1
                if self._dice.random() >= 0.5:
                    break
        finally:
            self._depth -= 1

    def loses_race(self, chance: float) -> bool:
        """Whether somebody else has just taken what a step would only take at once."""
        return chance > 0 and self._dice.random() < chance

    def _happen_inside(self) -> bool:
        """Like ``step``, but time passes only by chance: not every disk is slower than every timer."""
        self._forget_cancelled()
        if self._timers and self._dice.random() < self._advance_chance:
            self._pass_some_time()
            return True
        return self._move()

    @contextmanager
    def quiet(self) -> Iterator[None]:
        """Until the end of the block nothing is interleaved: for looking at what is."""
        self.held += 1
        try:
            yield
        finally:
            self.held -= 1

    def busy(self) -> bool:
        """Work is waiting or under way."""
        return bool(self._under_way) or any(lane.waiting or lane.busy for lane in self._lanes.values())

    @property
    def inside(self) -> bool:
        """True while events happen inside another one."""
        return self._depth > 0

    def __str__(self) -> str:
        """What is going on, for messages."""
        lanes = [
            f"{lane.name}: {lane.busy} under way, {len(lane.waiting)} waiting"
            for lane in self._lanes.values()
            if lane.busy or lane.waiting
        ]
        now_s = self.clock.now_s()
        timers = sorted(round(timer.at_s - now_s, 3) for timer in self._timers if timer.call is not None)
        return f"seed {self.seed}, step {self.steps}, lanes {lanes or 'idle'}, timers due in {timers} s"

    # -- events ---------------------------------------------------------------------------------------------------

    def _startable(self) -> list[_Lane]:
        lanes = self._lanes.values()
        return [lane for lane in lanes if lane.waiting and lane.busy < lane.workers and self._moves(lane)]

    def _finishable(self) -> list[_Piece]:
        if not self._stalled:
            return self._under_way
        return [piece for piece in self._under_way if self._moves(piece.lane)]

    def _can_move(self) -> bool:
        return bool(self._finishable()) or bool(self._startable()) or self._overdue() is not None

    def _overdue(self) -> SimTimer | None:
        now_s = self.clock.now_s()
        due = [timer for timer in self._timers if timer.call is not None and timer.at_s <= now_s]
        return min(due, key=lambda timer: timer.at_s) if due else None

    def _move(self) -> bool:
        """One event that needs no time to pass; False when there is none."""
        lanes, pieces, timer = self._startable(), self._finishable(), self._overdue()
        count = len(lanes) + len(pieces) + (timer is not None)
        if not count:
            return False
        self.steps += 1
        choice = self._dice.randrange(count)
        if choice < len(lanes):
            self._start(lanes[choice])
        elif choice < len(lanes) + len(pieces):
            piece = pieces[choice - len(lanes)]
            self._under_way.remove(piece)
            piece.finish()
        else:
            assert timer is not None
            self._fire(timer)
        return True

    def _start(self, lane: _Lane) -> None:
        piece = lane.waiting.popleft()
        lane.busy += 1
        if self._dice.random() < self._early_chance:
            piece.do()
        self._under_way.append(piece)

    def _fire(self, timer: SimTimer) -> None:
        self._timers.remove(timer)
        self.clock.advance(max(0.0, timer.at_s - self.clock.now_s()))
        call, timer.call = timer.call, None
        if call is not None:
            call()

    def _pass_some_time(self) -> None:
        """Up to the next timer, which may then fire at once or later; or only a little."""
        self.steps += 1
        ahead_s = max(0.0, min(timer.at_s for timer in self._timers) - self.clock.now_s())
        if self._can_move() and self._dice.random() < 0.5:
            ahead_s = min(ahead_s, self._dice.expovariate(1 / SMALL_STEP_S))
        self.clock.advance(ahead_s)

    def _forget_cancelled(self) -> None:
        self._timers = [timer for timer in self._timers if timer.call is not None]
