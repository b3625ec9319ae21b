"""How blocks come in: slots are reserved for what is not there yet, written by others, then registered."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from tierkv.catalog import HOST, LOCK_BATCH, Catalog
from tierkv.errors import ConfigError
from tierkv.frame import FrameHeader
from tierkv.handles import Draft, DraftBlocks, Sealed
from tierkv.ids import NAMESPACE_PREFIX_BYTES, BlockHash, BlockKey, FamilyId, KeyPrefix, Slot
from tierkv.index import IN_HOST, NO_SLOT, USABLE, Space
from tierkv.keys import Chain
from tierkv.room import Room

MAX_PRIORITY = 127
MAX_TTL_S = 1e11
"""About 3000 years. What lies beyond would fit into no frame, nor into what a server takes."""


@dataclass
class Stored:
    """What became of the blocks of one call, by position in the chain."""

    stored: int = 0
    """Blocks that are registered now and were not before."""
    resident: int = 0
    """Blocks that were there already."""
    dropped: dict[str, int] = field(default_factory=dict)
    """Blocks that are not stored, by reason; a cache may always drop."""

    def drop(self, reason: str, count: int = 1) -> None:
        if count:
            self.dropped[reason] = self.dropped.get(reason, 0) + count


@dataclass(frozen=True)
class Retention:
    """How long blocks should stay. Soft: room for others may end it sooner."""

    priority: int = 0
    """Higher stays longer; what is beyond -127 .. 127 counts as that."""
    expires_s: float | None = None
    """On the store's clock."""

    def __post_init__(self) -> None:
        if not hasattr(self.priority, "__index__"):
            raise ConfigError("priority", self.priority, "it must be a whole number, 0 for none")
        if self.expires_s is not None and not -MAX_TTL_S < self.expires_s < 2 * MAX_TTL_S:
            raise ConfigError(
                "ttl_s or expires_s",
                self.expires_s,
                "it must be a number of seconds; None for a block that stays",
            )


