"""How a measurement is made: two sides in turn, several rounds, medians.

An experiment has two sides that do the same work on the same buffers: ours, and the limit (the least that this machine
needs for it). A round runs ours, limit, limit, ours (ABBA), so that a slow drift of the machine meets both alike. Each
run gives a sample, a dict of measures; each row takes one measure out of it.

A row whose limit itself wavers by more than 25 % ((p90 - p10) / median) says nothing about us: it is "unmeasurable",
and its experiment is repeated a few times in the hope of a calmer machine.
"""

from __future__ import annotations

import gc
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Literal, Protocol

from tierkv.units import MIB

MIN_ROUNDS = 12
MAX_LIMIT_SPREAD = 0.25
MAX_ATTEMPTS = 3

Sample = Mapping[str, float]
Verdict = Literal["ok", "short", "unmeasurable", "shown"]


@dataclass(frozen=True)
class Settings:
    """What a run is made with. ``quick`` sizes are for a look, not for a claim."""

    directory: Path
    """Where the disk rows put their files; the disk under it is what they measure."""
    rounds: int = MIN_ROUNDS
    attempts: int = MAX_ATTEMPTS
    block_bytes: int = MIB
    memory_blocks: int = 64
    """Blocks in the rows that stay in memory or go to a server."""
    disk_blocks: int = 1024
    batch_blocks: int = 64
    batches: int = 8
    """Batches in one run of a disk row."""
    index_blocks: int = 8192
    """Blocks that are looked up in one run of a row that takes microseconds."""
    chain_tokens: int = 131_072
    grown_blocks: int = 1_000_000
    """Blocks that an index grows to."""


@dataclass(frozen=True)
class Reach:
    """What a row has to reach: ``of`` is the value itself, value / limit, or value - limit."""

    of: Literal["value", "ratio", "excess"]
    sign: Literal[">=", "<="]
    bound: float

    def margin(self, value: float, limit: float) -> float:
        """By which factor the bound is kept; below 1 it is missed."""
        found = {"value": value, "ratio": value / limit, "excess": value - limit}[self.of]
        if self.sign == ">=":
            return found / self.bound
        return self.bound / found if found > 0 else float("inf")

    def __str__(self) -> str:
        return f"{self.of} {self.sign} {self.bound:g}"


@dataclass(frozen=True)
class Row:
    """One line of the result."""

    name: str
    measure: str
    """Which entry of the samples, the same on both sides."""
    unit: str
    definition: str
    """What value and limit are; ``ratio`` is always value / limit."""
    reach: Reach | None = None
    """``None``: shown beside the others, not judged."""

    @property
    def better(self) -> str:
        return "higher" if self.reach is not None and self.reach.sign == ">=" else "lower"


@dataclass(frozen=True)
class Worst:
    """A row that repeats the one of ``of`` that keeps its bound least."""

    name: str
    of: tuple[str, ...]


@dataclass(frozen=True)
class Sides:
    """The two things that are compared. Each call is one run and gives one sample."""

    ours: Callable[[], Sample]
    limit: Callable[[], Sample]
    check: Callable[[], None] = lambda: None
    """Looks at the bytes that both sides left; called outside of any timing, raises when they are wrong."""
    notes: tuple[str, ...] = ()
    most_rounds: int | None = None
    """For what takes so long that a few rounds must do."""


class Experiment(Protocol):
    """Rows that come out of the same samples, and how to get those."""

    @property
    def name(self) -> str: ...

    @property
    def rows(self) -> Sequence[Row]: ...

    def open(self, settings: Settings) -> AbstractContextManager[Sides]:
        """Sets both sides up. Raises ``Unavailable`` where this machine lacks what it takes."""
        ...


class Unavailable(Exception):
    """This machine lacks something that an experiment needs; the message says what and how to get it."""


@dataclass
class Result:
    """A row with its figures."""

    row: Row
    value: float
    limit: float
    spread: float
    """Of the limit: (p90 - p10) / median."""
    rounds: int
    attempts: int
    ratio_by_round: float
    """The median of the ratios of single rounds: steadier than ``ratio`` on a machine that drifts."""
    notes: tuple[str, ...] = field(default=())

    @property
    def ratio(self) -> float:
        return self.value / self.limit

    @property
    def margin(self) -> float:
        return self.row.reach.margin(self.value, self.limit) if self.row.reach is not None else float("inf")

    @property
    def measurable(self) -> bool:
        return self.spread <= MAX_LIMIT_SPREAD

    @property
    def verdict(self) -> Verdict:
        if self.row.reach is None:
            return "shown"
        if not self.measurable:
            return "unmeasurable"
        return "ok" if self.margin >= 1 else "short"


