"""Residency: the index, the host slots and the policies under one lock, and what else changes with them.

The lock is never held across I/O, a copy or a hash, nor for more than 256 families at a time. Methods whose name
begins with an underscore expect it to be held. Only ``tierkv.arriving`` and ``tierkv.parting`` (each with a quick way
for what comes in runs, ``tierkv.entering`` and ``tierkv.exiting``) say that a block has arrived in a tier or left it:
everything a policy learns, every event and every counter of residency comes from there, so that they agree.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from tierkv.awaited import Awaited
from tierkv.clock import Clock
from tierkv.departures import Departures
from tierkv.events import EventLog, Kind
from tierkv.fallback import Failures, SafeEviction, safe
from tierkv.ids import FamilyId, KeyPrefix, Slot
from tierkv.index import DOOMED, NO_SLOT, SERVED_ONLY, USABLE, FamilyIndex, Space
from tierkv.metrics import Counters
from tierkv.policies.lru import LruPolicy
from tierkv.policy import BlockInfo, EvictionPolicy
from tierkv.tiers.host import HostTier

LOCK_BATCH = 256
"""Families that are handled before the lock is given up for others."""

HOST = 0
"""Number of the host tier in all residency columns; blob tiers follow in the order of their speed."""

ARRIVED_AND_STORED: tuple[Kind, ...] = ("arrived", "stored")
LEFT: tuple[Kind, ...] = ("left",)
LEFT_AND_REMOVED: tuple[Kind, ...] = ("left", "removed")


@dataclass(frozen=True)
class TierColumn:
    """A tier as the catalog sees it."""

    name: str
    number: int
    policy: SafeEviction | None
    """Orders who leaves; ``None`` for a tier that evicts on its own, whose residency is a hint."""


class Residency:
    """The index, the host slots and the policies, kept in step.

    Not for direct use: ``tierkv.catalog.Catalog`` adds what its users call.
    """

    def __init__(
        self,
        host: HostTier,
        host_policy: EvictionPolicy,
        blob_tiers: Sequence[tuple[str, EvictionPolicy | None]],
        max_families: int,
        clock: Clock,
        events: EventLog,
        counters: Counters,
    ) -> None:
        self.lock = threading.Lock()
        self.gate = threading.Lock()
        """Taken before the lock, and held with it, by whoever has time: who stores, cleans, makes room for what is new,
        or takes out. A lock goes to who has waited longest, and who has got it must wait for his turn at the
        interpreter, so with many threads a queue stands before it. Of those with time one at a time stands there; who
        answers a request goes past the others."""
        self.clock = clock
        self.host = host
        self.events = events
        self.counters = counters
        self.index = FamilyIndex(max_families, 1 + len(blob_tiers))
        self.failures = Failures(clock, counters)
        """Of policies."""
        named = [("host", host_policy), *blob_tiers]
        self.tiers = tuple(
            TierColumn(name, n, safe(policy, name, n, self)) for n, (name, policy) in enumerate(named)
        )
        self.departures = Departures(max_families, clock.now_s())
        """What has left, for explanations."""
        self.owner = memoryview(bytearray(4 * host.arena.regions * host.arena.slots_per_region)).cast("i")
        """Family by slot; 0 where the slot holds no registered block."""
        self._own_tiers = sum(1 << tier.number for tier in self.tiers if tier.policy is not None)
        """Bitmap of the tiers that the store itself evicts from."""
        blobs = self._own_tiers & ~(1 << HOST)
        self.whole_elsewhere = bytes(bits for bits in range(256) if bits & blobs)
        """Values of the column ``whole_in`` of families that leave host RAM and stay in one of these."""
        self._policies = [tier.policy for tier in self.tiers if tier.policy is not None]
        self.host_policy = self._policies[HOST]
        self._pins_np = self.index.array("pins")
        self._state_np = self.index.array("state")
        self.leased_blocks = 0
        """Blocks that were leased so far."""
        self.wanted = 0
        """Bitmap of the colder tiers that a block in host RAM should also be in (set by the store's edges)."""
        self.has_expiry = False
        """Set once any block has an expiry; without one nobody looks for it."""
        self.retains = False
        """Set once any block is to be kept otherwise than by default; without one nobody compares wishes."""
        self.clean_bytes = 0
        self.host_bytes = 0
        self.on_dirty: Callable[[Sequence[FamilyId]], None] = lambda families: None
        """Told, under the lock, which families have become dirty."""
        self.hint_order = LruPolicy()
        """Families that only a tier which evicts on its own is known to hold: they make room when the index is full."""
        self._arrivals: list[tuple[EvictionPolicy, Sequence[BlockInfo]]] = []
        """Families that their tier's policy is to be told of before the lock is given up."""
        self._followers: dict[tuple[int, FamilyId], list[tuple[FamilyId, int]]] = {}
        """By (tier, parent): families that came there before their parent, which is on its way. The tier's policy is
        told of them after it, so that a chain lies in its order as if it had been written in one piece."""
        self._following: set[tuple[int, FamilyId]] = set()
        self.awaited = Awaited(self.index)
        self.leaving: set[tuple[int, FamilyId]] = set()
        """(tier, family): deleted there just now. Nobody writes it to that tier before the delete is over."""
        self.parked: set[FamilyId] = set()
        """Families that were taken out of a policy's order since they are pinned."""
        self.incomplete: deque[tuple[float, FamilyId, int]] = deque()
        """Families of which some parts are registered: (since, id, generation)."""
        self.clears = 0
        """Beginnings and ends of clears: what a remote tier said of itself before the last one is no longer true."""
        self._clearing: list[KeyPrefix] = []
        self.damaged: set[FamilyId] = set()
        """Leased families whose bytes in host RAM are not what they should be: lost, but for their slots."""
        self._left: deque[tuple[Sequence[FamilyId], Sequence[FamilyId]]] = deque()
        """What ``touch_and_unpin`` of the catalog left to others: used, and to be unpinned."""
        self.orphans: deque[list[Slot]] = deque()
        """Slots of handles that were garbage collected; released at the next call (a finaliser must not lock)."""

    # -- words for others -----------------------------------------------------------------------------------------

    def _somewhere(self, family: FamilyId) -> bool:
        """True when any part is in any tier."""
        index = self.index
        return bool(index.held_in[family] or index.state[family] & USABLE)

    def _count_clean(self, family: FamilyId, more: int) -> None:
        """One family more, or (-1) less, in host RAM is clean."""
        index = self.index
        space = self._space_of(family)
        expected = index.expected[family]
        self.clean_bytes += more * space.bytes_of(expected)
        space.books.clean_bytes += more * space.room_of(expected)

    def _in_own_tier(self, family: FamilyId) -> bool:
        return bool(self.index.held_in[family] & self._own_tiers)

    def _bytes(self, family: FamilyId) -> int:
        return self._space_of(family).bytes_of(self.index.expected[family])

    def _space_of(self, family: FamilyId) -> Space:
        space: Space = self.index.spaces[self.index.space_of[family]]
        return space

    def info(self, family: FamilyId, tier: int = HOST) -> BlockInfo:
        """What a policy of a tier may know of a family."""
        index = self.index
        parent = index.parent[family]
        priority = index.priority[family]
        if tier == HOST and index.state[family] & SERVED_ONLY:
            priority = min(priority, -1)
        return BlockInfo(
            family,
            FamilyId(parent) if parent else None,
            index.depth[family],
            self._bytes(family),
            index.spaces[index.space_of[family]].tenant,
            priority,
            index.expires_s[family] or None,
            None,
            index.hashes[family] or b"",
        )

    def _event(
        self, kinds: tuple[Kind, ...], family: FamilyId, tier: str | None, reason: str | None = None
    ) -> None:
        index = self.index
        parent = index.parent[family]
        self.events.append(
            self.clock.now_s(),
            kinds,
            index.spaces[index.space_of[family]].digest,
            index.hashes[family],
            index.hashes[parent] if parent else None,
            tier,
            reason,
        )

    # -- rows and slots that nobody needs any more ----------------------------------------------------------------

    def _take_slots(self, family: FamilyId) -> list[Slot]:
        """Takes a family's slots off it; the caller releases them."""
        cells, parts = self.index.slot_cells, self.index.parts
        taken = []
        for cell in range(family * parts, (family + 1) * parts):
            slot = cells[cell]
            if slot != NO_SLOT:
                taken.append(Slot(slot))
                cells[cell] = NO_SLOT
                self.owner[slot] = 0
        return taken

    def _free_slots(self, family: FamilyId) -> None:
        self.host.release(self._take_slots(family))

    def _settle(self, family: FamilyId) -> None:
        """Forgets families that are nowhere, unpinned and childless; then their parents, if they wait for it."""
        index = self.index
        while family and index.hashes[family] is not None and not index.pins[family]:
            if index.state[family] & DOOMED:
                self._free_slots(family)
            if index.children_known[family] or index.held_in[family]:
                return
            family = index.remove(family)
