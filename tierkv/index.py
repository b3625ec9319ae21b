"""The index: (namespace, hash) -> a small integer, and columns of facts by that integer.

One dict of a million keys stalls everybody for tens of milliseconds when it grows, and a million small objects make
the garbage collector pause for a quarter of a second. So the dict of a namespace is cut into 256 shards as it grows,
and what is known of a family stands in flat columns, allocated at start, touched as families come. Batches are looked
at with numpy, single families through memoryviews of the same columns, which is faster for one.

Not thread-safe: the catalog locks, for at most 256 families at a time, for all but looks at what stands there.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from tierkv.ceiling import Tally
from tierkv.ids import TENANT_TAG_BYTES, BlockHash, BlockKey, FamilyId, KeyPrefix, NamespaceDigest
from tierkv.keys import Namespace, block_key
from tierkv.layout import Layout
from tierkv.tenancy import TenantBooks
from tierkv.units import ALIGN_BYTES, align_up

NO_FAMILY = FamilyId(0)
"""Row 0 of the columns stands for "no family": a block without a parent has it as its parent."""

NO_SLOT = -1

USABLE = 1
"""State bit: every expected part is in some tier, and the family may be matched."""
IN_HOST = 2
"""State bit: every expected part is registered in host RAM."""
SERVED = 4
"""State bit: somebody has read it since it was stored."""
HINT_ONLY = 16
"""State bit: only a tier that evicts on its own is known to hold the family; its row may be forgotten for others."""
SERVED_ONLY = 32
"""State bit: loaded for one request and not to be kept in host RAM (the policy's ``SERVE``): the first to go there."""
DOOMED = 8
"""State bit: cleared while it was pinned. It cannot be found any more and goes when its last pin does."""


_ROWS_AT_ONCE = 65_536
_MOST_BLANK = 256

SHARDS = 256
ONE_DICT = 2048
"""Families of a namespace up to which one dict is enough; it is cut up in less than a millisecond."""


class Space:
    """The families of one namespace. Known by digest and prefix alone until a client opens it with its layout: so a
    restart can rebuild (and evict) what nobody has asked for yet."""

    __slots__ = (
        "_rooms",
        "_sizes",
        "books",
        "dicts",
        "digest",
        "epoch",
        "expected",
        "layout",
        "mark",
        "namespace",
        "needed",
        "number",
        "number_bytes",
        "part_bytes",
        "prefix",
        "tally",
        "tenant",
        "trailing",
    )

    def __init__(
        self, number: int, digest: NamespaceDigest, prefix: KeyPrefix, books: TenantBooks | None = None
    ) -> None:
        self.number = number
        self.number_bytes = number.to_bytes(4, sys.byteorder)
        """As it stands in the column ``space_of``."""
        self.digest = digest
        self.prefix = prefix
        self.mark = int.from_bytes(digest[:8], "little")
        self.tally = Tally()
        self.tenant = _tenant_of(prefix)
        self.books = books or TenantBooks(self.tenant)
        self.epoch = 0
        # A small namespace has one dict under all first bytes: thousands of tenants must cost little.
        self.dicts: list[dict[bytes, FamilyId]] = [{}] * SHARDS
        self.layout: Layout | None = None
        self.namespace: Namespace | None = None
        """As a client has declared it."""
        self.expected = 0
        self.needed = 0
        """The expected parts that no block can do without: those of full attention."""
        self.part_bytes: dict[int, int] = {}
        self.trailing: tuple[tuple[int, int], ...] = ()
        self._sizes: dict[int, int] = {}
        self._rooms: dict[int, int] = {}

    def claim(self, layout: Layout, ranks: tuple[int, ...] | None) -> None:
        """A client says what the blocks look like and which ranks live on this host."""
        self.layout = layout
        self.expected = layout.mask_of(ranks)
        full = (g for g in range(len(layout.groups)) if layout.trailing_blocks(g) is None)
        self.needed = self.expected & sum(map(layout.group_mask, full))
        self._sizes.clear()
        self._rooms.clear()
        self.part_bytes = {part.index: part.payload_bytes for part in layout.parts}
        self.trailing = tuple(
            (layout.group_mask(group) & self.expected, needed)
            for group in range(len(layout.groups))
            if (needed := layout.trailing_blocks(group)) is not None
        )

    def get(self, block_hash: bytes) -> FamilyId | None:
        return self.dicts[block_hash[0]].get(block_hash)

    def key(self, block_hash: BlockHash, part: int) -> BlockKey:
        return block_key(self.digest, self.prefix, block_hash, part)

    def bytes_of(self, parts: int) -> int:
        """Payload bytes of the parts in a bitmap."""
        size = self._sizes.get(parts)
        if size is None:
            size = sum(size for part, size in self.part_bytes.items() if parts >> part & 1)
            self._sizes[parts] = size
        return size

    def room_of(self, parts: int, tier: int = 0) -> int:
        """What the parts in a bitmap take of a tier: of host RAM (tier 0) whole pages, elsewhere a page more each for
        the header. As it is before a codec."""
        room = self._rooms.get(parts)
        if room is None:
            sizes = (size for part, size in self.part_bytes.items() if parts >> part & 1)
            room = self._rooms[parts] = sum(max(ALIGN_BYTES, align_up(size)) for size in sizes)
        return room + ALIGN_BYTES * parts.bit_count() if tier else room

    def learn_part_bytes(self, part: int, payload_bytes: int) -> None:
        """What a stored frame says of a part, before any client has given the layout."""
        if part not in self.part_bytes:
            self.part_bytes[part] = payload_bytes
            self._sizes.clear()
            self._rooms.clear()

    def ids(self) -> Iterator[FamilyId]:
        for shard in self._shards():
            yield from list(shard.values())

    def __len__(self) -> int:
        return sum(map(len, self._shards()))

    def _shards(self) -> list[dict[bytes, FamilyId]]:
        return self.dicts if self.dicts[0] is not self.dicts[1] else self.dicts[:1]

    def insert(self, block_hash: BlockHash, family: FamilyId) -> None:
        self.make_room(1)
        self.dicts[block_hash[0]][block_hash] = family

    def make_room(self, count: int) -> None:
        """To be called before ``count`` families are entered into ``dicts``."""
        one = self.dicts[0]
        if one is self.dicts[1] and len(one) + count > ONE_DICT:
            shards: list[dict[bytes, FamilyId]] = [{} for _ in range(SHARDS)]
            for known, its_family in one.items():
                shards[known[0]][known] = its_family
            self.dicts = shards  # at once: there are readers without the lock


def _tenant_of(prefix: KeyPrefix) -> int:
    return int.from_bytes(prefix[:TENANT_TAG_BYTES], "big")


class FamilyIndex:
    """Families by id. ``tiers`` is the number of tiers with a residency column; tier 0 is the host.

    ``slots[id]`` holds one slot for each part; its width grows when a namespace with more parts comes.
    """

    def __init__(self, max_families: int, tiers: int) -> None:
        rows = max_families + 1
        self.max_families = max_families
        self._columns: dict[str, np.ndarray[Any, Any]] = {}
        self.expected = self._column("expected", rows, np.int64)
        self.residency = [self._column(f"residency{tier}", rows, np.int64) for tier in range(tiers)]
        self.held_in = self._column("held_in", rows, np.uint8)
        """Bitmap of the tiers that hold any part."""
        self.whole_in = self._column("whole_in", rows, np.uint8)
        """Bitmap of the tiers that hold every expected part."""
        self.children = [self._column(f"children{tier}", rows, np.int32) for tier in range(tiers)]
        self.children_known = self._column("children_known", rows, np.int32)
        self.parent = self._column("parent", rows, np.int32)
        self.pins = self._column("pins", rows, np.int32)
        self.generation = self._column("generation", rows, np.uint32)
        self.depth = self._column("depth", rows, np.int32)
        self.space_of = self._column("space_of", rows, np.int32)
        self.state = self._column("state", rows, np.uint8)
        self.dirty = self._column("dirty", rows, np.uint8)
        self.queued = self._column("queued", rows, np.uint8)
        self.priority = self._column("priority", rows, np.int8)
        self.expires_s = self._column("expires_s", rows, np.float64)
        self.barred = self._column("barred", rows, np.uint8)
        """Bitmap of the tiers that may not hold the family."""
        self.stale = self._column("stale", rows, np.uint8)
        """Bitmap of the tiers whose copy names an end that was put off since."""
        self.hashes: list[BlockHash | None] = [None] * rows
        self._set_slots(np.full((rows, 1), NO_SLOT, dtype=np.int32))
        self.of_new = (
            self.parent,
            self.depth,
            self.space_of,
            self.expected,
            self.residency[0],
            self.held_in,
            self.whole_in,
            self.state,
            self.dirty,
            self.children[0],
            self.children_known,
        )
        """The columns that are written when a family enters host RAM."""
        forgotten = (
            "parent",
            "state",
            "dirty",
            "queued",
            "expected",
            "priority",
            "barred",
            "stale",
            "expires_s",
        )
        columns = map(self.array, forgotten)
        self._blanks = [
            (memoryview(column), memoryview(np.zeros(_MOST_BLANK, column.dtype))) for column in columns
        ]
        """What of a row is forgotten with its family, and nothing to write over it."""
        self._unused: list[FamilyId] = []
        self._next = 1
        self.spaces: list[Space] = []
        self._by_digest: dict[NamespaceDigest, Space] = {}
        self.tenants: dict[int, TenantBooks] = {}
        """By tag."""
        self.size = 0

    def _column(self, name: str, rows: int, dtype: type[np.generic]) -> memoryview[Any]:
        column: np.ndarray[Any, Any] = np.zeros(rows, dtype=dtype)
        self._columns[name] = column
        return memoryview(column)

    def array(self, name: str) -> np.ndarray[Any, Any]:
        """The numpy side of a column, for work on batches."""
        return self._columns[name]

    def space(self, digest: NamespaceDigest) -> Space | None:
        return self._by_digest.get(digest)

    def open_space(self, digest: NamespaceDigest, prefix: KeyPrefix) -> Space:
        """The space of that digest, made if it is new."""
        space = self._by_digest.get(digest)
        if space is None:
            books = self.books_of(_tenant_of(prefix))
            space = Space(len(self.spaces), digest, prefix, books)
            self.spaces.append(space)
            self._by_digest[digest] = space
        return space

    def books_of(self, tag: int) -> TenantBooks:
        """The books of the tenant with that tag, begun if it is new."""
        books = self.tenants.get(tag)
        if books is None:
            books = self.tenants[tag] = TenantBooks(tag)
        return books

    def widen(self, parts: int) -> None:
        """Makes room for families of that many parts."""
        if parts > self.slots.shape[1]:
            wider = np.full((self.slots.shape[0], parts), NO_SLOT, dtype=np.int32)
            wider[:, : self.slots.shape[1]] = self.slots
            self._set_slots(wider)

    def _set_slots(self, table: np.ndarray[Any, np.dtype[np.int32]]) -> None:
        self.slots = table
        self.parts = table.shape[1]
        self.slot_cells: memoryview[Any] = memoryview(table.reshape(-1))
        """The same table cell by cell: that of a part is at ``family * parts + part``."""
        self.slot_table = (self.slot_cells, self.parts)
        """Both at once, for who looks without the lock: the cells of one table with the width of another are slots of
        other families."""

    def add(
        self, space: Space, block_hash: BlockHash, parent: FamilyId, depth: int, expected: int
    ) -> FamilyId | None:
        """A new family without any residency, or ``None`` when the index is full."""
        if self._unused:
            family = self._unused.pop()
        elif self._next <= self.max_families:
            family = FamilyId(self._next)
            self._next += 1
        else:
            return None
        space.insert(block_hash, family)
        self.size += 1
        self.hashes[family] = block_hash
        self.parent[family] = parent
        self.depth[family] = depth
        self.space_of[family] = space.number
        self.expected[family] = expected
        if parent:
            self.children_known[parent] += 1
        return family

    def take_ids(self, count: int) -> list[FamilyId]:
        """Ids for up to ``count`` new families, fewer when the index is nearly full. Their rows are as good as blank;
        whoever takes them fills them in, or gives them back."""
        taken = self._unused[-count:]
        del self._unused[-count:]
        taken.reverse()
        if len(taken) < count:
            first = self._next
            self._next = min(first + count - len(taken), self.max_families + 1)
            taken += map(FamilyId, range(first, self._next))
        return taken

    def give_back(self, ids: Sequence[FamilyId]) -> None:
        """Ids that came to nothing: the next to be taken."""
        self._unused += reversed(ids)

    def detach(self, family: FamilyId) -> None:
        """Makes a family impossible to find; its row lives on until ``remove``."""
        block_hash = self.hashes[family]
        assert block_hash is not None
        shard = self.spaces[self.space_of[family]].dicts[block_hash[0]]
        if shard.get(block_hash) == family:
            del shard[block_hash]

    def remove(self, family: FamilyId) -> FamilyId:
        """Forgets a family that is in no tier, unpinned and childless; returns its parent. The id is used again."""
        assert self.hashes[family] is not None, f"family {family} is removed twice"
        assert not self.pins[family], f"family {family} is removed while it is pinned"
        assert not self.children_known[family], f"family {family} is removed before its children"
        self.detach(family)
        self.size -= 1
        parent = FamilyId(self.parent[family])
        if parent:
            self.children_known[parent] -= 1
        self.hashes[family] = None
        self.parent[family] = 0
        self.generation[family] = (self.generation[family] + 1) & 0xFFFFFFFF
        self.state[family] = self.dirty[family] = self.queued[family] = 0
        self.priority[family] = self.barred[family] = self.stale[family] = 0
        self.expires_s[family] = 0.0
        self.expected[family] = 0
        self._unused.append(family)
        return parent

    def remove_run(self, space: Space, families: Sequence[FamilyId]) -> None:
        """The same for families of one space that can be found by their hashes; whose children, if any, stand before
        them, and whose parents know already that they go."""
        hashes, dicts, generation = self.hashes, space.dicts, self.generation
        for family in families:
            block_hash = hashes[family]
            assert block_hash is not None, f"family {family} is removed twice"
            del dicts[block_hash[0]][block_hash]
            hashes[family] = None
            generation[family] = (generation[family] + 1) & 0xFFFFFFFF
        first, stop = min(families), max(families) + 1
        if stop - first == len(families) <= _MOST_BLANK:  # side by side, in whatever order
            for column, blank in self._blanks:
                column[first:stop] = blank[: stop - first]
        else:
            for column, blank in self._blanks:
                nothing = blank[0]
                for family in families:
                    column[family] = nothing
        self.size -= len(families)
        self._unused += families

    def expired(self, now_s: float) -> list[FamilyId]:
        """Families past their end that lie in a tier and that nobody holds. Looks at all rows at once and needs no
        lock: the caller asks again under it."""
        rows = slice(self._next)
        ends_s = self._columns["expires_s"][rows]
        free = (self._columns["held_in"][rows] != 0) & (self._columns["pins"][rows] == 0)
        return [FamilyId(row) for row in np.flatnonzero((ends_s > 0) & (ends_s <= now_s) & free).tolist()]

    def whole_from(self, tier: int, row: int, most: int) -> tuple[list[FamilyId], int]:
        """Up to ``most`` families that a tier holds whole, in the order of their rows from ``row`` on, and the row to
        go on from; 0 at the end. Looks at a bounded number of rows."""
        end = min(row + _ROWS_AT_ONCE, self.max_families + 1)
        found = np.flatnonzero(self.array("whole_in")[row:end] >> tier & 1)[:most] + row
        if len(found) == most:
            end = int(found[-1]) + 1
        return [FamilyId(family) for family in found.tolist()], end if end <= self.max_families else 0

    def has_room(self) -> bool:
        return bool(self._unused) or self._next <= self.max_families
