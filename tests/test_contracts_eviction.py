"""A plain LRU passes the eviction contract, and broken ones do not."""

import itertools
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

import pytest
from contracts_support import assert_catches

from tierkv.ids import FamilyId
from tierkv.policy import BlockInfo, EvictionPolicy
from tierkv.testing.eviction import EvictionPolicyContract

Evictable = Callable[[FamilyId], bool]


class PlainLru:
    """Sorts by (time of the last use of the family or of any that came after it, minus depth) at every call."""

    name = "plain_lru"

    def __init__(self) -> None:
        self.rank: dict[FamilyId, int] = {}
        self.info: dict[FamilyId, BlockInfo] = {}
        self.clock = 0
        self.counts = {"inserted": 0, "removed": 0}

    def on_insert(self, infos: Sequence[BlockInfo]) -> None:
        self.clock += 1
        for info in infos:
            self.info[info.id] = info
            self.touch(info.id)
        self.counts["inserted"] += len(infos)

    def on_hit(self, ids: Sequence[FamilyId]) -> None:
        self.clock += 1
        for family in ids:
            self.touch(family)

    def on_remove(self, ids: Sequence[FamilyId], *, evicted: bool) -> None:
        for family in ids:
            del self.rank[family], self.info[family]
        self.counts["removed"] += len(ids)

    def victims(self, need: int, evictable: Evictable) -> Iterator[FamilyId]:
        for family in itertools.islice(self.order(), 4 * need + 64):
            if evictable(family):
                yield family

    def counters(self) -> Mapping[str, int]:
        return self.counts

    def order(self) -> list[FamilyId]:
        return sorted(self.rank, key=lambda family: (self.rank[family], -self.info[family].depth))

    def touch(self, family: FamilyId | None) -> None:
        """A use of a family is a use of all before it."""
        while family is not None and family in self.info and self.rank.get(family) != self.clock:
            self.rank[family] = self.clock
            family = self.info[family].parent


class TestPlainLru(EvictionPolicyContract):
    def make_policy(self) -> EvictionPolicy:
        return PlainLru()


# ---- broken ones


class HasNoName(PlainLru):
    name = ""


class InventsAVictim(PlainLru):
    def victims(self, need: int, evictable: Evictable) -> Iterator[FamilyId]:
        yield from super().victims(need, evictable)
        if not self.rank:
            yield FamilyId(0)


class CountsDown(PlainLru):
    def on_remove(self, ids: Sequence[FamilyId], *, evicted: bool) -> None:
        super().on_remove(ids, evicted=evicted)
        self.counts["inserted"] -= 6 * len(ids)


class GivesTooFew(PlainLru):
    def victims(self, need: int, evictable: Evictable) -> Iterator[FamilyId]:
        yield from itertools.islice(super().victims(need, evictable), 100)


class ForgetsTheNewest(PlainLru):
    def order(self) -> list[FamilyId]:
        return super().order()[:-1]


class ForgetsWhereItForked(PlainLru):
    """In one call it gives no family that more than one hangs from."""

    def order(self) -> list[FamilyId]:
        children = Counter(info.parent for info in self.info.values())
        return [family for family in super().order() if children[family] < 2]


class ProposesTheLeased(PlainLru):
    def victims(self, need: int, evictable: Evictable) -> Iterator[FamilyId]:
        for family in itertools.islice(self.order(), need):
            evictable(family)
            yield family


class LooksAtTwenty(PlainLru):
    def victims(self, need: int, evictable: Evictable) -> Iterator[FamilyId]:
        for family in self.order()[: max(need, 20)]:
            if evictable(family):
                yield family


class LooksAtAll(PlainLru):
    def victims(self, need: int, evictable: Evictable) -> Iterator[FamilyId]:
        for family in self.order():
            if evictable(family):
                yield family


class RemembersTheRemoved(PlainLru):
    def on_remove(self, ids: Sequence[FamilyId], *, evicted: bool) -> None:
        if evicted:
            super().on_remove(ids, evicted=evicted)


class KeepsAnOldId(PlainLru):
    """Takes a family whose id was used before for a ghost that it knows."""

    def __init__(self) -> None:
        super().__init__()
        self.ghosts: set[FamilyId] = set()

    def on_remove(self, ids: Sequence[FamilyId], *, evicted: bool) -> None:
        super().on_remove(ids, evicted=evicted)
        self.ghosts |= set(ids)

    def victims(self, need: int, evictable: Evictable) -> Iterator[FamilyId]:
        return (family for family in super().victims(need, evictable) if family not in self.ghosts)


class IsNotLazy(PlainLru):
    def victims(self, need: int, evictable: Evictable) -> Iterator[FamilyId]:
        return iter([*super().victims(need, evictable)])


class LooksAheadAfterTheFirst(PlainLru):
    def victims(self, need: int, evictable: Evictable) -> Iterator[FamilyId]:
        yield from list(super().victims(need, evictable))


class MovesWhatItProposed(PlainLru):
    """A second chance that is given at every look."""

    def victims(self, need: int, evictable: Evictable) -> Iterator[FamilyId]:
        for family in super().victims(need, evictable):
            self.clock += 1
            self.rank[family] = self.clock
            yield family


