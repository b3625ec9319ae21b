"""Which of the sizes to buy, and which policies to run on them.

With all prices: the sizes that save most, GPUs less tiers. Otherwise the cheapest that save nearly all that the largest
do. Policies are not reckoned but replayed, with the real code, at those sizes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from tierkv.replay.chosen import admissions, evictions, promotion
from tierkv.replay.costs import Costs
from tierkv.replay.plan_outcome import Bought
from tierkv.replay.plan_sizes import Prices
from tierkv.replay.progress import Progress
from tierkv.replay.several import Ways, replay_one, saved_s
from tierkv.replay.tiers import Counts
from tierkv.replay.traces import Trace

ENOUGH: Final = 0.9
"""Of the GPU-seconds that the largest sizes save."""
NEARLY: Final = 0.98
"""An admission that saves as much of what ``always`` does is preferred when it writes less."""
EVICTIONS: Final = ("density", "lru")
"""The store's default first."""
CLEARLY: Final = 1.005
"""So much more another eviction than the default has to save."""
ADMISSIONS: Final = ("always", "seen_twice", "density")


@dataclass(frozen=True)
class Weighed:
    """One combination of sizes beside what it costs. Money a month, where there are prices."""

    bought: Bought
    saved_gpu_s: float
    tiers_cost: float
    net: float
    """What the GPUs cost less, minus the tiers."""
    best_for_its_cost: bool
    """Nothing that costs as little saves more."""


def weigh(
    found: Sequence[Bought], nothing: Bought, prices: Prices, block_bytes: int, trace_s: float
) -> list[Weighed]:
    """The cheapest first."""
    rows = []
    for one in found:
        saved = nothing.gpu_s - one.gpu_s
        cost = prices.tiers(one.blocks, block_bytes)
        rows.append((cost, saved, one))
    rows.sort(key=lambda row: (row[0], -row[1]))
    weighed, most = [], 0.0
    for cost, saved, one in rows:
        weighed.append(Weighed(one, saved, cost, prices.gpus(saved, trace_s) - cost, saved > most))
        most = max(most, saved)
    return weighed


def recommended(weighed: Sequence[Weighed], prices: Prices) -> Weighed | None:
    """``None``: nothing is worth its price."""
    if prices.gpu_hour is not None:
        best = max(weighed, key=lambda one: one.net)
        return best if best.net > 0 else None
    most = max(one.saved_gpu_s for one in weighed)
    if most <= 0:
        return None
    return next(one for one in weighed if one.saved_gpu_s >= ENOUGH * most)


@dataclass(frozen=True)
class Tried:
    """Policies that were replayed at the recommended sizes."""

    policy: str
    admission: str
    counts: Counts
    hit_percent: float
    """With what the engine has itself, as in the table of sizes."""
    saved_gpu_s: float
    """By the store alone."""

    @property
    def written(self) -> int:
        """Blocks that went to colder tiers."""
        return sum(self.counts.written.values())


def trials(blocks: Mapping[str, int]) -> int:
    """How many parts of the progress ``try_policies`` takes."""
    return len(EVICTIONS) + (len(ADMISSIONS) - 1 if len(blocks) > 1 else 0)


def try_policies(
    trace: Trace, bought: Bought, own: Sequence[int], costs: Costs, progress: Progress
) -> tuple[list[Tried], Tried]:
    """All that were tried, and the one to run: the default eviction unless another saves clearly more, then the
    admission that writes least without losing. ``own``: by request, the blocks that the engine has itself."""
    ways = Ways(
        evictions(",".join(EVICTIONS)),
        admissions(",".join(ADMISSIONS)),
        (bought.promotion, promotion(bought.promotion)),
        "on_evict",
    )
    own_s = saved_s(trace, own, costs)

    def tried(policy: str, admission: str) -> Tried:
        label = progress.part(f"{policy}, {admission} at {bought.text}")
        counts, given = replay_one(trace, bought.blocks, ways, policy, admission, costs, label)
        reached = [max(both) for both in zip(own, given, strict=True)]
        saved = (saved_s(trace, reached, costs) - own_s) * costs.gpus
        return Tried(policy, admission, counts, 100 * sum(reached) / trace.references, saved)

    found = [tried(policy, ADMISSIONS[0]) for policy in EVICTIONS]
    usual, best = found[0], max(found, key=lambda one: one.saved_gpu_s)
    if best.saved_gpu_s <= CLEARLY * usual.saved_gpu_s:
        best = usual
    if len(bought.blocks) > 1:
        others = [tried(best.policy, admission) for admission in ADMISSIONS[1:]]
        found += others
        fine = [one for one in others if one.saved_gpu_s >= NEARLY * best.saved_gpu_s]
        best = min([best, *fine], key=lambda one: one.written)
    return found, best
