"""Which blocks one demotion takes: families with their ancestors before them, as far as admission lets them in."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence, Set

from tierkv.catalog import LOCK_BATCH, Catalog
from tierkv.demotion import Demotion, Outgoing
from tierkv.edges import Edge
from tierkv.ids import FamilyId
from tierkv.index import DOOMED, IN_HOST, NO_FAMILY
from tierkv.jobs import BATCH_BLOCKS, BATCH_BYTES
from tierkv.metrics import Counters
from tierkv.policy import Verdict
from tierkv.quotas import Quotas

_SHARE_OF_TIER = 4
"""A batch takes at most this part of a tier, or one family."""


def cleanable(catalog: Catalog, edge: Edge, family: FamilyId) -> bool:
    """True for a family that the tier should have and lacks, and that nobody is writing there yet. Under the catalog's
    lock."""
    index, bit = catalog.index, 1 << edge.number
    return bool(
        index.dirty[family] & bit
        and not index.queued[family] & bit
        and not (catalog.has_expiry and catalog._is_expired(family))
        and index.state[family] & IN_HOST
        and not index.state[family] & DOOMED
    )


class Picked:
    """A batch in the making: families with their ancestors before them. Under the catalog's lock."""

    def __init__(
        self,
        catalog: Catalog,
        demotion: Demotion,
        counters: Counters,
        edge: Edge,
        *,
        most_bytes: int = BATCH_BYTES,
        asked: bool = False,
    ) -> None:
        """``most_bytes``: the batch is full with so much, or with one family. ``asked``: somebody wants these families
        written, so admission has no say."""
        self._catalog = catalog
        self._demotion = demotion
        self._counters = counters
        self._edge = edge
        self._asked = asked
        # More than a small tier takes would only be written to be refused.
        capacity_bytes = edge.tier.usage().capacity_bytes
        self._most_bytes = min(most_bytes, capacity_bytes // _SHARE_OF_TIER or BATCH_BYTES)
        self.size_bytes = 0
        self.outgoing: list[Outgoing] = []

    def __enter__(self) -> Picked:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        """A batch that was not made up to its end is not written: what it took is free again."""
        if kind is None:
            return
        families = list(dict.fromkeys(one.family for one in self.outgoing))
        for family in families:
            self._catalog.index.queued[family] &= ~(1 << self._edge.number)
            self._catalog.awaited.came(family, self._edge.number)
        self._catalog._unpin(families)

    @property
    def full(self) -> bool:
        return self.size_bytes >= self._most_bytes or len(self.outgoing) >= BATCH_BLOCKS

    def add_with_ancestors(self, family: FamilyId) -> None:
        """Adds a family, if admission lets it in, and before it those ancestors that the tier lacks: without them it
        would be of no use there, whatever was once decided about them."""
        if not cleanable(self._catalog, self._edge, family):
            return
        line = self.line_to(family)
        for one in line[: self._admitted(line)]:
            if self.full:
                return
            self._take(one)

    def line_to(self, family: FamilyId) -> list[FamilyId]:
        """The family and its nearest ancestors that are in host RAM and not in the tier, heads first; of a long line
        only the front, since the rest can only follow."""
        parents = self._catalog.index.parent
        line = deque([family], maxlen=LOCK_BATCH)
        while self.lacks(parent := FamilyId(parents[line[-1]])):
            line.append(parent)
        return list(reversed(line))

    def lacks(self, family: FamilyId) -> bool:
        """True for a family that could be written to the tier and is not on its way there."""
        index, number = self._catalog.index, self._edge.number
        return (
            family != NO_FAMILY
            and bool(index.state[family] & IN_HOST)
            and not index.state[family] & DOOMED
            and not index.queued[family] >> number & 1
            and not index.barred[family] >> number & 1
            and not (self._catalog.has_expiry and self._catalog._is_expired(family))
            and bool(~index.whole_in[family] >> number & 1 or index.stale[family] >> number & 1)
        )

    def add(self, family: FamilyId, lost: Set[FamilyId] = frozenset()) -> bool:
        """Takes the family in, if admission agrees. False when it will not be written by this batch, as when one of its
        ancestors is among the ``lost``."""
        if not self.lacks(family):
            return False
        if not self._asked:
            if not self._admitted([family]):
                return False
            self._take(family)
            return True
        # Asked for, so nobody weighs it; but without its ancestors it could not be found there after a restart.
        line = self.line_to(family)
        if not self._has_parent(line[0]) or not lost.isdisjoint(line):
            return False
        for one in line:
            if self.full:
                break  # a line of ancestors that were evicted may be long; a batch is bounded
            self._take(one)
        return bool(self._catalog.index.queued[family] >> self._edge.number & 1)

    def add_coldest_of(self, tenant: int) -> None:
        """The coldest blocks of the tenant with that tag, with their ancestors, until the batch is full."""
        catalog, edge = self._catalog, self._edge
        for family in catalog.host_policy.victims_of(
            tenant, BATCH_BLOCKS, lambda f: cleanable(catalog, edge, f)
        ):
            self.add_with_ancestors(family)
            if self.full:
                return

    def _take(self, family: FamilyId) -> None:
        index = self._catalog.index
        parts = self._demotion.describe(self._edge, family)
        self.outgoing += parts
        index.queued[family] |= 1 << self._edge.number
        index.pins[family] += 1
        self._catalog.awaited.comes(family, self._edge.number)
        self.size_bytes += sum(one.payload_bytes for one in parts)

    def _admitted(self, line: Sequence[FamilyId]) -> int:
        """How many of a line of ancestors shall be written: up to the last one that admission lets in. Those behind it
        that it refuses count as clean."""
        catalog, edge = self._catalog, self._edge
        count = 0
        refused: list[tuple[int, FamilyId]] = []
        reachable = self._has_parent(line[0])
        for place, family in enumerate(line, 1):
            if not catalog.index.dirty[family] >> edge.number & 1:
                continue  # it was refused before, or had to leave the tier
            verdict = self._verdict(family)
            if not reachable:
                verdict = Verdict.REJECT  # nobody could find it there
            if verdict is Verdict.THROTTLE:
                break
            if verdict is Verdict.ADMIT:
                count = place
            else:
                refused.append((place, family))
        for place, family in refused:
            if place > count:
                catalog._now_clean_in(family, edge.number)
                self._counters.add(1, "admission_rejected_total", edge.name)
        return count

    def _has_parent(self, family: FamilyId) -> bool:
        index, edge = self._catalog.index, self._edge
        parent = index.parent[family]
        if not parent or self._catalog.tiers[edge.number].policy is None:
            return True
        coming = index.queued[parent] >> edge.number & 1
        going = (edge.number, parent) in self._catalog.leaving
        return bool(index.residency[edge.number][parent] or (coming and not going))

    def _verdict(self, family: FamilyId) -> Verdict:
        catalog, edge = self._catalog, self._edge
        if catalog.index.children[edge.number][family]:
            return Verdict.ADMIT  # its children are there and of no use without it
        block_hash = catalog.index.hashes[family]
        assert block_hash is not None
        return edge.admission.admit(catalog.info(family), block_hash, edge.tier.usage())


def pick_for_quotas(quotas: Quotas, picked: Picked) -> list[Outgoing]:
    """Fills a batch from a tenant whose coldest blocks will soon have to make way for its own; tenants take turns.
    Under the catalog's lock."""
    with picked:
        for books in quotas.in_turn():
            picked.add_coldest_of(books.tag)
            if picked.outgoing:
                break
    return picked.outgoing


def flush_order(catalog: Catalog, edge: Edge, families: Iterable[FamilyId]) -> deque[tuple[FamilyId, int]]:
    """What a flush has to write, heads of chains first. Without those whose ancestors are gone, as when one was read
    and was not what it should be: they could not be found in a tier that knows what hangs from what."""
    index, number = catalog.index, edge.number
    lacking = [
        family
        for family in families
        if index.state[family] & IN_HOST
        and not index.barred[family] >> number & 1
        and (~index.whole_in[family] | index.stale[family]) >> number & 1
    ]
    lacking.sort(key=lambda family: index.depth[family])
    if catalog.tiers[number].policy is not None:
        lacking = _that_hang_from_something(lacking, catalog, number)
    return deque((family, index.generation[family]) for family in lacking)


def _that_hang_from_something(families: Sequence[FamilyId], catalog: Catalog, tier: int) -> list[FamilyId]:
    """Of families by depth those whose ancestors are in host RAM, in the tier, or on their way there."""
    index, cut_off = catalog.index, set[int]()
    held, queued = index.residency[tier], index.queued
    for family in families:
        parent = index.parent[family]
        there = index.state[parent] & IN_HOST or held[parent] or queued[parent] >> tier & 1
        if parent and (not there or parent in cut_off):
            cut_off.add(family)
    return [family for family in families if family not in cut_off]
