"""The curve over all capacities beside the reference at some of them."""

import pytest
from naive_policies import naive_lru
from replay_support import made_up, piece

from tierkv.replay.curves import knee, miss_ratio_curve


@pytest.mark.parametrize("seed", range(6))
def test_every_capacity_as_the_reference_has_it(seed: int) -> None:
    trace = made_up(seed, requests=120)
    curve = miss_ratio_curve(trace)
    for places in range(1, trace.blocks + 1, 7):
        expected = 100 * naive_lru(trace, places) / trace.references
        assert curve.hit_percent(places) == pytest.approx(expected)


def test_recorded_traffic() -> None:
    trace = piece("conv_a", 600)
    curve = miss_ratio_curve(trace)
    for percent in (0.5, 3, 20, 100):
        places = int(trace.blocks * percent / 100)
        assert curve.hit_percent(places) == pytest.approx(100 * naive_lru(trace, places) / trace.references)


def test_a_sampled_curve_is_near_and_a_knee_is_where_little_more_is_to_be_had() -> None:
    trace = piece("synth_a", 3000)
    exact, sampled = miss_ratio_curve(trace), miss_ratio_curve(trace, sample=0.3)
    for capacity, hit in exact.points(20):
        if capacity > trace.blocks / 20:
            assert abs(sampled.hit_percent(capacity) - hit) < 6
    place = knee(exact.points())
    assert exact.hit_percent(place) >= 0.9 * exact.hit_percent(trace.blocks)
    assert exact.hit_percent(place // 2) < 0.9 * exact.hit_percent(trace.blocks)


def test_nothing_has_no_curve() -> None:
    assert knee([]) == 0
