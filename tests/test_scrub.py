"""The scrub of host RAM: flipped bits are found, damaged blocks leave, leases are respected, and nobody is hurt."""

from __future__ import annotations

import threading
from pathlib import Path

import numpy as np
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
    payloads_of,
    put_all,
)
from tierkv.copier import HostCopier, LayerPages, PagedKV
from tierkv.health import DAMAGE_S
from tierkv.ids import Slot
from tierkv.keys import Chain
from tierkv.logs import PERIOD_S
from tierkv.scrub import MAX_BYTES_PER_S, STEP_BYTES
from tierkv.testing.invariants import check_idle
from tierkv.testing.sim_world import Shape, world
from tierkv.units import KIB, MIB


def slot_of(rig: Live, chain: Chain, position: int, part: int = 0) -> Slot:
    index = rig.store.catalog.index
    space = index.space(chain.namespace.digest)
    assert space is not None
    family = space.get(chain.hashes[position])
    assert family is not None
    return rig.store.catalog.slot_of(family, part)


def flip(rig: Live, chain: Chain, position: int, *, part: int = 0, byte: int = 0) -> None:
    """One bit in the arena, out of band."""
    rig.store.host.view(slot_of(rig, chain, position, part))[byte] ^= 1


def events(rig: Live) -> list[tuple[str, str | None, str | None]]:
    return [(event.kind, event.tier, event.reason) for event in rig.client.events()]


@pytest.mark.parametrize("byte", [0, 1, 4095])
def test_d9_a_flipped_bit_in_host_ram_is_found_and_the_block_leaves(
    byte: int, caplog: pytest.LogCaptureFixture
) -> None:
    with live(8) as rig:
        chain = chain_of(rig.namespace(), 5)
        put_all(rig.client, chain)
        assert rig.store.scrub.check_all() == 0
        assert rig.count("scrubbed_blocks_total", "host") == 5
        flip(rig, chain, 3, byte=byte)
        assert rig.client.match(chain).blocks == 5, "nobody has looked yet"
        assert rig.store.scrub.check_all() == 1
        assert rig.client.match(chain).blocks == 3
        assert loaded(rig.client, chain) == 3
        assert rig.count("corrupt_blocks_total", "host", "checksum") == 1
        assert rig.count("dropped_blocks_total", "host", "corrupt") == 1
        assert ("left", "host", "corrupt") in events(rig)
        assert [record.message for record in caplog.records if "damaged" in record.message]
        health = rig.client.health()
        assert health.state == "degraded"
        assert "damaged" in str(health)
        put_all(rig.client, chain)
        assert loaded(rig.client, chain) == 5
        assert rig.store.scrub.check_all() == 0
        rig.clock.advance(DAMAGE_S)
        assert rig.client.health().state == "ok"
        check_idle(rig.store)


def test_padding_behind_a_block_means_nothing() -> None:
    with live(8, block_bytes=4 * KIB) as rig:
        chain = chain_of(rig.namespace(layout_of(full_group(1000))), 3)
        put_all(rig.client, chain)
        flip(rig, chain, 1, byte=1000)
        assert rig.store.scrub.check_all() == 0
        flip(rig, chain, 1, byte=999)
        assert rig.store.scrub.check_all() == 1


@pytest.mark.parametrize("part", [0, 1])
def test_d8_one_damaged_part_takes_its_family_along(part: int) -> None:
    with live(12) as rig:
        layout = layout_of(full_group(name="a"), full_group(name="b"))
        chain = chain_of(rig.namespace(layout), 3)
        put_all(rig.client, chain)
        flip(rig, chain, 1, part=part)
        assert rig.store.scrub.check_all() == 1
        assert held(rig.store, chain)["host"] == [0, 2]
        assert rig.client.match(chain).blocks == 1
        assert rig.count("corrupt_blocks_total", "host", "checksum") == 1


