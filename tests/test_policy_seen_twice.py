"""Admission: `always`, and `seen_twice` with its bounded history."""

import os
from collections import OrderedDict

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tierkv.errors import ConfigError
from tierkv.ids import FamilyId
from tierkv.policies.always import AlwaysPolicy
from tierkv.policies.seen_twice import SeenTwicePolicy
from tierkv.policy import AdmissionPolicy, BlockInfo, Verdict
from tierkv.tier import Usage

EMPTY = Usage(capacity_bytes=1 << 30, used_bytes=0, blocks=0, largest_free_bytes=1 << 30)
FULL = Usage(capacity_bytes=1 << 30, used_bytes=1 << 30, blocks=1024, largest_free_bytes=0)


def block_hash(number: int) -> bytes:
    return number.to_bytes(8, "big") * 4


def admits(policy: AdmissionPolicy, number: int, *, tenant: int = 0, family: int = 1) -> bool:
    info = BlockInfo(FamilyId(family), None, 0, 1 << 20, tenant=tenant)
    verdict = policy.admit(info, block_hash(number), EMPTY)
    assert verdict is not Verdict.THROTTLE
    return verdict is Verdict.ADMIT


def test_always_admits_always() -> None:
    policy = AlwaysPolicy()
    info = BlockInfo(FamilyId(1), None, 0, 1 << 20)
    for usage in (EMPTY, FULL, EMPTY):
        assert policy.admit(info, block_hash(1), usage) is Verdict.ADMIT
    assert policy.counters() == {"admitted": 3}


def test_admits_on_the_second_sighting_and_ever_after() -> None:
    policy = SeenTwicePolicy()
    assert [admits(policy, 1) for _ in range(4)] == [False, True, True, True]
    assert not admits(policy, 2)
    assert policy.counters() == {"admitted": 3, "rejected": 2, "rotations": 0}


def test_it_is_the_hash_that_is_seen_not_the_family_id() -> None:
    policy = SeenTwicePolicy()
    assert not admits(policy, 1, family=7)
    assert not admits(policy, 2, family=7), "a reused id is another block"
    assert admits(policy, 1, family=8)


def test_tenants_do_not_see_each_others_sightings() -> None:
    policy = SeenTwicePolicy()
    assert not admits(policy, 1, tenant=1)
    assert not admits(policy, 1, tenant=2)
    assert not admits(policy, 1)
    assert admits(policy, 1, tenant=1)


def test_recognised_within_the_history_and_forgotten_after_two() -> None:
    policy = SeenTwicePolicy(history=100)
    admits(policy, 0)
    assert not any(admits(policy, number) for number in range(1, 101))
    assert admits(policy, 0), "100 other blocks came in between"
    assert not any(admits(policy, number) for number in range(1000, 1200))
    assert not admits(policy, 0)


def test_what_keeps_coming_is_never_forgotten() -> None:
    policy = SeenTwicePolicy(history=10)
    admits(policy, 0)
    for number in range(1, 500):
        assert not admits(policy, number)
        assert admits(policy, 0)


@given(numbers=st.lists(st.integers(0, 40), max_size=300), history=st.integers(1, 12))
def test_beside_an_exact_history(numbers: list[int], history: int) -> None:
    """Never forgets one of the last ``history`` different blocks, never admits one that was not seen among the last
    ``2 * history``."""
    policy = SeenTwicePolicy(history=history)
    seen: OrderedDict[int, None] = OrderedDict()
    for number in numbers:
        newest_first = list(reversed(seen))
        known = admits(policy, number)
        if number in newest_first[:history]:
            assert known
        if known:
            assert number in newest_first[: 2 * history]
        seen[number] = None
        seen.move_to_end(number)
        assert len(policy) <= 2 * history


def test_memory_is_bounded() -> None:
    policy = SeenTwicePolicy(history=500)
    info = BlockInfo(FamilyId(1), None, 0, 1 << 20)
    for _ in range(20_000):
        policy.admit(info, os.urandom(32), FULL)
    assert len(policy) <= 1000
    assert policy.counters()["rotations"] == 39


def test_a_history_of_nothing_is_refused() -> None:
    with pytest.raises(ConfigError, match="history = 0: seen_twice remembers at least 1 block"):
        SeenTwicePolicy(history=0)
