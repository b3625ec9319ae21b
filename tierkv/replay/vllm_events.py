"""vLLM's KV events (``--kv-events-config``) as a trace: ``BlockStored``, ``BlockRemoved`` and ``AllBlocksCleared``.

Each line is a batch, ``{"ts": 1.5, "events": [...]}`` or, as vLLM sends it, ``[1.5, [...], rank]``, or one event. An
event is an object with a ``type``, or the array that older releases send: the type and the fields in their order.

An event says which blocks were computed, not which were there: the request is taken to be the chain up to the parent
and the new blocks; a parent that was stored before the log began stands for all of its past. A request that was
served from the engine's own cache alone left no event and is not seen. What a request generates is stored block by
block and belongs to it, as long as no pause is in between; what is asked next in the same conversation comes after one.
What was removed or cleared matters to nobody
here: a replay has its own tiers, and a block's name stands for its past. Blocks that went to another medium than the
GPU are copies, and those of further groups of layers stand beside the first.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Final, NamedTuple

from tierkv.replay.fields import finite, whole
from tierkv.replay.traces import MOST_REQUEST_BLOCKS, Prompt, Trace, TraceError, numbered

SAME_REQUEST_S: Final = 2.0
"""Blocks that follow a request's last ones within this time are its own: its prefill or its answer goes on."""
SLOW_TOKENS_PER_S: Final = 10.0
"""An engine that generates at this rate still counts as going on: large blocks take longer to fill."""
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
Numbered = tuple[int, Line]
"""A line of a file behind its number."""


class _Stored(NamedTuple):
    hashes: Sequence[object]
    parent: object
    block_tokens: int


class _Open(NamedTuple):
    """A request whose blocks may go on."""

    number: int
    last_s: float


def is_one(line: Line) -> bool:
    """Whether a line of a file looks like it."""
    if isinstance(line, list):
        return len(line) > 1 and isinstance(line[0], int | float) and isinstance(line[1], list)
    return isinstance(line, dict) and ("events" in line or line.get("type") in _TYPES)


def trace_of(name: str, lines: Iterable[Numbered]) -> Trace:
    """Raises ``TraceError``, and of a line that is something else what reading it raises: ``lines`` knows which it
    was."""
    events = list(_stored_events(lines))
    if not events:
        raise TraceError(f"{name}: there is no BlockStored event in it")
    block_tokens, start_s = events[0][1].block_tokens, events[0][0]
    other = next((one.block_tokens for _, one in events if one.block_tokens != block_tokens), None)
    if other is not None:
        raise TraceError(
            f"{name}: blocks of {block_tokens} and of {other} tokens stand in it; take the events of one engine"
        )
    found = _requests(name, events, max(SAME_REQUEST_S, block_tokens / SLOW_TOKENS_PER_S))
    return Trace(
        name,
        block_tokens,
        numbered(Prompt(at_s - start_s, chain, len(chain) * block_tokens) for at_s, chain in found),
    )


def _requests(
    name: str, events: Sequence[tuple[float, _Stored]], pause_s: float
) -> list[tuple[float, list[object]]]:
    """Each with when it began. Many go on at the same time: a request is known by the last of its blocks."""
    before = _parents(one for _, one in events)
    going: dict[object, _Open] = {}
    found: list[tuple[float, list[object]]] = []
    for at_s, stored in events:
        one = going.pop(stored.parent, None)
        if one is None or at_s - one.last_s >= pause_s:
            one = _Open(len(found), at_s)
            found.append((at_s, _chain_to(name, stored.parent, before)))
        chain = found[one.number][1]
        chain.extend(stored.hashes)
        going[chain[-1]] = _Open(one.number, at_s)
    return found


def _parents(events: Iterable[_Stored]) -> dict[object, object]:
    """By block: the one before it, from the whole log, since one may be stored anew that others followed earlier."""
    found: dict[object, object] = {}
    for stored in events:
        parent = stored.parent
        for block in stored.hashes:
            found[block] = parent
            parent = block
    return found


def _stored_events(lines: Iterable[Numbered]) -> Iterator[tuple[float, _Stored]]:
    """Each with its time. An event that stands alone and says none came when the last one did."""
    at_s = 0.0
    for _, line in lines:
        if isinstance(line, dict) and "events" not in line:
            at_s, events = finite(line.get("ts", at_s), "ts"), [line]
        elif isinstance(line, dict):
            at_s, events = finite(line["ts"], "ts"), line["events"]
        else:
            at_s, events = finite(line[0], "ts"), line[1]
        for event in events:
            if (one := _stored(event)) is not None:
                yield at_s, one


def _stored(event: Line) -> _Stored | None:
    if not isinstance(event, dict):
        event = dict(zip(_FIELDS, event, strict=False))
    if event["type"] not in _TYPES:
        raise ValueError(f"no event is called {event['type']!r}")
    if event["type"] != "BlockStored" or not event["block_hashes"]:
        return None
    if event.get("medium") not in (None, "GPU") or event.get("group_idx"):
        return None
    hashes = event["block_hashes"]
    if not isinstance(hashes, list) or None in hashes:
        raise ValueError("block_hashes is no list of hashes")
    hash(tuple(hashes))  # raises where one is no name
    hash(event.get("parent_block_hash"))
    return _Stored(hashes, event.get("parent_block_hash"), whole(event["block_size"], "block_size"))


def _chain_to(name: str, block: object, before: dict[object, object]) -> list[object]:
    chain = []
    while block is not None:
        chain.append(block)
        block = before.get(block)
        if len(chain) > MOST_REQUEST_BLOCKS:
            raise TraceError(f"{name}: block {block!r} is its own ancestor")
    return chain[::-1]
