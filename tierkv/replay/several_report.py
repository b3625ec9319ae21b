"""What a replay through several tiers found: as rows for machines, and as tables for people."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from tierkv.replay.costs import Assumption, Costs, assumption_lines
from tierkv.replay.report import Json, aligned, short, trace_json, trace_line
from tierkv.replay.several import Replayed, prefill_s
from tierkv.replay.traces import Trace
from tierkv.units import GIB, MIB, TIB

DAY_S = 86_400.0
YEAR_DAYS = 365.25
RATED_YEARS = 5.0


@dataclass(frozen=True)
class Wear:
    """What a drive endures. ``tbw``: terabytes that may be written to it, as its data sheet says."""

    tbw: float | None

    def endurance_bytes(self, capacity_bytes: int) -> float:
        """Where no drive is named: one write of the tier's capacity a day over five years, what data-centre drives for
        reading are commonly rated for."""
        if self.tbw is not None:
            return self.tbw * 1e12
        return capacity_bytes * RATED_YEARS * YEAR_DAYS

    def assumption(self) -> Assumption:
        option = "--nvme-tbw"
        if self.tbw is not None:
            return Assumption("nvme_tbw", self.tbw, "given", option)
        return Assumption(
            "nvme_tbw", "one write of its capacity a day for 5 years", "a common rating", option
        )


def as_json(trace: Trace, found: Sequence[Replayed], costs: Costs, wear: Wear, **more: object) -> Json:
    """All that is known, for machines."""
    whole_s = prefill_s(trace, costs)
    return {
        "trace": trace_json(trace) | {"prefill_s": whole_s},
        "assumptions": [one._asdict() for one in _assumed(trace, found, costs, wear)],
        **more,
        "cells": [_cell_json(trace, one, costs, wear, whole_s) for one in found],
    }


def _cell_json(trace: Trace, one: Replayed, costs: Costs, wear: Wear, whole_s: float) -> Json:
    counts, block_bytes = one.counts, costs.block_bytes(trace.block_tokens)
    day_bytes, life_years = _wear(trace, one, costs, wear)
    best = one.best.hit_blocks
    return {
        "policy": one.policy,
        "admission": one.admission,
        "tiers": {
            name: {
                "capacity": getattr(one.sizes, name).text,
                "blocks": blocks,
                "bytes": blocks * block_bytes,
                "hit_blocks": counts.hits[name],
                "hit_tokens": counts.hits[name] * trace.block_tokens,
                "evicted_blocks": counts.evicted[name],
                "refused_blocks": counts.refused.get(name, 0),
            }
            for name, blocks in one.blocks.items()
        },
        "references": counts.references,
        "hit_blocks": counts.hit_blocks,
        "hit_tokens": counts.hit_tokens,
        "hit_percent": counts.hit_percent,
        "second_half_hit_percent": counts.late_hit_percent,
        "optimum_hit_percent": one.best.hit_percent,
        "percent_of_optimum": 100 * counts.hit_blocks / best if best else None,
        "recomputed_blocks": counts.recomputed,
        "prefill_saved_s": one.prefill_saved_s,
        "prefill_saved_percent": 100 * one.prefill_saved_s / whole_s if whole_s else 0.0,
        "moved_bytes": {edge: blocks * block_bytes for edge, blocks in moved_blocks(one).items()},
        "nvme_written_bytes_a_day": day_bytes,
        "nvme_life_years": life_years,
    }


def moved_blocks(one: Replayed) -> dict[str, int]:
    """By edge: where blocks came from and went to."""
    counts = one.counts
    found = {"engine>host": counts.computed, "host>engine": counts.hit_blocks}
    for name in one.blocks:
        if name != "host":
            found[f"host>{name}"] = counts.written[name]
            found[f"{name}>host"] = counts.loaded[name]
    return found


def _wear(trace: Trace, one: Replayed, costs: Costs, wear: Wear) -> tuple[float | None, float | None]:
    """Bytes written to NVMe in a day, and years until the drive has taken what it endures."""
    if "nvme" not in one.blocks or not trace.seconds:
        return None, None
    block_bytes = costs.block_bytes(trace.block_tokens)
    day_bytes = one.counts.written["nvme"] * block_bytes * DAY_S / trace.seconds
    endurance = wear.endurance_bytes(one.blocks["nvme"] * block_bytes)
    return day_bytes, endurance / day_bytes / YEAR_DAYS if day_bytes else None


def _cold_tiers(found: Sequence[Replayed]) -> tuple[str, ...]:
    return tuple(name for name in ("nvme", "valkey") if any(name in one.blocks for one in found))


def _assumed(trace: Trace, found: Sequence[Replayed], costs: Costs, wear: Wear) -> list[Assumption]:
    cold = _cold_tiers(found)
    return [
        *costs.assumptions(trace.block_tokens, cold),
        *([wear.assumption()] if "nvme" in cold else []),
    ]


def tables(trace: Trace, found: Sequence[Replayed], costs: Costs, wear: Wear) -> list[str]:
    """Lines of plain text: hits, then bytes and wear, then what was assumed."""
    cold, whole_s = _cold_tiers(found), prefill_s(trace, costs)
    return [
        trace_line(trace),
        f"all of it computed: {short(whole_s)} s of prefill",
        "",
        *aligned(*_hits(found, cold, whole_s)),
        "",
        *aligned(*_bytes(trace, found, cold, costs, wear)),
        "",
        *assumption_lines(_assumed(trace, found, costs, wear)),
    ]


Rows = tuple[tuple[str, ...], list[tuple[str, ...]]]


def _names(one: Replayed, cold: Sequence[str]) -> tuple[str, ...]:
    sizes: Any = one.sizes
    return (*(getattr(sizes, name).text for name in ("host", *cold)), one.policy, one.admission)


def _hits(found: Sequence[Replayed], cold: Sequence[str], whole_s: float) -> Rows:
    tiers = ("host", *cold)
    heads = (*tiers, "policy", "admission", "hits", "of optimum", *(f"from {name}" for name in tiers),
             "hit tokens", "prefill saved")  # fmt: skip
    rows = []
    for one in found:
        counts, best = one.counts, one.best.hit_blocks
        share = f"{100 * counts.hit_blocks / best:.1f}%" if best else "-"
        rows.append(
            (
                *_names(one, cold),
                f"{counts.hit_percent:.2f}%",
                share,
                *(f"{counts.hits.get(name, 0):,}" for name in tiers),
                f"{counts.hit_tokens:,}",
                f"{short(one.prefill_saved_s)} s ({100 * one.prefill_saved_s / whole_s if whole_s else 0:.1f}%)",
            )
        )
    return heads, rows


def _bytes(trace: Trace, found: Sequence[Replayed], cold: Sequence[str], costs: Costs, wear: Wear) -> Rows:
    tiers = ("host", *cold)
    edges = [edge for name in cold for edge in (f"host>{name}", f"{name}>host")]
    edges = ["engine>host", "host>engine", *edges]
    heads = (*tiers, "policy", "admission", *edges, "to NVMe a day", "its life",
             *(f"evicted {name}" for name in tiers))  # fmt: skip
    rows = []
    for one in found:
        moved = moved_blocks(one)
        day_bytes, life_years = _wear(trace, one, costs, wear)
        block_bytes = costs.block_bytes(trace.block_tokens)
        rows.append(
            (
                *_names(one, cold),
                *(_bytes_text(moved[edge] * block_bytes) if edge in moved else "-" for edge in edges),
                "-" if day_bytes is None else _bytes_text(day_bytes),
                "-" if life_years is None else _life(life_years),
                *(f"{one.counts.evicted.get(name, 0):,}" for name in tiers),
            )
        )
    return heads, rows


def _life(years: float) -> str:
    days = years * YEAR_DAYS
    if days < 1:
        return f"{24 * days:.1f} hours"
    return f"{years:,.1f} years" if years >= 1 else f"{days:,.1f} days"


def _bytes_text(count_bytes: float) -> str:
    """With two digits behind the point, in the unit in which they say something."""
    unit, size = next(
        ((unit, size) for unit, size in (("TiB", TIB), ("GiB", GIB)) if count_bytes >= size), ("MiB", MIB)
    )
    return f"{count_bytes / size:,.2f} {unit}"
