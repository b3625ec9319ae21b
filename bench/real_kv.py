"""Keys and values of a real model on a real text, in blocks as the connector stores them: SmolLM2, the demo's text."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

from bench.harness import Unavailable
from tierkv.errors import MissingDependency
from tierkv.layout import LayerGroup, Layout

BLOCK_TOKENS = 128
"""From so many tokens on the scales of int8 cost less than two percent."""

TEXT = Path(__file__).parent.parent / "tierkv" / "demo" / "document.txt"


@cache
def model() -> Any:
    """A ``tierkv.demo.model.DemoModel``, loaded once. Raises ``Unavailable`` where it is not installed."""
    try:
        from tierkv.demo.model import load_model

        return load_model(lambda text: None)
    except (MissingDependency, ImportError) as error:
        raise Unavailable(str(error)) from error


def text_tokens(count: int) -> list[int]:
    """The first tokens of the text, again from its start where it ends."""
    tokens: list[int] = model().tokenizer(TEXT.read_text())["input_ids"]
    return (tokens * (count // len(tokens) + 1))[:count]


def cache_of(tokens: list[int]) -> Any:
    """A cache with these tokens computed."""
    import torch

    from tierkv.engines.transformers_pages import given, new_cache

    made = new_cache(model().model.config)
    with torch.inference_mode():
        model().model(torch.tensor([tokens]), **given(model().model, made))
    return made


def layout_of_model(dtype: str) -> Layout:
    """The layout of the connector's blocks, were the model to compute in ``dtype``."""
    from dataclasses import replace

    from tierkv.engines.transformers_pages import layout_of, shape_of
    from tierkv.layout import ITEM_BYTES

    shape = shape_of(cache_of([1]))
    return layout_of(replace(shape, dtype=dtype, itemsize_bytes=ITEM_BYTES[dtype]), BLOCK_TOKENS, "bench")


def block_bytes(cached: Any, block: int, dtype: str) -> bytes:
    """One block as it lies in a slot: [layer, keys | values, head, token, dim]."""
    import torch

    span = slice(block * BLOCK_TOKENS, (block + 1) * BLOCK_TOKENS)
    tensors = [
        tensor[0, :, span].to(getattr(torch, dtype)).contiguous().view(torch.uint8).numpy().tobytes()
        for layer in cached.layers
        for tensor in (layer.keys, layer.values)
    ]
    return b"".join(tensors)


@cache
def blocks(count: int, dtype: str = "bfloat16") -> tuple[tuple[bytes, ...], LayerGroup]:
    """``count`` blocks of the text, and the layer group that they belong to. Raises ``Unavailable``."""
    model()
    layout = layout_of_model(dtype)
    cached = cache_of(text_tokens(count * BLOCK_TOKENS))
    [group] = layout.groups
    return tuple(block_bytes(cached, number, dtype) for number in range(count)), group
