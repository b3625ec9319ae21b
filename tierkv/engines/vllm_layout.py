"""vLLM's KV cache as the store sees it: its layer groups, and the pages in a worker's memory.

A layer group of the store is what shares one block table, one kind of attention and one size of page. vLLM's groups
may mix sizes; then one of them becomes several of the store's.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from tierkv.copier import LayerPages, PagedKV
from tierkv.engines.vllm_messages import LayerFacts, WorkerFacts
from tierkv.errors import LayoutError
from tierkv.layout import GroupKind, LayerGroup

if TYPE_CHECKING:
    from vllm.v1.kv_cache_interface import KVCacheConfig, KVCacheSpec


@dataclass(frozen=True)
class CacheGroup:
    """One layer group of the store. ``table``: which of vLLM's groups its block table belongs to."""

    table: int
    kind: GroupKind
    block_tokens: int
    window_tokens: int | None
    replicated: bool
    layers: tuple[str, ...]


def cache_groups_of(config: KVCacheConfig, context_ranks: int) -> tuple[CacheGroup, ...]:
    """``context_ranks``: over how many ranks the tokens of a block are spread. Raises ``LayoutError`` for what cannot
    be stored by the block: recurrent states, cross attention."""
    from vllm.v1.kv_cache_interface import UniformTypeKVCacheSpecs

    groups: list[CacheGroup] = []
    for table, group in enumerate(config.kv_cache_groups):
        if not group.enable_kv_transfer:
            continue
        spec = group.kv_cache_spec
        if not spec.prefix_cacheable:
            raise LayoutError(
                f"{type(spec).__name__} of {group.layer_names[0]} cannot be found by its prefix"
            )
        by_spec: dict[KVCacheSpec, list[str]] = {}
        if isinstance(spec, UniformTypeKVCacheSpecs):
            for name in group.layer_names:
                by_spec.setdefault(spec.kv_cache_specs[name], []).append(name)
        else:
            by_spec[spec] = list(group.layer_names)
        for its, names in by_spec.items():
            tokens = its.block_size * (context_ranks if its.dcp_sharded else 1)
            kind, window = _kind_of(its, names[0])
            groups.append(CacheGroup(table, kind, tokens, window, _is_replicated(its), tuple(names)))
    if not groups:
        raise LayoutError("the model keeps no KV cache that could be stored")
    return tuple(groups)


def _kind_of(spec: Any, layer: str) -> tuple[GroupKind, int | None]:
    """With the window in tokens, where it has one."""
    from vllm.v1.kv_cache_interface import (
        ChunkedLocalAttentionSpec,
        FullAttentionSpec,
        SlidingWindowSpec,
    )

    if isinstance(spec, SlidingWindowSpec):
        return GroupKind.WINDOW, int(spec.sliding_window)
    if isinstance(spec, ChunkedLocalAttentionSpec):
        return GroupKind.WINDOW, int(spec.attention_chunk_size)
    if isinstance(spec, FullAttentionSpec):
        return GroupKind.FULL, None
    raise LayoutError(f"layer {layer} keeps a {type(spec).__name__}: only attention is stored by the block")


def _is_replicated(spec: Any) -> bool:
    """Every rank holds the same bytes: one latent for all heads."""
    from vllm.v1.kv_cache_interface import MLAAttentionSpec, SlidingWindowMLASpec

    return isinstance(spec, MLAAttentionSpec | SlidingWindowMLASpec)


def layer_groups_of(groups: Sequence[CacheGroup], facts: WorkerFacts) -> tuple[LayerGroup, ...]:
    """The same for ``tierkv.layout``, with the sizes that a worker has found. Raises ``LayoutError``."""
    made = []
    for number, group in enumerate(groups):
        sizes = {facts.layers[name].page_bytes for name in group.layers if name in facts.layers}
        if len(sizes) != 1 or any(name not in facts.layers for name in group.layers):
            raise LayoutError(f"the pages of {group.layers[0]} and its like have {sorted(sizes)} bytes")
        made.append(
            LayerGroup(
                f"{number}-{group.kind.value}",
                group.kind,
                len(group.layers),
                sizes.pop(),
                group.block_tokens,
                group.window_tokens,
                group.replicated,
            )
        )
    return tuple(made)


def memory_of(
    caches: Mapping[str, Any], groups: Sequence[CacheGroup], num_blocks: int
) -> tuple[PagedKV, dict[str, LayerFacts]]:
    """A worker's tensors as pages, and what they look like. Raises ``LayoutError``."""
    facts: dict[str, LayerFacts] = {}
    found = []
    for group in groups:
        layers = []
        for name in group.layers:
            if name not in caches:
                raise LayoutError(f"the engine has registered no memory for {name}")
            pages, axis = _by_page(name, caches[name], num_blocks)
            layers.append(LayerPages((pages,), axis))
            shape = tuple(size for dim, size in enumerate(pages.shape) if dim != axis)
            size_bytes = pages.element_size()
            for size in shape:
                size_bytes *= size
            facts[name] = LayerFacts(shape, str(pages.dtype).removeprefix("torch."), size_bytes)
        found.append(tuple(layers))
    return PagedKV(tuple(found)), facts


def _by_page(name: str, tensor: Any, num_blocks: int) -> tuple[Any, int]:
    """A view of a layer's tensor in which one dimension counts the engine's blocks."""
    if isinstance(tensor, list | tuple):
        raise LayoutError(f"{name} keeps {len(tensor)} tensors, not one with keys and values")
    for axis in (0, 1):
        size = tensor.shape[axis] if tensor.dim() > axis else 0
        if (
            axis == 1 and tensor.shape[0] != 2
        ):  # keys and values before the pages: nothing else is known there
            continue
        if size == num_blocks:
            return _as_it_lies(tensor, axis)
        if size and size % num_blocks == 0:  # the kernel's blocks are smaller than the engine's
            return _as_it_lies(tensor.unflatten(axis, (num_blocks, size // num_blocks)), axis)
    raise LayoutError(f"{name} has the shape {tuple(tensor.shape)}: no dimension counts {num_blocks} blocks")


def _as_it_lies(pages: Any, axis: int) -> tuple[Any, int]:
    """The dimensions of a page in the order of its bytes. vLLM's views have heads before tokens, whichever comes first
    in memory; what a page means is not our business, and read against its order it would be many short runs."""
    if pages.select(axis, 0).is_contiguous():
        return pages, axis
    inside = sorted((dim for dim in range(pages.dim()) if dim != axis), key=pages.stride, reverse=True)
    return pages.permute(axis, *inside), 0


def kernels_of(layers: Mapping[str, Any], names: Iterable[str]) -> str:
    """Backend and instruction set of the attention layers: what decides how the inside of a page is laid out."""
    told = set()
    for name in names:
        layer = layers.get(name)
        backend = getattr(layer, "attn_backend", None)
        told.add(f"{backend.get_name() if backend is not None else '?'}/{getattr(layer, 'isa', '')}")
    return ",".join(sorted(told))
