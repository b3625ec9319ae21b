"""Changes of residency: the only code that says a block has arrived in a tier or left it, under one lock.

The lock is never held across I/O, a copy or a hash, nor for more than 256 families at a time. Methods whose name
begins with an underscore expect it to be held. Everything a policy learns, every event and every counter of residency
comes from here, so that they agree.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import islice

from tierkv.awaited import Awaited
from tierkv.clock import Clock
from tierkv.departures import Departures
from tierkv.events import EventLog, Kind
from tierkv.fallback import Failures, SafeEviction, safe
from tierkv.ids import BlockHash, FamilyId, KeyPrefix, Slot
from tierkv.index import (
    DOOMED,
    HINT_ONLY,
    IN_HOST,
    NO_FAMILY,
    NO_SLOT,
    SERVED,
    SERVED_ONLY,
    USABLE,
    FamilyIndex,
    Space,
)
from tierkv.metrics import Counters
from tierkv.policies.lru import LruPolicy
from tierkv.policy import BlockInfo, EvictionPolicy
from tierkv.tiers.host import HostTier

LOCK_BATCH = 256
"""Families that are handled before the lock is given up for others."""

HOST = 0
"""Number of the host tier in all residency columns; blob tiers follow in the order of their speed."""

_ARRIVED: tuple[Kind, ...] = ("arrived",)
ARRIVED_AND_STORED: tuple[Kind, ...] = ("arrived", "stored")
_LEFT: tuple[Kind, ...] = ("left",)
_LEFT_AND_REMOVED: tuple[Kind, ...] = ("left", "removed")
_STORED: tuple[Kind, ...] = ("stored",)
_REMOVED: tuple[Kind, ...] = ("removed",)


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
        self._arrivals: list[tuple[EvictionPolicy, BlockInfo]] = []
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
        self.orphans: deque[list[Slot]] = deque()
        """Slots of handles that were garbage collected; released at the next call (a finaliser must not lock)."""

    # -- residency ------------------------------------------------------------------------------------------------

    def _find_or_add(
        self, space: Space, block_hash: BlockHash, parent_hash: BlockHash | None, depth: int, expected: int
    ) -> FamilyId | str:
        """The family of a hash, made if it is new; or why it cannot be."""
        family = space.get(block_hash)
        if family is not None and self._in_own_tier(family):
            return family
        if family is None and not self.index.has_room():
            self._forget_hints(LOCK_BATCH)  # before the parent is looked up: it may be one of those that go
        parent = NO_FAMILY
        if parent_hash is not None:
            known = space.get(parent_hash)
            if known is None or not self._somewhere(known):
                return "no_parent"
            parent = known
        if family is not None:
            return family  # a hint, or a row that waits: it comes in behind a parent that is there
        added = self.index.add(space, block_hash, parent, depth, expected)
        return "index_full" if added is None else added

    def _somewhere(self, family: FamilyId) -> bool:
        """True when any part is in any tier."""
        index = self.index
        return bool(index.held_in[family] or index.state[family] & USABLE)

    def _gain(self, family: FamilyId, tier: int, parts: int) -> None:
        """Parts of a family have arrived in a tier. ``_tell_arrivals`` must follow before the lock is given up."""
        index = self.index
        held = index.residency[tier]
        before = held[family]
        space = self._space_of(family)
        space.books.held[tier] += space.room_of(parts & ~before, tier)
        if not before and (parent := index.parent[family]):
            index.children[tier][parent] += 1
        held[family] = before | parts
        index.held_in[family] |= 1 << tier
        expected = index.expected[family]
        whole = (before | parts) & expected == expected
        if tier == HOST and not whole and not before:
            self.incomplete.append((self.clock.now_s(), family, index.generation[family]))
        if whole and before & expected != expected:
            self._arrived(family, tier)

    def _arrived(self, family: FamilyId, tier: int) -> None:
        """A family has become whole in a tier."""
        index = self.index
        index.whole_in[family] |= 1 << tier
        if tier == HOST:
            size = self._bytes(family)
            self.host_bytes += size
            index.state[family] |= IN_HOST
            dirty = self._missing_tiers(family) if self.wanted else 0
            index.dirty[family] = dirty
            if not dirty:
                self._count_clean(family, 1)
        elif index.dirty[family] >> tier & 1:
            self._now_clean_in(family, tier)
        column = self.tiers[tier]
        if column.policy is not None:
            self._tell_of(family, tier, column.policy)
        state = index.state[family]
        if not state & (USABLE | DOOMED) and column.policy is not None:
            index.state[family] = state | USABLE
            self._event(ARRIVED_AND_STORED, family, column.name)
            return
        self._event(_ARRIVED, family, column.name)
        if state & (USABLE | HINT_ONLY) != USABLE:
            self._update_usable(family)

    def _tell_of(self, family: FamilyId, tier: int, policy: EvictionPolicy) -> None:
        """To the policy with the other arrivals, or when its parent has come."""
        index = self.index
        parent = FamilyId(index.parent[family])
        if parent and (index.queued[parent] >> tier & 1 or (tier, parent) in self._following):
            self._followers.setdefault((tier, parent), []).append((family, index.generation[family]))
            self._following.add((tier, family))
        else:
            self._arrivals.append((policy, self.info(family, tier)))

    def _let_follow(self, family: FamilyId, tier: int) -> list[FamilyId]:
        """The family's way to the tier is over: the policy may be told of those behind it. Returns those in vain."""
        index, policy = self.index, self.tiers[tier].policy
        if (tier, family) in self._following or policy is None:
            return []
        in_vain = not index.whole_in[family] >> tier & 1
        ahead, orphans = [family], list[FamilyId]()
        while ahead:
            for follower, generation in self._followers.pop((tier, ahead.pop()), ()):
                self._following.discard((tier, follower))
                ahead.append(follower)
                expected = index.expected[follower]
                whole = index.residency[tier][follower] & expected == expected
                if index.generation[follower] == generation and whole:
                    self._arrivals.append((policy, self.info(follower, tier)))
                    orphans += [follower] if in_vain else []
        return orphans

    def _tell_arrivals(self) -> None:
        """Tells the policies who has come, in one call for each of them."""
        if not self._arrivals:
            return
        arrivals, self._arrivals = self._arrivals, []
        for policy in self._policies:
            infos = [info for its, info in arrivals if its is policy]
            if infos:
                policy.on_insert(infos)

    def _now_clean_in(self, family: FamilyId, tier: int) -> None:
        """A colder tier holds the family now, or does not want it."""
        dirty = self.index.dirty
        if dirty[family] >> tier & 1:
            dirty[family] &= ~(1 << tier)
            if not dirty[family] and self.index.state[family] & IN_HOST:
                self._count_clean(family, 1)

    def _make_dirty(self, family: FamilyId, tier: int) -> None:
        """A colder tier needs the family after all."""
        dirty = self.index.dirty
        if (dirty[family] | self.index.barred[family]) >> tier & 1 or not self.index.state[family] & IN_HOST:
            return
        if not dirty[family]:
            self._count_clean(family, -1)
        dirty[family] |= 1 << tier
        self.on_dirty((family,))

    def _count_clean(self, family: FamilyId, more: int) -> None:
        """One family more, or (-1) less, in host RAM is clean."""
        index = self.index
        space = self._space_of(family)
        expected = index.expected[family]
        self.clean_bytes += more * space.bytes_of(expected)
        space.books.clean_bytes += more * space.room_of(expected)

    def _missing_tiers(self, family: FamilyId) -> int:
        """Those that should hold it, and have no copy or one with the wrong end."""
        index = self.index
        good = index.whole_in[family] & ~index.stale[family] | index.barred[family] | 1 << HOST
        return self.wanted & ~int(good)

    def _lose(self, family: FamilyId, tier: int, *, evicted: bool, reason: str) -> None:
        """A family leaves a tier, all parts at once."""
        self._lose_all((family,), tier, evicted=evicted, reason=reason)

    def _lose_all(self, families: Sequence[FamilyId], tier: int, *, evicted: bool, reason: str) -> None:
        """Families leave a tier for one reason; children stand before their parents."""
        index, bit = self.index, 1 << tier
        held, held_in, whole_in, parents = (
            index.residency[tier],
            index.held_in,
            index.whole_in,
            index.parent,
        )
        gone: list[FamilyId] = []
        departed: list[tuple[int, BlockHash, int]] = []
        whole: list[FamilyId] = []
        slots: list[Slot] = []
        for family in families:
            if not held_in[family] & bit:
                continue
            gone.append(family)
            departed.append((index.space_of[family], index.hashes[family], held[family]))  # type: ignore[arg-type]
            space = self._space_of(family)
            space.books.held[tier] -= space.room_of(held[family], tier)
            held[family] = 0
            held_in[family] &= ~bit
            if parents[family]:
                index.children[tier][parents[family]] -= 1
            if whole_in[family] & bit:
                whole_in[family] &= ~bit
                whole.append(family)
            if tier == HOST and not index.pins[family]:
                slots += self._take_slots(family)
        if whole:
            self._no_longer_whole(whole, tier, evicted, reason)
        if slots:
            self.host.release(slots)
        if departed:
            self.departures.note(departed, tier, reason, self.clock.now_s())
        for family in gone:
            self._update_usable(family, reason)
            self._settle(family)

    def _no_longer_whole(self, families: Sequence[FamilyId], tier: int, evicted: bool, reason: str) -> None:
        index, column = self.index, self.tiers[tier]
        if tier == HOST:
            for family in families:
                size = self._bytes(family)
                self.host_bytes -= size
                if index.dirty[family]:
                    index.dirty[family] = 0
                else:
                    self._count_clean(family, -1)
                index.state[family] &= ~IN_HOST
        if column.policy is not None:
            column.policy.on_remove(families, evicted=evicted)
        for family in families:
            state = index.state[family]
            if index.whole_in[family] or state & (USABLE | HINT_ONLY | DOOMED) != USABLE:
                self._event(_LEFT, family, column.name, reason)
                continue
            index.state[family] = state & ~USABLE
            self._event(_LEFT_AND_REMOVED, family, column.name, reason)
            if not state & SERVED:
                self.counters.add(1, "never_served_blocks_total")
        self.counters.add(len(families), "evicted_blocks_total", column.name, reason)

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

    def _update_usable(self, family: FamilyId, reason: str | None = None) -> None:
        index = self.index
        state = index.state
        if state[family] & DOOMED:
            return
        usable = bool(index.whole_in[family])
        if usable != bool(state[family] & USABLE):
            state[family] ^= USABLE
            self._event(_STORED if usable else _REMOVED, family, None, reason)
            if not usable and not state[family] & SERVED:
                self.counters.add(1, "never_served_blocks_total")
        hint_only = usable and not state[family] & IN_HOST and not self._in_own_tier(family)
        if hint_only != bool(state[family] & HINT_ONLY):
            state[family] ^= HINT_ONLY
            if hint_only:
                self.hint_order.on_insert([self.info(family)])
            else:
                self.hint_order.on_remove([family], evicted=False)

    def _in_own_tier(self, family: FamilyId) -> bool:
        return bool(self.index.held_in[family] & self._own_tiers)

    def _settle(self, family: FamilyId) -> None:
        """Forgets families that are nowhere, unpinned and childless; then their parents, if they wait for it."""
        index = self.index
        while family and index.hashes[family] is not None and not index.pins[family]:
            if index.state[family] & DOOMED:
                self._free_slots(family)
            if index.children_known[family] or index.held_in[family]:
                return
            family = index.remove(family)

    def _doom(self, family: FamilyId) -> None:
        """Nobody finds the family any more, in no tier; its slots stay until the last pin has gone."""
        index = self.index
        if index.state[family] & USABLE:
            self._event(_REMOVED, family, None, "cleared")
        if index.state[family] & HINT_ONLY:
            self.hint_order.on_remove([family], evicted=False)
        index.state[family] = index.state[family] & ~(USABLE | HINT_ONLY) | DOOMED
        index.detach(family)
        for tier in range(len(self.tiers)):
            self._lose(family, tier, evicted=False, reason="cleared")
        self._settle(family)

    def _forget_hints(self, most: int) -> None:
        index = self.index
        going = self.hint_order.victims(most, lambda f: not index.pins[f] and not index.children_known[f])
        for family in list(islice(going, most)):
            for tier in range(1, len(self.tiers)):
                self._lose(family, tier, evicted=True, reason="index_full")

    # -- words for others -----------------------------------------------------------------------------------------

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
