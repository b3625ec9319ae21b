"""What a tier is: two protocols, and the words they speak.

Slot tiers (``hbm``, ``host``) hand out numbered slots of memory. Blob tiers (``nvme``, ``valkey``) map a key to bytes,
in batches, into and out of memory that the caller owns. A blob tier never sees tokens, models or GPUs.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from tierkv.clock import Deadline
from tierkv.frame import FrameHeader
from tierkv.ids import BlockKey, KeyPrefix, Slot


class Outcome(enum.Enum):
    """How the work on one block ended. Only ``DONE`` means that bytes are where they should be."""

    DONE = "done"
    MISS = "miss"
    """A read found nothing under this key."""
    FULL = "full"
    """A write found no room, or the block is larger than the tier takes."""
    CORRUPT = "corrupt"
    """Bytes came back that do not prove themselves."""
    TIMEOUT = "timeout"
    UNAVAILABLE = "unavailable"
    """The tier is down, read-only, or answered with an error that says nothing about the block."""
    CANCELLED = "cancelled"


class Presence(enum.Enum):
    """What a probe knows of one key."""

    ABSENT = "absent"
    PENDING = "pending"
    PRESENT = "present"
    UNKNOWN = "unknown"
    """The tier could not be asked in time. Callers treat it as ``ABSENT``."""


@dataclass(frozen=True, slots=True)
class TierCaps:
    """What a blob tier can do, so that the store need not ask by trying."""

    persistent: bool
    """Blocks outlive the process."""
    scannable: bool
    """``scan`` finds after a restart what is stored."""
    evicts_itself: bool
    """The tier drops blocks on its own; what is known of its residency is a hint."""
    workers: int
    """Threads of the store's pool that may be inside this tier at once."""
    max_block_bytes: int
    """A block (header and payload) above this is refused."""


@dataclass(slots=True)
class Want:
    """One block to read. All buffers belong to the caller and start on a 4096-byte boundary.

    ``header`` is one writable page of 4096 bytes, ``payload`` a writable buffer whose length is a multiple of 4096.
    Before ``DONE`` the tier has put the frame header into ``header`` (its first 512 bytes are what counts), the stored
    bytes into the front of ``payload``, and their number into ``stored_bytes``. Anything longer than ``payload`` is
    ``CORRUPT``. The tier need not verify: the store does, always.
    """

    key: BlockKey
    header: memoryview
    payload: memoryview
    stored_bytes: int = 0


@dataclass(slots=True)
class Item:
    """One block to write.

    ``header`` is one page of 4096 bytes whose first 512 hold the packed frame header, ``payload`` a buffer of a
    multiple of 4096 bytes whose first ``stored_bytes`` are the block; the rest is padding (it may be written to a
    disk, it means nothing). Both start on a 4096-byte boundary.
    """

    key: BlockKey
    header: memoryview
    payload: memoryview
    stored_bytes: int
    ttl_s: float | None = None
    """Seconds until the block may be forgotten; ``None`` leaves it to the tier."""


@dataclass(frozen=True, slots=True)
class Usage:
    """How full a tier is."""

    capacity_bytes: int
    used_bytes: int
    blocks: int
    largest_free_bytes: int
    """A block of up to this many stored bytes (plus header) finds room now."""
    writable: bool = True
    """False once the tier has gone read-only or is unavailable."""
    read_only: bool = False
    """The tier takes nothing before its next start, or before somebody frees space: a caller waits for it in vain."""


@dataclass(frozen=True, slots=True)
class ClearResult:
    """What ``clear`` did in one tier."""

    removed: int
    """Blocks that cannot be found any more."""
    complete: bool
    """True only when nothing under the prefix can be found any more."""
    detail: str = ""
    kept: tuple[str, ...] = field(default=())
    """What still holds bytes, in words (leases by owner, an unreachable server)."""


DoneCallback = Callable[[int, Outcome], None]
"""``on_done(i, outcome)``: block i of the batch is finished. Called once for each block, in any order, from the thread
that called the tier, before the call returns. It may take as long as a checksum of the block."""


class BlobTier(Protocol):
    """Maps keys to bytes. Blocking and thread-safe; called from the store's worker threads for this tier.

    A call handles a batch of at most 8 MiB or one block. Each block is reported exactly once through ``on_done``. When
    a call has returned, the tier no longer touches the buffers, whatever happened. Calls end within their deadline
    (a kernel that does not return from a disk read excepted) and look at ``deadline.cancelled`` between blocks. No call
    raises for what can happen in operation: that is an ``Outcome``.
    """

    name: str
    caps: TierCaps

    def start(self) -> None:
        """Opens the tier. Raises ``TierError`` when it can never work, and has nothing open then; a server that is
        absent for now is no error. After any other error the store calls ``close``."""
        ...

    def close(self, deadline: Deadline) -> None:
        """Releases everything. Called once, when no other call is inside the tier."""
        ...

    def probe(self, keys: Sequence[BlockKey], deadline: Deadline) -> list[Presence]:
        """Presence for each key, in order."""
        ...

    def get_into(self, wants: Sequence[Want], deadline: Deadline, on_done: DoneCallback) -> None:
        """Reads each block into its buffers."""
        ...

    def put_from(self, items: Sequence[Item], deadline: Deadline, on_done: DoneCallback) -> None:
        """Writes each block. ``DONE`` means that a later ``get_into`` finds it."""
        ...

    def delete(self, keys: Sequence[BlockKey]) -> None:
        """Forgets the keys. What cannot be deleted now is at least not found by this process any more."""
        ...

    def clear(self, prefix: KeyPrefix, deadline: Deadline) -> ClearResult:
        """Forgets every key that starts with ``prefix``, durably where the tier is persistent."""
        ...

    def scan(self) -> Iterator[FrameHeader]:
        """The headers of all blocks that a restart found. Only where ``caps.scannable``; else it yields nothing."""
        ...

    def usage(self) -> Usage: ...

    def status(self) -> dict[str, object]:
        """Facts for people: I/O mode, address, why it is unavailable. Plain values only."""
        ...


class SlotTier(Protocol):
    """Hands out numbered slots of memory. Thread-safe, never blocks."""

    def reserve(self, count: int, slot_bytes: int) -> list[Slot] | None:
        """``count`` slots of at least ``slot_bytes``, or ``None``: all or nothing."""
        ...

    def release(self, slots: Iterable[Slot]) -> None: ...

    def view(self, slot: Slot) -> memoryview:
        """The whole slot (its length is a multiple of 4096), writable."""
        ...
