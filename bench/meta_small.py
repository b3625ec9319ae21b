"""Rows ``small_ops``, ``small_ops_single`` and ``small_ops_4_threads``: small blocks in, found, leased, let go."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

from bench.edge_host import check, open_host
from bench.harness import Reach, Row, Sample, Settings, Sides
from bench.limit_index import BareStore
from bench.memory import Blocks
from bench.names import chain_of, namespace_for
from tierkv.client import Client
from tierkv.keys import Chain
from tierkv.units import KIB

BLOCK_BYTES = 4 * KIB
THREADS = 4
SINGLE_BATCH = 16


class SmallOps:
    """Each block is put, loaded and released once a run; half of the blocks have room, so the store also evicts."""

    def __init__(self, name: str, *, batch: int, per_second: float) -> None:
        self.name = name
        self._batch = batch
        self.rows = (
            Row(
                name,
                "per_s",
                "blocks/s",
                f"put, load and release of new blocks of 4 KiB in batches of {batch}, with checksum, events, "
                "metrics and LRU, each batch taking the room of an older one; "
                "limit: copy, xxh3_64, a dict and a pin count under a lock",
                Reach("value", ">=", per_second),
            ),
        )

    @contextmanager
    def open(self, settings: Settings) -> Iterator[Sides]:
        count = 2 * settings.index_blocks // self._batch
        with open_host(_small(settings), settings.index_blocks) as client:
            chains = _chains(client, count, self._batch)
            sources = Blocks(self._batch, BLOCK_BYTES)
            bare = BareStore(settings.index_blocks, BLOCK_BYTES)

            def ours() -> Sample:
                return {"per_s": _put_load_release(client, chains, sources)}

            def limit() -> Sample:
                start_s = time.perf_counter()
                for chain in chains:
                    bare.put(chain.hashes, sources.views)
                    bare.pin_and_unpin(chain.hashes)
                return {"per_s": count * self._batch / (time.perf_counter() - start_s)}

            yield Sides(ours, limit, lambda: check(client, chains[-1], sources))


class SmallOpsThreads:
    """Four threads, each with prompts of its own; the limit is one thread that does all of it."""

    name = "small_ops_4_threads"
    rows = (
        Row(
            "small_ops_4_threads",
            "per_s",
            "blocks/s",
            f"small_ops by {THREADS} threads at once, in sum; limit: the same work by one thread",
            Reach("ratio", ">=", 0.7),
        ),
    )

    @contextmanager
    def open(self, settings: Settings) -> Iterator[Sides]:
        room_blocks = max(
            settings.index_blocks, 4096
        )  # else what one thread put might leave before it is asked for
        count = 2 * room_blocks // SINGLE_BATCH
        with (
            open_host(_small(settings), room_blocks) as client,
            ThreadPoolExecutor(THREADS) as pool,
        ):
            chains = _chains(client, count, SINGLE_BATCH)
            shares = [chains[number::THREADS] for number in range(THREADS)]
            sources = Blocks(SINGLE_BATCH, BLOCK_BYTES)

            def ours() -> Sample:
                start_s = time.perf_counter()
                list(pool.map(lambda share: _put_load_release(client, share, sources), shares))
                return {"per_s": count * SINGLE_BATCH / (time.perf_counter() - start_s)}

            def limit() -> Sample:
                return {"per_s": _put_load_release(client, chains, sources)}

            yield Sides(ours, limit, lambda: check(client, chains[-1], sources))


def _small(settings: Settings) -> Settings:
    return Settings(settings.directory, block_bytes=BLOCK_BYTES)


def _chains(client: Client, count: int, blocks: int) -> list[Chain]:
    namespace = client.open_namespace(namespace_for(BLOCK_BYTES).spec).namespace
    return [chain_of(namespace, blocks, seed=seed) for seed in range(count)]


def _put_load_release(client: Client, chains: Sequence[Chain], sources: Blocks) -> float:
    """Blocks a second."""
    views, found = sources.views, 0
    start_s = time.perf_counter()
    for chain in chains:
        client.put(chain, views)
        lease = client.load(chain)
        found += len(lease)
        lease.release()
    elapsed_s = time.perf_counter() - start_s
    if found != len(chains) * len(views):
        raise RuntimeError(f"{found} of {len(chains) * len(views)} blocks were found again")
    return found / elapsed_s
