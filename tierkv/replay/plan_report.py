"""What a plan says: as rows for machines, and as tables for people."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from tierkv.replay.asked import Capacity
from tierkv.replay.costs import Assumption, assumption_lines
from tierkv.replay.plan_advice import Tried, Weighed
from tierkv.replay.plan_outcome import Bought
from tierkv.replay.plan_sizes import Prices
from tierkv.replay.report import Json, aligned, short, trace_json, trace_line
from tierkv.replay.traces import Trace
from tierkv.units import GIB, MIB, format_bytes, format_seconds

DAY_S = 86_400.0
LIMITS = (
    "a request waits for nobody: no queues, and prefetches that hide a load are not counted",
    "every day is like the trace, and all of its requests reach one store",
    "sizes are reckoned with LRU; a replay at the recommended ones has its own line",
)


@dataclass(frozen=True)
class Plan:
    """All that was found."""

    trace: Trace
    block_bytes: int
    gpus: int
    nothing: Bought
    weighed: Sequence[Weighed]
    choice: Weighed | None
    tried: Sequence[Tried]
    run: Tried | None
    """Of those, the one to run."""
    prices: Prices
    assumptions: Sequence[Assumption]


def settings(plan: Plan) -> list[str]:
    """The recommendation as lines of a configuration."""
    if plan.choice is None:
        return []
    sizes = {
        tier: _capacity(plan.choice, tier).size_bytes or count * plan.block_bytes
        for tier, count in plan.choice.bought.blocks.items()
    }
    policy = "lru" if plan.run is None else plan.run.policy
    admission = "always" if plan.run is None else plan.run.admission
    lines = [
        "[host]",
        f'capacity = "{_whole(sizes["host"])}"',
        f'eviction = "{policy}"',
        f'promotion = "{plan.choice.bought.promotion}"',
    ]
    if "nvme" in sizes:
        lines += [
            "[nvme]",
            'path = "/var/lib/tierkv"',
            f'capacity = "{_whole(sizes["nvme"])}"',
            f'eviction = "{policy}"',
            f'admission = "{admission}"',
        ]
    if "valkey" in sizes:
        lines += [
            "[valkey]",
            'url = "valkey://host:6379"',
            f'admission = "{admission}"',
            f"# the server's maxmemory: {_whole(sizes['valkey'])}",
        ]
    return lines


def _whole(count_bytes: int) -> str:
    return f"{count_bytes // GIB} GiB" if count_bytes % GIB == 0 else f"{-(-count_bytes // MIB)} MiB"


def as_json(plan: Plan) -> Json:
    """All that is known, for machines."""
    choice, run = plan.choice, plan.run
    return {
        "trace": trace_json(plan.trace),
        "assumptions": [one._asdict() for one in plan.assumptions],
        "limits": list(LIMITS),
        "nothing_kept": _bought_json(plan, plan.nothing),
        "sizes": [_weighed_json(plan, one) for one in plan.weighed],
        "recommended": None if choice is None else _weighed_json(plan, choice),
        "policies": [_tried_json(plan, one, is_run=one is run) for one in plan.tried],
        "settings": "\n".join(settings(plan)),
    }


def _bought_json(plan: Plan, one: Bought) -> Json:
    busy = one.gpu_s / plan.trace.seconds if plan.trace.seconds else None
    hits = one.own_blocks + sum(one.hit_blocks.values())
    return {
        "tiers": {
            tier: {"blocks": count, "bytes": count * plan.block_bytes, "hit_blocks": one.hit_blocks[tier]}
            for tier, count in one.blocks.items()
        },
        "engine_hit_blocks": one.own_blocks,
        "promotion": one.promotion,
        "hit_percent": 100 * hits / plan.trace.references,
        "ttft_mean_s": one.ttft_mean_s,
        "ttft_p50_s": one.ttft_p50_s,
        "ttft_p95_s": one.ttft_p95_s,
        "gpu_s": one.gpu_s,
        "busy_gpus": busy,
    }


def _weighed_json(plan: Plan, one: Weighed) -> Json:
    return {
        **_bought_json(plan, one.bought),
        "saved_gpu_s": one.saved_gpu_s,
        "saved_gpu_percent": _percent(one.saved_gpu_s, plan.nothing.gpu_s),
        "tiers_cost_a_month": one.tiers_cost,
        "net_a_month": one.net if plan.prices.gpu_hour is not None else None,
        "best_for_its_cost": one.best_for_its_cost,
    }


def _written_a_day(plan: Plan, one: Tried) -> float | None:
    return one.written * plan.block_bytes * DAY_S / plan.trace.seconds if plan.trace.seconds else None


def _tried_json(plan: Plan, one: Tried, *, is_run: bool) -> Json:
    return {
        "policy": one.policy,
        "admission": one.admission,
        "hit_percent": one.hit_percent,
        "saved_gpu_s": one.saved_gpu_s,
        "written_blocks": one.written,
        "written_bytes_a_day": _written_a_day(plan, one),
        "recommended": is_run,
    }


def lines(plan: Plan) -> list[str]:
    """For people."""
    nothing, seconds = plan.nothing, plan.trace.seconds
    busy = f", {nothing.gpu_s / seconds:.2f} GPUs busy with it" if seconds else ""
    whole = format_bytes(plan.trace.blocks * plan.block_bytes)
    return [
        trace_line(plan.trace),
        f"without a store: {short(nothing.gpu_s)} GPU-seconds of prefill{busy}; all of it kept: {whole}",
        "",
        *aligned(*_sizes(plan), gaps=False),
        "",
        *_advice(plan),
        "",
        *assumption_lines([*plan.assumptions]),
        *(f"  {one}" for one in LIMITS),
    ]


def _sizes(plan: Plan) -> tuple[list[str], list[list[str]]]:
    """Only the sizes of which none that cost as little save more."""
    tiers = [
        tier for tier in ("host", "nvme", "valkey") if any(tier in one.bought.blocks for one in plan.weighed)
    ]
    cost = "cost a month" if plan.prices.given else "relative cost"
    heads = [*tiers, "promotion", "hits", "TTFT mean", "p50", "p95", "GPU-seconds", "saved", cost]
    net = plan.prices.gpu_hour is not None
    heads += ["net a month"] if net else []
    own = f"{100 * plan.nothing.own_blocks / plan.trace.references:.2f}%"
    rows = [["nothing", *("-" for _ in tiers[1:]), "-", own, *_times(plan.nothing), "-", "-", "-"]]
    rows[0] = rows[0][: len(heads)] if net else rows[0][:-1]
    for one in plan.weighed:
        if not one.best_for_its_cost and one is not plan.choice:
            continue
        hits = one.bought.own_blocks + sum(one.bought.hit_blocks.values())
        row = [
            *(_capacity(one, tier).text for tier in tiers),
            one.bought.promotion,
            f"{100 * hits / plan.trace.references:.2f}%",
            *_times(one.bought),
            f"{_percent(one.saved_gpu_s, plan.nothing.gpu_s):.1f}%",
            short(one.tiers_cost),
        ]
        row += [short(one.net)] if net else []
        row[-1] += " *" if one is plan.choice else "  "
        rows.append(row)
    return heads, rows


def _times(one: Bought) -> list[str]:
    times = (one.ttft_mean_s, one.ttft_p50_s, one.ttft_p95_s)
    return [*(format_seconds(time_s) for time_s in times), short(one.gpu_s)]


def _capacity(one: Weighed, tier: str) -> Capacity:
    found: Capacity = getattr(one.bought.sizes, tier)
    return found


def _advice(plan: Plan) -> list[str]:
    if plan.choice is None:
        return [f"recommended: none of these sizes; {_why_none(plan)}"]
    why = (
        "saves most, GPUs less tiers"
        if plan.prices.gpu_hour is not None
        else "the cheapest that saves 90 % of what the largest does"
    )
    found = [f"recommended (*): {plan.choice.bought.text}: {why}"]
    for one in plan.tried:
        mark = " *" if one is plan.run else ""
        day_bytes = _written_a_day(plan, one)
        written = "" if day_bytes is None else f" ({format_bytes(day_bytes)} a day)"
        found.append(
            f"  replayed with {one.policy}, {one.admission}: {one.hit_percent:.2f}% hits, "
            f"{short(one.saved_gpu_s)} GPU-seconds saved, {one.written:,} blocks written to colder tiers{written}{mark}"
        )
    return [*found, "", *settings(plan)]


def _why_none(plan: Plan) -> str:
    if max((one.saved_gpu_s for one in plan.weighed), default=0.0) <= 0:
        return "they save nothing: what comes back does so too late for them, or the engine has it itself"
    if not plan.trace.seconds:
        return "the trace takes no time, so it says nothing of a month; leave out --gpu-price"
    return "what they save is less than what they cost"


def _percent(part: float, whole: float) -> float:
    return 100 * part / whole if whole else 0.0
