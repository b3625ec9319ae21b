"""Writing blocks from host RAM to a blob tier: frame, room, put, and only then residency."""

from __future__ import annotations

import threading
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from tierkv import frame
from tierkv.catalog import Catalog
from tierkv.clock import Clock, Deadline
from tierkv.codec import RAW, Codec, fitted
from tierkv.edges import Edge
from tierkv.frame import FrameHeader, checksum
from tierkv.ids import BlockHash, BlockKey, FamilyId, NamespaceDigest, Slot
from tierkv.index import DOOMED, NO_SLOT
from tierkv.jobs import BATCH_BLOCKS
from tierkv.keys import Namespace
from tierkv.leaving import Leaving
from tierkv.metrics import Counters
from tierkv.quotas import Quotas
from tierkv.retaining import _note_written
from tierkv.room import Room
from tierkv.staging import SheetPool, aligned
from tierkv.tenancy import TenantBooks
from tierkv.tier import Item, Outcome
from tierkv.units import ALIGN_BYTES

_ROOM_ROUNDS = 64
_ROOM_SHARE = 4
"""To make room for one batch at most a fourth of a tier is evicted (a tier full of blocks of another size has to
empty whole segments), in at most 64 rounds; then the batch gives up for now."""

_FULL_TRIES = 4
"""Times that what was refused for want of room is tried again, after evicting as many blocks."""

_FAILED = {Outcome.CORRUPT, Outcome.TIMEOUT, Outcome.UNAVAILABLE}

_REST_S = 0.25
"""How long an edge rests after its tier was full and nothing could leave it."""


@dataclass(eq=False, slots=True)
class Outgoing:
    """One part to be written. The family is pinned, so its slot stands still."""

    family: FamilyId
    part: int
    slot: Slot
    key: BlockKey
    namespace: NamespaceDigest
    block_hash: BlockHash
    parent_hash: BlockHash | None
    depth: int
    expected: int
    epoch: int
    expires_s: float
    priority: int
    no_colder: bool
    payload_bytes: int
    payload_sum: int
    shape: Namespace | None
    """For codecs that look at numbers; ``None`` while nobody has said what this namespace's blocks are made of."""
    outcome: Outcome = Outcome.CANCELLED
    stored_bytes: int = 0
    granted_bytes: int = 0
    """What it counts against its tenant's quota until it is held."""
    over_quota: bool = False
    """It is not written: its tenant holds as much of the tier as it may."""


