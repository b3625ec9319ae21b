"""Rows ``roundtrip_p50``, ``match_1_key_p50`` and ``match_1900_keys_p50``: a question to the daemon beside a bare echo
of the same bytes."""

from __future__ import annotations

import socket
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import msgpack

from bench.harness import Reach, Row, Sample, Settings, Sides
from bench.limit_echo import ask
from bench.names import chain_of, namespace_for
from bench.sidecar_process import client_of, daemon, echo, folder
from tierkv.daemon.words import say_chain
from tierkv.keys import Chain
from tierkv.units import MIB

CALLS = 400
PATIENCE_S = 2.0


def p50_us(call: Callable[[], object]) -> Sample:
    took_s = []
    for _ in range(CALLS):
        start_s = time.perf_counter()
        call()
        took_s.append(time.perf_counter() - start_s)
    return {"us": statistics.median(took_s) * 1e6}


class RoundTrip:
    """The smallest question, which the daemon answers without a look at the store."""

    name = "roundtrip_p50"
    rows = (
        Row(
            "roundtrip_p50",
            "us",
            "us",
            "p50 of a ping by a client's connection to the daemon; limit: an echo of the same bytes over a unix socket",
            Reach("ratio", "<=", 1.5),
        ),
    )

    @contextmanager
    def open(self, settings: Settings) -> Iterator[Sides]:
        with (
            folder() as place,
            daemon(place, 64 * MIB) as address,
            echo(place) as sock,
            client_of(address) as client,
        ):
            link, buffer = client.link, bytearray(1 << 16)
            sent, reply = msgpack.packb(["ping", {}]), msgpack.packb(["ok", {}])
            yield Sides(
                lambda: p50_us(lambda: link.call("ping", {}, time.monotonic() + PATIENCE_S)),
                lambda: p50_us(lambda: ask(sock, sent, buffer, len(reply))),
            )


class Match1:
    """Is one block there."""

    name = "match_1_key_p50"
    rows = (
        Row(
            "match_1_key_p50",
            "us",
            "us",
            "p50 of a match of one block over the daemon's socket; limit: an echo of the same bytes over a unix socket",
        ),
    )
    blocks = 1

    @contextmanager
    def open(self, settings: Settings) -> Iterator[Sides]:
        with (
            folder() as place,
            daemon(place, 64 * MIB) as address,
            echo(place) as sock,
            client_of(address) as client,
        ):
            namespace = client.open_namespace(namespace_for(4096).spec).namespace
            chain = chain_of(namespace, self.blocks)
            client.put(chain, [bytes(4096)] * self.blocks)
            if client.match(chain).blocks != self.blocks:
                raise RuntimeError("the daemon does not hold what was put")
            yield Sides(
                lambda: p50_us(lambda: client.match(chain)),
                lambda: self._limit(sock, chain),
            )

    def _limit(self, sock: socket.socket, chain: Chain) -> Sample:
        sent = msgpack.packb(["match", {**say_chain(chain), "local": 0}])
        reply = msgpack.packb(["ok", {"blocks": 1900, "tokens": 30_000, "tiers": {"host": 1900}}])
        buffer = bytearray(1 << 16)
        return p50_us(lambda: ask(sock, sent, buffer, len(reply)))


class Match1900(Match1):
    """A prompt of 1,900 blocks; the limit also looks them up in a dict."""

    name = "match_1900_keys_p50"
    rows = (
        Row(
            "match_1900_keys_p50",
            "us",
            "us",
            "p50 of a match of 1,900 blocks over the daemon's socket; limit: an echo of the same bytes, and a look-up "
            "of 1,900 keys in a dict",
            Reach("ratio", "<=", 1.5),
        ),
    )
    blocks = 1900

    def _limit(self, sock: socket.socket, chain: Chain) -> Sample:
        sent = msgpack.packb(["match", {**say_chain(chain), "local": 0}])
        buffer = bytearray(1 << 16)
        known = {block_hash: number for number, block_hash in enumerate(chain.hashes)}

        def call() -> None:
            ask(sock, sent, buffer, 50)
            for key in chain.hashes:
                known[key]

        return p50_us(call)
