"""Little room and many who want it: who leaves, who stays, and nobody waits for ever or reads a stranger's bytes."""

from __future__ import annotations

import random
import threading
import time
from pathlib import Path

import pytest

from tests.client_support import (
    PATIENCE_S,
    Gate,
    Live,
    audit,
    chain_of,
    check_lease,
    full_group,
    held,
    layout_of,
    live,
    loaded,
    poison_free_slots,
    prompt,
    put,
    put_all,
)
from tests.nvme_support import disk_bytes
from tierkv.index import NO_SLOT
from tierkv.keys import Chain
from tierkv.testing.threads import run_together, switching_every
from tierkv.units import KIB, MIB


def assert_no_orphans(rig: Live) -> None:
    """Over the union of the tiers that tierkv evicts from, every block has its parent."""
    index = rig.store.catalog.index
    with rig.store.catalog.lock:
        own = [index.residency[tier.number] for tier in rig.store.catalog.tiers if tier.policy is not None]
        there = {i for i in range(1, index._next) if index.hashes[i] is not None and any(c[i] for c in own)}
        for family in there:
            parent = index.parent[family]
            assert not index.depth[family] or parent in there, (
                f"block at depth {index.depth[family]} is unreachable"
            )


# ---- D30


@pytest.mark.parametrize("chunks", [[3], [1, 1, 1], [2, 1], [1, 2]])
def test_d30_the_deepest_block_of_a_chain_leaves_first(chunks: list[int]) -> None:
    with live(3) as rig:
        space = rig.namespace()
        chain = chain_of(space, 3)
        first = 0
        for count in chunks:
            put(rig.client, chain, first=first, count=count)
            first += count
        put_all(rig.client, chain_of(space, 1, seed=1))
        assert rig.client.match(chain).blocks == 2
        assert loaded(rig.client, chain) == 2
        put_all(rig.client, chain_of(space, 1, seed=2))
        assert rig.client.match(chain).blocks in (1, 2)
        assert_no_orphans(rig)


def test_d30_a_branch_keeps_what_both_need() -> None:
    """Two prompts share two blocks; the shared ones outlive the tails of both."""
    with live(6) as rig:
        space = rig.namespace()
        shared = prompt(32).tolist()
        left = space.chain(shared + prompt(32, seed=1).tolist())
        right = space.chain(shared + prompt(32, seed=2).tolist())
        put_all(rig.client, left)
        put_all(rig.client, right)
        put_all(rig.client, chain_of(space, 3, seed=3))
        counts = sorted((rig.client.match(left).blocks, rig.client.match(right).blocks))
        assert counts == [2, 3]
        assert_no_orphans(rig)


@pytest.mark.parametrize("seed", range(4))
def test_d30_random_work_leaves_no_block_without_its_parent(tmp_path: Path, seed: int) -> None:
    dice = random.Random(seed)
    options = {"segment_bytes": 32 * KIB}
    with live(
        6, nvme=tmp_path, nvme_bytes=160 * KIB, nvme_options=options, nvme_spec={"write": "through"}
    ) as rig:
        space = rig.namespace()
        shared = prompt(32).tolist()
        chains = [space.chain(shared[: 16 * (n % 3)] + prompt(64, seed=n).tolist()) for n in range(12)]
        for turn in range(150):
            chain = dice.choice(chains)
            last = dice.randint(1, len(chain))
            match dice.randrange(20):
                case 0:
                    rig.client.evict(dice.choice(["host", "nvme"]))
                case number if number < 12:
                    put(rig.client, chain, count=last)
                case _:
                    loaded(rig.client, chain)
            if turn % 10 == 0:
                rig.settle()
                assert_no_orphans(rig)
        rig.settle()
        assert_no_orphans(rig)
        assert rig.count("evicted_blocks_total", "nvme", "capacity") > 0
        assert disk_bytes(tmp_path) <= 160 * KIB


# ---- D22


