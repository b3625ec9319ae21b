"""`python -m bench.burst --json FILE`: what becomes of a burst of twice the host arena with nothing pinned.

    --host MIB       host arena (default 128)
    --block KIB      payload of a block (default 512)
    --request N      blocks of one prompt, stored by one call (default 16)
    --dir PATH       where the disk's files go (default .bench)

Cases: ``paced`` offers blocks at a share of the speed that a flush over the same edge has just reached; ``one call``
and ``unpaced`` as fast as ``put`` copies, which no disk keeps up with; ``dead`` with a disk that takes nothing and a
server that hangs, beside ``alone``, the same store without colder tiers. ``dropped`` counts blocks of the burst for
which there was no room, and last copies that left host RAM.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
from numpy.typing import NDArray

from bench.ending import unwind_at_sigterm
from bench.report import machine
from tierkv.arena import Arena
from tierkv.client import Client
from tierkv.clock import SystemClock
from tierkv.executor import ThreadExecutor
from tierkv.keys import Chain, NamespaceSpec, Weights
from tierkv.layout import GroupKind, LayerGroup, Layout
from tierkv.policies.always import AlwaysPolicy
from tierkv.policies.lru import LruPolicy
from tierkv.policies.on_hit import OnHitPolicy
from tierkv.store import BlobSpec, Limits, TieredStore
from tierkv.testing.faults.disk import ShimDisk, failing
from tierkv.testing.faults.server import running_server
from tierkv.tiers.host import HostTier
from tierkv.tiers.nvme import NvmeTier
from tierkv.tiers.valkey import ValkeyTier
from tierkv.tuning import tune_malloc
from tierkv.units import KIB, MIB

BLOCK_TOKENS = 16
BURST = 2
"""Times the host arena."""
PACES = (0.5, 0.8, 0.9)
"""Shares of the edge's speed."""


@dataclass(frozen=True)
class Sizes:
    host_bytes: int
    block_bytes: int
    request_blocks: int

    @property
    def requests(self) -> int:
        return BURST * self.host_bytes // (self.block_bytes * self.request_blocks)


@dataclass
class Burst:
    """One case."""

    case: str
    blocks: int = 0
    refused: int = 0
    """Found no room."""
    lost: int = 0
    """Left host RAM, and no other tier had them."""
    offered_bytes_per_s: float = 0.0
    edge_bytes_per_s: float = 0.0
    """What a flush over the edge reached just before; 0 where there is none."""
    newest_kept: int = 0
    """Of the last half arena of the burst, the blocks that can be matched."""
    newest: int = 0
    put_ms_median: float = 0.0
    put_ms_longest: float = 0.0
    written_blocks: int = 0

    @property
    def dropped_share(self) -> float:
        return (self.refused + self.lost) / self.blocks if self.blocks else 0.0


class Source:
    """Prompts and payloads. All blocks of a run have the same few bytes under them: what is measured is room."""

    def __init__(self, sizes: Sizes) -> None:
        self.sizes = sizes
        group = LayerGroup("attention", GroupKind.FULL, 1, sizes.block_bytes, BLOCK_TOKENS)
        self.spec = NamespaceSpec(
            Weights("revision", "burst"), Layout("burst", "uint8", BLOCK_TOKENS, (group,)), "bench"
        )
        random = np.random.default_rng(0)
        self.payloads: list[NDArray[np.uint8]] = [
            random.integers(0, 256, sizes.block_bytes, dtype=np.uint8) for _ in range(sizes.request_blocks)
        ]

    def chain(self, client: Client, number: int, requests: int = 1) -> Chain:
        """``requests``: that many prompts' blocks in one."""
        tokens = requests * self.sizes.request_blocks * BLOCK_TOKENS + 1
        start = 10_000_000 + number * 100_000
        return client.open_namespace(self.spec).chain(np.arange(start, start + tokens, dtype=np.int32))


