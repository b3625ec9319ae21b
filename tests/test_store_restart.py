"""What a restart finds: whole chains that can be had, whoever opens them and when, and nothing on disk beside them."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.client_support import (
    BLOCK_TOKENS,
    PATIENCE_S,
    Live,
    chain_of,
    full_group,
    held,
    layout_of,
    live,
    loaded,
    prompt,
    put,
    put_all,
    spec_of,
    window_group,
)
from tests.nvme_support import CLOCK, check_names, make_tier
from tests.valkey_server import within
from tierkv.clock import Deadline
from tierkv.ids import BlockKey
from tierkv.keys import Chain
from tierkv.layout import Layout
from tierkv.tier import Presence
from tierkv.units import KIB, MIB


def key_of(chain: Chain, position: int, part: int = 0) -> BlockKey:
    return chain.namespace.block_key(chain.hashes[position], part)


def on_disk(rig: Live) -> int:
    """Blocks (parts) that the disk holds."""
    return rig.tiers["nvme"].usage().blocks


def delete_behind_its_back(path: Path, keys: list[BlockKey]) -> None:
    """As if these frames had been lost while no store was running."""
    tier = make_tier(path, 2 * MIB)
    tier.start()
    tier.delete(keys)
    tier.close(Deadline(CLOCK, 5.0))


def test_d23_flushed_chains_are_found_again_without_being_written_again(tmp_path: Path) -> None:
    with live(nvme=tmp_path) as rig:
        space = rig.namespace()
        for seed in range(2):
            put_all(rig.client, chain_of(space, 4, seed))
        rig.flush("nvme")
    for _ in range(2):
        with live(nvme=tmp_path) as rig:
            assert on_disk(rig) == 8
            space = rig.namespace()
            for seed in range(2):
                chain = chain_of(space, 4, seed)
                assert rig.client.match(chain).tiers == {"host": 0, "nvme": 4}
                assert loaded(rig.client, chain) == 4
            assert rig.count("written_blocks_total", "nvme", "done") == 0
            assert rig.count("read_blocks_total", "nvme", "done") == 8
            assert [event.kind for event in rig.client.events()].count("stored") == 8
    check_names(tmp_path)


def test_d23_a_namespace_that_is_opened_late_finds_its_blocks(tmp_path: Path) -> None:
    with live(16, nvme=tmp_path) as rig:
        for salt in ("a", "b", None):
            put_all(rig.client, chain_of(rig.namespace(salt=salt), 3))
        rig.flush("nvme")
    with live(16, nvme=tmp_path) as rig:
        first = chain_of(rig.namespace(salt="a"), 3)
        assert loaded(rig.client, first) == 3
        assert rig.client.stats()["families"] == 9
        put_all(rig.client, chain_of(rig.namespace(salt="c"), 2))
        rig.flush("nvme")
        assert loaded(rig.client, chain_of(rig.namespace(salt="b"), 3)) == 3
        assert loaded(rig.client, chain_of(rig.namespace(), 3)) == 3


def test_d22_d23_blocks_of_a_namespace_that_nobody_opens_make_room(tmp_path: Path) -> None:
    options = {"segment_bytes": 64 * KIB}
    with live(24, nvme=tmp_path, nvme_bytes=256 * KIB, nvme_options=options) as rig:
        old = rig.namespace(salt="old")
        for seed in range(6):
            put_all(rig.client, chain_of(old, 4, seed))
        rig.client.flush("nvme", timeout_s=5.0).result(PATIENCE_S)
        assert on_disk(rig) > 8
    with live(
        24, nvme=tmp_path, nvme_bytes=256 * KIB, nvme_options=options, nvme_spec={"write": "through"}
    ) as rig:
        new = rig.namespace(salt="new")
        for seed in range(6):
            put_all(rig.client, chain_of(new, 2, seed))
            rig.settle()
        newest = chain_of(new, 2, seed=5)
        assert held(rig.store, newest)["nvme"] == [0, 1]
        rig.client.evict("host")
        assert loaded(rig.client, newest) == 2


@pytest.mark.parametrize("lost", [0, 1, 3])
def test_d23_blocks_behind_a_hole_are_deleted_from_disk(tmp_path: Path, lost: int) -> None:
    with live(nvme=tmp_path) as rig:
        chain, other = chain_of(rig.namespace(), 4), chain_of(rig.namespace(), 2, seed=1)
        put_all(rig.client, chain)
        put_all(rig.client, other)
        rig.flush("nvme")
    delete_behind_its_back(tmp_path, [key_of(chain, lost)])
    with live(nvme=tmp_path) as rig:
        assert on_disk(rig) == lost + 2
        assert rig.client.stats()["families"] == lost + 2
        chain = chain_of(rig.namespace(), 4)
        assert rig.client.match(chain).blocks == lost
        assert loaded(rig.client, chain) == lost
        keys = [key_of(chain, position) for position in range(lost, 4)]
        assert rig.tiers["nvme"].probe(keys, within(5.0)) == [Presence.ABSENT] * (4 - lost)
        assert loaded(rig.client, other_of(rig)) == 2
        put_all(rig.client, chain)
        rig.flush("nvme")
        rig.client.evict("host")
        assert loaded(rig.client, chain) == 4


def other_of(rig: Live) -> Chain:
    return chain_of(rig.namespace(), 2, seed=1)


@pytest.mark.parametrize("part", range(4))
def test_d8_d23_half_a_family_is_deleted_from_disk(tmp_path: Path, part: int) -> None:
    layout = layout_of(tp_size=4)
    with live(16, nvme=tmp_path) as rig:
        chain = chain_of(rig.namespace(layout), 3)
        for rank in range(4):
            put(rig.client, chain, rank=rank)
        rig.flush("nvme")
        assert on_disk(rig) == 12
    delete_behind_its_back(tmp_path, [key_of(chain, 1, part)])
    with live(16, nvme=tmp_path) as rig:
        assert on_disk(rig) == 4
        chain = chain_of(rig.namespace(layout), 3)
        assert loaded(rig.client, chain) == 1
        for rank in range(4):
            put(rig.client, chain, rank=rank)
        rig.flush("nvme")
        rig.client.evict("host")
        assert loaded(rig.client, chain) == 3


def test_d23_groups_windows_ranks_and_large_blocks(tmp_path: Path) -> None:
    group = full_group()
    layout = Layout(
        "test",
        "uint8",
        BLOCK_TOKENS,
        (group, window_group(8 * BLOCK_TOKENS)),
        engine_blocks=4,
        tp_size=2,
    )
    with live(16, block_bytes=16 * KIB, nvme=tmp_path) as rig:
        space = rig.namespace(layout)
        chain = chain_of(space, 3)
        for rank in range(2):
            put(rig.client, chain, count=1, rank=rank, absent=[1])
            put(rig.client, chain, first=1, count=2, rank=rank)
        rig.flush("nvme")
    with live(16, block_bytes=16 * KIB, nvme=tmp_path) as rig:
        chain = chain_of(rig.namespace(layout), 3)
        assert rig.client.match(chain).blocks == 3
        assert loaded(rig.client, chain) == 3
        assert rig.client.match(rig.namespace(layout).chain(prompt(64 * 2 + 1))).blocks == 0, (
            "its window lacks block 0"
        )


def test_d23_a_store_that_remembers_less_forgets_the_rest_on_disk_too(tmp_path: Path) -> None:
    with live(12, nvme=tmp_path) as rig:
        space = rig.namespace()
        for seed in range(3):
            put_all(rig.client, chain_of(space, 4, seed))
        rig.flush("nvme")
    with live(12, nvme=tmp_path, max_families=5) as rig:
        space = rig.namespace()
        found = [rig.client.match(chain_of(space, 4, seed)).blocks for seed in range(3)]
        assert sum(found) == 5 == on_disk(rig)
        assert [loaded(rig.client, chain_of(space, 4, seed)) for seed in range(3)] == found


def test_d23_recovery_none_starts_empty(tmp_path: Path) -> None:
    with live(nvme=tmp_path) as rig:
        put_all(rig.client, chain_of(rig.namespace(), 3))
        rig.flush("nvme")
    with live(nvme=tmp_path, nvme_options={"recovery": "none"}) as rig:
        assert on_disk(rig) == 0
        assert loaded(rig.client, chain_of(rig.namespace(), 3)) == 0
    with live(nvme=tmp_path) as rig:
        assert loaded(rig.client, chain_of(rig.namespace(), 3)) == 0


def test_an_expiry_outlives_the_process(tmp_path: Path) -> None:
    with live(nvme=tmp_path) as rig:
        space = rig.namespace()
        put_all(rig.client, chain_of(space, 2), ttl_s=3600.0)
        put_all(rig.client, chain_of(space, 2, seed=1), ttl_s=60.0)
        rig.flush("nvme")
    with live(nvme=tmp_path) as rig:
        space = rig.namespace()
        assert loaded(rig.client, chain_of(space, 2)) == 2
        assert loaded(rig.client, chain_of(space, 2, seed=1)) == 2
        rig.client.evict("host")
        rig.clock.advance(600.0)
        assert rig.client.match(chain_of(space, 2, seed=1)).blocks == 0
        assert loaded(rig.client, chain_of(space, 2, seed=1)) == 0
        assert loaded(rig.client, chain_of(space, 2)) == 2


WRITER = """
import sys
from tests.client_support import chain_of, live, put_all
from pathlib import Path

