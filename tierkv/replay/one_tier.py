"""One tier and one eviction policy: the policy's own code, called as the store calls it, over a tier without bytes.

A request's hits are its longest prefix that is there. What is beyond is computed, and stored behind it from its front
on; where there is no room the policy's victims leave, only such that have no child in the tier (as the store does it)
and never what the new blocks hang from. A prompt that is larger than the tier is kept as far as it fits.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from tierkv.ids import FamilyId
from tierkv.policy import BlockInfo, EvictionPolicy, InfoRun
from tierkv.replay.held import PolicyFailed
from tierkv.replay.traces import NO_PARENT, Trace

BLOCK_BYTES = 1 << 20
_TELL_EVERY = 256
_MOST_PASSES = 64
"""A policy looks at so many families and no further, so it may have to be asked again."""


@dataclass
class Outcome:
    """What a replay counted. Blocks that a request was given, in all and from the trace's second half."""

    references: int = 0
    hit_blocks: int = 0
    late_references: int = 0
    late_hit_blocks: int = 0
    stored_blocks: int = 0
    evicted_blocks: int = 0
    refused_blocks: int = 0
    """For which there was no room."""

    @property
    def hit_percent(self) -> float:
        return 100 * self.hit_blocks / self.references if self.references else 0.0

    @property
    def late_hit_percent(self) -> float:
        """Of the second half of the requests."""
        return 100 * self.late_hit_blocks / self.late_references if self.late_references else 0.0


class OneTier:
    """A tier of ``capacity`` blocks, numbered as in the trace."""

    def __init__(
        self, trace: Trace, capacity: int, policy: EvictionPolicy, *, hashes: list[bytes] | None = None
    ) -> None:
        self.policy = policy
        self.outcome = Outcome()
        self._parents = trace.parents
        self._hashes = trace.hashes if hashes is None else hashes
        self.resident = bytearray(trace.blocks)
        self._children = [0] * trace.blocks
        self.free = capacity

    def request(self, ids: list[int]) -> int:
        """One prompt. Returns how many of its blocks were there."""
        hits = self._prefix(ids)
        if hits:
            self.policy.on_hit(ids[:hits])  # type: ignore[arg-type]
        if hits < len(ids):
            self._store(ids, hits)
        return hits

    def _prefix(self, ids: list[int]) -> int:
        """Whatever is there has its parents there, so the end of the prefix can be searched for by halves."""
        resident, low, high = self.resident, 0, len(ids)
        if not high or not resident[ids[0]]:
            return 0
        while low < high:
            middle = (low + high) // 2
            if resident[ids[middle]]:
                low = middle + 1
            else:
                high = middle
        return low

    def _store(self, ids: list[int], hits: int) -> None:
        count = len(ids) - hits
        keep = ids[hits - 1] if hits else NO_PARENT
        if count > self.free:
            self._make_room(count, keep)
            if count > self.free:
                self.outcome.refused_blocks += count - self.free
                count = self.free
        if not count:
            return
        new = ids[hits : hits + count]
        resident, children = self.resident, self._children
        for ident in new:
            resident[ident] = 1
            children[ident] = 1
        children[new[-1]] = 0
        if hits:
            children[keep] += 1
        self.free -= count
        self.outcome.stored_blocks += count
        hashes = self._hashes
        parent = FamilyId(keep) if hits else None
        self.policy.on_insert(
            InfoRun(new, parent, hits, BLOCK_BYTES, 0, [hashes[ident] for ident in new])  # type: ignore[arg-type]
        )

    def _make_room(self, count: int, keep: int) -> None:
        resident, children, parents = self.resident, self._children, self._parents

        def may_leave(family: FamilyId) -> bool:
            return bool(resident[family]) and not children[family] and family != keep

        for _ in range(_MOST_PASSES):
            need = count - self.free
            gone: list[FamilyId] = []
            for family in self.policy.victims(need, may_leave):
                gone.append(family)
                resident[family] = 0
                parent = parents[family]
                if parent != NO_PARENT:
                    children[parent] -= 1
                if len(gone) == need:
                    break
            if gone:
                self.policy.on_remove(gone, evicted=True)
                self.free += len(gone)
                self.outcome.evicted_blocks += len(gone)
            if len(gone) in (0, need):
                return


class BareTier(OneTier):
    """A tier in which a policy decides all: no block stays for the sake of its children, only those that the request
    itself uses do. Blocks behind a hole are there in vain; a request that wants them counts as a use all the same."""

    def request(self, ids: list[int]) -> int:
        resident = self.resident
        hits = next((place for place, ident in enumerate(ids) if not resident[ident]), len(ids))
        here = [ident for ident in ids if resident[ident]]
        if here:
            self.policy.on_hit(here)  # type: ignore[arg-type]
        if len(here) < len(ids):
            self._fill(ids, set(here))
        return hits

    def _fill(self, ids: list[int], here: set[int]) -> None:
        new = [(place, ident) for place, ident in enumerate(ids) if ident not in here]
        for _ in range(_MOST_PASSES):
            need = len(new) - self.free
            if need <= 0 or not self._evict(need, here):
                break
        self.outcome.refused_blocks += max(0, len(new) - self.free)
        new = new[: self.free]
        self.free -= len(new)
        self.outcome.stored_blocks += len(new)
        infos = []
        for place, ident in new:
            self.resident[ident] = 1
            parent = FamilyId(ids[place - 1]) if place else None
            infos.append(
                BlockInfo(FamilyId(ident), parent, place, BLOCK_BYTES, block_hash=self._hashes[ident])
            )
        self.policy.on_insert(infos)

    def _evict(self, need: int, keep: set[int]) -> int:
        resident = self.resident
        gone: list[FamilyId] = []
        for family in self.policy.victims(need, lambda f: bool(resident[f]) and f not in keep):
            gone.append(family)
            resident[family] = 0
            if len(gone) == need:
                break
        self.policy.on_remove(gone, evicted=True)
        self.free += len(gone)
        self.outcome.evicted_blocks += len(gone)
        return len(gone)


def replay(
    trace: Trace,
    capacity: int,
    policy: EvictionPolicy,
    progress: Callable[[float], None] = lambda share: None,
) -> Outcome:
    """The whole trace through a tier of so many blocks. ``progress`` is told how much is done, from 0 to 1. Raises
    ``ConfigError`` where a policy that is held to its protocol breaks it."""
    return through(OneTier(trace, capacity, policy), trace, progress)


def through(tier: OneTier, trace: Trace, progress: Callable[[float], None] = lambda share: None) -> Outcome:
    """The whole trace through a tier that is made for it."""
    outcome, half = tier.outcome, len(trace.requests) // 2
    for number, request in enumerate(trace.requests):
        if number % _TELL_EVERY == 0:
            progress(number / len(trace.requests))
        try:
            hits = tier.request(request.ids)
        except PolicyFailed as failed:
            raise failed.at(number + 1, outcome.references, len(request.ids)) from failed
        outcome.references += len(request.ids)
        outcome.hit_blocks += hits
        if number >= half:
            outcome.late_references += len(request.ids)
            outcome.late_hit_blocks += hits
    return outcome
