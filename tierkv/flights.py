"""Single flight: however many requests want a block, it is read once.

A flight is one family on its way into host RAM. A run is one request's wait for several flights. A flight whose last
run has left is cancelled; its slots are returned when its I/O is over, never sooner. Who comes for it in between is its
heir: the flight is begun again for them when that I/O is over.

A run is cut at its first hole: it waits for nothing that lies deeper in its chain. What nobody waits for then is not
read; when it is being read already it is not kept.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from tierkv.clock import Deadline
from tierkv.ids import FamilyId, Slot
from tierkv.jobs import Priority


@dataclass(eq=False)
class Flight:
    """One family being read from ``tier``."""

    family: FamilyId
    generation: int
    tier: int
    parts: tuple[int, ...]
    size_bytes: int
    depth: int
    """Place of the family in its chain."""
    slots: list[Slot] = field(default_factory=list)
    runs: list[Run] = field(default_factory=list)
    heirs: list[Run] = field(default_factory=list)
    """Who came when it was cancelled already."""
    unwanted: bool = False
    """It lies behind a hole, and nobody waits for it."""
    batch: Batch | None = None
    trouble: str | None = None
    """Why it did not arrive."""


@dataclass(eq=False)
class Batch:
    """Flights that are read by one job; it is cancelled when nobody waits for any of them."""

    deadline: Deadline
    flights: Sequence[Flight]
    begun: bool = False
    land: Callable[[], None] = lambda: None
    """Has those land whose bytes have come, and that wait for others to land with. Not under a lock."""


@dataclass(eq=False)
class Run:
    """One request's wait. ``finish`` is called once, without any lock held."""

    finish: Callable[[], None]
    priority: Priority
    waiting: set[FamilyId] = field(default_factory=set)
    whose: int = 0
    """Who asked."""
    deadline: Deadline | None = None
    """When the wait is over."""
    armed: bool = False
    over: bool = False
    cut_at: int | None = None
    """Depth of its first hole, as far as is known."""
    why: dict[FamilyId, str] = field(default_factory=dict)
    """Families that did not arrive, and the first reason."""


def finish_at_once(run: Run) -> None:
    """A run that waits for no flight, so that nobody else knows it yet."""
    run.armed = run.over = True
    run.finish()


