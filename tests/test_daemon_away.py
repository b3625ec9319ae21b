"""D17, D25: a daemon that hangs, comes late or is gone: every call is over by its deadline, as a miss or a drop, and no
answer is ever taken for another's."""

from __future__ import annotations

import gc
import socket
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import tierkv
from tests.client_support import (
    DAEMON,
    FACE,
    Gate,
    Live,
    chain_of,
    check_lease,
    live,
    payloads_of,
    put_all,
)
from tests.daemon_load import open_space
from tests.daemon_process import PATIENCE_S, Daemon, running_daemon
from tests.valkey_server import eventually
from tierkv.copier import LayerPages, PagedKV
from tierkv.daemon import link as link_module
from tierkv.daemon import server as server_module
from tierkv.daemon.remote import RemoteClient
from tierkv.daemon.replies import VersionError
from tierkv.errors import Away, ClosedError
from tierkv.testing.faults.process import hung
from tierkv.testing.threads import run_together

SLACK_S = 20.0
"""A busy machine may be late; a call without a deadline would be later."""


def on_a_daemon(test: Callable[[Live], None]) -> Callable[[Path], None]:
    """Gives a test a daemon in this process, so that its store can be looked into."""

    def run(tmp_path: Path) -> None:
        token = FACE.set(DAEMON)
        try:
            with live(16, nvme=tmp_path) as rig:
                test(rig)
        finally:
            FACE.reset(token)

    run.__name__, run.__doc__ = test.__name__, test.__doc__
    return run


@pytest.fixture(scope="module")
def daemon(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Daemon]:
    with running_daemon(tmp_path_factory.mktemp("away"), host_capacity="8 MiB") as daemon:
        yield daemon


def there(client: RemoteClient) -> bool:
    try:
        client.stats()
    except Away:
        return False
    return True


def test_d17_a_daemon_that_stands_still_is_a_miss_by_the_deadline(daemon: Daemon) -> None:
    with RemoteClient(str(daemon.socket), call_s=0.3) as client:
        eventually(lambda: there(client), "the daemon answers", PATIENCE_S)
        space = open_space(client)
        chain, other = chain_of(space, 2), chain_of(space, 2, seed=1)
        assert client.put(chain, payloads_of(chain)).stored == 2
        lease = client.load(chain)
        kv = PagedKV(((LayerPages((np.zeros((8, 64 * 1024), np.uint8),)),),))
        empty: dict[str, Callable[[], object]] = {
            "match": lambda: client.match(chain).blocks,
            "load": lambda: len(client.load(chain, timeout_s=0.1)),
            "load_async": lambda: len(client.load_async(chain, timeout_s=0.1).result(SLACK_S)),
            "prefetch": lambda: client.prefetch(chain, timeout_s=0.1).result(SLACK_S).blocks,
            "put": lambda: client.put(other, payloads_of(other)).stored,
            "reserve": lambda: client.reserve(other) or 0,
            "offload": lambda: client.offload(kv, [[[0]], [[1]]], other).result(SLACK_S).stored,
            "pin": lambda: client.pin(chain, timeout_s=0.1),
            "unpin": lambda: client.unpin(chain),
            "health": lambda: int(client.health().ready),
        }
        raising: list[Callable[[], object]] = [
            client.stats, client.events, client.wake, lambda: client.evict("host"),
            lambda: client.clear().result(SLACK_S), lambda: client.flush("nvme").result(SLACK_S),
        ]  # fmt: skip
        with hung(daemon.pid):
            for name, call in empty.items():
                start_s = time.monotonic()
                assert call() == 0, name
                assert time.monotonic() - start_s < SLACK_S, name
            for call in raising:
                start_s = time.monotonic()
                with pytest.raises(Away):
                    call()
                assert time.monotonic() - start_s < SLACK_S
            for i in range(2):
                assert bytes(lease.view(i)) == payloads_of(chain)[i][0], (
                    "a lease is good whatever the daemon does"
                )
        eventually(lambda: there(client), "the daemon is found again", PATIENCE_S)
        assert client.link.reconnects == 0, "it is the same daemon, and the same session"
        lease.release()
        eventually(
            lambda: client.stats()["leases"] == 0, "nothing of the calls that were late is held", PATIENCE_S
        )


