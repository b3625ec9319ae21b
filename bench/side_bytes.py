"""Rows about bytes: what a second process puts into and takes out of the daemon's arena, beside memcpy."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np

from bench.harness import Reach, Row, Sample, Settings, Sides
from bench.memory import Blocks, require_equal
from bench.names import chain_of, namespace_for
from bench.sidecar_process import client_of, daemon, folder
from tierkv.daemon.remote import RemoteClient
from tierkv.keys import Chain
from tierkv.units import MIB

REPEATS = 4


class PutBytes:
    """New blocks of 1 MiB into the mapped arena: reserve, copy, checksum, commit."""

    def __init__(self, blocks: int) -> None:
        self._blocks = blocks
        self.name = f"put_{blocks}x1mib"
        self.rows = (
            Row(
                self.name,
                "mib_per_s",
                "MiB/s",
                f"put of {blocks} blocks of 1 MiB by one call of another process, checksums included; "
                "limit: np.copyto of the same blocks",
                Reach("ratio", ">=", 0.85) if blocks > 1 else None,
            ),
        )

    @contextmanager
    def open(self, settings: Settings) -> Iterator[Sides]:
        with folder() as place, daemon(place, 256 * MIB) as address, client_of(address) as client:
            namespace = client.open_namespace(namespace_for(MIB).spec).namespace
            sources, targets = Blocks(self._blocks, MIB), Blocks(self._blocks, MIB, seed=1)
            seeds = iter(range(1_000_000))

            def put() -> Sample:
                chains = [chain_of(namespace, self._blocks, seed=next(seeds)) for _ in range(REPEATS)]
                start_s = time.perf_counter()
                stored = sum(client.put(chain, sources.views).stored for chain in chains)
                elapsed_s = time.perf_counter() - start_s
                if stored != REPEATS * self._blocks:
                    raise RuntimeError(f"{stored} of {REPEATS * self._blocks} blocks were stored")
                _check(client, chains[-1], sources)
                return {"mib_per_s": stored / elapsed_s}

            yield Sides(put, lambda: _memcpy(targets, sources))


class LoadBytes:
    """Leased and copied out."""

    def __init__(self, blocks: int) -> None:
        self._blocks = blocks
        self.name = f"load_{blocks}x1mib"
        self.rows = (
            Row(
                self.name,
                "mib_per_s",
                "MiB/s",
                f"load of {blocks} blocks of 1 MiB by another process, copied out of the mapped arena, and release; "
                "limit: np.copyto of the same blocks",
                Reach("ratio", ">=", 0.85) if blocks > 1 else None,
            ),
        )

    @contextmanager
    def open(self, settings: Settings) -> Iterator[Sides]:
        with folder() as place, daemon(place, 256 * MIB) as address, client_of(address) as client:
            namespace = client.open_namespace(namespace_for(MIB).spec).namespace
            sources, targets = Blocks(self._blocks, MIB), Blocks(self._blocks, MIB, seed=1)
            chain = chain_of(namespace, self._blocks)
            client.put(chain, sources.views)

            def load() -> Sample:
                start_s = time.perf_counter()
                for _ in range(REPEATS):
                    with client.load(chain) as lease:
                        for i in range(len(lease)):
                            np.copyto(targets.arrays[i], np.frombuffer(lease.view(i), np.uint8))
                        found = len(lease)
                elapsed_s = time.perf_counter() - start_s
                if found != self._blocks:
                    raise RuntimeError(f"{found} of {self._blocks} blocks were found")
                return {"mib_per_s": REPEATS * self._blocks / elapsed_s}

            def check() -> None:
                targets.poison()
                load()
                for i in range(self._blocks):
                    require_equal(targets.arrays[i], sources.pattern(i), f"block {i}")

            yield Sides(load, lambda: _memcpy(targets, sources), check)


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
