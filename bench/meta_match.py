"""Row ``match_8192``: one long prompt found, leased, made the most recent and released."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

from bench.grown import grow, open_unfilled
from bench.harness import Reach, Row, Sample, Settings, Sides

BLOCKS = 8192


class MatchLong:
    """A prompt of 8,192 blocks in a store with many others."""

    def __init__(self, name: str, *, resident: float) -> None:
        self.name = name
        self._resident = resident
        self.rows = (
            Row(
                name,
                "us",
                "us",
                f"load and release of a prompt of {BLOCKS} blocks, all in host RAM, lease and recency included; "
                "limit: `for k in keys: d[k]` with as many keys in the dict",
                Reach("ratio", "<=", 4),
            ),
        )

    @contextmanager
    def open(self, settings: Settings) -> Iterator[Sides]:
        blocks = min(BLOCKS, settings.grown_blocks // 10)
        prompts = max(2, int(settings.grown_blocks * self._resident) // blocks)
        with open_unfilled(prompts * blocks) as client:
            chains = [grow(client, blocks, seed) for seed in range(prompts)]
            d = {block_hash: number for chain in chains for number, block_hash in enumerate(chain.hashes)}
            turn = 0

            def ours() -> Sample:
                nonlocal turn
                turn += 1
                chain = chains[turn * 7 % len(chains)]
                start_s = time.perf_counter()
                lease = client.load(chain)
                lease.release()
                elapsed_s = time.perf_counter() - start_s
                if len(lease) != blocks:
                    raise RuntimeError(f"{len(lease)} of {blocks} blocks were found")
                return {"us": elapsed_s * 1e6}

            def limit() -> Sample:
                nonlocal turn
                turn += 1
                keys = chains[turn * 7 % len(chains)].hashes
                start_s = time.perf_counter()
                for k in keys:
                    d[k]
                return {"us": (time.perf_counter() - start_s) * 1e6}

            yield Sides(ours, limit)
