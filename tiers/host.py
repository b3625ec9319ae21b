"""The host tier: slots in pinned (or pinnable) host RAM, the gateway through which every block passes.

Beside each slot stands a generation, which changes whenever the slot is reserved, so that a late completion or a stale
handle cannot touch what the slot holds now, and the checksum of what it holds, which the scrub compares.
"""

from __future__ import annotations

import secrets
import threading
from collections.abc import Callable, Sequence

import numpy as np

from tierkv.arena import Arena
from tierkv.errors import HandleError
from tierkv.ids import Slot
from tierkv.tier import Usage

BYTES_PER_SLOT = 13
"""Generation (4), checksum (8), state (1): touched only where a slot begins."""


class HostTier:
    """A ``SlotTier`` over an ``Arena``. Thread-safe; no call blocks.

    Every slot is in exactly one state: free, or handed out. ``release`` of a slot that is free raises ``HandleError``.
    """

    name = "host"

    def __init__(self, arena: Arena) -> None:
        self.arena = arena
        self.instance = secrets.token_bytes(16)
        slots = arena.regions * arena.slots_per_region
        self._lock = threading.Lock()
        self._taken = memoryview(np.zeros(slots, dtype=np.uint8))
        self._generation = arena.table.generations
        self.checksums = memoryview(np.zeros(slots, dtype=np.uint64))
        """By slot, see ``checksum``."""
        self._stop_populating = threading.Event()
        self.populated_bytes = 0

    def reserve(self, count: int, slot_bytes: int) -> list[Slot] | None:
        """``count`` slots of at least ``slot_bytes``, or ``None``. Each gets a new generation."""
        with self._lock:
            slots = self.arena.reserve(count, slot_bytes)
            if slots is None:
                return None
            taken, generation = self._taken, self._generation
            for slot in slots:
                taken[slot] = 1
                generation[slot] = (generation[slot] + 1) & 0xFFFFFFFF
            return slots

    def release(self, slots: Sequence[Slot]) -> None:
        with self._lock:
            taken, last = self._taken, len(self._taken) - 1
            for at, slot in enumerate(slots):
                if not 0 <= slot <= last or not taken[slot]:
                    self.arena.release(slots[:at])
                    raise HandleError(f"slot {slot} is not handed out, or released twice")
                taken[slot] = 0
            self.arena.release(slots)

    def view(self, slot: Slot) -> memoryview:
        return self.arena.view(slot)

    def generation(self, slot: Slot) -> int:
        """Changes whenever the slot is handed out."""
        return int(self._generation[slot])

    def checksum(self, slot: Slot) -> int:
        """xxh3_64 of the payload, as it was when the block was sealed."""
        return self.checksums[slot]

    def set_checksum(self, slot: Slot, checksum: int) -> None:
        self.checksums[slot] = checksum

    def usage(self) -> Usage:
        arena = self.arena
        with self._lock:
            free = arena.capacity_bytes - arena.used_bytes
            return Usage(arena.capacity_bytes, arena.used_bytes, 0, min(free, arena.region_bytes))

    def free_bytes(self) -> int:
        return self.arena.capacity_bytes - self.arena.used_bytes

    def populate(self, stop: Callable[[], bool] | None = None) -> None:
        """Faults the arena in; meant for a background lane. Ends early when the tier closes."""
        stopped = self._stop_populating.is_set
        self.populated_bytes = self.arena.populate(lambda: stopped() or (stop is not None and stop()))

    def close(self) -> None:
        self._stop_populating.set()
        self.arena.close()
