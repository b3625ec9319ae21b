"""What sizes of the tiers buy: time to first token and GPU-seconds, for each request of a trace, reckoned in one pass.

Hits are those of LRU at host RAM's capacity, then at the sum with NVMe's, then with Valkey's as well: a block goes to a
colder tier when it leaves the hotter one, so they hold different blocks but for those that came back. (A replay has
that too, ``tierkv.replay.several``; on recorded traffic the sum hits 1 to 5 % more.) A request waits for the slower of
the two cold tiers, then for the copy to the engine, then for what is computed; nobody waits in a queue.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
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
    own_blocks: int
    """That the engine has itself."""
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

    def __init__(self, trace: Trace, reach: Reach, costs: Costs, *, engine_blocks: int | None = None) -> None:
        """``engine_blocks``: what the engine's own cache holds; its hits are nobody else's. ``None``: as it was
        recorded, which is nothing where the trace does not say."""
        self._reach = reach
        self._costs = costs
        self._block_tokens = trace.block_tokens
        self.block_bytes = costs.block_bytes(trace.block_tokens)
        self._tokens: Numbers = np.array([request.tokens for request in trace.requests], dtype=np.float64)
        self.own: NDArray[np.int64]
        if engine_blocks is None:
            self.own = np.array([request.own for request in trace.requests], dtype=np.int64)
        else:
            self.own = reach.hits(engine_blocks)
        """By request, the blocks that the engine has itself."""

    def nothing(self) -> Bought:
        """All is computed that the engine does not have itself."""
        return self._bought(NOTHING, {}, ON_HIT, [self.own])

    def bought(self, sizes: Sizes, blocks: Mapping[str, int]) -> Bought:
        """With the better of the two promotion policies."""
        total, levels = 0, [self.own]
        for count in blocks.values():
            total += count
            # Every byte passes through host RAM: of a longer prompt the end is cut.
            reached = np.minimum(self._reach.hits(total), blocks["host"])
            levels.append(np.maximum(reached, levels[-1]))
        loaded = self._bought(sizes, blocks, ON_HIT, levels)
        if len(blocks) == 1:
            return loaded
        quicker = self._bought(sizes, blocks, BREAK_EVEN, self._worth_loading(levels, blocks))
        return quicker if quicker.ttft_mean_s < _WORTH_IT * loaded.ttft_mean_s else loaded

    def _tokens_of(self, blocks: NDArray[np.int64]) -> Numbers:
        """At least one token of a prompt is computed."""
        found: Numbers = np.minimum(blocks * float(self._block_tokens), np.maximum(self._tokens - 1, 0))
        return found

    def _bytes_of(self, blocks: NDArray[np.int64]) -> Numbers:
        found: Numbers = blocks.astype(np.float64) * self.block_bytes
        return found

    def _worth_loading(
        self, levels: Sequence[NDArray[np.int64]], tiers: Iterable[str]
    ) -> list[NDArray[np.int64]]:
        """Without the runs that are quicker to compute: a run that is not loaded ends the prefix."""
        kept = [*levels[:2]]
        for tier, before, reached in _colder(tiers, levels):
            compute_s = self._costs.compute_s(self._tokens_of(before), self._tokens_of(reached))
            load_s = self._costs.read_s(tier, self._bytes_of(reached - before))
            here = np.where((load_s <= compute_s) & (kept[-1] == before), reached, kept[-1])
            kept.append(here)
        return kept

    def _bought(
        self, sizes: Sizes, blocks: Mapping[str, int], promotion: str, levels: Sequence[NDArray[np.int64]]
    ) -> Bought:
        """``levels``: by request, the blocks that the engine has, then it and host RAM, and so on."""
        costs, given, own = self._costs, self._tokens_of(levels[-1]), self._tokens_of(levels[0])
        wait_s = np.zeros_like(given)
        for tier, before, reached in _colder(blocks, levels):
            wait_s = np.maximum(wait_s, costs.read_s(tier, self._bytes_of(reached - before)))
        link_s = costs.link_s(given, self._block_tokens) - costs.link_s(own, self._block_tokens)
        compute_s = costs.compute_s(given, self._tokens)
        ttft_s = wait_s + link_s + compute_s
        sums = [int(level.sum()) for level in levels]
        return Bought(
            sizes,
            blocks,
            promotion,
            dict(zip(blocks, map(int, np.diff(sums)), strict=True)),
            sums[0],
            float(ttft_s.mean()),
            float(np.percentile(ttft_s, 50)),
            float(np.percentile(ttft_s, 95)),
            float(compute_s.sum()) * costs.gpus,
        )


Level = NDArray[np.int64]


def _colder(tiers: Iterable[str], levels: Sequence[Level]) -> Iterator[tuple[str, Level, Level]]:
    """The tiers behind host RAM, each with what is there without it and with it."""
    return zip(list(tiers)[1:], levels[1:], levels[2:], strict=False)
