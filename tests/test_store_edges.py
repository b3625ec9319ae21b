"""The rules between host RAM and a colder tier: when blocks are written, which, how, and when they come back."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.client_support import (
    PATIENCE_S,
    Gate,
    Live,
    audit,
    chain_of,
    full_group,
    held,
    layout_of,
    live,
    loaded,
    put,
    put_all,
)
from tests.valkey_server import ValkeyServer, eventually, running_server
from tierkv.keys import Chain
from tierkv.policies.break_even import TRY_AGAIN_EVERY, BreakEvenPolicy
from tierkv.policy import BlockInfo, Verdict
from tierkv.tier import Usage
from tierkv.units import KIB, MIB


@pytest.fixture(scope="module")
def server() -> Iterator[ValkeyServer]:
    with running_server() as server:
        yield server


@pytest.fixture(autouse=True)
def _empty_server(server: ValkeyServer) -> None:
    server.do("FLUSHALL")


def ready_bytes(rig: Live) -> int:
    """What a reservation can have at once: free or clean."""
    return rig.store.host.free_bytes() + rig.store.catalog.clean_bytes


# ---- when


def test_through_writes_each_block_when_it_is_stored(tmp_path: Path, server: ValkeyServer) -> None:
    through = {"write": "through"}
    with live(nvme=tmp_path, valkey=server.address, nvme_spec=through, valkey_spec=through) as rig:
        chain = chain_of(rig.namespace(), 5)
        put(rig.client, chain, count=3)
        rig.settle()
        assert held(rig.store, chain) == {"host": [0, 1, 2], "nvme": [0, 1, 2], "valkey": [0, 1, 2]}
        put_all(rig.client, chain)
        rig.settle()
        assert held(rig.store, chain)["nvme"] == held(rig.store, chain)["valkey"] == [0, 1, 2, 3, 4]
        assert rig.count("written_blocks_total", "nvme", "done") == 5
        assert rig.store.catalog.clean_bytes == 5 * 4096
        rig.client.evict("host")
        assert loaded(rig.client, chain) == 5


def test_never_writes_nothing(tmp_path: Path) -> None:
    with live(4, nvme=tmp_path) as rig:
        space = rig.namespace()
        for seed in range(6):
            put_all(rig.client, chain_of(space, 2, seed))
        rig.store.upkeep.make_rounds()
        rig.settle()
        assert rig.count("written_blocks_total", "nvme", "done") == 0
        assert rig.count("dropped_blocks_total", "host", "dropped_clean") == 8
        assert rig.client.match(chain_of(space, 2)).blocks == 0


def test_never_still_reads_what_is_there(tmp_path: Path) -> None:
    with live(4, nvme=tmp_path) as rig:
        put_all(rig.client, chain_of(rig.namespace(), 3))
        rig.flush("nvme")
    with live(4, nvme=tmp_path) as rig:
        assert loaded(rig.client, chain_of(rig.namespace(), 3)) == 3


def test_on_evict_writes_ahead_of_need_and_not_before(tmp_path: Path) -> None:
    """20 blocks of room; cleaning begins when fewer than 5 are free or clean and goes on until 10 are."""
    marks = {"low_watermark": 0.25, "high_watermark": 0.5}
    with live(20, nvme=tmp_path, nvme_spec={"write": "on_evict"}, **marks) as rig:
        space = rig.namespace()
        for seed in range(5):
            put_all(rig.client, chain_of(space, 3, seed))
        rig.store.upkeep.make_rounds()
        rig.settle()
        assert rig.count("written_blocks_total", "nvme", "done") == 0
        put_all(rig.client, chain_of(space, 3, seed=5))
        eventually(lambda: ready_bytes(rig) >= 10 * 4096, "half of host RAM is free or clean")
        rig.settle()
        assert rig.count("dropped_blocks_total", "host", "dropped_dirty") == 0
        assert held(rig.store, chain_of(space, 3))["nvme"] == [0, 1, 2], "the coldest were written"
        assert held(rig.store, chain_of(space, 3, seed=5))["nvme"] == [], "the newest were not"


def test_on_evict_loses_nothing_while_the_tier_keeps_up(tmp_path: Path) -> None:
    with live(
        16, nvme=tmp_path, nvme_spec={"write": "on_evict"}, low_watermark=0.3, high_watermark=0.6
    ) as rig:
        space = rig.namespace()
        chains = [chain_of(space, 3, seed) for seed in range(20)]
        for chain in chains:
            put_all(rig.client, chain)
            rig.settle()
        assert [rig.client.match(chain).blocks for chain in chains] == [3] * 20
        assert [loaded(rig.client, chain) for chain in chains] == [3] * 20
        assert rig.store.counters.sum("dropped_blocks_total") == 0


def test_on_evict_cleans_a_chain_longer_than_any_batch(tmp_path: Path) -> None:
    """600 blocks of one prompt; the cold end of the policy is its tail, the tier must get its head first."""
    marks = {"low_watermark": 0.1, "high_watermark": 0.3}
    with live(640, nvme=tmp_path, nvme_bytes=16 * MIB, nvme_spec={"write": "on_evict"}, **marks) as rig:
        space = rig.namespace()
        chain = chain_of(space, 600)
        put_all(rig.client, chain)
        eventually(lambda: ready_bytes(rig) >= 0.3 * 640 * 4096, "the reaper has cleaned", PATIENCE_S)
        rig.settle()
        there = held(rig.store, chain)["nvme"]
        assert len(there) >= 150
        assert there == list(range(len(there)))
        assert rig.count("admission_rejected_total", "nvme") == 0


def test_d30_a_chain_goes_down_whole_whatever_was_there_before(tmp_path: Path) -> None:
    """The head of a prompt has left the disk while it was in host RAM; its next block takes it along again."""
    with live(8, nvme=tmp_path, nvme_spec={"write": "through"}) as rig:
        chain = chain_of(rig.namespace(), 4)
        put(rig.client, chain, count=2)
        rig.settle()
        assert rig.client.evict("nvme").evicted == 2
        put_all(rig.client, chain)
        rig.settle()
        assert held(rig.store, chain)["nvme"] == [0, 1, 2, 3]
        rig.client.evict("host")
        assert loaded(rig.client, chain) == 4


def test_d16_a_head_that_only_host_ram_has_does_not_hold_its_place_for_ever(tmp_path: Path) -> None:
    """Its children are on disk alone. It cannot be dropped, so it is written, and then it can leave."""
    with live(
        2, nvme=tmp_path, nvme_spec={"write": "on_evict"}, low_watermark=0.1, high_watermark=0.2
    ) as rig:
        space = rig.namespace()
        chain = chain_of(space, 2)
        put_all(rig.client, chain)
        rig.flush("nvme")
        key = chain.namespace.block_key(chain.hashes[0], 0)
        rig.client.evict("host")
        rig.tiers["nvme"].tier.delete([key])
        assert loaded(rig.client, chain) == 0
        rig.client.evict("host")
        put(rig.client, chain, count=1)
        assert held(rig.store, chain) == {"host": [0], "nvme": [1]}
        other = chain_of(space, 2, seed=1)
        eventually(lambda: put(rig.client, other) and rig.client.match(other).blocks == 2, "there is room")
        rig.settle()
        assert rig.client.match(chain).blocks == 2
        assert loaded(rig.client, chain) == 2


# ---- the tier does not keep up


def killed(server: ValkeyServer) -> None:
    server.kill()


def hung(server: ValkeyServer) -> None:
    server.hang()


@pytest.mark.parametrize("write", ["on_evict", "through"])
@pytest.mark.parametrize("fault", [killed, hung])
def test_d17_a_dead_tier_does_not_freeze_host_ram(write: str, fault: object) -> None:
    """Dirty blocks wait for a server that does not answer; new ones come in all the same, the oldest are dropped."""
    spec = {"write": write, "timeout_s": 0.2}
    options = {"connect_timeout_s": 0.2}
    with running_server() as server:
        with live(8, valkey=server.address, valkey_spec=spec, valkey_options=options) as rig:
            space = rig.namespace()
            fault(server)  # type: ignore[operator]
            stored = 0
            for seed in range(40):
                chain = chain_of(space, 2, seed)
                # For want of a clean one the coldest makes way at once, but not while it is being written.
                eventually(lambda chain=chain: put(rig.client, chain).stored == 2, f"chain {seed} is stored")  # type: ignore[misc]
                stored += 2
                assert loaded(rig.client, chain) == 2, "the newest block is there"
            assert rig.count("dropped_blocks_total", "host", "dropped_dirty") == stored - 8
            assert rig.count("written_blocks_total", "valkey", "done") == 0
            breaker = rig.store.edges[1].tier.breaker
            eventually(lambda: breaker.opened_total >= 1, "the server is left alone", PATIENCE_S)
            if fault is hung:
                server.go_on()
                eventually(
                    lambda: rig.count("written_blocks_total", "valkey", "done") > 0 or write == "on_evict",
                    "the server gets blocks again",
                    PATIENCE_S,
                )
        server.close()


def test_blocks_that_wait_for_a_slow_tier_are_dropped_only_for_others(tmp_path: Path) -> None:
    """The disk is stuck in one write: what is being written is safe, what waits may be dropped when room is short."""
    spec = {"write": "through"}
    limits = {"in_flight_bytes": 4096, "queue_bytes": 4096}
    with live(4, nvme=tmp_path, nvme_spec=spec, nvme_options={"workers": 1}, **limits) as rig:
        space = rig.namespace()
        gate = rig.tiers["nvme"].before = Gate("put_from")
        first = chain_of(space, 1)
        put_all(rig.client, first)
        gate.reached()
        for seed in range(1, 8):
            put_all(rig.client, chain_of(space, 1, seed))
        assert rig.client.match(first).blocks == 1, "it is pinned by its write"
        assert rig.count("dropped_blocks_total", "host", "dropped_dirty") == 4
        gate.open()
        rig.settle()
        assert held(rig.store, first)["nvme"] == [0]
        audit(rig.store)


# ---- which


def test_seen_twice_writes_a_block_at_its_second_sighting(tmp_path: Path) -> None:
    with live(4, nvme=tmp_path, nvme_spec={"write": "through", "admission": "seen_twice"}) as rig:
        space = rig.namespace()
        chain = chain_of(space, 3)
        put_all(rig.client, chain)
        rig.settle()
        assert held(rig.store, chain)["nvme"] == []
        assert rig.count("admission_rejected_total", "nvme") == 3
        assert rig.store.catalog.clean_bytes == 3 * 4096, "no tier that wants it lacks it"
        put_all(rig.client, chain_of(space, 4, seed=1))
        rig.settle()
        assert rig.client.match(chain).blocks == 0
        put_all(rig.client, chain)
        rig.settle()
        assert held(rig.store, chain)["nvme"] == [0, 1, 2]
        assert rig.count("written_blocks_total", "nvme", "done") == 3


class NotYet:
    """Admission that says "not now" until it is told."""

    name = "not_yet"

    def __init__(self) -> None:
        self.verdict = Verdict.THROTTLE

    def admit(self, info: BlockInfo, block_hash: bytes, usage: Usage) -> Verdict:
        return self.verdict

    def counters(self) -> dict[str, int]:
        return {}


def test_a_block_that_admission_puts_off_is_written_later(tmp_path: Path) -> None:
    admission = NotYet()
    with live(nvme=tmp_path, nvme_spec={"write": "through", "admission": admission}) as rig:
        chain = chain_of(rig.namespace(), 3)
        put_all(rig.client, chain)
        rig.settle()
        assert held(rig.store, chain)["nvme"] == []
        assert rig.store.catalog.clean_bytes == 0
        admission.verdict = Verdict.ADMIT
        rig.store.upkeep.make_rounds()
        eventually(lambda: held(rig.store, chain)["nvme"] == [0, 1, 2], "they are written")


def test_flush_asks_no_admission(tmp_path: Path) -> None:
    with live(nvme=tmp_path, nvme_spec={"write": "on_evict", "admission": "seen_twice"}) as rig:
        chain = chain_of(rig.namespace(), 3)
        put_all(rig.client, chain)
        rig.flush("nvme")
        assert held(rig.store, chain)["nvme"] == [0, 1, 2]


# ---- how


def zeros(chain: Chain, size: int) -> list[bytes]:
    return [bytes([i + 1]) * size for i in range(len(chain))]


@pytest.mark.parametrize("tier", ["nvme", "valkey"])
def test_lz4_stores_fewer_bytes_and_gives_the_same_ones(
    tmp_path: Path, server: ValkeyServer, tier: str
) -> None:
    codec = {"codec": "lz4"}
    size = 64 * KIB
    layout = layout_of(full_group(size))
    with live(
        8, block_bytes=size, nvme=tmp_path, valkey=server.address, nvme_spec=codec, valkey_spec=codec
    ) as rig:
        chain = chain_of(rig.namespace(layout), 3)
        payloads = zeros(chain, size)
        rig.client.put(chain, payloads)
        random = chain_of(rig.namespace(layout), 2, seed=1)
        put_all(rig.client, random)
        rig.flush(tier)
        written = rig.count("written_bytes_total", tier)
        assert 2 * size < written < 2 * size + 3 * 4096, "what does not shrink is stored as it is"
        rig.client.evict("host")
        with rig.client.load(chain) as lease:
            assert [bytes(lease.view(i)) for i in range(3)] == payloads
        assert loaded(rig.client, random) == 2
        assert rig.count("read_bytes_total", tier) == 5 * size


def test_a_store_without_lz4_reads_what_one_with_it_wrote(tmp_path: Path) -> None:
    size = 64 * KIB
    layout = layout_of(full_group(size))
    with live(4, block_bytes=size, nvme=tmp_path, nvme_spec={"codec": "lz4"}) as rig:
        chain = chain_of(rig.namespace(layout), 2)
        payloads = zeros(chain, size)
        rig.client.put(chain, payloads)
        rig.flush("nvme")
    with live(4, block_bytes=size, nvme=tmp_path) as rig:
        chain = chain_of(rig.namespace(layout), 2)
        with rig.client.load(chain) as lease:
            assert [bytes(lease.view(i)) for i in range(2)] == payloads


# ---- back


def test_break_even_computes_again_what_is_dearer_to_load(tmp_path: Path) -> None:
    """The edge was measured as slow and the engine as quick."""
    with live(8, nvme=tmp_path, promotion=BreakEvenPolicy()) as rig:
        chain = chain_of(rig.namespace(), 4)
        put_all(rig.client, chain)
        rig.flush("nvme")
        rig.client.evict("host")
        rig.client.report_prefill(1000, 1e-6)
        for size in (4096, 10 * MIB):
            rig.store.edges[1].read_speed.observe(size, 100.0)
        for _ in range(TRY_AGAIN_EVERY - 1):
            assert loaded(rig.client, chain) == 0
        assert rig.count("promotion_decisions_total", "nvme", "recompute") == 4 * (TRY_AGAIN_EVERY - 1)
        assert rig.client.match(chain).blocks == 4, "a match does not judge"
        assert loaded(rig.client, chain) == 4, "now and then it is tried all the same"


def test_break_even_loads_what_is_dearer_to_compute(tmp_path: Path) -> None:
    with live(16, nvme=tmp_path, promotion=BreakEvenPolicy()) as rig:
        chain = chain_of(rig.namespace(), 4)
        put_all(rig.client, chain)
        rig.flush("nvme")
        rig.client.evict("host")
        rig.client.report_prefill(1, 100.0)
        assert loaded(rig.client, chain) == 4
        assert rig.count("promotion_decisions_total", "nvme", "promote") == 4


def test_a_run_larger_than_half_of_host_ram_is_served_and_leaves_first(tmp_path: Path) -> None:
    with live(8, nvme=tmp_path, promotion=BreakEvenPolicy()) as rig:
        space = rig.namespace()
        huge, hot = chain_of(space, 5), chain_of(space, 2, seed=1)
        put_all(rig.client, huge)
        rig.flush("nvme")
        rig.client.evict("host")
        put_all(rig.client, hot)
        assert loaded(rig.client, huge) == 5
        assert rig.count("promotion_decisions_total", "nvme", "serve") == 5
        put_all(rig.client, chain_of(space, 4, seed=2))
        assert rig.client.match(hot).tiers["host"] == 2, "what was hot before the huge prompt stays"


def test_prefill_and_edges_are_measured_on_real_work(tmp_path: Path) -> None:
    with live(8, nvme=tmp_path) as rig:
        chain = chain_of(rig.namespace(), 4)
        put_all(rig.client, chain)
        rig.flush("nvme")
        rig.client.evict("host")
        assert loaded(rig.client, chain) == 4
        edge = rig.store.edges[1]
        assert edge.read_speed.latency_s is not None
        assert edge.write_speed.latency_s is not None
        rig.client.report_prefill(100, 2.0)
        assert rig.store.prefill.expect_s(50) == 1.0
