"""The Valkey tier on a real server that is down, hung, slow, cut off, full, locked or not what was expected."""

from __future__ import annotations

import socket
import ssl
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
import trustme

from tests.valkey_server import ValkeyServer, eventually, free_port, name_of, running_server, within
from tierkv.clock import Deadline
from tierkv.errors import ForkError, TierError
from tierkv.ids import EVERYTHING, BlockKey
from tierkv.testing.faults.proxy import TcpProxy, proxy_before
from tierkv.testing.payloads import Destination, key_of, make_item, namespace_of
from tierkv.tier import BlobTier, Outcome, Presence
from tierkv.tiers.valkey import ValkeyTier
from tierkv.tiers.valkey_url import TlsFiles
from tierkv.units import KIB, MIB

DONE, MISS, FULL, CORRUPT = Outcome.DONE, Outcome.MISS, Outcome.FULL, Outcome.CORRUPT
TIMEOUT, UNAVAILABLE, CANCELLED = Outcome.TIMEOUT, Outcome.UNAVAILABLE, Outcome.CANCELLED

SLACK_S = 2.0
"""For a busy machine. What must end with its deadline may take this much longer, what would hang takes for ever."""


@pytest.fixture(scope="module")
def shared() -> Iterator[ValkeyServer]:
    with running_server() as server:
        yield server


@pytest.fixture
def server(shared: ValkeyServer) -> Iterator[ValkeyServer]:
    """A running server without keys and with its first settings."""
    settings = ("proto-max-bulk-len", "maxmemory", "maxmemory-policy", "requirepass")
    with shared.client as client:
        client.flushall()
        before = {name: client.config_get(name)[name] for name in settings}
    yield shared
    with shared.client as client:
        for name, value in before.items():
            client.config_set(name, value)


@pytest.fixture
def proxy(server: ValkeyServer) -> Iterator[TcpProxy]:
    with proxy_before(server.path) as proxy:
        yield proxy


class Started:
    """A started tier in a ``with``."""

    def __init__(self, address: str, **options: object) -> None:
        self.tier = ValkeyTier(address, **options)  # type: ignore[arg-type]

    def __enter__(self) -> ValkeyTier:
        self.tier.start()
        return self.tier

    def __exit__(self, *_: object) -> None:
        self.tier.close(within(5))


def put(
    tier: BlobTier, keys: Sequence[BlockKey], length_bytes: int = 5000, timeout_s: float = 5.0
) -> list[Outcome]:
    items = [make_item(key, length_bytes) for key in keys]
    return put_items(tier, items, within(timeout_s))


def put_items(tier: BlobTier, items: Sequence[object], deadline: Deadline) -> list[Outcome]:
    seen: dict[int, Outcome] = {}

    def done(i: int, outcome: Outcome) -> None:
        assert i not in seen, f"block {i} was reported twice"
        seen[i] = outcome

    tier.put_from(items, deadline, done)  # type: ignore[arg-type]
    return [seen[i] for i in range(len(items))]


def get(
    tier: BlobTier, keys: Sequence[BlockKey], length_bytes: int = 5000, timeout_s: float = 5.0
) -> list[Outcome]:
    """Outcomes, after the check that whatever is called ``DONE`` is the block in full."""
    places = [Destination(key, length_bytes) for key in keys]
    seen: dict[int, Outcome] = {}

    def done(i: int, outcome: Outcome) -> None:
        assert i not in seen, f"block {i} was reported twice"
        seen[i] = outcome
        if outcome is DONE:
            places[i].check(length_bytes)

    tier.get_into([place.want for place in places], within(timeout_s), done)
    for place in places:
        place.check_guards()
    return [seen[i] for i in range(len(keys))]


def keys_of(count: int) -> list[BlockKey]:
    return [key_of(i) for i in range(count)]


class Stopwatch:
    def __init__(self) -> None:
        self._start_s = time.monotonic()

    def must_show_less_than(self, seconds: float) -> None:
        took_s = time.monotonic() - self._start_s
        assert took_s < seconds, f"it took {took_s:.2f} s"


# ---- D17: down, hung, slow, back again


def test_d17_start_without_a_server_then_the_server_comes(server: ValkeyServer) -> None:
    port = free_port()
    with Started(f"valkey://127.0.0.1:{port}") as tier:
        assert put(tier, keys_of(2)) == [UNAVAILABLE] * 2
        assert get(tier, keys_of(2)) == [UNAVAILABLE] * 2
        assert tier.probe(keys_of(2), within(1)) == [Presence.UNKNOWN] * 2
        assert not tier.usage().writable
        assert not tier.status()["reachable"]
        assert "refused" in str(tier.status()["trouble"])
        result = tier.clear(EVERYTHING, within(1))
        assert (result.removed, result.complete) == (0, False)
        assert str(port) in result.kept[0]
        with socket.create_server(("127.0.0.1", port)) as listener:
            relay = threading.Thread(target=_relay_once, args=(listener, server.path), daemon=True)
            relay.start()
            assert put(tier, keys_of(2)) == [DONE] * 2
            assert get(tier, keys_of(2)) == [DONE] * 2
            assert tier.status()["reachable"]


