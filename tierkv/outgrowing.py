"""A block that was stored without a part (a window that had moved on) is stored again with it: it grows.

What a family is expected to have holds in all tiers at once, so the smaller copies go as the larger block comes in,
under one lock. Colder tiers delete theirs in their own time and get the larger one as they get any block. A block that
somebody holds stays as it is.
"""

from __future__ import annotations

from collections.abc import Mapping

from tierkv.catalog import HOST, Catalog
from tierkv.edges import Edge
from tierkv.ids import FamilyId
from tierkv.leaving import Going, Leaving


class Outgrowing:
    """``_brings_more`` and ``_grow`` under the catalog's lock, ``send`` without it."""

    def __init__(self, catalog: Catalog, leaving: Leaving, edges: Mapping[int, Edge]) -> None:
        self._catalog = catalog
        self._leaving = leaving
        self._edges = edges

    def _brings_more(self, family: FamilyId, parts: int) -> bool:
        """True when these parts are not all expected of the family, and it can grow."""
        index = self._catalog.index
        return bool(parts & ~index.expected[family]) and not index.pins[family]

    def _grow(self, family: FamilyId, expected: int) -> list[Going]:
        """Takes the smaller copies out of every tier; whoever calls this puts the larger block into host RAM before the
        lock is given up. The family keeps what is wished for it, and its place in its chain."""
        catalog, index = self._catalog, self._catalog.index
        going = []
        index.pins[family] += 1  # its row stays
        for edge in self._edges.values():
            if index.held_in[family] >> edge.number & 1:
                one = self._leaving._begin(edge)
                # What a server holds is written over, or forgotten by its own clock.
                keys = None if catalog.tiers[edge.number].policy is not None else ()
                self._leaving._add(one, family, evicted=False, reason="outgrown", keys=keys)
                going.append(one)
        catalog._lose(family, HOST, evicted=False, reason="outgrown")
        catalog.host.release(catalog._take_slots(family))
        index.expected[family] |= expected
        index.pins[family] -= 1
        return going

    def send(self, going: list[Going]) -> None:
        """Has the tiers delete the smaller copies."""
        for one in going:
            self._leaving.delete_later(one)
