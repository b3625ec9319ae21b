"""``tierkv replay``: what each policy would have hit on recorded traffic, and what the best possible would: in one
tier, or in several (``tierkv.replay.several_command``)."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Mapping, Sequence

from tierkv import registry
from tierkv.policy import EvictionPolicy
from tierkv.replay import chart, several_command
from tierkv.replay.asked import CAPACITY, Capacity, capacities
from tierkv.replay.chosen import POLICY, evictions
from tierkv.replay.files import add_file_options, add_trace, check_places, lru_curve, read, write_files
from tierkv.replay.one_tier import replay
from tierkv.replay.optimum import replay_optimum
from tierkv.replay.progress import Progress
from tierkv.replay.report import OPTIMUM, Cell, as_json, table
from tierkv.replay.traces import Trace

DEFAULT_POLICIES = "lru,density"
DEFAULT_CAPACITIES = "1%,5%,10%"


def main(argv: Sequence[str]) -> int:
    """Replays, prints the table and writes the files. Raises ``ConfigError`` and ``TraceError``."""
    arguments = _parser().parse_args(argv)
    if several_command.is_asked(arguments):
        return several_command.main(arguments)
    several_command.refuse_what_is_for_several(arguments)
    makers = evictions(arguments.policy)
    block_bytes = several_command.block_bytes_if_asked(arguments)
    sizes = capacities(arguments.capacity, sizes=block_bytes is not None)
    check_places(arguments)
    wants_curve = arguments.json is not None or arguments.png is not None
    progress = Progress(sys.stderr, 1 + len(sizes) * (1 + len(makers)) + wants_curve)
    try:
        trace = read(arguments.trace, arguments.block_tokens, progress)
        cells = _replayed(trace, sizes, makers, block_bytes, progress)
        curve = lru_curve(trace, progress) if wants_curve else []
    finally:
        progress.end()
    print("\n".join(table(trace, cells)))
    write_files(
        arguments,
        lambda: as_json(trace, cells, curve),
        lambda path: chart.draw(path, trace, cells, curve),
    )
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="tierkv replay",
        description="What eviction policies would have hit on recorded traffic, with the best possible beside them. "
        "The policies are the real ones; the tier holds no bytes.",
    )
    add_trace(parser)
    parser.add_argument(
        POLICY,
        default=DEFAULT_POLICIES,
        metavar="A,B",
        help=f"which: {', '.join(registry.names('eviction'))}, or module:Class (default: {DEFAULT_POLICIES})",
    )
    parser.add_argument(
        CAPACITY,
        default=DEFAULT_CAPACITIES,
        metavar="C,D",
        help="shares of the trace's different blocks, such as 5%%, or numbers of blocks "
        f"(default: {DEFAULT_CAPACITIES.replace('%', '%%')}); with --model or colder tiers also sizes, such as 64GiB",
    )
    several_command.add_options(parser)
    add_file_options(parser)
    return parser


def _replayed(
    trace: Trace,
    sizes: Sequence[Capacity],
    makers: Mapping[str, Callable[[], EvictionPolicy]],
    block_bytes: Callable[[Trace], int] | None,
    progress: Progress,
) -> list[Cell]:
    cells = []
    for size in sizes:
        blocks = size.blocks(trace, 0 if block_bytes is None else block_bytes(trace))
        best = replay_optimum(trace, blocks, progress.part(f"{OPTIMUM} at {size.text}"))
        cells.append(Cell(OPTIMUM, size, blocks, best))
        for name, make in makers.items():
            outcome = replay(trace, blocks, make(), progress.part(f"{name} at {size.text}"))
            cells.append(Cell(name, size, blocks, outcome))
    return cells