def _relay_once(listener: socket.socket, path: str) -> None:
    client, _ = listener.accept()
    upstream = socket.socket(socket.AF_UNIX)
    upstream.connect(path)
    with client, upstream:

        def back() -> None:
            try:
                while data := upstream.recv(65536):
                    client.sendall(data)
            except OSError:
                pass

        thread = threading.Thread(target=back, daemon=True)
        thread.start()
        try:
            while data := client.recv(65536):
                upstream.sendall(data)
            upstream.shutdown(socket.SHUT_RDWR)
        except OSError:
            pass
        thread.join(5)


@pytest.mark.parametrize("transport", ["tcp", "unix"])
def test_d17_killed_and_restarted(transport: str) -> None:
    with running_server() as server:
        with Started(server.address if transport == "tcp" else server.unix_address) as tier:
            assert put(tier, keys_of(4)) == [DONE] * 4
            server.kill()
            assert get(tier, keys_of(4)) == [UNAVAILABLE] * 4
            assert put(tier, keys_of(4)) == [UNAVAILABLE] * 4
            server.start()
            assert get(tier, keys_of(4)) == [MISS] * 4
            assert put(tier, keys_of(4)) == [DONE] * 4
            server.kill()
            server.start()
            # The idle connection is stale; that must not be seen from outside.
            assert put(tier, keys_of(4)) == [DONE] * 4
            assert get(tier, keys_of(4)) == [DONE] * 4


@pytest.mark.parametrize("transport", ["tcp", "unix"])
def test_d17_hung_server(transport: str) -> None:
    with running_server() as server:
        with Started(server.address if transport == "tcp" else server.unix_address) as tier:
            assert put(tier, keys_of(2)) == [DONE] * 2
            server.hang()
            try:
                watch = Stopwatch()
                assert get(tier, keys_of(2), timeout_s=0.2) == [TIMEOUT] * 2
                assert put(tier, keys_of(2), 8 * MIB, timeout_s=0.2) == [TIMEOUT] * 2
                assert tier.probe(keys_of(2), within(0.2)) == [Presence.UNKNOWN] * 2
                assert not tier.clear(EVERYTHING, within(0.2)).complete
                tier.usage()
                tier.delete(keys_of(1))
                watch.must_show_less_than(0.8 + 0.1 + 1.0 + SLACK_S)
            finally:
                server.go_on()
            assert get(tier, keys_of(2)) == [MISS, DONE], "what was deleted meanwhile is found no more"


def test_d17_connect_time_is_bounded_apart_from_the_deadline() -> None:
    with socket.create_server(("127.0.0.1", 0), backlog=1) as deaf:
        # Nobody accepts: the greeting is never answered, and soon not even the connect is.
        port = deaf.getsockname()[1]
        with Started(f"valkey://127.0.0.1:{port}", connect_timeout_s=0.1) as tier:
            watch = Stopwatch()
            for _ in range(4):
                assert get(tier, keys_of(1), timeout_s=30.0) == [UNAVAILABLE]
            watch.must_show_less_than(0.4 + SLACK_S)


@pytest.mark.parametrize("operation", ["get", "put"])
def test_d17_a_trickle_ends_with_the_deadline(server: ValkeyServer, proxy: TcpProxy, operation: str) -> None:
    with Started(server.unix_address) as direct, Started(f"valkey://127.0.0.1:{proxy.port}") as tier:
        assert put(direct, keys_of(2), MIB) == [DONE] * 2
        assert get(tier, keys_of(1), MIB) == [DONE]
        proxy.bytes_per_s = 1024
        watch = Stopwatch()
        if operation == "get":
            assert get(tier, keys_of(2), MIB, timeout_s=0.3) == [TIMEOUT] * 2
        else:
            # 500 OKs of 5 bytes would take more than two seconds.
            outcomes = put(tier, [key_of(100 + i) for i in range(500)], 0, timeout_s=0.3)
            assert outcomes[-1] is TIMEOUT
        watch.must_show_less_than(0.3 + SLACK_S)
        proxy.bytes_per_s = None
        assert get(tier, keys_of(2), MIB) == [DONE] * 2


def test_d17_black_hole_and_back(server: ValkeyServer, proxy: TcpProxy) -> None:
    with Started(f"valkey://127.0.0.1:{proxy.port}", connect_timeout_s=0.2) as tier:
        assert put(tier, keys_of(2)) == [DONE] * 2
        proxy.black_hole = True
        watch = Stopwatch()
        assert get(tier, keys_of(2), timeout_s=0.2) == [TIMEOUT] * 2
        assert put(tier, keys_of(2), timeout_s=5.0) == [UNAVAILABLE] * 2
        watch.must_show_less_than(0.4 + SLACK_S)
        proxy.black_hole = False
        assert get(tier, keys_of(2)) == [DONE] * 2


