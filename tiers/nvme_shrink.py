"""Which segments a smaller capacity gives up first: those that take the fewest blocks with them.

A block is of no use without those before it in its chain. So a segment costs the blocks in it and all that hang from
them in other segments; the segment with the heads of many chains goes last, however few blocks it holds.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from tierkv.frame import FrameHeader
from tierkv.ids import BlockHash, NamespaceDigest

_Name = tuple[NamespaceDigest, BlockHash]


def blocks_lost_with(placed: Iterable[tuple[FrameHeader, int]]) -> Mapping[int, int]:
    """``placed``: the header of each block and the number of its segment. Returns for each segment how many blocks
    could not be reached any more without it, those of several parts counted once for each part; segments that hold none
    are left out. Chains that leave a segment and come back to it count more than they should."""
    blocks = sorted(placed, key=lambda block: -block[0].depth)
    places: dict[_Name, set[int]] = {}
    for header, segment in blocks:
        places.setdefault((header.namespace, header.block_hash), set()).add(segment)
    below: dict[_Name, int] = {}
    lost: dict[int, int] = {}
    for header, segment in blocks:  # the deepest first: what hangs from a block is known when it is its turn
        lost[segment] = lost.get(segment, 0) + 1
        name = header.namespace, header.block_hash
        hanging = 1 + below.pop(name, 0)
        if header.parent_hash is None:
            continue
        parent = header.namespace, header.parent_hash
        below[parent] = below.get(parent, 0) + hanging
        for other in places.get(parent, set()) - {segment}:
            lost[other] = lost.get(other, 0) + hanging
    return lost
