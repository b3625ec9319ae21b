"""Callers' buffers into reserved slots."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import xxhash

from tierkv.errors import ArgumentError
from tierkv.handles import SMALL_BYTES, DraftBlocks, SlotMemory, copy_in

Payload = Any
"""Anything with the buffer protocol that is C-contiguous: bytes, memoryview, numpy array."""


def fill_all(
    memory: SlotMemory, blocks: DraftBlocks, payloads: Sequence[Payload], first: int
) -> list[tuple[int, ...]]:
    """Copies reserved blocks in; ``payloads[i]`` is that of block ``first + i``. Returns their checksums, by block and
    part. Raises ``ArgumentError`` and ``HandleError``."""
    size, view, digest = blocks.part_bytes[0], memory.view, xxhash.xxh3_64_intdigest
    sums: list[tuple[int, ...]] = []
    small = len(blocks.parts) == 1 and size <= SMALL_BYTES
    for index, position in enumerate(blocks.positions):
        given = payloads[position - first]
        if small and type(given) is memoryview and given.format == "B" and given.shape == (size,):
            target = view(blocks.slots[index][0])[:size]
            target[:] = given
            sums.append((digest(target),))
        else:
            sums.append(copy_in(memory, blocks, index, buffers_of(given, position)))
    return sums


def buffers_of(given: Payload, position: int) -> Sequence[memoryview]:
    """``given`` is one buffer, or a list of one for each part. Raises ``ArgumentError``."""
    if type(given) is memoryview and given.c_contiguous:
        return (given,)
    parts = given if isinstance(given, list | tuple) else (given,)
    try:
        views = [memoryview(part) for part in parts]
    except TypeError:
        views = []
    if len(views) < len(parts) or not all(view.c_contiguous for view in views):
        hint = "its bytes in C order, or a list with those of each layer group"
        raise ArgumentError("put", f"block {position}", given, hint)
    return views
