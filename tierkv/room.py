"""Making room: who leaves a tier when something else wants in.

Policies order, the store decides: only families without pins and without resident children may leave (so a chain
loses its deepest block first), and from host RAM only clean ones, as long as the colder tiers keep up.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from itertools import islice
from typing import Final

import numpy as np

from tierkv.catalog import HOST, LOCK_BATCH, Catalog
from tierkv.edges import Edge
from tierkv.exiting import FEWEST
from tierkv.fallback import SafeEviction
from tierkv.ids import FamilyId, Slot
from tierkv.index import IN_HOST, NO_SLOT, Space
from tierkv.leaving import Going, Leaving
from tierkv.metrics import Counters
from tierkv.quotas import Quotas
from tierkv.tenancy import TenantBooks

_MAX_PASSES: Final = 64
"""Passes of up to 256 families over one request for room; a request that needs more gets less."""

_AHEAD: Final = 64
"""So many clean blocks leave at a time though fewer must: those who come one by one pay for one pass in 64."""
_HOST_STATES: Final = bytes(bits for bits in range(256) if bits & IN_HOST)
_AT_ONCE: Final = nullcontext()
"""In the place of the catalog's gate, for whoever has no time."""
_COLDER: Final = 0xFF & ~(1 << HOST)
"""Bitmap of all tiers but host RAM."""
_AHEAD_SHARE: Final = 128
"""But no more than this fraction of the arena."""


class _Chosen:
    """Victims picked so far, and what the picks mean for their parents: a leaf that goes may bare the next one.

    Those in ``keep`` are never picked. ``behind``: bitmap of the tiers for whose sake nothing dirty need stay;
    ``dead``: of those for whose children no parent need stay.
    """

    def __init__(self, keep: Collection[FamilyId] = (), behind: int = 0, dead: int = 0) -> None:
        self.keep = keep
        self.behind = behind
        self.dead = dead
        self.families: list[FamilyId] = []
        self.regions: dict[int, bool] = {}
        """Regions that were looked at, and whether they can be emptied."""
        self.pinned: list[FamilyId] = []
        """Families that were met and cannot leave for their pins."""
        self.picked: set[FamilyId] = set()
        self.children_gone: dict[int, int] = {}

    def add(self, family: FamilyId, parent: int) -> None:
        self.families.append(family)
        self.picked.add(family)
        if parent:
            self.children_gone[parent] = self.children_gone.get(parent, 0) + 1

    def children_left(self, family: FamilyId, resident: int) -> int:
        return resident - self.children_gone.get(family, 0)


