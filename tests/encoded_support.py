"""Pages of keys and values as engines lay them out, and what the codecs of the edges make of the same blocks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from tierkv.codec import codec_named, fitted
from tierkv.copier import LayerPages, PagedKV
from tierkv.layout import GroupKind, LayerGroup, Layout, Segment

FRONT_BYTES, SEGMENT_BYTES = 16, 12
"""Of a block that an edge encoded: see ``tierkv.codec_scaled``."""


@dataclass(frozen=True)
class Case:
    """How the pages of one layer lie: arrays, each of one or more segments."""

    name: str
    arrays: tuple[tuple[Segment, ...], ...]
    axis: int = 0
    """1: heads outside of the pages, as a ``DynamicCache`` has them."""

    @property
    def inside(self) -> tuple[Segment, ...]:
        return tuple(segment for array in self.arrays for segment in array)


CASES = (
    Case("keys and values apart, heads outside", ((Segment(2, 16, 8),), (Segment(2, 16, 8),)), 1),
    Case("of different width", ((Segment(3, 16, 24),), (Segment(3, 16, 5),)), 1),
    Case("a latent", ((Segment(1, 16, 36),),)),
    Case("fused", ((Segment(2, 32, 12),),)),
    Case("fused, two segments in one array", ((Segment(2, 7, 3), Segment(1, 7, 9)),)),
    Case("odd", ((Segment(3, 5, 7),), (Segment(1, 1, 1),)), 0),
    Case("one token", ((Segment(4, 1, 64),),)),
)


def layout_of(case: Case, dtype: str, layers: int) -> Layout:
    tokens = case.inside[0].tokens
    size = sum(segment.numbers for segment in case.inside) * getattr(torch, dtype).itemsize
    group = LayerGroup("g", GroupKind.FULL, layers, size, tokens, inside=case.inside)
    return Layout(layout_id="test", dtype=dtype, hash_tokens=tokens, groups=(group,))


def pages_of(case: Case, dtype: str, layers: int, blocks: int, seed: int = 0, device: str = "cpu") -> PagedKV:
    """Numbers like those of a model: channels of very different sizes."""
    dice = torch.Generator().manual_seed(seed)

    def array(segments: tuple[Segment, ...]) -> Any:
        pieces = []
        for each in segments:
            loud = torch.exp(2 * torch.randn(each.inner, generator=dice))
            shape = (blocks, each.outer, each.tokens, each.inner)
            pieces.append((torch.randn(shape, generator=dice) * loud).reshape(blocks, -1))
        flat = torch.cat(pieces, 1)
        if len(segments) == 1:
            [only] = segments
            flat = flat.reshape(blocks, only.outer, only.tokens, only.inner)
            if case.axis:
                flat = flat.transpose(0, 1).contiguous()
        return flat.to(getattr(torch, dtype)).to(device)

    return PagedKV((tuple(LayerPages(tuple(map(array, case.arrays)), case.axis) for _ in range(layers)),))


def blank_like(kv: PagedKV) -> PagedKV:
    return PagedKV(
        tuple(
            tuple(
                LayerPages(tuple(torch.full_like(array, -7) for array in layer.arrays), layer.axis)
                for layer in group
            )
            for group in kv.groups
        )
    )


def page_bytes(layer: LayerPages, page: int) -> bytes:
    """One page as a slot has it."""
    pieces = [array.movedim(layer.axis, 0)[page].contiguous().flatten() for array in layer.arrays]
    return b"".join(piece.cpu().view(torch.uint8).numpy().tobytes() for piece in pieces)


def block_bytes(kv: PagedKV, page: int, group: int = 0) -> bytes:
    return b"".join(page_bytes(layer, page) for layer in kv.groups[group])


def by_an_edge(codec: str, layout: Layout, plain: bytes) -> tuple[bytes, bytes]:
    """(what is stored behind the front: scales and numbers; what comes back)."""
    [group] = layout.groups
    made = fitted(codec_named(codec), group, layout.dtype)
    stored, back = bytearray(4 * len(plain) + 65536), bytearray(len(plain))
    length = made.encode_into(memoryview(plain), memoryview(stored))
    assert length is not None
    made.decode_into(memoryview(stored)[:length], memoryview(back))
    return bytes(stored[FRONT_BYTES + SEGMENT_BYTES * len(group.inside) : length]), bytes(back)


def in_the_order_of_an_edge(encoded: PagedKV, page: int, scale_bytes: int, numbers: int) -> bytes:
    """An encoded block with the scales of all layers before the numbers of all layers."""
    pages = [page_bytes(layer, page) for layer in encoded.groups[0]]
    assert all(not any(each[scale_bytes + numbers :]) for each in pages), "what fills a page up is not zero"
    scales = [each[:scale_bytes] for each in pages]
    return b"".join(scales + [each[scale_bytes : scale_bytes + numbers] for each in pages])
