"""Reading traces: lines of JSON, plain or gzip, in one of several formats that are told apart by their first line.

- This project's: ``timestamp`` in ms, ``input_length``, ``hash_ranges`` (``bench/traces/README.md``). ``tierkv record``
  writes it.
- Mooncake's (Qin and others, FAST 2025): the same with ``hash_ids``, which name a partial last block as well.
- vLLM's KV events (``tierkv.replay.vllm_events``).

A file is read as it comes, so it may be a pipe. What a line says must be possible: a trace with nonsense in it would be
replayed to figures that nobody could tell from good ones.
"""

from __future__ import annotations

import gzip
import json
import os
import zlib
from collections.abc import Callable, Iterator
from io import TextIOWrapper
from pathlib import Path
from typing import Any

from tierkv.replay import vllm_events
from tierkv.replay.fields import finite, whole
from tierkv.replay.traces import MOST_REQUEST_BLOCKS, Prompt, Trace, TraceError, numbered

BLOCK_TOKENS = 512
"""Of the formats that do not say it."""

Line = Any
_AT_LEAST_NAMED = 0.5
"""Of the full blocks that the prompts have room for; below it a block has more tokens than was said."""


class _Lines:
    """The lines of a file that are not empty, each with its number; which one was read last."""

    def __init__(self, lines: Iterator[tuple[int, Line]]) -> None:
        self._lines = lines
        self.last = 0

    def __iter__(self) -> Iterator[tuple[int, Line]]:
        for number, line in self._lines:
            self.last = number
            yield number, line


def read_trace(
    path: Path, *, block_tokens: int | None = None, progress: Callable[[float], None] = lambda share: None
) -> Trace:
    """``block_tokens``: where the format does not say it (512 otherwise). ``progress`` is told how much of the file was
    read, from 0 to 1. Raises ``TraceError``."""
    lines = _Lines(_parsed(path, progress))
    name = path.name.removesuffix(".gz").removesuffix(".jsonl")
    try:
        return _trace_of(path, name, lines, block_tokens)
    except UnicodeDecodeError as error:
        raise TraceError(f"{path}: it is no text in UTF-8, plain or gzip: {error}") from None
    except EOFError:
        raise TraceError(
            f"{path}: it is cut off; what is there comes out of gzip -dc, less its last line"
        ) from None
    except (OSError, zlib.error) as error:
        raise TraceError(f"{path}: {error}") from None
    except (KeyError, TypeError, ValueError, IndexError, AttributeError) as error:
        raise TraceError(f"{path}: line {lines.last} cannot be used: {_said(error)}") from None


def _said(error: Exception) -> str:
    if isinstance(error, KeyError):
        return f"it has no {error.args[0]}"
    return str(error) if type(error) is ValueError else f"{type(error).__name__}: {error}"


def _parsed(path: Path, progress: Callable[[float], None]) -> Iterator[tuple[int, Line]]:
    with path.open("rb") as raw:
        size = os.fstat(raw.fileno()).st_size if raw.seekable() else 0
        zipped = raw.peek(2)[:2] == b"\x1f\x8b"
        with TextIOWrapper(gzip.open(raw) if zipped else raw, "utf-8-sig") as text:
            for number, line in enumerate(text, 1):
                if number % 1000 == 0 and size:
                    progress(min(1.0, raw.tell() / size))
                if not line.strip():
                    continue
                try:
                    yield number, json.loads(line)
                except (ValueError, RecursionError) as error:
                    raise TraceError(
                        f"{path}: line {number} is no JSON: {error}; each line is one object, and a file that was cut "
                        "off is whole without its last line"
                    ) from None


def _trace_of(path: Path, name: str, lines: _Lines, block_tokens: int | None) -> Trace:
    first = next(iter(lines), None)
    if first is None:
        raise TraceError(f"{path}: it is empty")
    known = first[1]

    def again() -> Iterator[tuple[int, Line]]:
        yield first
        yield from lines

    if isinstance(known, dict) and "hash_ranges" in known:
        tokens = _block_tokens(path, known, block_tokens)
        return _checked(
            path, Trace(name, tokens, numbered(_ranged(line, tokens, known) for _, line in again()))
        )
    if isinstance(known, dict) and "hash_ids" in known:
        tokens = block_tokens or BLOCK_TOKENS
        return _checked(path, Trace(name, tokens, numbered(_mooncake(line, tokens) for _, line in again())))
    if vllm_events.is_one(known):
        return vllm_events.trace_of(name, again())
    raise TraceError(
        f"{path}: the first line is of no known format; there are hash_ranges (this project's), hash_ids "
        "(Mooncake's) and vLLM's KV events, one object a line (of a list, jq -c '.[]' makes such lines)"
    )


def _block_tokens(path: Path, first: Line, given: int | None) -> int:
    if "block_tokens" not in first:
        return given or BLOCK_TOKENS
    tokens = whole(first["block_tokens"], "block_tokens")
    if given not in (None, tokens):
        raise TraceError(
            f"{path}: it says blocks of {tokens} tokens itself; leave out --block-tokens {given}"
        )
    return tokens


def _ranged(line: Line, block_tokens: int, first: Line) -> Prompt:
    if line.get("block_tokens") != first.get("block_tokens"):
        raise ValueError(
            f"block_tokens = {line.get('block_tokens')}, and {first.get('block_tokens')} in the first line"
        )
    tokens = whole(line["input_length"], "input_length", least=0)
    names: list[int] = []
    for start, count in line["hash_ranges"]:
        start, count = whole(start, "a block", least=0, most=1 << 62), whole(count, "a count")
        if (len(names) + count) * block_tokens > tokens:
            raise ValueError(
                f"its blocks of {block_tokens} tokens do not fit in its {tokens:,} tokens (input_length)"
            )
        _refuse_too_many(len(names) + count)
        names.extend(range(start, start + count))
    own = whole(line.get("own_blocks", 0), "own_blocks", least=0, most=len(names))
    return Prompt(finite(line["timestamp"], "timestamp") / 1000, names, tokens, own)


def _mooncake(line: Line, block_tokens: int) -> Prompt:
    tokens = whole(line["input_length"], "input_length", least=0)
    names, full = line["hash_ids"], tokens // block_tokens
    if not isinstance(names, list) or not {type(name) for name in names} <= {int, str}:
        raise ValueError("hash_ids is no list of numbers or words")
    if 2 * len(names) > 3 * full + 4:  # a partial last block has a name too
        raise ValueError(
            f"{len(names):,} blocks of {block_tokens} tokens do not fit in its {tokens:,} tokens (input_length)"
        )
    _refuse_too_many(len(names))
    return Prompt(finite(line["timestamp"], "timestamp") / 1000, names[:full], tokens)


def _refuse_too_many(count: int) -> None:
    if count > MOST_REQUEST_BLOCKS:
        raise ValueError(f"more than {MOST_REQUEST_BLOCKS:,} blocks")


def _checked(path: Path, trace: Trace) -> Trace:
    """Raises ``TraceError`` where blocks were said to be much shorter than they are: hits would be a fraction of what
    they are."""
    room = sum(request.tokens // trace.block_tokens for request in trace.requests)
    if trace.references + len(trace.requests) < _AT_LEAST_NAMED * room:
        raise TraceError(
            f"{path}: {trace.references:,} blocks of {trace.block_tokens} tokens are named, and its prompts have "
            f"{trace.tokens:,} tokens: a block has more; say how many with --block-tokens"
        )
    return trace