def test_d22_a_disk_smaller_than_the_work_evicts_leaves_first_and_keeps_its_limit(tmp_path: Path) -> None:
    options = {"segment_bytes": 64 * KIB}
    with live(
        4, nvme=tmp_path, nvme_bytes=256 * KIB, nvme_options=options, nvme_spec={"write": "through"}
    ) as rig:
        space = rig.namespace()
        chains = [chain_of(space, 4, seed) for seed in range(20)]
        for chain in chains:
            put_all(rig.client, chain)
            rig.settle()
            assert disk_bytes(tmp_path) <= 256 * KIB
        there = [held(rig.store, chain)["nvme"] for chain in chains]
        assert all(blocks == list(range(len(blocks))) for blocks in there), there
        assert 12 < sum(map(len, there)) < 80
        assert there[-1] == [0, 1, 2, 3], "the newest are there"
        assert there[0] == [], "the oldest have gone"
        for chain, blocks in zip(chains, there, strict=True):
            assert loaded(rig.client, chain) >= len(blocks) - 1
        assert rig.tiers["nvme"].usage().blocks == sum(
            len(held(rig.store, chain)["nvme"]) for chain in chains
        )
        assert rig.count("dropped_blocks_total", "nvme", "capacity") > 0


def test_d22_what_an_earlier_run_left_counts(tmp_path: Path) -> None:
    """A smaller capacity after a restart; then one more block."""
    options = {"segment_bytes": 64 * KIB}
    with live(48, nvme=tmp_path, nvme_bytes=MIB, nvme_options=options) as rig:
        space = rig.namespace()
        for seed in range(12):
            put_all(rig.client, chain_of(space, 4, seed))
            rig.flush("nvme")
    with live(
        8, nvme=tmp_path, nvme_bytes=256 * KIB, nvme_options=options, nvme_spec={"write": "through"}
    ) as rig:
        assert disk_bytes(tmp_path) <= 256 * KIB
        space = rig.namespace()
        found = sum(rig.client.match(chain_of(space, 4, seed)).blocks for seed in range(12))
        assert 0 < found < 48
        assert rig.tiers["nvme"].usage().blocks == found, "what can never be matched is not kept"
        put_all(rig.client, chain_of(space, 1, seed=99))
        rig.settle()
        assert disk_bytes(tmp_path) <= 256 * KIB
        assert held(rig.store, chain_of(space, 1, seed=99))["nvme"] == [0]
        assert_no_orphans(rig)


# ---- D16


def test_d16_a_load_into_an_arena_full_of_leases_gives_what_it_has_and_does_not_wait(tmp_path: Path) -> None:
    with live(4, nvme=tmp_path) as rig:
        space = rig.namespace()
        cold, hot = chain_of(space, 3), chain_of(space, 4, seed=1)
        put_all(rig.client, cold)
        rig.flush("nvme")
        rig.client.evict("host")
        put_all(rig.client, hot)
        with rig.client.load(hot) as lease:
            start_s = time.monotonic()
            assert loaded(rig.client, cold, timeout_s=600.0) == 0
            assert time.monotonic() - start_s < PATIENCE_S
            assert rig.count("load_cut_total", "no_room") == 3
            check_lease(rig.store, lease)
        assert loaded(rig.client, cold) == 3


def test_d16_a_pool_of_three_loads_three_blocks_of_ten(tmp_path: Path) -> None:
    with live(10, nvme=tmp_path) as rig:
        put_all(rig.client, chain_of(rig.namespace(), 10))
        rig.flush("nvme")
    with live(3, nvme=tmp_path) as rig:
        chain = chain_of(rig.namespace(), 10)
        assert rig.client.match(chain).blocks == 10
        assert loaded(rig.client, chain, timeout_s=600.0) == 3
        assert loaded(rig.client, chain, timeout_s=600.0) == 3
        match = rig.client.prefetch(chain, timeout_s=600.0).result(PATIENCE_S)
        assert match.tiers == {"host": 3, "nvme": 10}


def test_d16_ram_smaller_than_the_disks_working_set(tmp_path: Path) -> None:
    with live(32, nvme=tmp_path) as rig:
        space = rig.namespace()
        for seed in range(8):
            put_all(rig.client, chain_of(space, 4, seed))
        rig.flush("nvme")
    with live(4, nvme=tmp_path) as rig:
        space = rig.namespace()
        for turn in range(24):
            assert loaded(rig.client, chain_of(space, 4, turn % 8)) == 4
        assert rig.count("read_blocks_total", "nvme", "done") == 24 * 4