class HeadFirst(PlainLru):
    def order(self) -> list[FamilyId]:
        return sorted(self.rank, key=lambda family: (self.rank[family], self.info[family].depth))


class KnowsNoParents(PlainLru):
    """The classical fault: each call has a time of its own, so that a later chunk counts as newer."""

    def touch(self, family: FamilyId | None) -> None:
        if family is not None:
            self.rank[family] = self.clock


class HitsMakeTheTailNewest(PlainLru):
    def on_hit(self, ids: Sequence[FamilyId]) -> None:
        for family in ids:
            self.clock += 1
            self.rank[family] = self.clock


class NeverForgetsAGhost(PlainLru):
    def __init__(self) -> None:
        super().__init__()
        self.ghosts: list[tuple[FamilyId, int]] = []

    def on_remove(self, ids: Sequence[FamilyId], *, evicted: bool) -> None:
        super().on_remove(ids, evicted=evicted)
        self.ghosts += [(family, self.clock) for family in ids]


class EvictsOldestHalfOnly(PlainLru):
    def order(self) -> list[FamilyId]:
        return super().order()[: max(1, len(self.rank) // 2)]


class StopsAtABusyLeaf(PlainLru):
    """Gives up at the first family that may not leave."""

    def victims(self, need: int, evictable: Evictable) -> Iterator[FamilyId]:
        return itertools.takewhile(evictable, self.order())


class SaysThatItKnowsPriorities(PlainLru):
    orders_priorities = True


class KeepsTheFirstPriority(PlainLru):
    """Knows them, but what it was told first of a family it believes for ever."""

    orders_priorities = True

    def __init__(self) -> None:
        super().__init__()
        self._priority: dict[FamilyId, int] = {}

    def on_insert(self, infos: Sequence[BlockInfo]) -> None:
        super().on_insert(infos)
        for info in infos:
            self._priority.setdefault(info.id, info.priority)

    def order(self) -> list[FamilyId]:
        return sorted(super().order(), key=lambda family: self._priority[family])


class HeadOfAnotherPriorityFirst(PlainLru):
    orders_priorities = True

    def __init__(self) -> None:
        super().__init__()
        self._priority: dict[FamilyId, int] = {}

    def on_insert(self, infos: Sequence[BlockInfo]) -> None:
        super().on_insert(infos)
        self._priority.update((info.id, info.priority) for info in infos)

    def order(self) -> list[FamilyId]:
        return sorted(super().order(), key=lambda family: -self._priority[family])


CAUGHT_BY = [
    (HasNoName, "test_names_itself"),
    (InventsAVictim, "test_an_empty_policy_has_no_victims"),
    (CountsDown, "test_counters_only_grow"),
    (GivesTooFew, "test_need_is_met_where_everybody_may_leave"),
    (ForgetsTheNewest, "test_all_can_be_proposed"),
    (ForgetsWhereItForked, "test_all_of_a_tree_can_be_proposed"),
    (ProposesTheLeased, "test_only_evictable_ones"),
    (LooksAtTwenty, "test_the_only_evictable_one_of_a_few_is_found"),
    (LooksAtAll, "test_the_bound_holds_when_nobody_may_leave"),
    (RemembersTheRemoved, "test_removed_ids_do_not_come_back"),
    (KeepsAnOldId, "test_an_id_may_be_used_again"),
    (IsNotLazy, "test_victims_is_lazy"),
    (LooksAheadAfterTheFirst, "test_victims_is_lazy"),
    (MovesWhatItProposed, "test_victims_changes_nothing"),
    (HeadFirst, "test_d30_tail_before_head"),
    (KnowsNoParents, "test_d30_tail_before_head_with_chunked_inserts"),
    (HitsMakeTheTailNewest, "test_d30_tail_before_head_after_hits"),
    (StopsAtABusyLeaf, "test_random_life_against_a_model"),
    (EvictsOldestHalfOnly, "test_random_life_against_a_model"),
    (SaysThatItKnowsPriorities, "test_lower_priorities_leave_first"),
    (HeadOfAnotherPriorityFirst, "test_d30_tail_before_head_where_the_head_has_the_higher_priority"),
    (KeepsTheFirstPriority, "test_a_family_whose_priority_changes_moves"),
    (NeverForgetsAGhost, "test_memory_does_not_grow_with_time"),
]


@pytest.mark.parametrize(("mutant", "test"), CAUGHT_BY, ids=[each.__name__ for each, _ in CAUGHT_BY])
def test_the_contract_catches(mutant: type[EvictionPolicy], test: str, tmp_path: Path) -> None:
    class Contract(EvictionPolicyContract):
        def make_policy(self) -> EvictionPolicy:
            return mutant()

    assert_catches(Contract, test, tmp_path, "policy")


def test_every_test_of_the_contract_has_a_mutant() -> None:
    tests = {name for name in dir(EvictionPolicyContract) if name.startswith("test_")}
    assert tests == {test for _, test in CAUGHT_BY}
