"""The pictures of a replay: what each policy hits at each capacity, under the optimum and beside LRU's whole curve; of
several tiers, which of them the hits came from."""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tierkv.errors import MissingDependency
from tierkv.replay.report import OPTIMUM, Cell
from tierkv.replay.several import Replayed
from tierkv.replay.traces import Trace

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_INCHES = (9.0, 5.4)
_DPI = 150
_INK, _FAINT = "#22252b", "#6b7078"
_SHAPES = "osD^vP*X<>"
_TIER_COLOURS = {"host": "#2f6fb3", "nvme": "#e0913a", "valkey": "#5a9e6f"}


def check(key: str, path: Path) -> None:
    """Raises ``MissingDependency`` when no picture could be drawn."""
    if importlib.util.find_spec("matplotlib") is None:
        raise MissingDependency(key, str(path), "matplotlib", "charts")


def draw(path: Path, trace: Trace, cells: Sequence[Cell], lru_curve: Sequence[tuple[int, float]]) -> None:
    """Writes a PNG. Raises ``OSError``."""
    picture(trace, cells, lru_curve).savefig(path, dpi=_DPI, format="png")


def picture(trace: Trace, cells: Sequence[Cell], lru_curve: Sequence[tuple[int, float]]) -> Figure:
    """A mark for each policy at each capacity that was replayed. No lines go from one to the next: what is between them
    nobody knows, and a straight line of the optimum can lie under LRU's curve."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.ticker import StrMethodFormatter

    figure = Figure(figsize=_INCHES, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    axes.plot(*zip(*lru_curve, strict=True), color="#c3c7ce", linewidth=4, label="LRU, every capacity")
    policies = list(dict.fromkeys(cell.policy for cell in cells))
    for place, policy in enumerate(policies):
        points = sorted((cell.blocks, cell.outcome.hit_percent) for cell in cells if cell.policy == policy)
        axes.plot(*zip(*points, strict=True), linestyle="none", **_mark(policy, place))
    axes.set_xscale("log")
    axes.xaxis.set_major_formatter(StrMethodFormatter("{x:,.0f}"))
    axes.set_ylim(bottom=0)
    axes.set_xlabel(f"capacity (blocks of {trace.block_tokens} tokens)", color=_FAINT)
    axes.set_ylabel("blocks that need not be computed (%)", color=_FAINT)
    axes.set_title(
        f"{trace.name}: {len(trace.requests):,} requests, {trace.blocks:,} different blocks",
        loc="left",
        color=_INK,
        parse_math=False,  # a file's name may have any sign in it
    )
    axes.grid(alpha=0.25)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    axes.legend(frameon=False, fontsize=9)
    return figure


def _mark(policy: str, place: int) -> dict[str, Any]:
    """Hollow, and of a shape and size of its own, so that those that lie upon each other are seen."""
    if policy == OPTIMUM:
        return {"color": _INK, "marker": "_", "markersize": 16, "markeredgewidth": 2.5,
                "label": "optimum (knows the future)"}  # fmt: skip
    shape = _SHAPES[place % len(_SHAPES)]
    return {"marker": shape, "markersize": 6 + place % len(_SHAPES), "markerfacecolor": "none",
            "markeredgewidth": 1.6, "label": policy}  # fmt: skip


def draw_several(path: Path, trace: Trace, found: Sequence[Replayed]) -> None:
    """Writes a PNG: a bar for each combination, by the tier that gave the blocks. Raises ``OSError``."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(_INCHES[0], 1.6 + 0.34 * len(found)), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    places = list(range(len(found)))
    left = [0.0] * len(found)
    for tier, colour in _TIER_COLOURS.items():
        widths = [100 * one.counts.hits.get(tier, 0) / max(1, one.counts.references) for one in found]
        if any(tier in one.blocks for one in found):
            axes.barh(places, widths, left=left, color=colour, height=0.66, label=f"from {tier}")
        left = [before + width for before, width in zip(left, widths, strict=True)]
    best = [one.best.hit_percent for one in found]
    axes.scatter(best, places, marker="|", s=120, color=_INK, label="optimum of as much room")
    axes.set_yticks(places, [f"{one.sizes.text}: {one.policy}, {one.admission}" for one in found], fontsize=8)
    axes.set_ylim(len(found) - 0.4, -0.6)  # the first on top
    axes.set_xlim(0, 1.04 * max([1.0, *best]))
    axes.set_xlabel("blocks that need not be computed (%)", color=_FAINT)
    axes.set_title(
        f"{trace.name}: {len(trace.requests):,} requests, {trace.blocks:,} different blocks",
        loc="left",
        color=_INK,
        parse_math=False,  # a file's name may have any sign in it
    )
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    figure.legend(frameon=False, fontsize=9, loc="outside lower center", ncols=4)
    figure.savefig(path, dpi=_DPI, format="png")
