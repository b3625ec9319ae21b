"""D13, D17, D25: a false daemon, or one of another release. Whatever it hands out or answers, each call of a client is
over by its deadline as a miss or ``Away``, nothing is mapped that could be taken away, an honest daemon is found."""

from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.client_support import chain_of, payloads_of, spec_of
from tests.daemon_load import descriptors_of, mappings_of
from tests.daemon_process import PATIENCE_S, running_daemon
from tests.valkey_server import eventually
from tierkv.daemon.background import Background
from tierkv.daemon.remote import RemoteClient
from tierkv.daemon.verbs import ONE_WAY
from tierkv.daemon.wire import Channel, WireError
from tierkv.errors import Away
from tierkv.slot_table import sealed_memfd, table_bytes
from tierkv.units import MIB

SLOTS = 256
SLACK_S = 20.0
Greet = Callable[[Channel], None]
Answer = Callable[[str], Any]


def facts(**changes: Any) -> list[Any]:
    words = {
        "version": 1, "release": "false", "instance": b"i" * 16, "regions": 1, "region_bytes": MIB,
        "slots_per_region": SLOTS, "load_s": 0.2, "lease_s": 60.0, **changes,
    }  # fmt: skip
    return ["ok", {name: value for name, value in words.items() if value is not None}]


def unsealed(name: str, size_bytes: int) -> int:
    fd = os.memfd_create(name, os.MFD_CLOEXEC)
    os.ftruncate(fd, size_bytes)
    return fd


def greet(
    arena_bytes: int = MIB,
    slots_bytes: int = table_bytes(1, SLOTS),
    *,
    make: Callable[[str, int], int] = sealed_memfd,
    **changes: Any,
) -> Greet:
    def say(channel: Channel) -> None:
        fds = [make("tierkv-arena", arena_bytes), make("tierkv-slots", slots_bytes)]
        try:
            channel.send(facts(**changes), fds)
        finally:
            for fd in fds:
                os.close(fd)

    return say


def many_descriptors(channel: Channel) -> None:
    """Byte by byte, and four with each."""
    with open(os.devnull) as null:
        for _ in range(300):
            socket.send_fds(channel.sock, [b"\0"], [null.fileno()] * 4)


def pipes(channel: Channel) -> None:
    fds = os.pipe()
    try:
        channel.send(facts(), fds)
    finally:  # the client may have ended by then
        for fd in fds:
            os.close(fd)


GREETINGS: dict[str, Greet] = {
    "no descriptor": lambda channel: channel.send(facts()),
    "pipes": pipes,
    "many descriptors": many_descriptors,
    "memory that can get shorter": greet(make=unsealed),
    "less memory than was said": greet(arena_bytes=4096),
    "a smaller table than was said": greet(slots_bytes=4096, slots_per_region=1 << 16),
    "regions without end": greet(regions=1 << 62),
    "regions below 0": greet(regions=-1),
    "no regions": greet(regions=0),
    "sizes as text": greet(region_bytes="1 MiB"),
    "no sizes": greet(slots_per_region=None),
    "no name": greet(instance=None),
    "a name that is no name": greet(instance=5),
    "no deadline": greet(load_s=None),
    "a deadline that never comes": greet(load_s=float("inf")),
    "a deadline that is none": greet(lease_s=float("nan")),
    "no reply": lambda channel: channel.send(["ok", 5]),
    "an odd error": lambda channel: channel.send(["error", 5]),
    "garbage": lambda channel: channel.sock.sendall(os.urandom(500)),
    "nothing": lambda channel: None,
}
ANSWERS: dict[str, Any] = {
    "no words": ["ok", {}],
    "numbers": ["ok", dict.fromkeys(("blocks", "result", "slots", "ended", "report", "stats", "reasons"), 7)],
    "short blobs": [
        "ok",
        {"blocks": 2, "slots": b"123", "generations": b"", "expected": b"", "positions": b"12345678", "parts": [0]},
    ],
    "no reply": "what?",
    "an error that nobody knows": ["error", 5, 5],
    "garbage in lists": ["ok", {"ended": [[1]], "pending": "x", "events": [[1]], "tiers": [], "blocks": 1}],
}  # fmt: skip


