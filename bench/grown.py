"""A store with a great many blocks and hardly any bytes: what an index weighs does not hang on what blocks hold."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from bench.names import chain_of, namespace_for
from tierkv.assembly import open_store
from tierkv.client import Client
from tierkv.keys import Chain
from tierkv.units import ALIGN_BYTES, MIB, align_up

PAYLOAD_BYTES = 64
AT_ONCE = 256


@contextmanager
def open_unfilled(blocks: int) -> Iterator[Client]:
    """A store with room for so many blocks, whose memory nobody touches."""
    capacity_bytes = align_up(blocks * ALIGN_BYTES, 64 * MIB)
    client = open_store(
        host_capacity=capacity_bytes, host_region=64 * MIB, host_populate=False, limits_max_blocks=blocks
    )
    try:
        yield client
    finally:
        client.close()


def grow(client: Client, blocks: int, seed: int) -> Chain:
    """Stores a prompt, as an engine does it that writes into the slots itself; only that nothing is written, and so no
    page of the arena comes into being."""
    namespace = client.open_namespace(namespace_for(PAYLOAD_BYTES).spec).namespace
    chain = chain_of(namespace, blocks, seed=seed)
    for first in range(0, blocks, AT_ONCE):
        draft = client.reserve(chain, first=first, count=min(AT_ONCE, blocks - first))
        if draft is None:
            raise RuntimeError(f"no room for block {first} of prompt {seed}")
        client.commit(draft.seal(), chain)
    return chain