@on_a_daemon
def test_d13_an_answer_that_comes_late_is_nobodys(rig: Live) -> None:
    """A load waits for a disk; its client has given up and asks on. What the load gets is given back."""
    space, client = rig.namespace(), rig.client
    chain, other = chain_of(space, 3), chain_of(space, 2, seed=1)
    put_all(client, chain)
    rig.flush("nvme")
    client.evict("host")
    put_all(client, other)
    gate = rig.tiers["nvme"].before = Gate("get_into")
    words = {
        "namespace": chain.namespace.digest,
        "hashes": b"".join(chain.hashes),
        "tokens": chain.num_tokens,
    }
    by_s = time.monotonic() + 0.05
    with pytest.raises(Away) as away:
        client.link.call("load", {**words, "lease": 777, "timeout_s": PATIENCE_S, "owner": "late"}, by_s)
    assert away.value.asked
    client.link.tell("release", {"lease": 777})
    gate.reached()
    eventually(lambda: client.match(other).blocks == 2, "the next call has its own answer", PATIENCE_S)
    gate.open()
    rig.settle()
    with client.load(other) as lease:
        assert len(lease) == 2
        check_lease(rig.store, lease)
    eventually(lambda: client.stats()["leases"] == 0, "the late lease was not kept", PATIENCE_S)


@on_a_daemon
def test_d15_what_was_said_while_nobody_listened_is_said_later(rig: Live) -> None:
    """A release must not be lost with the connection that it would have gone over."""
    client, server = rig.client, rig.client.server  # type: ignore[attr-defined]
    chain = chain_of(rig.namespace(), 2)
    put_all(client, chain)
    leases = [client.load(chain) for _ in range(3)]
    draft = client.reserve(chain_of(rig.namespace(), 1, seed=5))
    assert draft is not None
    for channel in list(server._threads.values()):
        channel.sock.shutdown(socket.SHUT_RDWR)
    for lease in leases:
        lease.release()
    draft.drop()
    eventually(lambda: there(client), "the daemon is found again", PATIENCE_S)
    eventually(lambda: client.stats()["leases"] == 0, "the leases are given back", PATIENCE_S)
    eventually(lambda: rig.store.host.usage().used_bytes == 2 * 4096, "the draft's slot is free")


@on_a_daemon
def test_d15_a_session_whose_connections_broke_goes_on(rig: Live) -> None:
    """Its process lives, so it may be reading and writing: nothing is taken from it, and it commits afterwards."""
    client, server = rig.client, rig.client.server  # type: ignore[attr-defined]
    space = rig.namespace()
    chain, other = chain_of(space, 2), chain_of(space, 2, seed=1)
    put_all(client, chain)
    lease, draft = client.load(chain), client.reserve(other)
    assert draft is not None
    for channel in list(server._threads.values()):
        channel.sock.shutdown(socket.SHUT_RDWR)
    eventually(lambda: not server._threads, "the daemon has seen it")
    for seed in range(2, 12):  # room is short, and must not be made here
        store_directly(rig, chain_of(space, 3, seed))
    check_lease(rig.store, lease)
    for i in range(2):
        draft.view(i, 0)[:] = payloads_of(other)[i][0]
    sealed = draft.seal()
    eventually(lambda: there(client), "the daemon is found again", PATIENCE_S)
    assert client.commit(sealed, other).stored == 2
    lease.release()
    eventually(lambda: client.stats()["leases"] == 0, "the lease is given back")


def store_directly(rig: Live, chain: Any) -> None:
    from tierkv.client import Client

    owner = Client(rig.store)
    owner.open_namespace(chain.namespace.spec)
    owner.put(chain, payloads_of(chain))


@on_a_daemon
def test_d16_more_threads_than_connections(rig: Live) -> None:
    client, space = rig.client, rig.namespace()
    chain = chain_of(space, 2)
    put_all(client, chain)

    def work() -> None:
        for _ in range(10):
            with client.load(chain, timeout_s=PATIENCE_S) as lease:
                assert len(lease) == 2
                check_lease(client.server.store, lease)  # type: ignore[attr-defined]

    run_together([work] * (3 * link_module.MOST_CONNECTIONS), PATIENCE_S)
    assert len(client.link._open) <= link_module.MOST_CONNECTIONS  # type: ignore[attr-defined]


@on_a_daemon
def test_d16_calls_that_wait_do_not_keep_others_beyond_their_deadline(rig: Live) -> None:
    """All connections wait for a hung disk; one more load is over by its own deadline."""
    client = rig.client
    chain = chain_of(rig.namespace(), 2)
    put_all(client, chain)
    rig.flush("nvme")
    client.evict("host")
    gate = rig.tiers["nvme"].before = Gate("get_into")
    waiting = [client.load_async(chain, timeout_s=PATIENCE_S) for _ in range(40)]
    gate.reached()
    start_s = time.monotonic()
    assert len(client.load_async(chain, timeout_s=0.05).result(SLACK_S)) == 0
    assert time.monotonic() - start_s < SLACK_S
    gate.open()
    for future in waiting:
        with future.result(PATIENCE_S) as lease:
            assert len(lease) in (0, 2)
            check_lease(client.server.store, lease) if len(lease) else None  # type: ignore[attr-defined]


