"""What the commands that read a trace have in common: its file, and the files that they write."""

from __future__ import annotations

import argparse
import json
import os
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
        "KV events; /dev/stdin for a pipe",
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
    taken = [("the trace", arguments.trace)]
    for key, path in (("--json", arguments.json), ("--png", arguments.png)):
        if path is None:
            continue
        _check_place(key, path)
        for what, other in taken:
            if _same(path, other):
                raise ConfigError(
                    key, str(path), f"that is {what}, which it would overwrite; name another file"
                )
        taken.append((f"the file of {key}", path))
    if arguments.png is not None:
        chart.check("--png", arguments.png)


def _check_place(key: str, path: Path) -> None:
    if str(path) == "-":
        raise ConfigError(key, "-", "standard output has the table; name a file")
    if not path.parent.is_dir():
        raise ConfigError(key, str(path), "its folder is not there; make it, or name a file elsewhere")
    if path.is_dir():
        raise ConfigError(key, str(path), "that is a folder; name a file in it")
    if not os.access(path if path.exists() else path.parent, os.W_OK):
        raise ConfigError(key, str(path), "it may not be written; name a file elsewhere")


def _same(one: Path, other: Path) -> bool:
    if one.exists() and other.exists():
        return one.samefile(other) and one.is_file()  # /dev/null takes anything twice
    return one.absolute() == other.absolute()


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
    if not path.exists():
        raise ConfigError("TRACE", str(path), "there is no such file; name a recorded trace")
    if path.is_dir():
        raise ConfigError("TRACE", str(path), "that is a folder; name a file in it")
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
