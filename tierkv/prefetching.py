"""One request's way to its blocks: what host RAM lacks is read from the tiers that are known to have it, while the
remote tier is asked about the rest, all under one deadline."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from tierkv.clock import Deadline
from tierkv.edges import Edge
from tierkv.executor import Timer
from tierkv.flights import Run
from tierkv.ids import FamilyId
from tierkv.index import IN_HOST, USABLE, Space
from tierkv.jobs import Priority
from tierkv.keys import Chain
from tierkv.probing import Probe

if TYPE_CHECKING:
    from tierkv.store import TieredStore


@dataclass
class Fetched:
    """What came of a prefetch."""

    pinned: list[FamilyId]
    """The beginning of the chain that is known; whoever takes it unpins it."""
    blocks: int
    """How many of them, from the first on, are in host RAM."""
    sources: Mapping[FamilyId, int]
    """Those of them that were not in host RAM when it was asked, with the tier that had them."""
    shortfall: str | None
    """Why the next block is not there; ``None`` when all are."""

    @property
    def families(self) -> list[FamilyId]:
        """The longest run that is in host RAM."""
        return self.pinned[: self.blocks]


class Prefetch:
    """Pins the families of a chain, brings them into host RAM and hands the pinned run to its taker.

    ``begin`` returns at once. ``done`` is called exactly once, by the deadline at the latest, on any thread.
    """

    def __init__(
        self,
        store: TieredStore,
        space: Space,
        chain: Chain,
        limit: int,
        deadline: Deadline,
        priority: Priority,
        done: Callable[[Fetched], None],
        whose: int = 0,
    ) -> None:
        """``whose``: who asks, for whoever shares out the tiers' time."""
        self._store = store
        self._whose = whose
        self._space = space
        self._chain = chain
        self._limit = limit
        self._deadline = deadline
        self._priority = priority
        self._done = done
        self._lock = threading.Lock()
        self._stages = 1
        self._starting = 1
        """Loads that are being started: they rely on the pins, so a deadline that comes meanwhile has to wait."""
        self._over = False
        self._expired = False
        self._pinned: list[FamilyId] = []
        self._sources: dict[FamilyId, int] = {}
        self._runs: list[Run] = []
        self._probe: Probe | None = None
        self._timer: Timer | None = None

    def begin(self) -> None:
        catalog = self._store.catalog
        hashes = self._chain.hashes[: self._limit]
        known = catalog.pin_run(self._space, hashes, USABLE, self._deadline.patience_s())
        self._pinned += known
        if self._deadline.over():  # who gives no time gets what is in host RAM, and nothing is begun for it
            self._over = self._expired = True
            self._store.counters.add(1, "load_deadline_total")
            self._finish()
            return
        self._timer = self._store.executor.call_later(self._deadline.remaining_s(), self.expire)
        edge = self._remote()
        if edge is not None and len(known) < self._limit:
            self._stages += 1
            tail = self._chain.hashes[len(known) : self._limit]
            self._probe = Probe(
                self._store, edge, self._space, self._chain, len(known), tail, self._probed, self._whose
            )
            self._probe.begin()
        self._load(known)

    def _remote(self) -> Edge | None:
        """The tier whose content others change, so that it must be asked."""
        for edge in self._store.edges.values():
            if edge.tier.caps.evicts_itself and edge.tier.breaker.ready():
                return edge
        return None

    def _probed(self) -> None:
        """The remote tier has answered: there may be more to load."""
        catalog = self._store.catalog
        with self._lock:
            if self._over:
                return
            start = len(self._pinned)
            cut = any(run.cut_at is not None for run in self._runs)
        if cut:  # what lies behind a hole is of no use
            self._stage_done()
            return
        more = catalog.pin_run(self._space, self._chain.hashes[start : self._limit], USABLE)
        if self._keep(more):
            self._load(more)
        else:
            catalog.unpin(more)

    def _keep(self, families: Sequence[FamilyId]) -> bool:
        """Adds pinned families whose load is about to start, unless the deadline came first."""
        with self._lock:
            if not self._over:
                self._pinned += families
                self._starting += 1
            return not self._over

    def _load(self, families: Sequence[FamilyId]) -> None:
        self._note_sources(families)
        run = Run(self._stage_done, self._priority, whose=self._whose, deadline=self._deadline)
        with self._lock:
            self._runs.append(run)
        self._store.loader.start(self._space, families, run, self._priority)
        with self._lock:
            self._starting -= 1
            expired = self._expired and not self._starting
        if expired:
            self._abandon()

    def _note_sources(self, families: Sequence[FamilyId]) -> None:
        index = self._store.catalog.index
        rows = np.array(families, np.int64)
        ready = sum(1 << number for number, edge in self._store.edges.items() if edge.tier.breaker.ready())
        for row in rows[index.array("state")[rows] & IN_HOST == 0].tolist():
            holders = index.whole_in[row] & ready
            self._sources[row] = (holders & -holders).bit_length() - 1  # the quickest

    def _stage_done(self) -> None:
        with self._lock:
            self._stages -= 1
            if self._stages or self._over:
                return
            self._over = True
        self._finish()

    def expire(self) -> None:
        """The deadline: what has arrived is handed over, the rest is left."""
        with self._lock:
            if self._over:
                return
            self._over = self._expired = True
            starting = self._starting
        self._store.counters.add(1, "load_deadline_total")
        if not starting:
            self._abandon()

    def _abandon(self) -> None:
        for run in self._runs:
            self._store.loader.flights.leave(run)
        self._finish()

    def _finish(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        catalog = self._store.catalog
        state = catalog.index.state
        count = next(
            (i for i, family in enumerate(self._pinned) if not state[family] & IN_HOST), len(self._pinned)
        )
        self._done(Fetched(self._pinned, count, self._sources, self._shortfall(count)))

    def _shortfall(self, count: int) -> str | None:
        """Why no more than that many blocks are in host RAM."""
        if count == self._limit:
            return None
        if count < len(self._pinned):
            family = self._pinned[count]
            known = (run.why[family] for run in self._runs if family in run.why)
            return next(known, "deadline" if self._expired else "gone")
        if self._expired:
            return "deadline"
        if self._probe is not None and self._probe.unanswered:
            return "unavailable"
        remote = (edge for edge in self._store.edges.values() if edge.tier.caps.evicts_itself)
        return "absent" if all(edge.tier.breaker.ready() for edge in remote) else "unavailable"
