"""Onboarding from blob tiers: a run of blocks is read into host slots, verified, and only then visible.

Slots are reserved before any read starts. Each block that comes back must prove itself (magic, key, length, checksum);
a block that does not is a counted miss, and the run is cut there. The slot that a job reads into belongs to the job
until the call has returned, also after a time-out or a cancel.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Iterator, Mapping, Sequence

from tierkv.bounded_lock import within
from tierkv.catalog import HOST, LOCK_BATCH, Catalog
from tierkv.clock import Clock, Deadline
from tierkv.edges import Edge
from tierkv.flights import Batch, Flight, FlightTable, Run, finish_at_once
from tierkv.ids import BlockHash, FamilyId, Slot
from tierkv.index import DOOMED, IN_HOST, Space
from tierkv.intake import Intake
from tierkv.jobs import BATCH_BLOCKS, BATCH_BYTES, Job, Priority
from tierkv.landing import Landing, Read
from tierkv.leaving import Leaving
from tierkv.metrics import Counters
from tierkv.policy import LoadQuote, Promotion, PromotionPolicy
from tierkv.quote import PrefillSpeed
from tierkv.room import Room
from tierkv.staging import SheetPool
from tierkv.tier import Outcome, Want


class Loader:
    """Starts flights and lands them. Thread-safe; ``start`` does not block."""

    def __init__(
        self,
        catalog: Catalog,
        leaving: Leaving,
        intake: Intake,
        room: Room,
        edges: Mapping[int, Edge],
        promotion: PromotionPolicy,
        clock: Clock,
        counters: Counters,
        prefill: PrefillSpeed,
    ) -> None:
        self._catalog = catalog
        self._intake = intake
        self._leaving = leaving
        self._room = room
        self._edges = edges
        self._promotion = promotion
        self._deciding = threading.Lock()
        """Held while the promotion policy is asked, which looks at nothing of the catalog's."""
        self._clock = clock
        self._counters = counters
        self._prefill = prefill
        self._landing = Landing(catalog, intake, edges, clock, counters)
        self._sheets = SheetPool(BATCH_BLOCKS)
        self.flights = FlightTable()

    def start(self, space: Space, families: Sequence[FamilyId], run: Run, priority: Priority) -> None:
        """Brings the families (pinned by the caller, in the order of their depth) into host RAM, as far as that can be
        had, and arms the run. Families that are there already cost nothing."""
        state = self._catalog.index.state
        if all(state[family] & IN_HOST for family in families):  # pinned, so they stay
            finish_at_once(run)
            return
        if run.deadline is not None and run.deadline.over():
            return  # nobody waits any more: whoever ends the wait does so without the run
        pinned: list[FamilyId] = []
        planned = self._plan(space, families, run, pinned)
        if run.deadline is not None and run.deadline.over():
            self._catalog.unpin(pinned)
            return
        worthwhile, serve = self._ask_policy(space, planned, run)
        started = self._reserve(space, worthwhile, run)
        begun = {flight.family for flight in started}
        self._catalog.unpin([family for family in pinned if family not in begun])
        for edge, flights in _by_edge(started, self._edges):
            batches = _batches(flights, edge.queue.width)
            self._submit(
                edge, [self._job(space, edge, batch, priority, serve, run.whose) for batch in batches]
            )
        self.flights.arm(run)

    # -- what to load ---------------------------------------------------------------------------------------------

    def _plan(
        self, space: Space, families: Sequence[FamilyId], run: Run, pinned: list[FamilyId]
    ) -> list[Flight]:
        """New flights for the families that are not in host RAM, up to the first that cannot be had. Those families are
        pinned once more, and added to ``pinned``: a flight holds its own until its job is over, whoever leaves."""
        planned: list[Flight] = []
        index = self._catalog.index
        ready = [number for number, edge in sorted(self._edges.items()) if edge.tier.breaker.ready()]
        for start in range(0, len(families), LOCK_BATCH):
            batch = families[start : start + LOCK_BATCH]
            patience_s = threading.TIMEOUT_MAX if run.deadline is None else run.deadline.patience_s()
            found = within(self._catalog.lock, patience_s, self._plan_batch, space, batch, ready)
            absent, count = found or ([], 0)
            pinned += [flight.family for flight in absent]
            planned += [flight for flight in absent if not self.flights.join(flight.family, run)]
            if count < len(batch):
                self._cut(families[start + count :], run, "deadline" if found is None else "unavailable")
                run.cut_at = index.depth[batch[count]]
                break
        return planned

    def _plan_batch(
        self, space: Space, families: Sequence[FamilyId], ready: Sequence[int]
    ) -> tuple[list[Flight], int]:
        """Under the catalog's lock: flights, and how many families stand before the first that cannot be had."""
        state, absent = self._catalog.index.state, list[Flight]()
        count = len(families)
        for position, family in enumerate(families):
            if state[family] & IN_HOST:
                continue
            flight = self._flight_for(space, family, ready)
            if flight is None:
                count = position
                break
            absent.append(flight)
        self._catalog._pin([flight.family for flight in absent])
        return absent, count

    def _cut(self, families: Sequence[FamilyId], run: Run, reason: str) -> None:
        """These are not even asked for."""
        self._counters.add(len(families), "load_cut_total", reason)
        for family in families:
            run.why.setdefault(family, reason)

    def _flight_for(self, space: Space, family: FamilyId, ready: Sequence[int]) -> Flight | None:
        index = self._catalog.index
        if family in self._catalog.damaged:
            return None  # its slots are leased yet, so nothing could land
        expected = index.expected[family]
        for number in ready:
            if index.residency[number][family] & expected == expected:
                missing = expected & ~index.residency[HOST][family]
                parts = tuple(part for part in range(missing.bit_length()) if missing >> part & 1)
                size = space.bytes_of(missing)
                return Flight(family, index.generation[family], number, parts, size, index.depth[family])
        return None

    def _ask_policy(self, space: Space, planned: list[Flight], run: Run) -> tuple[list[Flight], bool]:
        """Keeps the flights of those tiers that are worth loading from, up to the first that is not, and tells whether
        they are for this request only."""
        serve = False
        kept: list[Flight] = []
        for edge, flights in _by_edge(planned, self._edges):
            total = sum(flight.size_bytes for flight in flights)
            tokens = len(flights) * (space.layout.block_tokens if space.layout is not None else 0)
            quote = LoadQuote(
                tier=edge.name,
                blocks=len(flights),
                bytes=total,
                tokens=tokens,
                load_s=edge.read_speed.expect_s(total, edge.queue.pending_bytes(edge.up), edge.queue.width),
                compute_s=self._prefill.expect_s(tokens),
                last_hash=self._catalog.index.hashes[flights[-1].family] or b"",
            )
            with self._deciding:
                decision = self._promotion.decide(quote, self._catalog.host.usage())
            self._counters.add(len(flights), "promotion_decisions_total", edge.name, decision.value)
            if decision is Promotion.RECOMPUTE:
                hole = flights[0].depth
                kept = [flight for flight in kept if flight.depth < hole]
                self._cut([flight.family for flight in planned if flight.depth >= hole], run, "recompute")
                self.flights.cut_run(run, hole)
                break
            if decision is Promotion.SERVE:
                serve = True
            kept += flights
        return sorted(kept, key=lambda flight: flight.depth), serve

    # -- slots ----------------------------------------------------------------------------------------------------

    def _reserve(self, space: Space, planned: Sequence[Flight], run: Run) -> list[Flight]:
        """Registers the flights, and gives each its slots as far as there is room. Registered first: who wants the same
        blocks while the room is made waits for these, instead of finding the room taken."""
        begun = self._register(planned, run)
        count = len(begun)
        by_part: dict[int, list[Slot]] = {}
        for part in sorted({part for flight in begun for part in flight.parts}):
            users = [i for i, flight in enumerate(begun) if part in flight.parts]
            by_part[part] = self._room.take_slots(len(users), space.part_bytes[part])
            if len(by_part[part]) < len(users):
                count = min(count, users[len(by_part[part])])
        for flight in begun[:count]:
            flight.slots = [by_part[part].pop() for part in flight.parts]
        for slots in by_part.values():
            self._catalog.host.release(slots)
        if count < len(begun):
            self._turn_away(space, begun[count:], run)
        return begun[:count]

    def _register(self, planned: Sequence[Flight], run: Run) -> list[Flight]:
        """Those that nobody else reads. What others have begun meanwhile is joined, what they have read is there."""
        begun = self.flights.start_or_join(planned, run)
        # From here on nobody but these flights brings them from a tier; what an earlier one has brought can be seen.
        state = self._catalog.index.state
        absent = [not state[flight.family] & IN_HOST for flight in begun]
        self.flights.land([flight for flight, away in zip(begun, absent, strict=True) if not away])
        return list(itertools.compress(begun, absent))

    def _turn_away(self, space: Space, flights: Sequence[Flight], run: Run) -> None:
        """There is no room for these, for this run and for those that joined them."""
        self._cut([flight.family for flight in flights], run, "no_room")
        for flight in flights:
            flight.trouble = "no_room"
            self.flights.cut(flight)
        self._begin_again(space, self.flights.land(flights))

    # -- reading --------------------------------------------------------------------------------------------------

    def _job(
        self,
        space: Space,
        edge: Edge,
        flights: Sequence[Flight],
        priority: Priority,
        serve: bool,
        whose: int,
    ) -> tuple[Job, Batch]:
        """What reads them, by one worker."""
        batch = Batch(Deadline(self._clock, edge.timeout_s), flights)
        reads = []
        for flight in flights:
            flight.batch = batch
            for part, slot in zip(flight.parts, flight.slots, strict=True):
                key = space.key(self._hash_of(flight.family), part)
                reads.append(Read(flight, part, slot, key, space.part_bytes[part]))
        job = Job(
            priority,
            edge.up,
            sum(read.payload_bytes for read in reads),
            lambda: self._read(edge, reads, batch, serve),
            lambda: self._over(space, edge, flights, reads),
            whose,
            lambda: self._refuse(space, edge, flights, reads),
        )
        return job, batch

    def _submit(self, edge: Edge, jobs: Sequence[tuple[Job, Batch]]) -> None:
        """All at once: each turn of the queue's lock may be a wait."""
        wanted: list[Job] = []
        for job, batch in jobs:
            if any(flight.runs for flight in batch.flights):
                wanted.append(job)
            else:  # what its run waited for has failed meanwhile
                job.done()
        for job in edge.queue.submit_all(wanted):
            assert job.ousted is not None
            job.ousted()

    def _refuse(self, space: Space, edge: Edge, flights: Sequence[Flight], reads: Sequence[Read]) -> None:
        """The tier's queue has no room for them."""
        self._counters.add(len(flights), "load_cut_total", "queue_full")
        for flight in flights:
            flight.trouble = "queue_full"
        self._over(space, edge, flights, reads)

    def _hash_of(self, family: FamilyId) -> BlockHash:
        block_hash = self._catalog.index.hashes[family]  # the family is pinned, so its row stands still
        assert block_hash is not None
        return block_hash

    def _read(self, edge: Edge, reads: Sequence[Read], batch: Batch, serve: bool) -> None:
        started_s, deadline = self._clock.now_s(), batch.deadline
        self.flights.begin_batch(batch)
        for chunk in _chunks([read for read in reads if not read.flight.unwanted]):
            if all(read.flight.unwanted for read in chunk):
                continue
            if deadline.cancelled:
                return
            # The time of one call: neither the queue's nor the impatience of who waits makes a tier look ill.
            deadline.restart(edge.timeout_s)
            self._read_chunk(edge, chunk, batch, serve)
        moved = sum(read.payload_bytes for read in reads if read.landed)
        if moved and all(read.landed for read in reads):
            edge.read_speed.observe(moved, self._clock.now_s() - started_s)

    def _read_chunk(self, edge: Edge, chunk: Sequence[Read], batch: Batch, serve: bool) -> None:
        sheet = self._sheets.take(len(chunk))
        view = self._catalog.host.view
        wants = [Want(read.key, sheet.pages[i], view(read.slot)) for i, read in enumerate(chunk)]
        approach = self._landing.approach(edge.number, serve=serve)
        batch.land = approach.land_unless_landing

        def on_done(i: int, outcome: Outcome) -> None:
            read = chunk[i]
            if outcome is Outcome.DONE:
                approach.take(read, wants[i])
            else:
                read.outcome = outcome
            if read.outcome is not Outcome.DONE:
                self.flights.cut(read.flight)

        begun_s = self._clock.now_s()
        try:
            edge.tier.get_into(wants, batch.deadline, on_done)
        finally:
            approach.land()
        ended_s = self._clock.now_s()
        took_s = ended_s - begun_s
        edge.read_times.observe(took_s, ended_s)
        if all(read.outcome is Outcome.DONE for read in chunk):
            link_s = took_s - sum(read.decode_s for read in chunk)
            edge.codec_speed.read(sum(want.stored_bytes for want in wants), link_s)
        self._sheets.give_back(sheet)

    def _over(self, space: Space, edge: Edge, flights: Sequence[Flight], reads: Sequence[Read]) -> None:
        """The job has returned: slots that nothing landed in go back, what failed is remembered, waiters are told."""
        self._catalog.host.release([read.slot for read in reads if not read.landed])
        broken: list[Read] = []
        for read in reads:
            self._counters.add(1, "read_blocks_total", edge.name, read.outcome.value)
            if read.landed:
                self._counters.add(read.payload_bytes, "read_bytes_total", edge.name)
            elif read.flight.trouble is None and read.outcome is not Outcome.DONE:
                read.flight.trouble = read.reason
            if read.outcome in (Outcome.MISS, Outcome.CORRUPT):
                broken.append(read)
        if broken:
            self._forget(edge, broken)
        for flight in flights:
            if flight.trouble is not None:
                self.flights.cut(flight)
        self._begin_again(space, self.flights.land(flights))
        self._catalog.unpin([flight.family for flight in flights])

    def _begin_again(self, space: Space, inherited: Sequence[Flight]) -> None:
        """Somebody came for these when they had been cancelled, and waits for them."""
        begun: list[Flight] = []
        ready = [number for number, edge in sorted(self._edges.items()) if edge.tier.breaker.ready()]
        for old in inherited:
            with self._catalog.gate, self._catalog.lock:
                here = bool(self._catalog.index.state[old.family] & IN_HOST)
                flight = None if here else self._flight_for(space, old.family, ready)
            old.trouble = None if here else "unavailable"
            if flight is not None and not self._give_slots(space, flight):
                old.trouble, flight = "no_room", None
            if self.flights.begin_again(old, flight):
                assert flight is not None
                self._catalog.pin([flight.family])
                begun.append(flight)
            elif flight is not None:
                self._catalog.host.release(flight.slots)
        for edge, flights in _by_edge(begun, self._edges):
            jobs: list[tuple[Job, Batch]] = []
            for batch in _batches(flights, edge.queue.width):
                urgent = min(
                    (run.priority for flight in batch for run in flight.runs), default=Priority.ONBOARD
                )
                whose = next((run.whose for flight in batch for run in flight.runs), 0)
                jobs.append(self._job(space, edge, batch, urgent, False, whose))
            self._submit(edge, jobs)

    def _give_slots(self, space: Space, flight: Flight) -> bool:
        for part in flight.parts:
            slots = self._room.take_slots(1, space.part_bytes[part])
            if not slots:
                self._catalog.host.release(flight.slots)
                return False
            flight.slots += slots
        return True

    def _forget(self, edge: Edge, broken: Sequence[Read]) -> None:
        """The tier does not have these blocks after all, or not as they were, or they have expired. What is left of
        their families is deleted: no policy knows them any more, so nobody else would ever do it."""
        index = self._catalog.index
        own = self._catalog.tiers[edge.number].policy is not None
        with self._catalog.gate, self._catalog.lock:
            going = self._leaving._begin(edge)
            for read in broken:
                family = read.flight.family
                if index.generation[family] != read.flight.generation or index.state[family] & DOOMED:
                    continue  # a clear sees to it
                keys = [read.key] if read.outcome is Outcome.CORRUPT else []
                self._leaving._add(
                    going, family, evicted=False, reason=read.reason, keys=None if own else keys
                )
        self._leaving.delete(going)


