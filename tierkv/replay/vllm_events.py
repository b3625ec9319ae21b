"""vLLM's KV events (``--kv-events-config``) as a trace: ``BlockStored``, ``BlockRemoved`` and ``AllBlocksCleared``.

Each line is a batch, ``{"ts": 1.5, "events": [...]}`` or, as vLLM sends it, ``[1.5, [...], rank]``, or one event. An
event is an object with a ``type``, or the array that older releases send: the type and the fields in their order.

An event says which blocks were computed, not which were there: the request is taken to be the chain up to the parent
and the new blocks; a parent that was stored before the log began stands for all of its past. A request that was
served from the engine's own cache alone left no event and is not seen. What was removed or cleared matters to nobody
here: a replay has its own tiers, and a block's name stands for its past. Blocks that went to another medium than the
GPU are copies, and those of further groups of layers stand beside the first.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Final, NamedTuple

from tierkv.replay.traces import Trace, TraceError, numbered

SAME_REQUEST_S: Final = 2.0
"""Blocks that follow those of the last event within this time are of the same request: its prefill goes on."""
MOST_CHAIN_BLOCKS: Final = 1 << 20
_TYPES: Final = ("BlockStored", "BlockRemoved", "AllBlocksCleared")
_FIELDS: Final = (
    "type",
    "block_hashes",
    "parent_block_hash",
    "token_ids",
    "block_size",
    "lora_id",
    "medium",
    "lora_name",
    "extra_keys",
    "group_idx",
)

Line = Any


class _Stored(NamedTuple):
    hashes: Sequence[object]
    parent: object
    block_tokens: int


def is_one(line: Line) -> bool:
    """Whether a line of a file looks like it."""
    return isinstance(line, list) or (
        isinstance(line, dict) and ("events" in line or line.get("type") in _TYPES)
    )


def trace_of(name: str, lines: Sequence[Line]) -> Trace:
    """Raises ``TraceError``, and what a line that is something else makes of it."""
    events = [(at_s, one) for at_s, event in _events(lines) if (one := _stored(event)) is not None]
    if not events:
        raise TraceError(f"{name}: there is no BlockStored event in it")
    block_tokens, start_s = events[0][1].block_tokens, events[0][0]
    other = next((one.block_tokens for _, one in events if one.block_tokens != block_tokens), None)
    if other is not None:
        raise TraceError(
            f"{name}: blocks of {block_tokens} and of {other} tokens stand in it; take the events of one engine"
        )
    before = _parents(one for _, one in events)
    found: list[tuple[float, list[object]]] = []
    for at_s, stored in events:
        chain = found[-1][1] if found else []
        if not chain or chain[-1] != stored.parent or at_s - start_s - found[-1][0] >= SAME_REQUEST_S:
            chain = _chain_to(stored.parent, before)
            found.append((at_s - start_s, chain))
        chain.extend(stored.hashes)
    return Trace(
        name, block_tokens, numbered((at_s, chain, len(chain) * block_tokens) for at_s, chain in found)
    )


def _parents(events: Iterable[_Stored]) -> dict[object, object]:
    """By block: the one before it, from the whole log, since one may be stored anew that others followed earlier."""
    found: dict[object, object] = {}
    for stored in events:
        parent = stored.parent
        for block in stored.hashes:
            found[block] = parent
            parent = block
    return found


def _events(lines: Sequence[Line]) -> Iterator[tuple[float, Line]]:
    """Each with its time. An event that stands alone and says none came when the last one did."""
    at_s = 0.0
    for line in lines:
        if isinstance(line, dict) and "events" not in line:
            at_s = float(line.get("ts", at_s))
            yield at_s, line
            continue
        at_s, events = (line["ts"], line["events"]) if isinstance(line, dict) else (line[0], line[1])
        for event in events:
            yield float(at_s), event


def _stored(event: Line) -> _Stored | None:
    if not isinstance(event, dict):
        event = dict(zip(_FIELDS, event, strict=False))
    if event["type"] not in _TYPES:
        raise ValueError(f"no event is called {event['type']!r}")
    if event["type"] != "BlockStored" or not event["block_hashes"]:
        return None
    if event.get("medium") not in (None, "GPU") or event.get("group_idx"):
        return None
    return _Stored(event["block_hashes"], event.get("parent_block_hash"), int(event["block_size"]))


def _chain_to(block: object, before: dict[object, object]) -> list[object]:
    chain = []
    while block is not None:
        chain.append(block)
        block = before.get(block)
        if len(chain) > MOST_CHAIN_BLOCKS:
            raise TraceError(f"block {block!r} is its own ancestor")
    return chain[::-1]
