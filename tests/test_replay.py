"""The replayer beside plain references, on recorded and made-up traffic."""

import pytest
from naive_policies import naive_lru, naive_optimum
from replay_support import NAMES, capacity, made_up, piece, recorded

from tierkv.policies.lru import LruPolicy
from tierkv.replay.one_tier import replay
from tierkv.replay.optimum import replay_optimum


@pytest.mark.parametrize(
    ("name", "percent"), [("conv_a", 1), ("conv_a", 10), ("synth_a", 1), ("synth_a", 10), ("agentic_a", 10)]
)
def test_lru_hits_what_the_reference_hits_to_the_block(name: str, percent: float) -> None:
    trace = recorded(name)
    places = capacity(trace, percent)
    assert replay(trace, places, LruPolicy()).hit_blocks == naive_lru(trace, places)


@pytest.mark.parametrize("seed", range(20))
def test_lru_on_made_up_traffic(seed: int) -> None:
    trace = made_up(seed)
    for places in (3, 17, 60, 400):
        assert replay(trace, places, LruPolicy()).hit_blocks == naive_lru(trace, places)


@pytest.mark.parametrize("seed", range(10))
def test_the_optimum_on_made_up_traffic(seed: int) -> None:
    trace = made_up(seed)
    for places in (3, 17, 60, 400):
        found = replay_optimum(trace, places).hit_blocks
        assert found == naive_optimum(trace, places)
        assert found >= naive_lru(trace, places)


@pytest.mark.parametrize("name", NAMES)
def test_the_optimum_on_recorded_traffic(name: str) -> None:
    trace = piece(name, 250)
    places = capacity(trace, 5)
    assert replay_optimum(trace, places).hit_blocks == naive_optimum(trace, places)


def test_known_figures() -> None:
    """Worked out once by a program of another language: a check that neither side drifts with the other."""
    trace = recorded("conv_a")
    assert round(replay(trace, capacity(trace, 5), LruPolicy()).hit_percent, 2) == 10.72
    best = replay_optimum(trace, capacity(trace, 5))
    assert (round(best.hit_percent, 2), round(best.late_hit_percent, 2)) == (33.03, 34.92)
