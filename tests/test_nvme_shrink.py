"""A smaller capacity after a restart costs tails of chains, not their heads."""

from __future__ import annotations

from pathlib import Path

from tests.client_support import chain_of, live, loaded, put_all
from tests.nvme_support import disk_bytes
from tierkv.testing.payloads import header_of
from tierkv.tiers.nvme_shrink import blocks_lost_with
from tierkv.units import KIB, MIB

PROMPTS = 16
BLOCKS = 12


def header(depth: int, *, chain: int = 0) -> object:
    name = bytes([chain]) * 32
    hashes = [bytes([chain, depth + 1 - back]) + name[2:] for back in range(2)]
    parent = hashes[1] if depth else None
    return header_of(b"k" * 32, b"x" * 16, block_hash=hashes[0], parent_hash=parent, depth=depth)  # type: ignore[arg-type]


def test_a_segment_costs_what_hangs_from_it() -> None:
    placed = [
        (header(0), 1),  # the head of a chain of four
        (header(1), 2),
        (header(2), 2),
        (header(3), 3),
        (header(0, chain=1), 3),  # a chain of one
    ]
    assert blocks_lost_with(placed) == {1: 4, 2: 3, 3: 2}  # type: ignore[arg-type]


def test_d22_d23_a_smaller_capacity_gives_up_tails(tmp_path: Path) -> None:
    """Prompts are stored block by block, so the heads of all of them lie in the segments that were filled first."""
    with live(256, nvme=tmp_path, nvme_bytes=2 * MIB, nvme_options={"segment_bytes": 100 * KIB}) as rig:
        space = rig.namespace()
        for blocks in range(1, BLOCKS + 1):
            for prompt in range(PROMPTS):
                put_all(rig.client, chain_of(space, blocks, prompt))
            rig.flush("nvme")
    with live(256, nvme=tmp_path, nvme_bytes=MIB, nvme_options={"segment_bytes": 100 * KIB}) as rig:
        assert disk_bytes(tmp_path) <= MIB
        space = rig.namespace()
        kept = [loaded(rig.client, chain_of(space, BLOCKS, prompt)) for prompt in range(PROMPTS)]
        here = rig.store.edges[1].tier.usage().blocks
    assert sum(kept) == here, "a start forgets what cannot be reached"
    assert here > 80, f"{kept} blocks of each prompt are left: heads of chains were given up"
