"""D25, D15: peers that speak the protocol well and mean ill, or have lost count: what they name, repeat or pile up does
no harm to others."""

from __future__ import annotations

import os
import select
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.client_support import DAEMON, FACE, Live, chain_of, live, spec_of
from tests.daemon_load import memory_of, threads_of
from tests.daemon_process import PATIENCE_S, Daemon, running_daemon
from tests.test_daemon_hostile import frame, hello
from tests.valkey_server import eventually
from tierkv.daemon import server as server_module
from tierkv.daemon.session import Session
from tierkv.daemon.wire import HEAD, MAX_BODY_BYTES, Channel
from tierkv.daemon.words import say_chain, say_spec
from tierkv.errors import HandleError
from tierkv.units import MIB


class Peer:
    """A connection that says what it likes. ``answer`` is that to its hello."""

    def __init__(self, path: Path, **changes: Any) -> None:
        self.channel = Channel(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM))
        self.channel.sock.settimeout(PATIENCE_S)
        self.channel.sock.connect(str(path))
        self.channel.sock.sendall(hello(**changes))
        self.answer = self.hear(with_fds=True)
        for fd in self.channel.take_fds():
            os.close(fd)

    def hear(self, **options: Any) -> Any:
        return self.channel.receive(by_s=time.monotonic() + PATIENCE_S, **options)

    def ask(self, verb: str, **words: Any) -> Any:
        self.channel.sock.sendall(frame([verb, words]))
        return self.hear()

    def close(self) -> None:
        self.channel.close()


@pytest.fixture(scope="module")
def daemon(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Daemon]:
    with running_daemon(tmp_path_factory.mktemp("liars"), host_capacity="8 MiB") as daemon:
        yield daemon


def on_a_daemon(test: Callable[[Live], None]) -> Callable[[], None]:
    """Gives a test a daemon in this process, so that it can be looked into."""

    def run() -> None:
        token = FACE.set(DAEMON)
        try:
            with live(16) as rig:
                test(rig)
        finally:
            FACE.reset(token)

    run.__name__, run.__doc__ = test.__name__, test.__doc__
    return run


def sessions_of(rig: Live) -> list[Session]:
    return rig.client.server._book.all()  # type: ignore[attr-defined, no-any-return]


# ---- memory


@pytest.mark.parametrize(
    "small", [b"\x90", b"\x80", b"\xa2ab", b"\xcd\xff\xff"], ids=["[]", "{}", "text", "int"]
)
def test_d25_a_body_of_many_small_values_does_not_take_the_memory(daemon: Daemon, small: bytes) -> None:
    """A list of lists of them, each of allowed length: sixty bytes of memory for each byte that was sent."""
    inner = b"\xdc\xff\xff" + small * 65_535
    count = (MAX_BODY_BYTES - 100) // len(inner)
    body = b"\x92\xa5stats\x81\xa1x\xdc" + count.to_bytes(2, "big") + inner * count
    before = memory_of(daemon.pid, "VmHWM")
    peer = Peer(daemon.socket)
    peer.channel.sock.sendall(HEAD.pack(len(body)) + body)
    with pytest.raises((EOFError, ConnectionError)):
        peer.hear()
    peer.close()
    assert memory_of(daemon.pid, "VmHWM") < before + 160 * MIB
    with daemon.client() as client:
        assert client.health().ready


def test_d25_a_block_over_endless_ranks_is_refused_at_once(daemon: Daemon) -> None:
    with daemon.client() as client:
        spec = say_spec(client.open_namespace(spec_of()).namespace.spec)
    peer = Peer(daemon.socket)
    before = memory_of(daemon.pid, "VmHWM")
    for size in ("tp_size", "pp_size", "cp_size"):
        for replicated in (False, True):
            group = {**spec["layout"]["groups"][0], "replicated": replicated}
            layout = {**spec["layout"], "groups": [group], size: 2**63}
            kind, name, text = peer.ask("open", spec={**spec, "layout": layout}, ranks=None)
            assert (kind, name) == ("error", "LayoutError")
            assert "ranks" in text
    peer.close()
    assert memory_of(daemon.pid, "VmHWM") < before + 16 * MIB