def _by_edge(flights: Sequence[Flight], edges: Mapping[int, Edge]) -> Iterator[tuple[Edge, list[Flight]]]:
    """Flights by the tier they come from, in the order of first use."""
    groups: dict[int, list[Flight]] = {}
    for flight in flights:
        groups.setdefault(flight.tier, []).append(flight)
    for number, group in groups.items():
        yield edges[number], group


def _batches(flights: Sequence[Flight], workers: int) -> Iterator[list[Flight]]:
    """Spreads flights over the workers, in jobs of at most 8 MiB or one family."""
    total = sum(flight.size_bytes for flight in flights)
    limit = min(BATCH_BYTES, -(-total // workers))
    batch: list[Flight] = []
    size = 0
    for flight in flights:
        if batch and (size + flight.size_bytes > limit or len(batch) >= BATCH_BLOCKS):
            yield batch
            batch, size = [], 0
        batch.append(flight)
        size += flight.size_bytes
    if batch:
        yield batch


def _chunks(reads: Sequence[Read]) -> Iterator[Sequence[Read]]:
    """A family larger than 8 MiB is read in several calls."""
    start = size = 0
    for i, read in enumerate(reads):
        if i > start and (size + read.payload_bytes > BATCH_BYTES or i - start >= BATCH_BLOCKS):
            yield reads[start:i]
            start, size = i, 0
        size += read.payload_bytes
    if start < len(reads):
        yield reads[start:]
