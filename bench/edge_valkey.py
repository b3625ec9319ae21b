"""Rows ``valkey_get_cpu`` and ``valkey_set_cpu``: the client's CPU for a block from or to a real server.

Both sides speak to the same server over the same transport, one block in flight or a pipelined batch as each thinks
best, on the same buffers, in the calling thread. Every block that was read is verified as the store does it; for every
block that is written the frame is made, with the checksum of its bytes. The bare client checksums as well.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Literal

import numpy as np

from bench.harness import Reach, Row, Sample, Settings, Sides, Worst
from bench.limit_valkey import BareClient
from bench.memory import Blocks, require_equal
from bench.names import chain_of, header_for, keys_of, namespace_for
from bench.valkey_server import running_server
from tierkv import frame
from tierkv.clock import Deadline, SystemClock
from tierkv.ids import BlockKey
from tierkv.tier import BlobTier, Item, Outcome, Want
from tierkv.units import ALIGN_BYTES, MIB

CALL_BYTES = 8 * MIB
TIMEOUT_S = 60.0

Operation = Literal["get", "set"]
Transport = Literal["tcp", "unix"]


class ValkeyEdge:
    """One operation over one transport."""

    def __init__(self, operation: Operation, transport: Transport) -> None:
        self._operation: Operation = operation
        self._transport: Transport = transport
        self.name = f"valkey_{operation}_cpu_{transport}"
        self.rows = (
            Row(
                self.name,
                "cpu_us",
                "us/block",
                f"CPU of the client's process for {operation.upper()} of a 1 MiB block over {transport}, "
                f"{'verified' if operation == 'get' else 'checksummed and framed'}; "
                "limit: a bare client on one socket that also checksums",
                Reach("ratio", "<=", 1.25),
            ),
            Row(
                f"valkey_{operation}_time_{transport}",
                "wall_us",
                "us/block",
                "wall time of the same runs, one thread on each side",
            ),
        )

    @contextmanager
    def open(self, settings: Settings) -> Iterator[Sides]:
        with running_server() as server:
            blocks = Blocks(settings.memory_blocks, settings.block_bytes)
            tier = open_valkey(server.url(self._transport))
            tier.start()
            try:
                with server.connect(self._transport) as connection:
                    ours = _Ours(tier, blocks)
                    limit = _Limit(BareClient(connection, settings.block_bytes), blocks, ours.headers)
                    # Both sides' blocks are in the server before anything counts, and both overwrite from then on.
                    ours.put()
                    limit.put()
                    sides = (ours.get, limit.get) if self._operation == "get" else (ours.put, limit.put)
                    timed = [_timed(side, len(blocks)) for side in sides]
                    yield Sides(timed[0], timed[1], lambda: _check(ours, limit, blocks))
            finally:
                tier.close(Deadline(SystemClock(), TIMEOUT_S))


VALKEY_GET_CPU = Worst("valkey_get_cpu", ("valkey_get_cpu_tcp", "valkey_get_cpu_unix"))
VALKEY_SET_CPU = Worst("valkey_set_cpu", ("valkey_set_cpu_tcp", "valkey_set_cpu_unix"))


def open_valkey(url: str) -> BlobTier:
    from tierkv.tiers.valkey import ValkeyTier

    return ValkeyTier(url)


class _Ours:
    """All blocks through the tier, in calls of at most 8 MiB, as one worker of the store makes them."""

    def __init__(self, tier: BlobTier, blocks: Blocks) -> None:
        self._tier = tier
        self._blocks = blocks
        self.headers = Blocks(len(blocks), ALIGN_BYTES)
        self._chain = chain_of(namespace_for(blocks.block_bytes), len(blocks))
        self._keys: Sequence[BlockKey] = keys_of(self._chain)
        self._clock = SystemClock()
        size = max(1, CALL_BYTES // blocks.block_bytes)
        self._calls = [range(start, min(start + size, len(blocks))) for start in range(0, len(blocks), size)]

    def get(self) -> None:
        for call in self._calls:
            wants = [Want(self._keys[i], self.headers.views[i], self._blocks.views[i]) for i in call]

            def on_done(index: int, outcome: Outcome, wants: Sequence[Want] = wants) -> None:
                want = wants[index]
                _require_done(outcome)
                frame.verify(frame.unpack(want.header), want.key, want.payload[: want.stored_bytes])

            self._tier.get_into(wants, Deadline(self._clock, TIMEOUT_S), on_done)

    def put(self) -> None:
        for call in self._calls:
            items = [self._item(i) for i in call]
            self._tier.put_from(
                items, Deadline(self._clock, TIMEOUT_S), lambda index, outcome: _require_done(outcome)
            )

    def _item(self, i: int) -> Item:
        key, payload, header = self._keys[i], self._blocks.views[i], self.headers.views[i]
        total = frame.checksum(payload)
        header[: frame.HEADER_BYTES] = frame.pack(header_for(self._chain, i, key, len(payload), total))
        return Item(key, header, payload, len(payload))


class _Limit:
    """All blocks through the bare client, one in flight: the cheapest way on one socket, since what was just received
    is still in the cache when it is checksummed."""

    def __init__(self, client: BareClient, blocks: Blocks, headers: Blocks) -> None:
        self._client = client
        self._blocks = blocks
        self._headers = headers
        self._keys = [b"bare:%059d" % i for i in range(len(blocks))]

    def get(self) -> None:
        for i, key in enumerate(self._keys):
            self._client.get([key], self._blocks.views[i : i + 1])

    def put(self) -> None:
        for i, key in enumerate(self._keys):
            self._client.set([key], self._headers.views[i : i + 1], self._blocks.views[i : i + 1])


def _timed(move: Callable[[], None], blocks: int) -> Callable[[], Sample]:
    def run() -> Sample:
        start_s, cpu_start_s = time.perf_counter(), time.process_time()
        move()
        elapsed_s, cpu_s = time.perf_counter() - start_s, time.process_time() - cpu_start_s
        return {"cpu_us": cpu_s * 1e6 / blocks, "wall_us": elapsed_s * 1e6 / blocks}

    return run


def _check(ours: _Ours, limit: _Limit, blocks: Blocks) -> None:
    """Each side brings every byte back into poisoned buffers; the buffers then hold the patterns again."""
    for side, get in (("the tier", ours.get), ("the bare client", limit.get)):
        blocks.poison()
        get()
        for i, view in enumerate(blocks.views):
            require_equal(view, blocks.pattern(i), f"block {i} through {side}")
    for i, array in enumerate(blocks.arrays):
        np.copyto(array, blocks.pattern(i))


def _require_done(outcome: Outcome) -> None:
    if outcome is not Outcome.DONE:
        raise RuntimeError(f"the tier answered {outcome.value}")
