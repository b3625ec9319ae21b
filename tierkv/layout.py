"""What a block is made of: layer groups, ranks, and how many bytes each part has. Declared, never guessed.

A *part* is the share of one layer group on one rank. A group whose data every rank holds alike (one latent vector for
all heads, as in multi-head latent attention) has a single part without a rank. The payload of a part lies layer by
layer: for each layer of the group, the pages of the block's engine blocks in the order of their tokens. So one layer
of a block is contiguous and can be copied while the next one is still on its way.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property

from tierkv.errors import LayoutError
from tierkv.units import KIB

MIN_PART_BYTES = 512 * KIB
"""Blocks are made of as many engine blocks as it takes for the smallest part to reach this: smaller ones waste NVMe
and Valkey (a header page each, a round trip each)."""

MAX_PARTS = 63
"""Parts of a family are bits of one signed 64-bit word."""
MAX_RANKS = 1024
"""Where all groups are replicated, parts do not bound them."""


class GroupKind(enum.Enum):
    """What of the past a layer group needs in order to go on at position p."""

    FULL = "full"
    """All of [0, p)."""
    WINDOW = "window"
    """The last ``window_tokens`` tokens before p."""
    STATE = "state"
    """One state, exactly at p (recurrent layers); a page is a whole state."""


ITEM_BYTES = {"float32": 4, "float16": 2, "bfloat16": 2}
"""Kinds of numbers that a lossy codec can take apart, by torch's names."""


@dataclass(frozen=True)
class Segment:
    """A stretch of a page: numbers as [outer, tokens, inner] in C order. What one token has for one ``outer`` (a head,
    say, or keys and values) lies together; each of its ``inner`` numbers is a channel.

    Pages as [2, tokens, heads, dim] (fused, NHD) are one segment (2, tokens, heads × dim), as [heads, tokens, dim]
    (HND) one of (heads, tokens, dim), a latent [tokens, dim] one of (1, tokens, dim). Keys and values in arrays of
    their own are two segments.
    """

    outer: int
    tokens: int
    inner: int

    def __post_init__(self) -> None:
        for field in ("outer", "tokens", "inner"):
            value = getattr(self, field)
            if not isinstance(value, int) or value < 1:
                raise LayoutError(
                    f"segment of a page: {field} = {value!r}: it must be an integer, at least 1"
                )

    @property
    def numbers(self) -> int:
        return self.outer * self.tokens * self.inner


@dataclass(frozen=True)
class LayerGroup:
    """Layers that share one kind of attention and one page size.

    ``page_bytes`` is what one layer on one rank keeps for one engine block of ``engine_block_tokens`` tokens (keys
    and values together, or the one latent); for ``STATE`` it is one state of one layer.
    """

    name: str
    kind: GroupKind
    layers: int
    page_bytes: int
    engine_block_tokens: int
    window_tokens: int | None = None
    replicated: bool = False
    """Every rank holds the same bytes, so they are stored once."""
    inside: tuple[Segment, ...] = ()
    """What a page is made of, in order, for codecs that look at numbers; empty: nobody may."""

    def __post_init__(self) -> None:
        for field in ("layers", "page_bytes", "engine_block_tokens"):
            value = getattr(self, field)
            if not isinstance(value, int) or value < 1:
                raise LayoutError(
                    f"layer group {self.name!r}: {field} = {value!r}: it must be an integer, at least 1"
                )
        if self.kind is GroupKind.WINDOW and (self.window_tokens is None or self.window_tokens < 1):
            raise LayoutError(
                f"layer group {self.name!r}: window_tokens = {self.window_tokens!r}, a window group needs its size"
            )
        if self.kind is not GroupKind.WINDOW and self.window_tokens is not None:
            raise LayoutError(
                f"layer group {self.name!r}: window_tokens is for window groups, this one is {self.kind}"
            )


@dataclass(frozen=True)
class Part:
    """One share of a block: a layer group on a rank (``rank`` is ``None`` for a replicated group)."""

    index: int
    group: int
    rank: int | None
    payload_bytes: int


