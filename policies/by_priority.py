"""Priorities for an eviction policy that knows none: one of it for each priority, the lowest asked first.

The store wraps a policy that does not say ``orders_priorities = True`` of itself, so that no policy has to care.
"""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import groupby

from tierkv.ids import FamilyId
from tierkv.policy import BlockInfo, EvictionPolicy, InfoRun

MAX_PRIORITY = 127
"""Priorities beyond -127 to 127 count as these: the number of policies is bounded."""

_OFFSET = MAX_PRIORITY + 1
"""What is noted of a family is its priority plus this; 0 stands for "not here"."""


class ByPriority:
    """Every family of a lower priority leaves before any of a higher one; among equals the wrapped policy decides.

    A parent of another priority is not known to the policy of its child. Memory: one policy for each priority that was
    ever used, and 1 byte for each id up to the highest one. Not thread-safe: the store calls it under its lock.
    """

    orders_priorities = True

    def __init__(self, make: Callable[[], EvictionPolicy]) -> None:
        self._make = make
        self._first = make()
        self.name = self._first.name
        self._policies: dict[int, EvictionPolicy] = {0: self._first}
        self._order: list[int] = [0]
        self._where = array("B")

    @property
    def kind(self) -> type[EvictionPolicy]:
        """Of the policies in it."""
        return type(self._first)

    def on_insert(self, infos: Sequence[BlockInfo]) -> None:
        if type(infos) is InfoRun:
            self._insert_run(infos)
            return
        gone = [
            info.id for info in infos if self._priority_of(info.id) not in (None, _bounded(info.priority))
        ]
        if gone:
            self.on_remove(gone, evicted=False)
        for priority, group in groupby(infos, key=lambda info: _bounded(info.priority)):
            run = list(group)
            for info in run:
                self._note(info.id, priority)
            self._policy(priority).on_insert([self._as_known_to(priority, info) for info in run])

    def _insert_run(self, run: InfoRun) -> None:
        """The same for the usual thing, which has no wishes: no info is made of it."""
        ids, where = run.ids, self._where
        self._make_room(max(ids, default=0))
        if gone := [ident for ident in ids if where[ident] not in (0, _OFFSET)]:
            self.on_remove(gone, evicted=False)
        for ident in ids:
            where[ident] = _OFFSET
        if run.parent is not None and self._priority_of(run.parent) != 0:
            run = InfoRun(ids, None, run.depth, run.bytes, run.tenant, run.hashes)
        self._first.on_insert(run)

    def on_hit(self, ids: Sequence[FamilyId]) -> None:
        if len(self._order) == 1:
            self._first.on_hit(ids)
            return
        for priority, its in self._by_priority(ids).items():
            self._policies[priority].on_hit(its)

    def on_remove(self, ids: Sequence[FamilyId], *, evicted: bool) -> None:
        for priority, its in self._by_priority(ids).items():
            self._policies[priority].on_remove(its, evicted=evicted)
        for ident in ids:
            if ident < len(self._where):
                self._where[ident] = 0

    def victims(self, need: int, evictable: Callable[[FamilyId], bool]) -> Iterator[FamilyId]:
        if len(self._order) == 1:
            yield from self._first.victims(need, evictable)
            return
        looks_left = 4 * need + 64

        def asked(family: FamilyId) -> bool:
            nonlocal looks_left
            if not looks_left:
                return False
            looks_left -= 1
            return evictable(family)

        for priority in self._order:
            if not looks_left:
                return
            yield from self._policies[priority].victims(need, asked)

    def counters(self) -> Mapping[str, int]:
        total: Counter[str] = Counter()
        for policy in self._policies.values():
            total.update(policy.counters())
        return total

    def _policy(self, priority: int) -> EvictionPolicy:
        policy = self._policies.get(priority)
        if policy is None:
            policy = self._policies[priority] = self._make()
            self._order = sorted(self._policies)
        return policy

    def _priority_of(self, ident: int) -> int | None:
        noted = self._where[ident] if ident < len(self._where) else 0
        return noted - _OFFSET if noted else None

    def _note(self, ident: int, priority: int) -> None:
        self._make_room(ident)
        self._where[ident] = priority + _OFFSET

    def _make_room(self, ident: int) -> None:
        if ident >= len(self._where):
            self._where.extend(bytes(max(len(self._where), ident + 1 - len(self._where), 1024)))

    def _as_known_to(self, priority: int, info: BlockInfo) -> BlockInfo:
        known = info.parent is None or self._priority_of(info.parent) == priority
        return info if known else info._replace(parent=None)

    def _by_priority(self, ids: Sequence[FamilyId]) -> dict[int, list[FamilyId]]:
        if len(self._order) == 1:
            where, end = self._where, len(self._where)
            here = [ident for ident in ids if ident < end and where[ident]]
            return {0: here} if here else {}
        found: dict[int, list[FamilyId]] = {}
        for ident in ids:
            priority = self._priority_of(ident)
            if priority is not None:
                found.setdefault(priority, []).append(ident)
        return found


def _bounded(priority: int) -> int:
    return max(-MAX_PRIORITY, min(MAX_PRIORITY, priority))


def with_priorities(make: Callable[[], EvictionPolicy]) -> EvictionPolicy:
    """A policy of that kind which leaves low priorities first, by itself or with help."""
    policy = make()
    return policy if getattr(policy, "orders_priorities", False) else ByPriority(make)
