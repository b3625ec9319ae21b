"""Blocks past their end leave every tier. To readers they are misses from that moment on; this gives their bytes back.

What is pinned stays until the last pin has gone. An ancestor goes though its descendants stay: nobody finds them until
it is stored again, and they leave by their own end or by the policy.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from tierkv.catalog import HOST, LOCK_BATCH, Catalog
from tierkv.edges import Edge
from tierkv.ids import FamilyId
from tierkv.leaving import Leaving
from tierkv.metrics import Counters

MOST_A_ROUND = 16 * LOCK_BATCH


class Expiring:
    """``sweep`` returns at once; what lies in blob tiers is deleted by their workers. Thread-safe."""

    def __init__(
        self, catalog: Catalog, leaving: Leaving, edges: Mapping[int, Edge], counters: Counters
    ) -> None:
        self._catalog = catalog
        self._leaving = leaving
        self._edges = edges
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
        with catalog.gate, catalog.lock:
            catalog._catch_up()
            going = {edge.number: self._leaving._begin(edge) for edge in ready}
            for family in families:
                if not catalog._is_expired(family) or index.pins[family]:
                    continue
                if index.residency[HOST][family]:
                    self._counters.add(1, "expired_blocks_total")
                    catalog._lose(family, HOST, evicted=False, reason="expired")
                for edge in ready:
                    if index.held_in[family] >> edge.number & 1:  # of a row that is gone there is no bit
                        # A server forgets by its own clock.
                        keys = None if catalog.tiers[edge.number].policy is not None else ()
                        self._leaving._add(
                            going[edge.number], family, evicted=False, reason="expired", keys=keys
                        )
        for one in going.values():
            self._leaving.delete_later(one)