class Intake:
    """Reserves and registers. Thread-safe."""

    def __init__(self, catalog: Catalog, room: Room) -> None:
        self._catalog = catalog
        self._room = room

    def reserve(
        self, space: Space, chain: Chain, positions: range, parts: tuple[int, ...], result: Stored
    ) -> Draft | None:
        """Slots for those blocks that host RAM lacks, as many as there is room for, earliest first. ``result`` counts
        the others."""
        if self._catalog.orphans:
            self.collect_orphans()
        missing, parents = self._missing(space, chain.hashes, positions, parts)
        result.resident += len(positions) - len(missing)
        if not missing:
            return None
        sizes = tuple(space.part_bytes[part] for part in parts)
        columns: list[list[Slot]] = []
        count = len(missing)
        for size in sizes:
            columns.append(self._room.take_slots(count, size, parents))
            count = min(count, len(columns[-1]))
        for column in columns:
            if len(column) > count:
                self._catalog.host.release(column[count:])
                del column[count:]
        result.drop("no_room", len(missing) - count)
        if not count:
            return None
        blocks = DraftBlocks(chain, missing[:count], parts, sizes, list(zip(*columns, strict=True)))
        return Draft(blocks, self._catalog.host, self.discard)

    def _missing(
        self, space: Space, hashes: Sequence[BlockHash], positions: range, parts: tuple[int, ...]
    ) -> tuple[list[int], list[FamilyId]]:
        """Positions whose parts are not all in host RAM, and the families there from which they hang."""
        index = self._catalog.index
        wanted = sum(1 << part for part in parts)
        missing: list[int] = []
        parents: list[FamilyId] = []
        for start in range(positions.start, positions.stop, LOCK_BATCH):
            with self._catalog.lock:
                for position in range(start, min(start + LOCK_BATCH, positions.stop)):
                    family = space.get(hashes[position])
                    if family is not None and self._there(family, wanted):
                        continue
                    if position and (not missing or missing[-1] != position - 1):
                        parent = space.get(hashes[position - 1])
                        if parent is not None and index.residency[HOST][parent]:
                            parents.append(parent)
                    missing.append(position)
        return missing, parents

    def _there(self, family: FamilyId, wanted: int) -> bool:
        """True when host RAM has those parts. A block past its expiry makes way, so that it can be stored anew."""
        index = self._catalog.index
        whole = bool(index.state[family] & IN_HOST)
        if whole and 0 < index.expires_s[family] <= self._catalog.clock.now_s() and not index.pins[family]:
            self._catalog.counters.add(1, "expired_blocks_total")
            self._catalog._lose(family, HOST, evicted=False, reason="expired")
            return False
        return whole or index.residency[HOST][family] & wanted == wanted

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
            self._catalog.host.release(slots)

    def register(
        self, space: Space, sealed: Sealed, retention: Retention, expected: int, result: Stored
    ) -> list[FamilyId]:
        """Makes sealed blocks visible, in the order of their positions. Returns the families that are new in host RAM.

        ``expected``: bitmap of the parts that a family of these blocks will have.
        """
        sums = sealed.checksums
        blocks = sealed.take()
        added: list[FamilyId] = []
        for start in range(0, len(blocks.positions), LOCK_BATCH):
            known = len(added)
            with self._catalog.lock:
                for i in range(start, min(start + LOCK_BATCH, len(blocks.positions))):
                    family = self._register_one(space, blocks, i, sums[i], retention, expected, result)
                    if family is not None:
                        added.append(family)
                self._catalog._tell_arrivals()
                self._catalog.on_dirty(added[known:])
        return added

    def _register_one(
        self,
        space: Space,
        blocks: DraftBlocks,
        i: int,
        sums: tuple[int, ...],
        retention: Retention,
        expected: int,
        result: Stored,
    ) -> FamilyId | None:
        catalog, position = self._catalog, blocks.positions[i]
        hashes = blocks.chain.hashes
        parent_hash = hashes[position - 1] if position else None
        found = catalog._find_or_add(space, hashes[position], parent_hash, position, expected)
        if isinstance(found, str):
            catalog.host.release(blocks.slots[i])
            result.drop(found)
            return None
        if self._place(found, blocks.parts, blocks.slots[i], sums, retention):
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
        retention: Retention,
    ) -> bool:
        """Puts slots under a family; those of parts that came by another way meanwhile are given back."""
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
        if not index.state[family] & IN_HOST:
            index.priority[family] = max(-MAX_PRIORITY, min(MAX_PRIORITY, retention.priority))
            if retention.expires_s is not None:
                index.expires_s[family] = retention.expires_s
                catalog.has_expiry = True
        catalog._gain(family, HOST, gained)
        return True

    def land(
        self, family: FamilyId, generation: int, part: int, slot: Slot, checksum: int, retention: Retention
    ) -> bool:
        """Registers one part that was loaded from a colder tier and verified. False when it came too late: then the
        slot is the caller's."""
        catalog, index = self._catalog, self._catalog.index
        with catalog.lock:
            if index.generation[family] != generation or index.slots[family, part] != NO_SLOT:
                return False
            if not catalog._somewhere(family):
                return False  # cleared meanwhile
            self._place(family, (part,), (slot,), (checksum,), retention)
            catalog._tell_arrivals()
            catalog.on_dirty((family,))
            return True

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
        with catalog.lock:
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
                if header.expires_ms:
                    left_s = min(header.expires_ms / 1000 - catalog.clock.unix_s(), MAX_TTL_S)
                    catalog.index.expires_s[found] = catalog.clock.now_s() + left_s
                    catalog.has_expiry = True
                catalog._gain(found, tier, 1 << header.part)
            catalog._tell_arrivals()

    def unreachable(self, tier: int, headers: Iterable[FrameHeader]) -> list[BlockKey]:
        """Keys of blocks that were found but can never be matched: families that lack a part or an ancestor. They are
        taken off the catalog, and the caller deletes them."""
        catalog, index = self._catalog, self._catalog.index
        useless: list[BlockKey] = []
        # Heads first: an ancestor is judged before its children.
        for header in sorted(headers, key=lambda header: header.depth):
            with catalog.lock:
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
