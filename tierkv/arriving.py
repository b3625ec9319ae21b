"""Blocks that arrive in a tier: what that means for events, policies, and for what is clean."""

from __future__ import annotations

from tierkv.events import Kind
from tierkv.ids import BlockHash, FamilyId
from tierkv.index import DOOMED, HINT_ONLY, IN_HOST, NO_FAMILY, USABLE, Space
from tierkv.parting import Parting
from tierkv.policy import EvictionPolicy
from tierkv.residency import ARRIVED_AND_STORED, HOST, LOCK_BATCH

_ARRIVED: tuple[Kind, ...] = ("arrived",)


class Arriving(Parting):
    """Not for direct use: ``tierkv.catalog.Catalog`` adds what its users call."""

    def _find_or_add(
        self, space: Space, block_hash: BlockHash, parent_hash: BlockHash | None, depth: int, expected: int
    ) -> FamilyId | str:
        """The family of a hash, made if it is new; or why it cannot be."""
        family = space.get(block_hash)
        if family is not None and self._in_own_tier(family):
            above = FamilyId(self.index.parent[family])
            return family if not above or self._somewhere(above) else "no_parent"
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
            self._arrivals.append((policy, (self.info(family, tier),)))

    def _let_follow(self, family: FamilyId, tier: int, *, in_vain: bool = False) -> list[FamilyId]:
        """The family's way to the tier is over: the policy may be told of those behind it. Returns those in vain.
        ``in_vain``: it has come, and will be deleted."""
        index, policy = self.index, self.tiers[tier].policy
        if (tier, family) in self._following or policy is None:
            return []
        in_vain = in_vain or not index.whole_in[family] >> tier & 1
        ahead, orphans = [family], list[FamilyId]()
        while ahead:
            for follower, generation in self._followers.pop((tier, ahead.pop()), ()):
                self._following.discard((tier, follower))
                ahead.append(follower)
                expected = index.expected[follower]
                whole = index.residency[tier][follower] & expected == expected
                if index.generation[follower] == generation and whole:
                    self._arrivals.append((policy, (self.info(follower, tier),)))
                    orphans += [follower] if in_vain else []
        return orphans

    def _tell_arrivals(self) -> None:
        """Tells the policies who has come, in one call for each of them."""
        if not self._arrivals:
            return
        arrivals, self._arrivals = self._arrivals, []
        if len(arrivals) == 1:
            policy, infos = arrivals[0]
            policy.on_insert(infos)
            return
        for policy in self._policies:
            together = [info for its, infos in arrivals if its is policy for info in infos]
            if together:
                policy.on_insert(together)

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

    def _missing_tiers(self, family: FamilyId) -> int:
        """Those that should hold it, and have no copy or one with the wrong end."""
        index = self.index
        good = index.whole_in[family] & ~index.stale[family] | index.barred[family] | 1 << HOST
        return self.wanted & ~int(good)
