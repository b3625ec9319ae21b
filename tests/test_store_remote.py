"""A remote tier that is down, hung, slow or back again: nobody waits beyond a deadline, nobody has to do a thing."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.client_support import (
    PATIENCE_S,
    Gate,
    Live,
    chain_of,
    full_group,
    held,
    layout_of,
    live,
    loaded,
    put,
    put_all,
)
from tests.valkey_server import ValkeyServer, eventually, free_port, running_server
from tierkv.keys import Chain
from tierkv.testing.faults.proxy import TcpProxy, proxy_before
from tierkv.units import KIB

SPEC = {"timeout_s": 0.3}
OPTIONS = {"connect_timeout_s": 0.3}
GENEROUS_S = 10.0
"""What a call with a deadline of well under a second never takes, on any machine."""


@contextlib.contextmanager
def remote(address: str, host_blocks: int = 8, **options: Any) -> Iterator[Live]:
    settings = {"valkey_spec": SPEC, "valkey_options": OPTIONS, **options}
    with live(host_blocks, valkey=address, **settings) as rig:
        yield rig


def bounded(rig: Live, chain: Chain) -> int:
    """A load that must come back in time."""
    start_s = time.monotonic()
    found = loaded(rig.client, chain, timeout_s=0.5)
    assert time.monotonic() - start_s < GENEROUS_S
    return found


def only_there(rig: Live, chain: Chain) -> None:
    put_all(rig.client, chain)
    rig.flush("valkey")
    rig.client.evict("host")


def comes_back(rig: Live, seed: int) -> None:
    """The tier works again without anybody's help."""
    chain = chain_of(rig.namespace(), 2, seed)
    put_all(rig.client, chain)
    eventually(lambda: rig.client.flush("valkey").result(PATIENCE_S).failed == 0, "it is written", PATIENCE_S)
    rig.client.evict("host")
    eventually(lambda: loaded(rig.client, chain) == 2, "it is read", PATIENCE_S)


def test_d17_a_server_that_is_not_there_at_the_start(tmp_path: Path) -> None:
    server = ValkeyServer()
    server.port = free_port()
    try:
        with remote(server.address, nvme=tmp_path) as rig:
            space = rig.namespace()
            chain, unknown = chain_of(space, 3), chain_of(space, 3, seed=1)
            put_all(rig.client, chain)
            assert bounded(rig, chain) == 3
            assert bounded(rig, unknown) == 0
            assert rig.client.prefetch(unknown, timeout_s=0.5).result(PATIENCE_S).blocks == 0
            rig.flush("nvme")
            rig.client.evict("host")
            assert bounded(rig, chain) == 3
            server.start()
            comes_back(rig, seed=2)
    finally:
        server.close()


def test_d17_a_hung_server_is_a_miss_and_then_nobody_asks_it() -> None:
    with running_server() as server, remote(server.address, breaker_cooldown_s=3600.0) as rig:
        space = rig.namespace()
        chain = chain_of(space, 3)
        only_there(rig, chain)
        asked: list[str] = []
        rig.tiers["valkey"].before = asked.append
        server.hang()
        for seed in range(1, 5):
            assert bounded(rig, chain_of(space, 1, seed)) == 0
        eventually(lambda: rig.store.edges[1].tier.breaker.is_open, "the breaker has opened")
        rig.settle()
        asked.clear()
        for seed in range(5, 15):
            assert bounded(rig, chain_of(space, 1, seed)) == 0
        assert bounded(rig, chain) == 0
        assert asked == []
        assert rig.client.stats()["tiers"]["valkey"]["breaker"] == "open"  # type: ignore[index]
        server.go_on()
        rig.clock.advance(3600.0)
        eventually(lambda: loaded(rig.client, chain) == 3, "the server is asked again", PATIENCE_S)
        assert not rig.store.edges[1].tier.breaker.is_open


def test_d17_a_server_that_hangs_in_the_middle_of_a_read() -> None:
    """The waiter leaves at its deadline; the slots come back when the read is over."""
    with running_server() as server, remote(server.address) as rig:
        chain = chain_of(rig.namespace(), 3)
        only_there(rig, chain)
        gate = rig.tiers["valkey"].before = Gate("get_into")
        future = rig.client.load_async(chain, timeout_s=2.0)
        gate.reached()
        server.hang()
        gate.open()
        with future.result(PATIENCE_S) as lease:
            assert len(lease) == 0
        rig.settle()
        assert rig.store.host.usage().used_bytes == 0
        server.go_on()
        eventually(lambda: loaded(rig.client, chain) == 3, "it is read", PATIENCE_S)


def test_d17_killed_and_restarted() -> None:
    with running_server() as server, remote(server.address) as rig:
        chain = chain_of(rig.namespace(), 3)
        only_there(rig, chain)
        server.kill()
        assert bounded(rig, chain) == 0
        server.start()
        comes_back(rig, seed=1)
        assert bounded(rig, chain) == 0, "it came back empty"
        rig.settle()
        assert rig.client.match(chain).blocks == 0
        put_all(rig.client, chain)
        assert bounded(rig, chain) == 3


@pytest.fixture
def proxied() -> Iterator[tuple[ValkeyServer, TcpProxy]]:
    with running_server() as server, proxy_before(("127.0.0.1", server.port)) as proxy:
        yield server, proxy