def measure(experiment: Experiment, settings: Settings, progress: Callable[[str], None]) -> list[Result]:
    """Runs one experiment, again while its limit wavers too much; the calmest attempt counts."""
    best: list[Result] = []
    for attempt in range(1, settings.attempts + 1):
        with experiment.open(settings) as sides:
            rounds = min(settings.rounds, sides.most_rounds or settings.rounds)
            pairs = run_rounds(sides, rounds, partial(_tell, progress, experiment.name, attempt))
            results = [summarise(row, pairs, attempt, sides.notes) for row in experiment.rows]
        if not best or _waver(results) < _waver(best):
            best = results
        if _waver(best) <= MAX_LIMIT_SPREAD:
            break
        progress(f"{experiment.name}: the limit's own spread is {_waver(results):.0%}")
    for result in best:
        result.attempts = attempt
    return best


def _waver(results: Sequence[Result]) -> float:
    """The largest spread among the limits that are used to judge."""
    return max((result.spread for result in results if result.row.reach is not None), default=0.0)


def _tell(progress: Callable[[str], None], name: str, attempt: int, text: str) -> None:
    progress(f"{name}: {text}" + (f", attempt {attempt}" if attempt > 1 else ""))


def run_rounds(
    sides: Sides, rounds: int, progress: Callable[[str], None]
) -> list[tuple[list[Sample], list[Sample]]]:
    """One warm-up of each side, then the rounds: for each, the two samples of ours and the two of the limit."""
    progress("warm-up")
    sides.ours()
    sides.limit()
    sides.check()
    pairs = []
    for number in range(rounds):
        progress(f"round {number + 1} of {rounds}")
        gc.collect()
        first = sides.ours()
        limits = [sides.limit(), sides.limit()]
        pairs.append(([first, sides.ours()], limits))
        sides.check()
    return pairs


def summarise(
    row: Row, pairs: Sequence[tuple[list[Sample], list[Sample]]], attempt: int, notes: tuple[str, ...] = ()
) -> Result:
    ours = [sample[row.measure] for pair in pairs for sample in pair[0]]
    limits = [sample[row.measure] for pair in pairs for sample in pair[1]]
    by_round = [
        sum(s[row.measure] for s in ours_of) / sum(s[row.measure] for s in limit_of)
        for ours_of, limit_of in pairs
    ]
    return Result(
        row=row,
        value=statistics.median(ours),
        limit=statistics.median(limits),
        spread=spread(limits),
        rounds=len(pairs),
        attempts=attempt,
        ratio_by_round=statistics.median(by_round),
        notes=notes,
    )


def spread(values: Sequence[float]) -> float:
    """(p90 - p10) / median, with the percentiles interpolated between neighbours."""
    return (percentile(values, 0.9) - percentile(values, 0.1)) / statistics.median(values)


def percentile(values: Sequence[float], share: float) -> float:
    ordered = sorted(values)
    at = share * (len(ordered) - 1)
    below = int(at)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (ordered[above] - ordered[below]) * (at - below)


def worst_of(worst: Worst, results: Iterable[Result]) -> Result | None:
    """The result that ``worst`` repeats, under its name; ``None`` while one of its rows is missing."""
    found = {result.row.name: result for result in results}
    if not set(worst.of) <= found.keys():
        return None
    chosen = min((found[name] for name in worst.of), key=lambda result: result.margin)
    shaky = max((found[name] for name in worst.of), key=lambda result: result.spread)
    row = Row(
        worst.name,
        chosen.row.measure,
        chosen.row.unit,
        f"the one of {', '.join(worst.of)} that keeps its bound least: {chosen.row.name}",
        chosen.row.reach,
    )
    return Result(
        row,
        chosen.value,
        chosen.limit,
        max(chosen.spread, shaky.spread),
        chosen.rounds,
        chosen.attempts,
        chosen.ratio_by_round,
        chosen.notes,
    )
