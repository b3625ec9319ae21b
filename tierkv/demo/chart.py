"""The demo's picture: how long each tier lets a reader wait."""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tierkv.demo.acts import Result, Stage
from tierkv.demo.report import blocks_from, kv_bytes, pairs
from tierkv.demo.verdicts import NAMES, Row
from tierkv.demo.words import seconds, times
from tierkv.errors import MissingDependency
from tierkv.units import format_bytes

_COMPUTED, _REUSED, _INK, _FAINT = "#c3c7ce", "#1f6f8b", "#22252b", "#6b7078"
_INCHES = (9.0, 7.4)
_DPI = 150
_BAR = 0.38


def check(path: Path) -> None:
    """Before minutes of work rather than after them. Raises ``MissingDependency`` when no picture could be drawn."""
    if importlib.util.find_spec("matplotlib") is None:
        raise MissingDependency("--chart", str(path), "matplotlib", "demo")


def draw(path: Path, stage: Stage, result: Result) -> None:
    """Writes a PNG. Raises ``OSError``."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=_INCHES, layout="constrained")
    FigureCanvasAgg(figure)
    figure.suptitle(
        "Time to the first token: the KV cache computed, or taken from tierkv",
        x=0.012,
        ha="left",
        fontsize=13,
        fontweight="bold",
        color=_INK,
    )
    turns = list(pairs(result))
    upper, lower = figure.subplots(2, 1, height_ratios=(max(1, len(result.rows)), max(1, len(turns))))
    figure.get_layout_engine().set(h_pad=0.16, hspace=0.06)
    _bars(
        upper,
        f"A text of {result.text_tokens:,} tokens, from each tier in turn",
        [row.source for row in result.rows],
        [row.computed.first_token_s for row in result.rows],
        [row.answer.first_token_s for row in result.rows],
        [
            f"{format_bytes(row.answer.reused_bytes)} reused" if row.answer.reused_bytes else ""
            for row in result.rows
        ],
        ("without a store", "with tierkv"),
    )
    _bars(
        lower,
        f"{len(turns)} texts, {format_bytes(kv_bytes(result))}, in {stage.small_host} of host RAM",
        [first.text for first, _ in turns],
        [first.answer.first_token_s for first, _ in turns],
        [second.answer.first_token_s for _, second in turns],
        [_origin(result, second) for _, second in turns],
        ("first time", "second time"),
    )
    figure.savefig(path, dpi=_DPI, format="png")


def _origin(result: Result, row: Row) -> str:
    found = blocks_from(result, row)
    whole = -(-row.answer.prompt_tokens // result.block_tokens)
    return ", ".join(f"{count / whole:.0%} from {NAMES[tier]}" for tier, count in found.items())


def _bars(
    axes: Any,
    title: str,
    labels: Sequence[str],
    before_s: Sequence[float],
    after_s: Sequence[float],
    notes: Sequence[str],
    names: tuple[str, str],
) -> None:
    """Two bars a label, the first on top."""
    places = range(len(labels))
    axes.barh([place - _BAR / 2 for place in places], before_s, _BAR, color=_COMPUTED, label=names[0])
    axes.barh([place + _BAR / 2 for place in places], after_s, _BAR, color=_REUSED, label=names[1])
    for place, before, after, note in zip(places, before_s, after_s, notes, strict=True):
        told = seconds(after)
        if note:
            told += f"   {times(before / after)}   {note}"
        for height, value, text in (
            (place - _BAR / 2, before, seconds(before)),
            (place + _BAR / 2, after, told),
        ):
            axes.annotate(
                text, (value, height), (5, 0), textcoords="offset points", va="center", fontsize=9, color=_INK
            )
    axes.set_title(title, fontsize=11.5, color=_INK, loc="left", pad=10)
    axes.set_yticks(places, labels, fontsize=10, color=_INK)
    axes.invert_yaxis()
    axes.set_xlabel("time to the first token (s)", fontsize=9.5, color=_FAINT)
    axes.set_xlim(0, 1.12 * max([*before_s, *after_s, 1e-9]))
    axes.tick_params(axis="x", labelsize=9, colors=_FAINT)
    axes.tick_params(axis="y", length=0)
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)
    axes.spines["bottom"].set_color(_COMPUTED)
    axes.legend(
        loc="lower right",
        bbox_to_anchor=(1, 1),
        ncols=2,
        fontsize=9.5,
        frameon=False,
        labelcolor=_INK,
        borderaxespad=0.6,
    )
