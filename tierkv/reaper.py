"""Clean ahead of need: dirty blocks are written to the colder tiers before room is short.

So a reservation evicts clean blocks inline and never waits for a demotion. With ``through`` a block is queued when it
is registered; with ``on_evict`` blocks are taken from the cold end of the eviction policy while less than the high
watermark of the arena is free or clean. A block is cleaned after its dirty ancestors, so that what a crash leaves in a
persistent tier is whole chains. A line that was begun is written to its end: heads cannot leave host RAM before their
tails, so half a line makes no room at all. A failed write puts the block to the back of the queue.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from itertools import chain

from tierkv.catalog import LOCK_BATCH, Catalog
from tierkv.demotion import Demotion, Outgoing
from tierkv.edges import Edge
from tierkv.executor import Executor
from tierkv.flushes import Flush, Flushes
from tierkv.ids import FamilyId
from tierkv.index import NO_FAMILY
from tierkv.intake import Intake
from tierkv.jobs import BATCH_BLOCKS, BATCH_BYTES, Job, Priority
from tierkv.leaving import Going
from tierkv.metrics import Counters
from tierkv.picking import Picked, cleanable, pick_for_quotas
from tierkv.quotas import Quotas

LANE = "reaper"
_PINNED_SHARE = 4
"""So large a part of host RAM may be on its way over one edge, or one batch."""
_BATCHES_IN_RESERVE = 16
"""What is clean at the low watermark is worth as many batches as this, or more."""


class Reaper:
    """Feeds the demotion queues. ``kick`` may be called from anywhere and returns at once; the work is done on a lane
    of its own."""

    def __init__(
        self,
        catalog: Catalog,
        intake: Intake,
        edges: Mapping[int, Edge],
        demotion: Demotion,
        quotas: Quotas,
        executor: Executor,
        counters: Counters,
        *,
        marks_bytes: tuple[int, int],
        evictable_bytes: Callable[[int], int],
    ) -> None:
        """``marks_bytes``: the low and the high watermark. ``evictable_bytes(enough)``: how much could leave host RAM
        now; need not look further than to ``enough``."""
        self._catalog = catalog
        self._intake = intake
        self._edges = edges
        self._demotion = demotion
        self._quotas = quotas
        self._executor = executor
        self._counters = counters
        self._low_bytes, self._high_bytes = marks_bytes
        self._evictable_bytes = evictable_bytes
        self._lock = threading.Lock()
        self._scheduled = False
        self._again = False
        self.flushes = Flushes(catalog)
        self._barriers: list[tuple[Edge, set[int], Callable[[], None]]] = []
        self._jobs = 0
        self._closed = False
        self._refilling = dict.fromkeys(edges, False)
        self._refused = dict.fromkeys(edges, False)
        self._grown = False
        """Blocks were registered since the evictable ones were last found to be enough."""
        self._lines: dict[int, tuple[FamilyId, int]] = {}
        """By edge: the cold block at the end of the line that is being written, and its generation."""
        executor.open_lane(LANE, 1)

    # -- when -----------------------------------------------------------------------------------------------------

    def note_dirty(self, families: Sequence[FamilyId]) -> None:
        """Told by the catalog, under its lock, what has been registered."""
        self._grown = True
        for edge in self._edges.values():
            if edge.write == "through":
                dirty = self._catalog.index.dirty
                edge.backlog.add(family for family in families if dirty[family] >> edge.number & 1)

    def kick(self) -> None:
        """Looks soon whether there is something to clean."""
        with self._lock:
            if self._closed or self._scheduled:
                self._again = True
                return
            self._scheduled = True
            self._executor.run(
                LANE, self._step, self._stepped
            )  # inside, so that `close` does not come between

    def kick_if_short(self) -> None:
        """Cheap enough for every store call: looks at a few numbers first."""
        queued = self.flushes or self._quotas.short or any(edge.backlog for edge in self._edges.values())
        if queued or self._short_bytes(self._high_bytes) > 0 or self._may_be_stuck():
            self.kick()

    def room_was_refused(self) -> None:
        """Whatever the watermarks say: what is clean may hang above something dirty. The coldest line is cleaned."""
        self._clean_the_coldest()
        self.kick()

    def _clean_the_coldest(self) -> None:
        for number in self._refused:
            self._refused[number] = True

    def _may_be_stuck(self) -> bool:
        """Looks at two numbers."""
        return self._grown and self._catalog.host.free_bytes() < self._low_bytes

    def _look_whether_stuck(self) -> None:
        """What is clean makes room only where nothing dirty hangs from it (a prompt that was continued, say)."""
        if not self._may_be_stuck() or any(edge.cleaning for edge in self._edges.values()):
            return
        self._grown = False
        if self._evictable_bytes(self._low_bytes) < self._low_bytes:
            self._grown = True
            self._clean_the_coldest()

    def _stepped(self, _: None) -> None:
        with self._lock:
            again, self._again = self._again, False
            if not again or self._closed:
                self._scheduled = False
                return
            self._executor.run(LANE, self._step, self._stepped)

    def _step(self) -> None:
        whole = False
        try:
            self._intake.collect_orphans()
            self._look_whether_stuck()
            for edge in self._edges.values():
                if edge.tier.usage().read_only:
                    self.flushes.give_up(edge)
                while self._feed(edge):
                    pass
            whole = True
        finally:
            if not whole:  # this thread ends; without this nobody would ever be asked to step again
                self._stepped(None)

    def close(self) -> None:
        """Starts nothing more."""
        with self._lock:
            self._closed = True
        self.flushes.close()

    def drained(self) -> bool:
        """True when no tier that is well has anything left to take that was queued for it."""
        return not any(
            edge.cleaning or edge.backlog or self.flushes.on(edge)
            for edge in self._edges.values()
            if self._is_well(edge)
        )

    def _takes_more(self, edge: Edge) -> bool:
        return self._is_well(edge) and edge.retry_at_s <= self._catalog.clock.now_s()

    def _is_well(self, edge: Edge) -> bool:
        if edge.rest_until_s > self._catalog.clock.now_s() or not edge.tier.usage().writable:
            return False  # upkeep looks again every second
        return edge.tier.breaker.ready()

    def idle(self) -> bool:
        return not self._scheduled and not any(edge.cleaning for edge in self._edges.values())

    # -- what -----------------------------------------------------------------------------------------------------

    def flush(self, flush: Flush) -> None:
        """Adds a flush; its ``finish`` is called when each of its families was written, failed or went away."""
        self.flushes.add(flush)
        self.kick()

    def _short_bytes(self, mark_bytes: int) -> int:
        """How much more of the arena should be free or clean."""
        catalog = self._catalog
        return mark_bytes - catalog.host.free_bytes() - catalog.clean_bytes

    def _feed(self, edge: Edge) -> bool:
        """Starts one demotion job; False when there is nothing to do or the edge has enough."""
        if not self._takes_more(edge) or edge.queue.over_budget(edge.down):
            return False
        if not edge.queue.takes_more(edge.down) or self._pins_enough(edge):
            return False  # a batch that ends asks again
        flush = self.flushes.next(edge)
        with self._catalog.gate, self._catalog.lock:
            if edge.clearing:
                return False
            outgoing = self._pick_flush(edge, flush) if flush is not None else self._pick(edge)
            number = self._begin(edge) if outgoing else 0
        if flush is not None:
            self.flushes.settle(flush)
        if not outgoing:
            return flush is not None and bool(flush.families)
        return self._submit(edge, outgoing, number)

    def _pins_enough(self, edge: Edge) -> bool:
        """What is being written cannot leave: a tier that hangs must not hold all of a small host RAM."""
        most_bytes = self._catalog.host.arena.capacity_bytes // _PINNED_SHARE
        return edge.queue.pending_bytes(edge.down) >= most_bytes

    def _pick(self, edge: Edge) -> list[Outgoing]:
        if edge.write == "through":
            return self._pick_backlog(edge)
        if edge.write == "on_evict" and self._wants_refill(edge):
            return self._pick_cold(edge)
        return pick_for_quotas(self._quotas, self._batch(edge)) if edge.write == "on_evict" else []

    def _wants_refill(self, edge: Edge) -> bool:
        """Begins below the low watermark or when room was refused, goes on to the high one and to the end of the line
        that it is at; what is being written counts as clean already."""
        under_way = edge.queue.pending_bytes(edge.down)
        if self._short_bytes(self._high_bytes) - under_way <= 0:
            self._refilling[edge.number] = False
        elif self._short_bytes(self._low_bytes) - under_way > 0:
            self._refilling[edge.number] = True
        return self._refilling[edge.number] or self._refused[edge.number] or bool(self._line_of(edge))

    def _line_of(self, edge: Edge) -> tuple[FamilyId, ...]:
        """The end of the line that was begun, if it is still to be written."""
        family, generation = self._lines.get(edge.number, (NO_FAMILY, 0))
        index = self._catalog.index
        open_yet = (
            family and index.generation[family] == generation and cleanable(self._catalog, edge, family)
        )
        return (family,) if open_yet else ()

    def _batch(self, edge: Edge, most_bytes: int = BATCH_BYTES, *, asked: bool = False) -> Picked:
        return Picked(self._catalog, self._demotion, self._counters, edge, most_bytes=most_bytes, asked=asked)

    def _pick_backlog(self, edge: Edge) -> list[Outgoing]:
        looked = 0
        put_off = []
        with self._batch(edge) as picked:
            while edge.backlog and not picked.full and looked < LOCK_BATCH:
                family = edge.backlog.pop()
                picked.add_with_ancestors(family)
                if cleanable(
                    self._catalog, edge, family
                ):  # its ancestors filled the batch, or admission said: not now
                    put_off.append(family)
                looked += 1
            edge.backlog.put_back(put_off)
        return picked.outgoing

    def _pick_cold(self, edge: Edge) -> list[Outgoing]:
        short_bytes = self._short_bytes(self._high_bytes) - edge.queue.pending_bytes(edge.down)
        self._refused[edge.number] = False
        cold = self._catalog.host_policy.victims(BATCH_BLOCKS, lambda f: cleanable(self._catalog, edge, f))
        # Batches are written side by side and end together: small ones give the first room while there is some left.
        most_bytes = min(BATCH_BYTES, self._low_bytes // _BATCHES_IN_RESERVE)
        with self._batch(edge, most_bytes) as picked:
            for family in chain(self._line_of(edge), cold):
                picked.add_with_ancestors(family)
                if picked.full or picked.size_bytes >= short_bytes:
                    self._lines[edge.number] = family, self._catalog.index.generation[family]
                    break
        return picked.outgoing

    def _pick_flush(self, edge: Edge, flush: Flush) -> list[Outgoing]:
        with self._batch(edge, asked=not flush.by_admission) as picked:
            self.flushes.pick(flush, picked)
        return picked.outgoing

    # -- running --------------------------------------------------------------------------------------------------

    def halt(self, edge: Edge, call: Callable[[], None]) -> None:
        """Begins no demotion to this tier until ``go_on``, and makes the call when those under way are over."""
        with self._catalog.gate, self._catalog.lock:
            free = self._halt(edge, call)
        if free:
            call()

    def _halt(self, edge: Edge, call: Callable[[], None]) -> bool:
        """The same under the catalog's lock. True when nothing is under way: then the call is the caller's to make."""
        with self._lock:
            edge.clearing += 1
            under_way = set(edge.cleaning)
            if under_way:
                self._barriers.append((edge, under_way, call))
        return not under_way

    def go_on(self, edge: Edge) -> None:
        """The end of one ``halt``."""
        with self._catalog.gate, self._catalog.lock:
            edge.clearing -= 1
        self.kick()

    def _begin(self, edge: Edge) -> int:
        """A number for a demotion that begins. Under the catalog's lock, like ``halt``: so neither misses the other."""
        with self._lock:
            self._jobs += 1
            edge.cleaning.add(self._jobs)
            return self._jobs

    def _submit(self, edge: Edge, outgoing: Sequence[Outgoing], number: int) -> bool:
        """Hands a batch to the tier's queue. False when that is closed: then there is no point in picking another."""
        job = Job(
            Priority.DEMOTE,
            edge.down,
            sum(one.payload_bytes for one in outgoing),
            lambda: self._demotion.write(edge, outgoing),
            lambda: self._over(edge, outgoing, number),
        )
        taken = edge.queue.submit(job)
        if not taken:
            self._over(edge, outgoing, number)
        return taken

    def _over(self, edge: Edge, outgoing: Sequence[Outgoing], number: int) -> None:
        families = self._demotion.commit(edge, outgoing)
        self._catalog.unpin(list(families))  # before anybody is told: who waits for a flush may want to evict
        self.flushes.written(edge, families)
        self._lift_barriers(edge, number)
        rest_s = edge.rests_s(self._catalog.clock.now_s())
        if rest_s:
            self._executor.call_later(rest_s, self.kick)
        self.kick()

    def left(self, going: Going) -> None:
        """A delete is over: what a flush found to be leaving, it may write now."""
        self.flushes.left(going)
        self._lift_barriers(going.edge, going.number)
        if going.families:
            self.kick()

    def _lift_barriers(self, edge: Edge, number: int) -> None:
        with self._lock:
            edge.cleaning.discard(number)
            for barrier in self._barriers:
                if barrier[0] is edge:
                    barrier[1].discard(number)
            free = [call for _, under_way, call in self._barriers if not under_way]
            self._barriers = [barrier for barrier in self._barriers if barrier[1]]
        for call in free:
            call()
