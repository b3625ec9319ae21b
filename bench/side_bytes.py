"""Rows about bytes: what a second process puts into and takes out of the daemon's arena, beside memcpy."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from statistics import median

import numpy as np
import xxhash

from bench.harness import Reach, Row, Sample, Settings, Sides
from bench.limit_echo import ask
from bench.memory import Blocks, require_equal
from bench.names import chain_of, namespace_for
from bench.sidecar_process import client_of, daemon, echo, folder
from tierkv.daemon.remote import RemoteClient
from tierkv.keys import Chain
from tierkv.units import MIB

REPEATS = 4
SINGLES = 64
"""Calls with one block each in one sample."""


class PutBytes:
    """New blocks of 1 MiB into the mapped arena: reserve, copy, checksum, commit."""

    name = "put_16x1mib"
    rows = (
        Row(
            "put_16x1mib",
            "mib_per_s",
            "MiB/s",
            "put of 16 blocks of 1 MiB by one call of another process, checksums included; "
            "limit: np.copyto of the same blocks",
            Reach("ratio", ">=", 0.85),
        ),
        Row(
            "put_16x1mib_checked",
            "with_sums_mib_per_s",
            "MiB/s",
            "the same; limit: np.copyto and xxh3_64 of the same blocks",
        ),
    )

    @contextmanager
    def open(self, settings: Settings) -> Iterator[Sides]:
        with folder() as place, daemon(place, 256 * MIB) as address, client_of(address) as client:
            namespace = client.open_namespace(namespace_for(MIB).spec).namespace
            sources, targets = Blocks(16, MIB), Blocks(16, MIB, seed=1)
            seeds = iter(range(1_000_000))

            def put() -> Sample:
                chains = [chain_of(namespace, 16, seed=next(seeds)) for _ in range(REPEATS)]
                start_s = time.perf_counter()
                stored = sum(client.put(chain, sources.views).stored for chain in chains)
                elapsed_s = time.perf_counter() - start_s
                _require(stored, REPEATS * 16, "stored")
                _check(client, chains[-1], sources)
                return {"mib_per_s": stored / elapsed_s, "with_sums_mib_per_s": stored / elapsed_s}

            yield Sides(put, lambda: {**_memcpy(targets, sources), **_memcpy_with_sums(targets, sources)})


class LoadBytes:
    """Leased and copied out."""

    name = "load_16x1mib"
    rows = (
        Row(
            "load_16x1mib",
            "mib_per_s",
            "MiB/s",
            "load of 16 blocks of 1 MiB by another process, copied out of the mapped arena, and release; "
            "limit: np.copyto of the same blocks",
            Reach("ratio", ">=", 0.85),
        ),
    )

    @contextmanager
    def open(self, settings: Settings) -> Iterator[Sides]:
        with folder() as place, daemon(place, 256 * MIB) as address, client_of(address) as client:
            namespace = client.open_namespace(namespace_for(MIB).spec).namespace
            sources, targets = Blocks(16, MIB), Blocks(16, MIB, seed=1)
            chain = chain_of(namespace, 16)
            client.put(chain, sources.views)

            def load() -> Sample:
                start_s = time.perf_counter()
                found = sum(_copy_out(client, chain, targets) for _ in range(REPEATS))
                elapsed_s = time.perf_counter() - start_s
                _require(found, REPEATS * 16, "found")
                return {"mib_per_s": found / elapsed_s}

            def check() -> None:
                targets.poison()
                load()
                for i in range(16):
                    require_equal(targets.arrays[i], sources.pattern(i), f"block {i}")

            yield Sides(load, lambda: _memcpy(targets, sources), check)


class SingleBytes:
    """One block of 1 MiB a call; the limit is its memcpy and three echoes over a unix socket."""

    name = "singles_1mib"
    rows = tuple(
        Row(
            f"{verb}_1x1mib",
            f"{verb}_us",
            "us",
            f"p50 of a {verb} of one block of 1 MiB by another process; limit: np.copyto of it and three round trips "
            "of a bare unix-socket echo",
            Reach("ratio", "<=", 1.0),
        )
        for verb in ("put", "load")
    )

    @contextmanager
    def open(self, settings: Settings) -> Iterator[Sides]:
        with (
            folder() as place,
            daemon(place, 256 * MIB) as address,
            echo(place) as sock,
            client_of(address) as client,
        ):
            namespace = client.open_namespace(namespace_for(MIB).spec).namespace
            sources, targets = Blocks(1, MIB), Blocks(1, MIB, seed=1)
            seeds = iter(range(1_000_000))

            def ours() -> Sample:
                puts_s, loads_s = [], []
                for _ in range(SINGLES):
                    chain = chain_of(namespace, 1, seed=next(seeds))
                    start_s = time.perf_counter()
                    stored = client.put(chain, sources.views).stored
                    middle_s = time.perf_counter()
                    found = _copy_out(client, chain, targets)
                    loads_s.append(time.perf_counter() - middle_s)
                    puts_s.append(middle_s - start_s)
                    _require(stored + found, 2, "stored and found")
                return {"put_us": median(puts_s) * 1e6, "load_us": median(loads_s) * 1e6}

            def limit() -> Sample:
                took_s, buffer = [], bytearray(1 << 10)
                for _ in range(SINGLES):
                    start_s = time.perf_counter()
                    np.copyto(targets.arrays[0], sources.arrays[0])
                    for _ in range(3):
                        ask(sock, bytes(100), buffer, 100)
                    took_s.append(time.perf_counter() - start_s)
                return {"put_us": median(took_s) * 1e6, "load_us": median(took_s) * 1e6}

            yield Sides(ours, limit)


def _copy_out(client: RemoteClient, chain: Chain, targets: Blocks) -> int:
    with client.load(chain) as lease:
        for i in range(len(lease)):
            np.copyto(targets.arrays[i], np.frombuffer(lease.view(i), np.uint8))
        return len(lease)


def _require(blocks: int, wanted: int, what: str) -> None:
    if blocks != wanted:
        raise RuntimeError(f"{blocks} of {wanted} blocks were {what}")


def _memcpy_with_sums(targets: Blocks, sources: Blocks) -> Sample:
    start_s = time.perf_counter()
    for _ in range(REPEATS):
        for target, source in zip(targets.arrays, sources.arrays, strict=True):
            np.copyto(target, source)
            xxhash.xxh3_64_intdigest(target)
    return {"with_sums_mib_per_s": REPEATS * len(sources) / (time.perf_counter() - start_s)}


def _memcpy(targets: Blocks, sources: Blocks) -> Sample:
    start_s = time.perf_counter()
    for _ in range(REPEATS):
        for target, source in zip(targets.arrays, sources.arrays, strict=True):
            np.copyto(target, source)
    return {"mib_per_s": REPEATS * len(sources) / (time.perf_counter() - start_s)}


def _check(client: RemoteClient, chain: Chain, sources: Blocks) -> None:
    with client.load(chain) as lease:
        for i in range(len(lease)):
            require_equal(lease.view(i), sources.pattern(i), f"block {i}")
        if len(lease) != len(sources):
            raise RuntimeError(f"{len(lease)} of {len(sources)} blocks are there")
