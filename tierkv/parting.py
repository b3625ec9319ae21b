"""Blocks that leave a tier: what that means for events, policies, counters, and for the rows of their chain."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import islice

from tierkv.events import Kind
from tierkv.exiting import FEWEST, exit_host
from tierkv.ids import BlockHash, FamilyId, Slot
from tierkv.index import DOOMED, HINT_ONLY, IN_HOST, SERVED, USABLE
from tierkv.residency import HOST, LEFT, LEFT_AND_REMOVED, Residency

_STORED: tuple[Kind, ...] = ("stored",)
_REMOVED: tuple[Kind, ...] = ("removed",)


class Parting(Residency):
    """Not for direct use: ``tierkv.catalog.Catalog`` adds what its users call."""

    def _lose(self, family: FamilyId, tier: int, *, evicted: bool, reason: str) -> None:
        """A family leaves a tier, all parts at once."""
        self._lose_all((family,), tier, evicted=evicted, reason=reason)

    def _lose_all(self, families: Sequence[FamilyId], tier: int, *, evicted: bool, reason: str) -> None:
        """Families leave a tier for one reason; children stand before their parents."""
        if tier != HOST or len(families) < FEWEST:
            self._lose_any(families, tier, evicted, reason)
            return
        if exit_host(self, families, evicted=evicted, reason=reason):
            return
        alike: dict[tuple[int, int], list[FamilyId]] = {}
        for family in families:
            alike.setdefault((self.index.space_of[family], self.index.expected[family]), []).append(family)
        for its in alike.values():
            few = len(its) < FEWEST or len(its) == len(families)
            if few or not exit_host(self, its, evicted=evicted, reason=reason):
                self._lose_any(its, tier, evicted, reason)

    def _lose_any(self, families: Sequence[FamilyId], tier: int, evicted: bool, reason: str) -> None:
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
                self._event(LEFT, family, column.name, reason)
                continue
            index.state[family] = state & ~USABLE
            self._event(LEFT_AND_REMOVED, family, column.name, reason)
            if not state & SERVED:
                self.counters.add(1, "never_served_blocks_total")
        self.counters.add(len(families), "evicted_blocks_total", column.name, reason)

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
