"""What a replay found: as rows for machines, and as a table for people."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from tierkv.replay.asked import Capacity
from tierkv.replay.one_tier import Outcome
from tierkv.replay.traces import Trace

OPTIMUM = "optimum"
Json = dict[str, object]


class Cell(NamedTuple):
    """One policy at one capacity."""

    policy: str
    """``optimum`` is Belady's, which knows the future."""
    capacity: Capacity
    blocks: int
    outcome: Outcome


def as_json(trace: Trace, cells: Sequence[Cell], lru_curve: Sequence[tuple[int, float]]) -> Json:
    """All that is known, for machines."""
    return {
        "trace": trace_json(trace),
        "cells": [_cell_json(trace, cell, best) for cell, best in _beside_best(cells)],
        "lru_curve": [{"blocks": blocks, "hit_percent": percent} for blocks, percent in lru_curve],
    }


def trace_json(trace: Trace) -> Json:
    """What a trace is."""
    return {
        "name": trace.name,
        "requests": len(trace.requests),
        "seconds": trace.seconds,
        "tokens": trace.tokens,
        "block_tokens": trace.block_tokens,
        "references": trace.references,
        "different_blocks": trace.blocks,
    }


def _cell_json(trace: Trace, cell: Cell, best: Outcome) -> Json:
    outcome = cell.outcome
    return {
        "policy": cell.policy,
        "capacity": cell.capacity.text,
        "blocks": cell.blocks,
        "references": outcome.references,
        "hit_blocks": outcome.hit_blocks,
        "hit_tokens": outcome.hit_blocks * trace.block_tokens,
        "hit_percent": outcome.hit_percent,
        "second_half_hit_percent": outcome.late_hit_percent,
        "percent_of_optimum": _share(outcome, best),
        "stored_blocks": None if cell.policy == OPTIMUM else outcome.stored_blocks,
        "evicted_blocks": outcome.evicted_blocks,
        "refused_blocks": outcome.refused_blocks,
    }


def _beside_best(cells: Sequence[Cell]) -> Iterator[tuple[Cell, Outcome]]:
    """Each with the optimum of its capacity."""
    best = {cell.capacity: cell.outcome for cell in cells if cell.policy == OPTIMUM}
    for cell in cells:
        yield cell, best[cell.capacity]


def _share(outcome: Outcome, best: Outcome) -> float | None:
    return 100 * outcome.hit_blocks / best.hit_blocks if best.hit_blocks else None


HEADS = (
    "capacity",
    "blocks",
    "policy",
    "hit blocks",
    "hit tokens",
    "hits",
    "of optimum",
    "evicted",
    "refused",
)
_LEFT = {"capacity", "policy", "host", "nvme", "valkey", "admission"}


def table(trace: Trace, cells: Sequence[Cell]) -> list[str]:
    """Lines of plain text."""
    rows: list[tuple[str, ...]] = []
    for cell, best in _beside_best(cells):
        outcome, share = cell.outcome, _share(cell.outcome, best)
        rows.append(
            (
                cell.capacity.text,
                f"{cell.blocks:,}",
                cell.policy,
                f"{outcome.hit_blocks:,}",
                f"{outcome.hit_blocks * trace.block_tokens:,}",
                f"{outcome.hit_percent:.2f}%",
                "-" if share is None else f"{share:.1f}%",
                f"{outcome.evicted_blocks:,}",
                f"{outcome.refused_blocks:,}",
            )
        )
    return [trace_line(trace), "", *aligned(HEADS, rows)]


def trace_line(trace: Trace) -> str:
    """What a trace is, in one line."""
    return (
        f"{trace.name}: {len(trace.requests):,} requests in {trace.seconds:,.0f} s, "
        f"{trace.references:,} blocks asked for, {trace.blocks:,} of them different, "
        f"{trace.block_tokens} tokens each"
    )


def short(number: float) -> str:
    """Whole where it is large, three digits where it is not: nothing that is there becomes a 0."""
    return f"{number:,.0f}" if abs(number) >= 99.5 else f"{number:.3g}"


def aligned(heads: Sequence[str], rows: Sequence[Sequence[str]], *, gaps: bool = True) -> list[str]:
    """A table. ``gaps``: with an empty line wherever the first column changes."""
    lines = []
    widths = [max(len(row[at]) for row in (heads, *rows)) for at in range(len(heads))]
    for number, row in enumerate((heads, *rows)):
        if gaps and number > 1 and row[0] != rows[number - 2][0]:
            lines.append("")
        words = [
            word.ljust(width) if head in _LEFT else word.rjust(width)
            for word, width, head in zip(row, widths, heads, strict=True)
        ]
        lines.append("  ".join(words).rstrip())
    return lines
