"""Leases, drafts and sealed blocks of a store in another process, as its client holds them."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import numpy as np

from tierkv.daemon.link import Link
from tierkv.daemon.mapped import MappedArena
from tierkv.errors import HandleError
from tierkv.handles import Draft, DraftBlocks, Lease, Sealed, SlotMemory
from tierkv.ids import FamilyId, Slot
from tierkv.keys import Chain
from tierkv.loans import LentRun, Loan
from tierkv.namespaces import OpenNamespace

_LOOK_S = 0.002


class RemoteRun(LentRun):
    """The blocks of one lease that a daemon gave: its lessor."""

    def __init__(
        self, link: Link, arena: MappedArena, number: int, parts: int, words: dict[str, Any]
    ) -> None:
        told = (words[name] for name in ("blocks", "slots", "generations", "expected"))
        super().__init__(arena, parts, Loan(arena.instance, *told))
        self._link = link
        self._number = number

    def take_back(self, lease: Lease) -> None:
        if self._link.memory is self.memory:  # else the daemon that gave it is gone
            self._link.tell("release", {"lease": self._number})

    def let_go(self, families: Sequence[FamilyId]) -> None:
        """Of the tail of the lease."""
        if self._link.memory is self.memory:
            self._link.tell("shorten", {"lease": self._number, "blocks": len(self._slots) - len(families)})
            self._slots = self._slots[: len(self._slots) - len(families)]


class Drafts:
    """The drafts of one client that the daemon is to be told of. Any thread, and any finaliser."""

    def __init__(self, link: Link) -> None:
        self._link = link
        self._writing: dict[int, None] = {}

    def writing(self) -> list[int]:
        """Numbers of those that somebody may be writing."""
        return list(self._writing)

    def wait(self, timeout_s: float) -> None:
        """Until nobody writes any more, or so long."""
        until_s = time.monotonic() + timeout_s
        while self._writing and time.monotonic() < until_s:
            time.sleep(_LOOK_S)

    def hear(
        self, number: int, chain: Chain, opened: OpenNamespace, words: dict[str, Any]
    ) -> RemoteDraft | None:
        """The draft that a daemon gave, if any."""
        if not words.get("slots"):
            return None
        arena: MappedArena = words["arena"]
        positions = np.frombuffer(words["positions"], dtype=np.int32).tolist()
        parts = tuple(words["parts"])
        table = np.frombuffer(words["slots"], dtype=np.int32).reshape(len(positions), len(parts))
        sizes = tuple(opened.namespace.layout.parts[part].payload_bytes for part in parts)
        blocks = DraftBlocks(
            chain, positions, parts, sizes, [tuple(map(Slot, row)) for row in table.tolist()]
        )
        self._writing[number] = None
        return RemoteDraft(blocks, arena, number, self)

    def written(self, number: int) -> None:
        self._writing.pop(number, None)

    def abandon(self, number: int, memory: SlotMemory) -> None:
        """It came to nothing. A finaliser may call this, so it does not lock: the next call tells."""
        self._writing.pop(number, None)
        if self._link.memory is memory:
            self._link.tell_later("drop", {"draft": number})

    def tell_now(self) -> None:
        self._link.tell_now()


class RemoteDraft(Draft):
    """Slots that a daemon reserved."""

    __slots__ = ("_drafts", "number")

    def __init__(self, blocks: DraftBlocks, memory: SlotMemory, number: int, drafts: Drafts) -> None:
        super().__init__(blocks, memory, lambda _: drafts.abandon(number, memory))
        self.number = number
        self._drafts = drafts

    @property
    def memory(self) -> SlotMemory:
        """Where the slots are."""
        return self._memory

    def seal(self) -> RemoteSealed:
        plain = super().seal()
        self._drafts.written(self.number)
        return RemoteSealed(plain.take(), plain.checksums, self._memory, self.number, self._drafts)

    def drop(self) -> None:
        super().drop()
        self._drafts.tell_now()

    def __del__(self) -> None:
        super().drop()


class RemoteSealed(Sealed):
    """Written blocks that the daemon is to be told of."""

    __slots__ = ("_drafts", "memory", "number")

    def __init__(
        self,
        blocks: DraftBlocks,
        checksums: Sequence[tuple[int, ...]],
        memory: SlotMemory,
        number: int,
        drafts: Drafts,
    ) -> None:
        super().__init__(blocks, checksums, lambda _: drafts.abandon(number, memory))
        self.memory = memory
        self.number = number
        self._drafts = drafts

    def drop(self) -> None:
        super().drop()
        self._drafts.tell_now()

    def __del__(self) -> None:
        super().drop()


class Nowhere:
    """The lessor of an empty lease, and its memory: there is none."""

    def __init__(self) -> None:
        self.memory: SlotMemory = self
        self.instance = b""

    def view(self, slot: Slot) -> memoryview:
        raise HandleError("an empty lease has no blocks")

    def generation(self, slot: Slot) -> int:
        raise HandleError("an empty lease has no blocks")

    def slot_of(self, family: FamilyId, part: int) -> Slot:
        raise HandleError("an empty lease has no blocks")

    def expects(self, family: FamilyId) -> int:
        raise HandleError("an empty lease has no blocks")

    def take_back(self, lease: Lease) -> None:
        pass

    def let_go(self, families: Sequence[FamilyId]) -> None:
        pass
