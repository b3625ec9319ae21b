"""Taking blocks out on purpose: ``clear`` (gone everywhere, for good), ``evict`` (out of one tier, kept in another)."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import count
from threading import Lock

from tierkv.catalog import HOST, LOCK_BATCH, Catalog
from tierkv.clock import Clock, Deadline
from tierkv.due import Due
from tierkv.edges import Edge
from tierkv.executor import Executor, Timer, deliver
from tierkv.ids import BlockKey, FamilyId, KeyPrefix
from tierkv.index import DOOMED, Space
from tierkv.jobs import Job, Priority
from tierkv.leaving import Going, Leaving
from tierkv.reaper import Reaper
from tierkv.tier import ClearResult

_GRACE_S = 0.1
"""The tiers have so much less time than the caller, or half of it: one that ends by its own deadline shall be in the
report with what it did, and the report shall be there by the caller's."""


@dataclass(frozen=True)
class ClearReport:
    """What ``clear`` did, tier by tier. ``complete`` only when nothing under the prefix can be matched any more."""

    tiers: Mapping[str, ClearResult]

    @property
    def complete(self) -> bool:
        return all(result.complete for result in self.tiers.values())


@dataclass
class Evicted:
    """What ``evict`` did."""

    evicted: int = 0
    kept_last_copy: int = 0
    """No other tier holds these; ``flush`` first, or ``clear``."""
    kept_leased: int = 0
    kept_parents: int = 0
    """Blocks that hang from these are last copies and stay, so these stay too."""
    left: int = 0
    """Nobody has looked at these when the time was over; call it again."""


