"""The protocol's reader against a peer that says anything, in pieces of any size."""

from __future__ import annotations

import random
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest

from tests.valkey_server import within
from tierkv.tiers.valkey_resp import Connection, Misfit, ServerError, command
from tierkv.tiers.valkey_stream import (
    LinkCancelled,
    LinkError,
    LinkGarbled,
    LinkLost,
    LinkTimeout,
    Patience,
    PlainStream,
)

HEADER = bytes(range(256)) * 2
PAYLOAD = bytes(i % 251 for i in range(9000))


@contextmanager
def connected(send: Callable[[socket.socket], None]) -> Iterator[Connection]:
    """A connection whose peer does as ``send`` says and then closes."""
    ours, theirs = socket.socketpair()

    def run() -> None:
        with theirs:
            try:
                send(theirs)
            except OSError:
                pass  # the reader had enough

    thread = threading.Thread(target=run)
    thread.start()
    connection = Connection(PlainStream(ours))
    try:
        yield connection
    finally:
        connection.close()
        thread.join(10)


def saying(*pieces: bytes) -> Callable[[socket.socket], None]:
    def send(peer: socket.socket) -> None:
        for piece in pieces:
            peer.sendall(piece)

    return send


def patience(timeout_s: float = 5.0) -> Patience:
    return Patience(within(timeout_s))


def block_of(connection: Connection, room: int = 12288) -> tuple[object, bytes, bytes]:
    header, payload = memoryview(bytearray(4096)), memoryview(bytearray(room))
    result = connection.block(header, payload, patience())
    return result, bytes(header[:512]), bytes(payload)


def bulk(value: bytes) -> bytes:
    return b"$%d\r\n%b\r\n" % (len(value), value)


def test_commands() -> None:
    assert command(b"GET", b"k") == b"*2\r\n$3\r\nGET\r\n$1\r\nk\r\n"


@pytest.mark.parametrize("seed", range(12))
def test_replies_in_pieces_of_any_size(seed: int) -> None:
    dice = random.Random(seed)
    parts: list[tuple[bytes, object]] = [
        (b"+OK\r\n", "OK"),
        (b":-12\r\n", -12),
        (b"$-1\r\n", None),
        (b"-OOM no room\r\n", ServerError("OOM", "no room")),
        (bulk(b"a\r\nb"), b"a\r\nb"),
        (bulk(b""), b""),
        (b"*2\r\n" + bulk(b"0") + b"*1\r\n" + bulk(b"key"), [b"0", [b"key"]]),
        (b"*0\r\n", []),
        (bulk(bytes(20_000)), bytes(20_000)),
    ]
    dice.shuffle(parts)
    stream = b"".join(raw for raw, _ in parts)
    cuts = sorted(dice.sample(range(1, len(stream)), 40))
    pieces = [stream[a:b] for a, b in zip([0, *cuts], [*cuts, len(stream)], strict=True)]
    with connected(saying(*pieces)) as connection:
        for _, wanted in parts:
            assert connection.reply(patience()) == wanted


@pytest.mark.parametrize("piece_bytes", [1, 2, 3, 5, 31, 32, 33, 511, 4096, 100_000])
def test_blocks_in_pieces_of_any_size(piece_bytes: int) -> None:
    payloads = [PAYLOAD, b"", b"x", PAYLOAD[:20], PAYLOAD[:4096]]
    stream = b"".join(bulk(HEADER + payload) + b"$-1\r\n" + bulk(b"short") for payload in payloads)
    pieces = [stream[i : i + piece_bytes] for i in range(0, len(stream), piece_bytes)]
    with connected(saying(*pieces)) as connection:
        for payload in payloads:
            result, header, got = block_of(connection)
            assert (result, header, got[: len(payload)]) == (len(payload), HEADER, payload)
            assert not any(got[len(payload) :]), "more was written than the value"
            assert block_of(connection)[0] is None
            assert block_of(connection)[0] == Misfit(5)


@pytest.mark.parametrize("value_bytes", [0, 1, 511, 512 + 12289, 100_000, 1024 * 1024])
def test_misfits_leave_the_connection_in_step(value_bytes: int) -> None:
    with connected(saying(bulk(b"v" * value_bytes), bulk(HEADER + PAYLOAD))) as connection:
        result, _, payload = block_of(connection)
        assert result == Misfit(value_bytes)
        assert not any(payload)
        assert block_of(connection)[0] == len(PAYLOAD)


@pytest.mark.parametrize(
    "raw",
    [
        b"\r\n", b"OK\r\n", b"HTTP/1.1 400 Bad Request\r\n", b"+OK\r\n", b":1\r\n", b"*1\r\n$1\r\na\r\n", b"_\r\n",
        b"$\r\n", b"$ 600\r\n", b"$+600\r\n", b"$0600\r\n", b"$6_00\r\n", b"$-2\r\n", b"$-0\r\n", b"$1e3\r\n",
        b"$\xd9\xa6\r\n", b"$99999999999999999999999\r\n", b"$4611686018427387904\r\n", b"$1048577\r\n",
        b"$3\r\nabcd\r\n", bulk(HEADER + b"abc")[:-2] + b"XY", b"$512\r\n" + HEADER + b"\n\r", b"x" * 20_000,
    ],
)  # fmt: skip
def test_d18_what_is_no_block_is_garbled(raw: bytes) -> None:
    with connected(saying(raw, b"." * 64)) as connection, pytest.raises(LinkGarbled):
        block_of(connection)


