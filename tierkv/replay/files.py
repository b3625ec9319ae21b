"""What the commands that read a trace have in common: its file, and the files that they write."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Final

from tierkv.errors import ConfigError
from tierkv.replay import chart
from tierkv.replay.curves import miss_ratio_curve
from tierkv.replay.formats import BLOCK_TOKENS, read_trace
from tierkv.replay.progress import Progress
from tierkv.replay.traces import Trace, TraceError

CURVE_REFERENCES: Final = 200_000
"""The curve for all capacities is made of about so many references: of a longer trace, of a sample."""


def add_trace(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "trace",
        type=Path,
        metavar="TRACE",
        help="lines of JSON, plain or gzip: hash_ranges (bench/traces, tierkv record), Mooncake's hash_ids, vLLM's "
        "KV events",
    )


def add_file_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--block-tokens",
        type=int,
        metavar="N",
        help=f"tokens in a block, where the trace does not say it (default: {BLOCK_TOKENS})",
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all figures here")
    parser.add_argument("--png", type=Path, metavar="FILE", help="draw a chart here")


def check_places(arguments: argparse.Namespace) -> None:
    """Before minutes of work rather than after them. Raises ``ConfigError``."""
    for key, path in (("--json", arguments.json), ("--png", arguments.png)):
        if path is not None and not path.parent.is_dir():
            raise ConfigError(key, str(path), "its folder is not there; make it, or name a file elsewhere")
    if arguments.png is not None:
        chart.check("--png", arguments.png)


def write_files(
    arguments: argparse.Namespace,
    figures: Callable[[], Mapping[str, object]],
    draw: Callable[[Path], object],
) -> None:
    """What ``--json`` and ``--png`` ask for. Raises ``ConfigError``."""
    if arguments.json is not None:
        text = json.dumps(figures(), indent=2, allow_nan=False) + "\n"
        _write("--json", arguments.json, lambda path: path.write_text(text))
    if arguments.png is not None:
        _write("--png", arguments.png, draw)


def _write(key: str, path: Path, how: Callable[[Path], object]) -> None:
    try:
        how(path)
    except OSError as error:
        raise ConfigError(
            key, str(path), f"it cannot be written: {error.strerror}; name a file elsewhere"
        ) from None


def read(path: Path, block_tokens: int | None, progress: Progress) -> Trace:
    """The trace, checked. Raises ``ConfigError`` and ``TraceError``."""
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


def lru_curve(trace: Trace, progress: Progress) -> list[tuple[int, float]]:
    sample = min(1.0, CURVE_REFERENCES / trace.references)
    return miss_ratio_curve(trace, sample=sample, progress=progress.part("LRU at every capacity")).points()
