"""The picture of a plan: time to first token by host RAM, and what is saved by what it costs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tierkv.replay.plan_advice import Weighed
from tierkv.replay.plan_report import Plan
from tierkv.replay.report import short
from tierkv.units import GIB, format_bytes

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
        f"{plan.trace.name}: {len(plan.trace.requests):,} requests, {short(plan.nothing.gpu_s)} GPU-seconds without a "
        "store",
        fontsize=11,
        color=_INK,
        parse_math=False,  # a file's name may have any sign in it
    )
    for axes in (by_host, by_cost):
        axes.grid(alpha=0.25)
        for side in ("top", "right"):
            axes.spines[side].set_visible(False)
        axes.legend(fontsize=8, edgecolor="none", framealpha=0.85)
    figure.savefig(path, dpi=_DPI, format="png")


def _by_host(axes: Any, plan: Plan) -> None:
    colder: dict[str, list[tuple[float, float]]] = {}
    for one in sorted(plan.weighed, key=_behind):
        names = [f"{name} {size.text}" for name, size in one.bought.sizes.cold() if name in one.bought.blocks]
        host_gib = one.bought.blocks["host"] * plan.block_bytes / GIB
        colder.setdefault(" + ".join(names) or "host RAM alone", []).append(
            (host_gib, one.bought.ttft_mean_s)
        )
    axes.axhline(plan.nothing.ttft_mean_s, color=_INK, linestyle="--", label="without a store")
    for name, points in colder.items():
        axes.plot(*zip(*sorted(points), strict=True), marker="o", markersize=3, label=name)
    axes.set_xscale("log", base=2)
    axes.xaxis.set_major_formatter(lambda gib, place: format_bytes(gib * GIB))
    axes.set_ylim(bottom=0)
    axes.set_xlabel("host RAM", color=_FAINT)
    axes.set_ylabel("mean time to first token (s)", color=_FAINT)


def _behind(one: Weighed) -> tuple[int, ...]:
    """How much there is behind host RAM, the Valkey server last."""
    return tuple(one.bought.blocks.get(tier, 0) for tier in ("valkey", "nvme"))


def _by_cost(axes: Any, plan: Plan) -> None:
    from matplotlib.ticker import LogLocator, NullFormatter

    def points(chosen: list[Any]) -> tuple[list[float], list[float]]:
        whole = max(plan.nothing.gpu_s, 1e-9)
        return [one.tiers_cost for one in chosen], [100 * one.saved_gpu_s / whole for one in chosen]

    axes.plot(*points([*plan.weighed]), "o", color="#c3c7ce", markersize=4, label="all sizes")
    axes.plot(*points([one for one in plan.weighed if one.best_for_its_cost]), marker="o", markersize=4,
              label="best for its cost")  # fmt: skip
    if plan.choice is not None:
        axes.plot(*points([plan.choice]), "*", color="#c2453a", markersize=14,
                  label=f"recommended: {plan.choice.bought.text}")  # fmt: skip
    costs = [one.tiers_cost for one in plan.weighed]
    if min(costs) > 0:  # what costs nothing has no place on a logarithm's axis
        axes.set_xscale("log")
        axes.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5) if max(costs) < 1000 * min(costs) else (1,)))
        axes.xaxis.set_minor_formatter(NullFormatter())
    else:
        axes.set_xlim(left=0, right=1.05 * max([*costs, 1e-9]))
    axes.xaxis.set_major_formatter(lambda cost, place: f"{cost:,.12g}")
    axes.set_ylim(bottom=0)
    axes.set_xlabel("cost of the tiers a month" if plan.prices.given else "relative cost", color=_FAINT)
    axes.set_ylabel("GPU-seconds saved (%)", color=_FAINT)
