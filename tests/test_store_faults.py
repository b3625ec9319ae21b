"""What comes back wrong is a miss, and what could not be stored is not there."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.client_support import (
    PATIENCE_S,
    Live,
    audit,
    chain_of,
    full_group,
    held,
    layout_of,
    live,
    loaded,
    put_all,
    window_group,
)
from tests.nvme_support import peek, poke
from tests.valkey_server import ValkeyServer, eventually, name_of, running_server, within
from tierkv.ids import BlockKey
from tierkv.keys import Chain
from tierkv.tier import Presence
from tierkv.units import KIB, MIB

FLIPS = [0, 4, 6, 8, 40, 72, 136, 144, 176, 192, 200, 504, 511]
"""Bytes of the header: magic, version, codec, key, digests, depth, parts, lengths, checksums, reserved, the last."""


@pytest.fixture(scope="module")
def server() -> Iterator[ValkeyServer]:
    with running_server() as server:
        yield server


@pytest.fixture(autouse=True)
def _empty_server(server: ValkeyServer) -> None:
    server.do("FLUSHALL")


class Stored:
    """How blocks look in a tier, from outside."""

    def __init__(self, tier: str, path: Path, server: ValkeyServer) -> None:
        self.tier = tier
        self._path = path
        self._server = server
        self.payload_at = 4096 if tier == "nvme" else 512

    def read(self, key: BlockKey) -> bytes:
        raw = peek(self._path, key) if self.tier == "nvme" else self._server.do("GET", name_of(key))
        assert isinstance(raw, bytes)
        return raw

    def write(self, key: BlockKey, raw: bytes) -> None:
        if self.tier == "nvme":
            poke(self._path, key, raw)
        else:
            self._server.do("SET", name_of(key), raw, "KEEPTTL")

    def flip(self, key: BlockKey, at: int) -> None:
        raw = bytearray(self.read(key))
        raw[at] ^= 1
        self.write(key, bytes(raw))


@pytest.fixture(params=["nvme", "valkey"])
def stored(request: pytest.FixtureRequest, tmp_path: Path, server: ValkeyServer) -> Stored:
    return Stored(request.param, tmp_path / "nvme", server)


@pytest.fixture
def rig(tmp_path: Path, server: ValkeyServer) -> Iterator[Live]:
    with live(8, nvme=tmp_path / "nvme", valkey=server.address) as rig:
        yield rig


def key_of(chain: Chain, position: int, part: int = 0) -> BlockKey:
    return chain.namespace.block_key(chain.hashes[position], part)


def only_in(rig: Live, tier: str, chain: Chain) -> None:
    put_all(rig.client, chain)
    rig.flush(tier)
    rig.client.evict("host")
    assert held(rig.store, chain)["host"] == []


def assert_miss_from(rig: Live, chain: Chain, position: int, tier: str) -> None:
    """The blocks before ``position`` are loaded, this one counts as corrupt, is gone, and can be stored again."""
    before = rig.count("read_blocks_total", tier, "corrupt")
    assert loaded(rig.client, chain) == position
    rig.settle()
    assert rig.count("read_blocks_total", tier, "corrupt") == before + 1
    assert position not in held(rig.store, chain)[tier]
    assert position not in held(rig.store, chain)["host"]
    key = key_of(chain, position)
    assert rig.tiers[tier].probe([key], within(5.0)) == [Presence.ABSENT]
    assert rig.client.match(chain).blocks == position
    put_all(rig.client, chain)
    rig.flush(tier)
    rig.client.evict("host")
    assert loaded(rig.client, chain) == len(chain)


# ---- D9


@pytest.mark.parametrize("position", range(5))
def test_d9_a_flipped_bit_in_one_block_keeps_what_comes_before_it(
    rig: Live, stored: Stored, position: int
) -> None:
    chain = chain_of(rig.namespace(), 5)
    only_in(rig, stored.tier, chain)
    stored.flip(key_of(chain, position), stored.payload_at + 1000)
    assert_miss_from(rig, chain, position, stored.tier)


def test_d9_any_flipped_byte_is_noticed(rig: Live, stored: Stored) -> None:
    chain = chain_of(rig.namespace(), 2)
    only_in(rig, stored.tier, chain)
    payload = [stored.payload_at + at for at in (0, 4094, 4095)]
    for at in [*FLIPS, *payload]:
        stored.flip(key_of(chain, 1), at)
        rig.client.evict("host")
        assert_miss_from(rig, chain, 1, stored.tier)


@pytest.mark.parametrize("change", ["other", "cut", "longer", "empty", "zeros", "old version"])
def test_d9_d18_a_value_that_is_not_the_block_is_a_miss(rig: Live, stored: Stored, change: str) -> None:
    chain = chain_of(rig.namespace(), 3)
    only_in(rig, stored.tier, chain)
    raw = stored.read(key_of(chain, 1))
    changed = {
        "other": stored.read(key_of(chain, 2)),
        "cut": raw[:-1],
        "longer": raw + b"\0",
        "empty": b"",
        "zeros": bytes(len(raw)),
        "old version": raw[:4] + b"\0\0" + raw[6:],
    }[change]
    if stored.tier == "nvme" and change in ("cut", "longer"):
        pytest.skip("a slot on disk has one length: the padding after a block means nothing")
    stored.write(key_of(chain, 1), changed)
    assert_miss_from(rig, chain, 1, stored.tier)


def test_d9_a_block_that_the_server_forgot_is_a_miss(rig: Live, server: ValkeyServer) -> None:
    chain = chain_of(rig.namespace(), 4)
    only_in(rig, "valkey", chain)
    server.do("DEL", name_of(key_of(chain, 2)))
    assert loaded(rig.client, chain) == 2
    assert rig.count("read_blocks_total", "valkey", "miss") == 1
    assert held(rig.store, chain)["valkey"] == [0, 1, 3]
    put_all(rig.client, chain)
    assert loaded(rig.client, chain) == 4


def test_d9_the_other_tier_helps_out_at_the_next_load(rig: Live, tmp_path: Path) -> None:
    chain = chain_of(rig.namespace(), 3)
    put_all(rig.client, chain)
    rig.flush("nvme")
    only_in(rig, "valkey", chain)
    Stored("nvme", tmp_path / "nvme", None).flip(key_of(chain, 1), 5000)  # type: ignore[arg-type]
    assert loaded(rig.client, chain) == 1
    assert loaded(rig.client, chain) == 3
    assert rig.count("read_blocks_total", "valkey", "done") == 1


def test_d9_one_part_of_a_family_takes_the_family_with_it(
    tmp_path: Path, server: ValkeyServer, stored: Stored
) -> None:
    with live(16, nvme=tmp_path / "nvme", valkey=server.address) as rig:
        chain = chain_of(rig.namespace(layout_of(full_group(), window_group(64))), 3)
        only_in(rig, stored.tier, chain)
        stored.flip(key_of(chain, 1, part=1), stored.payload_at + 7)
        assert loaded(rig.client, chain) == 1
        rig.settle()
        assert held(rig.store, chain)[stored.tier] == [0, 2]
        audit(rig.store)
        put_all(rig.client, chain)
        rig.flush(stored.tier)
        rig.client.evict("host")
        assert loaded(rig.client, chain) == 3


def test_d18_a_pickle_in_the_place_of_a_block_runs_nothing(rig: Live, stored: Stored, tmp_path: Path) -> None:
    target = tmp_path / "ran"
    bomb = b"cposix\nsystem\n(S'touch " + bytes(target) + b"'\ntR."
    chain = chain_of(rig.namespace(), 1)
    only_in(rig, stored.tier, chain)
    stored.write(key_of(chain, 0), bomb.ljust(stored.payload_at + 4096, b"\0"))
    assert_miss_from(rig, chain, 0, stored.tier)
    assert not target.exists()


def test_d9_an_unreadable_disk_is_a_miss_and_no_error(rig: Live) -> None:
    chain = chain_of(rig.namespace(), 3)
    only_in(rig, "nvme", chain)
    assert rig.disk is not None

    def broken(call: str, name: str, offset: int) -> None:
        if call == "preadv" and name.startswith("segment"):
            raise OSError(errno.ENOMEM, "injected")

    rig.disk.before = broken
    assert loaded(rig.client, chain, timeout_s=PATIENCE_S) == 0
    rig.settle()
    rig.disk.before = lambda call, name, offset: None
    rig.clock.advance(10.0)  # beyond the breaker's cool-down
    eventually(lambda: loaded(rig.client, chain) == 3, "the disk is trusted again")


# ---- D10


def fail_writes_of(prefix: str, error: int) -> Callable[[str, str, int], None]:
    def before(call: str, name: str, offset: int) -> None:
        if call in ("pwritev", "fallocate") and name.startswith(prefix):
            raise OSError(error, "injected")

    return before


@pytest.mark.parametrize("error", [errno.EIO, errno.ENOSPC, errno.EINVAL])
def test_d10_a_frame_that_could_not_be_written_is_not_there(rig: Live, error: int) -> None:
    chain = chain_of(rig.namespace(), 2)
    put_all(rig.client, chain)
    assert rig.disk is not None
    rig.disk.before = fail_writes_of("segment", error)
    report = rig.client.flush("nvme", timeout_s=0.3).result(PATIENCE_S)
    assert (report.written, report.failed) == (0, 2)
    rig.settle()
    assert rig.count("written_blocks_total", "nvme", "done") == 0
    assert held(rig.store, chain) == {"host": [0, 1], "nvme": [], "valkey": []}
    absent = rig.tiers["nvme"].probe([key_of(chain, 0), key_of(chain, 1)], within(5.0))
    assert absent == [Presence.ABSENT] * 2
    assert loaded(rig.client, chain) == 2
    rig.disk.before = lambda call, name, offset: None
    rig.clock.advance(60.0)
    rig.store.upkeep.make_rounds()
    rig.settle()
    rig.flush("nvme")  # also after ENOSPC for the first segment, which made the tier read-only for a while
    rig.client.evict("host")
    assert loaded(rig.client, chain) == 2


def test_d10_the_nth_call_to_the_disk_fails(tmp_path: Path) -> None:
    """For n = 1, 2, 3 ... until nothing fails any more: whatever call it was, each block is whole or absent, and after
    a restart too."""
    for n in range(1, 200):
        path = tmp_path / str(n)
        calls = 0
        with live(4, nvme=path) as rig:
            chain = chain_of(rig.namespace(), 2)
            put_all(rig.client, chain)
            assert rig.disk is not None

            def nth(call: str, name: str, offset: int, n: int = n) -> None:
                nonlocal calls
                calls += 1
                if calls == n and call != "pwritev_done":
                    raise OSError(errno.EIO, "injected")

            rig.disk.before = nth
            report = rig.client.flush("nvme", timeout_s=0.3).result(PATIENCE_S)
            reached = calls >= n
            rig.disk.before = lambda call, name, offset: None
            there = held(rig.store, chain)["nvme"]
            assert rig.count("written_blocks_total", "nvme", "done") >= len(there)
            assert report.written == len(there)
            gone = rig.client.evict("host")
            assert gone.evicted == len(there)
            assert loaded(rig.client, chain) == 2, "what is not on disk is still in host RAM"
        with live(4, nvme=path) as rig:
            assert loaded(rig.client, chain_of(rig.namespace(), 2)) == (len(there) if 0 in there else 0)
        if not reached:
            assert n > 2
            return
    raise AssertionError("there is no end to the calls")


def test_d10_d20_a_server_that_is_full_takes_nothing_and_the_store_goes_on(server: ValkeyServer) -> None:
    """maxmemory with noeviction: the server answers OOM to every SET."""
    settings = ("--maxmemory", "3mb", "--maxmemory-policy", "noeviction")
    with (
        running_server(*settings) as full,
        live(40, block_bytes=256 * KIB, valkey=full.address) as rig,
    ):
        chain = chain_of(rig.namespace(layout_of(full_group(256 * KIB))), 20)
        put_all(rig.client, chain)
        report = rig.client.flush("valkey", timeout_s=5.0).result(PATIENCE_S)
        there = held(rig.store, chain)["valkey"]
        assert report.failed > 0
        assert report.written == len(there) < 20
        assert rig.count("written_blocks_total", "valkey", "done") == len(there) == full.do("DBSIZE")
        assert loaded(rig.client, chain) == 20
        full.do("CONFIG", "SET", "maxmemory", 64 * MIB)
        rig.clock.advance(60.0)
        rig.store.upkeep.make_rounds()
        rig.settle()
        rig.flush("valkey")
        assert full.do("DBSIZE") == 20
        rig.client.evict("host")
        assert loaded(rig.client, chain) == 20


def test_d20_a_block_above_the_servers_limit_is_refused_and_stays_where_it_is() -> None:
    with (
        running_server("--proto-max-bulk-len", "1mb") as small,
        live(6, block_bytes=MIB + 4096, region_blocks=2, valkey=small.address) as rig,
    ):
        large = chain_of(rig.namespace(layout_of(full_group(MIB + 1))), 2)
        fitting = chain_of(rig.namespace(layout_of(full_group(512 * KIB))), 2)
        put_all(rig.client, large)
        put_all(rig.client, fitting)
        report = rig.client.flush("valkey", timeout_s=5.0).result(PATIENCE_S)
        assert (report.written, report.failed) == (2, 2)
        assert held(rig.store, large) == {"host": [0, 1], "valkey": []}
        assert held(rig.store, fitting)["valkey"] == [0, 1]
        assert loaded(rig.client, large) == 2


def test_d10_a_block_larger_than_the_disk_stays_where_it_is(tmp_path: Path) -> None:
    with live(4, block_bytes=256 * KIB, nvme=tmp_path, nvme_bytes=128 * KIB) as rig:
        chain = chain_of(rig.namespace(layout_of(full_group(256 * KIB))), 2)
        put_all(rig.client, chain)
        report = rig.client.flush("nvme", timeout_s=5.0).result(PATIENCE_S)
        assert (report.written, report.failed) == (0, 2)
        assert loaded(rig.client, chain) == 2


def test_d10_a_directory_that_went_away(tmp_path: Path) -> None:
    """Somebody removes the files under the store: what was there is a miss, what is new stays in host RAM."""
    path = tmp_path / "nvme"
    with live(4, nvme=path) as rig:
        chain = chain_of(rig.namespace(), 2)
        only_in(rig, "nvme", chain)
        for name in os.listdir(path):
            os.unlink(path / name)
        assert loaded(rig.client, chain) in (0, 2)
        put_all(rig.client, chain)
        assert loaded(rig.client, chain) == 2
