"""New blocks enter host RAM: the way of nearly all blocks that are stored, in one loop.

``Intake`` can register anything: a part of a family, a family that a colder tier knows, one that came back by another
way meanwhile. A block that nobody has heard of, with all its parts at once, needs none of these questions, and the
answers cost more than the block. What this leaves behind is the same to the last bit; the invariants check both alike.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from tierkv.index import IN_HOST, NO_FAMILY, USABLE
from tierkv.policy import BlockInfo
from tierkv.residency import ARRIVED_AND_STORED, HOST

if TYPE_CHECKING:
    from tierkv.catalog import Catalog
    from tierkv.handles import DraftBlocks
    from tierkv.ids import FamilyId
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
    index, chain, parts = catalog.index, blocks.chain, blocks.parts
    added: list[FamilyId] = []
    if sum(1 << part for part in parts) != expected or catalog.retains or catalog._following:
        return added
    hashes, host_name, now_s = chain.hashes, catalog.tiers[HOST].name, catalog.clock.now_s()
    size, tenant, dirty = space.bytes_of(expected), space.tenant, catalog.wanted
    residency, children, state = index.residency[HOST], index.children[HOST], index.state
    held_in, whole_in, dirty_in, width = index.held_in, index.whole_in, index.dirty, index.parts
    cells, owner, set_checksum = index.slot_cells, catalog.owner, catalog.host.set_checksum
    events, digest, dicts = catalog.events, space.digest, space.dicts
    infos: list[BlockInfo] = []
    before, family = -2, NO_FAMILY
    for row in rows:
        position = blocks.positions[row]
        block_hash = hashes[position]
        if block_hash in dicts[block_hash[0]]:
            break
        parent_hash = None
        if position == 0:
            family = NO_FAMILY
        else:
            parent_hash = hashes[position - 1]
            if position - 1 != before:  # else it hangs from the one before, which has just come in
                family = dicts[parent_hash[0]].get(parent_hash, NO_FAMILY)
                if not family or not catalog._somewhere(family):
                    break
        parent = family
        new = index.add(space, block_hash, parent, position, expected)
        if new is None:
            break
        family, before, dicts = new, position, space.dicts
        for part, slot, checksum in zip(parts, blocks.slots[row], sums[row], strict=True):
            cells[family * width + part] = slot
            owner[slot] = family
            set_checksum(slot, checksum)
        residency[family] = expected
        held_in[family] = whole_in[family] = _IN_HOST
        state[family] = IN_HOST | USABLE
        dirty_in[family] = dirty
        if parent:
            children[parent] += 1
        infos.append(BlockInfo(family, parent or None, position, size, tenant))
        events.append(now_s, ARRIVED_AND_STORED, digest, block_hash, parent_hash, host_name)
        added.append(family)
    room = space.room_of(expected)
    catalog.host_bytes += size * len(added)
    space.books.held[HOST] += room * len(added)
    if not dirty:
        catalog.clean_bytes += size * len(added)
        space.books.clean_bytes += room * len(added)
    policy = catalog.host_policy
    catalog._arrivals += [(policy, info) for info in infos]
    return added
