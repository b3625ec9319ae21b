"""New blocks enter host RAM: the way of nearly all blocks that are stored, in one loop.

``Intake`` can register anything: a part of a family, a family that a colder tier knows, one that came back by another
way meanwhile. A block that nobody has heard of, with all its parts at once, needs none of these questions, and the
answers cost more than the block. What this leaves behind is the same to the last bit; the invariants check both alike.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from tierkv.index import IN_HOST, NO_FAMILY, USABLE
from tierkv.policy import InfoRun
from tierkv.residency import ARRIVED_AND_STORED, HOST

if TYPE_CHECKING:
    from tierkv.catalog import Catalog
    from tierkv.handles import DraftBlocks
    from tierkv.ids import BlockHash, FamilyId
    from tierkv.index import Space

FEW = 8
"""Below this rows are written one by one."""

_IN_HOST = 1 << HOST


def enter_new(
    catalog: Catalog,
    space: Space,
    blocks: DraftBlocks,
    sums: Sequence[tuple[int, ...]],
    rows: range,
    expected: int,
) -> list[FamilyId]:
    """Registers the draft's blocks at ``rows``, in order, as long as each is unknown and hangs from one that is there.
    Returns their families: where it stopped follows from their number.

    For blocks without a wish for retention. Under the lock; ``catalog._tell_arrivals`` must follow.
    """
    if sum([1 << part for part in blocks.parts]) != expected or catalog.retains or catalog._following:
        return []
    start, positions = rows.start, blocks.positions
    if positions[rows.stop - 1] - positions[start] == rows.stop - start - 1:
        return _enter_run(catalog, space, blocks, sums, rows, expected)
    added: list[FamilyId] = []
    while start < rows.stop:
        stop = start + 1
        while stop < rows.stop and positions[stop] == positions[stop - 1] + 1:
            stop += 1
        run = _enter_run(catalog, space, blocks, sums, range(start, stop), expected)
        added += run
        if len(run) < stop - start:
            break
        start = stop
    return added


def _enter_run(
    catalog: Catalog,
    space: Space,
    blocks: DraftBlocks,
    sums: Sequence[tuple[int, ...]],
    rows: range,
    expected: int,
) -> list[FamilyId]:
    """Blocks that follow each other in their chain."""
    index, hashes, depth = catalog.index, blocks.chain.hashes, blocks.positions[rows.start]
    head = NO_FAMILY
    if depth:
        head = space.get(hashes[depth - 1]) or NO_FAMILY
        if not head or not catalog._somewhere(head):
            return []
    ids = index.take_ids(len(rows))
    space.make_room(len(ids))
    dicts, names, position = space.dicts, index.hashes, depth
    for family in ids:
        block_hash = hashes[position]
        shard = dicts[block_hash[0]]
        if block_hash in shard:
            index.give_back(ids[position - depth :])
            del ids[position - depth :]
            break
        shard[block_hash] = family
        names[family] = block_hash
        position += 1
    if not ids:
        return ids
    (_write_few if len(ids) < FEW else _write_many)(catalog, space.number, ids, head, depth, expected)
    cells, width, owner, checksums = index.slot_cells, index.parts, catalog.owner, catalog.host.checksums
    of_these = zip(ids, blocks.slots[rows.start :], sums[rows.start :], strict=False)
    for family, slots, its_sums in of_these:
        for part, slot, checksum in zip(blocks.parts, slots, its_sums, strict=True):
            cells[family * width + part] = slot
            owner[slot] = family
            checksums[slot] = checksum
    index.size += len(ids)
    _tell(catalog, space, hashes, depth, ids, head, expected)
    return ids


def _write_few(
    catalog: Catalog, number: int, ids: list[FamilyId], head: FamilyId, depth: int, expected: int
) -> None:
    """The rows of new families, each the parent of the next."""
    columns, dirty, parent = catalog.index.of_new, catalog.wanted, head
    parent_of, depth_of, space_of, expected_of, held, held_in, whole_in, state, dirty_in, children, known = (
        columns
    )
    for family in ids:
        parent_of[family] = parent
        depth_of[family] = depth
        space_of[family] = number
        expected_of[family] = held[family] = expected
        held_in[family] = whole_in[family] = _IN_HOST
        state[family] = IN_HOST | USABLE
        dirty_in[family] = dirty
        if parent:
            children[parent] += 1
            known[parent] += 1
        parent = family
        depth += 1


def _write_many(
    catalog: Catalog, number: int, ids: list[FamilyId], head: FamilyId, depth: int, expected: int
) -> None:
    """The same, column by column."""
    index, rows = catalog.index, np.array(ids)
    column, parents = index.array, rows[:-1]
    column("parent")[rows[1:]] = parents
    column("depth")[rows] = np.arange(depth, depth + len(ids))
    column("space_of")[rows] = number
    column("expected")[rows] = column("residency0")[rows] = expected
    column("held_in")[rows] = column("whole_in")[rows] = _IN_HOST
    column("state")[rows] = IN_HOST | USABLE
    column("dirty")[rows] = catalog.wanted
    column("children0")[parents] = column("children_known")[parents] = 1
    index.parent[ids[0]] = head
    if head:
        index.children[HOST][head] += 1
        index.children_known[head] += 1


def _tell(
    catalog: Catalog,
    space: Space,
    hashes: Sequence[BlockHash],
    depth: int,
    ids: list[FamilyId],
    head: FamilyId,
    expected: int,
) -> None:
    """Counts them, and says of them what there is to say."""
    count, size = len(ids), space.bytes_of(expected)
    books, room = space.books, space.room_of(expected) * count
    catalog.host_bytes += size * count
    books.held[HOST] += room
    if not catalog.wanted:
        catalog.clean_bytes += size * count
        books.clean_bytes += room
    catalog._arrivals.append((catalog.host_policy, InfoRun(ids, head or None, depth, size, space.tenant)))
    catalog.events.append_run(
        catalog.clock.now_s(),
        ARRIVED_AND_STORED,
        space.digest,
        hashes[depth : depth + count],
        hashes[depth - 1 : depth - 1 + count] if depth else (None, *hashes[: count - 1]),
        catalog.tiers[HOST].name,
    )