def test_d17_a_delay_is_paid_once_a_batch(server: ValkeyServer, proxy: TcpProxy) -> None:
    with Started(server.unix_address) as direct, Started(f"valkey://127.0.0.1:{proxy.port}") as tier:
        assert put(direct, keys_of(60), 100) == [DONE] * 60
        assert get(tier, keys_of(1), 100) == [DONE]
        proxy.delay_s = 0.05
        watch = Stopwatch()
        assert get(tier, keys_of(60), 100) == [DONE] * 60
        watch.must_show_less_than(60 * 0.05)


def test_a_cancel_ends_a_read_in_mid_reply(server: ValkeyServer, proxy: TcpProxy) -> None:
    with Started(server.unix_address) as direct, Started(f"valkey://127.0.0.1:{proxy.port}") as tier:
        assert put(direct, keys_of(1), MIB) == [DONE]
        assert get(tier, keys_of(1), MIB) == [DONE]
        proxy.bytes_per_s = 1024
        place, deadline, seen = Destination(key_of(0), MIB), within(60), []
        timer = threading.Timer(0.1, deadline.cancel)
        timer.start()
        watch = Stopwatch()
        tier.get_into([place.want], deadline, lambda _, outcome: seen.append(outcome))
        timer.join()
        watch.must_show_less_than(0.2 + SLACK_S)
        assert seen == [CANCELLED]
        proxy.bytes_per_s = None
        assert get(tier, keys_of(1), MIB) == [DONE]


def test_d17_close_with_ten_reads_under_way(server: ValkeyServer, proxy: TcpProxy) -> None:
    tier = ValkeyTier(f"valkey://127.0.0.1:{proxy.port}", workers=4)
    tier.start()
    assert put(tier, keys_of(1)) == [DONE]
    proxy.black_hole = True
    deadlines = [within(60) for _ in range(10)]
    outcomes: list[Outcome] = []

    def read(deadline: Deadline) -> None:
        place = Destination(key_of(0), 5000)
        tier.get_into([place.want], deadline, lambda _, outcome: outcomes.append(outcome))

    threads = [threading.Thread(target=read, args=(deadline,)) for deadline in deadlines]
    for thread in threads:
        thread.start()
    watch = Stopwatch()
    for deadline in deadlines:
        deadline.cancel()
    for thread in threads:
        thread.join(10)
    tier.close(within(5))
    watch.must_show_less_than(5.0)
    assert outcomes == [CANCELLED] * 10


# ---- D18: cut, damaged, foreign


