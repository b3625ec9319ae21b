"""Reading traces: lines of JSON, plain or gzip, in one of several formats that are told apart by their first line.

- This project's: ``timestamp`` in ms, ``input_length``, ``hash_ranges`` (``bench/traces/README.md``). ``tierkv record``
  writes it.
- Mooncake's (Qin and others, FAST 2025): the same with ``hash_ids``, which name a partial last block as well.
- vLLM's KV events (``tierkv.replay.vllm_events``).
"""

from __future__ import annotations

import gzip
import json
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from tierkv.replay import vllm_events
from tierkv.replay.traces import Request, Trace, TraceError, numbered

BLOCK_TOKENS = 512
"""Of the formats that do not say it."""

Line = Any


def read_trace(
    path: Path, *, block_tokens: int | None = None, progress: Callable[[float], None] = lambda share: None
) -> Trace:
    """``block_tokens``: where the format does not say it (512 otherwise). ``progress`` is told how much of the file was
    read, from 0 to 1. Raises ``TraceError``."""
    try:
        lines = list(_lines(path, progress))
    except (OSError, EOFError, zlib.error, UnicodeDecodeError) as error:
        raise TraceError(f"{path}: {error}") from None
    if not lines:
        raise TraceError(f"{path}: it is empty")
    name = path.name.removesuffix(".gz").removesuffix(".jsonl")
    try:
        return _trace_of(name, lines, block_tokens)
    except (KeyError, TypeError, ValueError, IndexError, AttributeError) as error:
        raise TraceError(
            f"{path}: a line is not of the format that the first one has ({type(error).__name__}: {error})"
        ) from None


def _lines(path: Path, progress: Callable[[float], None]) -> Iterator[Line]:
    size = max(1, path.stat().st_size)
    with path.open("rb") as raw:
        zipped = raw.read(2) == b"\x1f\x8b"
        raw.seek(0)
        with gzip.open(raw, "rt") if zipped else path.open() as text:
            for number, line in enumerate(text, 1):
                if number % 1000 == 0 and zipped:
                    progress(raw.tell() / size)
                if not line.strip():
                    continue
                try:
                    yield json.loads(line)
                except ValueError as error:
                    raise TraceError(f"{path}: line {number} is no JSON: {error}") from None


def _trace_of(name: str, lines: list[Line], block_tokens: int | None) -> Trace:
    first = lines[0]
    if isinstance(first, dict) and "hash_ranges" in first:
        tokens = int(first.get("block_tokens", block_tokens or BLOCK_TOKENS))
        return Trace(name, tokens, _ranged(lines))
    if isinstance(first, dict) and "hash_ids" in first:
        tokens = block_tokens or BLOCK_TOKENS
        return Trace(name, tokens, numbered(_mooncake(line, tokens) for line in lines))
    if vllm_events.is_one(first):
        return vllm_events.trace_of(name, lines)
    raise TraceError(
        f"{name}: the first line is of no known format; there are hash_ranges (this project's), hash_ids "
        "(Mooncake's) and vLLM's KV events"
    )


def _ranged(lines: list[Line]) -> list[Request]:
    found = []
    for line in lines:
        ids = [ident for first, count in line["hash_ranges"] for ident in range(first, first + count)]
        found.append(Request(line["timestamp"] / 1000, ids, int(line["input_length"])))
    found.sort(key=lambda request: request.at_s)
    return found


def _mooncake(line: Line, block_tokens: int) -> tuple[float, list[int], int]:
    tokens = int(line["input_length"])
    return line["timestamp"] / 1000, line["hash_ids"][: tokens // block_tokens], tokens
