"""Each classic policy hits, to the block, what a plain implementation of it hits: alone and with leaves first, on
made-up and on recorded traffic."""

from collections.abc import Callable

import pytest
from naive_policies import (
    Naive,
    NaiveArc,
    NaiveLfu,
    NaiveS3Fifo,
    NaiveSieve,
    NaiveSlru,
    NaiveTinyLfu,
    naive_hits,
)
from replay_support import NAMES, capacity, made_up, piece

from tierkv.policies import frequency
from tierkv.policies.arc import ArcPolicy
from tierkv.policies.gdsf import GdsfPolicy
from tierkv.policies.leaf_first import LeafFirst
from tierkv.policies.lfu import LfuPolicy
from tierkv.policies.ordered import OrderedPolicy
from tierkv.policies.s3fifo import S3FifoPolicy
from tierkv.policies.sieve import SievePolicy
from tierkv.policies.slru import SlruPolicy
from tierkv.policies.w_tinylfu import WTinyLfuPolicy
from tierkv.replay.one_tier import BareTier, replay, through

PAIRS: list[tuple[Callable[[], OrderedPolicy], type[Naive]]] = [
    (SlruPolicy, NaiveSlru),
    (LfuPolicy, NaiveLfu),
    (ArcPolicy, NaiveArc),
    (S3FifoPolicy, NaiveS3Fifo),
    (SievePolicy, NaiveSieve),
    (WTinyLfuPolicy, NaiveTinyLfu),
    (GdsfPolicy, NaiveLfu),  # where all blocks cost the same
]


@pytest.fixture(autouse=True)
def _exact_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    """A sketch that is wide beside the traffic confuses nobody with another."""
    monkeypatch.setattr(frequency, "LEAST_WIDTH", 1 << 18)


both = pytest.mark.parametrize(("make", "naive"), PAIRS, ids=[naive.__name__ for _, naive in PAIRS])


@both
@pytest.mark.parametrize("seed", range(3))
def test_made_up_traffic(make: Callable[[], OrderedPolicy], naive: type[Naive], seed: int) -> None:
    trace = made_up(seed, requests=150)
    for places in (7, 40, 150):
        expected = naive_hits(trace, places, naive(trace.hashes), leaves_only=True)
        assert replay(trace, places, LeafFirst(make())).hit_blocks == expected
        alone = naive_hits(trace, places, naive(trace.hashes), leaves_only=False)
        assert through(BareTier(trace, places, make()), trace).hit_blocks == alone


@both
@pytest.mark.parametrize("name", NAMES)
def test_recorded_traffic(make: Callable[[], OrderedPolicy], naive: type[Naive], name: str) -> None:
    trace = piece(name, {"conv_a": 40, "synth_a": 100, "agentic_a": 9}[name])
    places = capacity(trace, 15)
    expected = naive_hits(trace, places, naive(trace.hashes), leaves_only=True)
    assert replay(trace, places, LeafFirst(make())).hit_blocks == expected
    alone = naive_hits(trace, places, naive(trace.hashes), leaves_only=False)
    assert through(BareTier(trace, places, make()), trace).hit_blocks == alone
