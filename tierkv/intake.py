"""How blocks come in: slots are reserved for what is not there yet, written by others, then registered."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from tierkv.catalog import HOST, LOCK_BATCH, Catalog
from tierkv.departures import NOT_TAKEN
from tierkv.entering import enter_new
from tierkv.frame import FrameHeader
from tierkv.handles import DraftBlocks
from tierkv.ids import NAMESPACE_PREFIX_BYTES, BlockHash, BlockKey, FamilyId, KeyPrefix, Slot
from tierkv.index import IN_HOST, NO_SLOT, SERVED_ONLY, USABLE, Space
from tierkv.keys import Chain
from tierkv.leaving import Going
from tierkv.outgrowing import Outgrowing
from tierkv.quotas import Quotas
from tierkv.retaining import _raise, begin_stay, raise_line, stay_of_frame
from tierkv.retention import NO_WISH, Stay
from tierkv.room import Room


@dataclass
class Stored:
    """What became of the blocks of one call, by position in the chain."""

    stored: int = 0
    """Blocks that are registered now and were not before."""
    resident: int = 0
    """Blocks that were there already."""
    dropped: dict[str, int] = field(default_factory=dict)
    """Blocks that are not stored, by reason; a cache may always drop."""
    kept_beyond: int = field(default=0, repr=False)
    """Blocks that stay longer, or may go further down, than this call asked: somebody else wants them so."""

    def drop(self, reason: str, count: int = 1) -> None:
        if count:
            self.dropped[reason] = self.dropped.get(reason, 0) + count


class Loaded(NamedTuple):
    """A part that came from a colder tier and was verified."""

    family: FamilyId
    generation: int
    """Of the family's row, when the part was asked for."""
    part: int
    slot: Slot
    checksum: int
    header: FrameHeader


