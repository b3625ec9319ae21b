"""What sizes of the tiers buy: time to first token and GPU-seconds, for each request of a trace, reckoned in one pass.

Hits are those of LRU at host RAM's capacity, then at the sum with NVMe's, then with Valkey's as well: a block goes to a
colder tier when it leaves the hotter one, so they hold different blocks but for those that came back. (A replay has
that too, ``tierkv.replay.several``; on recorded traffic the sum hits 1 to 2 % more.) A request waits for the slower of
the two cold tiers, then for the copy to the engine, then for what is computed; nobody waits in a queue.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from tierkv.replay.asked import OFF
from tierkv.replay.costs import Costs
from tierkv.replay.distances import Reach
from tierkv.replay.geometry import Numbers
from tierkv.replay.several import Sizes
from tierkv.replay.traces import Trace

NOTHING = Sizes(OFF, OFF, OFF)
ON_HIT, BREAK_EVEN = "on_hit", "break_even"
_WORTH_IT = 0.99
"""``break_even`` is chosen where the mean time to first token is below this share of that with ``on_hit``."""


@dataclass(frozen=True)
class Bought:
    """What one combination of sizes does to the traffic of a trace."""

    sizes: Sizes
    blocks: Mapping[str, int]
    promotion: str
    hit_blocks: Mapping[str, int]
    """By the tier that gives them."""
    ttft_mean_s: float
    ttft_p50_s: float
    ttft_p95_s: float
    gpu_s: float
    """Of all GPUs, for the prefills of the whole trace."""

    @property
    def text(self) -> str:
        return self.sizes.text


class Planner:
    """A trace, looked at once. Not thread-safe."""

    def __init__(self, trace: Trace, reach: Reach, costs: Costs) -> None:
        self._reach = reach
        self._costs = costs
        self._block_tokens = trace.block_tokens
        self.block_bytes = costs.block_bytes(trace.block_tokens)
        self._tokens: Numbers = np.array([request.tokens for request in trace.requests], dtype=np.float64)

    def nothing(self) -> Bought:
        """Everything is computed."""
        none = np.zeros(len(self._tokens), dtype=np.int64)
        return self._bought(None, {}, ON_HIT, [none], [])

    def bought(self, sizes: Sizes, blocks: Mapping[str, int]) -> Bought:
        """With the better of the two promotion policies."""
        total, hits, tiers = 0, [], []
        for tier, count in blocks.items():
            total += count
            reached = self._reach.hits(total)
            hits.append(
                np.minimum(reached, blocks["host"])
            )  # every byte passes through it: longer prompts are cut
            tiers.append(tier)
        loaded = self._bought(sizes, blocks, ON_HIT, hits, tiers)
        if len(tiers) == 1:
            return loaded
        quicker = self._bought(sizes, blocks, BREAK_EVEN, self._worth_loading(hits, tiers), tiers)
        return quicker if quicker.ttft_mean_s < _WORTH_IT * loaded.ttft_mean_s else loaded

    def _tokens_of(self, blocks: NDArray[np.int64]) -> Numbers:
        """At least one token of a prompt is computed."""
        found: Numbers = np.minimum(blocks * float(self._block_tokens), np.maximum(self._tokens - 1, 0))
        return found

    def _bytes_of(self, blocks: NDArray[np.int64]) -> Numbers:
        found: Numbers = blocks.astype(np.float64) * self.block_bytes
        return found

    def _worth_loading(
        self, hits: Sequence[NDArray[np.int64]], tiers: Sequence[str]
    ) -> list[NDArray[np.int64]]:
        """Without the runs that are quicker to compute: a run that is not loaded ends the prefix."""
        kept = [hits[0]]
        for tier, before, reached in zip(tiers[1:], hits, hits[1:], strict=False):
            compute_s = self._costs.compute_s(self._tokens_of(before), self._tokens_of(reached))
            load_s = self._costs.read_s(tier, self._bytes_of(reached - before))
            here = np.where((load_s <= compute_s) & (kept[-1] == before), reached, kept[-1])
            kept.append(here)
        return kept

    def _bought(
        self,
        sizes: Sizes | None,
        blocks: Mapping[str, int],
        promotion: str,
        hits: Sequence[NDArray[np.int64]],
        tiers: Sequence[str],
    ) -> Bought:
        costs, given = self._costs, self._tokens_of(hits[-1])
        wait_s = np.zeros_like(given)
        for tier, before, reached in zip(tiers[1:], hits, hits[1:], strict=False):
            read_s = costs.read_s(tier, self._bytes_of(reached - before))
            wait_s = np.maximum(wait_s, read_s)
        compute_s = costs.compute_s(given, self._tokens)
        ttft_s = wait_s + costs.link_s(given, self._block_tokens) + compute_s
        mine = np.diff([0, *(int(one.sum()) for one in hits)])
        return Bought(
            NOTHING if sizes is None else sizes,
            blocks,
            promotion,
            dict(zip(tiers, map(int, mine), strict=False)),
            float(ttft_s.mean()),
            float(np.percentile(ttft_s, 50)),
            float(np.percentile(ttft_s, 95)),
            float(compute_s.sum()) * costs.gpus,
        )
