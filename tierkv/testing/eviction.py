"""The contract of an eviction policy. Subclass ``EvictionPolicyContract`` in your tests; see ``docs/testing.md``.

class TestMyPolicy(EvictionPolicyContract):
    def make_policy(self): return MyPolicy()
"""

from __future__ import annotations

import gc
import random
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import islice

import pytest

from tierkv.ids import FamilyId
from tierkv.policies.by_priority import with_priorities
from tierkv.policy import BlockInfo, EvictionPolicy


class Asked:
    """An ``evictable`` that counts how often it is asked, and notes about whom."""

    def __init__(self, allowed: Callable[[FamilyId], bool]) -> None:
        self._allowed = allowed
        self.times = 0
        self.about: set[FamilyId] = set()

    def __call__(self, family: FamilyId) -> bool:
        self.times += 1
        self.about.add(family)
        return self._allowed(family)


def anybody(_: FamilyId) -> bool:
    return True


def chain_of(first: int, length: int, *, tenant: int = 0) -> list[BlockInfo]:
    """The families of one prompt, ids from ``first`` on, each the parent of the next."""
    return [
        BlockInfo(
            id=FamilyId(first + depth),
            parent=FamilyId(first + depth - 1) if depth else None,
            depth=depth,
            bytes=65536,
            tenant=tenant,
            recompute_s=0.01,
        )
        for depth in range(length)
    ]


def ids_of(infos: Iterable[BlockInfo]) -> list[FamilyId]:
    return [info.id for info in infos]


