"""Where blocks may not go: ``no_store`` and ``coldest``, in every tier and on every way; what a frame says of it."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.client_support import (
    PATIENCE_S,
    Gate,
    Live,
    chain_of,
    held,
    live,
    loaded,
    payloads_of,
    put,
    put_all,
)
from tests.retention_support import THROUGH, WAYS, frames_on_disk, on_disk
from tests.valkey_server import eventually, name_of, running_server
from tierkv import frame
from tierkv.intake import Stored
from tierkv.keys import Chain
from tierkv.retention import KEEP, Retention

Way = Callable[[Live, Chain, Retention], Stored]
ways = pytest.mark.parametrize("way", WAYS, ids=lambda way: way.__name__)
SECRET = Retention(no_store=True)
IN_RAM = Retention(coldest="host")
BOTH = {"nvme_spec": THROUGH, "valkey_spec": THROUGH}


# ---- no_store


@ways
def test_what_must_not_be_stored_lands_in_no_tier(way: Way, tmp_path: Path) -> None:
    with running_server() as server:
        with live(nvme=tmp_path, valkey=server.address, **BOTH) as rig:
            chain = chain_of(rig.namespace(), 3)
            stored = way(rig, chain, SECRET)
            assert (stored.stored, stored.resident, stored.dropped) == (0, 0, {"no_store": 3})
            assert rig.count("dropped_blocks_total", "host", "no_store") == 3
            assert rig.store.host.usage().used_bytes == 0
            rig.settle()
            assert held(rig.store, chain) == {"host": [], "nvme": [], "valkey": []}
            assert on_disk(rig) == 0
            assert rig.client.events() == []
        with server.client as client:
            assert client.dbsize() == 0


@ways
def test_a_request_that_stores_nothing_gets_what_others_have_stored(way: Way, tmp_path: Path) -> None:
    with live(nvme=tmp_path) as rig:
        chain = chain_of(rig.namespace(), 4)
        put(rig.client, chain, count=2, ttl_s=100.0)
        rig.flush("nvme")
        rig.client.evict("host")
        rig.client.load(chain, retention=SECRET).release()
        assert way(rig, chain, SECRET).dropped == {"no_store": 4}
        assert loaded(rig.client, chain) == 2
        rig.clock.advance(100.0)
        assert rig.client.match(chain).blocks == 0, "nor is the end of theirs put off"


def test_sealed_blocks_that_shall_not_be_stored_after_all_leave_nothing() -> None:
    with live(4) as rig:
        chain = chain_of(rig.namespace(), 3)
        draft = rig.client.reserve(chain)
        assert draft is not None
        for i, [payload] in enumerate(payloads_of(chain)):
            draft.view(i, 0)[:] = payload
        assert rig.client.commit(draft.seal(), chain, retention=SECRET).dropped == {"no_store": 3}
        assert rig.client.match(chain).blocks == 0
        put_all(rig.client, chain_of(rig.namespace(), 4, seed=1))
        assert rig.count("dropped_blocks_total", "host", "no_store") == 3


# ---- coldest


@ways
def test_blocks_that_may_only_lie_in_ram_never_reach_disk_or_server(way: Way, tmp_path: Path) -> None:
    with running_server() as server:
        with live(8, nvme=tmp_path, valkey=server.address, **BOTH) as rig:
            space = rig.namespace()
            chain, other = chain_of(space, 3), chain_of(space, 3, seed=1)
            way(rig, chain, IN_RAM)
            way(rig, other, KEEP)
            for tier in ("nvme", "valkey"):
                rig.flush(tier)
            rig.settle()
            assert held(rig.store, chain) == {"host": [0, 1, 2], "nvme": [], "valkey": []}
            assert held(rig.store, other) == {"host": [0, 1, 2], "nvme": [0, 1, 2], "valkey": [0, 1, 2]}
            assert rig.client.evict("host").kept_last_copy == 3
            assert rig.client.sleep(keep=True).result(PATIENCE_S).kept_last_copy == 3
            rig.client.wake()
            assert loaded(rig.client, chain) == 3
            put_all(rig.client, chain_of(space, 8, seed=2))
            assert held(rig.store, chain)["host"] == [], "it is no pin: others may have the room"
            way(rig, chain, IN_RAM)
        keys = {chain.namespace.block_key(block_hash, 0) for block_hash in chain.hashes}
        with live(8, nvme=tmp_path) as rig:
            assert not keys & {header.key for header in frames_on_disk(rig)}
            assert loaded(rig.client, chain_of(rig.namespace(), 3)) == 0
        with server.client as client:
            assert not any(client.exists(name_of(key)) for key in keys)


@ways
def test_blocks_that_may_go_to_disk_but_not_to_the_server(way: Way, tmp_path: Path) -> None:
    """Also after a restart, and when there was no server before it."""
    with running_server() as server:
        with live(8, nvme=tmp_path, nvme_spec=THROUGH) as rig:
            chain = chain_of(rig.namespace(), 3)
            way(rig, chain, Retention(coldest="nvme"))
            rig.settle()
            assert [header.no_colder for header in frames_on_disk(rig)] == [True] * 3
        with live(8, nvme=tmp_path, valkey=server.address, **BOTH) as rig:
            chain = chain_of(rig.namespace(), 3)
            assert loaded(rig.client, chain) == 3
            rig.client.flush("valkey").result(PATIENCE_S)
            rig.settle()
            assert held(rig.store, chain) == {"host": [0, 1, 2], "nvme": [0, 1, 2], "valkey": []}
        with server.client as client:
            assert client.dbsize() == 0


@ways
def test_blocks_that_somebody_else_stores_without_a_bound_go_everywhere(way: Way, tmp_path: Path) -> None:
    with live(8, nvme=tmp_path, nvme_spec=THROUGH) as rig:
        space = rig.namespace()
        chain = chain_of(space, 4)
        put_all(rig.client, chain, coldest="host")
        rig.client.load(chain, retention=Retention(priority=3)).release()
        rig.settle()
        assert held(rig.store, chain)["nvme"] == [], "who only loads does not spread them"
        longer = chain_of(space, 6)
        assert way(rig, longer, KEEP).kept_beyond == 0
        rig.settle()
        assert held(rig.store, longer)["nvme"] == [0, 1, 2, 3, 4, 5]
        assert way(rig, longer, IN_RAM).kept_beyond == 6


def test_what_hangs_from_a_block_in_ram_takes_it_along(tmp_path: Path) -> None:
    """Without its ancestors a block would be of no use on the disk."""
    with live(8, nvme=tmp_path, nvme_spec=THROUGH) as rig:
        chain = chain_of(rig.namespace(), 4)
        put(rig.client, chain, count=2, coldest="host")
        put(rig.client, chain, first=2)
        rig.settle()
        assert held(rig.store, chain)["nvme"] == [0, 1, 2, 3]


# ---- the frame


def test_d23_a_frame_of_an_earlier_release_has_no_priority_and_may_go_anywhere() -> None:
    with live() as rig:
        chain = chain_of(rig.namespace(), 1)
    header = frame.FrameHeader(
        key=chain.namespace.block_key(chain.hashes[0], 0), namespace=chain.namespace.digest,
        block_hash=chain.hashes[0], parent_hash=None, depth=0, part=0, expected_parts=1, epoch=0, expires_ms=0,
        codec=0, decoded_bytes=4096, stored_bytes=4096, decoded_checksum=1, stored_checksum=1,
    )  # fmt: skip
    raw = frame.pack(header)
    assert raw[7] == raw[142] == raw[143] == 0, "as all releases before have written it"
    assert frame.unpack(raw) == header
    for priority in (-127, -1, 127):
        header.priority, header.no_colder = priority, priority < 0
        assert frame.unpack(frame.pack(header)) == header


# ---- an end that is put off while a copy is on its way


@pytest.mark.parametrize("later", [Retention(ttl_s=1000.0), Retention(ttl_s=math.inf)])
@pytest.mark.parametrize("tier", ["nvme", "valkey"])
def test_an_end_that_is_put_off_while_the_first_copy_is_written(
    tier: str, later: Retention, tmp_path: Path
) -> None:
    """The copy names the old end, and no tier held one that could be known to be stale when the end was put off."""
    with running_server() as server, live(nvme=tmp_path, valkey=server.address, **BOTH) as rig:
        chain = chain_of(rig.namespace(), 2)
        names = [name_of(chain.namespace.block_key(block_hash, 0)) for block_hash in chain.hashes]
        gate = rig.tiers[tier].before = Gate("put_from")
        put_all(rig.client, chain, ttl_s=100.0)
        gate.reached()
        rig.client.load(chain, retention=later).release()
        gate.open()

        def name_the_later_end() -> bool:
            if tier == "nvme":
                ends = [header.expires_ms for header in frames_on_disk(rig)]
                return len(ends) == 2 and all(not end or end > soon_ms for end in ends)
            with server.client as client:
                return all(client.pttl(name) > 500_000 for name in names)

        soon_ms = (rig.clock.unix_s() + 500.0) * 1000
        eventually(name_the_later_end, "the copies name the later end")
        rig.settle()
        assert rig.count("written_blocks_total", tier, "done") <= 4, "once more is enough"
