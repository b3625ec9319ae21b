"""The hit ceiling: the sketch against sets, and an endless cache simulated beside the store."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from tests.client_support import PATIENCE_S, chain_of, live, loaded, prompt, put, put_all
from tests.valkey_server import running_server
from tierkv.ceiling import MOST_WAITING, Ceiling, Sketch, Tally
from tierkv.ids import BlockHash
from tierkv.testing.threads import run_together


def names(count: int, seed: str = "") -> list[BlockHash]:
    return [BlockHash(hashlib.sha256(f"{seed} {i}".encode()).digest()) for i in range(count)]


def words(hashes: Sequence[BlockHash]) -> np.ndarray[tuple[int, ...], np.dtype[np.uint64]]:
    return np.frombuffer(b"".join(hashes), np.uint64).reshape(-1, 4)[:, 1].copy()


@pytest.mark.parametrize("count", [1, 10, 300, 5_000, 60_000])
def test_the_sketch_counts_what_is_new(count: int) -> None:
    """In batches of many sizes; 5 standard deviations of 0.65 %, so a right sketch passes for any hash but few."""
    dice = random.Random(count)
    everything = words(names(count, "sketch"))
    sketch, new, start = Sketch(), 0.0, 0
    while start < count:
        size = dice.choice((1, 7, 100, 3000))
        new += sketch.add(everything[start : start + size])
        start += size
    assert new == pytest.approx(count, rel=0.0325, abs=0.5)
    assert sketch.add(everything) == 0.0, "nothing is new the second time"


def test_the_sketch_counts_one_batch_like_many() -> None:
    everything = words(names(20_000, "batch"))
    doubled = np.concatenate([everything, everything])
    assert Sketch().add(doubled) == pytest.approx(20_000, rel=0.0325)


def test_a_small_sketch_is_unbiased_far_beyond_its_size() -> None:
    found = [Sketch(6).add(words(names(10_000, f"small {i}"))) for i in range(40)]
    assert np.mean(found) == pytest.approx(10_000, rel=0.1)  # 5 standard deviations of the mean of 40


def test_the_hash_of_zeros_is_one_like_any_other() -> None:
    for number in (0, 1, 2**64 - 1, 2**50 - 1, 2**49):
        assert Sketch().add(np.array([number], np.uint64)) == 1.0


def test_an_endless_cache_beside_it() -> None:
    """Requests with shared beginnings, stores of what was decoded, in any order: against plain sets."""
    dice = random.Random(11)
    ceiling, tally = Ceiling(), Tally()
    seen: set[bytes] = set()
    asked = first_seen = 0
    for turn in range(600):
        chain = names(dice.randrange(1, 60), f"family {dice.randrange(200)}")
        if turn % 3 == 0:
            ceiling.stored(1, chain, range(len(chain)))
        else:
            ceiling.give((tally,), 1, chain, 0, None)
            asked += len(chain)
            first_seen += len(set(chain) - seen)
        seen.update(chain)
    assert tally.asked == asked
    assert tally.first_seen == pytest.approx(first_seen, rel=0.0325, abs=1)
    assert tally.values()["ceiling"] == pytest.approx(1 - first_seen / asked, abs=0.02)


def test_many_stores_are_taken_in_before_the_next_question() -> None:
    ceiling, tally = Ceiling(), Tally()
    chain = names(3 * MOST_WAITING + 7)
    for start in range(0, len(chain), 5):
        ceiling.stored(1, chain, range(start, min(start + 5, len(chain))))
    ceiling.give((tally,), 1, chain, 0, None)
    assert tally.first_seen == 0.0


def test_the_same_hash_in_two_namespaces_is_two_blocks() -> None:
    ceiling, tally = Ceiling(), Tally()
    for mark in (1, 2**64 - 1):
        ceiling.give((tally,), mark, names(100), 0, None)
    assert tally.first_seen == pytest.approx(200, rel=0.0325, abs=1)


def test_threads_count_each_request_once() -> None:
    ceiling, tally = Ceiling(), Tally()

    def work(seed: int) -> None:
        for i in range(200):
            chain = names(10, f"{seed} {i}")
            question = ceiling.look((tally,), 1, chain, 0, 0)
            ceiling.stored(1, chain, range(10))
            ceiling.give_all((tally,), 10, question)

    run_together([lambda seed=seed: work(seed) for seed in range(6)], 2 * PATIENCE_S)  # type: ignore[misc]
    assert (tally.asked, tally.hit) == (12_000, 12_000)
    assert tally.first_seen == pytest.approx(12_000, rel=0.0325)


# ---- in a store


def test_d28_a_request_is_counted_once_however_often_it_looks(tmp_path: Path) -> None:
    with live(8, nvme=tmp_path) as rig:
        chain = chain_of(rig.namespace(), 4)
        for _ in range(5):
            rig.client.match(chain)
        rig.client.prefetch(chain).result(PATIENCE_S)
        assert loaded(rig.client, chain) == 0
        told = rig.client.stats()["asked_here"]
        assert told == {"asked_blocks": 4, "hit_blocks": 0, "ceiling": pytest.approx(0.0, abs=0.01)}
        put_all(rig.client, chain)
        rig.client.match(chain)
        assert loaded(rig.client, chain) == 4
        assert loaded(rig.client, chain) == 4, "a load without a look is a request of its own"
        told = rig.client.stats()["asked"]
        assert told == {
            "asked_blocks": 12,
            "hit_blocks": 8,
            "ceiling": pytest.approx(8 / 12, abs=0.01),
            "namespaces": {
                chain.namespace.digest.hex()[:16]: {
                    "asked_blocks": 12,
                    "hit_blocks": 8,
                    "ceiling": pytest.approx(8 / 12, abs=0.01),
                }
            },
        }


def test_what_an_engine_has_itself_is_not_asked_for() -> None:
    with live(8) as rig:
        chain = chain_of(rig.namespace(), 4)
        put_all(rig.client, chain)
        rig.client.match(chain, local_computed=32)
        rig.client.match(chain, local_computed=32)
        assert loaded(rig.client, chain) == 4
        told = rig.client.stats()["asked_here"]
        assert told == {"asked_blocks": 2, "hit_blocks": 2, "ceiling": 1.0}


def test_a_cache_that_is_too_small_falls_short_of_its_ceiling() -> None:
    """Five prompts in turn through room for two of them: the ceiling is 4 of 5 rounds, the cache hits little."""
    with live(8) as rig:
        space = rig.namespace()
        for _ in range(5):
            for seed in range(5):
                chain = chain_of(space, 4, seed)
                with rig.client.load(chain):
                    pass
                put(rig.client, chain)
        told = rig.client.stats()["asked"]
        assert isinstance(told, dict)
        assert told["asked_blocks"] == 100
        assert told["ceiling"] == pytest.approx(0.8, abs=0.01)
        assert told["hit_blocks"] < 40


def test_what_was_decoded_and_never_asked_for_counts_as_seen() -> None:
    """The next turn of a conversation asks for what the last one decoded: an endless cache has it."""
    with live(2) as rig:
        space = rig.namespace()
        first, second = space.chain(prompt(33)), space.chain(prompt(65))
        with rig.client.load(first):
            pass
        put(rig.client, second)  # 2 blocks of the prompt, 2 decoded; there is room for 2
        with rig.client.load(second):
            pass
        told = rig.client.stats()["asked"]
        assert isinstance(told, dict)
        # 6 asked; 2 were new to all, and the last 2 found no room and count as never stored.
        assert told["ceiling"] == pytest.approx(1 - 4 / 6, abs=0.01)
        rig.client.clear().result(PATIENCE_S)
        put(rig.client, first)
        before = rig.client.stats()["asked"]
        with rig.client.load(second):
            pass
        after = rig.client.stats()["asked"]
        assert isinstance(before, dict)
        assert isinstance(after, dict)
        assert after["ceiling"] == pytest.approx(1 - 4 / 10, abs=0.01)


def test_what_only_the_server_knew_was_not_new(tmp_path: Path) -> None:
    with running_server() as server:
        with live(8, valkey=server.address) as rig:
            put_all(rig.client, chain_of(rig.namespace(), 4))
            rig.flush("valkey")
        with live(8, valkey=server.address) as rig:
            chain = chain_of(rig.namespace(), 6)
            assert rig.client.match(chain).blocks == 0
            assert loaded(rig.client, chain) == 4
            told = rig.client.stats()["asked_here"]
            assert told == {"asked_blocks": 6, "hit_blocks": 4, "ceiling": pytest.approx(4 / 6, abs=0.01)}