def test_d25_many_messages_that_are_not_ended_do_not_take_the_memory(daemon: Daemon) -> None:
    before = memory_of(daemon.pid, "VmHWM")
    peers = [Peer(daemon.socket) for _ in range(24)]
    body = HEAD.pack(MAX_BODY_BYTES) + bytes(MAX_BODY_BYTES - 1)
    refused = 0
    for peer in peers:
        try:
            peer.channel.sock.sendall(body)
        except (BrokenPipeError, ConnectionResetError):
            refused += 1
    for peer in peers:
        peer.close()
    assert refused
    assert memory_of(daemon.pid, "VmHWM") < before + 200 * MIB

    def takes_a_long_one() -> bool:
        peer = Peer(daemon.socket)
        try:
            heard = peer.ask("match", namespace=bytes(32), hashes=bytes(MAX_BODY_BYTES // 2), tokens=1)
        except (EOFError, ConnectionError):
            return False
        finally:
            peer.close()
        return bool(heard[1] == "UnknownNamespace")

    for _ in range(8):
        eventually(takes_a_long_one, "all of it was given back", PATIENCE_S)


# ---- words


def test_d25_long_words_of_a_peer_come_back_short(daemon: Daemon) -> None:
    long = b"\0" * (MAX_BODY_BYTES - 1000)
    peer = Peer(daemon.socket)
    for words in ({"hashes": [long]}, {"hashes": b"", "namespace": b"", "tokens": long}):
        kind, _, text = peer.ask("match", **words)
        assert kind == "error"
        assert len(text) < 3000
    assert len(peer.ask("v" * 1_000_000)[2]) < 3000
    assert len(str(peer.ask("evict", tier="t" * 1_000_000, timeout_s=1.0))) < 6000
    peer.close()
    before = len(daemon.log)
    peer = Peer(daemon.socket, owner=long)
    assert peer.answer[0] == "error"
    assert len(peer.answer[2]) < 3000
    peer.close()
    assert len(daemon.log) < before + 10_000


def test_d25_a_name_cannot_forge_a_line_of_the_log(tmp_path: Path) -> None:
    with running_daemon(tmp_path) as daemon:
        peer = Peer(daemon.socket, owner="me\n2026 ERROR all is lost \x1b[2J")
        peer.channel.sock.sendall(frame("no request"))
        with pytest.raises((EOFError, ConnectionError)):
            peer.hear()
        peer.close()
        eventually(lambda: "the connection of me?2026 ERROR" in daemon.log, "the line is there", PATIENCE_S)
        assert "\x1b" not in daemon.log


# ---- connections

CROWD = """
import socket, sys
from tests.test_daemon_liars import Peer
peers = []
try:
    while len(peers) < 600:
        peers.append(Peer(sys.argv[1]))
except (EOFError, OSError):
    pass
print(len(peers), flush=True)
sys.stdin.read()
"""


def test_d25_one_process_does_not_take_all_connections(tmp_path: Path) -> None:
    with running_daemon(tmp_path) as daemon:
        threads = threads_of(daemon.pid)
        crowd = subprocess.Popen(
            [sys.executable, "-c", CROWD, str(daemon.socket)],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        )  # fmt: skip
        try:
            assert crowd.stdout is not None
            assert select.select([crowd.stdout], [], [], PATIENCE_S)[0]
            assert int(crowd.stdout.readline()) == server_module.MOST_OF_ONE
            with daemon.client() as client:
                assert client.health().ready
        finally:
            crowd.kill()
            crowd.communicate()
        eventually(lambda: threads_of(daemon.pid) <= threads, "they are forgotten", PATIENCE_S)
        peers = [Peer(daemon.socket) for _ in range(20)]
        for peer in peers:
            peer.close()


# ---- who is gone, and who is not


@on_a_daemon
def test_d25_a_process_that_lives_is_not_taken_for_one_that_ended(rig: Live) -> None:
    """The number of a descriptor that told of an end is given to another process's before anybody looks."""
    draft = rig.client.reserve(chain_of(rig.namespace(), 2))
    assert draft is not None
    book = rig.client.server._book  # type: ignore[attr-defined]
    (pidfd,) = book._pidfds
    book._gone(pidfd)
    assert len(sessions_of(rig)) == 1
    assert sessions_of(rig)[0].facts()["drafts"] == 1
    draft.drop()


@on_a_daemon
def test_d15_what_a_dead_session_said_last_announces_nothing(rig: Live) -> None:
    """Its words lie in the socket when its end is known already."""
    chain = chain_of(rig.namespace(), 2)
    (session,) = sessions_of(rig)
    session.end()
    assert not rig.client.announce(chain, timeout_s=3600.0).accepted
    assert rig.client.watch(chain, grace_s=3600.0, timeout_s=3600.0).result(PATIENCE_S).end == "late"
    assert rig.store.board.stats() == {"announcements": 0, "announced_blocks": 0, "watches": 0}


@on_a_daemon
def test_d15_a_number_is_given_to_one_announcement_and_one_watch(rig: Live) -> None:
    chain = chain_of(rig.namespace(), 2)
    server = rig.client.server  # type: ignore[attr-defined]
    peer = Peer(server.path)
    assert peer.ask("open", spec=say_spec(chain.namespace.spec), ranks=None)[0] == "ok"
    words = {**say_chain(chain), "timeout_s": 3600.0, "number": 7}
    assert peer.ask("announce", first=0, count=1, **words) == ["ok", {"accepted": True}]
    assert peer.ask("announce", first=1, count=1, **words)[:2] == ["error", HandleError.__name__]
    assert peer.ask("watch", count=1, **{**words, "number": 8}) == ["ok", {}]
    for number in (7, 8):
        assert peer.ask("watch", count=1, **{**words, "number": number})[:2] == [
            "error",
            HandleError.__name__,
        ]
    assert rig.store.board.stats()["announcements"] == 1
    eventually(lambda: rig.store.board.stats()["watches"] == 1, "those that were refused do not wait")
    peer.channel.sock.sendall(frame(["unannounce", {"number": 7}]))
    assert peer.ask("watched", timeout_s=PATIENCE_S)[1]["ended"][0][:2] == [8, "abandoned"]
    peer.close()
    eventually(lambda: len(sessions_of(rig)) == 1, "nothing is held")
