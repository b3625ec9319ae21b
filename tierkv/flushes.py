"""Flushes that are under way: somebody wants these families written to a tier, whatever the watermarks say. What of
them is written, fails or goes away is counted here; the reaper makes the batches."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from tierkv.catalog import LOCK_BATCH, Catalog
from tierkv.edges import Edge
from tierkv.ids import FamilyId
from tierkv.leaving import Going
from tierkv.picking import Picked


@dataclass(eq=False)
class Flush:
    """Families for one tier, heads of chains first, each with its generation."""

    edge: Edge
    families: deque[tuple[FamilyId, int]]
    finish: Callable[[Flush], None]
    by_admission: bool = False
    """Only what the tier's admission policy takes."""
    left: int = 0
    written: int = 0
    failed: int = 0
    waiting: set[FamilyId] = field(default_factory=set)
    lost: set[FamilyId] = field(default_factory=set)
    """What the tier did not take meanwhile: nothing is written behind it."""
    behind: dict[FamilyId, list[tuple[FamilyId, int]]] = field(default_factory=dict)
    """By a parent that is leaving the tier, what follows it."""


class Flushes:
    """Thread-safe. Its lock is taken inside the catalog's, never the other way round."""

    def __init__(self, catalog: Catalog) -> None:
        self._catalog = catalog
        self._lock = threading.Lock()
        self._all: list[Flush] = []
        self._closed = False

    def __bool__(self) -> bool:
        return bool(self._all)

    def on(self, edge: Edge) -> list[Flush]:
        """Those to this tier."""
        with self._lock:
            return [flush for flush in self._all if flush.edge is edge]

    def add(self, flush: Flush) -> None:
        """Its ``finish`` is called when each of its families was written, failed or went away."""
        flush.left = len(flush.families)
        with self._lock:
            taken = bool(flush.left) and not self._closed
            if taken:
                self._all.append(flush)
        if not taken:
            flush.finish(flush)

    def next(self, edge: Edge) -> Flush | None:
        """One that has something to begin; they take turns."""
        with self._lock:
            for flush in self._all:
                if flush.edge is edge and flush.families:
                    self._all.remove(flush)
                    self._all.append(flush)
                    return flush
        return None

    def pick(self, flush: Flush, picked: Picked) -> None:
        """Fills a batch for it. Under the catalog's lock."""
        looked = 0
        with self._lock:
            while flush.families and not picked.full and looked < LOCK_BATCH:
                self._take(flush, picked, *flush.families.popleft())
                looked += 1

    def _take(self, flush: Flush, picked: Picked, family: FamilyId, generation: int) -> None:
        index, edge = self._catalog.index, flush.edge
        if index.generation[family] == generation:
            taken = len(picked.outgoing)
            if picked.add(family, flush.lost) or index.queued[family] >> edge.number & 1:
                flush.waiting.add(family)  # for this batch, or for one that somebody else has begun
                return
            if len(picked.outgoing) > taken:  # its ancestors filled the batch
                flush.families.appendleft((family, generation))
                return
            parent = FamilyId(index.parent[family])
            if (edge.number, parent) in self._catalog.leaving:  # `left` tells when it may come again
                flush.behind.setdefault(parent, []).append((family, generation))
                return
            if picked.lacks(family):  # one of its ancestors cannot be written
                flush.failed += 1
            else:
                expected = index.expected[family]
                flush.written += index.residency[edge.number][family] & expected == expected
        flush.left -= 1

    def written(self, edge: Edge, families: Mapping[FamilyId, bool]) -> None:
        """A batch is over: which families the tier holds whole now."""
        flushes = self.on(edge)
        with self._lock:
            for flush in flushes:
                flush.lost.update(family for family, whole in families.items() if not whole)
                for family in flush.waiting & families.keys():
                    flush.waiting.discard(family)
                    flush.left -= 1
                    flush.written += families[family]
                    flush.failed += not families[family]
        for flush in flushes:
            self.settle(flush)

    def left(self, going: Going) -> None:
        """A delete is over: what a flush found to be leaving, and what follows that, may be written now."""
        again = dict(zip(going.families, going.generations, strict=True))
        with self._lock:
            for flush in self._all:
                if flush.edge is going.edge:
                    mine = flush.waiting & again.keys()
                    flush.waiting -= mine
                    for parent in again.keys() & flush.behind.keys():
                        flush.families.extendleft(flush.behind.pop(parent))
                    flush.families.extendleft((family, again[family]) for family in mine)

    def settle(self, flush: Flush) -> None:
        """Finishes it when nothing is left."""
        if flush.left <= 0:
            self.abandon(flush)

    def abandon(self, flush: Flush) -> None:
        """Its deadline is over: what was not begun is left alone."""
        with self._lock:
            if flush not in self._all:
                return
            self._all.remove(flush)
        flush.finish(flush)

    def give_up(self, edge: Edge) -> None:
        """The tier will take nothing any more, so nobody need wait until their deadline."""
        for flush in self.on(edge):
            self.abandon(flush)

    def close(self) -> None:
        """All end now, and those that come later at once."""
        with self._lock:
            self._closed = True
            flushes, self._all = self._all, []
        for flush in flushes:
            flush.finish(flush)
