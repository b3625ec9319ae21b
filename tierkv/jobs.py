"""Work that takes time is a job on the queue of a tier, with a priority and a budget of bytes in flight.

One queue and one lane of workers for each blob tier, so that a hung server takes only its own threads. An edge is an
ordered pair of tiers, named ``"host>nvme"``; each has its own budget. Queues are bounded in bytes: ``submit`` says no
rather than wait.

Within a priority those who asked take turns, so that each gets its fair share of the bytes whatever the others ask for.
Where a queue is full, who has most in it gives way to who would have less.
"""

from __future__ import annotations

import enum
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from tierkv.executor import Executor
from tierkv.turns import Turns, waiting
from tierkv.units import MIB

BATCH_BYTES = 8 * MIB
"""A job moves at most this much, or one block."""

BATCH_BLOCKS = 64


class Priority(enum.IntEnum):
    """Who goes first."""

    PROBE = 0
    ONBOARD = 1
    """A request waits for these bytes."""
    PREFETCH = 2
    DEMOTE = 3


@dataclass(frozen=True)
class Job:
    """``work`` blocks on a worker of the tier, ``done`` takes its end up on the same worker. Neither may raise."""

    priority: Priority
    edge: str
    cost_bytes: int
    work: Callable[[], None]
    done: Callable[[], None]
    whose: int = 0
    """Who asked for it; 0 is the store itself."""
    ousted: Callable[[], None] | None = None
    """It will not be done after all, since there is no room for it; called instead of ``work`` and ``done``. A job
    without it is never turned out."""


class TierQueue:
    """The jobs of one tier. Thread-safe; nothing blocks."""

    def __init__(
        self, executor: Executor, lane: str, workers: int, *, queue_bytes: int, in_flight_bytes: int
    ) -> None:
        self._executor = executor
        self.lane = lane
        self._workers = workers
        # One worker is kept free for whoever waits, lest a slow demotion stands in front of a request.
        self._demoters = max(1, workers - 1)
        self._queue_bytes = queue_bytes
        self._in_flight_bytes = in_flight_bytes
        self._lock = threading.Lock()
        self._waiting: list[Turns[Job]] = [Turns() for _ in Priority]
        self._queued: dict[str, int] = {}
        self._queued_by: dict[tuple[str, int], int] = {}
        """By edge and who asked."""
        self._in_flight: dict[str, int] = {}
        self._running = 0
        self._demoting = 0
        self._closed = False
        executor.open_lane(lane, workers)

    def submit(self, job: Job) -> bool:
        """Queues a job; False when the queue of its edge is full or closed. A job that is alone always fits."""
        return not self.submit_all((job,))

    def submit_all(self, jobs: Sequence[Job]) -> list[Job]:
        """Queues jobs, and returns those that the queue did not take."""
        refused: list[Job] = []
        ousted: list[Job] = []
        with self._lock:
            for job in jobs:
                if self._closed or not self._has_room(job, ousted):
                    refused.append(job)
                    continue
                self._count_queued(job, job.cost_bytes)
                self._waiting[job.priority].add(job.whose, job, job.cost_bytes)
                self._start_those_that_may()  # what runs takes no room in the queue
        for other in ousted:
            assert other.ousted is not None
            other.ousted()
        return refused

    def _has_room(self, job: Job, ousted: list[Job]) -> bool:
        """Perhaps since jobs of whoever has most in the queue gave way; those are ``ousted``."""
        while (queued := self._queued.get(job.edge, 0)) and queued + job.cost_bytes > self._queue_bytes:
            other = self._may_give_way(job)
            if other is None:
                return False
            self._waiting[other.priority].remove(other.whose, other)
            self._count_queued(other, -other.cost_bytes)
            ousted.append(other)
        return True

    def _may_give_way(self, job: Job) -> Job | None:
        """The newest and least urgent job of who has most in the queue of an edge, and has more than who comes."""
        mine = self._queued_by.get((job.edge, job.whose), 0)
        most, whose = max(
            (size, whose) for (edge, whose), size in self._queued_by.items() if edge == job.edge
        )
        if whose == job.whose or most <= mine + job.cost_bytes:
            return None
        for line in reversed(self._waiting):
            for other in line.newest(whose):
                if other.edge == job.edge and other.ousted is not None and other.cost_bytes:
                    return other
        return None

    def _count_queued(self, job: Job, more_bytes: int) -> None:
        self._queued[job.edge] = self._queued.get(job.edge, 0) + more_bytes
        by = job.edge, job.whose
        self._queued_by[by] = self._queued_by.get(by, 0) + more_bytes
        if not self._queued_by[by]:
            del self._queued_by[by]

    def pending_bytes(self, edge: str) -> int:
        """Bytes of an edge that are queued or in flight: a look without the lock, as are the next two."""
        return self._queued.get(edge, 0) + self._in_flight.get(edge, 0)

    def over_budget(self, edge: str) -> bool:
        """True while a further job of this edge would have to wait for others."""
        return self.pending_bytes(edge) >= self._in_flight_bytes

    def takes_more(self, edge: str) -> bool:
        """False while a further batch of this edge might find no room in the queue."""
        queued = self._queued.get(edge, 0)
        return not queued or queued + BATCH_BYTES <= self._queue_bytes

    @property
    def width(self) -> int:
        """Workers of the lane."""
        return self._workers

    def busy(self) -> int:
        """Jobs that are queued or running."""
        with self._lock:
            return self._running + sum(map(len, self._waiting))

    def close(self) -> list[Job]:
        """Takes no more jobs and hands back those that have not begun; their ``done`` is the caller's to call."""
        with self._lock:
            self._closed = True
            left = waiting(self._waiting)
            for line in self._waiting:
                line.clear()
            self._queued.clear()
            self._queued_by.clear()
        return left

    def _dispatch(self) -> None:
        with self._lock:
            self._start_those_that_may()

    def _start_those_that_may(self) -> None:
        """Under the lock, also while they are handed over: ``close`` must not come between and lose one."""
        while (job := self._next()) is not None:
            self._start(job)

    def _start(self, job: Job) -> None:
        def done(_: None) -> None:
            self._finished(job)
            try:
                job.done()
            finally:  # whatever becomes of this one, the others go on
                self._dispatch()

        def work() -> None:
            whole = False
            try:
                job.work()
                whole = True
            finally:
                if not whole:  # a plug-in that raises must not leave slots, pins and waiters behind
                    done(None)

        self._executor.run(self.lane, work, done)

    def _next(self) -> Job | None:
        if self._running >= self._workers:
            return None
        for line in self._waiting:
            first = line.first()
            if first is not None and self._fits(first):
                job = line.take()
                self._count_queued(job, -job.cost_bytes)
                self._in_flight[job.edge] = self._in_flight.get(job.edge, 0) + job.cost_bytes
                self._running += 1
                self._demoting += job.priority is Priority.DEMOTE
                return job
        return None

    def _fits(self, job: Job) -> bool:
        if job.priority is Priority.DEMOTE and self._demoting >= self._demoters:
            return False
        in_flight = self._in_flight.get(job.edge, 0)
        return not in_flight or in_flight + job.cost_bytes <= self._in_flight_bytes

    def _finished(self, job: Job) -> None:
        with self._lock:
            self._in_flight[job.edge] -= job.cost_bytes
            self._running -= 1
            self._demoting -= job.priority is Priority.DEMOTE
