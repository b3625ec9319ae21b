"""The paged view of a HuggingFace ``DynamicCache``: its own tensors, seen as blocks.

A layer of a ``DynamicCache`` keeps keys and values as ``[1, kv_heads, tokens, head_dim]``. The same memory seen as
``[kv_heads, blocks, block_tokens, head_dim]`` is paged: page b is ``[kv_heads, block_tokens, head_dim]``,
with a stride between the heads. The copier gathers from and scatters into such views, so that no byte is copied
between the model's cache and a host slot but once. In a slot a block lies as ``[layer, keys|values, kv_heads,
block_tokens, head_dim]``.

Nothing here computes or stores; ``tierkv.engines.transformers`` does. torch and transformers load on first use.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from tierkv.copier import LayerPages, PagedKV
from tierkv.errors import LayoutError
from tierkv.layout import GroupKind, LayerGroup, Layout, Segment, engine_blocks_for

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import DynamicCache, PreTrainedConfig, PreTrainedModel

BLOCK_STEP_TOKENS = 16
"""Blocks are a multiple of this many tokens."""


@dataclass(frozen=True)
class LayerShape:
    """What one layer keeps of each token. Keys and values may differ in width."""

    kv_heads: int
    key_dim: int
    value_dim: int
    window_tokens: int | None = None
    """The layer looks back no further than this; ``None``: at everything."""

    @property
    def elements(self) -> int:
        """Numbers a token."""
        return self.kv_heads * (self.key_dim + self.value_dim)


@dataclass(frozen=True)
class CacheShape:
    """The layers of a model's cache, in order. ``dtype`` is torch's name for it (``"bfloat16"``)."""

    layers: tuple[LayerShape, ...]
    dtype: str
    itemsize_bytes: int

    @property
    def groups(self) -> tuple[tuple[int, ...], ...]:
        """The layer groups: numbers of the layers that have the same page size and the same window."""
        found: dict[tuple[int, int | None], list[int]] = {}
        for number, layer in enumerate(self.layers):
            found.setdefault((layer.elements, layer.window_tokens), []).append(number)
        return tuple(map(tuple, found.values()))

    @property
    def token_bytes(self) -> int:
        """Bytes of one token over all layers."""
        return sum(layer.elements for layer in self.layers) * self.itemsize_bytes


def shape_of(cache: DynamicCache) -> CacheShape:
    """The shape of a cache in which at least one token has been computed.

    It is read from the cache that the model itself fills, since configurations name these numbers in many ways. Raises
    ``LayoutError`` for layers that are neither full nor sliding-window attention (recurrent states, quantised, static
    or offloaded caches) and for more than one sequence.
    """
    if not cache.layers or not all(layer.is_initialized for layer in map(_supported, cache.layers)):
        raise LayoutError("the cache is empty: compute a token first")
    tensors = [(layer.keys, layer.values) for layer in cache.layers]
    dtypes = {tensor.dtype for pair in tensors for tensor in pair}
    if len(dtypes) > 1:
        raise LayoutError(f"keys and values are of several dtypes: {sorted(map(str, dtypes))}")
    dtype = dtypes.pop()
    if any(keys.shape[0] != 1 for keys, _ in tensors):
        raise LayoutError(
            f"the cache holds {tensors[0][0].shape[0]} sequences, blocks are cut from one at a time"
        )
    layers = tuple(
        LayerShape(keys.shape[1], keys.shape[3], values.shape[3], getattr(layer, "sliding_window", None))
        for layer, (keys, values) in zip(cache.layers, tensors, strict=True)
    )
    return CacheShape(layers, str(dtype).removeprefix("torch."), dtype.itemsize)


def computes_in(model: PreTrainedModel) -> str:
    """The numbers of its weights, and what they are cast to just now: its cache has one of them."""
    import torch

    kind, name = model.device.type, str(model.dtype).removeprefix("torch.")
    if not torch.is_autocast_enabled(kind):
        return name
    return f"{name} under autocast to {str(torch.get_autocast_dtype(kind)).removeprefix('torch.')}"


def block_tokens_for(shape: CacheShape) -> int:
    """The shortest block, in tokens, whose parts are all worth an I/O of their own."""
    return BLOCK_STEP_TOKENS * engine_blocks_for(_layer_groups(shape, BLOCK_STEP_TOKENS), BLOCK_STEP_TOKENS)


def layout_of(shape: CacheShape, block_tokens: int, layout_id: str) -> Layout:
    """Blocks of ``block_tokens`` tokens, each one page in every layer."""
    return Layout(
        layout_id=layout_id,
        dtype=shape.dtype,
        hash_tokens=block_tokens,
        groups=tuple(_layer_groups(shape, block_tokens)),
    )


def new_cache(config: PreTrainedConfig) -> DynamicCache:
    """An empty cache that keeps all tokens, those too that have left a layer's window: else their blocks would be gone
    before they can be offloaded."""
    from transformers import DynamicCache

    cache = DynamicCache(config=config)
    cache.activate_past_recording()
    return cache


def given(model: Any, cache: DynamicCache) -> dict[str, DynamicCache]:
    """The argument by which a model takes its cache: its name differs between releases of transformers."""
    named = "cache" in inspect.signature(model.forward).parameters
    return {"cache" if named else "past_key_values": cache}


def blank_cache(
    config: PreTrainedConfig, shape: CacheShape, num_tokens: int, device: Any = "cpu"
) -> DynamicCache:
    """A cache with room for exactly ``num_tokens`` tokens, its memory not yet written: onboard into its ``pages_of``,
    then give it to the model, which goes on at token ``num_tokens``.

    Raises ``LayoutError`` when ``config`` makes other layers than ``shape`` has.
    """
    import torch

    cache = new_cache(config)
    dtype = getattr(torch, shape.dtype)
    if len(cache.layers) != len(shape.layers):
        raise LayoutError(
            f"the configuration makes {len(cache.layers)} layers, the cache had {len(shape.layers)}"
        )
    for layer, wanted in zip(map(_supported, cache.layers), shape.layers, strict=True):
        if getattr(layer, "sliding_window", None) != wanted.window_tokens:
            raise LayoutError(
                f"a layer {layer!r} where the cache had a window of {wanted.window_tokens} tokens"
            )
        keys = torch.empty((1, wanted.kv_heads, num_tokens, wanted.key_dim), dtype=dtype, device=device)
        values = torch.empty((1, wanted.kv_heads, num_tokens, wanted.value_dim), dtype=dtype, device=device)
        layer.lazy_initialization(keys, values)
        _set_tensors(layer, keys, values)
    return cache


def settle(device: Any) -> None:
    """Waits until a GPU is through with what it was given so far. Memory that was made just now may be another tensor's
    that the GPU still reads or writes: who writes to it on another stream, as a copier does, has to wait for that."""
    if device.type == "cuda":
        import torch

        torch.cuda.current_stream(device).synchronize()


def pages_of(cache: DynamicCache, shape: CacheShape, block_tokens: int) -> PagedKV:
    """The full blocks of a cache as pages; page i is block i. Views: writing them writes the cache.

    They stay valid while the model computes on (a ``DynamicCache`` grows into new tensors and leaves the old ones
    alone) and keep the tensors that they show alive. Raises ``LayoutError`` when the cache is not of this shape or has
    lost tokens that left a window (see ``new_cache``).
    """
    tokens = cache.get_seq_length()
    full = tokens - tokens % block_tokens

    def pages(number: int) -> LayerPages:
        layer = cache.layers[number]
        return LayerPages(
            tuple(_blocks(tensor, tokens, full, block_tokens) for tensor in (layer.keys, layer.values)), 1
        )

    if len(cache.layers) != len(shape.layers):
        raise LayoutError(f"a cache of {len(cache.layers)} layers, {len(shape.layers)} were declared")
    return PagedKV(tuple(tuple(map(pages, group)) for group in shape.groups))


def cut_cache(cache: DynamicCache, num_tokens: int) -> None:
    """Shortens a cache to its first ``num_tokens`` tokens; a longer number leaves it as it is.

    Unlike ``DynamicCache.crop`` this keeps what lies before a window.
    """
    for layer in map(_supported, cache.layers):
        if layer.is_initialized:
            _set_tensors(layer, layer.keys[:, :, :num_tokens], layer.values[:, :, :num_tokens])


def _layer_groups(shape: CacheShape, block_tokens: int) -> Sequence[LayerGroup]:
    return [_layer_group(shape, number, group, block_tokens) for number, group in enumerate(shape.groups)]


def _layer_group(shape: CacheShape, number: int, members: Sequence[int], block_tokens: int) -> LayerGroup:
    layer = shape.layers[members[0]]
    return LayerGroup(
        name=f"{number}-full" if layer.window_tokens is None else f"{number}-window",
        kind=GroupKind.FULL if layer.window_tokens is None else GroupKind.WINDOW,
        layers=len(members),
        page_bytes=layer.elements * shape.itemsize_bytes * block_tokens,
        engine_block_tokens=block_tokens,
        window_tokens=layer.window_tokens,
        inside=tuple(
            Segment(layer.kv_heads, block_tokens, dim) for dim in (layer.key_dim, layer.value_dim) if dim
        ),
    )


def _supported(layer: Any) -> Any:
    """The layer, if its keys and values are all that it remembers."""
    from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer

    # Exact types: a subclass keeps more (an index, a quantised part, a convolution's state) that would be lost.
    if type(layer) not in (DynamicLayer, DynamicSlidingWindowLayer):
        raise LayoutError(
            f"a cache layer of type {type(layer).__name__}: only full and sliding attention can be cut"
        )
    return layer


def _set_tensors(layer: Any, keys: Tensor, values: Tensor) -> None:
    layer.keys, layer.values = keys, values
    if hasattr(layer, "cumulative_length"):
        layer.cumulative_length = keys.shape[2]


def _blocks(tensor: Tensor, tokens: int, full_tokens: int, block_tokens: int) -> Tensor:
    """``[1, heads, tokens, dim]`` as ``[heads, blocks, block_tokens, dim]``, the rest of the tokens left out."""
    if tensor.shape[0] != 1 or tensor.shape[2] != tokens:
        raise LayoutError(
            f"keys or values of shape {tuple(tensor.shape)} in a cache of {tokens} tokens of one sequence"
        )
    return tensor[0, :, :full_tokens].unflatten(1, (full_tokens // block_tokens, block_tokens))
