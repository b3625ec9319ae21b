"""match, prefetch and load: what is found, how much of it counts, and that nothing is held that nobody asked for."""

from __future__ import annotations

import asyncio
import random
from concurrent.futures import CancelledError
from pathlib import Path

import numpy as np
import pytest

from tests.client_support import (
    BLOCK_TOKENS,
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
    spec_of,
    window_group,
)
from tests.valkey_server import eventually
from tierkv.errors import ConfigError, HandleError, IdentityError, LayoutError
from tierkv.keys import Weights
from tierkv.layout import GroupKind, LayerGroup, Layout
from tierkv.testing.threads import run_together

pytestmark = pytest.mark.usefixtures("face")

BS = BLOCK_TOKENS
LENGTHS = [0, 1, BS - 1, BS, BS + 1, 4 * BS - 1, 4 * BS, 4 * BS + 1]


# ---- D7: how many tokens


@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize("as_list", [False, True])
def test_d7_match_and_lease_never_cover_the_last_token(length: int, as_list: bool) -> None:
    with live() as rig:
        tokens = prompt(length).tolist() if as_list else prompt(length)
        chain = rig.namespace().chain(tokens)
        assert len(chain) == length // BS
        assert rig.client.match(chain).tokens == 0
        put_all(rig.client, chain)
        wanted = max(0, min(length // BS * BS, length - 1))
        match = rig.client.match(chain)
        assert (match.tokens, match.blocks) == (wanted, length // BS if wanted else 0)
        with rig.client.load(chain) as lease:
            assert lease.tokens == wanted
            assert len(lease) == length // BS
            check_lease(rig.store, lease)


@pytest.mark.parametrize("cached", [0, 1, 3])
def test_d7_what_the_engine_has_itself_is_no_hit(cached: int) -> None:
    with live() as rig:
        space = rig.namespace()
        chain = chain_of(space, 4)
        put(rig.client, chain, count=cached)
        covered = cached * BS
        for local in (0, covered - 1, covered, covered + 1, 10 * BS):
            if local < 0:
                continue
            match = rig.client.match(chain, local_computed=local)
            hit = covered > local
            assert match.tokens == (covered if hit else 0)
            assert match.blocks == (cached if hit else 0)
            assert match.tiers == {"host": cached if hit else 0}
            assert rig.client.prefetch(chain, local_computed=local).result(PATIENCE_S) == match


def test_d7_no_tokens_at_all_is_an_error_of_the_caller() -> None:
    with live() as rig:
        space = rig.namespace()
        with pytest.raises(IdentityError, match="either tokens or engine_hashes"):
            space.chain(None)


def test_match_stops_at_the_first_block_that_is_missing() -> None:
    with live() as rig:
        space = rig.namespace()
        chain = chain_of(space, 5)
        put(rig.client, chain, count=3)
        fork = space.chain(np.concatenate([prompt(2 * BS), prompt(3 * BS, seed=7)]))
        assert rig.client.match(chain).blocks == 3
        assert rig.client.match(fork).blocks == 2
        assert rig.client.match(chain_of(space, 5, seed=1)).blocks == 0


def test_match_asks_the_index_alone_and_counts_each_tier(tmp_path: Path) -> None:
    with live(nvme=tmp_path, valkey="embedded") as rig:
        chain = chain_of(rig.namespace(), 3)
        put_all(rig.client, chain)
        rig.flush("nvme")
        rig.client.evict("host")
        put(rig.client, chain, count=1)
        match = rig.client.match(chain)
        assert match.blocks == 3
        assert match.tiers == {"host": 1, "nvme": 3, "valkey": 0}
        assert rig.count("probed_blocks_total", "valkey") == 0


def test_engine_hashes_and_blocks_of_several_engine_blocks() -> None:
    """n = 4: only whole groups of four engine blocks count, and a block is named by its last engine hash."""
    group = LayerGroup("full", GroupKind.FULL, 2, 1024, BS)
    with live(block_bytes=8192) as rig:
        space = rig.namespace(
            Layout("test", "bf16", BS, (group,), engine_blocks=4), hash_scheme="test-sha256"
        )
        hashes = [bytes([i]) * 32 for i in range(11)]
        chain = space.chain(engine_hashes=hashes, num_tokens=11 * BS + 3)
        assert len(chain) == 2
        put_all(rig.client, chain)
        assert rig.client.match(chain).tokens == 8 * BS
        shorter = space.chain(engine_hashes=hashes[:7])
        assert rig.client.match(shorter).tokens == 4 * BS
        other = space.chain(engine_hashes=[*hashes[:3], b"x" * 32, *hashes[4:]])
        assert rig.client.match(other).tokens == 0
        assert loaded(rig.client, chain) == 2


# ---- D8: all shards or nothing


@pytest.mark.parametrize("lacking", [0, 1, 2, 3])
def test_d8_a_block_counts_only_with_the_parts_of_all_ranks(lacking: int) -> None:
    with live(32) as rig:
        space = rig.namespace(layout_of(tp_size=4))
        chain = chain_of(space, 4)
        for rank in (2, 0, 3, 1):
            put(rig.client, chain, count=2 if rank == lacking else 4, rank=rank)
        assert rig.client.match(chain).blocks == 2
        assert loaded(rig.client, chain) == 2
        put(rig.client, chain, rank=lacking)
        assert loaded(rig.client, chain) == 4


def test_d8_a_block_is_an_event_when_its_last_part_is_there_and_not_before() -> None:
    with live(32) as rig:
        space = rig.namespace(layout_of(full_group(), full_group(name="latent", replicated=True), tp_size=4))
        chain = chain_of(space, 1)
        for rank in range(4):
            assert [event.kind for event in rig.client.events()] == []
            assert rig.client.match(chain).blocks == 0
            put(rig.client, chain, rank=rank)
        assert [event.kind for event in rig.client.events()] == ["arrived", "stored"]
        assert loaded(rig.client, chain) == 1
        assert rig.store.host.usage().used_bytes == 5 * 4096, "the latent that all ranks share is stored once"


@pytest.mark.parametrize("tier", ["nvme", "valkey"])
def test_d8_a_shard_that_is_lost_in_a_tier_cuts_the_run_for_all_ranks(tmp_path: Path, tier: str) -> None:
    with live(16, nvme=tmp_path, valkey="embedded") as rig:
        space = rig.namespace(layout_of(tp_size=4))
        chain = chain_of(space, 4)
        for rank in range(4):
            put(rig.client, chain, rank=rank)
        rig.flush(tier)
        rig.client.evict("host")
        key = chain.namespace.block_key(chain.hashes[2], space.namespace.layout.part_index(0, 3))
        rig.tiers[tier].tier.delete([key])
        assert loaded(rig.client, chain) == 2
        rig.settle()
        assert rig.client.match(chain).blocks == 2
        for rank in range(4):
            put(rig.client, chain, rank=rank)
        assert loaded(rig.client, chain) == 4


def test_d8_ranks_of_another_host_are_not_waited_for() -> None:
    with live(32) as rig:
        spec = spec_of(layout_of(tp_size=4))
        space = rig.client.open_namespace(spec, ranks=(2, 3))
        chain = chain_of(space, 2)
        put(rig.client, chain, rank=2)
        assert rig.client.match(chain).blocks == 0
        put(rig.client, chain, rank=3)
        assert rig.client.match(chain).blocks == 2


def longest_usable(present: list[list[bool]], needs: list[int | None]) -> int:
    """By brute force: the largest n that every group can go on from. ``present[group][block]``."""
    blocks = len(present[0])
    for n in range(blocks, -1, -1):
        tails = [range(0 if need is None else max(0, n - need), n) for need in needs]
        if all(present[group][i] for group, tail in enumerate(tails) for i in tail):
            return n
    raise AssertionError("0 always holds")


@pytest.mark.parametrize(
    ("windows", "needs"), [((2 * BS,), [None, 2]), ((20,), [None, 2]), ((1, 3 * BS), [None, 1, 3])]
)
def test_d8_windows_need_only_their_trailing_part(windows: tuple[int, ...], needs: list[int | None]) -> None:
    """Random blocks lack the part of a window group; the run is the one that trying all lengths finds."""
    groups = [full_group(), *(window_group(size, name=f"w{size}") for size in windows)]
    with live(12 * len(groups)) as rig:
        space = rig.namespace(layout_of(*groups))
        seen = set()
        for seed in range(60):
            dice = random.Random(seed)
            chain = chain_of(space, 10, seed)
            stored = dice.randint(0, 10)
            present = [[i < stored for i in range(10)] for _ in groups]
            for i in range(stored):
                absent = [group for group in range(1, len(groups)) if dice.random() < 0.3]
                for group in absent:
                    present[group][i] = False
                put(rig.client, chain, first=i, count=1, absent=absent)
            wanted = longest_usable(present, needs)
            seen.add(wanted)
            assert rig.client.match(chain).blocks == wanted, (seed, present)
            assert loaded(rig.client, chain) == wanted
            rig.client.clear().result(PATIENCE_S)
        assert len(seen) > 5, "the cases are all alike"


def test_d8_full_attention_cannot_be_absent() -> None:
    with live() as rig:
        space = rig.namespace(layout_of(full_group(), window_group(BS)))
        chain = chain_of(space, 1)
        with pytest.raises(LayoutError, match="full attention needs every block"):
            put(rig.client, chain, absent=[0])


@pytest.mark.parametrize(("length", "wanted"), [(BS, 0), (BS + 1, 1), (2 * BS, 1), (3 * BS + 5, 3)])
def test_d7_a_state_stands_at_a_blocks_end_and_cannot_be_taken_back(length: int, wanted: int) -> None:
    state = LayerGroup("state", GroupKind.STATE, 1, 4096, BS)
    with live() as rig:
        chain = rig.namespace(layout_of(full_group(), state)).chain(prompt(length))
        put_all(rig.client, chain)
        assert rig.client.match(chain).tokens == wanted * BS
        with rig.client.load(chain) as lease:
            assert len(lease) == wanted
            assert lease.tokens == wanted * BS
            check_lease(rig.store, lease)


# ---- namespaces


def test_d4_what_another_namespace_stored_is_no_hit() -> None:
    with live(16) as rig:
        spaces = [
            rig.namespace(),
            rig.namespace(weights=Weights("revision", "r2")),
            rig.namespace(weights_epoch=1),
            rig.namespace(salt="x"),
            rig.namespace(salt="y"),
            rig.namespace(engine="other"),
        ]
        put_all(rig.client, chain_of(spaces[0], 2))
        for space in spaces[1:]:
            assert rig.client.match(chain_of(space, 2)).blocks == 0
            assert loaded(rig.client, chain_of(space, 2)) == 0


def test_a_namespace_opened_twice_is_the_same() -> None:
    with live() as rig:
        assert rig.namespace() is rig.namespace()


def test_a_chain_of_a_namespace_that_was_not_opened_is_refused() -> None:
    with live() as rig, live() as other:
        chain = chain_of(other.namespace(), 1)
        with pytest.raises(IdentityError, match="open_namespace"):
            rig.client.match(chain)


def test_d16_blocks_that_fit_no_region_are_refused_when_the_namespace_is_opened() -> None:
    with live(8, region_blocks=2) as rig:
        with pytest.raises(ConfigError, match=r"host\.region.*'8 KiB'.*12 KiB does not fit"):
            rig.namespace(layout_of(full_group(12 * 1024)))
        put_all(rig.client, chain_of(rig.namespace(), 2))


# ---- prefetch and load


@pytest.mark.parametrize("tier", ["nvme", "valkey"])
def test_prefetch_brings_blocks_up_and_holds_nothing(tmp_path: Path, tier: str) -> None:
    with live(nvme=tmp_path, valkey="embedded") as rig:
        chain = chain_of(rig.namespace(), 4)
        put_all(rig.client, chain)
        rig.flush(tier)
        rig.client.evict("host")
        assert held(rig.store, chain)["host"] == []
        poison_free_slots(rig.store)
        match = rig.client.prefetch(chain).result(PATIENCE_S)
        assert (match.blocks, match.tiers["host"]) == (4, 4)
        assert rig.client.stats()["leases"] == 0
        assert rig.store.catalog.leased_families() == 0
        assert loaded(rig.client, chain) == 4


def test_load_gives_what_there_is_up_to_the_first_hole(tmp_path: Path) -> None:
    """Blocks 0 and 1 in both blob tiers, 2 in the colder one, 3 in host RAM alone, 4 nowhere."""
    with live(nvme=tmp_path, valkey="embedded") as rig:
        chain = chain_of(rig.namespace(), 5)
        put(rig.client, chain, count=2)
        rig.flush("nvme")
        put(rig.client, chain, count=3)
        rig.flush("valkey")
        rig.client.evict("host")
        put(rig.client, chain, first=3, count=1)
        assert held(rig.store, chain) == {"host": [3], "nvme": [0, 1], "valkey": [0, 1, 2]}
        assert loaded(rig.client, chain) == 4


def test_load_of_nothing() -> None:
    with live() as rig:
        space = rig.namespace()
        for chain in (space.chain([]), chain_of(space, 3)):
            with rig.client.load(chain) as lease:
                assert (len(lease), lease.tokens) == (0, 0)
        assert rig.client.stats()["leases"] == 0


def test_d15_a_match_or_prefetch_without_a_load_holds_nothing(tmp_path: Path) -> None:
    with live(nvme=tmp_path) as rig:
        chain = chain_of(rig.namespace(), 4)
        put_all(rig.client, chain)
        rig.client.match(chain)
        rig.client.prefetch(chain).result(PATIENCE_S)
        assert rig.client.stats()["leases"] == 0
        audit(rig.store)


def test_concurrent_loads_read_each_block_once(tmp_path: Path) -> None:
    with live(nvme=tmp_path) as rig:
        chain = chain_of(rig.namespace(), 6)
        put_all(rig.client, chain)
        rig.flush("nvme")
        rig.client.evict("host")
        gate = rig.tiers["nvme"].before = Gate("get_into")
        futures = [rig.client.load_async(chain) for _ in range(8)]
        gate.reached()
        gate.open()
        for future in futures:
            with future.result(PATIENCE_S) as lease:
                assert len(lease) == 6
                check_lease(rig.store, lease)
        rig.settle()
        assert rig.count("read_blocks_total", "nvme", "done") == 6


def test_a_load_that_was_cancelled_leaves_no_lease(tmp_path: Path) -> None:
    with live(nvme=tmp_path) as rig:
        chain = chain_of(rig.namespace(), 4)
        put_all(rig.client, chain)
        rig.flush("nvme")
        rig.client.evict("host")
        gate = rig.tiers["nvme"].before = Gate("get_into")
        future = rig.client.load_async(chain)
        gate.reached()
        assert future.cancel()
        gate.open()
        with pytest.raises(CancelledError):
            future.result(PATIENCE_S)
        rig.settle()
        eventually(lambda: rig.client.stats()["leases"] == 0, "the lease is gone")
        assert loaded(rig.client, chain) == 4


def test_verbs_whose_future_was_cancelled_leave_a_store_that_works(tmp_path: Path) -> None:
    """A caller may lose interest in any of them at any time (``asyncio.wait_for`` cancels)."""
    with live(nvme=tmp_path) as rig:
        space = rig.namespace()
        chain = chain_of(space, 4)
        put_all(rig.client, chain)
        rig.flush("nvme")
        rig.client.evict("host")
        for call, begin in (
            ("get_into", lambda: rig.client.prefetch(chain)),
            ("put_from", lambda: rig.client.flush("nvme")),
            ("clear", rig.client.clear),
            ("put_from", lambda: rig.client.sleep(keep=True)),
        ):
            rig.client.wake()
            put_all(rig.client, chain_of(space, 2, seed=9))
            gate = rig.tiers["nvme"].before = Gate(call)
            future = begin()
            gate.reached()
            assert future.cancel()
            gate.open()
            rig.settle()
            eventually(future.done, "the future is done")
        rig.client.wake()
        rig.client.clear().result(PATIENCE_S)
        put_all(rig.client, chain)
        rig.flush("nvme")
        rig.client.evict("host")
        assert loaded(rig.client, chain) == 4


def test_the_verbs_as_coroutines(tmp_path: Path) -> None:
    async def session(rig: Live) -> None:
        space = rig.namespace()
        chain = chain_of(space, 4)
        aio = rig.client.aio
        assert (await aio.put(chain, [b"\1" * 4096] * 4)).stored == 4
        assert (await aio.flush("nvme")).written == 4
        rig.client.evict("host")
        assert (await aio.prefetch(chain)).tiers["host"] == 4
        with await aio.load(chain) as lease:
            assert len(lease) == 4
            assert bytes(lease.view(3)) == b"\1" * 4096
        assert (await aio.clear()).complete
        leases = await asyncio.gather(*(aio.load(chain) for _ in range(5)))
        for lease in leases:
            assert len(lease) == 0
            lease.release()

    with live(nvme=tmp_path) as rig:
        asyncio.run(session(rig))


def test_a_coroutine_that_was_given_up_leaves_no_lease(tmp_path: Path) -> None:
    async def session(rig: Live, gate: Gate) -> None:
        chain = chain_of(rig.namespace(), 4)
        task = asyncio.create_task(rig.client.aio.load(chain))
        await asyncio.to_thread(gate.reached)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        gate.open()
        await asyncio.to_thread(rig.settle)

    with live(nvme=tmp_path) as rig:
        put_all(rig.client, chain_of(rig.namespace(), 4))
        rig.flush("nvme")
        rig.client.evict("host")
        gate = rig.tiers["nvme"].before = Gate("get_into")
        asyncio.run(session(rig, gate))
        eventually(lambda: rig.client.stats()["leases"] == 0, "the lease is gone")


def test_readers_and_writers_in_many_threads_see_right_bytes_or_nothing() -> None:
    with live(16) as rig:
        space = rig.namespace()

        def work(seed: int) -> None:
            dice = random.Random(seed)
            for _ in range(60):
                chain = chain_of(space, dice.randint(1, 6), seed=dice.randrange(6))
                if dice.random() < 0.5:
                    put(rig.client, chain)
                else:
                    with rig.client.load(chain) as lease:
                        check_lease(rig.store, lease)

        run_together([lambda seed=seed: work(seed) for seed in range(4)], PATIENCE_S)  # type: ignore[misc]


def test_a_lease_that_was_released_is_of_no_use() -> None:
    with live() as rig:
        chain = chain_of(rig.namespace(), 1)
        put_all(rig.client, chain)
        lease = rig.client.load(chain)
        lease.release()
        with pytest.raises(HandleError, match="released"):
            lease.view(0)