def test_d17_a_link_of_one_kilobyte_a_second(proxied: tuple[ValkeyServer, TcpProxy]) -> None:
    _, proxy = proxied
    size = 64 * KIB
    with remote(f"valkey://127.0.0.1:{proxy.port}", 4, block_bytes=size) as rig:
        chain = chain_of(rig.namespace(layout_of(full_group(size))), 2)
        only_there(rig, chain)
        proxy.bytes_per_s = 1000.0
        assert bounded(rig, chain) == 0
        rig.settle()
        assert rig.store.host.usage().used_bytes == 0
        proxy.bytes_per_s = None
        proxy.drop_all()
        eventually(lambda: loaded(rig.client, chain) == 2, "the link is quick again", PATIENCE_S)
        proxy.bytes_per_s = 1000.0
        waiting = [
            rig.client.load_async(chain_of(rig.namespace(), 1, seed), timeout_s=60.0) for seed in range(10)
        ]
        start_s = time.monotonic()
        rig.client.close()
        assert time.monotonic() - start_s < GENEROUS_S
        for future in waiting:
            future.result(PATIENCE_S).release()


@pytest.mark.parametrize("after_bytes", [0, 1, 511, 512, 513, 4000])
def test_d17_d18_a_connection_that_is_cut_in_a_reply(
    proxied: tuple[ValkeyServer, TcpProxy], after_bytes: int
) -> None:
    _, proxy = proxied
    with remote(f"valkey://127.0.0.1:{proxy.port}") as rig:
        chain = chain_of(rig.namespace(), 3)
        only_there(rig, chain)
        proxy.arm_cut(after_bytes)
        assert bounded(rig, chain) in (0, 1, 2)
        rig.settle()
        proxy.arm_cut(None)
        proxy.drop_all()
        eventually(lambda: loaded(rig.client, chain) == 3, "the connection is made anew", PATIENCE_S)


def test_d17_a_link_that_swallows_everything(proxied: tuple[ValkeyServer, TcpProxy]) -> None:
    _, proxy = proxied
    with remote(f"valkey://127.0.0.1:{proxy.port}") as rig:
        chain = chain_of(rig.namespace(), 2)
        only_there(rig, chain)
        proxy.black_hole = True
        for _ in range(4):
            assert bounded(rig, chain) == 0
        report = rig.client.flush("valkey", timeout_s=0.2).result(PATIENCE_S)
        assert report.wanted == 0
        proxy.black_hole = False
        proxy.drop_all()
        eventually(lambda: loaded(rig.client, chain) == 2, "the link is back", PATIENCE_S)


def test_d17_what_waits_for_a_hung_server_is_bounded_in_bytes() -> None:
    spec = {"write": "through", "timeout_s": 60.0}
    limits = {"queue_bytes": 8 * 4096, "in_flight_bytes": 4 * 4096}
    with running_server() as server:
        with remote(server.address, 64, valkey_spec=spec, shutdown_deadline_s=0.5, **limits) as rig:
            space = rig.namespace()
            server.hang()
            for seed in range(16):
                put(rig.client, chain_of(space, 4, seed))
            edge = rig.store.edges[1]
            eventually(lambda: edge.queue.over_budget(edge.down), "the edge is busy")
            assert edge.queue.pending_bytes(edge.down) <= 64 * 4096
            assert loaded(rig.client, chain_of(space, 4, seed=15)) == 4
            rig.client.close()
        server.go_on()


def test_d17_other_tiers_serve_while_the_remote_one_hangs(tmp_path: Path) -> None:
    with running_server() as server, remote(server.address, nvme=tmp_path) as rig:
        space = rig.namespace()
        near, far = chain_of(space, 3), chain_of(space, 2, seed=1)
        put_all(rig.client, near)
        rig.flush("nvme")
        only_there(rig, far)
        server.hang()
        for _ in range(5):
            rig.client.evict("host")
            assert bounded(rig, near) == 3
            assert bounded(rig, far) == 0
        server.go_on()
        eventually(lambda: loaded(rig.client, far) == 2, "the server is back", PATIENCE_S)


def test_blocks_that_another_store_wrote_are_found_by_asking() -> None:
    with running_server() as server:
        with remote(server.address) as rig:
            put_all(rig.client, chain_of(rig.namespace(), 5))
            rig.flush("valkey")
        with remote(server.address) as rig:
            chain = chain_of(rig.namespace(), 5)
            assert rig.client.match(chain).blocks == 0, "match asks nobody"
            assert loaded(rig.client, chain) == 5
            assert rig.count("probed_blocks_total", "valkey") == 5
            other = chain_of(rig.namespace(salt="x"), 5)
            assert loaded(rig.client, other) == 0
            longer = chain_of(rig.namespace(), 7)
            assert loaded(rig.client, longer) == 5
            assert held(rig.store, chain)["valkey"] == [0, 1, 2, 3, 4]


def test_a_prefetch_tells_what_the_remote_tier_has() -> None:
    with running_server() as server:
        with remote(server.address) as rig:
            put_all(rig.client, chain_of(rig.namespace(), 3))
            rig.flush("valkey")
        with remote(server.address) as rig:
            chain = chain_of(rig.namespace(), 4)
            match = rig.client.prefetch(chain).result(PATIENCE_S)
            assert (match.blocks, match.tiers) == (3, {"host": 3, "valkey": 3})
