"""``tierkv replay``: what each eviction policy would have hit on recorded traffic, and what the best possible would."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from tierkv import registry
from tierkv.errors import ConfigError
from tierkv.policy import EvictionPolicy
from tierkv.replay import chart
from tierkv.replay.asked import CAPACITY, Capacity, capacities
from tierkv.replay.chosen import POLICY, evictions
from tierkv.replay.curves import miss_ratio_curve
from tierkv.replay.formats import BLOCK_TOKENS, read_trace
from tierkv.replay.one_tier import replay
from tierkv.replay.optimum import replay_optimum
from tierkv.replay.progress import Progress
from tierkv.replay.report import OPTIMUM, Cell, as_json, table
from tierkv.replay.traces import Trace, TraceError

DEFAULT_POLICIES = "lru,density"
DEFAULT_CAPACITIES = "1%,5%,10%"
CURVE_REFERENCES = 200_000
"""The curve for all capacities is made of about so many references: of a longer trace, of a sample."""


def main(argv: Sequence[str]) -> int:
    """Replays, prints the table and writes the files. Raises ``ConfigError`` and ``TraceError``."""
    arguments = _parser().parse_args(argv)
    makers = evictions(arguments.policy)
    sizes = capacities(arguments.capacity)
    for key, path in (("--json", arguments.json), ("--png", arguments.png)):
        _check_place(key, path)
    if arguments.png is not None:
        chart.check("--png", arguments.png)
    wants_curve = arguments.json is not None or arguments.png is not None
    progress = Progress(sys.stderr, 1 + len(sizes) * (1 + len(makers)) + wants_curve)
    try:
        trace = _read(arguments.trace, arguments.block_tokens, progress)
        cells = _replayed(trace, sizes, makers, progress)
        curve = _curve(trace, progress) if wants_curve else []
    finally:
        progress.end()
    print("\n".join(table(trace, cells)))
    if arguments.json is not None:
        text = json.dumps(as_json(trace, cells, curve), indent=2, allow_nan=False) + "\n"
        _write("--json", arguments.json, lambda path: path.write_text(text))
    if arguments.png is not None:
        _write("--png", arguments.png, lambda path: chart.draw(path, trace, cells, curve))
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="tierkv replay",
        description="What eviction policies would have hit on recorded traffic, with the best possible beside them. "
        "The policies are the real ones; the tier holds no bytes.",
    )
    parser.add_argument(
        "trace",
        type=Path,
        metavar="TRACE",
        help="lines of JSON, plain or gzip: hash_ranges (bench/traces), Mooncake's hash_ids, vLLM's KV events",
    )
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
        f"(default: {DEFAULT_CAPACITIES.replace('%', '%%')})",
    )
    parser.add_argument(
        "--block-tokens",
        type=int,
        metavar="N",
        help=f"tokens in a block, where the trace does not say it (default: {BLOCK_TOKENS})",
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all figures here")
    parser.add_argument("--png", type=Path, metavar="FILE", help="draw a chart here")
    return parser


def _check_place(key: str, path: Path | None) -> None:
    """Before minutes of work rather than after them."""
    if path is not None and not path.parent.is_dir():
        raise ConfigError(key, str(path), "its folder is not there; make it, or name a file elsewhere")


def _write(key: str, path: Path, how: Callable[[Path], object]) -> None:
    try:
        how(path)
    except OSError as error:
        raise ConfigError(
            key, str(path), f"it cannot be written: {error.strerror}; name a file elsewhere"
        ) from None


def _read(path: Path, block_tokens: int | None, progress: Progress) -> Trace:
    if block_tokens is not None and block_tokens < 1:
        raise ConfigError("--block-tokens", block_tokens, "a block has at least one token; give 1 or more")
    if not path.is_file():
        raise ConfigError("TRACE", str(path), "there is no such file; name a recorded trace")
    trace = read_trace(path, block_tokens=block_tokens, progress=progress.part(f"reading {path.name}"))
    if not trace.blocks:
        raise TraceError(
            f"{path}: no request has a full block of {trace.block_tokens} tokens, so nothing could be hit; "
            "give a trace with longer prompts, or smaller blocks (--block-tokens)"
        )
    _ = trace.parents  # refuses names that do not stand for their past, before anything is measured
    return trace


def _replayed(
    trace: Trace,
    sizes: Sequence[Capacity],
    makers: Mapping[str, Callable[[], EvictionPolicy]],
    progress: Progress,
) -> list[Cell]:
    cells = []
    for size in sizes:
        blocks = size.blocks(trace)
        best = replay_optimum(trace, blocks, progress.part(f"{OPTIMUM} at {size.text}"))
        cells.append(Cell(OPTIMUM, size, blocks, best))
        for name, make in makers.items():
            outcome = replay(trace, blocks, make(), progress.part(f"{name} at {size.text}"))
            cells.append(Cell(name, size, blocks, outcome))
    return cells


def _curve(trace: Trace, progress: Progress) -> list[tuple[int, float]]:
    sample = min(1.0, CURVE_REFERENCES / trace.references)
    return miss_ratio_curve(trace, sample=sample, progress=progress.part("LRU at every capacity")).points()
