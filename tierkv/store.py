"""The store: all parts put together. The only place that knows every tier; what people use is ``tierkv.client``."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import count

from tierkv.announcing import Board
from tierkv.any_copier import AnyCopier
from tierkv.catalog import Catalog
from tierkv.ceiling import Ceiling
from tierkv.clearing import Clearing
from tierkv.clock import Clock, Deadline
from tierkv.codec import RAW, Codec
from tierkv.copier import Copier
from tierkv.demotion import Demotion
from tierkv.edges import Backlog, Edge, Write, in_vain
from tierkv.errors import TierError, TierKVError
from tierkv.events import EventLog
from tierkv.executor import Executor
from tierkv.expiring import Expiring
from tierkv.fallback import SafeAdmission, SafePromotion
from tierkv.flushes import Flush
from tierkv.guard import Breaker, Change, GuardedTier, trouble_of
from tierkv.health import Health, health_of
from tierkv.hot import HotPrefixes
from tierkv.index import Space
from tierkv.intake import Intake
from tierkv.jobs import TierQueue
from tierkv.keys import Namespace
from tierkv.leases import LeaseBook
from tierkv.leaving import Leaving
from tierkv.loading import Loader
from tierkv.metrics import Counters, Labels
from tierkv.outgrowing import Outgrowing
from tierkv.picking import flush_order
from tierkv.pins import PinBook
from tierkv.policy import AdmissionPolicy, EvictionPolicy, PromotionPolicy
from tierkv.quotas import Quotas
from tierkv.quote import PrefillSpeed
from tierkv.reaper import Reaper
from tierkv.room import Room
from tierkv.scrub import Scrub
from tierkv.supervision import Caught
from tierkv.tier import BlobTier
from tierkv.tiers.host import HostTier
from tierkv.totals import asked, totals
from tierkv.traffic import Traffic
from tierkv.units import MIB
from tierkv.upkeep import Upkeep

log = logging.getLogger("tierkv")

POPULATE_LANE = "populate"
_NO_START_S = 1.0
"""So long each part may take to close when the store does not start."""
_RESERVE_BYTES = 64 * MIB
"""What a fast disk writes in some 50 ms: as long as it may keep one waiting now and then."""


@dataclass(frozen=True)
class BlobSpec:
    """A blob tier and the rules of its edge."""

    tier: BlobTier
    eviction: EvictionPolicy | None
    """``None`` for a tier that evicts on its own."""
    admission: AdmissionPolicy
    write: Write = "on_evict"
    codec: Codec = RAW
    timeout_s: float = 5.0


@dataclass(frozen=True)
class Limits:
    """Bounds and deadlines; every one has a default in the configuration."""

    max_families: int = 65_536
    queue_bytes: int = 256 * MIB
    in_flight_bytes: int = 64 * MIB
    low_watermark: float = 0.1
    high_watermark: float = 0.2
    pin_budget_bytes: int | None = None
    """``None``: as much as host RAM holds."""
    tenant_share: float = 1.0
    """Of host RAM, and of each tier that the store evicts from, for any one tenant; 1 is no quota."""
    load_deadline_s: float = 2.0
    lease_deadline_s: float = 60.0
    shutdown_deadline_s: float = 5.0
    breaker_failures: int = 3
    breaker_cooldown_s: float = 1.0
    scrub_s: float = 3600.0
    """A round of the scrub over host RAM; 0 turns it off."""


def _marks_bytes(limits: Limits, capacity_bytes: int) -> tuple[int, int]:
    """The low and the high watermark. In a small host RAM they are a larger share: an edge that hesitates must not cost
    blocks."""
    low_bytes = int(limits.low_watermark * capacity_bytes)
    least_bytes = min(_RESERVE_BYTES, capacity_bytes // 4)
    high_bytes = int(limits.high_watermark * capacity_bytes)
    return max(low_bytes, least_bytes), max(high_bytes, low_bytes, least_bytes + least_bytes // 2)


class TieredStore:
    """Host RAM and the blob tiers under it, in the order of their speed.

    Everything is allocated at start and bounded. ``start`` opens the tiers and takes up what a restart finds; a server
    that is absent is no error. ``close`` ends all threads. Thread-safe.
    """

    def __init__(
        self,
        host: HostTier,
        host_eviction: EvictionPolicy,
        blobs: Sequence[BlobSpec],
        promotion: PromotionPolicy,
        limits: Limits,
        clock: Clock,
        executor: Executor,
        copier: Copier | None = None,
    ) -> None:
        self.clock = clock
        self.limits = limits
        self.executor = executor
        self.host = host
        self.counters = Counters()
        self.events = EventLog()
        self.ceiling = Ceiling()
        self.hot = HotPrefixes(clock)
        self.traffic = Traffic(clock)
        self.prefill = PrefillSpeed()
        self.leases = LeaseBook()
        self.askers = count(1)
        """Numbers for those who load: each of them gets its share."""
        self.catalog = Catalog(
            host,
            host_eviction,
            [(spec.tier.name, spec.eviction) for spec in blobs],
            limits.max_families,
            clock,
            self.events,
            self.counters,
        )
        self.edges: dict[int, Edge] = {n: self._edge(n, spec) for n, spec in enumerate(blobs, start=1)}
        self.board = Board(self.catalog, executor, clock, self.counters)
        self.leaving = Leaving(self.catalog)
        marks_bytes = _marks_bytes(limits, host.arena.capacity_bytes)
        low, high = (mark_bytes / host.arena.capacity_bytes for mark_bytes in marks_bytes)
        self.quotas = Quotas(self.catalog, limits.tenant_share, (low, high))
        self.room = Room(self.catalog, self.leaving, self.quotas, self.counters, self._behind, self._dead)
        outgrowing = Outgrowing(self.catalog, self.leaving, self.edges)
        self.intake = Intake(self.catalog, self.room, self.quotas, outgrowing)
        self.demotion = Demotion(self.catalog, self.leaving, self.room, self.quotas, clock, self.counters)
        self.reaper = Reaper(
            self.catalog,
            self.intake,
            self.edges,
            self.demotion,
            self.quotas,
            executor,
            self.counters,
            marks_bytes=marks_bytes,
            evictable_bytes=self.room.evictable_bytes,
        )
        self.loader = Loader(
            self.catalog,
            self.leaving,
            self.intake,
            self.room,
            self.edges,
            SafePromotion(promotion, "promotion", self.catalog.failures),
            clock,
            self.counters,
            self.prefill,
        )
        self.clearing = Clearing(
            self.catalog, self.leaving, self.edges, self.reaper, clock, self.leases.owners_of, executor
        )
        budget_bytes = limits.pin_budget_bytes
        self.pins = PinBook(
            host.arena.capacity_bytes if budget_bytes is None else budget_bytes,
            self.catalog.slot_bytes_of,
            clock,
            self.counters,
        )
        self.upkeep = Upkeep(
            self.catalog,
            self.intake,
            self.pins,
            Expiring(self.catalog, self.leaving, self.edges, self.counters),
            self.reaper,
            tuple(self.edges.values()),
            self.leases,
            self.hot,
            executor,
            clock,
            self.counters,
        )
        self.scrub = Scrub(self.catalog, executor, clock, self.leases.owners_of, limits.scrub_s)
        self.populating = False
        """Host RAM is being touched, page by page."""
        self._watch_threads()
        self._own_copier = AnyCopier(executor, lambda: host.arena) if copier is None else None
        chosen = copier if self._own_copier is None else self._own_copier
        assert chosen is not None
        self.copier: Copier = chosen
        self.catalog.wanted = sum(1 << n for n, edge in self.edges.items() if edge.write != "never")
        self.catalog.on_dirty = self.reaper.note_dirty
        self.leaving.on_over = self.reaper.left
        self.room.on_refused = self.reaper.room_was_refused
        self._closed = False

    def _edge(self, number: int, spec: BlobSpec) -> Edge:
        limits = self.limits
        breaker = Breaker(self.clock, limits.breaker_failures, limits.breaker_cooldown_s)
        queue = TierQueue(
            self.executor,
            spec.tier.name,
            spec.tier.caps.workers,
            queue_bytes=limits.queue_bytes,
            in_flight_bytes=limits.in_flight_bytes,
        )
        tier = GuardedTier(spec.tier, breaker, self._breaker_changed)
        backlog = Backlog(self.catalog._space_of)
        admission = SafeAdmission(spec.admission, f"admission to {spec.tier.name}", self.catalog.failures)
        return Edge(number, tier, queue, spec.write, admission, spec.codec, spec.timeout_s, backlog)

    def claim(self, namespace: Namespace, ranks: tuple[int, ...]) -> Space:
        """The catalog's, with a word in the log where the namespace wants what no edge does."""
        known = self.catalog.index.space(namespace.digest)
        if known is None or known.namespace is None:
            if why := in_vain(namespace.spec, self.edges.values()):
                log.warning("%s", why)
        return self.catalog.claim(namespace, ranks)

    def _behind(self) -> int:
        return sum(1 << number for number, edge in self.edges.items() if edge.behind())

    def _dead(self) -> int:
        return sum(1 << number for number, edge in self.edges.items() if edge.dead())

    def _breaker_changed(self, change: Change) -> None:
        if self._closed:
            return
        if change == "closed":
            self.reaper.kick()
        else:  # somebody has to try the tier again, even if no request comes
            self.executor.call_later(self.limits.breaker_cooldown_s, self.reaper.kick)

    # -- life -----------------------------------------------------------------------------------------------------

    def start(self, *, populate: bool = True) -> None:
        """Opens the tiers. Raises ``TierError`` when one can never work, and whatever a third party's raises; then
        everything is closed again."""
        with ExitStack() as undo:
            undo.callback(self._end_of_no_start)
            for edge in self.edges.values():
                self._start_tier(edge)
                undo.callback(_close_anyhow, edge, self.clock)
                if not edge.tier.usage().writable:
                    trouble = trouble_of(edge.tier.status()) or "it is not writable"
                    log.warning("tier %s takes nothing yet: %s", edge.name, trouble)
                self.quotas.capacity_bytes[edge.number] = edge.tier.usage().capacity_bytes
                self._recover(edge)
            if populate:
                self.populating = True
                self.executor.open_lane(POPULATE_LANE, 1)
                self.executor.run(POPULATE_LANE, self._populate, lambda _: None)
            self.upkeep.start()
            self.scrub.start()
            undo.pop_all()

    def _start_tier(self, edge: Edge) -> None:
        """A tier that refuses to start has nothing open any more; one that fails as nobody foresaw is closed."""
        unforeseen = True
        try:
            edge.tier.start()
            unforeseen = False
        except TierKVError:
            unforeseen = False
            raise
        finally:
            if unforeseen:
                _close_anyhow(edge, self.clock)

    def _end_of_no_start(self) -> None:
        self._closed = True
        self.upkeep.close()
        self.scrub.close()
        if self._own_copier is not None:
            self._own_copier.close(_NO_START_S)
        self.executor.close(_NO_START_S)
        self.host.close()

    def _populate(self) -> None:
        try:
            self.host.populate()
        finally:
            self.populating = False

    def _watch_threads(self) -> None:
        threads = self.executor.threads
        threads.on_restart = lambda lane: self.counters.add(1, "threads_restarted_total", lane)
        threads.be_patient(POPULATE_LANE, float("inf"))  # as long as the arena is large
        for edge in self.edges.values():  # their guards know each call's deadline
            threads.be_patient(edge.queue.lane, float("inf"))

    def _recover(self, edge: Edge) -> None:
        if not edge.tier.caps.scannable:
            return
        headers = list(edge.tier.scan())
        found = self.intake.adopt(edge.number, headers)
        useless = self.intake.unreachable(edge.number, headers)
        if useless:
            edge.tier.delete(useless)
        if headers:
            log.info("tier %s: %d blocks found, %d families whole", edge.name, len(headers), found)

    @property
    def closed(self) -> bool:
        return self._closed

    def close(self, timeout_s: float | None = None) -> list[str]:
        """Writes to the first persistent tier what is only in host RAM, and what is queued for the others, for half of
        the time at most; then ends what runs, the coldest tier last. Returns the names of threads that are stuck."""
        if self._closed:
            return []
        self._closed = True
        deadline = Deadline(self.clock, self.limits.shutdown_deadline_s if timeout_s is None else timeout_s)
        self.board.close()
        self.events.close()
        self.upkeep.close()
        self.scrub.close()
        self._persist_the_rest()
        self.executor.wait_until(self.reaper.drained, deadline.remaining_s() / 2)
        self.reaper.close()
        for edge in self.edges.values():
            for job in edge.queue.close():
                job.done()
            edge.tier.cancel()
        if self._own_copier is not None:
            self._own_copier.close(deadline.remaining_s())
        stuck = self.executor.close(deadline.remaining_s())
        with ExitStack() as ends:  # a tier that fails here keeps no other open
            ends.callback(self.host.close)
            ends.callback(self.intake.collect_orphans)
            for edge in reversed(self.edges.values()):
                ends.callback(edge.tier.close, deadline)
        if stuck:
            log.warning("threads that did not end: %s", ", ".join(stuck))
        return stuck

    def _persist_the_rest(self) -> None:
        """The next start shall find what host RAM holds."""
        edge = next((e for e in self.edges.values() if e.tier.caps.persistent and e.write != "never"), None)
        if edge is None:
            return
        bit, dirty = 1 << edge.number, self.catalog.index.dirty
        families = [f for space in self.catalog.index.spaces for f in space.ids() if dirty[f] & bit]
        todo = flush_order(self.catalog, edge, families)
        self.reaper.flush(Flush(edge, todo, lambda _: None, by_admission=True))

    # -- facts ----------------------------------------------------------------------------------------------------

    def tier_number(self, name: str) -> int:
        """Raises ``TierError`` with the names there are."""
        for column in self.catalog.tiers:
            if column.name == name:
                return column.number
        raise TierError(f"tier {name!r}: this store has {[column.name for column in self.catalog.tiers]}")

    def health(self) -> Health:
        """How the store is. Takes microseconds, so it may be asked every second."""
        return health_of(self)

    def totals(self) -> dict[Labels, int]:
        """All counters, by name and labels: see ``docs/metrics.md``."""
        return totals(self.catalog, self.edges.values())

    def stats(self) -> dict[str, object]:
        """Plain values: fill of the tiers, edges, counters. Ratios are for the reader."""
        usage = self.host.usage()
        tiers: dict[str, object] = {
            "host": {
                "capacity_bytes": usage.capacity_bytes,
                "used_bytes": usage.used_bytes,
                "clean_bytes": self.catalog.clean_bytes,
                "populated_bytes": self.host.populated_bytes,
            }
        }
        for edge in self.edges.values():
            tiers[edge.name] = self._edge_stats(edge)
        return {
            "tiers": tiers,
            "families": self.catalog.index.size,
            "leases": len(self.leases),
            "pins": self.pins.stats(),
            "announced": self.board.stats(),
            "leased_blocks_total": self.catalog.leased_blocks,
            "flights": len(self.loader.flights),
            "threads": {
                "restarted": dict(self.executor.threads.restarts),
                "stuck_s": self.executor.threads.stuck_s(),
            },
            "scrub": {"rounds": self.scrub.passes, "progress": self.scrub.progress},
            "asked": asked(self.catalog),
            "tenants": self.quotas.facts(),
            "counters": {"/".join(labels): value for labels, value in self.totals().items()},
        }

    def _edge_stats(self, edge: Edge) -> Mapping[str, object]:
        usage = edge.tier.usage()
        return {
            **edge.tier.status(),
            "capacity_bytes": usage.capacity_bytes,
            "used_bytes": usage.used_bytes,
            "blocks": usage.blocks,
            "writable": usage.writable,
            "write": edge.write,
            "queued_down_bytes": edge.queue.pending_bytes(edge.down),
            "queued_up_bytes": edge.queue.pending_bytes(edge.up),
            "read_bytes_per_s": edge.read_speed.bytes_per_s,
            "write_bytes_per_s": edge.write_speed.bytes_per_s,
        }


def _close_anyhow(edge: Edge, clock: Clock) -> None:
    """When a start has failed: what closing raises too is told, and does not hide why."""
    caught = Caught()
    with caught:
        edge.tier.close(Deadline(clock, _NO_START_S))
    if caught.error is not None:
        log.warning("tier %s cannot be closed: %r", edge.name, caught.error)
