"""What the demo found out, as tables and as JSON."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from tierkv import __version__
from tierkv.demo.acts import Result, Stage
from tierkv.demo.verdicts import HOST, NAMES, NVME, VALKEY, Row
from tierkv.demo.words import seconds, times
from tierkv.units import format_bytes

_HEAD = ("source", "tokens reused", "bytes", "first token", "without a store", "speed-up", "output equal")
_HEAD_2 = (
    "text",
    "tokens reused",
    "blocks from",
    "bytes",
    "1st time",
    "2nd time",
    "speed-up",
    "output equal",
)


def tables(stage: Stage, result: Result) -> str:
    """Both acts, for people."""
    lines = []
    if result.rows:
        lines += [
            f"Act 1: the {stage.long.name}, from each tier in turn",
            "",
            *_table(_HEAD, [_cells(row) for row in result.rows]),
            "",
        ]
    if turns := list(pairs(result)):
        kv = format_bytes(kv_bytes(result))
        lines += [
            f"Act 2: {stage.small_host} of host RAM, {stage.small_nvme} of NVMe, {kv} of keys and values in turn",
            "",
            *_table(_HEAD_2, [_pair_cells(result, *pair) for pair in turns]),
            "",
            *_pressure(result.counters),
            "",
        ]
    return "\n".join(lines)


def pairs(result: Result) -> Iterator[tuple[Row, Row]]:
    """The second act's texts: the first time and the second."""
    half = len(result.pressed) // 2
    return zip(result.pressed[:half], result.pressed[half:], strict=False)


def kv_bytes(result: Result) -> int:
    """Of all texts of the second act."""
    return sum(first.answer.prompt_tokens for first, _ in pairs(result)) * result.token_bytes


def blocks_from(result: Result, row: Row) -> Mapping[str, int]:
    """By tier. What was not read from a colder tier was in host RAM."""
    reused = -(-row.answer.reused_tokens // result.block_tokens)
    read = {tier: row.answer.read.get(tier, 0) for tier in (NVME, VALKEY)}
    found = {HOST: max(0, reused - sum(read.values())), **read}
    return {tier: count for tier, count in found.items() if count}


def _cells(row: Row) -> Sequence[str]:
    answer = row.answer
    return (
        row.source,
        f"{answer.reused_tokens} of {answer.prompt_tokens}",
        format_bytes(answer.reused_bytes),
        seconds(answer.first_token_s),
        seconds(row.computed.first_token_s),
        times(row.speed_up),
        "yes" if row.equal else "NO",
    )


def _pair_cells(result: Result, first: Row, second: Row) -> Sequence[str]:
    answer = second.answer
    found = blocks_from(result, second)
    return (
        first.text,
        f"{answer.reused_tokens} of {answer.prompt_tokens}",
        ", ".join(f"{NAMES[tier]} {count}" for tier, count in found.items()) or "none",
        format_bytes(answer.reused_bytes),
        seconds(first.answer.first_token_s),
        seconds(answer.first_token_s),
        times(first.answer.first_token_s / answer.first_token_s),
        "yes" if first.equal and second.equal else "NO",
    )


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> Iterator[str]:
    """Words to the left, numbers to the right."""
    widths = [max(len(row[i]) for row in (head, *rows)) for i in range(len(head))]
    rule = ["-" * width for width in widths]
    for row in (head, rule, *rows):
        first, *others = zip(row, widths, strict=True)
        yield "  ".join([f"{first[0]:<{first[1]}}", *(f"{cell:>{width}}" for cell, width in others)])


def _pressure(counters: Mapping[str, int]) -> Iterator[str]:
    def count(*labels: str) -> int:
        return counters.get("/".join(labels), 0)

    written = {tier: count("written_blocks_total", tier, "done") for tier in (NVME, VALKEY)}
    evicted = {
        HOST: count("evicted_blocks_total", HOST, "room"),
        NVME: count("evicted_blocks_total", NVME, "capacity"),
    }
    read = {tier: count("read_blocks_total", tier, "done") for tier in (NVME, VALKEY)}
    dropped = sum(value for name, value in counters.items() if name.startswith("dropped_blocks_total/"))
    yield f"cleaned ahead of need  {_told(written, 'to')}"
    yield f"evicted to make room   {_told(evicted, 'from')}"
    yield f"promoted               {_told(read, 'from')}"
    yield f"found no room          {dropped} blocks dropped; they were computed again"


def _told(found: Mapping[str, int], where: str) -> str:
    return ", ".join(f"{count} blocks {where} {NAMES[tier]}" for tier, count in found.items())


# -- JSON -------------------------------------------------------------------------------------------------------------


def as_json(stage: Stage, result: Result, elapsed_s: float) -> Mapping[str, Any]:
    """Plain values. Sizes in bytes, times in seconds."""
    return {
        "ok": not result.all_problems,
        "problems": result.all_problems,
        "tierkv": __version__,
        "cores": len(os.sched_getaffinity(0)),
        "elapsed_s": round(elapsed_s, 3),
        "kv_bytes_a_token": result.token_bytes,
        "block_tokens": result.block_tokens,
        "act_1": {"text": stage.long.name, "rows": [_row(row) for row in result.rows]},
        "act_2": {
            "host_capacity": stage.small_host,
            "nvme_capacity": stage.small_nvme,
            "kv_bytes": kv_bytes(result),
            "rows": [{**_row(row), "blocks_from": blocks_from(result, row)} for row in result.pressed],
            "counters": dict(result.counters),
        },
    }


def _row(row: Row) -> dict[str, Any]:
    answer = row.answer
    return {
        "text": row.text,
        "source": row.source,
        "question": answer.question,
        "answer": answer.text,
        "prompt_tokens": answer.prompt_tokens,
        "reused_tokens": answer.reused_tokens,
        "reused_bytes": answer.reused_bytes,
        "blocks_known_before": dict(answer.known),
        "blocks_read": dict(answer.read),
        "restore_s": answer.restore_s,
        "answer_s": answer.whole_s,
        "first_token_s": answer.first_token_s,
        "first_token_computed_s": row.computed.first_token_s,
        "speed_up": row.speed_up,
        "output_equal": row.equal,
        "problems": list(row.problems),
    }