class Demotion:
    """Writes batches; ``write`` blocks on a worker of the tier."""

    def __init__(
        self,
        catalog: Catalog,
        leaving: Leaving,
        room: Room,
        quotas: Quotas,
        clock: Clock,
        counters: Counters,
    ) -> None:
        self._catalog = catalog
        self._leaving = leaving
        self._room = room
        self._quotas = quotas
        self._clock = clock
        self._counters = counters
        self._sheets = SheetPool(BATCH_BLOCKS)
        self._lock = threading.Lock()

    def describe(self, edge: Edge, family: FamilyId) -> list[Outgoing]:
        """The parts that the tier lacks. Under the catalog's lock."""
        catalog, index = self._catalog, self._catalog.index
        space = index.spaces[index.space_of[family]]
        parent = index.parent[family]
        block_hash = index.hashes[family]
        assert block_hash is not None
        held = index.residency[edge.number][family]
        lacking = index.expected[family]
        if not index.stale[family] >> edge.number & 1:
            lacking &= ~held
        row = index.slots[family].tolist()
        return [
            Outgoing(
                family=family,
                part=part,
                slot=Slot(slot),
                key=space.key(block_hash, part),
                namespace=space.digest,
                block_hash=block_hash,
                parent_hash=index.hashes[parent] if parent else None,
                depth=index.depth[family],
                expected=index.expected[family],
                epoch=space.epoch,
                expires_s=index.expires_s[family],
                priority=index.priority[family],
                no_colder=bool(index.barred[family] >> edge.number + 1),
                payload_bytes=space.part_bytes[part],
                payload_sum=catalog.host.checksum(Slot(slot)),
                shape=space.namespace,
            )
            for part, slot in enumerate(row)
            if lacking >> part & 1 and slot != NO_SLOT
        ]

    def write(self, edge: Edge, outgoing: Sequence[Outgoing]) -> None:
        """Puts the batch into the tier; each part's outcome is noted in it."""
        deadline = Deadline(self._clock, edge.timeout_s)
        started_s = self._clock.now_s()
        size_bytes = sum(one.payload_bytes + ALIGN_BYTES for one in outgoing)
        self._promise(edge, size_bytes)
        edge.tier.refresh_usage()
        writable = self._within_quotas(edge, outgoing, deadline) if self._quotas.on else outgoing
        if writable:
            self._make_room(edge, writable, deadline)
            self._put(edge, writable, deadline)
        for _ in range(_FULL_TRIES):
            full = [one for one in outgoing if one.outcome is Outcome.FULL]
            if not full or deadline.over() or not self._evict(edge, len(full)):
                break
            self._put(edge, full, deadline)
        self._promise(edge, -size_bytes)
        edge.tier.refresh_usage()
        moved = sum(one.stored_bytes for one in writable if one.outcome is Outcome.DONE)
        if moved and all(one.outcome is Outcome.DONE for one in writable):
            edge.write_speed.observe(moved, self._clock.now_s() - started_s)

    def _put(self, edge: Edge, outgoing: Sequence[Outgoing], deadline: Deadline) -> None:
        sheet = self._sheets.take(len(outgoing))
        items = [self._item(edge, one, sheet.pages[i]) for i, one in enumerate(outgoing)]

        def on_done(i: int, outcome: Outcome) -> None:
            outgoing[i].outcome = outcome

        begun_s = self._clock.now_s()
        edge.tier.put_from(items, deadline, on_done)
        ended_s = self._clock.now_s()
        took_s = ended_s - begun_s
        edge.write_times.observe(took_s, ended_s)
        if all(one.outcome is Outcome.DONE for one in outgoing):
            edge.codec_speed.wrote(sum(one.stored_bytes for one in outgoing), took_s)
        self._sheets.give_back(sheet)

    def _item(self, edge: Edge, one: Outgoing, page: memoryview) -> Item:
        slot = self._catalog.host.view(one.slot)
        payload, stored, code, stored_sum = slot, one.payload_bytes, RAW.code, one.payload_sum
        if (codec := self._codec_for(edge, one)) is not None:
            staged = aligned(one.payload_bytes)
            started_s = self._clock.now_s()
            encoded = codec.encode_into(slot[: one.payload_bytes], staged[: one.payload_bytes])
            # What does not shrink by a page saves nothing: it stays raw.
            shrunk = encoded is not None and encoded <= one.payload_bytes - ALIGN_BYTES
            if encoded is not None and shrunk:
                payload, stored, code = staged, encoded, codec.code
                stored_sum = checksum(staged[:encoded])
            edge.codec_speed.encoded(one.payload_bytes, stored, self._clock.now_s() - started_s)
            self._counters.add(1, "encoded_blocks_total", edge.name, "encoded" if shrunk else "kept")
        one.stored_bytes = stored
        left_s = one.expires_s - self._clock.now_s() if one.expires_s else None
        header = FrameHeader(
            key=one.key,
            namespace=one.namespace,
            block_hash=one.block_hash,
            parent_hash=one.parent_hash,
            depth=one.depth,
            part=one.part,
            expected_parts=one.expected,
            epoch=one.epoch,
            expires_ms=round((self._clock.unix_s() + left_s) * 1000) if left_s is not None else 0,
            codec=code,
            decoded_bytes=one.payload_bytes,
            stored_bytes=stored,
            decoded_checksum=one.payload_sum,
            stored_checksum=stored_sum,
            priority=one.priority,
            no_colder=one.no_colder,
        )
        page[: frame.HEADER_BYTES] = frame.pack(header)
        return Item(one.key, page, payload[: -(-stored // ALIGN_BYTES) * ALIGN_BYTES], stored, left_s)

    def _codec_for(self, edge: Edge, one: Outgoing) -> Codec | None:
        """What encodes this block; ``None`` where it goes as it is: a lossy codec takes only blocks whose name says so,
        and none is used on a link that is quicker without."""
        codec = edge.codec
        if codec.identity:
            return None
        if not codec.lossless and (one.shape is None or one.shape.spec.lossy_codec != codec.name):
            self._counters.add(1, "encoded_blocks_total", edge.name, "not_asked_for")
            return None
        if not edge.codec_speed.pays():
            self._counters.add(1, "encoded_blocks_total", edge.name, "passed_over")
            return None
        if one.shape is None:
            return codec
        layout = one.shape.layout
        return fitted(codec, layout.groups[layout.parts[one.part].group], layout.dtype)

    # -- room in the tier -----------------------------------------------------------------------------------------

    def _promise(self, edge: Edge, size_bytes: int) -> None:
        with self._lock:
            edge.promised_bytes += size_bytes

    def _make_room(self, edge: Edge, outgoing: Sequence[Outgoing], deadline: Deadline) -> None:
        """Evicts by the tier's policy until the batch fits, as far as can be told beforehand."""
        if self._catalog.tiers[edge.number].policy is None:
            return
        largest = max(one.payload_bytes for one in outgoing)
        used_bytes = edge.tier.usage().used_bytes
        for _ in range(_ROOM_ROUNDS):
            usage = edge.tier.refresh_usage()
            free_bytes = usage.capacity_bytes - usage.used_bytes
            # Batches are written side by side, and each counts on its own room.
            fits = usage.largest_free_bytes >= largest and free_bytes >= edge.promised_bytes
            enough = used_bytes - usage.used_bytes > usage.capacity_bytes // _ROOM_SHARE
            if fits or enough or deadline.over() or not self._evict(edge, len(outgoing)):
                return

    def _within_quotas(
        self, edge: Edge, outgoing: Sequence[Outgoing], deadline: Deadline
    ) -> Sequence[Outgoing]:
        """Those for which their tenants' quotas have room, or whose tenants' coldest blocks make it; the others are
        not written, and no deeper block of the same tenant with them."""
        quotas, spaces, tier = self._quotas, self._catalog.index.spaces, edge.number
        quotas.capacity_bytes[tier] = edge.tier.usage().capacity_bytes
        full: set[TenantBooks] = set()
        for one in outgoing:
            space = spaces[self._catalog.index.space_of[one.family]]
            books = space.books
            held = self._catalog.index.residency[tier][one.family] >> one.part & 1
            if held or self._catalog.tiers[tier].policy is None or quotas.limit(books, tier) is None:
                continue
            size_bytes = space.room_of(1 << one.part, tier)
            if books not in full and self._has_quota(edge, books, size_bytes, len(outgoing), deadline):
                one.granted_bytes = size_bytes
            else:
                full.add(books)
                one.over_quota = True
        refused = {one.family for one in outgoing if one.over_quota}
        for one in outgoing:
            one.over_quota = one.family in refused  # all of its parts, or none
        return [one for one in outgoing if not one.over_quota]

    def _has_quota(
        self, edge: Edge, books: TenantBooks, size_bytes: int, count: int, deadline: Deadline
    ) -> bool:
        for _ in range(_ROOM_ROUNDS):
            if self._quotas.grant(books, edge.number, 1, size_bytes):
                return True
            excess_bytes = self._quotas.excess(books, edge.number, size_bytes)
            need = max(count, -(-excess_bytes // size_bytes))
            if deadline.over() or not self._evict(edge, need, books):
                return False
        return False

    def _evict(self, edge: Edge, count: int, books: TenantBooks | None = None) -> bool:
        if self._catalog.tiers[edge.number].policy is None:
            return False
        going = self._room.evict_from(edge, count, books)
        self._leaving.delete(going)
        return bool(going.keys)

    def _never_fits(self, edge: Edge, one: Outgoing) -> bool:
        """True when the tier refuses a block for its size, not for want of room."""
        usage = edge.tier.usage()
        largest = min(edge.tier.caps.max_block_bytes - frame.HEADER_BYTES, usage.capacity_bytes - ALIGN_BYTES)
        return one.payload_bytes > largest or usage.largest_free_bytes >= one.payload_bytes

    # -- afterwards -----------------------------------------------------------------------------------------------

    def commit(self, edge: Edge, outgoing: Sequence[Outgoing]) -> Mapping[FamilyId, bool]:
        """Takes the outcomes into the catalog. Returns for each family whether the tier holds all of it now."""
        catalog, index = self._catalog, self._catalog.index
        done: dict[FamilyId, int] = {}
        self._back_off(edge, outgoing)
        refused: set[FamilyId] = set()
        for one in outgoing:
            done.setdefault(one.family, 0)
            if one.over_quota:
                refused.add(one.family)
                continue
            self._counters.add(1, "written_blocks_total", edge.name, one.outcome.value)
            if one.outcome is Outcome.DONE:
                done[one.family] |= 1 << one.part
                self._counters.add(one.stored_bytes, "written_bytes_total", edge.name)
            elif one.outcome is Outcome.FULL and self._never_fits(edge, one):
                refused.add(one.family)
            elif one.outcome is Outcome.FULL:
                edge.rest_until_s = self._clock.now_s() + _REST_S
        self._give_up_orphans(edge, done)
        self._undo(edge, outgoing, done)
        self._count_over_quota(edge, outgoing)
        whole: dict[FamilyId, bool] = {}
        with catalog.gate, catalog.lock:
            unreachable: set[FamilyId] = set()
            for family in sorted(done, key=lambda one: index.depth[one]):
                parts = done[family]
                index.queued[family] &= ~(1 << edge.number)
                catalog.awaited.came(family, edge.number)
                whole[family] = self._makes_whole(edge, family, parts)
                if index.state[family] & DOOMED:
                    continue
                if whole[family]:
                    if not self._has_way(edge, family, unreachable):  # its parent's write has failed
                        unreachable.add(family)
                    catalog._gain(family, edge.number, parts)
                    self._renewed(edge, family, [one for one in outgoing if one.family == family])
                elif family in refused:
                    catalog._now_clean_in(family, edge.number)
                elif edge.write == "through":
                    edge.backlog.add((family,))
            orphans: list[FamilyId] = []
            for family in whole:
                catalog.leaving.discard((edge.number, family))
                whole[family] = whole[family] and family not in unreachable
                orphans += [family] if family in unreachable else []
                orphans += catalog._let_follow(family, edge.number, in_vain=family in unreachable)
            catalog._tell_arrivals()
            self._settle(edge, outgoing)
            going = self._leaving._begin(edge) if orphans else None
            for orphan in reversed(orphans):  # children before their parents
                assert going is not None
                self._leaving._add(going, orphan, evicted=True, reason="unreachable")
        if going is not None:
            self._leaving.delete(going)
        return whole

    def _count_over_quota(self, edge: Edge, outgoing: Sequence[Outgoing]) -> None:
        families = {one.family for one in outgoing if one.over_quota}
        if families:
            self._counters.add(len(families), "dropped_blocks_total", edge.name, "quota")
        for family in families:
            self._catalog.index.spaces[self._catalog.index.space_of[family]].books.refused_blocks += 1

    def _settle(self, edge: Edge, outgoing: Sequence[Outgoing]) -> None:
        """What was granted is held now, or will not be."""
        index = self._catalog.index
        for one in outgoing:
            if one.granted_bytes:
                books = index.spaces[index.space_of[one.family]].books
                self._quotas.settle(books, edge.number, one.granted_bytes)

    def _renewed(self, edge: Edge, family: FamilyId, outgoing: Sequence[Outgoing]) -> None:
        """The tier's copy names the family's end again, unless that was put off once more or a part failed."""
        index = self._catalog.index
        if not index.stale[family] >> edge.number & 1:
            for one in outgoing:
                _note_written(self._catalog, family, edge.number, one.expires_s)
            return
        written = all(
            one.outcome is Outcome.DONE and one.expires_s == index.expires_s[family] for one in outgoing
        )
        if written:
            index.stale[family] &= ~(1 << edge.number)
            self._catalog._now_clean_in(family, edge.number)
        elif edge.write == "through":
            edge.backlog.add((family,))

    def _back_off(self, edge: Edge, outgoing: Sequence[Outgoing]) -> None:
        """What failed is tried again, but not at once: a bad spot on a disk would keep a processor busy in vain."""
        outcomes = {one.outcome for one in outgoing}
        if outcomes & _FAILED:
            edge.back_off(self._clock.now_s())
        elif Outcome.DONE in outcomes:
            edge.failures = 0

    def _makes_whole(self, edge: Edge, family: FamilyId, parts: int) -> bool:
        index = self._catalog.index
        expected = index.expected[family]
        held = index.residency[edge.number][family] | parts
        lost = index.state[family] & DOOMED or family in self._catalog.damaged
        return not lost and held & expected == expected

    def _give_up_orphans(self, edge: Edge, done: dict[FamilyId, int]) -> None:
        """What was written behind a parent that was not counts as not written: a restart could not find it."""
        catalog, index = self._catalog, self._catalog.index
        if catalog.tiers[edge.number].policy is None:
            return
        bit = 1 << edge.number
        with catalog.gate, catalog.lock:
            for family in sorted(done, key=lambda one: index.depth[one]):
                parent = FamilyId(index.parent[family])
                if parent in done and not index.whole_in[parent] & bit:
                    reachable = self._makes_whole(edge, parent, done[parent])
                else:
                    reachable = self._has_way(edge, family, ())
                if not reachable:
                    done[family] = 0

    def _has_way(self, edge: Edge, family: FamilyId, lost: Collection[FamilyId]) -> bool:
        """False for one that a restart could not find in the tier: its parent is not there, nor is somebody writing it.
        Under the catalog's lock. ``lost``: about to be deleted."""
        index, bit = self._catalog.index, 1 << edge.number
        parent = FamilyId(index.parent[family])
        if not parent or self._catalog.tiers[edge.number].policy is None:
            return True
        if parent in lost:
            return False
        coming = index.queued[parent] & bit and (edge.number, parent) not in self._catalog.leaving
        return bool(coming or (index.whole_in[parent] | index.held_in[parent]) & bit)

    def _undo(self, edge: Edge, outgoing: Sequence[Outgoing], done: Mapping[FamilyId, int]) -> None:
        """Deletes what was written of families that were cleared meanwhile or of which a part failed: no policy knows
        them, so nobody else would ever do it. Before they can be picked again."""
        with self._catalog.gate, self._catalog.lock:
            undone = {family for family, parts in done.items() if not self._makes_whole(edge, family, parts)}
            # What was found to be damaged while it was being written anew lies there yet if that failed.
            spoilt = {family for family in undone if (edge.number, family) in self._catalog.leaving}
        keys = [
            one.key
            for one in outgoing
            if one.family in spoilt or (one.family in undone and one.outcome is Outcome.DONE)
        ]
        if keys:
            edge.tier.delete(keys)