class FlightTable:
    """All flights, by family. Thread-safe; its lock is never held together with another."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._flights: dict[FamilyId, Flight] = {}

    def __len__(self) -> int:
        return len(self._flights)

    def join(self, family: FamilyId, run: Run) -> bool:
        """Waits for a flight that is under way already; False when there is none, which is seen without the lock: one
        that begins meanwhile is met by ``start_or_join``."""
        if family not in self._flights:
            return False
        with self._lock:
            flight = self._flights.get(family)
            if flight is None:
                return False
            self._join(flight, run)
            return True

    def start_or_join(self, flights: Sequence[Flight], run: Run) -> list[Flight]:
        """Registers flights with their first run, and returns those; for the others somebody was quicker, and the run
        then waits for his."""
        begun: list[Flight] = []
        if not flights:
            return begun
        with self._lock:
            for flight in flights:
                quicker = self._flights.get(flight.family)
                if quicker is not None:
                    self._join(quicker, run)
                    continue
                self._flights[flight.family] = flight
                self._join(flight, run)
                begun.append(flight)
        return begun

    def _join(self, flight: Flight, run: Run) -> None:
        (flight.heirs if _given_up(flight) else flight.runs).append(run)
        run.waiting.add(flight.family)

    def arm(self, run: Run) -> None:
        """The run has joined all that it wants; it may finish from now on."""
        with self._lock:
            run.armed = True
            self._drop_behind(run)
            finished = self._may_finish(run)
        if finished:
            run.finish()

    def land(self, flights: Sequence[Flight]) -> list[Flight]:
        """Flights are over, well or badly; tells their runs. Returns those that must be begun again for their heirs
        (see ``begin_again``); to others they are under way yet."""
        if not flights:
            return []
        finished: list[Run] = []
        inherited: list[Flight] = []
        with self._lock:
            for flight in flights:
                self._tell(flight, flight.runs, finished)
                if flight.heirs and flight.trouble is not None:
                    inherited.append(flight)
                    continue
                self._tell(flight, flight.heirs, finished)
                if self._flights.get(flight.family) is flight:
                    del self._flights[flight.family]
        for run in finished:
            run.finish()
        return inherited

    def begin_again(self, old: Flight, flight: Flight | None) -> bool:
        """Puts a new flight in the place of one that was cancelled, for its heirs. ``None``: it cannot be had any more
        (why not stands in ``old.trouble``), or has come by another way. False when nobody waits for it."""
        finished: list[Run] = []
        with self._lock:
            if flight is not None and old.heirs:
                flight.runs, old.heirs = old.heirs, []
                self._flights[old.family] = flight
                return True
            self._tell(old, old.heirs, finished)
            del self._flights[old.family]
        for run in finished:
            run.finish()
        return False

    def _tell(self, flight: Flight, runs: list[Run], finished: list[Run]) -> None:
        for run in runs:
            run.waiting.discard(flight.family)
            if flight.trouble is not None:
                run.why.setdefault(flight.family, flight.trouble)
            if self._may_finish(run):
                finished.append(run)
        runs.clear()

    def cut(self, flight: Flight) -> None:
        """The flight will not arrive: its runs need nothing that lies deeper. Where they know of a hole before it there
        is nothing to say, as with all blocks but the first of a server that is away."""
        if all(run.cut_at is not None and run.cut_at <= flight.depth for run in flight.runs.copy()):
            return
        with self._lock:
            finished = [run for run in list(flight.runs) if self._cut(run, flight.depth)]
        for run in finished:
            run.finish()

    def cut_run(self, run: Run, depth: int) -> None:
        """A run, not armed yet, will not get the family at that depth, so it needs nothing that lies deeper."""
        with self._lock:
            self._cut(run, depth)

    def _cut(self, run: Run, depth: int) -> bool:
        if run.cut_at is None or depth < run.cut_at:
            run.cut_at = depth
            self._drop_behind(run)
        return self._may_finish(run)

    def _drop_behind(self, run: Run) -> None:
        if run.cut_at is None:
            return
        for family in list(run.waiting):
            flight = self._flights[family]
            if flight.depth <= run.cut_at:
                continue
            run.waiting.discard(family)
            self._remove(run, flight)
            flight.unwanted = flight.unwanted or not flight.runs
            batch = flight.batch
            if batch is not None and not batch.begun:
                _cancel_if_nobody_waits(batch)

    def begin_batch(self, batch: Batch) -> None:
        """Its first read starts now."""
        with self._lock:
            batch.begun = True

    def leave(self, run: Run) -> None:
        """A run waits no longer (its deadline, or a cancel). What has come of its flights lands; those that nobody
        waits for are cancelled."""
        with self._lock:
            if run.over:
                return
            touched = [self._flights[family] for family in run.waiting if family in self._flights]
            for flight in touched:
                self._remove(run, flight)
            run.waiting.clear()
            for flight in touched:
                if flight.batch is not None:
                    _cancel_if_nobody_waits(flight.batch)
            finished = self._may_finish(run)
        for batch in dict.fromkeys(flight.batch for flight in touched):  # in their order: a seed is to replay
            if batch is not None:
                batch.land()
        if finished:
            run.finish()

    def _remove(self, run: Run, flight: Flight) -> None:
        for runs in (flight.runs, flight.heirs):
            if run in runs:
                runs.remove(run)

    def _may_finish(self, run: Run) -> bool:
        if run.waiting or not run.armed or run.over:
            return False
        run.over = True
        return True


def _given_up(flight: Flight) -> bool:
    return flight.unwanted or (flight.batch is not None and flight.batch.deadline.cancelled)


def _cancel_if_nobody_waits(batch: Batch) -> None:
    if not any(flight.runs for flight in batch.flights):
        batch.deadline.cancel()