@pytest.mark.parametrize("length_bytes", [0, 5000, MIB])
@pytest.mark.parametrize("cut", [0, 1, 31, 32, 33, 511, 512, "half", "len-1"])
def test_d18_cut_after_each_offset(
    server: ValkeyServer, proxy: TcpProxy, cut: int | str, length_bytes: int
) -> None:
    reply_bytes = len(b"$%d\r\n" % (512 + length_bytes)) + 512 + length_bytes + 2
    at = {"half": reply_bytes // 2, "len-1": reply_bytes - 1}.get(str(cut))
    with Started(f"valkey://127.0.0.1:{proxy.port}") as tier:
        assert put(tier, keys_of(1), length_bytes) == [DONE]
        proxy.arm_cut(cut if isinstance(cut, int) else at)
        assert get(tier, keys_of(1), length_bytes) == [UNAVAILABLE]
        proxy.arm_cut(None)
        assert get(tier, keys_of(1), length_bytes) == [DONE]


@pytest.mark.parametrize("cut_bytes", [0, 1, 4])
def test_d10_a_cut_before_the_ok_is_no_done(server: ValkeyServer, proxy: TcpProxy, cut_bytes: int) -> None:
    with Started(f"valkey://127.0.0.1:{proxy.port}") as tier:
        assert put(tier, keys_of(1)) == [DONE]
        proxy.arm_cut(cut_bytes)
        assert put(tier, [key_of(7)]) == [UNAVAILABLE]
        proxy.arm_cut(None)
        assert put(tier, [key_of(7)]) == [DONE]
        assert get(tier, [key_of(7)]) == [DONE]


def test_d18_a_cut_in_the_middle_of_a_batch_is_mended_on_a_fresh_connection(
    server: ValkeyServer, proxy: TcpProxy
) -> None:
    with Started(f"valkey://127.0.0.1:{proxy.port}") as tier:
        assert put(tier, keys_of(8), 100_000) == [DONE] * 8
        made = tier.status()["connections_made"]
        proxy.arm_cut(350_000)
        disarm = threading.Thread(
            target=lambda: eventually(lambda: proxy.accepted == 2, "a second connection")
        )
        disarm.start()
        outcomes = get(tier, keys_of(8), 100_000)
        disarm.join()
        assert outcomes[:3] == [DONE] * 3
        assert set(outcomes[3:]) <= {DONE, UNAVAILABLE}
        assert tier.status()["connections_made"] in (made, 1 + int(str(made)))
        proxy.arm_cut(None)
        proxy.drop_all()
        assert get(tier, keys_of(8), 100_000) == [DONE] * 8


def test_d18_wrong_values_cost_only_themselves(server: ValkeyServer) -> None:
    """A batch among whose values are some that are no block; the others come, whatever must be thrown away for it."""
    with Started(server.address) as tier, server.client as client:
        assert put(tier, keys_of(10)) == [DONE] * 10
        raw = client.get(name_of(key_of(0)))
        client.set(name_of(key_of(1)), raw[:511])
        client.set(name_of(key_of(3)), raw + bytes(100_000))  # drained
        client.set(name_of(key_of(5)), raw + bytes(3 * MIB))  # too much to drain: a new connection
        client.delete(name_of(key_of(6)))
        client.rpush(name_of(key_of(6)), "a list")
        client.set(name_of(key_of(7)), b"")
        client.delete(name_of(key_of(8)))
        assert get(tier, keys_of(10)) == [
            DONE,
            CORRUPT,
            DONE,
            CORRUPT,
            DONE,
            CORRUPT,
            CORRUPT,
            CORRUPT,
            MISS,
            DONE,
        ]
        assert put(tier, keys_of(10)) == [DONE] * 10
        assert get(tier, keys_of(10)) == [DONE] * 10


def test_d18_sizes_around_powers_of_two(server: ValkeyServer) -> None:
    sizes = sorted({max(0, 2**n + d) for n in range(21) for d in (-1, 0, 1)} | {0})
    with Started(server.address) as tier:
        for size in sizes:
            assert put(tier, [key_of(size)], size) == [DONE]
            assert get(tier, [key_of(size)], size) == [DONE]


class Parrot:
    """A server that greets as it should and then says the same to everything."""

    GREETING = (
        b"*6\r\n$6\r\nserver\r\n$6\r\nvalkey\r\n$4\r\nmode\r\n$10\r\nstandalone\r\n"
        b"$7\r\nversion\r\n$1\r\n9\r\n*0\r\n"
    )

    def __init__(self, says: bytes) -> None:
        self._says = says
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address = f"valkey://127.0.0.1:{self._listener.getsockname()[1]}"
        self._thread = threading.Thread(target=self._serve)
        self._thread.start()

    def _serve(self) -> None:
        while True:
            try:
                peer, _ = self._listener.accept()
            except OSError:
                return
            with peer:
                try:
                    peer.recv(65536)
                    peer.sendall(self.GREETING)
                    while peer.recv(65536):
                        peer.sendall(self._says)
                except OSError:
                    pass

    def __enter__(self) -> Parrot:
        return self

    def __exit__(self, *_: object) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)
        self._thread.join(10)
        self._listener.close()


@pytest.mark.parametrize(
    "says",
    [
        b"?", b"\r\n", b"+OK\r\n", b"$-1\r\n", b":1\r\n", b":-7\r\n", b"$3\r\nabc\r\n", b"*1\r\n:1\r\n",
        b"-ERR \r\n", b"-\r\n", b"-LOADING\r\n", b"-MOVED 3999 127.0.0.1:6381\r\n", b"-ASK 1 h:1\r\n",
        b"-CLUSTERDOWN down\r\n", b"-TRYAGAIN\r\n", b"-MASTERDOWN x\r\n", b"-ERR Protocol error: no\r\n",
        b"$600\r\n" + bytes(700), b"*2\r\n$1\r\n0\r\n*1\r\n:1\r\n", b">2\r\n+a\r\n+b\r\n", bytes(range(256)) * 64,
    ],
)  # fmt: skip
@pytest.mark.parametrize("repeat", [1, 40])
def test_d18_a_server_that_talks_nonsense(says: bytes, repeat: int) -> None:
    """Whatever it says: no block is invented, no call raises or outlasts its time, every block is reported once."""
    places = [Destination(key, 5000) for key in keys_of(5)]
    with Parrot(says * repeat) as parrot, Started(parrot.address) as tier:
        outcomes: dict[int, Outcome] = {}
        tier.get_into([place.want for place in places], within(0.2), outcomes.__setitem__)
        assert sorted(outcomes) == list(range(5))
        assert DONE not in outcomes.values()
        if MISS in outcomes.values():
            assert says == b"$-1\r\n"
        stored = put(tier, keys_of(5), timeout_s=0.2)
        if DONE in stored:
            assert says == b"+OK\r\n"
        if says.startswith(b"-") and repeat > 5:
            assert set(outcomes.values()) == {UNAVAILABLE}
            assert set(stored) == {UNAVAILABLE}
        presence = tier.probe(keys_of(5), within(0.2))
        if set(presence) != {Presence.UNKNOWN}:
            assert says.startswith(b":")
        assert not tier.clear(EVERYTHING, within(0.2)).complete
        tier.usage()
        if repeat > 5:
            tier.delete(keys_of(5))
        for place in places:
            place.check_guards()


