"""``tierkv plan``: how much host RAM, NVMe and Valkey buys how much time to first token and how many GPU-seconds."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Collection, Sequence

from tierkv.replay import plan_chart, plan_sizes
from tierkv.replay.asked import OFF, Capacity
from tierkv.replay.cost_options import add_options as add_cost_options
from tierkv.replay.cost_options import costs_of, refuse_speeds_of_others
from tierkv.replay.costs import Assumption, Costs
from tierkv.replay.distances import Reach
from tierkv.replay.files import add_file_options, add_trace, check_places, read, write_files
from tierkv.replay.plan_advice import Tried, recommended, trials, try_policies, weigh
from tierkv.replay.plan_outcome import Planner
from tierkv.replay.plan_report import Plan, as_json, lines
from tierkv.replay.plan_sizes import Prices, engine_cache_of, prices_of, sizes_of
from tierkv.replay.progress import Progress
from tierkv.replay.traces import Trace


def main(argv: Sequence[str]) -> int:
    """Reckons, prints the tables and writes the files. Raises ``ConfigError`` and ``TraceError``."""
    arguments = _parser().parse_args(argv)
    costs = costs_of(arguments)
    check_places(arguments)
    progress = Progress(sys.stderr, 2 + (0 if arguments.no_replay else trials({"host": 1, "nvme": 1})))
    try:
        plan = _plan(arguments, costs, progress)
    finally:
        progress.end()
    print("\n".join(lines(plan)))
    write_files(arguments, lambda: as_json(plan), lambda path: plan_chart.draw(path, plan))
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="tierkv plan",
        description="From recorded traffic and a model: how much host RAM, NVMe and Valkey buys how much time to first "
        "token and how many GPU-seconds, and which of it to buy. All sizes come from one pass over the trace; the "
        "policies are then replayed at the recommended ones.",
    )
    add_trace(parser)
    plan_sizes.add_options(parser)
    add_cost_options(parser)
    parser.add_argument("--no-replay", action="store_true", help="sizes alone, without trying policies")
    add_file_options(parser)
    return parser


def _plan(arguments: argparse.Namespace, costs: Costs, progress: Progress) -> Plan:
    trace = read(arguments.trace, arguments.block_tokens, progress)
    block_bytes = costs.block_bytes(trace.block_tokens)
    sizes = sizes_of(arguments, trace.blocks * block_bytes, block_bytes)
    there = {name for size in sizes for name, one in size.cold() if one is not OFF}
    refuse_speeds_of_others(arguments, there)
    prices = prices_of(arguments, sizes)
    engine = engine_cache_of(arguments)
    reach = Reach(trace, progress.part("every capacity at once"))
    recorded = engine is None and any(request.own for request in trace.requests)
    engine_blocks = None if engine is None else engine.blocks(trace, block_bytes)
    planner = Planner(trace, reach, costs, engine_blocks=engine_blocks)
    nothing = planner.nothing()
    found = [planner.bought(size, size.blocks(trace, block_bytes)) for size in sizes]
    weighed = weigh(found, nothing, prices, block_bytes, trace.seconds)
    choice = recommended(weighed, prices)
    tried: list[Tried] = []
    run: Tried | None = None
    if choice is not None and not arguments.no_replay:
        tried, run = try_policies(trace, choice.bought, planner.own.tolist(), costs, progress)
    return Plan(
        trace,
        block_bytes,
        costs.gpus,
        nothing,
        weighed,
        choice,
        tried,
        run,
        prices,
        [_engine_assumption(engine, recorded=recorded), *_assumptions(trace, costs, prices, there)],
    )


def _engine_assumption(engine: Capacity | None, *, recorded: bool) -> Assumption:
    if recorded:
        return Assumption("engine_cache", "as recorded", "own_blocks of the trace", plan_sizes.ENGINE)
    if engine is None or engine is OFF:
        return Assumption("engine_cache", "none", "all hits are the store's", plan_sizes.ENGINE)
    return Assumption("engine_cache", engine.text, "given; LRU", plan_sizes.ENGINE)


def _assumptions(trace: Trace, costs: Costs, prices: Prices, there: Collection[str]) -> list[Assumption]:
    cold = tuple(name for name in ("nvme", "valkey") if name in there)
    return [
        *costs.assumptions(trace.block_tokens, cold),
        costs.link_assumption(),
        *prices.assumptions(("host", *cold)),
    ]
