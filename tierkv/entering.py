"""New blocks enter host RAM: the way of nearly all blocks that are stored, in one loop.

``Intake`` can register anything: a part of a family, a family that a colder tier knows, one that came back by another
way meanwhile. A block that nobody has heard of, with all its parts at once, needs none of these questions, and the
answers cost more than the block. What this leaves behind is the same to the last bit; the invariants check both alike.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from tierkv.index import IN_HOST, NO_FAMILY, USABLE
from tierkv.policy import InfoRun
from tierkv.residency import ARRIVED_AND_STORED, HOST

if TYPE_CHECKING:
    from tierkv.catalog import Catalog
    from tierkv.handles import DraftBlocks
    from tierkv.ids import BlockHash, FamilyId
    from tierkv.index import Space

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
    index, hashes, parts, depth = (
        catalog.index,
        blocks.chain.hashes,
        blocks.parts,
        blocks.positions[rows.start],
    )
    head = NO_FAMILY
    if depth:
        head = space.get(hashes[depth - 1]) or NO_FAMILY
        if not head or not catalog._somewhere(head):
            return []
    ids = index.take_ids(len(rows))
    space.make_room(len(ids))
    dicts, names, width, number, dirty = space.dicts, index.hashes, index.parts, space.number, catalog.wanted
    parent_of, depth_of, space_of, expected_of = index.parent, index.depth, index.space_of, index.expected
    held, children, known = index.residency[HOST], index.children[HOST], index.children_known
    held_in, whole_in, state, dirty_in = index.held_in, index.whole_in, index.state, index.dirty
    cells, owner, checksums, slots = index.slot_cells, catalog.owner, catalog.host.checksums, blocks.slots
    parent, position = head, depth
    for family, row in zip(ids, rows):  # noqa: B905 - there may be fewer ids, when the index is full
        block_hash = hashes[position]
        shard = dicts[block_hash[0]]
        if block_hash in shard:
            break
        shard[block_hash] = family
        names[family] = block_hash
        parent_of[family] = parent
        depth_of[family] = position
        space_of[family] = number
        expected_of[family] = held[family] = expected
        held_in[family] = whole_in[family] = _IN_HOST
        state[family] = IN_HOST | USABLE
        dirty_in[family] = dirty
        if parent:
            children[parent] += 1
            known[parent] += 1
        for part, slot, checksum in zip(parts, slots[row], sums[row], strict=True):
            cells[family * width + part] = slot
            owner[slot] = family
            checksums[slot] = checksum
        parent = family
        position += 1
    count = position - depth
    if count < len(ids):
        index.give_back(ids[count:])
        del ids[count:]
    if count:
        index.size += count
        _tell(catalog, space, hashes, depth, ids, head, expected)
    return ids


def _tell(
    catalog: Catalog,
    space: Space,
    hashes: Sequence[BlockHash],
    depth: int,
    ids: list[FamilyId],
    head: FamilyId,
    expected: int,
) -> None:
    count, size, room = len(ids), space.bytes_of(expected), space.room_of(expected)
    catalog.host_bytes += size * count
    space.books.held[HOST] += room * count
    if not catalog.wanted:
        catalog.clean_bytes += size * count
        space.books.clean_bytes += room * count
    own = hashes[depth : depth + count]
    run = InfoRun(ids, head or None, depth, size, space.tenant, own)
    catalog._arrivals.append((catalog.host_policy, run))
    first = depth - 1
    parents = hashes[first : first + count] if depth else (None, *hashes[: count - 1])
    catalog.events.append_run(
        catalog.clock.now_s(),
        ARRIVED_AND_STORED,
        space.digest,
        own,
        parents,
        catalog.tiers[HOST].name,
    )