class Boaster(Parrot):
    """Its greeting names a longest string of more digits than Python reads, and so does all it says of its memory."""

    GREETING = Parrot.GREETING.replace(
        b"*0\r\n", b"*2\r\n$18\r\nproto-max-bulk-len\r\n$5000\r\n" + b"9" * 5000 + b"\r\n"
    )


def test_d18_a_server_with_endless_numbers() -> None:
    info = b"used_memory:" + b"9" * 5000 + b"\r\nmaxmemory:" + b"9" * 5000 + b"\r\n"
    with Boaster(b"$%d\r\n%b\r\n:1\r\n" % (len(info), info)) as boaster, Started(boaster.address) as tier:
        assert tier.usage().used_bytes == 0
        assert DONE not in get(tier, keys_of(1), 600)


def test_d18_something_else_answers() -> None:
    """A web server, say. It is refused at the start and costs nobody more than a miss later."""
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def serve() -> None:
            while True:
                try:
                    peer, _ = listener.accept()
                except OSError:
                    return
                with peer:
                    peer.recv(4096)
                    peer.sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n")

        thread = threading.Thread(target=serve, daemon=True)
        thread.start()
        tier = ValkeyTier(f"valkey://127.0.0.1:{listener.getsockname()[1]}")
        with pytest.raises(TierError, match="no Valkey server"):
            tier.start()
        assert get(tier, keys_of(2)) == [UNAVAILABLE] * 2
        listener.shutdown(socket.SHUT_RDWR)
        thread.join(5)


# ---- D20: limits, room, life


@pytest.mark.parametrize("known", [True, False], ids=["asked_before", "changed_since"])
def test_d20_a_block_above_the_bulk_limit_is_refused_unsent(server: ValkeyServer, known: bool) -> None:
    with Started(server.address) as tier, server.client as client:
        if not known:
            assert put(tier, keys_of(1), 100) == [DONE]
        client.config_set("proto-max-bulk-len", "1mb")
        if known:
            client.client_kill_filter(_type="normal", skipme=True)
        got = client.info("stats")["total_net_input_bytes"]
        fits = MIB - 512
        assert put(tier, [key_of(1)], MIB + 1) == [FULL]
        assert tier.caps.max_block_bytes == MIB
        sent = client.info("stats")["total_net_input_bytes"] - got
        if known:
            assert sent < 64 * KIB, "the block was sent"
        made = tier.status()["connections_made"]
        assert put(tier, [key_of(2), key_of(3), key_of(4)], fits) == [DONE] * 3
        assert get(tier, [key_of(2), key_of(1), key_of(4)], fits) == [DONE, MISS, DONE]
        assert put(tier, [key_of(5)], fits + 1) == [FULL]
        assert tier.status()["connections_made"] == made, "the connection was not usable any more"


def test_d20_a_server_that_is_full_is_a_soft_failure(server: ValkeyServer) -> None:
    with Started(server.address) as tier, server.client as client:
        client.config_set("maxmemory", "8mb")
        client.config_set("maxmemory-policy", "noeviction")
        outcomes = [put(tier, [key_of(2 * i), key_of(2 * i + 1)], MIB) for i in range(8)]
        flat = [outcome for pair in outcomes for outcome in pair]
        assert set(flat) == {DONE, FULL}
        assert flat[0] is DONE
        assert flat[-1] is FULL
        assert get(tier, keys_of(16), MIB) == [DONE if outcome is DONE else MISS for outcome in flat]
        assert tier.usage().capacity_bytes == 8 * MIB
        assert tier.usage().largest_free_bytes < 8 * MIB
        assert tier.status()["connections_made"] == 1
        tier.delete(keys_of(16))
        assert put(tier, keys_of(2), MIB) == [DONE] * 2


def test_d20_every_key_has_a_life(server: ValkeyServer) -> None:
    items = [
        make_item(key_of(0), 100),
        make_item(key_of(1), 100, ttl_s=60.0),
        make_item(key_of(2), 100, ttl_s=0.0),
    ]
    with Started(server.address, ttl_s=7200.0) as tier, server.client as client:
        assert put_items(tier, items, within(5)) == [DONE] * 3
        assert 7190_000 < client.pttl(name_of(key_of(0))) <= 7200_000
        assert 50_000 < client.pttl(name_of(key_of(1))) <= 60_000
        eventually(lambda: get(tier, [key_of(2)], 100) == [MISS], "a block without time is gone")
    with Started(server.address) as tier, server.client as client:
        assert put(tier, keys_of(1)) == [DONE]
        assert 86_390_000 < client.pttl(name_of(key_of(0))) <= 86_400_000


# ---- D19: errors of one server