@contextmanager
def burst_store(
    sizes: Sizes, folder: Path | None, *, server: str | None = None, dead: bool = False
) -> Iterator[Client]:
    """A store with the defaults that matter here; ``dead``: its disk takes nothing."""
    clock = SystemClock()
    specs = []
    if folder is not None:
        disk = (
            ShimDisk(failing(5, lambda call, file, offset: call == "pwritev" and offset > 0))
            if dead
            else None
        )
        capacity = 8 * sizes.host_bytes
        nvme = NvmeTier(folder, capacity, clock=clock, min_free_bytes=0, disk=disk)
        specs.append(BlobSpec(nvme, LruPolicy(), AlwaysPolicy()))
    if server is not None:
        specs.append(BlobSpec(ValkeyTier(server, clock=clock), None, AlwaysPolicy(), timeout_s=0.5))
    arena = Arena(sizes.host_bytes, sizes.host_bytes // 16)
    host = HostTier(arena)
    store = TieredStore(host, LruPolicy(), specs, OnHitPolicy(), Limits(), clock, ThreadExecutor(clock))
    store.start(populate=False)
    host.populate()
    client = Client(store, owner="burst")
    try:
        yield client
    finally:
        store.close(2.0)


def run_burst(
    client: Client, source: Source, case: str, *, bytes_per_s: float | None = None, one_call: bool = False
) -> Burst:
    """Offers twice the arena, at a pace or as fast as ``put`` is, and counts what became of it."""
    sizes, store = source.sizes, client.store
    result = Burst(case)
    before_written = store.counters.get("written_blocks_total", "nvme", "done")
    before_lost = _lost(client)
    count = 1 if one_call else sizes.requests
    chains = [source.chain(client, 1 + n, sizes.requests if one_call else 1) for n in range(count)]
    payloads = source.payloads * (sizes.requests if one_call else 1)
    took_s = []
    start_s = time.perf_counter()
    for number, chain in enumerate(chains):
        if bytes_per_s is not None:
            due_s = start_s + number * len(payloads) * sizes.block_bytes / bytes_per_s
            time.sleep(max(0.0, due_s - time.perf_counter()))
        put_s = time.perf_counter()
        stored = client.put(chain, payloads)
        took_s.append(time.perf_counter() - put_s)
        result.blocks += len(payloads)
        result.refused += sum(stored.dropped.values())
    seconds = time.perf_counter() - start_s
    result.offered_bytes_per_s = result.blocks * sizes.block_bytes / seconds
    result.lost = _lost(client) - before_lost
    result.put_ms_median = sorted(took_s)[len(took_s) // 2] * 1000
    result.put_ms_longest = max(took_s) * 1000
    result.written_blocks = store.counters.get("written_blocks_total", "nvme", "done") - before_written
    newest = chains[-len(chains) // (2 * BURST) :]
    result.newest = sum(len(chain) for chain in newest)
    result.newest_kept = sum(client.match(chain).blocks for chain in newest)
    return result


def _lost(client: Client) -> int:
    counters = client.store.counters
    return sum(
        counters.get("dropped_blocks_total", "host", reason) for reason in ("dropped_dirty", "dropped_clean")
    )


def edge_speed(client: Client, source: Source) -> float:
    """Bytes a second that a flush of half an arena reaches; the segments are made before."""
    speed = 0.0
    for turn in range(2):
        chains = [source.chain(client, 1000 * (turn + 1) + n) for n in range(source.sizes.requests // 4)]
        for chain in chains:
            client.put(chain, source.payloads)
        start_s = time.perf_counter()
        report = client.flush("nvme").result()
        speed = report.written * source.sizes.block_bytes / (time.perf_counter() - start_s)
    client.evict("host")
    client.evict("nvme")
    client.clear().result()
    return speed


def run_all(sizes: Sizes, folder: Path) -> list[Burst]:
    """All cases, each on a store of its own."""
    source, results = Source(sizes), []
    folder.mkdir(parents=True, exist_ok=True)
    with TemporaryDirectory(dir=folder, prefix="burst-") as name:
        for number, pace in enumerate([*PACES, None]):
            with burst_store(sizes, Path(name) / str(number)) as client:
                speed = edge_speed(client, source)
                case = f"paced at {pace:g}" if pace is not None else "unpaced"
                result = run_burst(client, source, case, bytes_per_s=speed * pace if pace else None)
                result.edge_bytes_per_s = speed
                results.append(result)
        with burst_store(sizes, Path(name) / "one") as client:
            speed = edge_speed(client, source)
            results.append(run_burst(client, source, "one call", one_call=True))
            results[-1].edge_bytes_per_s = speed
        with burst_store(sizes, None) as client:
            results.append(run_burst(client, source, "alone"))
        with ExitStack() as stack:
            server = stack.enter_context(running_server())
            client = stack.enter_context(
                burst_store(sizes, Path(name) / "dead", server=server.address, dead=True)
            )
            server.hang()
            stack.callback(server.go_on)
            results.append(run_burst(client, source, "dead"))
    return results


def table(results: Sequence[Burst]) -> str:
    lines = ["case            offered    edge  MB/s  dropped   newest kept     put ms: median  longest"]
    for one in results:
        lines.append(
            f"{one.case:14s} {one.offered_bytes_per_s / 1e6:8.0f} {one.edge_bytes_per_s / 1e6:7.0f}      "
            f"{one.dropped_share:8.2%}   {one.newest_kept:5d} of {one.newest:5d}  {one.put_ms_median:14.2f} "
            f"{one.put_ms_longest:8.2f}"
        )
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m bench.burst", description=(__doc__ or "").partition("\n\n")[0]
    )
    parser.add_argument("--host", type=int, default=128, metavar="MIB")
    parser.add_argument("--block", type=int, default=512, metavar="KIB")
    parser.add_argument("--request", type=int, default=16, metavar="N")
    parser.add_argument("--dir", type=Path, default=Path(".bench"), metavar="PATH")
    parser.add_argument("--json", type=Path, metavar="FILE")
    options = parser.parse_args(arguments)
    tune_malloc()
    sizes = Sizes(options.host * MIB, options.block * KIB, options.request)
    results = run_all(sizes, options.dir)
    print(f"{machine()}\n\n{table(results)}")
    if options.json is not None:
        options.json.parent.mkdir(parents=True, exist_ok=True)
        rows = {one.case: asdict(one) | {"dropped_share": one.dropped_share} for one in results}
        options.json.write_text(json.dumps({"machine": machine(), "cases": rows}, indent=2) + "\n")
    return 0


if __name__ == "__main__":
    unwind_at_sigterm()
    sys.exit(main())
