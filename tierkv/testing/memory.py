"""A blob tier that is a dict: the honest reference of the contract, and the colder tier of simulations."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np

from tierkv import frame
from tierkv.clock import Deadline
from tierkv.frame import HEADER_BYTES, FrameHeader
from tierkv.ids import BlockKey, KeyPrefix
from tierkv.tier import ClearResult, DoneCallback, Item, Outcome, Presence, TierCaps, Usage, Want
from tierkv.units import GIB, MIB


@dataclass(slots=True)
class MemoryStorage:
    """What outlives a ``MemoryBlobTier``, as a directory outlives a process: frames by key, the oldest first."""

    frames: dict[BlockKey, bytes] = field(default_factory=dict)


class MemoryBlobTier:
    """Keeps each block as one ``bytes``: 512 bytes of header, then the payload. Thread-safe, waits for nothing.

    Given a ``storage`` it is persistent: a tier made later over the same storage finds the blocks. With
    ``evicts_itself`` it drops the block that was written longest ago instead of answering ``FULL``.
    """

    name = "memory"

    def __init__(
        self,
        capacity_bytes: int = GIB,
        *,
        max_block_bytes: int = 16 * MIB,
        workers: int = 4,
        storage: MemoryStorage | None = None,
        evicts_itself: bool = False,
    ) -> None:
        persistent = storage is not None
        self.caps = TierCaps(
            persistent=persistent,
            scannable=persistent,
            evicts_itself=evicts_itself,
            workers=workers,
            max_block_bytes=max_block_bytes,
        )
        self.storage = storage if storage is not None else MemoryStorage()
        self._capacity_bytes = capacity_bytes
        self._used_bytes = 0
        self._lock = threading.Lock()

    def start(self) -> None:
        with self._lock:
            self._used_bytes = sum(map(len, self.storage.frames.values()))

    def close(self, deadline: Deadline) -> None:
        pass

    def probe(self, keys: Sequence[BlockKey], deadline: Deadline) -> list[Presence]:
        with self._lock:
            return [Presence.PRESENT if key in self.storage.frames else Presence.ABSENT for key in keys]

    def get_into(self, wants: Sequence[Want], deadline: Deadline, on_done: DoneCallback) -> None:
        for i, want in enumerate(wants):
            on_done(i, _out_of_time(deadline) or self._read(want))

    def put_from(self, items: Sequence[Item], deadline: Deadline, on_done: DoneCallback) -> None:
        for i, item in enumerate(items):
            on_done(i, _out_of_time(deadline) or self._write(item))

    def delete(self, keys: Sequence[BlockKey]) -> None:
        with self._lock:
            for key in keys:
                self._forget(key)

    def clear(self, prefix: KeyPrefix, deadline: Deadline) -> ClearResult:
        with self._lock:
            found = [key for key in self.storage.frames if key.startswith(prefix)]
            for key in found:
                self._forget(key)
        return ClearResult(removed=len(found), complete=True)

    def scan(self) -> Iterator[FrameHeader]:
        if not self.caps.scannable:
            return
        with self._lock:
            found = list(self.storage.frames.values())
        for raw in found:
            yield frame.unpack(raw)

    def usage(self) -> Usage:
        with self._lock:
            free = (
                self._capacity_bytes if self.caps.evicts_itself else self._capacity_bytes - self._used_bytes
            )
            return Usage(
                capacity_bytes=self._capacity_bytes,
                used_bytes=self._used_bytes,
                blocks=len(self.storage.frames),
                largest_free_bytes=max(0, min(free, self.caps.max_block_bytes) - HEADER_BYTES),
            )

    def status(self) -> dict[str, object]:
        return {"medium": "dict", "persistent": self.caps.persistent}

    def _read(self, want: Want) -> Outcome:
        with self._lock:
            raw = self.storage.frames.get(want.key)
        if raw is None:
            return Outcome.MISS
        stored_bytes = len(raw) - HEADER_BYTES
        if not 0 <= stored_bytes <= len(want.payload):
            return Outcome.CORRUPT
        _copy(want.header, raw[:HEADER_BYTES])
        _copy(want.payload, memoryview(raw)[HEADER_BYTES:])
        want.stored_bytes = stored_bytes
        return Outcome.DONE

    def _write(self, item: Item) -> Outcome:
        needed = HEADER_BYTES + item.stored_bytes
        if needed > min(self.caps.max_block_bytes, self._capacity_bytes):
            return Outcome.FULL
        raw = b"".join((item.header[:HEADER_BYTES], item.payload[: item.stored_bytes]))
        with self._lock:
            growth = needed - len(self.storage.frames.get(item.key, b""))
            if not self.caps.evicts_itself and self._used_bytes + growth > self._capacity_bytes:
                return Outcome.FULL
            self._forget(item.key)
            while self._used_bytes + needed > self._capacity_bytes:
                self._forget(next(iter(self.storage.frames)))
            self.storage.frames[item.key] = raw
            self._used_bytes += needed
        return Outcome.DONE

    def _forget(self, key: BlockKey) -> None:
        self._used_bytes -= len(self.storage.frames.pop(key, b""))


def _out_of_time(deadline: Deadline) -> Outcome | None:
    if deadline.cancelled:
        return Outcome.CANCELLED
    return Outcome.TIMEOUT if deadline.over() else None


def _copy(target: memoryview, source: bytes | memoryview) -> None:
    # numpy lets other threads run while it copies; assignment to a memoryview does not.
    np.copyto(np.frombuffer(target, dtype=np.uint8)[: len(source)], np.frombuffer(source, dtype=np.uint8))
