"""``ByPriority``: the contract holds for a policy that knows no priorities, once it is wrapped."""

from __future__ import annotations

from tests.test_contracts_eviction import PlainLru
from tierkv.policies.by_priority import ByPriority, with_priorities
from tierkv.policies.lru import LruPolicy
from tierkv.policy import EvictionPolicy
from tierkv.testing.eviction import Asked, EvictionPolicyContract, chain_of, ids_of


class TestContract(EvictionPolicyContract):
    def make_policy(self) -> EvictionPolicy:
        return ByPriority(PlainLru)


class TestContractOfWrappedLru(EvictionPolicyContract):
    def make_policy(self) -> EvictionPolicy:
        return ByPriority(LruPolicy)


def test_only_a_policy_without_priorities_is_wrapped() -> None:
    assert type(with_priorities(LruPolicy)) is LruPolicy
    assert type(with_priorities(PlainLru)) is ByPriority
    assert with_priorities(PlainLru).name == PlainLru().name


def test_a_parent_of_another_priority_is_none_that_the_policy_knows() -> None:
    class Strict(LruPolicy):
        def on_insert(self, infos):  # type: ignore[no-untyped-def]
            known = {info.id for info in infos} | {i for i in range(len(self._where)) if self._where[i]}
            assert all(info.parent is None or info.parent in known for info in infos)
            super().on_insert(infos)

    policy = ByPriority(Strict)
    chain = chain_of(0, 4)
    policy.on_insert([info._replace(priority=1 if info.depth < 2 else 0) for info in chain])
    assert list(policy.victims(4, lambda _: True)) == [3, 2, 1, 0]


def test_the_bound_holds_over_all_priorities_together() -> None:
    policy = ByPriority(LruPolicy)
    for priority in range(-50, 50):
        policy.on_insert([info._replace(priority=priority) for info in chain_of(5000 + 100 * priority, 20)])
    asked = Asked(lambda _: False)
    assert list(policy.victims(3, asked)) == []
    assert asked.times == 4 * 3 + 64


def test_a_family_that_is_told_again_with_another_priority_is_there_once() -> None:
    policy = ByPriority(LruPolicy)
    chain = chain_of(0, 3)
    policy.on_insert(chain)
    policy.on_insert([info._replace(priority=7) for info in chain])
    assert sorted(policy.victims(10, lambda _: True)) == ids_of(chain)
    policy.on_remove(ids_of(chain), evicted=False)
    assert list(policy.victims(10, lambda _: True)) == []