class Intake:
    """Reserves and registers. Thread-safe."""

    def __init__(self, catalog: Catalog, room: Room, quotas: Quotas, outgrowing: Outgrowing) -> None:
        self._catalog = catalog
        self._quotas = quotas
        self._outgrowing = outgrowing
        self._room = room
        self.under_way: dict[int, DraftBlocks] = {}
        """Blocks that are being copied out of an engine, by a number of the copy; for explanations."""
        self.numbers = itertools.count()

    def reserve(
        self, space: Space, chain: Chain, positions: range, parts: tuple[int, ...], result: Stored
    ) -> DraftBlocks | None:
        """Slots for those blocks that host RAM lacks, as many as there is room for, earliest first. ``result`` counts
        the others."""
        if self._catalog.orphans:
            self.collect_orphans()
        if len(space.part_bytes) > 1:
            self._catalog.catch_up()  # a block that somebody holds does not grow
        missing, parents = self._missing(space, chain.hashes, positions, parts)
        result.resident += len(positions) - len(missing)
        if not missing:
            return None
        sizes = tuple([space.part_bytes[part] for part in parts])
        granted = len(missing)
        block_bytes = self._counted_bytes(space, parts) if self._quotas.on else 0
        if block_bytes:
            granted = self._grant(space, chain, missing, block_bytes, parents, result)
            if not granted:
                return None
        columns = self._take_columns(sizes, granted, parents)
        count = len(columns[0])
        if count < granted:
            result.drop("no_room", granted - count)
            self.note_refused(
                space, [chain.hashes[position] for position in missing[count:granted]], "no_room"
            )
        if block_bytes:
            self._keep_grant(space, block_bytes, granted, columns[0])
        if not count:
            return None
        if count < len(missing):
            del missing[count:]
        return DraftBlocks(chain, missing, parts, sizes, list(zip(*columns, strict=True)))

    def _take_columns(self, sizes: Sequence[int], count: int, keep: Sequence[FamilyId]) -> list[list[Slot]]:
        """Slots of each size, as many of each as can be had of all."""
        columns: list[list[Slot]] = []
        for size in sizes:
            columns.append(self._room.take_slots_for_new(count, size, keep))
            count = len(columns[-1])
        for column in columns[:-1]:
            if len(column) > count:
                self._catalog.host.release(column[count:])
                del column[count:]
        return columns

    def _counted_bytes(self, space: Space, parts: tuple[int, ...]) -> int:
        """What a block counts against its tenant's quota; 0 where that has none."""
        if self._quotas.limit(space.books, HOST) is None:
            return 0
        return space.room_of(sum(1 << part for part in parts))

    def _grant(
        self,
        space: Space,
        chain: Chain,
        missing: Sequence[int],
        block_bytes: int,
        keep: Sequence[FamilyId],
        result: Stored,
    ) -> int:
        """How many of the missing blocks the tenant's quota has room for, made by its own coldest blocks."""
        quotas, books, count = self._quotas, space.books, len(missing)
        granted = quotas.grant(books, HOST, count, block_bytes)
        while granted < count and self._room.make_way(books, count - granted, block_bytes, keep):
            granted += quotas.grant(books, HOST, count - granted, block_bytes)
        if granted < count:
            books.refused_blocks += count - granted
            result.drop("quota", count - granted)
            self.note_refused(space, [chain.hashes[position] for position in missing[granted:]], "quota")
        return granted

    def _keep_grant(self, space: Space, block_bytes: int, granted: int, first_slots: Sequence[Slot]) -> None:
        """Blocks that got slots count as granted until their draft is over."""
        self._quotas.settle(space.books, HOST, (granted - len(first_slots)) * block_bytes)
        if first_slots:
            self._quotas.note_draft(first_slots[0], space.books, len(first_slots) * block_bytes)

    def _missing(
        self, space: Space, hashes: Sequence[BlockHash], positions: range, parts: tuple[int, ...]
    ) -> tuple[list[int], list[FamilyId]]:
        """Positions whose parts are not all in host RAM, and the families there from which they hang. A look without
        the lock, see ``Catalog.find_run``: what comes or goes meanwhile is met when the blocks are registered."""
        residency = self._catalog.index.residency[HOST]
        wanted = sum([1 << part for part in parts])
        missing: list[int] = []
        parents: list[FamilyId] = []
        before = -1
        dicts = space.dicts
        for position in positions:
            block_hash = hashes[position]
            family = dicts[block_hash[0]].get(block_hash)
            if family is not None and self._there(family, wanted):
                continue
            if position and before != position - 1:
                parent = space.get(hashes[position - 1])
                if parent is not None and residency[parent]:
                    parents.append(parent)
            missing.append(position)
            before = position
        return missing, parents

    def _there(self, family: FamilyId, wanted: int) -> bool:
        """True when host RAM has those parts. A block past its end is stored anew: if its bytes are still there when
        the new ones come (somebody has leased it, say), those go and it begins a new life."""
        index = self._catalog.index
        if 0 < index.expires_s[family] <= self._catalog.clock.now_s():
            return False
        if self._outgrowing._brings_more(family, wanted):
            return False
        return bool(index.state[family] & IN_HOST) or index.residency[HOST][family] & wanted == wanted

    def note_refused(self, space: Space, hashes: Sequence[BlockHash], reason: str) -> None:
        """Blocks were offered and are not stored: an explanation of a later miss can tell."""
        catalog = self._catalog
        for start in range(0, len(hashes), LOCK_BATCH):
            batch = [(space.number, block_hash, 0) for block_hash in hashes[start : start + LOCK_BATCH]]
            with catalog.gate, catalog.lock:
                catalog.departures.note(batch, NOT_TAKEN, reason, catalog.clock.now_s())

    def discard(self, blocks: DraftBlocks) -> None:
        """Takes back the slots of a draft that came to nothing. Does not lock, so finalisers may call it."""
        self._catalog.orphans.extend(list(slots) for slots in blocks.slots)

    def collect_orphans(self) -> None:
        """Releases what ``discard`` took back."""
        orphans = self._catalog.orphans
        while orphans:
            try:
                slots = orphans.popleft()
            except IndexError:  # another thread was quicker
                return
            if granted := self._quotas.take_draft(slots[0]):
                self._quotas.settle(granted[0], HOST, granted[1])
            self._catalog.host.release(slots)

    def register(
        self,
        space: Space,
        blocks: DraftBlocks,
        sums: Sequence[tuple[int, ...]],
        stay: Stay,
        expected: int,
        result: Stored,
    ) -> list[FamilyId]:
        """Makes blocks visible that are written, in the order of their positions; the slots are the catalog's from now
        on. Returns the families that are new in host RAM.

        ``sums``: their checksums, by block and part. ``expected``: bitmap of the parts that a family of these blocks
        will have.
        """
        granted = self._quotas.take_draft(blocks.slots[0][0])
        try:
            return self._enter(space, blocks, sums, stay, expected, result)
        finally:
            if granted:
                self._quotas.settle(granted[0], HOST, granted[1])
            if self._quotas.on:
                self._quotas.look(space)

    def _enter(
        self,
        space: Space,
        blocks: DraftBlocks,
        sums: Sequence[tuple[int, ...]],
        stay: Stay,
        expected: int,
        result: Stored,
    ) -> list[FamilyId]:
        catalog, count = self._catalog, len(blocks.positions)
        added: list[FamilyId] = []
        outgrown: list[Going] = []
        for start in range(0, count, LOCK_BATCH):
            rows = range(start, min(start + LOCK_BATCH, count))
            new: list[FamilyId] = []
            with catalog.gate, catalog.lock:
                if catalog._left:
                    catalog._catch_up()
                if stay is NO_WISH:
                    new = enter_new(catalog, space, blocks, sums, rows, expected)
                    result.stored += len(new)
                for i in rows[len(new) :]:
                    family = self._register_one(space, blocks, i, sums[i], stay, expected, result, outgrown)
                    if family is not None:
                        new.append(family)
                catalog._tell_arrivals()
                catalog.on_dirty(new)
            added += new
        if outgrown:
            self._outgrowing.send(outgrown)
        return added

    def _register_one(
        self,
        space: Space,
        blocks: DraftBlocks,
        i: int,
        sums: tuple[int, ...],
        stay: Stay,
        expected: int,
        result: Stored,
        outgrown: list[Going],
    ) -> FamilyId | None:
        catalog, position = self._catalog, blocks.positions[i]
        hashes = blocks.chain.hashes
        parent_hash = hashes[position - 1] if position else None
        found = catalog._find_or_add(space, hashes[position], parent_hash, position, expected)
        if isinstance(found, str):
            catalog.host.release(blocks.slots[i])
            result.drop(found)
            refused = [(space.number, hashes[position], 0)]
            catalog.departures.note(refused, NOT_TAKEN, found, catalog.clock.now_s())
            return None
        if found in catalog.damaged:
            catalog.host.release(blocks.slots[i])
            result.drop("damaged")
            return None
        catalog.index.state[found] &= ~SERVED_ONLY
        keeps: Stay | None = stay
        if self._outgrowing._brings_more(found, expected):
            outgrown += self._outgrowing._grow(found, expected)
            _raise(catalog, found, stay, anew=True)
            keeps = None
        if self._place(found, blocks.parts, blocks.slots[i], sums, keeps):
            result.stored += 1
            return found
        result.resident += 1
        return None

    def _place(
        self,
        family: FamilyId,
        parts: Iterable[int],
        slots: Iterable[Slot],
        sums: Iterable[int],
        stay: Stay | None,
    ) -> bool:
        """Puts slots under a family; those of parts that came by another way meanwhile are given back. Without a
        ``stay`` the family keeps what it has."""
        catalog, index = self._catalog, self._catalog.index
        gained, expected = 0, index.expected[family]
        cells, first = index.slot_cells, family * index.parts
        for part, slot, checksum in zip(parts, slots, sums, strict=True):
            if cells[first + part] != NO_SLOT or not expected >> part & 1:
                catalog.host.release((slot,))
                continue
            cells[first + part] = slot
            catalog.owner[slot] = family
            catalog.host.set_checksum(slot, checksum)
            gained |= 1 << part
        if not gained:
            return False
        if stay is not None:
            begin_stay(catalog, family, stay)
        catalog._gain(family, HOST, gained)
        return True

    def land(self, loaded: Sequence[Loaded], tier: int, *, serve: bool) -> list[bool]:
        """Registers parts that were loaded from a colder tier and verified. False for one that came too late: its slot
        is the caller's. ``serve``: for one request only; they are the first to leave host RAM again."""
        catalog, landed = self._catalog, list[bool]()
        stays = [stay_of_frame(catalog, its.header, tier) for its in loaded]
        lines: list[tuple[Space, BlockHash, Stay]] = []
        with catalog.lock:
            for its, stay in zip(loaded, stays, strict=True):
                landed.append(self._may_land(its))
                if landed[-1]:
                    self._land(its, stay, serve, lines)
            catalog._tell_arrivals()
            catalog.on_dirty([its.family for its, here in zip(loaded, landed, strict=True) if here])
        for line in lines:
            raise_line(catalog, *line)
        return landed

    def _may_land(self, its: Loaded) -> bool:
        catalog, index, family = self._catalog, self._catalog.index, its.family
        if index.generation[family] != its.generation or index.slots[family, its.part] != NO_SLOT:
            return False
        if not catalog._somewhere(family):
            return False  # cleared meanwhile
        parent = FamilyId(index.parent[family])
        return not parent or catalog._somewhere(parent)  # else nobody could reach it

    def _land(self, its: Loaded, stay: Stay, serve: bool, lines: list[tuple[Space, BlockHash, Stay]]) -> None:
        """``lines``: gets what is to be raised with it, once the lock is free."""
        catalog, index, family = self._catalog, self._catalog.index, its.family
        known = catalog._in_own_tier(family)  # then what is known of it is newer than its frame
        if serve:
            index.state[family] |= SERVED_ONLY
            catalog.retains = True
        else:
            index.state[family] &= ~SERVED_ONLY
        self._place(family, (its.part,), (its.slot,), (its.checksum,), None if known else stay)
        if not known and stay is not NO_WISH and its.header.parent_hash is not None:
            lines.append((index.spaces[index.space_of[family]], its.header.parent_hash, stay))

    def adopt(self, tier: int, headers: Iterable[FrameHeader]) -> int:
        """Rebuilds families from what a restart found in a tier; returns how many are whole."""
        catalog = self._catalog
        batch: list[FrameHeader] = []
        before = catalog.index.size
        for header in sorted(headers, key=lambda header: header.depth):
            batch.append(header)
            if len(batch) == LOCK_BATCH:
                self._adopt_batch(tier, batch)
                batch = []
        self._adopt_batch(tier, batch)
        return catalog.index.size - before

    def _adopt_batch(self, tier: int, headers: Sequence[FrameHeader]) -> None:
        catalog = self._catalog
        wishes: list[tuple[Space, BlockHash | None, Stay]] = []
        with catalog.gate, catalog.lock:
            for header in headers:
                space = catalog.index.open_space(
                    header.namespace, KeyPrefix(header.key[:NAMESPACE_PREFIX_BYTES])
                )
                space.learn_part_bytes(header.part, header.decoded_bytes)
                catalog.index.widen(header.part + 1)
                found = catalog._find_or_add(
                    space, header.block_hash, header.parent_hash, header.depth, header.expected_parts
                )
                if isinstance(found, str):
                    catalog.counters.add(1, "recovered_unreachable_total", catalog.tiers[tier].name, found)
                    continue
                stay = stay_of_frame(catalog, header, tier)
                if stay is not NO_WISH:
                    begin_stay(catalog, found, stay)
                    wishes.append((space, header.parent_hash, stay))
                catalog._gain(found, tier, 1 << header.part)
            catalog._tell_arrivals()
        for space, parent_hash, stay in wishes:
            if parent_hash is not None:
                raise_line(catalog, space, parent_hash, stay)

    def unreachable(self, tier: int, headers: Iterable[FrameHeader]) -> list[BlockKey]:
        """Keys of blocks that were found but can never be matched: families that lack a part or an ancestor. They are
        taken off the catalog, and the caller deletes them."""
        catalog, index = self._catalog, self._catalog.index
        useless: list[BlockKey] = []
        # Heads first: an ancestor is judged before its children.
        for header in sorted(headers, key=lambda header: header.depth):
            with catalog.gate, catalog.lock:
                space = index.space(header.namespace)
                family = space.get(header.block_hash) if space is not None else None
                if family is not None:
                    parent = index.parent[family]
                    expected = index.expected[family]
                    whole = index.residency[tier][family] & expected == expected
                    if whole and (not parent or index.state[parent] & USABLE):
                        continue
                    catalog._lose(family, tier, evicted=False, reason="unreachable")
                useless.append(header.key)
        return useless
