"""D25: peers that send garbage, half messages, huge lengths, deep nesting, wrong words or nothing at all lose their own
connection at most; a good client works all the while."""

from __future__ import annotations

import gc
import os
import random
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgpack
import pytest

from tests.client_support import DAEMON, FACE, Live, chain_of, live, put_all
from tests.daemon_load import Load, descriptors_of, memory_of, threads_of
from tests.daemon_process import PATIENCE_S, Daemon, running_daemon
from tests.valkey_server import eventually
from tierkv.daemon.verbs import ONE_WAY, VERBS
from tierkv.daemon.wire import HEAD, MAX_BODY_BYTES, VERSION, Channel
from tierkv.daemon.words import say_spec
from tierkv.testing.threads import run_together
from tierkv.units import MIB


@pytest.fixture(scope="module")
def daemon(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Daemon]:
    with running_daemon(tmp_path_factory.mktemp("hostile"), host_capacity="8 MiB") as daemon:
        yield daemon


def frame(message: Any) -> bytes:
    body = msgpack.packb(message)
    return HEAD.pack(len(body)) + body


def hello(**changes: Any) -> bytes:
    words = {"version": VERSION, "session": os.urandom(16), "owner": "hostile", **changes}
    return frame(["hello", words])


def nested(depth: int) -> bytes:
    return HEAD.pack(depth + 1) + b"\x91" * depth + b"\x00"


ATTACKS: dict[str, Callable[[], bytes]] = {
    "garbage": lambda: os.urandom(5000),
    "garbage with a length": lambda: HEAD.pack(4000) + os.urandom(4000),
    "half a head": lambda: b"\x05\x00",
    "half a body": lambda: hello()[:-5],
    "half a body of the largest size": lambda: HEAD.pack(MAX_BODY_BYTES) + b"\x00" * 1000,
    "a huge length": lambda: struct.pack("<I", 0xFFFFFFFF) + b"\x00" * 1000,
    "deep nesting": lambda: nested(1_000_000),
    "deep nesting after hello": lambda: hello() + nested(1_000_000),
    "an endless list": lambda: HEAD.pack(5) + b"\xdd\xff\xff\xff\xff",
    "no hello": lambda: frame(["match", {}]),
    "no request": lambda: frame({"hello": 1}),
    "a short session name": lambda: hello(session=b"x"),
    "an owner that is no text": lambda: hello(owner=5),
    "wrong text": lambda: HEAD.pack(3) + b"\xa2\xff\xfe",
    "hello, then garbage": lambda: hello() + os.urandom(3000),
    "hello, then half a message": lambda: hello() + frame(["stats", {}])[:-1],
    "hello and a thousand questions, no answer taken": lambda: hello() + frame(["stats", {}]) * 1000,
    "nothing": lambda: b"",
}


def attack(path: Path, said: bytes, dice: random.Random) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as sock:
        sock.settimeout(PATIENCE_S)
        sock.connect(str(path))
        try:
            cut = dice.randrange(len(said) + 1)
            sock.sendall(said[:cut])
            sock.sendall(said[cut:])
            if dice.random() < 0.5:
                sock.shutdown(socket.SHUT_WR)
                while sock.recv(65536):
                    pass
        except (BrokenPipeError, ConnectionResetError):  # it was thrown out already
            pass


def test_d25_sixteen_who_send_garbage_do_no_harm_to_a_good_client(daemon: Daemon) -> None:
    with daemon.client() as client:
        load = Load(client, 1)
        load.step()
        start = descriptors_of(daemon.pid), threads_of(daemon.pid)
        memory = memory_of(daemon.pid, "RssAnon")
        stop = threading.Event()

        def good() -> None:
            for _ in range(150):
                load.step()
            load.let_go()
            stop.set()

        def bad(seed: int) -> None:
            dice, names = random.Random(seed), sorted(ATTACKS)
            while not stop.is_set():
                attack(daemon.socket, ATTACKS[dice.choice(names)](), dice)

        run_together([good, *(lambda seed=seed: bad(seed) for seed in range(16))], 4 * PATIENCE_S)  # type: ignore[misc]
        assert load.loaded
        gc.collect()
        eventually(
            lambda: descriptors_of(daemon.pid) <= start[0] and threads_of(daemon.pid) <= start[1],
            "connections, threads and sessions are gone", PATIENCE_S,
        )  # fmt: skip
        assert memory_of(daemon.pid, "RssAnon") < memory + 64 * MIB
        assert client.stats()["leases"] == 0
    assert "Traceback" not in daemon.log