def test_d16_a_second_size_gets_room_by_emptying_the_coldest_region() -> None:
    """Four regions of four small slots, all taken; then a namespace with blocks as large as a region."""
    with live(16, region_blocks=4) as rig:
        small, large = rig.namespace(), rig.namespace(layout_of(full_group(16 * KIB)))
        chains = [chain_of(small, 4, seed) for seed in range(4)]
        for chain in chains:
            put_all(rig.client, chain)
        loaded(rig.client, chains[0])
        put_all(rig.client, chain_of(large, 1))
        assert loaded(rig.client, chain_of(large, 1)) == 1
        assert [rig.client.match(chain).blocks for chain in chains] == [4, 0, 4, 4]
        put_all(rig.client, chain_of(large, 2, seed=1))
        assert loaded(rig.client, chain_of(large, 2, seed=1)) == 2
        assert rig.client.match(chain_of(large, 1)).blocks == 1
        assert rig.client.match(chains[0]).blocks in (0, 4)
        assert_no_orphans(rig)


def test_d16_a_region_with_a_leased_block_is_left_alone() -> None:
    with live(8, region_blocks=4) as rig:
        small, large = rig.namespace(), rig.namespace(layout_of(full_group(16 * KIB)))
        first, second = chain_of(small, 4), chain_of(small, 4, seed=1)
        put_all(rig.client, first)
        put_all(rig.client, second)
        with rig.client.load(chain_of(small, 1)) as lease:
            loaded(rig.client, second)  # so that the leased one's region is the coldest
            put_all(rig.client, chain_of(large, 1))
            poison_free_slots(rig.store)
            check_lease(rig.store, lease)
            assert loaded(rig.client, chain_of(large, 1)) == 1
            assert put(rig.client, chain_of(large, 1, seed=1)).stored == 1, "in the place of the large one"
            check_lease(rig.store, lease)


def test_d16_sizes_take_turns_for_a_long_time() -> None:
    dice = random.Random(5)
    with live(16, region_blocks=4) as rig:
        spaces = [rig.namespace(layout_of(full_group(size))) for size in (4096, 8192, 12_288, 16_384)]
        for turn in range(400):
            space = dice.choice(spaces)
            chain = chain_of(space, dice.randint(1, 3), seed=dice.randrange(8))
            put(rig.client, chain)
            if turn % 3 == 0:
                loaded(rig.client, chain_of(space, 3, seed=dice.randrange(8)))
        audit(rig.store)
        assert_no_orphans(rig)
        rig.client.clear().result(PATIENCE_S)
        largest = chain_of(spaces[-1], 4, seed=99)
        put_all(rig.client, largest)
        assert loaded(rig.client, largest) == 4


# ---- D11


def test_d11_many_threads_a_small_arena_and_no_foreign_byte(tmp_path: Path) -> None:
    """Eight slots and sixteen threads that store, load from disk and hold leases while others want their place."""
    with live(8, nvme=tmp_path, nvme_spec={"write": "through"}) as rig:
        space = rig.namespace()

        def work(seed: int) -> None:
            dice = random.Random(seed)
            for _ in range(25):
                chain = chain_of(space, dice.randint(1, 4), seed=dice.randrange(6))
                if dice.random() < 0.5:
                    put(rig.client, chain)
                with rig.client.load(chain, timeout_s=PATIENCE_S) as lease:
                    check_lease(rig.store, lease)
                    time.sleep(0)  # lets others run; what is leased must be the same afterwards
                    poison_free_slots(rig.store)
                    check_lease(rig.store, lease)

        run_together([lambda seed=seed: work(seed) for seed in range(16)], 2 * PATIENCE_S)  # type: ignore[misc]
        rig.settle()
        assert rig.store.counters.sum("corrupt_blocks_total") == 0
        assert rig.client.stats()["leases"] == 0
        assert_no_orphans(rig)