@dataclass(frozen=True)
class Layout:
    """The shape of all blocks of a namespace.

    ``layout_id`` names the inside of a page as the engine lays it out (for instance ``"vllm-cuda-NHD"``); pages are
    opaque bytes that only an equal layout id can read. ``dtype`` is the exact KV dtype (``"fp8_e4m3"`` and
    ``"fp8_e5m2"`` differ). ``hash_tokens`` is how many tokens one engine hash covers, ``engine_blocks`` (n) how many
    engine hashes one block covers.
    """

    layout_id: str
    dtype: str
    hash_tokens: int
    groups: tuple[LayerGroup, ...]
    engine_blocks: int = 1
    tp_size: int = 1
    pp_size: int = 1
    cp_size: int = 1

    def __post_init__(self) -> None:
        if not self.layout_id or not self.dtype:
            raise LayoutError(f"layout_id = {self.layout_id!r}, dtype = {self.dtype!r}: both must be named")
        if not self.groups:
            raise LayoutError("groups = (): a layout has at least one layer group")
        for field in ("hash_tokens", "engine_blocks", "tp_size", "pp_size", "cp_size"):
            value = getattr(self, field)
            if not isinstance(value, int) or value < 1:
                raise LayoutError(f"{field} = {value!r}: it must be an integer of at least 1")
        if len({group.name for group in self.groups}) != len(self.groups):
            raise LayoutError(
                f"layer groups need different names, got {[group.name for group in self.groups]}"
            )
        if self.ranks > MAX_RANKS:
            raise LayoutError(f"{self.ranks} ranks: a block is spread over at most {MAX_RANKS}")
        for group in self.groups:
            self._check_fit(group)
        parts = sum(1 if group.replicated else self.ranks for group in self.groups)
        if parts > MAX_PARTS:  # counted before they are made: a peer may have named any number
            raise LayoutError(f"{parts} parts: a family has at most {MAX_PARTS}; use fewer groups or ranks")

    def _check_fit(self, group: LayerGroup) -> None:
        tokens = group.engine_block_tokens
        size = sum(segment.numbers for segment in group.inside) * ITEM_BYTES.get(self.dtype, 0)
        if size and size != group.page_bytes:
            raise LayoutError(
                f"layer group {group.name!r}: inside = {group.inside}: that is {size} bytes of {self.dtype}, "
                f"a page has {group.page_bytes}"
            )
        if tokens % self.hash_tokens:
            raise LayoutError(
                f"layer group {group.name!r}: engine_block_tokens = {tokens} is no multiple of hash_tokens = "
                f"{self.hash_tokens} (the greatest common divisor of the groups' block lengths)"
            )
        if self.block_tokens % tokens:
            raise LayoutError(
                f"engine_blocks = {self.engine_blocks}: a block of {self.block_tokens} tokens does not hold whole "
                f"engine blocks of layer group {group.name!r} ({tokens} tokens); choose a multiple of "
                f"{tokens // self.hash_tokens}"
            )

    @property
    def block_tokens(self) -> int:
        """Tokens of one block."""
        return self.hash_tokens * self.engine_blocks

    @property
    def ranks(self) -> int:
        """Ranks over which one block is spread."""
        return self.tp_size * self.pp_size * self.cp_size

    @cached_property
    def parts(self) -> tuple[Part, ...]:
        """All parts of a block over all ranks, in the order of their index."""
        parts: list[Part] = []
        for number, group in enumerate(self.groups):
            ranks: Iterable[int | None] = (None,) if group.replicated else range(self.ranks)
            for rank in ranks:
                parts.append(Part(len(parts), number, rank, self.payload_bytes(number)))
        return tuple(parts)

    def pages_of(self, group: int) -> int:
        """Pages that one layer of the group keeps for a block: one for each engine block, or one state."""
        chosen = self.groups[group]
        return 1 if chosen.kind is GroupKind.STATE else self.block_tokens // chosen.engine_block_tokens

    def payload_bytes(self, group: int) -> int:
        """Bytes of one part of the group."""
        chosen = self.groups[group]
        return chosen.layers * chosen.page_bytes * self.pages_of(group)

    def part_index(self, group: int, rank: int) -> int:
        """The part of a group that a rank holds."""
        if not 0 <= rank < self.ranks:
            raise LayoutError(f"rank = {rank}: this layout has ranks 0 to {self.ranks - 1}")
        wanted = None if self.groups[group].replicated else rank
        return next(part.index for part in self.parts if part.group == group and part.rank == wanted)

    def mask_of(self, ranks: Iterable[int] | None = None) -> int:
        """Bitmap of the parts that the given ranks (default: all) hold together."""
        chosen = set(range(self.ranks) if ranks is None else ranks)
        if not chosen <= set(range(self.ranks)):
            raise LayoutError(f"ranks = {sorted(chosen)}: this layout has ranks 0 to {self.ranks - 1}")
        return sum(1 << part.index for part in self.parts if part.rank is None or part.rank in chosen)

    def group_mask(self, group: int) -> int:
        """Bitmap of all parts of one group."""
        return sum(1 << part.index for part in self.parts if part.group == group)

    def trailing_blocks(self, group: int) -> int | None:
        """How many blocks before a position the group needs in order to go on there; ``None``: all of them.

        A window counts in full, not less one: so the last token of a covered prompt can be computed again.
        """
        chosen = self.groups[group]
        if chosen.kind is GroupKind.FULL:
            return None
        if chosen.kind is GroupKind.STATE:
            return 1
        assert chosen.window_tokens is not None
        return -(-chosen.window_tokens // self.block_tokens)


def engine_blocks_for(
    groups: Iterable[LayerGroup], hash_tokens: int, min_part_bytes: int = MIN_PART_BYTES
) -> int:
    """The smallest n for which every part (states aside: their size does not grow) has ``min_part_bytes``.

    The result also is a multiple that holds whole engine blocks of every group.
    """
    chosen = list(groups)
    step = math.lcm(*(max(1, group.engine_block_tokens // hash_tokens) for group in chosen))
    count = step
    for group in chosen:
        if group.kind is not GroupKind.STATE:
            # A part has layers * page_bytes * n * hash_tokens / engine_block_tokens bytes.
            wanted = min_part_bytes * group.engine_block_tokens
            count = max(count, -(-wanted // (group.layers * group.page_bytes * hash_tokens)))
    return -(-count // step) * step
