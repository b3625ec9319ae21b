"""What was loaded most of late, and how long calls took: small tables that say enough."""

from __future__ import annotations

import hashlib
import random

import pytest

from tests.client_support import chain_of, live, loaded, put_all
from tierkv.clock import FakeClock
from tierkv.hot import HALF_S, MOST_KEPT, MOST_NOTED, HotPrefixes
from tierkv.ids import BlockHash, NamespaceDigest
from tierkv.timing import BOUNDS_S, Timing

NAMESPACE = NamespaceDigest(bytes(32))


def hashes(count: int, seed: str) -> tuple[BlockHash, ...]:
    return tuple(BlockHash(hashlib.sha256(f"{seed} {i}".encode()).digest()) for i in range(count))


def test_a_shared_prefix_is_told_and_what_is_only_part_of_it_is_not() -> None:
    hot = HotPrefixes(FakeClock())
    shared = hashes(8, "system prompt")
    for i in range(50):
        hot.note(NAMESPACE, shared + hashes(3, f"user {i}"), 11)
    top = hot.top(3)
    assert (top[0].block_hash, top[0].blocks, top[0].loads) == (shared[7], 8, 50)
    assert not {one.block_hash for one in top} & set(shared[:7])


def test_a_shorter_prefix_with_loads_of_its_own_is_told_too() -> None:
    hot = HotPrefixes(FakeClock())
    long, short = hashes(4, "a"), hashes(4, "a")[:2]
    for _ in range(6):
        hot.note(NAMESPACE, long, 4)
    for _ in range(5):
        hot.note(NAMESPACE, (*short, *hashes(2, "b")), 2)
    assert [(one.blocks, one.loads) for one in hot.top(9)] == [(4, 6), (2, 11)]


def test_the_table_is_bounded_and_keeps_what_is_frequent() -> None:
    hot, dice = HotPrefixes(FakeClock()), random.Random(1)
    frequent = [hashes(1, f"often {i}") for i in range(5)]
    for turn in range(20_000):
        chain = dice.choice(frequent) if dice.random() < 0.2 else hashes(1, f"once {turn}")
        hot.note(NAMESPACE, chain, 1)
        if turn % 500 == 0:
            hot.take_in()
    assert {one.block_hash for one in hot.top(5)} == {chain[0] for chain in frequent}
    assert len(hot.top(10 * MOST_KEPT)) <= MOST_KEPT


def test_notes_are_bounded_and_counts_fade() -> None:
    clock = FakeClock()
    hot = HotPrefixes(clock)
    chain = hashes(1, "x")
    for _ in range(3 * MOST_NOTED):
        hot.note(NAMESPACE, chain, 1)
    assert hot.top(1)[0].loads == MOST_NOTED
    clock.advance(HALF_S)
    assert hot.top(1)[0].loads == pytest.approx(MOST_NOTED / 2)
    clock.advance(100 * HALF_S)
    assert hot.top(1) == []


@pytest.mark.parametrize("blocks", [0, 1, 2, 3, 4, 7, 8, 1000])
def test_any_length_of_a_prompt(blocks: int) -> None:
    hot = HotPrefixes(FakeClock())
    hot.note(NAMESPACE, hashes(max(blocks, 5), "y"), blocks)
    assert [one.blocks for one in hot.top(9)] == ([1 << blocks.bit_length() - 1] if blocks else [])


def test_loads_of_a_store_are_noted() -> None:
    with live(8) as rig:
        chain = chain_of(rig.namespace(), 4)
        put_all(rig.client, chain)
        for _ in range(3):
            assert loaded(rig.client, chain) == 4
        (top,) = rig.store.hot.top(5)
        assert (top.block_hash, top.blocks) == (chain.hashes[3], 4)
        assert top.loads == pytest.approx(3, abs=0.1)


def test_percentiles_lie_within_a_bucket_of_the_truth() -> None:
    dice, timing = random.Random(2), Timing()
    truth = sorted(dice.lognormvariate(-5, 1.5) for _ in range(5_000))
    for seconds in truth:
        timing.observe(seconds, 0.0)
    times = timing.times()
    assert (times.calls, times.sum_s) == (5_000, pytest.approx(sum(truth)))
    for share in (0.01, 0.5, 0.95, 0.99):
        true_s, told_s = truth[int(share * 5_000) - 1], times.quantile_s(share)
        low_s = max((bound for bound in BOUNDS_S if bound < true_s), default=0.0)
        high_s = min(bound for bound in BOUNDS_S if bound >= true_s)
        assert told_s is not None
        assert low_s <= told_s <= high_s


def test_percentiles_at_the_ends() -> None:
    timing = Timing()
    nothing = {"count": 0, "recent_count": 0, "p50_s": None, "p95_s": None, "p99_s": None}
    assert timing.facts(0.0) == nothing
    timing.observe(99.0, 0.0)
    assert timing.times().quantile_s(0.5) == BOUNDS_S[-1]
    assert timing.times().buckets[-1] == 1
    timing = Timing()
    timing.observe(BOUNDS_S[0], 0.0)  # a bound belongs to its bucket
    assert timing.times().buckets[0] == 1


def test_people_are_told_the_percentiles_of_the_last_minutes() -> None:
    timing, minute_s = Timing(), 60.0
    for _ in range(100):
        timing.observe(2.0, 0.5 * minute_s)
    timing.observe(0.0004, 4.9 * minute_s)
    assert timing.facts(4.9 * minute_s)["recent_count"] == 101
    assert timing.recent(4.9 * minute_s).sum_s == pytest.approx(200.0004)
    five = timing.facts(5 * minute_s)
    assert (five["count"], five["recent_count"]) == (101, 1), "the first minute is over by five"
    assert five["p99_s"] == timing.recent(5 * minute_s).quantile_s(0.99) <= 0.0005
    timing.observe(0.0004, 5 * minute_s)  # where the first minute was
    assert timing.recent(5 * minute_s).calls == 2
    assert timing.facts(60 * minute_s) == {**timing.facts(10 * minute_s), "recent_count": 0, "p50_s": None}
    assert timing.times().calls == 102
