"""A namespace and keys for measurements."""

from __future__ import annotations

import numpy as np

from tierkv.frame import FrameHeader
from tierkv.ids import BlockKey
from tierkv.keys import Chain, Namespace, NamespaceSpec, Weights
from tierkv.layout import GroupKind, LayerGroup, Layout

BLOCK_TOKENS = 16


def namespace_for(block_bytes: int) -> Namespace:
    """One full-attention group on one rank whose block of 16 tokens has ``block_bytes``."""
    group = LayerGroup("attention", GroupKind.FULL, 1, block_bytes, BLOCK_TOKENS)
    layout = Layout("bench", "uint8", BLOCK_TOKENS, (group,))
    return Namespace(NamespaceSpec(Weights("revision", "bench"), layout, "bench"))


def chain_of(namespace: Namespace, blocks: int, *, seed: int = 0) -> Chain:
    """A prompt of ``blocks`` full blocks and one token more."""
    count = blocks * namespace.layout.block_tokens + 1
    return namespace.chain(np.random.default_rng(seed).integers(0, 128_000, count, dtype=np.int32))


def keys_of(chain: Chain) -> list[BlockKey]:
    return [chain.namespace.block_key(block_hash, 0) for block_hash in chain.hashes]


def header_for(chain: Chain, index: int, key: BlockKey, stored_bytes: int, checksum: int) -> FrameHeader:
    """The frame header that the store would put before block ``index``, stored raw."""
    return FrameHeader(
        key=key,
        namespace=chain.namespace.digest,
        block_hash=chain.hashes[index],
        parent_hash=chain.parent_of(index),
        depth=index,
        part=0,
        expected_parts=1,
        epoch=0,
        expires_ms=0,
        codec=0,
        decoded_bytes=stored_bytes,
        stored_bytes=stored_bytes,
        decoded_checksum=checksum,
        stored_checksum=checksum,
    )
