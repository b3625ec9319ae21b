"""Promotion: `on_hit` takes everything, `break_even` compares."""

import math

import pytest

from tierkv.errors import ConfigError
from tierkv.policies.break_even import TRY_AGAIN_EVERY, BreakEvenPolicy
from tierkv.policies.on_hit import OnHitPolicy
from tierkv.policy import LoadQuote, Promotion
from tierkv.tier import Usage

MIB = 1 << 20
HOST = Usage(capacity_bytes=1000 * MIB, used_bytes=900 * MIB, blocks=900, largest_free_bytes=MIB)


def quote(
    load_s: float | None,
    compute_s: float | None,
    *,
    tier: str = "nvme",
    size_bytes: int = 8 * MIB,
) -> LoadQuote:
    return LoadQuote(tier, 8, size_bytes, 128, load_s, compute_s)


@pytest.mark.parametrize("load_s", [None, 0.0, 1.0, math.inf])
@pytest.mark.parametrize("compute_s", [None, 0.5])
def test_on_hit_promotes_at_any_price(load_s: float | None, compute_s: float | None) -> None:
    policy = OnHitPolicy()
    assert policy.decide(quote(load_s, compute_s), HOST) is Promotion.PROMOTE
    assert policy.counters() == {"promoted": 1}


@pytest.mark.parametrize(
    ("factor", "load_s", "compute_s", "expected"),
    [
        (1.0, 0.9, 1.0, Promotion.PROMOTE),
        (1.0, 1.0, 1.0, Promotion.PROMOTE),
        (1.0, 1.1, 1.0, Promotion.RECOMPUTE),
        (2.0, 1.9, 1.0, Promotion.PROMOTE),
        (2.0, 2.1, 1.0, Promotion.RECOMPUTE),
        (0.5, 0.6, 1.0, Promotion.RECOMPUTE),
        (1.0, math.inf, 1.0, Promotion.RECOMPUTE),
        (1.0, None, 1.0, Promotion.PROMOTE),
        (1.0, 9.9, None, Promotion.PROMOTE),
        (1.0, None, None, Promotion.PROMOTE),
    ],
)
def test_break_even(
    factor: float, load_s: float | None, compute_s: float | None, expected: Promotion
) -> None:
    assert BreakEvenPolicy(factor=factor).decide(quote(load_s, compute_s), HOST) is expected


@pytest.mark.parametrize("load_s", [None, 0.1])
def test_a_run_that_would_empty_host_ram_is_served_only(load_s: float | None) -> None:
    policy = BreakEvenPolicy()
    assert policy.decide(quote(load_s, 1.0, size_bytes=500 * MIB), HOST) is Promotion.PROMOTE
    assert policy.decide(quote(load_s, 1.0, size_bytes=501 * MIB), HOST) is Promotion.SERVE
    assert policy.counters() == {"promoted": 1, "served": 1, "recomputed": 0, "tried_again": 0}


def test_an_edge_that_was_slow_is_tried_again_now_and_then() -> None:
    policy = BreakEvenPolicy()
    decided = [policy.decide(quote(5.0, 1.0), HOST) for _ in range(2 * TRY_AGAIN_EVERY)]
    loaded = [number for number, promotion in enumerate(decided) if promotion is not Promotion.RECOMPUTE]
    assert loaded == [TRY_AGAIN_EVERY - 1, 2 * TRY_AGAIN_EVERY - 1]
    assert policy.counters() == {"promoted": 2, "served": 0, "recomputed": 62, "tried_again": 2}


def test_refusals_are_counted_for_each_tier_and_in_a_row() -> None:
    policy = BreakEvenPolicy()
    for _ in range(TRY_AGAIN_EVERY - 1):
        policy.decide(quote(5.0, 1.0), HOST)
    assert policy.decide(quote(5.0, 1.0, tier="valkey"), HOST) is Promotion.RECOMPUTE
    assert policy.decide(quote(0.5, 1.0), HOST) is Promotion.PROMOTE  # the edge was measured by this one
    assert policy.decide(quote(5.0, 1.0), HOST) is Promotion.RECOMPUTE
    assert policy.counters()["tried_again"] == 0


@pytest.mark.parametrize("factor", [0.0, -1.0, math.inf, math.nan])
def test_a_factor_that_compares_nothing_is_refused(factor: float) -> None:
    with pytest.raises(ConfigError, match="break_even takes a positive number"):
        BreakEvenPolicy(factor=factor)