def test_d9_a_copy_in_a_colder_tier_stays_and_is_loaded(tmp_path: Path) -> None:
    with live(8, nvme=tmp_path) as rig:
        chain = chain_of(rig.namespace(), 4)
        put_all(rig.client, chain)
        rig.flush("nvme")
        flip(rig, chain, 2)
        assert rig.store.scrub.check_all() == 1
        assert held(rig.store, chain) == {"host": [0, 1, 3], "nvme": [0, 1, 2, 3]}
        assert rig.client.match(chain).blocks == 4
        assert loaded(rig.client, chain) == 4
        assert rig.count("dropped_blocks_total", "host", "corrupt") == 0


@pytest.mark.parametrize("codec", ["raw", "lz4"])
def test_d9_what_was_flipped_before_it_was_demoted_is_found_at_the_load(tmp_path: Path, codec: str) -> None:
    with live(8, nvme=tmp_path, nvme_spec={"codec": codec}) as rig:
        chain = chain_of(rig.namespace(layout_of(full_group(16 * KIB))), 2) if codec == "lz4" else None
        chain = chain or chain_of(rig.namespace(), 2)
        payloads = [
            [bytes([i + 1]) * len(one) for one in block] for i, block in enumerate(payloads_of(chain))
        ]
        assert rig.client.put(chain, payloads).stored == 2
        flip(rig, chain, 1)
        rig.flush("nvme")
        assert rig.client.evict("host").evicted == 2
        with rig.client.load(chain) as lease:
            assert len(lease) == 1
            assert bytes(lease.view(0)) == payloads[0][0]
        assert rig.store.counters.sum("corrupt_blocks_total") == 1
        assert held(rig.store, chain)["nvme"] == [0]


