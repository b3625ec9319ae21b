"""Where every block is: look-ups, pins and recency over the residency of all families.

The lock is never held for more than 256 families at a time, and taken behind ``gate`` by whoever has time. Methods
whose name begins with an underscore expect it to be held; those of a look (`_find_run` and what it calls) only when
somebody pins what they find.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any, Final, cast

import numpy as np

from tierkv.arriving import Arriving
from tierkv.bounded_lock import within
from tierkv.fallback import SafeEviction
from tierkv.ids import BlockHash, BlockKey, FamilyId, KeyPrefix, Slot
from tierkv.index import IN_HOST, NO_FAMILY, NO_SLOT, SERVED, USABLE, Space
from tierkv.keys import Namespace
from tierkv.residency import HOST, LOCK_BATCH, TierColumn

__all__ = ["HOST", "LOCK_BATCH", "Catalog", "TierColumn"]

FEW = 12
"""Below this a loop over single cells is quicker than numpy."""

MOST_LEFT: Final = 64
"""So many calls leave their unpinning to others; who comes next waits for the lock as everybody does. To take up all of
it is a matter of microseconds for usual leases, and of half a millisecond for 64 of 256 blocks each."""

_ONCE: Final = (0,)
"""Where the only batch of a short run begins."""

_WITH = {
    state: bytes(bits for bits in range(256) if bits & state == state)
    for state in (USABLE, IN_HOST, USABLE | IN_HOST)
}
"""By what is asked for: the values of the column ``state`` that have it."""


class Catalog(Arriving):
    """All families, by namespace and hash. Thread-safe."""

    # -- spaces ---------------------------------------------------------------------------------------------------

    def claim(self, namespace: Namespace, ranks: tuple[int, ...] | None) -> Space:
        """Opens a namespace with its layout, and takes up what a restart has found of it."""
        with self.gate, self.lock:
            space = self.index.open_space(namespace.digest, namespace.prefix)
            self.index.widen(len(namespace.layout.parts))
            space.epoch = namespace.spec.weights_epoch
            space.namespace = namespace
            if space.layout is None or ranks is not None:
                space.claim(namespace.layout, ranks)
            return space

    def begin_clear(self, prefix: KeyPrefix) -> None:
        """From now on to ``end_clear`` no hint under the prefix counts."""
        with self.gate, self.lock:
            self.clears += 1
            self._clearing.append(prefix)

    def end_clear(self, prefix: KeyPrefix) -> None:
        with self.gate, self.lock:
            self.clears += 1
            self._clearing.remove(prefix)

    def _takes_hints(self, space: Space, clears: int) -> bool:
        """True unless a clear has begun or ended since ``clears`` was read, or one is under way for this space."""
        if clears != self.clears:
            return False
        return not any(space.prefix.startswith(prefix) for prefix in self._clearing)

    # -- finding --------------------------------------------------------------------------------------------------

    def find_run(self, space: Space, hashes: Sequence[BlockHash], state: int) -> Sequence[FamilyId]:
        """The families of the longest prefix of ``hashes`` that have all bits of ``state``.

        Takes no lock: a thread that loses its turn at the interpreter while it holds the lock would delay everybody
        who only looks by milliseconds. Each step reads what stands there by one operation. What is found may be going
        or just have gone, as it may after a look under the lock: who wants to hold it takes a lease.
        """
        found: Sequence[FamilyId] = ()
        for start in range(0, len(hashes), LOCK_BATCH):
            batch = hashes[start : start + LOCK_BATCH]
            run = self._find_run(space, batch, state)
            found = joined(found, run)
            if len(run) < len(batch):
                break
        return found

    def _find_run(self, space: Space, hashes: Sequence[BlockHash], state: int) -> Sequence[FamilyId]:
        found: Sequence[FamilyId]
        if len(hashes) >= FEW:
            found = self._find_side_by_side(space, hashes, state) or self._find_many(space, hashes, state)
        else:
            found = self._find_few(space, hashes, state)
        return self._unexpired(found) if self.has_expiry else found

    def _find_few(self, space: Space, hashes: Sequence[BlockHash], state: int) -> list[FamilyId]:
        dicts, states = space.dicts, self.index.state
        found = []
        for block_hash in hashes:
            family = dicts[block_hash[0]].get(block_hash, NO_FAMILY)
            if states[family] & state != state:
                break
            found.append(family)
        return found

    def _find_many(self, space: Space, hashes: Sequence[BlockHash], state: int) -> list[FamilyId]:
        dicts = space.dicts
        found = [dicts[block_hash[0]].get(block_hash, NO_FAMILY) for block_hash in hashes]
        lacking = (self._state_np[np.array(found)] & state) != state  # no family has no state
        return found[: int(lacking.argmax())] if lacking.any() else found

    def _find_side_by_side(
        self, space: Space, hashes: Sequence[BlockHash], state: int
    ) -> Sequence[FamilyId] | None:
        """A prompt that was stored by one call mostly has rows side by side: then only its first block is looked up,
        the others are compared. ``None`` when it is not so, or not for all of ``hashes``."""
        index, first = self.index, space.get(hashes[0])
        if first is None:
            return None
        stop = first + len(hashes)
        # What has the state is in the dict of its space: a family that cannot be found has none of its bits.
        if (
            index.hashes[first:stop] != list(hashes)
            or bytes(index.space_of[first:stop]) != space.number_bytes * len(hashes)
            or bytes(index.state[first:stop]).translate(None, _WITH[state])
        ):
            return None
        return as_families(range(first, stop))

    def _unexpired(self, families: Sequence[FamilyId]) -> Sequence[FamilyId]:
        expires_s, now_s = self.index.expires_s, self.clock.now_s()
        for i, family in enumerate(families):
            if 0 < expires_s[family] <= now_s:
                return families[:i]
        return families

    def _is_expired(self, family: FamilyId) -> bool:
        return bool(0 < self.index.expires_s[family] <= self.clock.now_s())

    def usable_blocks(self, space: Space, families: Sequence[FamilyId]) -> int:
        """How many leading blocks an engine can go on from: window and state groups need their trailing parts."""
        count = len(families)
        if not space.trailing:
            return count
        expected = self.index.expected
        while count:
            for mask, needed in space.trailing:
                tail = range(max(0, count - needed), count)
                gap = next((i for i in reversed(tail) if expected[families[i]] & mask != mask), None)
                if gap is not None:
                    count = gap  # block `gap` lacks the part, so it may be in no tail: go on before it
                    break
            else:
                return count
        return 0

    # -- pins -----------------------------------------------------------------------------------------------------

    def pin_run(
        self,
        space: Space,
        hashes: Sequence[BlockHash],
        state: int,
        patience_s: float = threading.TIMEOUT_MAX,
    ) -> Sequence[FamilyId]:
        """Like ``find_run``, and each family found is pinned. Fewer are, when the lock is not to be had in time, which
        is one time for all batches together."""
        found: Sequence[FamilyId] = ()
        end_s = self.clock.now_s() + patience_s
        for start in range(0, len(hashes), LOCK_BATCH):
            batch = hashes[start : start + LOCK_BATCH]
            if start and patience_s < threading.TIMEOUT_MAX:
                patience_s = max(0.0, end_s - self.clock.now_s())
            run = within(self.lock, patience_s, self._pin_run, space, batch, state)
            if run is None:
                break
            found = joined(found, run)
            if len(run) < len(batch):
                break
        return found

    def _pin_run(self, space: Space, hashes: Sequence[BlockHash], state: int) -> Sequence[FamilyId]:
        if self._left:
            self._catch_up()
        run = self._find_run(space, hashes, state)
        self._pin(run)
        return run

    def lease_run(
        self, space: Space, hashes: Sequence[BlockHash], patience_s: float = threading.TIMEOUT_MAX
    ) -> Sequence[FamilyId] | None:
        """Pins and touches all of ``hashes`` when all are in host RAM and the lock is to be had in time, else does
        nothing and returns ``None``. One look at the lock for a run of up to 256, which is what most loads are; none
        where the last one, which is the first to leave, is not there."""
        if hashes and not self._find_few(space, hashes[-1:], IN_HOST):
            return None
        if len(hashes) > LOCK_BATCH:
            families = self.pin_run(space, hashes, IN_HOST, patience_s)
            if len(families) < len(hashes):
                self.unpin(families)
                return None
            self.touch(families)
            return families
        return within(self.lock, patience_s, self._lease_run, space, hashes)

    def _lease_run(self, space: Space, hashes: Sequence[BlockHash]) -> Sequence[FamilyId] | None:
        if self._left:
            self._catch_up()
        families = self._find_run(space, hashes, IN_HOST)
        if len(families) < len(hashes):
            return None
        if len(families) < FEW:
            pins, state = self.index.pins, self.index.state
            for family in families:
                pins[family] += 1
                state[family] |= SERVED
        else:
            rows = rows_of(families)
            self._pins_np[rows] += 1
            self._state_np[rows] |= SERVED
        self._note_use(families)
        return families

    def pin(self, families: Sequence[FamilyId]) -> None:
        """Pins families that the caller has pinned already."""
        for start in range(0, len(families), LOCK_BATCH):
            with self.gate, self.lock:
                self._pin(families[start : start + LOCK_BATCH])

    def _pin(self, families: Sequence[FamilyId]) -> None:
        """Pins families that are all different."""
        if len(families) < FEW:
            pins = self.index.pins
            for family in families:
                pins[family] += 1
        else:
            self._pins_np[rows_of(families)] += 1

    def unpin(self, families: Sequence[FamilyId]) -> None:
        """Waits for nobody, see ``touch_and_unpin``."""
        if len(families) > LOCK_BATCH or len(self._left) >= MOST_LEFT:
            self.touch_and_unpin((), families)
        elif families and not within(self.lock, 0.0, self._let_go, (), families):
            self._left.append(((), families))

    def _unpin(self, families: Sequence[FamilyId]) -> None:
        if len(families) < FEW or self.damaged or self.parked or not self._unpin_many(families):
            self._unpin_each(families)

    def _unpin_many(self, families: Sequence[FamilyId]) -> bool:
        """False, and nothing has changed, when somebody may wait for the last pin of one of them to go."""
        rows = rows_of(families)
        if not (self._state_np[rows] & USABLE).all():
            return False
        left = self._pins_np[rows] - 1
        assert left.min() >= 0, "families are unpinned more often than pinned"
        self._pins_np[rows] = left
        return True

    def _unpin_each(self, families: Sequence[FamilyId]) -> None:
        pins, state = self.index.pins, self.index.state
        for family in families:
            left = pins[family] - 1
            assert left >= 0, f"family {family} is unpinned more often than pinned"
            pins[family] = left
            if left:
                continue
            if family in self.parked:
                self._unpark(family)
            if family in self.damaged:
                self.damaged.remove(family)
                self._free_slots(family)
            if not state[family] & USABLE:
                self._settle(family)

    def _park(self, families: Sequence[FamilyId], policy: SafeEviction) -> None:
        """These are pinned and stand in the way of whoever looks for victims: they leave the policy's order until
        their last pin has gone."""
        policy.park(families)
        self.parked.update(families)

    def _unpark(self, family: FamilyId) -> None:
        self.parked.remove(family)
        for policy in self._policies:
            policy.unpark(family)

    def touch(self, families: Sequence[FamilyId]) -> None:
        """One request used these blocks, in the order of their depth. Its tail shall be older than its head, so long
        runs are told from the back. Waits for nobody, see ``touch_and_unpin``."""
        self.touch_and_unpin(families, ())

    def touch_and_unpin(self, used: Sequence[FamilyId], others: Sequence[FamilyId]) -> None:
        """``touch`` for the ones and ``unpin`` for the others. Waits for nobody: while somebody else has the lock this
        is left to whoever takes it next in order to look at pins. A thread that wants the lock waits for one that waits
        for its turn at the interpreter, and who lets go may have a deadline behind him."""
        longest = max(len(used), len(others))
        for start in reversed(range(0, longest, LOCK_BATCH)) if longest > LOCK_BATCH else _ONCE:
            ours, theirs = used[start : start + LOCK_BATCH], others[start : start + LOCK_BATCH]
            if len(self._left) >= MOST_LEFT:
                with self.gate, self.lock:
                    self._let_go(ours, theirs)
            elif not within(self.lock, 0.0, self._let_go, ours, theirs):
                self._left.append((ours, theirs))

    def _let_go(self, used: Sequence[FamilyId], others: Sequence[FamilyId]) -> bool:
        if self._left:
            self._catch_up()
        if used:
            self._touch(used)
        if others:
            self._unpin(others)
        return True

    def _catch_up(self) -> None:
        """Does what others left: whoever looks at pins calls it first."""
        for _ in range(len(self._left)):
            used, others = self._left.popleft()
            if used:
                self._touch(used)
            if others:
                self._unpin(others)

    def catch_up(self) -> None:
        """The same, without the lock: once in a while, since it may be that nobody looks at pins."""
        if self._left:
            with self.gate, self.lock:
                self._catch_up()

    def _touch(self, families: Sequence[FamilyId]) -> None:
        if len(families) < FEW:
            state = self.index.state
            for family in families:
                state[family] |= SERVED
        else:
            self._state_np[rows_of(families)] |= SERVED
        self._note_use(families)

    def _note_use(self, families: Sequence[FamilyId]) -> None:
        self.leased_blocks += len(families)
        for policy in self._policies:
            policy.on_hit(families)  # a policy passes over those that its tier does not hold

    def leased_families(self) -> int:
        """Families with a pin."""
        self.catch_up()
        return int((self.index.array("pins") > 0).sum())

    def held_by_tier(self, families: Sequence[FamilyId]) -> dict[str, int]:
        """How many of the families each tier holds whole; read without the lock, for people."""
        if len(families) < FEW:
            whole_in = self.index.whole_in
            few = [whole_in[family] for family in families]
            return {tier.name: sum(bits >> tier.number & 1 for bits in few) for tier in self.tiers}
        many = self.index.array("whole_in")[rows_of(families)]
        return {tier.name: int(np.count_nonzero(many & 1 << tier.number)) for tier in self.tiers}

    def _keys_in(self, family: FamilyId, tier: int) -> list[BlockKey]:
        """The keys of what a tier holds of a family."""
        index = self.index
        space = index.spaces[index.space_of[family]]
        block_hash, held = index.hashes[family], index.residency[tier][family]
        assert block_hash is not None
        return [space.key(block_hash, part) for part in range(held.bit_length()) if held >> part & 1]

    def slot_of(self, family: FamilyId, part: int) -> Slot:
        """The slot of a pinned family's part; ``NO_SLOT`` when the part is not in host RAM."""
        cells, parts = self.index.slot_table
        return Slot(cells[family * parts + part])

    def slot_bytes_of(self, family: FamilyId) -> int:
        """What a pinned family takes of host RAM."""
        cells, parts = self.index.slot_table
        slots = cells[family * parts : (family + 1) * parts]
        return sum(self.host.arena.stride_of(Slot(slot)) for slot in slots if slot != NO_SLOT)


def rows_of(families: Sequence[FamilyId]) -> Any:
    """What selects their rows of a column: a slice where they lie side by side and that is known."""
    return slice(families.start, families.stop) if type(families) is range else np.array(families)


def as_families(rows: range) -> Sequence[FamilyId]:
    return cast("Sequence[FamilyId]", rows)


def joined(families: Sequence[FamilyId], more: Sequence[FamilyId]) -> Sequence[FamilyId]:
    """Both, one after the other; still a range where they lie side by side."""
    if not families:
        return more
    if type(families) is range and type(more) is range and families.stop == more.start:
        return as_families(range(families.start, more.stop))
    together: list[FamilyId] = families if isinstance(families, list) else list(families)
    together += more
    return together