def test_d11_the_source_of_a_write_is_no_victim(tmp_path: Path) -> None:
    """Blocks are on their way to disk while their slots are wanted for others."""
    with live(4, nvme=tmp_path) as rig:
        space = rig.namespace()
        chain = chain_of(space, 3)
        put_all(rig.client, chain)
        gate = rig.tiers["nvme"].before = Gate("put_from")
        flush = rig.client.flush("nvme")
        gate.reached()
        stored = put(rig.client, chain_of(space, 3, seed=1))
        assert (stored.stored, stored.dropped) == (1, {"no_room": 2})
        poison_free_slots(rig.store)
        gate.open()
        assert flush.result(PATIENCE_S).written == 3
        rig.client.evict("host")
        assert loaded(rig.client, chain) == 3


def test_d11_the_slot_of_a_read_belongs_to_it_until_it_is_over(tmp_path: Path) -> None:
    """A load gives up at its deadline while its read is still running: nobody gets those slots before it has ended."""
    with live(4, nvme=tmp_path) as rig:
        space = rig.namespace()
        chain = chain_of(space, 3)
        put_all(rig.client, chain)
        rig.flush("nvme")
        rig.client.evict("host")
        gate = rig.tiers["nvme"].before = Gate("get_into")
        assert loaded(rig.client, chain, timeout_s=0.05) == 0
        assert gate.waiting
        stored = put(rig.client, chain_of(space, 3, seed=1))
        assert stored.stored == 1
        assert rig.store.host.free_bytes() == 0
        gate.open()
        rig.settle()
        assert rig.store.host.free_bytes() + len(held(rig.store, chain)["host"]) * 4096 == 3 * 4096
        assert loaded(rig.client, chain_of(space, 1, seed=1)) == 1
        put_all(rig.client, chain_of(space, 3, seed=2))
        assert loaded(rig.client, chain_of(space, 3, seed=2)) == 3


def test_d11_a_load_does_not_evict_what_it_is_about_to_use(tmp_path: Path) -> None:
    """Half of the run is in host RAM, the other half must come from disk, and host RAM is full."""
    with live(4, nvme=tmp_path) as rig:
        space = rig.namespace()
        chain = chain_of(space, 4)
        put_all(rig.client, chain)
        rig.flush("nvme")
        rig.client.evict("host")
        put(rig.client, chain, count=2)
        put_all(rig.client, chain_of(space, 2, seed=1))
        assert held(rig.store, chain)["host"] == [0, 1]
        assert loaded(rig.client, chain) == 4
        assert rig.client.match(chain_of(space, 2, seed=1)).blocks == 0


def test_leases_of_a_window_hold_only_what_is_needed() -> None:
    """A lease over a run keeps its slots; what is beside it may go."""
    with live(4) as rig:
        space = rig.namespace()
        chain = chain_of(space, 4)
        put_all(rig.client, chain)
        short: Chain = chain_of(space, 2)
        with rig.client.load(short) as lease:
            assert put(rig.client, chain_of(space, 4, seed=1)).stored == 2
            assert len(lease) == 2
            check_lease(rig.store, lease)
            families = [rig.store.catalog.slot_of(family, 0) for family in lease.families]
            assert NO_SLOT not in families
        assert loaded(rig.client, chain) == 2


@pytest.mark.parametrize("life", range(24))
def test_threads_that_wait_for_one_block_all_get_it(tmp_path: Path, life: int) -> None:
    """However they take turns, and although host RAM has room for these blocks once."""
    with switching_every((1e-6, 2e-5, 1e-3)[life % 3]), live(4, nvme=tmp_path) as rig:
        chain = chain_of(rig.namespace(), 4)
        put_all(rig.client, chain)
        rig.flush("nvme")
        rig.client.evict("host")
        gate = rig.tiers["nvme"].before = Gate("get_into")
        found: list[int] = []

        def load() -> None:
            with rig.client.load(chain, timeout_s=PATIENCE_S) as lease:
                check_lease(rig.store, lease)
                found.append(len(lease))

        threads = [threading.Thread(target=load) for _ in range(12)]
        for thread in threads:
            thread.start()
        gate.reached()
        gate.open()
        for thread in threads:
            thread.join(PATIENCE_S)
        assert found == [4] * 12
        assert rig.count("read_blocks_total", "nvme", "done") == 4
