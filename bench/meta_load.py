"""Row ``p99_match_us``: what a match costs while blocks are demoted and loaded as fast as they go."""

from __future__ import annotations

import shutil
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from bench.harness import Reach, Row, Sample, Settings, Sides, percentile
from bench.memory import Blocks
from bench.names import chain_of, namespace_for
from tierkv.assembly import open_store
from tierkv.client import Client
from tierkv.keys import Chain
from tierkv.units import KIB, MIB

BLOCK_BYTES = 256 * KIB
PROMPT_BLOCKS = 64
PROMPTS = 24
HOST_PROMPTS = 12
PAUSE_S = 0.0005


class MatchUnderLoad:
    """One thread stores, another loads what only the disk has, a third asks for a prompt of 64 blocks every half
    millisecond."""

    name = "match_under_load"
    rows = (
        Row(
            "p99_match_us",
            "p99_us",
            "us",
            "p99 of the time of a match of 64 blocks while others store and load at full speed through NVMe; "
            "limit: the same while nobody does",
            Reach("ratio", "<=", 5),
        ),
    )

    @contextmanager
    def open(self, settings: Settings) -> Iterator[Sides]:
        settings.directory.mkdir(parents=True, exist_ok=True)
        folder = Path(tempfile.mkdtemp(prefix="match-", dir=settings.directory))
        try:
            with _open(folder) as client:
                namespace = client.open_namespace(namespace_for(BLOCK_BYTES).spec).namespace
                chains = [chain_of(namespace, PROMPT_BLOCKS, seed=seed) for seed in range(PROMPTS)]
                sources = Blocks(PROMPT_BLOCKS, BLOCK_BYTES)
                for chain in chains:
                    client.put(chain, sources.views)
                    client.flush("nvme").result(60)
                matches = max(200, settings.index_blocks // 4)
                yield Sides(
                    lambda: _under_load(client, chains, sources, matches),
                    lambda: {"p99_us": _p99_us(client, chains[0], matches)},
                )
        finally:
            shutil.rmtree(folder)


@contextmanager
def _open(folder: Path) -> Iterator[Client]:
    client = open_store(
        host_capacity=HOST_PROMPTS * PROMPT_BLOCKS * BLOCK_BYTES,
        host_region=16 * MIB,
        nvme_path=str(folder / "tier"),
        nvme_capacity=2 * PROMPTS * PROMPT_BLOCKS * BLOCK_BYTES,
        nvme_min_free=0,
    )
    try:
        yield client
    finally:
        client.close()


def _under_load(client: Client, chains: list[Chain], sources: Blocks, matches: int) -> Sample:
    stop = threading.Event()

    def store() -> None:
        seed = 1000
        while not stop.is_set():
            seed += 1
            client.put(chain_of(chains[0].namespace, PROMPT_BLOCKS, seed=seed), sources.views)

    def load() -> None:
        turn = 0
        while not stop.is_set():
            turn += 1
            client.load(chains[1 + turn % (len(chains) - 1)]).release()

    threads = [threading.Thread(target=work, daemon=True) for work in (store, load)]
    for thread in threads:
        thread.start()
    try:
        return {"p99_us": _p99_us(client, chains[0], matches)}
    finally:
        stop.set()
        for thread in threads:
            thread.join()


def _p99_us(client: Client, chain: Chain, matches: int) -> float:
    took_s = []
    for _ in range(matches):
        start_s = time.perf_counter()
        client.match(chain)
        took_s.append(time.perf_counter() - start_s)
        time.sleep(PAUSE_S)
    return percentile(took_s, 0.99) * 1e6
