"""Blocks that are taken out of a blob tier on purpose: off the catalog first, then deleted there.

Between the two a demotion might write such a block to the tier anew, and the delete would then take the new copy. So
until the delete is over each family counts as being worked on in that tier (its ``queued`` bit is set, and it is
pinned so that its row stays its own), which is what picking looks at anyway. Then whoever waited for it is told.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import count

from tierkv.catalog import Catalog
from tierkv.edges import Edge
from tierkv.ids import BlockKey, FamilyId
from tierkv.jobs import Job, Priority


@dataclass(eq=False, slots=True)
class Going:
    """Families that leave one tier together."""

    edge: Edge
    number: int
    """Its place among what the edge is busy with, negative: so a clear waits for it."""
    families: list[FamilyId] = field(default_factory=list)
    generations: list[int] = field(default_factory=list)
    keys: list[BlockKey] = field(default_factory=list)


class Leaving:
    """``begin`` and ``add`` under the catalog's lock, ``delete`` without it, on any thread."""

    def __init__(self, catalog: Catalog) -> None:
        self._catalog = catalog
        self._numbers = count(1)
        self.on_over: Callable[[Going], None] = lambda going: None
        """Told, without a lock, when a delete is over."""

    def _begin(self, edge: Edge) -> Going:
        going = Going(edge, -next(self._numbers))
        edge.cleaning.add(going.number)
        return going

    def _add(
        self,
        going: Going,
        family: FamilyId,
        *,
        evicted: bool,
        reason: str,
        keys: Sequence[BlockKey] | None = None,
    ) -> None:
        """A family leaves the tier: all parts of it that are there, or only ``keys``."""
        catalog, index, number = self._catalog, self._catalog.index, going.edge.number
        found = catalog._keys_in(family, number) if keys is None else keys
        busy = index.queued[family] >> number & 1
        if busy and (number, family) in catalog.leaving:
            if family in going.families:
                going.keys += found
            return
        catalog.leaving.add((number, family))
        if not busy:  # else a demotion is about to write it over, and deletes it should that fail
            index.queued[family] |= 1 << number
            index.pins[family] += 1
            going.families.append(family)
            going.generations.append(index.generation[family])
            going.keys += found
        catalog._lose(family, number, evicted=evicted, reason=reason)

    def delete(self, going: Going) -> None:
        """Deletes in the calling thread, then lets go."""
        try:
            if going.keys:
                going.edge.tier.delete(going.keys)
        finally:
            self.over(going)

    def delete_later(self, going: Going) -> None:
        """Deletes on a worker of the tier; returns at once."""
        edge = going.edge

        def work() -> None:
            edge.tier.delete(going.keys)

        def over() -> None:
            self.over(going)

        if not going.keys or not edge.queue.submit(Job(Priority.DEMOTE, edge.down, 0, work, over)):
            over()

    def over(self, going: Going) -> None:
        """The tier has deleted them, or nobody is going to: from now on they may be written there again."""
        catalog, index, number = self._catalog, self._catalog.index, going.edge.number
        orphans: list[FamilyId] = []
        with catalog.gate, catalog.lock:
            for family in going.families:
                index.queued[family] &= ~(1 << number)
                catalog.leaving.discard((number, family))
                orphans += catalog._let_follow(family, number)
            catalog._tell_arrivals()
            behind = self._begin(going.edge) if orphans else None
            for orphan in reversed(orphans):
                assert behind is not None
                self._add(behind, orphan, evicted=True, reason="unreachable")
            catalog.on_dirty([family for family in going.families if index.dirty[family] >> number & 1])
        catalog.unpin(going.families)
        self.on_over(going)
        if behind is not None:
            self.delete_later(behind)
