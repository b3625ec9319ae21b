"""vLLM's KV events as a trace: what requests they are taken for, in each of the ways in which they are written."""

import json
from pathlib import Path
from typing import Any

import pytest

from tierkv.replay.formats import read_trace
from tierkv.replay.traces import Trace, TraceError


def stored(hashes: list[Any], parent: Any = None, **more: Any) -> dict[str, Any]:
    return {
        "type": "BlockStored", "block_hashes": hashes, "parent_block_hash": parent,
        "token_ids": [0] * (16 * len(hashes)), "block_size": 16, "lora_id": None, "medium": "GPU", **more,
    }  # fmt: skip


REMOVED = {"type": "BlockRemoved", "block_hashes": ["b"], "medium": "GPU"}
CLEARED = {"type": "AllBlocksCleared"}
# A prompt whose prefill takes two steps; another that goes on from its first block; the first again after a clearing.
BATCHES: list[tuple[float, list[dict[str, Any]]]] = [
    (100.0, [stored(["a", "b"])]),
    (100.5, [stored(["c"], "b"), REMOVED]),
    (110.0, [stored(["d"], "a"), stored(["c"], "b", medium="CPU"), stored(["w"], group_idx=1)]),
    (120.0, [CLEARED, stored(["a", "b", "c"])]),
]
PROMPTS = [(0.0, [0, 1, 2]), (10.0, [0, 3]), (20.0, [0, 1, 2])]


def as_array(event: dict[str, Any]) -> list[Any]:
    """In the order of the fields; what stands between ``medium`` and ``group_idx`` is left at nothing."""
    fields = list(event.values())
    if "group_idx" in event:
        return [*fields[:-1], None, None, event["group_idx"]]
    return fields


WAYS = {
    "batches as objects": [{"ts": at, "events": events} for at, events in BATCHES],
    "batches as arrays": [[at, events, 0] for at, events in BATCHES],
    "all as arrays": [[at, [as_array(event) for event in events]] for at, events in BATCHES],
    "events alone": [{**event, "ts": at} for at, events in BATCHES for event in events],
}


def trace_of(tmp_path: Path, lines: list[Any]) -> Trace:
    path = tmp_path / "events.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return read_trace(path)


@pytest.mark.parametrize("way", WAYS)
def test_what_requests_events_are_taken_for(tmp_path: Path, way: str) -> None:
    trace = trace_of(tmp_path, WAYS[way])
    assert [(request.at_s, request.ids) for request in trace.requests] == PROMPTS
    assert (trace.block_tokens, trace.tokens) == (16, 16 * 8)
    assert trace.parents == [-1, 0, 1, 0]


@pytest.mark.parametrize("block_tokens", [16, 128])
def test_answers_that_are_generated_at_the_same_time(tmp_path: Path, block_tokens: int) -> None:
    """Four prompts that share nothing, whose answers grow by turns for minutes: four requests, and nobody hits
    anything. A later turn of one of them is a request of its own."""
    slow_s, times = block_tokens / 16, 100  # for each block; the tokens come at 20 a second
    tails = [f"{who}" for who in range(4)]
    lines = [{"ts": 0.1 * who, "events": [stored([tails[who]])]} for who in range(4)]
    for step in range(1, times):
        for who in range(4):
            new = f"{who}.{step}"
            at_s = step * slow_s * 0.8 + 0.1 * who
            lines.append({"ts": at_s, "events": [stored([new], tails[who])]})
            tails[who] = new
    lines.append({"ts": 10 * times * slow_s, "events": [stored(["next", "turn"], tails[2])]})
    for line in lines:
        line["events"][0]["block_size"] = block_tokens  # type: ignore[index]
    trace = trace_of(tmp_path, lines)
    assert [len(request.ids) for request in trace.requests] == [times] * 4 + [times + 2]
    assert trace.blocks == 4 * times + 2


def test_events_without_a_time(tmp_path: Path) -> None:
    trace = trace_of(tmp_path, [REMOVED, stored([1, 2]), stored([3], 2), stored([4])])
    assert [request.ids for request in trace.requests] == [[0, 1, 2], [3]]
    assert trace.seconds == 0


def test_a_parent_from_before_the_log(tmp_path: Path) -> None:
    """It stands for its past, until that is stored anew."""
    lines = [stored(["x", "y"], "long gone"), stored(["z"], "as well"), stored(["root", "long gone", "x"])]
    trace = trace_of(tmp_path, lines)
    assert [request.ids for request in trace.requests] == [[0, 1, 2, 3], [4, 5], [0, 1, 2]]
    assert trace.parents == [-1, 0, 1, 2, -1, 4]


@pytest.mark.parametrize(
    ("lines", "told"),
    [
        ([CLEARED], "no BlockStored event"),
        ([stored(["a"]), stored(["b"], block_size=32)], "blocks of 16 and of 32 tokens"),
        ([stored(["a"]), {"type": "BlockMoved"}], "BlockMoved"),
        ([{"ts": 1.0, "events": [stored(["a"])]}, {"ts": 2.0}], "line 2 cannot be used: it has no type"),
        ([[1.0]], "no known format"),
        ([[1.5, [stored(["a"])]], [float("nan"), []]], "line 2 .*ts = nan"),
        ([stored(["a"], block_size=0)], "line 1 .*block_size = 0 is no whole number from 1"),
        ([stored([["a"]])], "line 1 .*unhashable"),
        ([stored(["a"]), stored(["b", None], "a")], "line 2 .*block_hashes is no list of hashes"),
        ([stored(["a"], "a"), stored(["b"], "a")], "events: block 'a' is its own ancestor"),
    ],
)
def test_a_log_of_something_else_is_told(tmp_path: Path, lines: list[Any], told: str) -> None:
    with pytest.raises(TraceError, match=told):
        trace_of(tmp_path, lines)
