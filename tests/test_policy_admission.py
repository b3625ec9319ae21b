"""Admission by size, by rate and by what a write promises; promotion at the n-th hit."""

import random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tierkv.clock import FakeClock
from tierkv.errors import ConfigError
from tierkv.ids import FamilyId
from tierkv.policies.never import NeverPolicy
from tierkv.policies.nth_hit import NthHitPolicy
from tierkv.policies.sightings import Sightings
from tierkv.policies.size_range import SizeRangePolicy
from tierkv.policies.worth_writing import LEAST_TRIALS, WorthWritingPolicy
from tierkv.policies.write_rate import DAY_S, WriteRatePolicy
from tierkv.policy import BlockInfo, LoadQuote, Promotion, Verdict
from tierkv.replay.traces import mix
from tierkv.tier import Usage

MIB = 1 << 20


def usage(capacity_blocks: int, used_blocks: int) -> Usage:
    return Usage(capacity_blocks * MIB, used_blocks * MIB, used_blocks, 0)


def named(number: int) -> bytes:
    return mix(np.array([number], dtype=np.uint64)).tobytes()


def info(number: int, depth: int = 0, size: int = MIB) -> BlockInfo:
    return BlockInfo(FamilyId(number % 1000 + 1), None, depth, size)


def test_size_range() -> None:
    policy = SizeRangePolicy(least_bytes=100, most_bytes=200)
    verdicts = [policy.admit(info(1, size=size), b"", usage(8, 0)) for size in (99, 100, 200, 201)]
    assert verdicts == [Verdict.REJECT, Verdict.ADMIT, Verdict.ADMIT, Verdict.REJECT]
    assert policy.counters() == {"admitted": 2, "too_small": 1, "too_large": 1}
    with pytest.raises(ConfigError, match="least size"):
        SizeRangePolicy(least_bytes=2, most_bytes=1)


def test_write_rate_keeps_to_its_budget_over_days() -> None:
    clock, dice = FakeClock(), random.Random(7)
    policy = WriteRatePolicy(drive_writes_a_day=2.0, clock=clock)
    written = 0
    for _ in range(20_000):
        clock.advance(dice.expovariate(1 / 20))
        if policy.admit(info(1), b"", usage(1000, 1000)) is Verdict.ADMIT:
            written += 1
    days = clock.now_s() / DAY_S
    assert written <= 2.0 * 1000 * (days + 1 / 24)
    assert written >= 0.95 * min(20_000, 2.0 * 1000 * days)
    assert policy.counters() == {"admitted": written, "throttled": 20_000 - written}


def test_write_rate_lets_a_burst_through_and_then_waits() -> None:
    clock = FakeClock()
    policy = WriteRatePolicy(drive_writes_a_day=24.0, clock=clock)  # the whole capacity in an hour
    verdicts = [policy.admit(info(1), b"", usage(10, 0)) for _ in range(12)]
    assert verdicts == [Verdict.ADMIT] * 10 + [Verdict.THROTTLE] * 2
    clock.advance(361)
    assert policy.admit(info(1), b"", usage(10, 0)) is Verdict.ADMIT
    with pytest.raises(ConfigError, match="positive"):
        WriteRatePolicy(drive_writes_a_day=0)


def quote(last_hash: bytes) -> LoadQuote:
    return LoadQuote("nvme", 1, MIB, 16, None, None, last_hash)


def test_nth_hit_serves_first_and_keeps_later() -> None:
    policy = NthHitPolicy(nth=3)
    decisions = [policy.decide(quote(named(1)), usage(8, 8)) for _ in range(4)]
    assert decisions == [Promotion.SERVE, Promotion.SERVE, Promotion.PROMOTE, Promotion.PROMOTE]
    assert policy.decide(quote(named(2)), usage(8, 8)) is Promotion.SERVE
    assert policy.decide(quote(b""), usage(8, 8)) is Promotion.PROMOTE
    assert policy.counters() == {"promoted": 3, "served": 3}
    with pytest.raises(ConfigError):
        NthHitPolicy(nth=0)


def test_never() -> None:
    policy = NeverPolicy()
    assert policy.decide(quote(b""), usage(8, 0)) is Promotion.RECOMPUTE
    assert policy.counters() == {"recomputed": 1}


@given(marks=st.lists(st.integers(0, 30), max_size=200), history=st.integers(1, 10))
def test_sightings_beside_a_plain_dict(marks: list[int], history: int) -> None:
    """Never forgets one of the last ``history`` different marks, remembers none beyond twice as many."""
    seen, plain = Sightings(history), dict[int, int]()
    for note, mark in enumerate(marks, 1):
        newest = list(plain)[::-1]
        found = seen.see(mark, note)
        if mark in newest[:history]:
            assert found == plain[mark]
        if found is not None:
            assert found == plain[mark]
            assert mark in newest[: 2 * history]
        plain.pop(mark, None)
        plain[mark] = note
        assert len(seen) <= 2 * history


# ---- what a write promises


def asked(
    policy: WorthWritingPolicy, numbers: list[int], places: int, *, used: int | None = None
) -> list[bool]:
    state = usage(places, places if used is None else used)
    return [policy.admit(info(number), named(number), state) is Verdict.ADMIT for number in numbers]


def test_free_room_is_filled_but_for_the_few_that_are_left_out_to_see() -> None:
    policy = WorthWritingPolicy()
    admitted = sum(asked(policy, list(range(2000)), 10_000, used=0))
    assert 0.88 < admitted / 2000 < 0.98


def test_in_a_full_tier_new_blocks_that_do_not_come_back_are_kept_out_in_time() -> None:
    policy = WorthWritingPolicy()
    asked(policy, list(range(20_000)), 500)
    assert not any(asked(policy, list(range(20_000, 21_000)), 500))


def test_what_comes_back_in_time_is_let_in_and_what_comes_late_is_not() -> None:
    policy = WorthWritingPolicy()
    asked(policy, list(range(20_000)), 500)
    assert all(asked(policy, list(range(19_900, 20_000)), 500))
    places = 20
    late = WorthWritingPolicy()
    asked(late, list(range(20_000)), places)
    asked(
        late, list(range(19_999, 19_799, -1)) * 40, places
    )  # all are let in: the tier keeps nothing for long
    assert not any(asked(late, list(range(18_000, 18_100)), places))


def test_new_blocks_are_let_in_where_they_mostly_come_back() -> None:
    policy, places = WorthWritingPolicy(), 400
    dice = random.Random(3)
    pool: list[int] = []
    admitted, new = 0, 0
    for number in range(30_000):
        pool.append(number)
        state = usage(places, places)
        fresh = policy.admit(info(number), named(number), state) is Verdict.ADMIT
        if number > 20_000:
            new += 1
            admitted += fresh
        if not fresh and len(pool) > 20:  # a miss: it is computed and offered again soon
            again = pool.pop(dice.randrange(10))
            policy.admit(info(again), named(again), state)
        del pool[:-60]
    assert policy.counters()["left_out"] > LEAST_TRIALS
    assert admitted / new > 0.2, "new blocks come back, and yet they are kept out"


def test_the_memory_of_the_gate_is_bounded() -> None:
    policy = WorthWritingPolicy()
    for start in range(0, 60_000, 100):
        asked(policy, [*range(start, start + 100), *range(start, start + 100)], 100)
    assert len(policy._seen) <= 2 * 4096 + 1
    assert len(policy._left_out) <= 100
    assert len(policy._back) <= 100
