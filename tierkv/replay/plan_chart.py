"""The picture of a plan: time to first token by host RAM, and what is saved by what it costs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tierkv.replay.plan_report import Plan
from tierkv.units import GIB

_INCHES = (11.0, 5.0)
_DPI = 150
_INK, _FAINT = "#22252b", "#6b7078"


def draw(path: Path, plan: Plan) -> None:
    """Writes a PNG. Raises ``OSError``."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=_INCHES, layout="constrained")
    FigureCanvasAgg(figure)
    by_host, by_cost = figure.subplots(1, 2)
    _by_host(by_host, plan)
    _by_cost(by_cost, plan)
    figure.suptitle(
        f"{plan.trace.name}: {len(plan.trace.requests):,} requests, {plan.nothing.gpu_s:,.0f} GPU-seconds without a "
        "store",
        fontsize=11,
        color=_INK,
    )
    for axes in (by_host, by_cost):
        axes.grid(alpha=0.25)
        for side in ("top", "right"):
            axes.spines[side].set_visible(False)
        axes.legend(frameon=False, fontsize=8)
    figure.savefig(path, dpi=_DPI, format="png")


def _by_host(axes: Any, plan: Plan) -> None:
    colder: dict[str, list[tuple[float, float]]] = {}
    for one in plan.weighed:
        names = [f"{name} {size.text}" for name, size in one.bought.sizes.cold() if name in one.bought.blocks]
        host_gib = one.bought.blocks["host"] * plan.block_bytes / GIB
        colder.setdefault(" + ".join(names) or "host RAM alone", []).append(
            (host_gib, one.bought.ttft_mean_s)
        )
    axes.axhline(plan.nothing.ttft_mean_s, color=_INK, linestyle="--", label="without a store")
    for name, points in colder.items():
        axes.plot(*zip(*sorted(points), strict=True), marker="o", markersize=3, label=name)
    axes.set_xscale("log", base=2)
    axes.set_ylim(bottom=0)
    axes.set_xlabel("host RAM (GiB)", color=_FAINT)
    axes.set_ylabel("mean time to first token (s)", color=_FAINT)


def _by_cost(axes: Any, plan: Plan) -> None:
    def points(chosen: list[Any]) -> tuple[list[float], list[float]]:
        whole = max(plan.nothing.gpu_s, 1e-9)
        return [one.tiers_cost for one in chosen], [100 * one.saved_gpu_s / whole for one in chosen]

    axes.plot(*points([*plan.weighed]), "o", color="#c3c7ce", markersize=4, label="all sizes")
    axes.plot(*points([one for one in plan.weighed if one.best_for_its_cost]), marker="o", markersize=4,
              label="best for its cost")  # fmt: skip
    if plan.choice is not None:
        axes.plot(*points([plan.choice]), "*", color="#c2453a", markersize=14,
                  label=f"recommended: {plan.choice.bought.text}")  # fmt: skip
    axes.set_xscale("log")
    axes.set_ylim(bottom=0)
    axes.set_xlabel("cost of the tiers a month" if plan.prices.given else "relative cost", color=_FAINT)
    axes.set_ylabel("GPU-seconds saved (%)", color=_FAINT)
