"""Single flight: however many requests want a block, it is read once.

A flight is one family on its way into host RAM. A run is one request's wait for several flights. A flight whose last
run has left is cancelled; its slots are returned when its I/O is over, never sooner.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from tierkv.clock import Deadline
from tierkv.ids import FamilyId, Slot


@dataclass(eq=False)
class Flight:
    """One family being read from ``tier``."""

    family: FamilyId
    generation: int
    tier: int
    parts: tuple[int, ...]
    size_bytes: int
    slots: list[Slot] = field(default_factory=list)
    runs: list[Run] = field(default_factory=list)
    batch: Batch | None = None
    trouble: str | None = None
    """Why it did not arrive."""


@dataclass(eq=False)
class Batch:
    """Flights that are read by one job; it is cancelled when nobody waits for any of them."""

    deadline: Deadline
    flights: Sequence[Flight]


@dataclass(eq=False)
class Run:
    """One request's wait. ``finish`` is called once, without any lock held."""

    finish: Callable[[], None]
    waiting: set[FamilyId] = field(default_factory=set)
    armed: bool = False
    over: bool = False
    why: dict[FamilyId, str] = field(default_factory=dict)
    """Families that did not arrive, and the first reason."""


class FlightTable:
    """All flights, by family. Thread-safe; its lock is never held together with another."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._flights: dict[FamilyId, Flight] = {}

    def __len__(self) -> int:
        return len(self._flights)

    def join(self, family: FamilyId, run: Run) -> bool:
        """Waits for a flight that is under way already; False when there is none."""
        with self._lock:
            flight = self._flights.get(family)
            if flight is None or (flight.batch is not None and flight.batch.deadline.cancelled):
                return False
            flight.runs.append(run)
            run.waiting.add(family)
            return True

    def start(self, flight: Flight, run: Run) -> bool:
        """Registers a flight with its first run; False when another one was quicker (then join that)."""
        with self._lock:
            if flight.family in self._flights:
                return False
            self._flights[flight.family] = flight
            flight.runs.append(run)
            run.waiting.add(flight.family)
            return True

    def arm(self, run: Run) -> None:
        """The run has joined all that it wants; it may finish from now on."""
        with self._lock:
            run.armed = True
            finished = self._may_finish(run)
        if finished:
            run.finish()

    def land(self, flights: Sequence[Flight]) -> None:
        """Flights are over, well or badly; tells their runs."""
        finished: list[Run] = []
        with self._lock:
            for flight in flights:
                if self._flights.get(flight.family) is flight:
                    del self._flights[flight.family]
                for run in flight.runs:
                    run.waiting.discard(flight.family)
                    if flight.trouble is not None:
                        run.why.setdefault(flight.family, flight.trouble)
                    if self._may_finish(run):
                        finished.append(run)
                flight.runs.clear()
        for run in finished:
            run.finish()

    def leave(self, run: Run) -> None:
        """A run waits no longer (its deadline, or a cancel). Flights that nobody waits for are cancelled."""
        with self._lock:
            if run.over:
                return
            touched = [self._flights[family] for family in run.waiting if family in self._flights]
            for flight in touched:
                if run in flight.runs:
                    flight.runs.remove(run)
            run.waiting.clear()
            for flight in touched:
                batch = flight.batch
                if batch is not None and not any(other.runs for other in batch.flights):
                    batch.deadline.cancel()
            finished = self._may_finish(run)
        if finished:
            run.finish()

    def _may_finish(self, run: Run) -> bool:
        if run.waiting or not run.armed or run.over:
            return False
        run.over = True
        return True