def test_d9_a_leased_block_is_unmatched_at_once_and_freed_with_its_lease(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with live(8, nvme=tmp_path) as rig:
        chain = chain_of(rig.namespace(), 3)
        put_all(rig.client, chain)
        free_bytes = rig.store.host.free_bytes()
        lease = rig.client.load(chain, owner="engine 7")
        again = rig.client.load(chain)
        flip(rig, chain, 1)
        assert rig.store.scrub.check_all() == 1
        assert "engine 7" in caplog.text
        assert rig.client.match(chain).blocks == 1
        assert rig.store.scrub.check_all() == 0, "reported once"
        assert rig.store.host.free_bytes() == free_bytes, "its readers live"
        assert len(lease.view(1)) == 4 * KIB
        stored = rig.client.put(chain, payloads_of(chain))
        assert (stored.stored, stored.dropped) == (0, {"damaged": 1})
        lease.release()
        assert rig.store.host.free_bytes() == free_bytes
        again.release()
        assert rig.store.host.free_bytes() == free_bytes + 4 * KIB
        assert not rig.store.catalog.damaged
        put_all(rig.client, chain)
        assert loaded(rig.client, chain) == 3
        check_idle(rig.store)


def test_d9_a_leased_block_with_a_copy_below_waits_for_its_lease(tmp_path: Path) -> None:
    """Many leases (numpy's way through the pins) and a block that stays usable: it is in NVMe."""
    with live(40, nvme=tmp_path) as rig:
        chain = chain_of(rig.namespace(), 30)
        put_all(rig.client, chain)
        rig.flush("nvme")
        lease = rig.client.load(chain)
        flip(rig, chain, 20)
        assert rig.store.scrub.check_all() == 1
        assert loaded(rig.client, chain) == 20, "nothing can land under a name whose slots are leased"
        lease.release()
        assert loaded(rig.client, chain) == 30
        check_idle(rig.store)


def test_d27_a_damaged_block_that_is_cleared_while_it_is_leased_leaves_nothing() -> None:
    with live(8) as rig:
        chain = chain_of(rig.namespace(), 3)
        put_all(rig.client, chain)
        lease = rig.client.load(chain)
        flip(rig, chain, 1)
        assert rig.store.scrub.check_all() == 1
        assert rig.client.clear().result(PATIENCE_S).complete
        lease.release()
        assert rig.store.host.free_bytes() == 8 * 4 * KIB
        check_idle(rig.store)


def test_d9_an_onboard_over_a_damaged_block_says_so() -> None:
    with live(8, copier=HostCopier) as rig:
        chain = chain_of(rig.namespace(), 2)
        put_all(rig.client, chain)
        memory = np.zeros((2, 4 * KIB), np.uint8)
        kv = PagedKV([[LayerPages([memory])]])
        with rig.client.load(chain) as lease:
            assert rig.client.onboard(lease, kv, [[[0]], [[1]]]).result(PATIENCE_S)
            flip(rig, chain, 1)
            assert rig.store.scrub.check_all() == 1
            assert not rig.client.onboard(lease, kv, [[[0]], [[1]]]).result(PATIENCE_S)
            assert rig.client.onboard(lease, kv, [[[0]], [[]]]).result(PATIENCE_S)


def test_d21_a_demotion_that_is_under_way_does_not_make_a_damaged_block_resident(tmp_path: Path) -> None:
    with live(8, nvme=tmp_path) as rig:
        chain = chain_of(rig.namespace(), 1)
        put_all(rig.client, chain)
        gate = Gate("put_from")
        rig.tiers["nvme"].before = gate
        flush = rig.client.flush("nvme")
        gate.reached()
        flip(rig, chain, 0)
        assert rig.store.scrub.check_all() == 1
        gate.open()
        assert flush.result(PATIENCE_S).written == 0
        rig.settle()
        assert held(rig.store, chain) == {"host": [], "nvme": []}
        assert rig.store.host.free_bytes() == 8 * 4 * KIB
        assert rig.tiers["nvme"].usage().blocks == 0
        check_idle(rig.store)


def test_d13_a_slot_that_changes_hands_between_the_looks_is_no_damage() -> None:
    with live(4) as rig:
        space = rig.namespace()
        put_all(rig.client, chain_of(space, 4))
        scrub = rig.store.scrub
        with rig.store.catalog.lock:
            looks = scrub._look(STEP_BYTES)
        assert len(looks) == 4
        put_all(rig.client, chain_of(space, 4, seed=1))  # the same slots, other blocks
        assert scrub._take_out(looks) == 0
        assert loaded(rig.client, chain_of(space, 4, seed=1)) == 4
        with rig.store.catalog.lock:
            looks = scrub._look(STEP_BYTES)
        rig.client.clear().result(PATIENCE_S)
        assert scrub._take_out(looks) == 0
        assert rig.store.counters.sum("corrupt_blocks_total") == 0


def test_slots_that_are_being_written_are_never_looked_at() -> None:
    with live(8) as rig:
        chain = chain_of(rig.namespace(), 3)
        draft = rig.client.reserve(chain)
        assert draft is not None
        assert rig.store.scrub.check_all() == 0
        assert rig.count("scrubbed_blocks_total", "host") == 0
        draft.drop()


def test_it_runs_beside_everything_else_and_finds_nothing_where_nothing_is_wrong(tmp_path: Path) -> None:
    """Blocks come and go in few slots while the scrub goes round and round: no false alarm."""
    with live(6, nvme=tmp_path, nvme_spec={"write": "through"}) as rig:
        space = rig.namespace()
        over = threading.Event()
        found: list[int] = []

        def go_round() -> None:
            while not over.is_set():
                found.append(rig.store.scrub.check_all())

        thread = threading.Thread(target=go_round, name="scrubs")
        thread.start()
        for number in range(150):
            chain = chain_of(space, 3, seed=number % 7)
            rig.client.put(chain, payloads_of(chain))
            with rig.client.load(chain_of(space, 3, seed=(number + 3) % 7)) as lease:
                check_lease(rig.store, lease)
        over.set()
        thread.join(PATIENCE_S)
        assert found
        assert sum(found) == 0
        rig.settle()
        audit(rig.store)


def test_the_log_is_not_flooded_by_a_bad_memory(caplog: pytest.LogCaptureFixture) -> None:
    with live(64) as rig:
        chain = chain_of(rig.namespace(), 60)
        put_all(rig.client, chain)
        for position in range(59, 19, -1):
            flip(rig, chain, position)
            assert rig.store.scrub.check_all() == 1
        assert sum("damaged" in record.message for record in caplog.records) == 1
        assert rig.count("corrupt_blocks_total", "host", "checksum") == 40
        rig.clock.advance(PERIOD_S)
        flip(rig, chain, 3)
        assert rig.store.scrub.check_all() == 1
        assert "39 more like this" in caplog.records[-1].message


# ---- pace


def test_a_round_takes_about_the_time_that_was_set() -> None:
    shape = Shape.of(1, ("plain",))
    with world(shape) as made:
        store, sim = made.store, made.sim
        scrub = store.scrub
        scrub._pass_s = 100.0
        space = made.client.open_namespace(made.specs()[0])
        chain = space.chain(list(range(16 * 3 + 1)))
        made.client.put(chain, [bytes(4096)] * 3)
        sim.pass_time(10.0)  # the first ticks
        before = store.counters.get("scrubbed_blocks_total", "host")
        sim.pass_time(1000.0)
        sim.settle()
        looked = store.counters.get("scrubbed_blocks_total", "host") - before
        resident = len(made.client.load(chain))
        assert resident
        assert 8 * resident <= looked <= 12 * resident, "ten rounds"
        store.host.view(store.catalog.slot_of(space.space.get(chain.hashes[0]), 0))[7] ^= 4
        sim.pass_time(200.0)
        sim.settle()
        assert store.counters.get("corrupt_blocks_total", "host", "checksum") == 1
        scrub.damaged_at_s = None  # it was no false alarm


def test_it_comes_to_rest_where_slots_are_used_and_nothing_is_registered() -> None:
    with world(Shape.of(1, ("plain",))) as made:
        made.store.scrub._pass_s = 1e-6
        space = made.client.open_namespace(made.specs()[0])
        with made.client.reserve(space.chain(list(range(16 * 3 + 1)))) as draft:  # type: ignore[union-attr]
            assert len(draft) == 3
            made.sim.pass_time(10.0)
            made.sim.settle()
            assert made.store.scrub.passes >= 1


def test_a_large_arena_is_checked_at_a_bounded_pace_and_a_jump_of_time_is_not_made_up() -> None:
    with live(8, scrub_s=0.0) as rig:
        scrub = rig.store.scrub
        put_all(rig.client, chain_of(rig.namespace(), 8))
        assert not any("scrub" in thread.name for thread in threading.enumerate())
        scrub._pass_s = 1e-9
        scrub._running = True  # only the pace is of interest here
        for _ in range(50):
            rig.clock.advance(1000.0)
            scrub._tick()
        assert scrub._credit_bytes <= 2 * MAX_BYTES_PER_S
        scrub._pass_s = 1e9
        scrub._credit_bytes = 0.0
        scrub._at_s = rig.clock.now_s()
        rig.clock.advance(1e12)
        scrub._tick()
        assert scrub._credit_bytes <= STEP_BYTES
        scrub.close()


def test_one_step_takes_a_bounded_bite() -> None:
    with live(40, block_bytes=MIB, region_blocks=4, scrub_s=0.0) as rig:
        chain = chain_of(rig.namespace(layout_of(full_group(MIB))), 20)
        put_all(rig.client, chain)
        steps = []
        while True:
            before = rig.count("scrubbed_bytes_total", "host")
            rig.store.scrub._step_over(STEP_BYTES)
            steps.append(rig.count("scrubbed_bytes_total", "host") - before)
            if not rig.store.scrub._cursor:
                break
        assert sum(steps) == 20 * MIB
        assert max(steps) <= STEP_BYTES