with live(32, nvme=Path(sys.argv[1]), nvme_bytes=8 << 20, nvme_spec={"write": "through"}) as rig:
    space = rig.namespace()
    for seed in range(int(sys.argv[2]), 10_000):
        chain = chain_of(space, 3, seed)
        while rig.client.match(chain).tiers["host"] < 3:
            put_all(rig.client, chain) if rig.store.host.free_bytes() or rig.store.catalog.clean_bytes else None
        if seed % 10 == 9:
            rig.settle()
            print(seed, flush=True)
"""


def test_d23_killed_while_it_writes_and_every_chain_is_whole_from_its_head(tmp_path: Path) -> None:
    first = 0
    for kill_after in (1, 2, 4):
        process = subprocess.Popen(
            [sys.executable, "-c", WRITER, str(tmp_path), str(first)],
            stdout=subprocess.PIPE,
            text=True,
            cwd=Path(__file__).parent.parent,
            env={**os.environ, "PYTHONPATH": str(Path(__file__).parent.parent)},
        )
        assert process.stdout is not None
        with process, process.stdout as told:
            for _ in range(kill_after):
                last = int(told.readline())
            process.send_signal(signal.SIGKILL)
        with live(8, nvme=tmp_path, nvme_bytes=8 * MIB) as rig:
            space = rig.namespace()
            chains = [chain_of(space, 3, seed) for seed in range(last + 1000)]  # it wrote on until it died
            there = [rig.client.match(chain).blocks for chain in chains]
            assert there[first : last + 1] == [3] * (last + 1 - first), "what was settled is there"
            assert sum(there) == on_disk(rig), "nothing lies on disk that cannot be had"
            for chain, blocks in zip(chains, there, strict=True):
                assert loaded(rig.client, chain) == blocks
            rig.client.clear().result(PATIENCE_S)
        first = last + 1


def test_a_directory_of_another_store_that_runs_is_refused(tmp_path: Path) -> None:
    from tierkv.errors import DirectoryInUse

    with live(nvme=tmp_path) as rig:
        put_all(rig.client, chain_of(rig.namespace(), 2))
        with pytest.raises(DirectoryInUse, match=str(os.getpid())), live(nvme=tmp_path):
            pass
        rig.flush("nvme")
        rig.client.evict("host")
        assert loaded(rig.client, chain_of(rig.namespace(), 2)) == 2


def test_another_layout_finds_nothing_of_the_first(tmp_path: Path) -> None:
    with live(nvme=tmp_path) as rig:
        put_all(rig.client, chain_of(rig.namespace(), 2))
        rig.flush("nvme")
    with live(nvme=tmp_path) as rig:
        other = rig.client.open_namespace(spec_of(layout_of(full_group(4096, name="renamed"))))
        assert loaded(rig.client, chain_of(other, 2)) == 0
        assert loaded(rig.client, chain_of(rig.namespace(), 2)) == 2
