"""Rows ``host_put``, ``host_load_1`` and ``host_load_64``: the store's front door, through its client."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from bench.harness import Reach, Row, Sample, Settings, Sides
from bench.limit_copy import copy_and_checksum
from bench.limit_index import BareIndex
from bench.memory import Blocks, require_equal
from bench.names import chain_of, namespace_for
from tierkv.assembly import open_store
from tierkv.client import Client
from tierkv.keys import Chain
from tierkv.units import MIB

TIMEOUT_S = 60.0
CHAINS = 4
"""Chains that take turns in the rows about look-ups, so that no single one stays in a cache."""

LIMIT_REPEATS = 8
"""How much oftener the limit does the same in one run: it takes so little that a tick of the clock would count."""


class HostPut:
    """Blocks of an engine into host RAM, a run of 64 by one call."""

    name = "host_put"
    rows = (
        Row(
            "host_put",
            "mib_per_s",
            "MiB/s",
            "put of 64 new blocks of 1 MiB by one call: reserve, copy, checksum, register; "
            "limit: np.copyto and xxh3_64 of each block, between the same kind of memory",
            Reach("ratio", ">=", 0.85),
        ),
    )

    @contextmanager
    def open(self, settings: Settings) -> Iterator[Sides]:
        with open_host(settings, settings.memory_blocks) as client:
            namespace = client.open_namespace(namespace_for(settings.block_bytes).spec).namespace
            chain = chain_of(namespace, settings.memory_blocks)
            sources = Blocks(settings.memory_blocks, settings.block_bytes)
            targets = Blocks(settings.memory_blocks, settings.block_bytes, seed=1)

            def put() -> Sample:
                forget(client)
                start_s = time.perf_counter()
                stored = client.put(chain, sources.views).stored
                elapsed_s = time.perf_counter() - start_s
                if stored != len(sources):
                    raise RuntimeError(f"host_put: {stored} of {len(sources)} blocks were stored")
                return {"mib_per_s": len(sources) * settings.block_bytes / MIB / elapsed_s}

            yield Sides(
                put, lambda: copy_and_checksum(targets, sources), lambda: check(client, chain, sources)
            )


class HostLoad:
    """An index hit, a lease and its release."""

    def __init__(self, blocks: int, reach: Reach) -> None:
        self._blocks = blocks
        self.name = f"host_load_{blocks}"
        what = "one block" if blocks == 1 else f"a run of {blocks} blocks, for each of them"
        self.rows = (
            Row(
                self.name,
                "us",
                "us/block",
                f"wall time of load and release of {what} in host RAM; "
                "limit: look-up in a dict and a pin count under a lock",
                reach,
            ),
        )

    @contextmanager
    def open(self, settings: Settings) -> Iterator[Sides]:
        with open_host(settings, CHAINS * self._blocks) as client:
            namespace = client.open_namespace(namespace_for(settings.block_bytes).spec).namespace
            chains = [chain_of(namespace, self._blocks, seed=seed) for seed in range(CHAINS)]
            sources = Blocks(self._blocks, settings.block_bytes)
            for chain in chains:
                client.put(chain, sources.views)
            bare = BareIndex([block_hash for chain in chains for block_hash in chain.hashes])
            loads = max(CHAINS, settings.index_blocks // self._blocks)
            order = [chains[i % CHAINS] for i in range(loads)]

            def load() -> Sample:
                load_one, found = client.load, 0
                start_s = time.perf_counter()
                for chain in order:
                    lease = load_one(chain)
                    found += len(lease)
                    lease.release()
                elapsed_s = time.perf_counter() - start_s
                return self._sample(elapsed_s, found, len(order))

            def limit() -> Sample:
                pin_and_unpin, found = bare.pin_and_unpin, 0
                start_s = time.perf_counter()
                for _ in range(LIMIT_REPEATS):
                    for chain in order:
                        found += pin_and_unpin(chain.hashes)
                elapsed_s = time.perf_counter() - start_s
                return self._sample(elapsed_s, found, LIMIT_REPEATS * len(order))

            def check_all() -> None:
                for chain in chains:
                    check(client, chain, sources)

            yield Sides(load, limit, check_all)

    def _sample(self, elapsed_s: float, found: int, loads: int) -> Sample:
        if found != loads * self._blocks:
            raise RuntimeError(f"{self.name}: {found} of {loads * self._blocks} blocks were found")
        return {"us": elapsed_s * 1e6 / found}


@contextmanager
def open_host(settings: Settings, blocks: int) -> Iterator[Client]:
    """A store of host RAM alone with room for the blocks, its memory touched."""
    room_bytes = (blocks + 1) * settings.block_bytes
    client = open_store(host_capacity=room_bytes, host_region=room_bytes, host_populate=True)
    try:
        _wait_until_touched(client)
        yield client
    finally:
        client.close()


def _wait_until_touched(client: Client) -> None:
    host = client.store.host
    until_s = time.monotonic() + TIMEOUT_S
    while host.populated_bytes < host.arena.capacity_bytes:
        if time.monotonic() > until_s:
            raise RuntimeError(
                f"only {host.populated_bytes} bytes of the arena were touched in {TIMEOUT_S} s"
            )
        time.sleep(0.01)


def forget(client: Client) -> None:
    """Empties host RAM, so that the next put finds the same slots free."""
    report = client.clear().result(TIMEOUT_S)
    if client.store.host.usage().used_bytes:
        raise RuntimeError(f"host RAM is not empty after clear: {report}")


def check(client: Client, chain: Chain, sources: Blocks) -> None:
    """Every byte of the chain in host RAM is what was put there."""
    with client.load(chain) as lease:
        views: Sequence[memoryview] = [lease.view(i) for i in range(len(lease))]
        if len(views) != len(sources):
            raise RuntimeError(f"{len(views)} of {len(sources)} blocks are in host RAM")
        for i, view in enumerate(views):
            require_equal(view, sources.pattern(i), f"block {i} in host RAM")
        del views
