"""The picture of a replay: what each policy hits at each capacity, under the optimum and beside LRU's whole curve."""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from pathlib import Path

from tierkv.errors import MissingDependency
from tierkv.replay.report import OPTIMUM, Cell
from tierkv.replay.traces import Trace

_INCHES = (9.0, 5.4)
_DPI = 150
_INK, _FAINT = "#22252b", "#6b7078"


def check(key: str, path: Path) -> None:
    """Raises ``MissingDependency`` when no picture could be drawn."""
    if importlib.util.find_spec("matplotlib") is None:
        raise MissingDependency(key, str(path), "matplotlib", "charts")


def draw(path: Path, trace: Trace, cells: Sequence[Cell], lru_curve: Sequence[tuple[int, float]]) -> None:
    """Writes a PNG. Raises ``OSError``."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=_INCHES, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    axes.plot(*zip(*lru_curve, strict=True), color="#c3c7ce", linewidth=4, label="LRU, every capacity")
    for policy in dict.fromkeys(cell.policy for cell in cells):
        points = sorted((cell.blocks, cell.outcome.hit_percent) for cell in cells if cell.policy == policy)
        style = {"color": _INK, "linestyle": "--"} if policy == OPTIMUM else {}
        name = "optimum (knows the future)" if policy == OPTIMUM else policy
        axes.plot(*zip(*points, strict=True), marker="o", markersize=4, label=name, **style)
    axes.set_xscale("log")
    axes.set_ylim(bottom=0)
    axes.set_xlabel(f"capacity (blocks of {trace.block_tokens} tokens)", color=_FAINT)
    axes.set_ylabel("blocks that need not be computed (%)", color=_FAINT)
    axes.set_title(
        f"{trace.name}: {len(trace.requests):,} requests, {trace.blocks:,} different blocks",
        loc="left",
        color=_INK,
    )
    axes.grid(alpha=0.25)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    axes.legend(frameon=False, fontsize=9)
    figure.savefig(path, dpi=_DPI, format="png")