def test_d19_error_replies_are_unavailable_and_nothing_sticks(server: ValkeyServer) -> None:
    with Started(server.address) as tier, server.client as client:
        assert put(tier, keys_of(3)) == [DONE] * 3
        client.execute_command("REPLICAOF", "127.0.0.1", str(free_port()))
        try:
            assert put(tier, keys_of(3)) == [UNAVAILABLE] * 3
            assert tier.status()["trouble"] == "READONLY"
            assert get(tier, keys_of(3)) == [DONE] * 3
            assert not tier.clear(EVERYTHING, within(2)).complete
            assert not tier.usage().writable
        finally:
            client.execute_command("REPLICAOF", "NO", "ONE")
        assert put(tier, keys_of(3)) == [DONE] * 3
        assert tier.status()["reachable"]


def test_d19_errors_are_accounted_key_by_key(server: ValkeyServer) -> None:
    """A user that may see some keys only."""
    with server.client as client:
        client.execute_command("ACL", "SETUSER", "ann", "on", ">s3cret", "+@all", f"~{name_of(key_of(1))}")
    address = server.address.replace("://", "://ann:s3cret@")
    with Started(server.address) as direct, Started(address) as tier:
        assert put(direct, keys_of(3)) == [DONE] * 3
        assert get(tier, keys_of(3)) == [UNAVAILABLE, DONE, UNAVAILABLE]
        assert put(tier, keys_of(3)) == [UNAVAILABLE, DONE, UNAVAILABLE]
        presence = tier.probe(keys_of(3), within(2))
        assert presence == [Presence.UNKNOWN, Presence.PRESENT, Presence.UNKNOWN]
        assert tier.status()["trouble"] == "NOPERM"
        assert "ann" not in repr(tier.status())
        assert "s3cret" not in repr(tier.status())


def test_d19_a_cluster_is_refused() -> None:
    with running_server("--cluster-enabled", "yes") as server:
        tier = ValkeyTier(server.address)
        with pytest.raises(TierError, match="part of a cluster"):
            tier.start()


# ---- who we are, who they are


def test_wrong_password_is_refused_and_never_shown(server: ValkeyServer) -> None:
    with server.client as client:
        client.config_set("requirepass", "right-one")
        client.execute_command("AUTH", "right-one")
        try:
            for credentials in ("", ":wrong-one@", "ann:wrong-one@"):
                tier = ValkeyTier(server.address.replace("://", f"://{credentials}"))
                with pytest.raises(TierError) as caught:
                    tier.start()
                shown = f"{caught.value} {caught.value.__cause__} {tier.status()} {vars(tier)['_node']}"
                assert "check user and password" in shown
                assert "wrong-one" not in shown
                assert "ann" not in shown
            with Started(server.address.replace("://", "://:right-one@")) as tier:
                assert put(tier, keys_of(1)) == [DONE]
                assert "right-one" not in repr(tier.status())
        finally:
            client.config_set("requirepass", "")


def test_the_documented_permissions_suffice(server: ValkeyServer) -> None:
    allowed = ["+get", "+set", "+exists", "+unlink", "+scan", "+info", "+dbsize", "+hello", "+config|get"]
    server.do("ACL", "SETUSER", "engine", "reset", "on", ">pw", "~tkv:*", *allowed)
    with Started(server.address.replace("://", "://engine:pw@")) as tier:
        assert put(tier, keys_of(3)) == [DONE] * 3
        assert get(tier, keys_of(3)) == [DONE] * 3
        assert tier.usage().blocks == 3
        tier.delete(keys_of(1))
        assert tier.probe(keys_of(2), within(2)) == [Presence.ABSENT, Presence.PRESENT]
        assert tier.clear(EVERYTHING, within(5)).removed == 2
        assert tier.status()["connections_made"] == 2  # clear takes a fresh one
    server.do("ACL", "SETUSER", "engine", "-config|get")
    with Started(server.address.replace("://", "://engine:pw@")) as tier:
        assert put(tier, keys_of(1)) == [DONE]
        assert tier.caps.max_block_bytes == 512 * MIB


def test_databases_are_apart(server: ValkeyServer) -> None:
    with Started(server.address) as first, Started(f"{server.address}/3") as other:
        assert put(first, keys_of(1)) == [DONE]
        assert get(other, keys_of(1)) == [MISS]
    with pytest.raises(TierError, match="database 99"):
        ValkeyTier(f"{server.address}/99").start()


@pytest.fixture
def authority() -> trustme.CA:
    return trustme.CA()


def tls_proxy(authority: trustme.CA, name: str, client_authority: trustme.CA | None = None) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    authority.issue_cert(name).configure_cert(context)
    if client_authority is not None:
        client_authority.configure_trust(context)
        context.verify_mode = ssl.CERT_REQUIRED
    return context


