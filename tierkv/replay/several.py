"""Replays through several tiers: every combination of capacities, policies and admissions that was asked for."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product

import numpy as np

from tierkv.policies.by_priority import with_priorities
from tierkv.policy import EvictionPolicy, PromotionPolicy
from tierkv.replay.asked import OFF, Capacity
from tierkv.replay.chosen import AdmissionMaker
from tierkv.replay.costs import Costs
from tierkv.replay.one_tier import Outcome
from tierkv.replay.optimum import replay_optimum
from tierkv.replay.progress import Progress
from tierkv.replay.tiers import Cold, Counts, Tiers, WriteRule, replay_tiers
from tierkv.replay.traces import Trace, TraceClock

Progressed = Callable[[float], None]


@dataclass(frozen=True)
class Sizes:
    """Of the three tiers, as they were asked for."""

    host: Capacity
    nvme: Capacity
    valkey: Capacity

    @property
    def text(self) -> str:
        cold = [f"{name} {one.text}" for name, one in self.cold() if one is not OFF]
        return " + ".join([f"host {self.host.text}", *cold])

    def cold(self) -> tuple[tuple[str, Capacity], tuple[str, Capacity]]:
        return ("nvme", self.nvme), ("valkey", self.valkey)

    def blocks(self, trace: Trace, block_bytes: int) -> dict[str, int]:
        """By tier, of those that are there."""
        found = {"host": self.host.blocks(trace, block_bytes)}
        for name, one in self.cold():
            if one is not OFF:
                found[name] = one.blocks(trace, block_bytes)
        return found


@dataclass(frozen=True)
class Ways:
    """What decides, by name how it is made."""

    evictions: Mapping[str, Callable[[], EvictionPolicy]]
    admissions: Mapping[str, AdmissionMaker]
    promotion: tuple[str, Callable[[], PromotionPolicy]]
    write: WriteRule


@dataclass(frozen=True)
class Replayed:
    """One combination, and what came of it."""

    sizes: Sizes
    blocks: Mapping[str, int]
    policy: str
    admission: str
    counts: Counts
    prefill_saved_s: float
    best: Outcome
    """The optimum of one tier that is as large as all of these together: no policy can do better."""


def replay_one(
    trace: Trace,
    blocks: Mapping[str, int],
    ways: Ways,
    policy: str,
    admission: str,
    costs: Costs,
    progress: Progressed = lambda share: None,
) -> tuple[Counts, list[int]]:
    """One combination. Returns what was counted, and of each request how many blocks it was given. Raises
    ``ConfigError``."""
    make, admit, clock = ways.evictions[policy], ways.admissions[admission], TraceClock()
    cold = [
        Cold(
            name,
            blocks[name],
            None if name == "valkey" else lambda: with_priorities(make),
            lambda: admit(clock),
            ways.write,
            costs.read_bytes_per_s[name],
            costs.latency_s[name],
        )
        for name in blocks
        if name != "host"
    ]
    tiers = Tiers(
        trace,
        blocks["host"],
        with_priorities(make),
        ways.promotion[1](),
        cold,
        block_bytes=costs.block_bytes(trace.block_tokens),
        s_per_token=costs.mean_token_s(trace.tokens / max(1, len(trace.requests))),
    )
    given: list[int] = []
    counts = replay_tiers(tiers, trace, progress, clock=clock, told=given.append)
    return counts, given


def saved_s(trace: Trace, given: Sequence[int], costs: Costs) -> float:
    """Seconds of prefill, when of each request so many leading blocks were given: at least one token is computed."""
    lengths = np.array([request.tokens for request in trace.requests], dtype=np.float64)
    stops = np.minimum(np.array(given, dtype=np.float64) * trace.block_tokens, np.maximum(lengths - 1, 0))
    return float(costs.compute_s(np.zeros_like(stops), stops).sum())


def prefill_s(trace: Trace, costs: Costs) -> float:
    """Seconds of prefill of the whole trace, when nothing is kept."""
    lengths = np.array([request.tokens for request in trace.requests], dtype=np.float64)
    return float(costs.compute_s(np.zeros_like(lengths), lengths).sum())


def parts(sizes: Sequence[Sizes], ways: Ways) -> int:
    """Parts of the progress that ``replay_all`` takes."""
    return len(sizes) + len(list(_combinations(sizes, ways)))


def replay_all(
    trace: Trace, sizes: Sequence[Sizes], ways: Ways, costs: Costs, progress: Progress
) -> list[Replayed]:
    """Every combination. Raises ``ConfigError``."""
    block_bytes = costs.block_bytes(trace.block_tokens)
    best: dict[Sizes, Outcome] = {}
    found = []
    for size, policy, admission in _combinations(sizes, ways):
        blocks = size.blocks(trace, block_bytes)
        if size not in best:
            best[size] = replay_optimum(trace, sum(blocks.values()), progress.part(f"optimum at {size.text}"))
        label = f"{policy}, {admission} at {size.text}"
        counts, given = replay_one(trace, blocks, ways, policy, admission, costs, progress.part(label))
        saved = saved_s(trace, given, costs)
        found.append(Replayed(size, blocks, policy, admission, counts, saved, best[size]))
    return found


def _combinations(sizes: Sequence[Sizes], ways: Ways) -> Iterator[tuple[Sizes, str, str]]:
    """Without colder tiers there is nothing to admit: one admission will do."""
    for size in sizes:
        admissions = list(ways.admissions)
        if size.nvme is OFF and size.valkey is OFF:
            del admissions[1:]
        yield from product([size], ways.evictions, admissions)
