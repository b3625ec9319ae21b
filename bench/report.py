"""Results as JSON for machines and as a table for people."""

from __future__ import annotations

import json
import os
import platform
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from bench.harness import Result


def as_json(results: Sequence[Result], missing: Mapping[str, str]) -> dict[str, dict[str, object]]:
    """``{name: {"value", "limit", "ratio", "unit", ...}}``; ``ratio`` is value / limit.

    ``ok`` is ``null`` where the row has no bound or could not be judged. A row that could not be measured at all has
    ``null`` figures and the reason in ``missing``.
    """
    rows: dict[str, dict[str, object]] = {result.row.name: _row(result) for result in results}
    for name, why in missing.items():
        rows[name] = {"value": None, "limit": None, "ratio": None, "unit": None, "ok": None, "missing": why}
    return rows


def _row(result: Result) -> dict[str, object]:
    row = result.row
    return {
        "value": result.value,
        "limit": result.limit,
        "ratio": result.ratio,
        "unit": row.unit,
        "better": row.better,
        "reach": str(row.reach) if row.reach is not None else None,
        "ok": {"ok": True, "short": False}.get(result.verdict),
        "verdict": result.verdict,
        "limit_spread": result.spread,
        "ratio_by_round": result.ratio_by_round,
        "rounds": result.rounds,
        "attempts": result.attempts,
        "definition": row.definition,
        "notes": list(result.notes),
    }


def write_json(path: Path, results: Sequence[Result], missing: Mapping[str, str]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(as_json(results, missing), indent=2, allow_nan=False) + "\n")


def table(results: Sequence[Result], missing: Mapping[str, str]) -> str:
    """One line a row, and below it what each side is."""
    head = ("row", "ours", "limit", "unit", "ratio", "reach", "spread", "")
    lines = [head]
    for result in results:
        row = result.row
        lines.append(
            (
                row.name,
                _figure(result.value),
                _figure(result.limit),
                row.unit,
                f"{result.ratio:.2f}",
                str(row.reach) if row.reach is not None else "",
                f"{result.spread:.0%}",
                {"shown": ""}.get(result.verdict, result.verdict),
            )
        )
    for name, why in missing.items():
        lines.append((name, "", "", "", "", "", "", f"not measured: {why}"))
    widths = [max(len(line[column]) for line in lines) for column in range(len(head) - 1)]
    left = {0, 3, 5}
    text = []
    for line in lines:
        cells = [
            line[column].ljust(width) if column in left else line[column].rjust(width)
            for column, width in enumerate(widths)
        ]
        text.append("  ".join([*cells, line[-1]]).rstrip())
    notes = [note for result in results for note in result.notes]
    return "\n".join([*text, *(f"note: {note}" for note in dict.fromkeys(notes))])


def _figure(value: float) -> str:
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"


def machine() -> str:
    """What the figures belong to."""
    load = ", ".join(f"{value:.2f}" for value in os.getloadavg())
    cores = len(os.sched_getaffinity(0))
    return f"Python {sys.version.split()[0]}, Linux {platform.release()}, {cores} cores, load {load}"