def test_tls_names_and_authorities(server: ValkeyServer, authority: trustme.CA, tmp_path: Path) -> None:
    good, bad = tmp_path / "good.pem", tmp_path / "bad.pem"
    authority.cert_pem.write_to_path(good)
    trustme.CA().cert_pem.write_to_path(bad)
    with proxy_before(server.path, tls_proxy(authority, "cache.example")) as proxy:
        address = f"valkeys://127.0.0.1:{proxy.port}"
        with pytest.raises(TierError, match="certificate is not accepted"):
            ValkeyTier(address, tls_files=TlsFiles(ca_file=str(good))).start()  # wrong name
        with pytest.raises(TierError, match="certificate is not accepted"):
            ValkeyTier(address, tls_files=TlsFiles(ca_file=str(bad), server_name="cache.example")).start()
        with pytest.raises(TierError, match="certificate is not accepted"):
            ValkeyTier(address, tls_files=TlsFiles(server_name="cache.example")).start()  # the system's
        files = TlsFiles(ca_file=str(good), server_name="cache.example")
        with Started(address, tls_files=files) as tier:
            assert put(tier, keys_of(3), MIB + 1) == [DONE] * 3
            assert get(tier, keys_of(3), MIB + 1) == [DONE] * 3


def test_tls_client_certificate(server: ValkeyServer, authority: trustme.CA, tmp_path: Path) -> None:
    ca, cert, key = tmp_path / "ca.pem", tmp_path / "cert.pem", tmp_path / "key.pem"
    authority.cert_pem.write_to_path(ca)
    ours = authority.issue_cert("engine.example")
    ours.private_key_pem.write_to_path(key)
    ours.cert_chain_pems[0].write_to_path(cert)
    with proxy_before(server.path, tls_proxy(authority, "localhost", authority)) as proxy:
        address = f"valkeys://localhost:{proxy.port}"
        files = TlsFiles(ca_file=str(ca), client_cert_file=str(cert), client_key_file=str(key))
        with Started(address, tls_files=files) as tier:
            assert put(tier, keys_of(1)) == [DONE]
        with Started(address, tls_files=TlsFiles(ca_file=str(ca))) as tier:
            assert put(tier, keys_of(1)) == [UNAVAILABLE]


def test_d17_tls_to_a_server_that_speaks_none(server: ValkeyServer) -> None:
    with Started(f"valkeys://127.0.0.1:{server.port}", connect_timeout_s=0.3) as tier:
        assert get(tier, keys_of(1)) == [UNAVAILABLE]


def test_d17_tls_trickle_and_cut(server: ValkeyServer, authority: trustme.CA, tmp_path: Path) -> None:
    authority.cert_pem.write_to_path(tmp_path / "ca.pem")
    with proxy_before(server.path, tls_proxy(authority, "localhost")) as proxy:
        address = f"valkeys://localhost:{proxy.port}"
        with Started(address, tls_files=TlsFiles(ca_file=str(tmp_path / "ca.pem"))) as tier:
            assert put(tier, keys_of(2), MIB) == [DONE] * 2
            proxy.bytes_per_s = 1024
            watch = Stopwatch()
            assert get(tier, keys_of(2), MIB, timeout_s=0.3) == [TIMEOUT] * 2
            watch.must_show_less_than(0.3 + SLACK_S)
            proxy.bytes_per_s = None
            assert get(tier, keys_of(2), MIB) == [DONE] * 2
            proxy.arm_cut(100_000)
            assert get(tier, keys_of(2), MIB) == [UNAVAILABLE] * 2
            proxy.arm_cut(None)
            proxy.drop_all()
            assert get(tier, keys_of(2), MIB) == [DONE] * 2


def test_an_unknown_host_costs_a_miss() -> None:
    with Started("valkey://no-such-host.invalid", connect_timeout_s=0.5) as tier:
        watch = Stopwatch()
        assert get(tier, keys_of(1)) == [UNAVAILABLE]
        watch.must_show_less_than(1.0 + SLACK_S)


# ---- forgetting


def test_d27_clear_removes_no_foreign_key(server: ValkeyServer) -> None:
    strangers = ["tkv:", "tkv:other", f"tkv:{key_of(0)[:12].hex()}:x", "xtkv:" + name_of(key_of(0))[4:]]
    with Started(server.address) as tier, server.client as client:
        client.mset(dict.fromkeys(strangers, "not ours"))
        keys = [key_of(i, namespace=i % 2) for i in range(3000)]
        for start in range(0, 3000, 500):
            assert set(put(tier, keys[start : start + 500], 0)) == {DONE}
        assert tier.clear(namespace_of(0, 1), within(10)).removed == 1500
        assert tier.clear(EVERYTHING, within(10)).removed == 1500
        assert sorted(name.decode() for name in client.scan_iter()) == sorted(strangers)


def test_d27_clear_that_is_cut_short_says_so(server: ValkeyServer, proxy: TcpProxy) -> None:
    with Started(server.unix_address) as direct, Started(f"valkey://127.0.0.1:{proxy.port}") as tier:
        for start in range(0, 4000, 500):
            assert set(put(direct, [key_of(start + i) for i in range(500)], 0)) == {DONE}
        assert get(tier, keys_of(1), 0) == [DONE]
        proxy.arm_cut(100_000)
        result = tier.clear(EVERYTHING, within(10))
        assert not result.complete
        assert result.kept
        proxy.arm_cut(None)
        assert tier.clear(EVERYTHING, within(10)).complete
        assert server.do("DBSIZE") == 0


