"""The life of a slot as types: each transition consumes its receiver, so no state can be skipped or used twice.

    Draft   reserved, being written       dropped: the slots return to the free list
    Sealed  complete, checksums known     dropped: the slots return to the free list
    Lease   registered and pinned         dropped: unpinned, the blocks stay as candidates for eviction

All three cover a run of blocks of one chain. What they hold is plain data (family, part, slot, generation), so it can
cross a process boundary. Handles may be passed between threads, but one handle is used by one thread at a time.
A handle that is garbage collected without having been consumed is dropped and counted.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

import numpy as np
import xxhash

from tierkv.errors import HandleError
from tierkv.frame import checksum
from tierkv.ids import FamilyId, NamespaceDigest, Slot
from tierkv.keys import Chain

SMALL_BYTES = 32 * 1024
"""Up to here a copy takes a few microseconds and is done without letting other threads run, which would take longer."""


class SlotMemory(Protocol):
    """Where the bytes of slots are. ``instance``: 16 bytes that no other memory has."""

    instance: bytes

    def view(self, slot: Slot) -> memoryview: ...

    def generation(self, slot: Slot) -> int: ...


class SlotRef(NamedTuple):
    """One part of one block in host RAM."""

    family: FamilyId
    part: int
    slot: Slot
    generation: int


class DraftBlocks(NamedTuple):
    """What a draft reserved: for block ``positions[i]`` of the chain, ``slots[i][j]`` is for part ``parts[j]``."""

    chain: Chain
    positions: Sequence[int]
    parts: tuple[int, ...]
    part_bytes: tuple[int, ...]
    slots: Sequence[tuple[Slot, ...]]


Discard = Callable[[DraftBlocks], None]
"""Returns the slots of a draft that came to nothing. Must be safe to call from a finaliser: it may not lock."""


def copy_in(
    memory: SlotMemory,
    blocks: DraftBlocks,
    index: int,
    payloads: Sequence[memoryview],
    known: tuple[int, ...] | None = None,
) -> tuple[int, ...]:
    """Copies the index-th block into its slots, one buffer for each part; returns the checksums: those of the payloads
    when they are ``known``, else taken while the bytes are still in the processor's cache. Raises ``HandleError`` for
    buffers of another number or length."""
    if len(payloads) != len(blocks.parts):
        raise HandleError(
            f"block {blocks.positions[index]}: {len(payloads)} buffers for {len(blocks.parts)} layer groups"
        )
    sums = []
    for slot, size, payload in zip(blocks.slots[index], blocks.part_bytes, payloads, strict=True):
        if payload.nbytes != size:
            raise HandleError(
                f"block {blocks.positions[index]}: {payload.nbytes} bytes given, its part has {size}"
            )
        target = memory.view(slot)[:size]
        if size <= SMALL_BYTES:
            target[:] = payload if payload.format == "B" and payload.ndim == 1 else payload.cast("B")
        else:
            np.copyto(np.frombuffer(target, np.uint8), np.frombuffer(payload, np.uint8))
        if known is None:
            sums.append(xxhash.xxh3_64_intdigest(target))
    return tuple(sums) if known is None else known


class Draft:
    """Slots that were reserved for blocks that are not stored yet. Write into ``view``, then ``seal``."""

    __slots__ = ("_blocks", "_discard", "_memory", "_sums")

    def __init__(self, blocks: DraftBlocks, memory: SlotMemory, discard: Discard) -> None:
        self._blocks: DraftBlocks | None = blocks
        self._sums: list[tuple[int, ...] | None] = [None] * len(blocks.slots)
        self._memory = memory
        self._discard = discard

    def __len__(self) -> int:
        return len(self._mine().positions)

    @property
    def blocks(self) -> DraftBlocks:
        return self._mine()

    def view(self, index: int, part: int) -> memoryview:
        """The payload of the index-th reserved block's ``part``: exactly its length, page-aligned, writable."""
        blocks = self._mine()
        column = blocks.parts.index(part)
        return self._memory.view(blocks.slots[index][column])[: blocks.part_bytes[column]]

    def fill(self, index: int, payloads: Sequence[memoryview]) -> None:
        """Copies the index-th reserved block in, one buffer for each part, and takes its checksums while the bytes are
        still in the processor's cache. Raises ``HandleError`` for buffers of another number or length."""
        self._sums[index] = copy_in(self._memory, self._mine(), index, payloads)

    def note_checksums(self, index: int, checksums: tuple[int, ...]) -> None:
        """The index-th reserved block was written by somebody who took its checksums, one for each part."""
        blocks = self._mine()
        if len(checksums) != len(blocks.parts):
            raise HandleError(
                f"block {blocks.positions[index]}: {len(checksums)} checksums for {len(blocks.parts)} parts"
            )
        self._sums[index] = checksums

    def seal(self) -> Sealed:
        """Declares all bytes written and takes the checksums that ``fill`` has not. Consumes the draft."""
        blocks = self._mine()
        sums = [known or self._sum(blocks, i) for i, known in enumerate(self._sums)]
        self._blocks = None
        return Sealed(blocks, sums, self._discard)

    def _sum(self, blocks: DraftBlocks, index: int) -> tuple[int, ...]:
        view = self._memory.view
        pairs = zip(blocks.slots[index], blocks.part_bytes, strict=True)
        return tuple(checksum(view(slot)[:size]) for slot, size in pairs)

    def drop(self) -> None:
        """Gives the slots back. Nobody may be writing them any more. Harmless when consumed."""
        blocks, self._blocks = self._blocks, None
        if blocks is not None:
            self._discard(blocks)

    def _mine(self) -> DraftBlocks:
        if self._blocks is None:
            raise HandleError("this draft was sealed or dropped already")
        return self._blocks

    def __enter__(self) -> Draft:
        return self

    def __exit__(self, *_: object) -> None:
        self.drop()

    def __del__(self) -> None:
        self.drop()


