"""What must hold in a store at every moment at which nobody is in the middle of a step.

``check_invariants`` counts everything again, from the columns of the index, and compares. ``check_idle`` is for a store
in which nothing is on its way: then nothing may be pinned, queued, in flight or reserved either. Both read without
locks; call them from a simulation's one thread, or when all is quiet.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence

from tierkv.catalog import HOST, Catalog
from tierkv.handles import Lease, SlotRef
from tierkv.ids import FamilyId, Slot
from tierkv.index import DOOMED, IN_HOST, NO_SLOT, USABLE
from tierkv.prefetching import Prefetch
from tierkv.store import TieredStore
from tierkv.testing.totals import check_totals

EXCUSED = frozenset(
    {
        "a tier was dead",
        "cleared",
        "miss",
        "corrupt",
        "expired",
        "incomplete",
        "index_full",
        "unreachable",
        "asleep",
        "asked",
    }
)
"""Reasons to lose a block that may leave its children without it (D30: corruption, expiry and dead tiers aside)."""


def check_invariants(store: TieredStore, prefetches: Iterable[Prefetch] | None = None) -> None:
    """Raises ``AssertionError`` with the first thing that does not add up.

    ``prefetches``: those that may be under way. With them the pins are counted exactly; without, pins may be more than
    is accounted for.
    """
    store.catalog.catch_up()
    _check_rows(store.catalog)
    _check_slots(store.catalog)
    _check_residency(store.catalog)
    _check_bytes(store.catalog)
    _check_children(store.catalog)
    _check_policies(store.catalog)
    _check_pins(store, prefetches)
    _check_queues(store)


def check_idle(store: TieredStore) -> None:
    """The same for a store without work, leases or drafts."""
    check_invariants(store, ())
    index = store.catalog.index
    assert not len(store.leases), f"{len(store.leases)} leases are out"
    assert not len(store.loader.flights), f"{len(store.loader.flights)} flights never landed"
    for family in families(store.catalog):
        assert not index.pins[family], f"{_name(store.catalog, family)} is pinned by nobody"
        assert not index.queued[family], f"{_name(store.catalog, family)} is queued by nobody"
        assert not index.state[family] & DOOMED, (
            f"{_name(store.catalog, family)} was cleared and is still here"
        )
    for edge in store.edges.values():
        assert not edge.queue.busy(), f"{edge.name}: {edge.queue.busy()} jobs"
        for name in (edge.up, edge.down):
            assert not edge.queue.pending_bytes(name), (
                f"{name}: {edge.queue.pending_bytes(name)} bytes pending"
            )
        assert not edge.cleaning, f"{edge.name}: demotions {edge.cleaning} never ended"
    assert store.reaper.idle(), "the reaper is not at rest"
    assert not store.catalog._following, f"families {store.catalog._following} follow nobody"
    _check_nothing_lies_forgotten(store.catalog)
    check_totals(store)
    store.intake.collect_orphans()
    for books in index.tenants.values():
        assert not any(books.coming), (
            f"tenant {books.name}: {books.coming} bytes are granted and will never come"
        )
    stray = [slot for slot in taken_slots(store.catalog) if not store.catalog.owner[slot]]
    assert not stray, f"slots {stray} are handed out and hold no block"


def families(catalog: Catalog) -> list[FamilyId]:
    """All rows in use."""
    hashes = catalog.index.hashes
    return [FamilyId(i) for i in range(1, catalog.index._next) if hashes[i] is not None]


def taken_slots(catalog: Catalog) -> list[Slot]:
    host = catalog.host
    return [Slot(i) for i, taken in enumerate(host._taken) if taken]


def _name(catalog: Catalog, family: int) -> str:
    block_hash = catalog.index.hashes[family]
    return f"family {family} ({block_hash.hex()[:8] if block_hash else 'gone'})"


def _is_whole(catalog: Catalog, family: FamilyId, tier: int) -> bool:
    expected = catalog.index.expected[family]
    return bool(catalog.index.residency[tier][family] & expected == expected)


# -- rows ---------------------------------------------------------------------------------------------------------


def _check_rows(catalog: Catalog) -> None:
    """Every row can be found by its hash unless it was cleared, and stands behind its parent."""
    index = catalog.index
    rows = families(catalog)
    assert len(rows) == index.size, f"{len(rows)} rows in use, the index says {index.size}"
    for family in rows:
        block_hash = index.hashes[family]
        assert block_hash is not None
        space = index.spaces[index.space_of[family]]
        found = space.get(block_hash)
        if index.state[family] & DOOMED:
            assert found != family, f"{_name(catalog, family)} was cleared and can be found"
        else:
            assert found == family, f"{_name(catalog, family)} cannot be found by its hash"
        parent = index.parent[family]
        assert bool(parent) == bool(index.depth[family]), (
            f"{_name(catalog, family)} has a depth, but no parent"
        )
        if parent:
            assert index.hashes[parent] is not None, f"{_name(catalog, family)} has lost its parent's row"
            assert index.depth[parent] == index.depth[family] - 1
            assert index.space_of[parent] == index.space_of[family]
        nowhere = not any(column[family] for column in index.residency)
        waits = index.pins[family] or index.children_known[family]
        assert not nowhere or waits, f"{_name(catalog, family)} is in no tier, and nobody waits for it"
    known = sum(len(space) for space in index.spaces)
    doomed = sum(bool(index.state[family] & DOOMED) for family in rows)
    assert known == len(rows) - doomed, f"{known} hashes lead to {len(rows) - doomed} rows"


# -- slots --------------------------------------------------------------------------------------------------------


def _check_slots(catalog: Catalog) -> None:
    """used + free = capacity; every slot is free, held by one family, or handed out to a draft or a flight."""
    index, arena = catalog.index, catalog.host.arena
    holders: dict[int, int] = {}
    for family in families(catalog):
        for part, slot in enumerate(index.slots[family].tolist()):
            held = bool(index.residency[HOST][family] >> part & 1)
            if not index.state[family] & DOOMED and family not in catalog.damaged:
                assert held == (slot != NO_SLOT), (
                    f"{_name(catalog, family)}: part {part} {held=} in slot {slot}"
                )
            if slot == NO_SLOT:
                continue
            assert slot not in holders, f"slot {slot} holds families {holders[slot]} and {family}"
            holders[slot] = family
            assert catalog.owner[slot] == family, (
                f"slot {slot} of family {family} is under {catalog.owner[slot]}"
            )
    taken = taken_slots(catalog)
    for slot in taken:
        assert not catalog.owner[slot] or slot in holders, (
            f"slot {slot} is owned by a family that does not have it"
        )
    missing = holders.keys() - set(taken)
    assert not missing, f"slots {missing} hold blocks and are not handed out"
    free: Counter[int] = Counter()
    for stride, slots in arena._free.items():
        for slot in slots:
            free[slot] += 1
            assert arena.stride_of(slot) == stride, f"slot {slot} lies in the free list of another size"
    again = [slot for slot, count in free.items() if count > 1]
    assert not again, f"slots {again} are free twice"
    carved = {slot for region in range(arena.regions) for slot in arena.slots_of_region(region)}
    assert carved == free.keys() | set(taken), f"lost slots: {carved - free.keys() - set(taken)}"
    assert not free.keys() & set(taken), f"slots {free.keys() & set(taken)} are free and handed out"
    used = sum(arena.stride_of(slot) for slot in taken)
    assert used == arena.used_bytes, f"{used} bytes are handed out, the arena says {arena.used_bytes}"


# -- tiers --------------------------------------------------------------------------------------------------------


def _check_residency(catalog: Catalog) -> None:
    """State bits and dirty bits follow from residency."""
    index = catalog.index
    for family in families(catalog):
        state, name = index.state[family], _name(catalog, family)
        whole = [tier.number for tier in catalog.tiers if _is_whole(catalog, family, tier.number)]
        assert index.expected[family], f"{name} expects no part"
        held_in = sum(1 << tier.number for tier in catalog.tiers if index.residency[tier.number][family])
        assert index.held_in[family] == held_in, f"{name}: held_in {index.held_in[family]:b}, not {held_in:b}"
        whole_in = sum(1 << number for number in whole)
        assert index.whole_in[family] == whole_in, (
            f"{name}: whole_in {index.whole_in[family]:b}, not {whole_in:b}"
        )
        for tier in catalog.tiers:
            beyond = index.residency[tier.number][family] & ~index.expected[family]
            assert not beyond, f"{name}: {tier.name} holds parts {beyond:b} that no family of this shape has"
        if state & DOOMED:
            assert not state & (USABLE | IN_HOST), f"{name} was cleared and counts as stored"
            assert not whole, f"{name} was cleared and is whole in {whole}"
            continue
        assert bool(state & USABLE) == bool(whole), f"{name}: usable {bool(state & USABLE)}, whole in {whole}"
        assert bool(state & IN_HOST) == (HOST in whole), f"{name}: IN_HOST disagrees with its parts"
        dirty = index.dirty[family]
        assert not dirty & ~catalog.wanted, f"{name} is dirty for a tier that takes nothing"
        assert not dirty or state & IN_HOST, f"{name} is dirty and not in host RAM"
        for tier_number in whole:
            lacking = dirty & ~index.stale[family]
            assert not lacking >> tier_number & 1, f"{name} is dirty for tier {tier_number}, which holds it"
        barred = index.barred[family]
        assert not dirty & barred, f"{name} is dirty for a tier that may not hold it"
        for tier in catalog.tiers:
            if tier.policy is not None:
                assert not (held_in & barred) >> tier.number & 1, (
                    f"{name} lies in {tier.name}, which may not hold it"
                )


def _check_bytes(catalog: Catalog) -> None:
    index = catalog.index
    resident = [family for family in families(catalog) if index.state[family] & IN_HOST]
    host_bytes = sum(catalog._bytes(family) for family in resident)
    clean_bytes = sum(catalog._bytes(family) for family in resident if not index.dirty[family])
    assert catalog.host_bytes == host_bytes, f"host_bytes {catalog.host_bytes}, counted again {host_bytes}"
    assert catalog.clean_bytes == clean_bytes, (
        f"clean_bytes {catalog.clean_bytes}, counted again {clean_bytes}"
    )
    _check_tenants(catalog, resident)


def _check_tenants(catalog: Catalog, resident: Sequence[FamilyId]) -> None:
    """What each tenant is said to hold is what its blocks take, in each tier, and as much of it is clean."""
    index = catalog.index
    held: Counter[tuple[int, int]] = Counter()
    for family in families(catalog):
        space = index.spaces[index.space_of[family]]
        for tier in catalog.tiers:
            held[space.tenant, tier.number] += space.room_of(
                index.residency[tier.number][family], tier.number
            )
    clean: Counter[int] = Counter()
    for family in resident:
        if not index.dirty[family]:
            space = index.spaces[index.space_of[family]]
            clean[space.tenant] += space.room_of(index.expected[family])
    for tag, books in index.tenants.items():
        for tier in catalog.tiers:
            said, counted = books.held[tier.number], held[tag, tier.number]
            assert said == counted, (
                f"tenant {books.name} holds {said} bytes of {tier.name}, counted again {counted}"
            )
        assert books.clean_bytes == clean[tag], (
            f"tenant {books.name}: {books.clean_bytes} clean bytes, counted again {clean[tag]}"
        )
        assert all(coming >= 0 for coming in books.coming), (
            f"tenant {books.name}: {books.coming} bytes are coming"
        )


def _check_children(catalog: Catalog) -> None:
    index = catalog.index
    rows = families(catalog)
    for tier in catalog.tiers:
        held = index.residency[tier.number]
        counted = Counter(index.parent[family] for family in rows if index.parent[family] and held[family])
        for family in rows:
            said = index.children[tier.number][family]
            assert said == counted[family], (
                f"{_name(catalog, family)}: {said} children in {tier.name}, counted again {counted[family]}"
            )
    known = Counter(index.parent[family] for family in rows if index.parent[family])
    for family in rows:
        assert index.children_known[family] == known[family]


def _check_policies(catalog: Catalog) -> None:
    """A policy knows exactly the families that are whole in its tier, or will once their parents are there too."""
    for duty, sentence in catalog.failures.sentences.items():
        assert "policy 'lru'" not in sentence, f"{duty}: {sentence}"
    for tier in catalog.tiers:
        if tier.policy is None:
            continue
        wanted = {family for family in families(catalog) if _is_whole(catalog, family, tier.number)}
        told = list(tier.policy.victims(max(1, 2 * len(wanted)), lambda _: True))
        assert len(told) == len(set(told)), f"the policy of {tier.name} names a family twice"
        late = {family for number, family in catalog._following if number == tier.number}
        late |= {family for family in wanted if tier.policy.is_parked(family)}
        lacking, stale = wanted - late - set(told), set(told) - wanted
        assert not lacking, f"the policy of {tier.name} was not told of families {lacking}"
        assert not stale, f"the policy of {tier.name} still knows families {stale}"


class Losses:
    """Looks on as a store loses blocks, and knows why each one went last."""

    def __init__(self, store: TieredStore) -> None:
        self._store = store
        self._catalog = store.catalog
        self._lose_all = store.catalog._lose_all
        self._why: dict[bytes, str] = {}
        store.catalog._lose_all = self._noting  # type: ignore[method-assign,assignment]

    def _noting(self, going: Sequence[FamilyId], tier: int, *, evicted: bool, reason: str) -> None:
        for family in going:
            block_hash = self._catalog.index.hashes[family]
            if block_hash is not None and self._catalog.index.residency[tier][family]:
                self._why[block_hash] = "a tier was dead" if self._tier_is_dead() else reason
        self._lose_all(going, tier, evicted=evicted, reason=reason)

    def _tier_is_dead(self) -> bool:
        edges = self._store.edges.values()
        return any(edge.tier.breaker.is_open or not edge.tier.usage().writable for edge in edges)

    def orphans(self) -> Iterator[str]:
        """Blocks in a tier that the store evicts from itself whose parent is in no tier, unless the parent was lost for
        an excused reason (D30)."""
        catalog, index = self._catalog, self._catalog.index
        # A tier that is never written to (but when asked) cannot ask for the parents of what it holds.
        written = catalog.wanted | 1 << HOST
        kept = [
            tier.number for tier in catalog.tiers if tier.policy is not None and written >> tier.number & 1
        ]
        for family in families(catalog):
            parent = index.parent[family]
            if (
                not parent
                or index.state[family] & DOOMED
                or any(column[parent] for column in index.residency)
            ):
                continue
            if not any(_is_whole(catalog, family, tier) for tier in kept):
                continue
            parent_hash = index.hashes[parent]
            assert parent_hash is not None
            reason = self._why.get(parent_hash, "it was never there")
            if reason not in EXCUSED:
                yield f"{_name(catalog, family)} is stored, its parent {_name(catalog, parent)} left: {reason}"


def _check_nothing_lies_forgotten(catalog: Catalog) -> None:
    """Parts of a family that is not whole take room that no policy can give back: somebody must still see to them."""
    index = catalog.index
    expiring = {(family, generation) for _, family, generation in catalog.incomplete}
    for family in families(catalog):
        for tier in catalog.tiers:
            if tier.policy is None or not index.residency[tier.number][family]:
                continue
            if _is_whole(catalog, family, tier.number):
                continue
            if tier.number == HOST:
                seen_to = (family, index.generation[family]) in expiring
            else:
                seen_to = bool(index.state[family] & IN_HOST)  # the missing parts can still be written
            assert seen_to, (
                f"{_name(catalog, family)}: some parts lie in {tier.name} and nobody will take them out"
            )


# -- who holds what -----------------------------------------------------------------------------------------------


def _check_pins(store: TieredStore, prefetches: Iterable[Prefetch] | None) -> None:
    """Pins = leases + prefetches + flights + demotions."""
    catalog, index = store.catalog, store.catalog.index
    counted: Counter[int] = Counter()
    for lease in store.leases.all():
        counted.update(lease.families)
    for prefetch in prefetches or ():
        if not prefetch._over:
            counted.update(prefetch._pinned)
    for flight in store.loader.flights._flights.values():
        counted[flight.family] += 1
        assert index.generation[flight.family] == flight.generation, (
            f"a flight for a row of {flight.family} that is gone"
        )
    for family in families(catalog):
        counted[family] += index.queued[family].bit_count()
    for family in families(catalog):
        pins = index.pins[family]
        exact = prefetches is not None
        assert pins == counted[family] if exact else pins >= counted[family], (
            f"{_name(catalog, family)}: {pins} pins, {counted[family]} holders"
        )
    stray = [family for family in counted if index.hashes[family] is None]
    assert not stray, f"families {stray} are held and gone"


def _check_queues(store: TieredStore) -> None:
    for edge in store.edges.values():
        most = store.catalog.index._next
        assert len(edge.backlog) < most, (
            f"{edge.name}: {len(edge.backlog)} families wait, {most - 1} were ever known"
        )
        queue = edge.queue
        assert 0 <= queue._running <= queue._workers, f"{edge.name}: {queue._running} jobs running"
        assert 0 <= queue._demoting <= queue._demoters, f"{edge.name}: {queue._demoting} demotions running"
        for what, table in (("queued", queue._queued), ("in flight", queue._in_flight)):
            for name, size in table.items():
                assert size >= 0, f"{name}: {size} bytes {what}"


class LeaseWatch:
    """Remembers where each lease's blocks lay when it was given, and that they still do."""

    def __init__(self) -> None:
        self._refs: dict[Lease, list[SlotRef]] = {}

    def add(self, lease: Lease) -> None:
        self._refs[lease] = list(_refs(lease))

    def check(self) -> None:
        for lease, refs in list(self._refs.items()):
            if lease.released:
                del self._refs[lease]
                continue
            assert list(_refs(lease)) == refs, f"blocks of a lease of {lease.owner} were moved or overwritten"


def _refs(lease: Lease) -> Iterator[SlotRef]:
    assert lease._lessor is not None
    for i, family in enumerate(lease.families):
        for part in lease.chain.namespace.layout.parts:
            if lease._lessor.slot_of(family, part.index) != NO_SLOT:
                yield lease.ref(i, part.index)