class EvictionPolicyContract:
    """What the store relies on. It says nothing of which policy it is: any order of chains is allowed."""

    ghosts_at_most = 20_000
    """Ids of families that left which the policy may remember."""

    # ---- what a subclass gives

    def make_policy(self) -> EvictionPolicy:
        """A new policy that knows no family."""
        raise NotImplementedError("give the contract a policy: override make_policy")

    # ---- tools

    @pytest.fixture
    def policy(self) -> EvictionPolicy:
        return self.make_policy()

    def victims(
        self,
        policy: EvictionPolicy,
        need: int,
        evictable: Callable[[FamilyId], bool] = anybody,
        known: Iterable[FamilyId] | None = None,
    ) -> list[FamilyId]:
        """All victims of one call, after the checks that hold for every call."""
        asked = Asked(evictable)
        found = list(policy.victims(need, asked))
        assert asked.times <= 4 * need + 64, f"looked at {asked.times} families for a need of {need}"
        assert len(set(found)) == len(found), "a victim came twice"
        assert set(found) <= asked.about, "a victim was not asked about"
        assert all(map(evictable, found)), "a victim is not evictable"
        if known is not None:
            strangers = (set(found) | asked.about) - set(known)
            assert not strangers, f"unknown ids: {sorted(strangers)[:5]}"
        return found

    def fill(self, policy: EvictionPolicy, chains: int, length: int) -> list[list[BlockInfo]]:
        made = [chain_of(1000 * number, length) for number in range(chains)]
        for chain in made:
            policy.on_insert(chain)
        return made

    def check_tail_first(self, order: Sequence[FamilyId], chain: Sequence[BlockInfo]) -> None:
        """Within the chain, the deeper family stands before the shallower one."""
        places = [order.index(family) for family in ids_of(chain)]
        assert places == sorted(places, reverse=True), (
            f"the head leaves before the tail: places by depth {places}"
        )

    # ---- names and counters

    def test_names_itself(self, policy: EvictionPolicy) -> None:
        assert policy.name
        assert policy.name == policy.name.strip().lower()

    def test_an_empty_policy_has_no_victims(self, policy: EvictionPolicy) -> None:
        assert self.victims(policy, 5) == []
        policy.on_insert([])
        policy.on_hit([])
        policy.on_remove([], evicted=True)
        assert self.victims(policy, 5) == []

    def test_counters_only_grow(self, policy: EvictionPolicy) -> None:
        dice = random.Random(28)
        before: dict[str, int] = {}
        for chain in (chain_of(1000 * number, 5) for number in range(40)):
            policy.on_insert(chain)
            policy.on_hit(ids_of(chain[: dice.randint(1, 5)]))
            self.victims(policy, 3)
            policy.on_remove([chain[-1].id], evicted=dice.random() < 0.5)
            now = dict(policy.counters())
            assert all(isinstance(value, int) for value in now.values())
            assert all(now.get(name, -1) >= value for name, value in before.items()), f"{before} became {now}"
            before = now

    # ---- who is proposed

    def test_need_is_met_where_everybody_may_leave(self, policy: EvictionPolicy) -> None:
        known = [family for chain in self.fill(policy, 30, 10) for family in ids_of(chain)]
        for need in (1, 2, 17, 250):
            assert len(self.victims(policy, need, known=known)) >= need

    def test_all_can_be_proposed(self, policy: EvictionPolicy) -> None:
        known = [family for chain in self.fill(policy, 10, 10) for family in ids_of(chain)]
        assert set(self.victims(policy, len(known), known=known)) == set(known)

    @pytest.mark.parametrize("branch", [1, 3])
    def test_all_of_a_tree_can_be_proposed(self, policy: EvictionPolicy, branch: int) -> None:
        """Prompts that go on differently from somewhere in the middle of one that came before."""
        trunk = chain_of(0, 6)
        policy.on_insert(trunk)
        known = ids_of(trunk)
        for number, parent in enumerate(known[:-1]):
            first, *rest = chain_of(1000 * (number + 1), branch)
            policy.on_insert([first._replace(parent=parent), *rest])
            known = [*known, first.id, *ids_of(rest)]
            found = self.victims(policy, len(known), known=known)
            assert set(found) == set(known)
            assert found.index(FamilyId(5)) < found.index(FamilyId(parent)), "a parent before its child"

    def test_only_evictable_ones(self, policy: EvictionPolicy) -> None:
        known = [family for chain in self.fill(policy, 30, 10) for family in ids_of(chain)]
        self.victims(policy, 50, lambda family: family % 3 == 0, known=known)
        assert self.victims(policy, 50, lambda _: False, known=known) == []

    def test_the_only_evictable_one_of_a_few_is_found(self, policy: EvictionPolicy) -> None:
        known = [family for chain in self.fill(policy, 12, 5) for family in ids_of(chain)]
        for wanted in known:
            assert self.victims(policy, 1, {wanted}.__contains__) == [wanted]

    def test_the_bound_holds_when_nobody_may_leave(self, policy: EvictionPolicy) -> None:
        self.fill(policy, 100, 50)
        for need in (0, 1, 10, 100):
            assert self.victims(policy, need, lambda _: False) == []

    def test_removed_ids_do_not_come_back(self, policy: EvictionPolicy) -> None:
        chains = self.fill(policy, 20, 5)
        gone: list[FamilyId] = []
        for number, chain in enumerate(chains):
            policy.on_hit(ids_of(chain))
            policy.on_remove([chain[-1].id, chain[-2].id], evicted=bool(number % 2))
            gone += [chain[-1].id, chain[-2].id]
        known = {family for chain in chains for family in ids_of(chain)} - set(gone)
        assert set(self.victims(policy, 100, known=known)) == known

    def test_an_id_may_be_used_again(self, policy: EvictionPolicy) -> None:
        for tenant in range(3):
            chain = chain_of(7, 4, tenant=tenant)
            policy.on_insert(chain)
            policy.on_hit(ids_of(chain))
            assert sorted(self.victims(policy, 10)) == ids_of(chain)
            policy.on_remove(list(reversed(ids_of(chain))), evicted=tenant == 1)
            assert self.victims(policy, 10) == []

    # ---- lazy, and changes nothing

    def test_victims_is_lazy(self, policy: EvictionPolicy) -> None:
        self.fill(policy, 40, 10)
        asked = Asked(anybody)
        victims = policy.victims(200, asked)
        assert isinstance(victims, Iterator)
        assert asked.times == 0, "victims looks before it is asked for the first one"
        for count in range(1, 20):
            next(victims)
            assert asked.times <= 4 * count + 64, f"{asked.times} looks for {count} victims"
        assert asked.times < 200, "victims looks at all that it may need"

    def test_victims_changes_nothing(self, policy: EvictionPolicy) -> None:
        chains = self.fill(policy, 20, 5)
        policy.on_hit(ids_of(chains[3]))
        first = self.victims(policy, 100)
        list(islice(policy.victims(100, anybody), 30))
        list(policy.victims(100, lambda _: False))
        abandoned = policy.victims(100, anybody)
        next(abandoned)
        assert self.victims(policy, 100) == first

    # ---- the tail before the head

    def test_d30_tail_before_head(self, policy: EvictionPolicy) -> None:
        chains = self.fill(policy, 6, 8)
        order = self.victims(policy, 48)
        for chain in chains:
            self.check_tail_first(order, chain)

    @pytest.mark.parametrize("chunk", [1, 2, 3, 7])
    def test_d30_tail_before_head_with_chunked_inserts(self, policy: EvictionPolicy, chunk: int) -> None:
        """Prompts that are prefilled in pieces, several at a time."""
        chains = [chain_of(1000 * number, 10) for number in range(5)]
        for start in range(0, 10, chunk):
            for chain in chains:
                policy.on_insert(chain[start : start + chunk])
        order = self.victims(policy, 50)
        for chain in chains:
            self.check_tail_first(order, chain)

    def test_d30_tail_before_head_after_hits(self, policy: EvictionPolicy) -> None:
        dice = random.Random(30)
        chains = self.fill(policy, 6, 8)
        for _ in range(40):
            chain = dice.choice(chains)
            policy.on_hit(ids_of(chain[: dice.randint(1, 8)]))
        order = self.victims(policy, 48)
        for chain in chains:
            self.check_tail_first(order, chain)

    # ---- priorities: those of the policy itself, or those that the store gives it

    def test_lower_priorities_leave_first(self) -> None:
        policy = with_priorities(self.make_policy)
        chains: dict[int, list[FamilyId]] = {}
        for number, priority in enumerate((3, -2, 0, 127, -127, 0)):
            chain = [info._replace(priority=priority) for info in chain_of(1000 * number, 5)]
            policy.on_insert(chain)
            chains.setdefault(priority, []).extend(ids_of(chain))
        policy.on_hit(chains[-127])
        policy.on_hit(chains[-2][:3])
        order = self.victims(policy, 30)
        ranks = [next(p for p, ids in chains.items() if family in ids) for family in order]
        assert len(order) == 30
        assert ranks == sorted(ranks), f"priorities leave in the order {ranks}"

    def test_d30_tail_before_head_where_the_head_has_the_higher_priority(self) -> None:
        policy = with_priorities(self.make_policy)
        chain = chain_of(0, 6)
        policy.on_insert([info._replace(priority=1 if info.depth < 3 else 0) for info in chain])
        self.check_tail_first(self.victims(policy, 6), chain)

    def test_a_family_whose_priority_changes_moves(self) -> None:
        policy = with_priorities(self.make_policy)
        chains = [chain_of(1000 * number, 4) for number in range(3)]
        for chain in chains:
            policy.on_insert(chain)
        for chain, priority in ((chains[0], 5), (chains[2], -5)):
            for info in chain:
                policy.on_remove([info.id], evicted=False)
                policy.on_insert([info._replace(priority=priority)])
        order = self.victims(policy, 12)
        assert [set(order[start : start + 4]) for start in (0, 4, 8)] == [
            set(ids_of(chains[number])) for number in (2, 1, 0)
        ]
        for chain in chains:
            self.check_tail_first(order, chain)

    # ---- a long life

    def test_random_life_against_a_model(self, policy: EvictionPolicy) -> None:
        dice = random.Random(11)
        model: dict[FamilyId, BlockInfo] = {}
        free = [FamilyId(number) for number in range(300)]
        for step in range(3000):
            action = dice.random()
            if action < 0.35 and free:
                parent = dice.choice(list(model.values())) if model and dice.random() < 0.7 else None
                info = BlockInfo(
                    id=free.pop(dice.randrange(len(free))),
                    parent=parent.id if parent else None,
                    depth=parent.depth + 1 if parent else 0,
                    bytes=4096 * dice.randint(1, 9),
                )
                model[info.id] = info
                policy.on_insert([info])
            elif action < 0.6 and model:
                used = dice.sample(sorted(model), min(len(model), 3))
                policy.on_hit(sorted(used, key=lambda family: model[family].depth))
            elif model:
                parents = {info.parent for info in model.values()}
                leased = set(dice.sample(sorted(model), len(model) // 4))
                allowed = set(model) - parents - leased
                need = dice.randint(1, 4)
                found = self.victims(policy, need, allowed.__contains__, known=model)
                if len(model) <= 64:
                    assert len(found) >= min(need, len(allowed)), "leaves that may go were not found"
                taken = found[:need]
                policy.on_remove(taken, evicted=dice.random() < 0.8)
                for family in taken:
                    del model[family]
                free += taken
            if step % 500 == 0:
                left = self.victims(policy, len(model), known=model)
                assert set(left) == set(model)

    def test_memory_does_not_grow_with_time(self, policy: EvictionPolicy) -> None:
        def live(count: int) -> int:
            for number in range(count):
                info = BlockInfo(FamilyId(number % 977), None, 0, 4096)
                policy.on_insert([info])
                policy.on_hit([info.id])
                policy.on_remove([info.id], evicted=True)
            gc.collect()
            return sys.getallocatedblocks()

        before = live(2 * self.ghosts_at_most)
        after = live(2 * self.ghosts_at_most)
        assert after - before < self.ghosts_at_most // 10, (
            f"{after - before} more objects after as many families"
        )