@contextmanager
def false_daemon(path: Path, welcome: Greet, answer: Answer) -> Iterator[None]:
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    listener.bind(str(path))
    listener.listen(64)
    channels: list[Channel] = []

    def serve(channel: Channel) -> None:
        try:
            channel.receive(by_s=time.monotonic() + PATIENCE_S)
            welcome(channel)
            while True:
                verb, _ = channel.receive_whenever(within_s=PATIENCE_S)
                if verb not in ONE_WAY:
                    channel.send(answer(verb))
        except (OSError, EOFError, WireError):
            pass

    def accept() -> None:
        while True:
            try:
                channels.append(Channel(listener.accept()[0]))
            except OSError:
                return
            threads.append(threading.Thread(target=serve, args=(channels[-1],)))
            threads[-1].start()

    threads = [threading.Thread(target=accept)]
    threads[0].start()
    try:
        yield
    finally:
        listener.shutdown(socket.SHUT_RDWR)
        threads[0].join(PATIENCE_S)
        for channel in channels:
            with_end(channel)
        for thread in threads:
            thread.join(PATIENCE_S)
            assert not thread.is_alive()
        for channel in channels:
            channel.close()
        listener.close()
        path.unlink()


def with_end(channel: Channel) -> None:
    try:
        channel.sock.shutdown(socket.SHUT_RDWR)
    except OSError:
        pass


def use(client: RemoteClient) -> None:
    """Every verb, once."""
    space = client.open_namespace(spec_of())
    chain = chain_of(space, 2)
    empty: dict[str, Callable[[], object]] = {
        "match": lambda: client.match(chain).blocks,
        "load": lambda: len(client.load(chain, timeout_s=0.1)),
        "load_async": lambda: len(client.load_async(chain, timeout_s=0.1).result(SLACK_S)),
        "prefetch": lambda: client.prefetch(chain, timeout_s=0.1).result(SLACK_S).blocks,
        "put": lambda: client.put(chain, payloads_of(chain)).stored,
        "reserve": lambda: client.reserve(chain) or 0,
        "announce": lambda: int(client.announce(chain).accepted),
        "watch": lambda: client.watch(chain, timeout_s=0.1).result(SLACK_S).match.blocks,
        "health": lambda: int(client.health().ready),
    }
    raising: dict[str, Callable[[], object]] = {
        "stats": client.stats,
        "events": client.events,
        "explain": lambda: client.explain(chain),
        "evict": lambda: client.evict("host"),
        "clear": lambda: client.clear(timeout_s=0.1).result(SLACK_S),
        "flush": lambda: client.flush("nvme", timeout_s=0.1).result(SLACK_S),
    }
    for name, call in empty.items():
        start_s = time.monotonic()
        assert call() in (0, 1), name
        assert time.monotonic() - start_s < SLACK_S, name
    for name, call in raising.items():
        start_s = time.monotonic()
        try:
            call()
        except Away:
            pass
        assert time.monotonic() - start_s < SLACK_S, name


@pytest.mark.filterwarnings("error::pytest.PytestUnhandledThreadExceptionWarning")
@pytest.mark.parametrize("name", sorted(GREETINGS))
def test_d25_nothing_false_is_mapped(tmp_path: Path, name: str) -> None:
    path = tmp_path / "s"
    with false_daemon(path, GREETINGS[name], lambda verb: ["ok", {}]):
        start = descriptors_of(os.getpid())
        with RemoteClient(str(path), call_s=0.3) as client:
            use(client)
            assert client.link.memory is None
            assert mappings_of(os.getpid()) == 0
            assert descriptors_of(os.getpid()) < start + 200
            assert client.link._seeker is not None
            assert client.link._seeker.is_alive()


@pytest.mark.filterwarnings("error::pytest.PytestUnhandledThreadExceptionWarning")
@pytest.mark.parametrize("name", sorted(ANSWERS))
def test_d13_an_answer_that_makes_no_sense_is_a_miss(tmp_path: Path, name: str) -> None:
    path = tmp_path / "s"
    with (
        false_daemon(path, greet(), lambda verb: ["ok", {"ranks": [0]}] if verb == "open" else ANSWERS[name]),
        RemoteClient(str(path), call_s=0.3) as client,
    ):
        use(client)


def test_d25_an_honest_daemon_is_found_after_a_false_one(tmp_path: Path) -> None:
    path = tmp_path / "t.sock"
    with RemoteClient(str(path), call_s=0.5) as client:
        for name in ("no descriptor", "no sizes", "less memory than was said"):
            with false_daemon(path, GREETINGS[name], lambda verb: ["ok", {}]):
                space = client.open_namespace(spec_of())
                assert client.match(chain_of(space, 2)).blocks == 0
        with running_daemon(tmp_path):
            chain = chain_of(space, 2)
            eventually(lambda: client.put(chain, payloads_of(chain)).stored == 2, "it is found", PATIENCE_S)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_call_that_fails_in_a_way_nobody_thought_of_is_over_nevertheless() -> None:
    def fail() -> int:
        raise ZeroDivisionError

    with pytest.raises(Away, match="nobody thought of"):
        Background().run(fail).result(SLACK_S)