class Room:
    """Makes room in host RAM and in the blob tiers that the store evicts from."""

    def __init__(
        self,
        catalog: Catalog,
        leaving: Leaving,
        quotas: Quotas,
        counters: Counters,
        behind: Callable[[], int],
        dead: Callable[[], int],
    ) -> None:
        self._catalog = catalog
        self._leaving = leaving
        self._quotas = quotas
        self._counters = counters
        self._behind = behind
        """Bitmap of the colder tiers whose edge is over its budget or broken: what waits for them may be dropped."""
        self._dead = dead
        """Bitmap of the broken ones alone: what they hold may be left without its ancestors."""
        self.on_refused: Callable[[], None] = lambda: None

    # -- host -----------------------------------------------------------------------------------------------------

    def take_slots(self, count: int, slot_bytes: int) -> list[Slot]:
        """Reserves up to ``count`` host slots for what another tier holds, evicting clean blocks inline; never waits
        for a demotion. Dirty ones leave only for the sake of tiers that do not keep up."""
        return self._take(count, slot_bytes, (), self._behind, _AT_ONCE)

    def take_slots_for_new(self, count: int, slot_bytes: int, keep: Collection[FamilyId]) -> list[Slot]:
        """The same for blocks that nobody else holds. One of them is lost for want of room, whatever is done: so the
        coldest dirty blocks make way for them, also where a tier would have taken these in a moment. The families in
        ``keep`` stay: what is about to be stored hangs from them."""
        slots = self._catalog.host.reserve(count, slot_bytes)
        return slots or self._take(count, slot_bytes, keep, lambda: self._catalog.wanted, self._catalog.gate)

    def _take(
        self,
        count: int,
        slot_bytes: int,
        keep: Collection[FamilyId],
        droppable: Callable[[], int],
        gate: AbstractContextManager[object],
    ) -> list[Slot]:
        catalog, host = self._catalog, self._catalog.host
        slots = host.reserve(count, slot_bytes)
        if slots is not None:
            return slots
        arena = host.arena
        stride = arena.stride_for(slot_bytes)
        short = False
        for _ in range(_MAX_PASSES):
            with gate, catalog.lock:
                catalog._catch_up()
                missing = count - arena.free_slots(stride)
                freed = self._evict_clean(missing, stride, keep) if missing > 0 else 0
                if missing > 0 and not freed:
                    short = True
                    freed = self._evict_dirty(missing, stride, keep, droppable())
            slots = host.reserve(count, slot_bytes)
            if slots is not None or (not freed and not catalog.host_policy.learning):
                break
        if short:
            self.on_refused()
        return slots or host.reserve(min(count, arena.free_slots(stride)), slot_bytes) or []

    def evictable_bytes(self, enough_bytes: int) -> int:
        """How much could leave host RAM now: at least ``enough_bytes``, or less, or what 256 families are."""
        catalog, chosen, found_bytes = self._catalog, _Chosen(), 0
        with catalog.gate, catalog.lock:
            catalog._catch_up()
            for family in catalog.host_policy.victims(LOCK_BATCH, self._may_leave_host(chosen)):
                chosen.add(family, catalog.index.parent[family])
                found_bytes += catalog._bytes(family)
                if len(chosen.families) == LOCK_BATCH:
                    return max(found_bytes, enough_bytes)
                if found_bytes >= enough_bytes:
                    break
        return found_bytes

    def _evict_clean(self, need: int, stride: int, keep: Collection[FamilyId]) -> int:
        """One pass; somewhat more than is needed, since the next will come. Returns the families that left."""
        for books, excess_bytes in self._quotas.over(HOST):  # those lose first
            most = min(need, -(-excess_bytes // stride), LOCK_BATCH)
            if freed := self._evict_host_pass(most, stride, _Chosen(keep), books):
                return freed
        ahead = min(_AHEAD, self._catalog.host.arena.capacity_bytes // stride // _AHEAD_SHARE)
        return self._evict_host_pass(min(max(need, ahead), LOCK_BATCH), stride, _Chosen(keep))

    def _evict_dirty(self, need: int, stride: int, keep: Collection[FamilyId], droppable: int) -> int:
        """One pass over those that are dirty for tiers in ``droppable`` alone. Returns the families that left."""
        if not droppable:
            return 0
        for books, excess_bytes in self._quotas.over(HOST):
            most = min(need, -(-excess_bytes // stride), LOCK_BATCH)
            chosen = _Chosen(keep, droppable, self._dead())
            if freed := self._evict_host_pass(most, stride, chosen, books):
                return freed
        chosen = _Chosen(keep, droppable, self._dead())
        return self._evict_host_pass(min(need, LOCK_BATCH), stride, chosen)

    def make_way(self, books: TenantBooks, need: int, block_bytes: int, keep: Collection[FamilyId]) -> bool:
        """Evicts up to about ``need`` of a tenant's own coldest blocks from host RAM for the sake of its quota: clean
        ones, or where there is none dirty ones, as for new blocks. ``block_bytes``: what a new one takes. False when
        none could leave."""
        need, wanted = min(need, LOCK_BATCH), self._catalog.wanted
        with self._catalog.gate, self._catalog.lock:
            self._catalog._catch_up()
            if self._make_way(books, need, block_bytes, _Chosen(keep)):
                return True
            dirty_too = _Chosen(keep, wanted, self._dead())
            return bool(wanted and self._make_way(books, need, block_bytes, dirty_too))

    def _make_way(self, books: TenantBooks, need: int, block_bytes: int, chosen: _Chosen) -> bool:
        catalog, policy, found_bytes = self._catalog, self._catalog.host_policy, 0
        for family in policy.victims_of(books.tag, need, self._may_leave_host(chosen)):
            chosen.add(family, catalog.index.parent[family])
            found_bytes += self._room_of(family, HOST)
            if found_bytes >= need * block_bytes or len(chosen.families) >= LOCK_BATCH:
                break
        self._evict_all(chosen.families)
        books.made_way_blocks += len(chosen.families)
        return bool(chosen.families or self._park(chosen, policy, enough=False))

    def _room_of(self, family: FamilyId, tier: int) -> int:
        index = self._catalog.index
        space: Space = index.spaces[index.space_of[family]]
        return space.room_of(index.residency[tier][family], tier)

    def _evict_host_pass(
        self, need: int, stride: int, chosen: _Chosen, books: TenantBooks | None = None
    ) -> int:
        """``books``: of one tenant's blocks alone."""
        policy, parent_of, freed = self._catalog.host_policy, self._catalog.index.parent, 0
        if books is None and need >= FEWEST and (coldest := self._all_may_leave(need, stride, chosen)):
            self._evict_all(coldest)
            return len(coldest)
        (cells, parts), stride_of = self._catalog.index.slot_table, self._catalog.host.arena.stride_of
        for family in _asked(policy, books, need, self._may_leave_host(chosen)):
            if parts == 1 and stride_of(cells[family]) == stride:
                chosen.add(family, parent_of[family])
                freed += 1
            else:
                freed += self._choose(family, stride, chosen)
            if freed >= need or len(chosen.families) >= LOCK_BATCH:
                break
        self._evict_all(chosen.families)
        if books is not None:
            books.made_way_blocks += len(chosen.families)
        return len(chosen.families) + self._park(chosen, policy, enough=freed >= need)

    def _all_may_leave(self, need: int, stride: int, chosen: _Chosen) -> Sequence[FamilyId]:
        """The coldest ``need`` families when all of them may leave host RAM together and each frees one slot of that
        size, as it nearly always is: then nobody is asked about one of them alone. Else none."""
        catalog = self._catalog
        index, column = catalog.index, catalog.index.array
        coldest = list(islice(catalog.host_policy.victims(need, bool), need))
        if len(coldest) < need or index.parts > 1:
            return ()
        rows = np.array(coldest)
        slots = index.slots[rows, 0].tolist()
        if (
            column("pins")[rows].tobytes().strip(b"\0")
            or column("state")[rows].tobytes().translate(None, _HOST_STATES)
            or (column("dirty")[rows] & (0xFF & ~chosen.behind)).tobytes().strip(b"\0")
            or catalog.host.arena.strides_of(slots) != {stride}
        ):
            return ()
        if catalog.wanted & ~chosen.dead and not (column("whole_in")[rows] & _COLDER).all():
            return ()
        among = set(coldest)
        inner = sum([parent in among for parent in column("parent")[rows].tolist()])
        if len(among) < need or int(column("children0")[rows].sum()) != inner:
            return ()
        if not among.isdisjoint(chosen.keep):
            return ()
        return coldest

    def _park(self, chosen: _Chosen, policy: SafeEviction, *, enough: bool) -> int:
        """Those that are pinned and fill the cold end of the policy, where it looks, would hide all that may leave.
        Returns how many stand in its way no more: then it is worth to look again."""
        if enough or not chosen.pinned:
            return 0
        parked = list(dict.fromkeys(chosen.pinned))
        self._catalog._park(parked, policy)
        return len(parked)

    def _may_leave_host(self, chosen: _Chosen) -> Callable[[FamilyId], bool]:
        """The question whether a family may leave host RAM when those in ``chosen`` do: a policy asks it of nearly all
        that leave, so it looks at the columns themselves."""
        index, keep, picked, children_gone = (
            self._catalog.index,
            chosen.keep,
            chosen.picked,
            chosen.children_gone,
        )
        state, pins, dirty, whole_in = index.state, index.pins, index.dirty, index.whole_in
        children, must_stay = index.children[HOST], ~chosen.behind
        asks_below = bool(self._catalog.wanted & ~chosen.dead)

        def may_leave(family: FamilyId) -> bool:
            if not state[family] & IN_HOST or family in picked:
                return False
            if pins[family]:
                chosen.pinned.append(family)
                return False
            if dirty[family] & must_stay and not self._catalog._is_expired(family):
                return False
            left = children[family]
            if (left and left > children_gone.get(family, 0)) or family in keep:
                return False
            return (
                not asks_below or whole_in[family] & _COLDER or not self._is_needed_below(family, chosen.dead)
            )

        return may_leave

    def _is_needed_below(self, family: FamilyId, dead: int) -> bool:
        """The last copy must not go while a colder tier that works holds its children: it has to be written there too,
        whatever was decided before. A tier that is never written to cannot ask for that."""
        catalog = self._catalog
        writable = catalog.wanted & ~dead
        needed = False
        for tier in catalog.tiers[1:]:
            if (
                tier.policy is not None
                and writable >> tier.number & 1
                and catalog.index.children[tier.number][family]
            ):
                catalog._make_dirty(family, tier.number)
                needed = True
        return needed

    def _elsewhere(self, family: FamilyId, tier: int) -> bool:
        return bool(self._catalog.index.whole_in[family] & ~(1 << tier))

    def _choose(self, family: FamilyId, stride: int, chosen: _Chosen) -> int:
        """Adds a victim; where its slots have another size, all of its region, so that the region can be carved anew.
        Returns how many slots of the wanted size that frees."""
        catalog = self._catalog
        arena = catalog.host.arena
        cells, parts = catalog.index.slot_table
        slots = [Slot(slot) for slot in cells[family * parts : (family + 1) * parts] if slot != NO_SLOT]
        fitting = [arena.stride_of(slot) for slot in slots].count(stride)
        if fitting:
            chosen.add(family, catalog.index.parent[family])
            return fitting
        region = arena.region_of(slots[0])
        if region not in chosen.regions:
            chosen.regions[region] = self._can_be_emptied(region, chosen)
        if not chosen.regions[region]:
            return 0
        owners = {FamilyId(catalog.owner[slot]) for slot in arena.slots_of_region(region)} - {FamilyId(0)}
        deepest_first = sorted(owners, key=lambda f: catalog.index.depth[f], reverse=True)
        may_leave = self._may_leave_host(chosen)
        for neighbour in deepest_first[: LOCK_BATCH - len(chosen.families)]:
            if neighbour == family or may_leave(neighbour):
                chosen.add(neighbour, catalog.index.parent[neighbour])
        left = sum(neighbour not in chosen.picked for neighbour in owners)
        return 0 if left else arena.region_bytes // stride

    def _can_be_emptied(self, region: int, chosen: _Chosen) -> bool:
        """False for a region that holds anything which is pinned, dirty or still being written: evicting the rest would
        gain nothing."""
        catalog = self._catalog
        slots = catalog.host.arena.slots_of_region(region)
        owners = np.frombuffer(catalog.owner, dtype=np.int32)[slots.start : slots.stop]
        owners = owners[owners != 0]
        dirty = catalog.index.array("dirty")[owners] & (~chosen.behind & 0xFF)
        pinned = catalog.index.array("pins")[owners]
        return len(owners) == catalog.host.arena.used_in(region) and not dirty.any() and not pinned.any()

    def _evict_all(self, families: Sequence[FamilyId]) -> None:
        by_reason: dict[str, list[FamilyId]] = {}
        whole_in, dirty = self._catalog.index.whole_in, self._catalog.index.dirty
        for family in families:
            if whole_in[family] & _COLDER:
                reason = "room"
            else:
                reason = "dropped_dirty" if dirty[family] else "dropped_clean"
            if reason not in by_reason:
                by_reason[reason] = []
            by_reason[reason].append(family)
        for reason, its in by_reason.items():
            if reason != "room":
                self._counters.add(len(its), "dropped_blocks_total", "host", reason)
            self._catalog._lose_all(its, HOST, evicted=True, reason=reason)

    # -- blob tiers -----------------------------------------------------------------------------------------------

    def evict_from(self, edge: Edge, need: int, books: TenantBooks | None = None) -> Going:
        """Picks up to ``need`` families that may leave a blob tier and takes them off the catalog, first of tenants
        that are over their quota. The caller deletes them there. ``books``: of one tenant's alone."""
        catalog, tier = self._catalog, edge.number
        policy = catalog.tiers[tier].policy
        assert policy is not None
        with catalog.gate, catalog.lock:
            catalog._catch_up()
            going = self._leaving._begin(edge)
        for _ in range(_MAX_PASSES):
            chosen = _Chosen()
            with catalog.gate, catalog.lock:
                if books is not None:
                    self._evict_pass(going, policy, min(need, LOCK_BATCH), chosen, books)
                else:
                    self._evict_pass_of_all(going, policy, min(need, LOCK_BATCH), chosen)
                if going.families or not self._park(chosen, policy, enough=False):
                    break
        return going

    def _evict_pass_of_all(self, going: Going, policy: SafeEviction, need: int, chosen: _Chosen) -> None:
        for books, excess_bytes in self._quotas.over(going.edge.number):
            self._evict_pass(going, policy, need, chosen, books, excess_bytes)
            if going.families:
                return
        self._evict_pass(going, policy, need, chosen)

    def _evict_pass(
        self,
        going: Going,
        policy: SafeEviction,
        need: int,
        chosen: _Chosen,
        books: TenantBooks | None = None,
        most_bytes: float = float("inf"),
    ) -> None:
        catalog, tier = self._catalog, going.edge.number
        found_bytes = 0
        for family in _asked(policy, books, need, lambda f: self._may_leave(tier, f, chosen)):
            chosen.add(family, catalog.index.parent[family])
            found_bytes += self._room_of(family, tier)
            if len(chosen.families) >= need or found_bytes >= most_bytes:
                break
        if books is not None:
            books.made_way_blocks += len(chosen.families)
        for family in chosen.families:
            last = not self._elsewhere(family, tier)
            if last:
                self._counters.add(1, "dropped_blocks_total", catalog.tiers[tier].name, "capacity")
            self._leaving._add(going, family, evicted=True, reason="capacity")

    def _may_leave(self, tier: int, family: FamilyId, chosen: _Chosen) -> bool:
        index = self._catalog.index
        if index.pins[family]:
            chosen.pinned.append(family)
            return False
        if family in chosen.picked or (tier, family) in self._catalog.awaited:
            return False
        if chosen.children_left(family, index.children[tier][family]):
            return False
        if self._elsewhere(family, tier):
            return True
        return not any(
            index.children[other.number][family]
            for other in self._catalog.tiers
            if other.policy is not None and other.number != tier
        )


def _asked(
    policy: SafeEviction, books: TenantBooks | None, need: int, may_leave: Callable[[FamilyId], bool]
) -> Iterator[FamilyId]:
    if books is None:
        return policy.victims(need, may_leave)
    return policy.victims_of(books.tag, need, may_leave)
