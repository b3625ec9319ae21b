"""Blocks past their end leave every tier. To readers they are misses from that moment on; this gives their bytes back.

What is pinned stays until the last pin has gone. An ancestor goes though its descendants stay: nobody finds them until
it is stored again, and they leave by their own end or by the policy.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from tierkv.catalog import HOST, LOCK_BATCH, Catalog
from tierkv.edges import Edge
from tierkv.ids import BlockKey, FamilyId
from tierkv.jobs import Job, Priority
from tierkv.metrics import Counters
from tierkv.reaper import Reaper

MOST_A_ROUND = 16 * LOCK_BATCH


class Expiring:
    """``sweep`` returns at once; what lies in blob tiers is deleted by their workers. Thread-safe."""

    def __init__(
        self, catalog: Catalog, edges: Mapping[int, Edge], reaper: Reaper, counters: Counters
    ) -> None:
        self._catalog = catalog
        self._edges = edges
        self._reaper = reaper
        self._counters = counters

    def sweep(self) -> None:
        """Takes out up to 4096 families that are past their end."""
        if not self._catalog.has_expiry:
            return
        expired = self._catalog.index.expired(self._catalog.clock.now_s())[:MOST_A_ROUND]
        for start in range(0, len(expired), LOCK_BATCH):
            self._take_out(expired[start : start + LOCK_BATCH])

    def _take_out(self, families: Sequence[FamilyId]) -> None:
        catalog, index = self._catalog, self._catalog.index
        ready = [edge for edge in self._edges.values() if edge.tier.breaker.ready()]
        leaving: dict[int, tuple[list[FamilyId], list[BlockKey]]] = {edge.number: ([], []) for edge in ready}
        with catalog.lock:
            for family in families:
                if not catalog._is_expired(family) or index.pins[family]:
                    continue
                if index.residency[HOST][family]:
                    self._counters.add(1, "expired_blocks_total")
                    catalog._lose(family, HOST, evicted=False, reason="expired")
                for edge in ready:
                    if index.held_in[family] >> edge.number & 1:  # of a row that is gone there is no bit
                        self._leave(edge, family, *leaving[edge.number])
        for edge in ready:
            if leaving[edge.number][1]:
                self._delete(edge, *leaving[edge.number])

    def _leave(self, edge: Edge, family: FamilyId, going: list[FamilyId], keys: list[BlockKey]) -> None:
        """Off the catalog first. Until the tier has deleted it too, nobody may write it there anew."""
        catalog, index = self._catalog, self._catalog.index
        if catalog.tiers[edge.number].policy is not None:  # a server forgets by its own clock
            keys += catalog._keys_in(family, edge.number)
            index.queued[family] |= 1 << edge.number
            index.pins[family] += 1
            going.append(family)
        catalog._lose(family, edge.number, evicted=False, reason="expired")

    def _delete(self, edge: Edge, going: Sequence[FamilyId], keys: Sequence[BlockKey]) -> None:
        def over() -> None:
            catalog, index = self._catalog, self._catalog.index
            with catalog.lock:
                for family in going:
                    index.queued[family] &= ~(1 << edge.number)
                    catalog._let_follow(family, edge.number)
                catalog._tell_arrivals()
                catalog.on_dirty([family for family in going if index.dirty[family] >> edge.number & 1])
            catalog.unpin(going)
            self._reaper.kick()

        job = Job(Priority.DEMOTE, edge.down, 0, lambda: edge.tier.delete(keys), over)
        if not edge.queue.submit(job):
            over()