@on_a_daemon
def test_d15_a_lease_past_its_deadline_costs_its_holder_the_connection(rig: Live) -> None:
    client, server = rig.client, rig.client.server  # type: ignore[attr-defined]
    chain = chain_of(rig.namespace(), 2)
    put_all(client, chain)
    lease = client.load(chain, owner="request 7")
    store = rig.store
    rig.clock.advance(3600)
    store.upkeep.make_rounds()
    assert rig.count("leases_overdue_total") == 1
    eventually(lambda: there(client), "it comes back")
    assert [its["leases"] for its in server.sessions()] == [1], "nothing was taken from it"
    assert "request 7" in store.leases.all()[0].owner
    check_lease(store, lease)
    lease.release()
    eventually(lambda: client.stats()["leases"] == 0, "and it gives back what it held")


def test_d25_a_close_while_the_daemon_stands_still_is_heard_later(daemon: Daemon) -> None:
    client = RemoteClient(str(daemon.socket), call_s=PATIENCE_S)
    with RemoteClient(str(daemon.socket), call_s=PATIENCE_S) as observer:
        space = open_space(client)
        chain = chain_of(space, 2, seed=9)
        client.put(chain, payloads_of(chain))
        client.load(chain)
        assert observer.stats()["leases"] == 1
        with hung(daemon.pid):
            start_s = time.monotonic()
            client.close()
            assert time.monotonic() - start_s < SLACK_S
        eventually(
            lambda: there(observer) and observer.stats()["leases"] == 0, "the lease is gone", PATIENCE_S
        )


@on_a_daemon
def test_a_close_answers_whoever_waits(rig: Live) -> None:
    client = rig.client
    chain = chain_of(rig.namespace(), 2)
    put_all(client, chain)
    rig.flush("nvme")
    client.evict("host")
    gate = rig.tiers["nvme"].before = Gate("get_into")
    found: list[int] = []
    threads = [
        threading.Thread(target=lambda: found.append(len(client.load(chain, timeout_s=600.0))))
        for _ in range(3)
    ]
    for thread in threads:
        thread.start()
    waiting = [client.load_async(chain, timeout_s=600.0) for _ in range(3)]
    gate.reached()
    client.close()
    for thread in threads:
        thread.join(SLACK_S)
        assert not thread.is_alive()
    assert found == [0, 0, 0]
    assert [len(future.result(SLACK_S)) for future in waiting] == [0, 0, 0]
    gate.open()
    with pytest.raises(ClosedError):
        client.match(chain)


@on_a_daemon
def test_handles_of_a_client_that_was_closed(rig: Live) -> None:
    client, space = rig.client, rig.namespace()
    chain = chain_of(space, 2)
    put_all(client, chain)
    lease, draft = client.load(chain), client.reserve(chain_of(space, 1, seed=1))
    assert draft is not None
    sealed = draft.seal()
    client.close()
    with pytest.raises(ClosedError):
        lease.view(0)
    lease.release()
    sealed.drop()


@on_a_daemon
def test_d21_a_generation_that_changed_during_a_copy_is_no_hit(rig: Live) -> None:
    """The daemon was made to give the slot to somebody else: the copy is refused, whatever was copied."""
    client, chain = rig.client, chain_of(rig.namespace(), 1)
    put_all(client, chain)
    pages = np.zeros((2, 4096), np.uint8)
    kv = PagedKV(((LayerPages((pages,)),),))
    with client.load(chain) as lease:
        slot = lease.ref(0, 0).slot

        def disturb(group: int, layer: int) -> None:
            rig.client.server.store.host.arena.table.generations[slot] += 1  # type: ignore[attr-defined]

        assert client.onboard(lease, kv, [[[0]]]).result(PATIENCE_S)
        assert not client.onboard(lease, kv, [[[0]]], on_layer=disturb).result(PATIENCE_S)


def test_no_daemon_at_all_is_a_miss_at_once(tmp_path: Path) -> None:
    with RemoteClient(str(tmp_path / "nobody")) as client:
        space = open_space(client)
        chain = chain_of(space, 2)
        assert client.match(chain).blocks == 0
        assert len(client.load(chain)) == 0
        assert client.put(chain, payloads_of(chain)).dropped == {"no_daemon": 2}
        assert not client.health().ready
    gc.collect()


@on_a_daemon
def test_another_version_of_the_protocol_is_refused_in_words(rig: Live) -> None:
    words = rf"speaks version {server_module.VERSION} .* not 99"
    with (
        pytest.MonkeyPatch.context() as patch,
        RemoteClient(str(rig.client.server.path)) as client,  # type: ignore[attr-defined]
    ):
        patch.setattr(link_module, "VERSION", 99)
        with pytest.raises(VersionError, match=words):
            open_space(client)


def test_d29_a_path_that_no_socket_can_have_is_refused_at_once() -> None:
    with pytest.raises(tierkv.ConfigError, match="at most 107 bytes"):
        tierkv.connect("unix:///tmp/" + "x" * 150 + "/socket")