def test_deleted_while_unreachable_stays_forgotten_and_is_removed_later(
    server: ValkeyServer, proxy: TcpProxy
) -> None:
    with Started(f"valkey://127.0.0.1:{proxy.port}", connect_timeout_s=0.1) as tier:
        assert put(tier, keys_of(4)) == [DONE] * 4
        proxy.black_hole = True
        tier.delete(keys_of(2))
        proxy.black_hole = False
        proxy.drop_all()
        assert get(tier, keys_of(4)) == [MISS, MISS, DONE, DONE]
        assert tier.probe(keys_of(4), within(2)) == [Presence.ABSENT] * 2 + [Presence.PRESENT] * 2
        assert tier.status()["keys_to_forget"] == 2
        assert put(tier, keys_of(1)) == [DONE]
        assert get(tier, keys_of(2)) == [DONE, MISS]
        eventually(
            lambda: tier.usage() and not tier.status()["keys_to_forget"], "the rest is removed in passing"
        )
        assert server.do("EXISTS", name_of(key_of(1))) == 0
        assert get(tier, keys_of(2)) == [DONE, MISS]


# ---- connections


def test_connections_are_few_and_made_on_demand(server: ValkeyServer) -> None:
    with Started(server.address, workers=3) as tier:
        assert tier.status()["connections_made"] == 1
        start = threading.Barrier(12)
        failures: list[Outcome] = []

        def work(number: int) -> None:
            start.wait(10)
            for _ in range(5):
                keys = [key_of(100 * number + i) for i in range(8)]
                failures.extend(o for o in put(tier, keys, 50_000) if o is not DONE)
                failures.extend(o for o in get(tier, keys, 50_000) if o is not DONE)

        threads = [threading.Thread(target=work, args=(number,)) for number in range(12)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
        assert not failures
        status = tier.status()
        assert status["connections_open"] == status["connections_idle"]
        assert 1 <= int(str(status["connections_made"])) <= 4


def test_waiting_for_a_connection_ends_with_the_deadline(server: ValkeyServer, proxy: TcpProxy) -> None:
    with Started(f"valkey://127.0.0.1:{proxy.port}", workers=1) as tier:
        assert put(tier, keys_of(1)) == [DONE]
        proxy.black_hole = True
        holders = [within(60), within(60)]  # workers + 1 connections
        threads = [
            threading.Thread(
                target=tier.get_into, args=([Destination(key_of(0), 5000).want], deadline, lambda *_: None)
            )
            for deadline in holders
        ]
        for thread in threads:
            thread.start()
        eventually(lambda: tier.status()["connections_open"] == 2, "both connections are in use")
        watch = Stopwatch()
        assert get(tier, keys_of(1), timeout_s=0.1) == [TIMEOUT]
        watch.must_show_less_than(0.1 + SLACK_S)
        for deadline in holders:
            deadline.cancel()
        for thread in threads:
            thread.join(10)


def test_an_error_in_on_done_costs_the_connection_and_nothing_else(server: ValkeyServer) -> None:
    with Started(server.address) as tier:
        assert put(tier, keys_of(4), 100_000) == [DONE] * 4

        def fail(_i: int, _outcome: Outcome) -> None:
            raise RuntimeError("of the caller")

        with pytest.raises(RuntimeError, match="of the caller"):
            tier.get_into([Destination(key, 100_000).want for key in keys_of(4)], within(5), fail)
        assert tier.status()["connections_open"] == 0
        assert get(tier, keys_of(4), 100_000) == [DONE] * 4


def test_calls_after_close_are_unavailable(server: ValkeyServer) -> None:
    with Started(server.address) as tier:
        assert put(tier, keys_of(1)) == [DONE]
    assert get(tier, keys_of(1)) == [UNAVAILABLE]
    assert put(tier, keys_of(1)) == [UNAVAILABLE]
    assert not tier.clear(EVERYTHING, within(1)).complete


def test_d26_a_forked_child_gets_an_error(server: ValkeyServer, monkeypatch: pytest.MonkeyPatch) -> None:
    with Started(server.address) as tier:
        monkeypatch.setattr("os.getpid", lambda: -1)
        with pytest.raises(ForkError):
            get(tier, keys_of(1))


def test_usage_is_asked_rarely_and_does_not_wait(server: ValkeyServer, proxy: TcpProxy) -> None:
    with Started(f"valkey://127.0.0.1:{proxy.port}") as tier:
        assert put(tier, keys_of(3), 100_000) == [DONE] * 3
        usage = tier.usage()
        assert usage.writable
        assert usage.blocks == 3
        assert usage.used_bytes > 300_000
        proxy.black_hole = True
        watch = Stopwatch()
        for _ in range(1000):
            tier.usage()
        watch.must_show_less_than(0.1 * 2 + SLACK_S)
        eventually(lambda: not tier.usage().writable, "an unreachable server is not writable")
        assert tier.usage().blocks == 3