class Clearing:
    """Thread-safe. ``clear`` gives a future; ``evict`` deletes in the calling thread."""

    def __init__(
        self,
        catalog: Catalog,
        leaving: Leaving,
        edges: Mapping[int, Edge],
        reaper: Reaper,
        clock: Clock,
        owners_of: Callable[[Iterable[FamilyId]], tuple[str, ...]],
        executor: Executor,
    ) -> None:
        self._catalog = catalog
        self._leaving = leaving
        self._edges = edges
        self._reaper = reaper
        self._clock = clock
        self._owners_of = owners_of
        self._executor = executor

    def clear(self, prefix: KeyPrefix, timeout_s: float) -> Future[ClearReport]:
        """Nothing under the prefix can be matched as soon as this returns; the tiers follow."""
        future: Due[ClearReport] = Due(Deadline(self._clock, timeout_s))
        self._catalog.begin_clear(prefix)
        with self._nothing_written():
            return self._clear(prefix, timeout_s, future)

    @contextmanager
    def _nothing_written(self) -> Iterator[None]:
        """No demotion begins meanwhile. A block that is stored once the old ones are off the catalog would else be
        written before its tier is cleared: gone from there, and the catalog says that it is there."""
        for edge in self._edges.values():
            self._reaper.halt(edge, lambda: None)
        try:
            yield
        finally:
            for edge in self._edges.values():
                self._reaper.go_on(edge)

    def _clear(self, prefix: KeyPrefix, timeout_s: float, future: Due[ClearReport]) -> Future[ClearReport]:
        removed, leased = self._doom_all(prefix)
        kept = self._owners_of(leased)
        host = ClearResult(removed, True, "", kept)
        results: dict[str, ClearResult] = {"host": host}
        timer: Timer | None = None
        told = count()

        def tell(found: dict[str, ClearResult]) -> None:
            if not next(told):
                deliver(future, ClearReport(found))

        def finish() -> None:
            self._catalog.end_clear(prefix)
            if timer is not None:
                timer.cancel()
            tell(results)

        if not self._edges:
            finish()
            return future
        gather = _Gather(len(self._edges), finish)
        deadline = Deadline(self._clock, max(timeout_s / 2, timeout_s - _GRACE_S))
        future.ends_by(lambda: tell(dict(results)))
        timer = self._executor.call_later(future.deadline.remaining_s(), lambda: tell(dict(results)))
        for edge in self._edges.values():
            self._clear_tier(edge, prefix, deadline, results, gather)
        return future

    def _clear_tier(
        self,
        edge: Edge,
        prefix: KeyPrefix,
        deadline: Deadline,
        results: dict[str, ClearResult],
        gather: _Gather,
    ) -> None:
        results[edge.name] = ClearResult(0, False, "the tier was not reached in time")

        def work() -> None:
            results[edge.name] = edge.tier.clear(prefix, deadline)

        def over() -> None:
            self._reaper.go_on(edge)
            gather.one_done()

        def begin() -> None:
            if not edge.queue.submit(Job(Priority.PROBE, f"clear>{edge.name}", 0, work, over)):
                over()

        # A demotion that is under way must be over first, or it would bring a block back.
        self._reaper.halt(edge, begin)

    def _doom_all(self, prefix: KeyPrefix) -> tuple[int, list[FamilyId]]:
        removed = 0
        leased: list[FamilyId] = []
        index = self._catalog.index
        for space in list(index.spaces):
            if not space.prefix.startswith(prefix):
                continue
            # Children before parents, so that rows are settled as we go.
            families = sorted(space.ids(), key=lambda family: -index.depth[family])
            while families:
                removed += self._doom(space, families, leased)
                # What came in meanwhile behind a block that was cleared after that hangs from nothing now.
                families = [family for family in space.ids() if index.state[index.parent[family]] & DOOMED]
        return removed, leased

    def _doom(self, space: Space, families: Sequence[FamilyId], leased: list[FamilyId]) -> int:
        """Returns how many of the families were in host RAM."""
        removed = 0
        index = self._catalog.index
        for start in range(0, len(families), LOCK_BATCH):
            with self._catalog.gate, self._catalog.lock:
                self._catalog._catch_up()
                for family in families[start : start + LOCK_BATCH]:
                    if not _still_in(space, index.hashes[family], family):
                        continue
                    removed += bool(index.residency[HOST][family])
                    if index.pins[family]:
                        leased.append(family)
                    self._catalog._doom(family)
        return removed

    def drop_unfit(self, space: Space) -> None:
        """A namespace was opened for ranks that some of its blocks lack, since they were stored for others: those could
        never be of use, and would stand in the way of whole ones. Off the catalog now; the tiers follow."""
        index = self._catalog.index
        unfit: set[FamilyId] = set()
        for family in sorted(space.ids(), key=lambda family: index.depth[family]):
            if index.expected[family] & space.needed != space.needed or index.parent[family] in unfit:
                unfit.add(family)
        families = sorted(unfit, key=lambda family: -index.depth[family])
        for start in range(0, len(families), LOCK_BATCH):
            self._drop(space, families[start : start + LOCK_BATCH])

    def _drop(self, space: Space, families: Sequence[FamilyId]) -> None:
        catalog, index = self._catalog, self._catalog.index
        # Others may have use for what a server holds.
        own = [edge for edge in self._edges.values() if catalog.tiers[edge.number].policy is not None]
        keys: dict[int, list[BlockKey]] = {edge.number: [] for edge in own}
        with catalog.gate, catalog.lock:
            for family in families:
                if not _still_in(space, index.hashes[family], family):
                    continue
                for number, mine in keys.items():
                    mine += catalog._keys_in(family, number)
                catalog._doom(family)
            calls = [self._deletion(edge, keys[edge.number]) for edge in own if keys[edge.number]]
            halted = [self._reaper._halt(edge, call) for edge, call in calls]
        for (_, call), free in zip(calls, halted, strict=True):
            if free:
                call()

    def _deletion(self, edge: Edge, keys: Sequence[BlockKey]) -> tuple[Edge, Callable[[], None]]:
        """To be made while no demotion is under way, since the same names may be stored anew at once."""

        def over() -> None:
            self._reaper.go_on(edge)

        def begin() -> None:
            job = Job(Priority.DEMOTE, edge.down, 0, lambda: edge.tier.delete(keys), over)
            if not edge.queue.submit(job):
                over()

        return edge, begin

    def evict(self, tier: int, prefix: KeyPrefix, timeout_s: float) -> Evicted:
        """Takes blocks out of a tier, except last copies. Deepest first, so that no chain is left without its head. A
        server that hangs holds up one batch for as long as its own time-out; after ``timeout_s`` none is begun."""
        result, deadline = Evicted(), Deadline(self._clock, timeout_s)
        index = self._catalog.index
        for space in list(index.spaces):
            if not space.prefix.startswith(prefix):
                continue
            families = sorted(space.ids(), key=lambda family: -index.depth[family])
            for start in range(0, len(families), LOCK_BATCH):
                batch = families[start : start + LOCK_BATCH]
                if deadline.over():
                    result.left += sum(bool(index.residency[tier][family]) for family in batch)
                    continue
                going = self._evict_batch(tier, space, batch, result)
                if going is not None:
                    self._leaving.delete(going)
        return result

    def drop_host(self) -> Future[Evicted]:
        """Empties host RAM of all that is not leased, last copies too."""
        result = Evicted(evicted=self._drop_host())
        result.kept_leased = self._catalog.leased_families()
        future: Future[Evicted] = Future()
        deliver(future, result)
        return future

    def _drop_host(self) -> int:
        catalog, index = self._catalog, self._catalog.index
        dropped = 0
        for space in list(index.spaces):
            families = sorted(space.ids(), key=lambda family: -index.depth[family])
            for start in range(0, len(families), LOCK_BATCH):
                with catalog.gate, catalog.lock:
                    catalog._catch_up()
                    for family in families[start : start + LOCK_BATCH]:
                        held = (
                            _still_in(space, index.hashes[family], family) and index.residency[HOST][family]
                        )
                        if held and not index.pins[family]:
                            catalog._lose(family, HOST, evicted=True, reason="asleep")
                            dropped += 1
        return dropped

    def _evict_batch(
        self, tier: int, space: Space, families: Sequence[FamilyId], result: Evicted
    ) -> Going | None:
        catalog, index = self._catalog, self._catalog.index
        with catalog.gate, catalog.lock:
            catalog._catch_up()
            going = None if tier == HOST else self._leaving._begin(self._edges[tier])
            for family in families:
                block_hash = index.hashes[family]
                if (
                    block_hash is None
                    or not _still_in(space, block_hash, family)
                    or not index.residency[tier][family]
                ):
                    continue
                expected = index.expected[family]
                if index.pins[family]:
                    result.kept_leased += 1
                elif not any(
                    number != tier and column[family] & expected == expected
                    for number, column in enumerate(index.residency)
                ):
                    result.kept_last_copy += 1
                elif tier != HOST and index.children[tier][family]:
                    result.kept_parents += 1
                else:
                    if going is None:
                        catalog._lose(family, tier, evicted=True, reason="asked")
                    else:
                        self._leaving._add(going, family, evicted=True, reason="asked")
                    result.evicted += 1
        return going


def _still_in(space: Space, block_hash: bytes | None, family: FamilyId) -> bool:
    return block_hash is not None and space.get(block_hash) == family


class _Gather:
    """Calls back when a number of things are done."""

    def __init__(self, count: int, call: Callable[[], None]) -> None:
        self._left = count
        self._call = call
        self._lock = Lock()

    def one_done(self) -> None:
        with self._lock:
            self._left -= 1
            last = not self._left
        if last:
            self._call()