class Sealed:
    """Complete blocks that nobody can see yet. The store registers them, which consumes this."""

    __slots__ = ("_blocks", "_discard", "checksums")

    def __init__(self, blocks: DraftBlocks, checksums: Sequence[tuple[int, ...]], discard: Discard) -> None:
        self._blocks: DraftBlocks | None = blocks
        self._discard = discard
        self.checksums = checksums

    @property
    def namespace_digest(self) -> NamespaceDigest:
        """Of the chain that the blocks were reserved for."""
        return self.blocks.chain.namespace.digest

    @property
    def blocks(self) -> DraftBlocks:
        if self._blocks is None:
            raise HandleError("these sealed blocks were registered or dropped already")
        return self._blocks

    def take(self) -> DraftBlocks:
        """Hands the slots over to the caller, for registration. Consumes this."""
        blocks, self._blocks = self.blocks, None
        return blocks

    def drop(self) -> None:
        blocks, self._blocks = self._blocks, None
        if blocks is not None:
            self._discard(blocks)

    def __enter__(self) -> Sealed:
        return self

    def __exit__(self, *_: object) -> None:
        self.drop()

    def __del__(self) -> None:
        self.drop()


class Lessor(Protocol):
    """Who gave a lease and takes it back."""

    memory: SlotMemory

    def slot_of(self, family: FamilyId, part: int) -> Slot:
        """A negative number when the family has no such part in host RAM."""
        ...

    def expects(self, family: FamilyId) -> int:
        """Bitmap of the parts that make the family whole."""
        ...

    def take_back(self, lease: Lease) -> None: ...

    def let_go(self, families: Sequence[FamilyId]) -> None:
        """Of the tail of a lease that goes on without them."""
        ...


class Lease:
    """A run of blocks, registered in host RAM and pinned until ``release``. Made by the store.

    Block i of the lease is block i of its chain. ``at_s`` is the deadline on the store's clock: past it the lease is
    reported with its owner, but it still protects its slots. ``colder`` tells how many of its blocks this load has
    brought from each colder tier; the others were in host RAM.
    """

    __slots__ = ("_lessor", "at_s", "chain", "colder", "families", "owner")

    def __init__(
        self, lessor: Lessor, chain: Chain, families: Sequence[FamilyId], owner: str, at_s: float
    ) -> None:
        self._lessor: Lessor | None = lessor
        self.chain = chain
        self.families = families
        self.owner = owner
        self.at_s = at_s
        self.colder: dict[str, int] = {}

    def __len__(self) -> int:
        return len(self.families)

    @property
    def tokens(self) -> int:
        """Tokens that need not be computed; never all of the prompt."""
        covered = len(self.families) * self.chain.namespace.layout.block_tokens
        return max(0, min(covered, self.chain.num_tokens - 1))

    @property
    def released(self) -> bool:
        return self._lessor is None

    @property
    def lessor(self) -> Lessor | None:
        """Who gave it; ``None`` after the release."""
        return self._lessor

    def ref(self, index: int, part: int) -> SlotRef:
        """Where a part of a block lies. Raises ``HandleError`` after release, or for a part that was not asked for."""
        lessor, slot = self._find(index, part)
        return SlotRef(self.families[index], part, slot, lessor.memory.generation(slot))

    def view(self, index: int, part: int = 0) -> memoryview:
        """The payload of a part of a block, read-only. Valid until the release."""
        lessor, slot = self._find(index, part)
        payload_bytes = self.chain.namespace.layout.parts[part].payload_bytes
        return lessor.memory.view(slot)[:payload_bytes].toreadonly()

    def _find(self, index: int, part: int) -> tuple[Lessor, Slot]:
        lessor, families = self._lessor, self.families
        if lessor is None:
            raise HandleError("this lease was released already")
        if not 0 <= index < len(families):
            raise HandleError(f"block {index}: the lease has {len(families)} blocks, counted from 0")
        slot = lessor.slot_of(families[index], part)
        if slot < 0:
            raise HandleError(f"block {index} was stored without part {part}")
        return lessor, slot

    def shorten(self, blocks: int) -> None:
        """Unpins what is behind the first ``blocks``."""
        if self._lessor is not None and blocks < len(self.families):
            tail, self.families = self.families[blocks:], self.families[:blocks]
            self._lessor.let_go(tail)

    def release(self) -> None:
        """Unpins the blocks. Harmless the second time."""
        lessor, self._lessor = self._lessor, None
        if lessor is not None:
            lessor.take_back(self)

    def __enter__(self) -> Lease:
        return self

    def __exit__(self, *_: object) -> None:
        self.release()