@pytest.mark.parametrize("name", sorted(ATTACKS))
def test_d25_each_kind_of_garbage_ends_its_own_connection(daemon: Daemon, name: str) -> None:
    """One that sends nothing, or half, is left to its deadline."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as sock:
        sock.settimeout(PATIENCE_S)
        sock.connect(str(daemon.socket))
        try:
            sock.sendall(ATTACKS[name]())
            sock.shutdown(socket.SHUT_WR)
            while sock.recv(65536):
                pass
        except (BrokenPipeError, ConnectionResetError):
            pass
    with daemon.client() as client:
        assert client.health().ready


def anything(dice: random.Random, depth: int = 0) -> Any:
    kinds = [
        lambda: None, lambda: True, lambda: dice.choice([0, 1, -1, 2**31, 2**63 - 1, -(2**63), 2**64 - 1]),
        lambda: dice.choice([0.5, float("nan"), float("inf"), -1e308]), lambda: "x" * dice.randrange(50),
        lambda: os.urandom(dice.choice([0, 1, 16, 31, 32, 33, 64, 4096])), lambda: dice.randrange(100),
        lambda: [anything(dice, depth + 1) for _ in range(dice.randrange(4))] if depth < 4 else [],
        lambda: {str(i): anything(dice, depth + 1) for i in range(dice.randrange(4))} if depth < 4 else {},
    ]  # fmt: skip
    return dice.choice(kinds)()


@pytest.mark.filterwarnings("error::pytest.PytestUnhandledThreadExceptionWarning")
def test_d25_words_of_every_kind_are_answered_with_an_error(tmp_path: Path) -> None:
    """The right words of each verb, with some of them replaced by anything; and nothing of it stays."""
    token = FACE.set(DAEMON)
    try:
        with live(16, nvme=tmp_path) as rig:
            _garble(rig)
    finally:
        FACE.reset(token)


def _garble(rig: Live) -> None:
    dice = random.Random(5)
    chain = chain_of(rig.namespace(), 2)
    put_all(rig.client, chain)
    right = {
        "namespace": chain.namespace.digest, "hashes": b"".join(chain.hashes), "tokens": chain.num_tokens,
        "first": 0, "count": 2, "rank": 0, "absent": [], "retention": None, "timeout_s": 0.01, "owner": "x",
        "local": 0, "tier": "host", "keep": False, "after": 0, "salt": None, "seconds": 0.1, "blocks": 1,
        "report": 1, "writing": [], "sums": bytes(16), "ttl_s": 0.1,
    }  # fmt: skip
    server = rig.client.server  # type: ignore[attr-defined]
    spec = say_spec(chain.namespace.spec)
    for turn in range(3000):
        if turn % 50 == 0:
            channel = Channel(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM))
            channel.sock.settimeout(PATIENCE_S)
            channel.sock.connect(str(server.path))
            channel.sock.sendall(hello())
            assert receive(channel, with_fds=True)[0] == "ok"
            for fd in channel.take_fds():
                os.close(fd)
            channel.sock.sendall(frame(["open", {"spec": spec, "ranks": None}]))
            assert receive(channel)[0] == "ok"
        verb = dice.choice([name for name in sorted(VERBS) if name not in ("sleep", "bye", "events")])
        words: dict[str, Any] = {**right, "lease": turn, "draft": turn, "spec": spec}
        for name in dice.sample(sorted(words), dice.randrange(4)):
            words[name] = anything(dice)
        channel.sock.sendall(frame([verb, words]) + frame(["health", {}]))
        heard = receive(channel)
        assert heard[0] in ("ok", "error"), (verb, words, heard)
        if verb not in ONE_WAY:
            assert receive(channel)[1]["state"], (verb, words)
        if turn % 50 == 49:
            channel.sock.sendall(frame(["bye", {}]))
            assert receive(channel)[0] == "ok"
            channel.close()
    rig.client.clear().result(PATIENCE_S)
    eventually(lambda: len(server.sessions()) == 1, "all sessions but ours are gone or hold nothing")


def receive(channel: Channel, **options: Any) -> Any:
    return channel.receive(by_s=time.monotonic() + PATIENCE_S, **options)