@pytest.mark.parametrize(
    "raw",
    [
        b"*1000000\r\n", b"$5000000\r\n", b"*-2\r\n", b"%1\r\n", b"*1\r\n" * 20, b":1.5\r\n", b":\r\n", b"*x\r\n",
        b"$2\r\nabc\r\n",
    ],
)  # fmt: skip
def test_d18_what_is_no_reply_is_garbled(raw: bytes) -> None:
    with connected(saying(raw, b"." * 64)) as connection, pytest.raises(LinkGarbled):
        connection.reply(patience())


@pytest.mark.parametrize("reply", [b"+QUEUED\r\n", b":1\r\n", b"$2\r\nOK\r\n", b"+OKAY\r\n", b"+OK\n\r"])
def test_d10_only_ok_is_ok(reply: bytes) -> None:
    with connected(saying(reply, b"." * 20_000)) as connection, pytest.raises(LinkGarbled):
        connection.ok(patience())


def test_ok_in_pieces_and_among_errors() -> None:
    with connected(saying(b"+", b"OK\r", b"\n+OK\r\n-OOM x\r", b"\n+OK\r\n")) as connection:
        replies = [connection.ok(patience()) for _ in range(4)]
        assert replies == [None, None, ServerError("OOM", "x"), None]


@pytest.mark.parametrize("cut_bytes", [0, 1, 31, 32, 33, 520, 4000, 9519, 9520])
def test_d18_an_end_anywhere_is_a_loss(cut_bytes: int) -> None:
    raw = bulk(HEADER + PAYLOAD)
    assert len(raw) == 9521
    with connected(saying(raw[:cut_bytes])) as connection, pytest.raises(LinkLost):
        block_of(connection)


@pytest.mark.parametrize("raw", [b"", b"$95", b"$9512\r\n" + HEADER])
def test_d17_a_silent_peer_costs_the_deadline(raw: bytes) -> None:
    end = threading.Event()

    def send(peer: socket.socket) -> None:
        peer.sendall(raw)
        end.wait(10)

    with connected(send) as connection:
        views = memoryview(bytearray(4096)), memoryview(bytearray(12288))
        with pytest.raises(LinkTimeout):
            connection.block(*views, patience(0.15))
        with pytest.raises(LinkError):
            connection.block(*views, patience(0.0))
        end.set()


def test_a_cancel_is_seen_while_the_peer_trickles() -> None:
    deadline = within(60)

    def send(peer: socket.socket) -> None:
        peer.sendall(b"$9512\r\n")
        deadline.cancel()
        for _ in range(9000):
            peer.sendall(b"x")

    with connected(send) as connection, pytest.raises(LinkCancelled):
        connection.block(memoryview(bytearray(4096)), memoryview(bytearray(12288)), Patience(deadline))


def test_a_peer_that_does_not_read_costs_the_deadline() -> None:
    end = threading.Event()
    with connected(lambda _: (end.wait(10), None)[1]) as connection:
        with pytest.raises(LinkTimeout):
            connection.stream.send_all([bytes(8 << 20)], patience(0.15))
        end.set()


@pytest.mark.parametrize("piece_bytes", [4 * 1024, 64 * 1024])
def test_a_peer_that_reads_slowly_costs_no_more_than_the_deadline(piece_bytes: int) -> None:
    """On a unix socket the kernel counts a timeout anew whenever a little went out."""
    end = threading.Event()

    def read(peer: socket.socket) -> None:
        while not end.wait(0.005):
            peer.recv(piece_bytes)

    with connected(read) as connection:
        start_s = time.monotonic()
        with pytest.raises(LinkTimeout):
            connection.stream.send_all([bytes(64 << 20)], patience(0.2))
        took_s = time.monotonic() - start_s
        end.set()
    assert took_s < 2.0, "64 MiB at this pace take five seconds and more"


def test_in_step_sees_what_was_not_asked_for_and_a_peer_that_left() -> None:
    with connected(saying(b"+hello\r\n")) as connection:
        assert connection.reply(patience()) == "hello"
        while connection.in_step():  # until the end has arrived
            patience().left_s()
    asked = threading.Event()
    with connected(lambda _: (asked.wait(10), None)[1]) as connection:
        assert connection.in_step()
        asked.set()


def test_server_errors_show_no_names() -> None:
    assert str(ServerError("NOPERM", "User ann has no permissions")) == "NOPERM"
    assert str(ServerError("ERR", "unknown command")) == "ERR unknown command"
