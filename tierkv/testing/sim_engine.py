"""An engine in a simulation: its paged memory, and what it wishes for its blocks."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence

import numpy as np

from tierkv.copier import LayerPages, PagedKV
from tierkv.namespaces import OpenNamespace
from tierkv.retention import Retention

PayloadsOf = Callable[[int, tuple[int, ...]], Sequence[bytes]]
"""``payloads_of(position, parts)``: what a block of the chain holds."""


def engine_memory(
    dice: random.Random, space: OpenNamespace, positions: range, rank: int, payloads_of: PayloadsOf | None
) -> tuple[PagedKV, list[list[list[int]]]]:
    """Memory for these blocks with their pages scattered, and which pages are whose; zeros without ``payloads_of``."""
    layout = space.namespace.layout
    groups = []
    pages: list[list[list[int]]] = [[] for _ in positions]
    for number, group in enumerate(layout.groups):
        per_block = layout.pages_of(number)
        order = list(range(per_block * len(positions)))
        dice.shuffle(order)
        memory = np.zeros((group.layers, len(order), group.page_bytes), dtype=np.uint8)
        part = layout.part_index(number, rank)
        for i, position in enumerate(positions):
            mine = order[i * per_block : (i + 1) * per_block]
            pages[i].append(mine)
            if payloads_of is not None:
                [payload] = payloads_of(position, (part,))
                shape = (group.layers, per_block, group.page_bytes)
                memory[:, mine] = np.frombuffer(payload, dtype=np.uint8).reshape(shape)
        groups.append(tuple(LayerPages((layer,)) for layer in memory))
    return PagedKV(tuple(groups)), pages


def some_retention(dice: random.Random) -> Retention:
    """What a request of an engine wishes for its blocks."""
    if dice.random() < 0.05:
        return Retention(no_store=True)
    return Retention(
        priority=dice.choice((0, 0, 0, 1, -1)),
        ttl_s=dice.choice((None, None, None, None, 1.0, 20.0, math.inf)),
        coldest="host" if dice.random() < 0.1 else None,
    )


def some_wish(dice: random.Random) -> Retention | None:
    """Of a request that loads: mostly none."""
    return some_retention(dice) if dice.random() < 0.3 else None
