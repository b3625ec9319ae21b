"""More blocks than host RAM holds, at once and with nothing pinned: what is dropped, what stays, and who waits.

The speeds are in ``bench/burst.py``; here an edge keeps up because the test waits for it, and is dead because it is."""

from __future__ import annotations

import errno
import json
import threading
from pathlib import Path

import pytest

from bench.burst import main
from tests.client_support import Live, chain_of, check_lease, full_group, layout_of, live, put
from tests.valkey_server import running_server
from tierkv.namespaces import OpenNamespace
from tierkv.testing.faults.disk import at, failing
from tierkv.units import KIB, MIB

BLOCK_BYTES = 16 * KIB
HOST_BLOCKS = 128
REQUEST_BLOCKS = 4
REQUESTS = 2 * HOST_BLOCKS // REQUEST_BLOCKS


def space_of(rig: Live) -> OpenNamespace:
    return rig.namespace(layout_of(full_group(BLOCK_BYTES)))


def burst(rig: Live, space: OpenNamespace, *, settle: bool) -> int:
    """Twice host RAM, in prompts; returns how many blocks found no room."""
    refused = 0
    for seed in range(REQUESTS):
        refused += sum(put(rig.client, chain_of(space, REQUEST_BLOCKS, seed)).dropped.values())
        if settle:
            rig.settle()
    return refused


def lost(rig: Live) -> int:
    return sum(
        rig.count("dropped_blocks_total", "host", reason) for reason in ("dropped_dirty", "dropped_clean")
    )


def matched(rig: Live, space: OpenNamespace, seeds: range) -> int:
    return sum(rig.client.match(chain_of(space, REQUEST_BLOCKS, seed)).blocks for seed in seeds)


@pytest.mark.parametrize("write", ["on_evict", "through"])
def test_d16_d28_a_burst_that_the_disk_keeps_up_with_loses_nothing(tmp_path: Path, write: str) -> None:
    with live(
        HOST_BLOCKS, block_bytes=BLOCK_BYTES, nvme=tmp_path, nvme_bytes=16 * MIB, nvme_spec={"write": write}
    ) as rig:
        space = space_of(rig)
        assert burst(rig, space, settle=True) == 0
        assert lost(rig) == 0
        assert matched(rig, space, range(REQUESTS)) == 2 * HOST_BLOCKS
        for seed in (0, REQUESTS // 2, REQUESTS - 1):
            with rig.client.load(chain_of(space, REQUEST_BLOCKS, seed)) as lease:
                assert len(lease) == REQUEST_BLOCKS
                check_lease(rig.store, lease)


def test_d16_cleaning_begins_while_there_is_room_for_a_hesitation(tmp_path: Path) -> None:
    """A fourth of a small host RAM is kept free or clean, and cleaned in batches of a small part of that: whatever the
    workers have under way, the first of it is done before the rest is needed."""
    with live(
        HOST_BLOCKS,
        block_bytes=BLOCK_BYTES,
        nvme=tmp_path,
        nvme_bytes=16 * MIB,
        nvme_spec={"write": "on_evict"},
    ) as rig:
        space = space_of(rig)
        real, sizes = rig.tiers["nvme"].put_from, []

        def put_from(items: object, deadline: object, on_done: object) -> None:
            sizes.append(len(items))  # type: ignore[arg-type]
            real(items, deadline, on_done)  # type: ignore[arg-type]

        rig.tiers["nvme"].put_from = put_from  # type: ignore[method-assign, assignment]
        for seed in range(HOST_BLOCKS // REQUEST_BLOCKS):
            assert put(rig.client, chain_of(space, REQUEST_BLOCKS, seed)).stored == REQUEST_BLOCKS
            rig.settle()
            idle_blocks = (rig.store.host.free_bytes() + rig.store.catalog.clean_bytes) // BLOCK_BYTES
            assert idle_blocks >= HOST_BLOCKS // 4
        assert max(sizes) <= HOST_BLOCKS // 4 // 16
        assert lost(rig) == 0


def test_d16_d17_with_dead_tiers_the_newest_blocks_stay_and_no_call_goes_near_them(tmp_path: Path) -> None:
    """The disk fails every write, the server hangs. What a tier is just trying to write stays too, but not all of it is
    old: so the newest half of host RAM is asked for."""
    with (
        running_server() as server,
        live(
            HOST_BLOCKS,
            block_bytes=BLOCK_BYTES,
            nvme=tmp_path,
            nvme_bytes=16 * MIB,
            nvme_spec={"write": "on_evict"},
            valkey=server.address,
            valkey_spec={"write": "on_evict", "timeout_s": 0.5},
        ) as rig,
    ):
        assert rig.disk is not None
        space = space_of(rig)
        callers: set[str] = set()
        for tier in rig.tiers.values():
            tier.before = lambda call: callers.add(threading.current_thread().name)
        rig.disk.before = failing(errno.EIO, at("pwritev", "segment", header=False))
        server.hang()
        try:
            assert burst(rig, space, settle=False) == 0
            newest = range(REQUESTS - HOST_BLOCKS // REQUEST_BLOCKS // 2, REQUESTS)
            assert matched(rig, space, newest) == HOST_BLOCKS // 2
            assert lost(rig) == HOST_BLOCKS
            assert threading.current_thread().name not in callers
            assert callers, "nobody even tried the tiers"
        finally:
            server.go_on()
        rig.settle()


def test_d16_a_prompt_larger_than_host_ram_is_kept_from_its_head() -> None:
    """One call does not evict its own blocks."""
    with live(HOST_BLOCKS, block_bytes=BLOCK_BYTES) as rig:
        space = space_of(rig)
        chain = chain_of(space, 2 * HOST_BLOCKS)
        stored = put(rig.client, chain)
        assert (stored.stored, stored.dropped) == (HOST_BLOCKS, {"no_room": HOST_BLOCKS})
        assert rig.client.match(chain).blocks == HOST_BLOCKS


def test_the_command_counts_every_block_of_every_case(tmp_path: Path) -> None:
    path = tmp_path / "burst.json"
    arguments = ["--host", "8", "--block", "64", "--request", "8"]
    assert main([*arguments, "--dir", str(tmp_path), "--json", str(path)]) == 0
    cases = json.loads(path.read_text())["cases"]
    assert {"paced at 0.5", "unpaced", "one call", "alone", "dead"} <= cases.keys()
    for case in cases.values():
        assert case["blocks"] == 256
        assert 0 <= case["refused"] + case["lost"] <= 256
        assert case["newest_kept"] <= case["newest"]
