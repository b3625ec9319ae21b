"""Which copies bring a lease's blocks into an engine's pages, and pages into a draft's slots."""

from __future__ import annotations

from collections.abc import Sequence

from tierkv.copier import CopyPart
from tierkv.errors import ArgumentError, HandleError
from tierkv.handles import Draft, Lease, Lessor, SlotRef

Pages = Sequence[Sequence[Sequence[int]]]
"""``pages[i][group]``: the engine's pages of the i-th block in that layer group, in the order of their tokens."""


def copies_of(
    lessor: Lessor, lease: Lease, pages: Pages, parts: tuple[int, ...], skip: int
) -> list[tuple[SlotRef, CopyPart]] | None:
    """``skip``: the first k engine blocks are left alone. A group without pages for a block (out of its window), or
    that is absent in it, is passed over. ``None`` when a block lacks a part of this rank. Raises ``HandleError`` for a
    number of pages that a block does not have."""
    copies: list[tuple[SlotRef, CopyPart]] = []
    for index in range(min(len(lease), len(pages))):
        found = _block_copies(lessor, lease, index, pages[index], parts, skip)
        if found is None:
            return None
        copies += found
    return copies


def _block_copies(
    lessor: Lessor,
    lease: Lease,
    index: int,
    pages: Sequence[Sequence[int]],
    parts: tuple[int, ...],
    skip: int,
) -> list[tuple[SlotRef, CopyPart]] | None:
    layout = lease.chain.namespace.layout
    family = lease.families[index]
    found = []
    for part in parts:
        group = layout.parts[part].group
        chosen = _chosen("onboard", index, pages, group)
        if not chosen:
            continue
        if len(chosen) != layout.pages_of(group):  # where a layer begins in the slot follows from it
            raise HandleError(
                f"block {index}, layer group {layout.groups[group].name!r}: {len(chosen)} pages given, a "
                f"block has {layout.pages_of(group)}; name them all, `skip` leaves the first ones alone"
            )
        hashes_a_page = layout.groups[group].engine_block_tokens // layout.hash_tokens
        skipped = max(0, skip - index * layout.engine_blocks) // hashes_a_page
        if skipped >= len(chosen):
            continue
        if lessor.slot_of(family, part) >= 0:
            ref = lease.ref(index, part)
            found.append((ref, CopyPart(group, lessor.memory.view(ref.slot), chosen, skipped)))
        elif lessor.expects(family) & layout.group_mask(group):
            return None  # other ranks have it: then this one must not compute with what its pages hold
    return found


def copies_into(draft: Draft, pages: Pages, first: int) -> list[CopyPart]:
    """``pages[i]`` are those of block ``first + i``. Raises ``HandleError`` like ``copies_of``; then the draft, which
    is nobody's any more, is dropped."""
    copies: list[CopyPart] = []
    try:
        copies += _copies_into(draft, pages, first)
    finally:
        if not copies:
            draft.drop()
    return copies


def _copies_into(draft: Draft, pages: Pages, first: int) -> list[CopyPart]:
    blocks, layout = draft.blocks, draft.blocks.chain.namespace.layout
    copies = []
    for i, position in enumerate(blocks.positions):
        for part in blocks.parts:
            group = layout.parts[part].group
            chosen = _chosen("offload", position, pages[position - first], group)
            if len(chosen) != layout.pages_of(group):
                raise HandleError(
                    f"block {position}, layer group {layout.groups[group].name!r}: {len(chosen)} pages "
                    f"given, a block has {layout.pages_of(group)}"
                )
            copies.append(CopyPart(group, draft.view(i, part), chosen))
    return copies


def _chosen(verb: str, position: int, pages: Sequence[Sequence[int]], group: int) -> tuple[int, ...]:
    """The pages that were given for one layer group of a block. Raises ``ArgumentError``."""
    try:
        return tuple(pages[group])
    except (TypeError, LookupError):
        hint = "its pages, a list for each layer group"
        raise ArgumentError(verb, f"block {position}", pages, hint) from None
