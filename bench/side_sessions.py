"""Rows ``sessions_4`` and ``sessions_16``: several engine processes at once."""

from __future__ import annotations

import itertools
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager

from bench.harness import Reach, Row, Sample, Settings, Sides
from bench.memory import Blocks
from bench.names import chain_of, namespace_for
from bench.sidecar_process import client_of, daemon, folder
from tierkv.units import KIB, MIB

BLOCK_BYTES = 256 * KIB
BLOCKS = 16
PROMPTS = 4
"""Of a process that comes back to its own: those of 16 processes take half of the arena."""
WORK_S = 3.0


class Sessions:
    """Each process puts and loads prompts of its own for a few seconds; the limit is one process alone, which does the
    same: it comes back to its few prompts, or has a new one each time, whose blocks take the room of older ones."""

    def __init__(self, count: int, *, new: bool = False) -> None:
        self._count = count
        self._new = new
        self.name = f"sessions_{count}_new" if new else f"sessions_{count}"
        what = f"{count} processes put and load {'new' if new else 'their'} prompts at once"
        self.rows = (
            Row(
                self.name,
                "per_s",
                "blocks/s",
                f"{what}: blocks a second in sum; limit: one process alone",
                Reach("ratio", ">=", 0.9),
            ),
            Row(
                f"{self.name}_fair",
                "least",
                "share",
                f"{what}: what the slowest got, as a part of its fair share; limit: 1",
                Reach("value", ">=", 0.5),
            ),
        )

    @contextmanager
    def open(self, settings: Settings) -> Iterator[Sides]:
        with folder() as place, daemon(place, 512 * MIB) as address:
            yield Sides(
                lambda: run(address, self._count, self._new),
                lambda: run(address, 1, self._new),
                most_rounds=4,
            )


def run(address: str, count: int, new: bool) -> Sample:
    """All start at the same moment, when all are ready."""
    kind = "new" if new else "own"
    workers = [
        subprocess.Popen(
            [sys.executable, "-m", "bench.side_sessions", address, str(number), kind],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        for number in range(count)
    ]
    for worker in workers:
        assert worker.stdout is not None
        worker.stdout.readline()
    for worker in workers:
        assert worker.stdin is not None
        worker.stdin.write("go\n")
        worker.stdin.flush()
    rates = [float(json.loads(worker.communicate(timeout=60)[0])) for worker in workers]
    return {"per_s": sum(rates), "least": min(rates) * count / sum(rates)}


def work(address: str, number: int, new: bool) -> float:
    """Blocks a second that one process has put and loaded."""
    with client_of(address) as client:
        namespace = client.open_namespace(namespace_for(BLOCK_BYTES).spec).namespace
        sources = Blocks(BLOCKS, BLOCK_BYTES)
        own = [chain_of(namespace, BLOCKS, seed=number * PROMPTS + turn) for turn in range(PROMPTS)]
        never_seen = (chain_of(namespace, BLOCKS, seed=seed) for seed in itertools.count(os.getpid() << 32))
        chains = never_seen if new else itertools.cycle(own)
        print("ready", flush=True)
        sys.stdin.readline()
        start_s, done = time.perf_counter(), 0
        while time.perf_counter() - start_s < WORK_S:
            chain = next(chains)
            client.put(chain, sources.views)
            with client.load(chain) as lease:
                done += len(lease)
        return done / (time.perf_counter() - start_s)


if __name__ == "__main__":
    print(json.dumps(work(sys.argv[1], int(sys.argv[2]), sys.argv[3] == "new")))
