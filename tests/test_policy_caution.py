"""DensityPolicy on traffic for which LRU is the better rule: it becomes LRU before it loses more than half a point."""

import random
from bisect import bisect_left
from collections.abc import Callable, Iterator
from itertools import accumulate

import pytest

from tierkv.policies.caution import FULL, Caution
from tierkv.policies.density import DensityPolicy
from tierkv.policies.lru import LruPolicy
from tierkv.policies.reuse import ReuseTable
from tierkv.replay.one_tier import OneTier, replay, through
from tierkv.replay.traces import Request, Trace

Prompt = list[tuple[int, int]]
"""Names of blocks."""


class Prompts:
    def __init__(self) -> None:
        self.dice = random.Random(1)
        self.count = 0

    def new(self, least: int, most: int) -> Prompt:
        self.count += 1
        return [(self.count, place) for place in range(self.dice.randint(least, most))]

    def popular(self, count: int, exponent: float) -> Callable[[], Prompt]:
        """One of so many, the first ones more often (Zipf)."""
        prompts = [self.new(3, 20) for _ in range(count)]
        sums = list(accumulate((rank + 1) ** -exponent for rank in range(count)))
        return lambda: prompts[bisect_left(sums, self.dice.random() * sums[-1])]


def fashions() -> Iterator[Prompt]:
    """Others are popular every now and then, all at once."""
    made = Prompts()
    for _ in range(5):
        popular = made.popular(400, 0.8)
        for _ in range(1200):
            yield popular()


def habits() -> Iterator[Prompt]:
    """Documents and conversations by turns."""
    made = Prompts()
    popular, talks = made.popular(800, 0.9), list[Prompt]()
    for turn in range(6):
        for _ in range(800):
            if turn % 2 == 0:
                yield popular()
                continue
            if len(talks) < 40 or made.dice.random() < 0.15:
                talks.append(made.new(2, 8))
            place = max(0, len(talks) - 1 - int(made.dice.expovariate(1 / 15)))
            talks[place] = talks[place] + made.new(1, 3)
            yield talks[place]


def at_the_edge() -> Iterator[Prompt]:
    """What comes back does so just before LRU would evict it, with all others used once."""
    made, past = Prompts(), list[Prompt]()
    for _ in range(10_000):
        back = len(past) > 600 and made.dice.random() < 0.5
        past.append(past[-made.dice.choice((20, 60, 200, 500))] if back else made.new(2, 8))
        yield past[-1]


def growing() -> Iterator[Prompt]:
    """Conversations that go on after any time."""
    made = Prompts()
    talks = [made.new(2, 10) for _ in range(200)]
    for _ in range(5000):
        place = made.dice.randrange(200)
        yield talks[place]
        talks[place] = talks[place] + made.new(1, 4) if made.dice.random() < 0.88 else made.new(2, 10)


def trace_of(prompts: list[list[int]]) -> Trace:
    return Trace("made up", 16, [Request(float(at), ids, 16 * len(ids)) for at, ids in enumerate(prompts)])


@pytest.mark.parametrize(
    ("prompts", "percent"), [(fashions, 10), (habits, 4), (at_the_edge, 6), (growing, 15)]
)
def test_no_more_than_half_a_point_is_lost(prompts: Callable[[], Iterator[Prompt]], percent: float) -> None:
    numbers: dict[tuple[int, int], int] = {}
    trace = trace_of([[numbers.setdefault(name, len(numbers)) for name in one] for one in prompts()])
    places = int(trace.blocks * percent / 100)
    lru, ours = (replay(trace, places, policy).hit_percent for policy in (LruPolicy(), DensityPolicy()))
    assert lru > 15
    assert ours > lru - 0.5


def test_it_begins_as_lru() -> None:
    """Two hot prompts and many that are used once: what comes first is as with LRU."""
    trace = trace_of([[at % 2] if at % 5 == 0 else [at + 2] for at in range(400)])
    left = list[list[int]]()
    for policy in (LruPolicy(), DensityPolicy()):
        tier = OneTier(trace, 50, policy)
        through(tier, trace)
        left.append([place for place, here in enumerate(tier.resident) if here])
    assert left[0] == left[1]


def test_who_does_as_lru_never_seems_to_do_worse() -> None:
    """Where LRU's edge is counted coarsely blocks that left in its order may seem to be on this side of it."""
    caution = Caution()
    caution.edge_at(100, 200, 0.5)
    for _ in range(50):
        caution.oldest_is(150)
        caution.used_here(10, 150)
        caution.used_gone(16, 149)
        caution.look(500)
    assert caution.clearly > 0.5


def test_harm_makes_it_lru_at_once_and_the_way_back_is_slow() -> None:
    caution = Caution()
    caution.edge_at(100, 200, 0.5)
    while caution.clearly < FULL:
        caution.look(500)
    caution.used_gone(160, 201)
    for _ in range(3):
        caution.look(500)
    assert caution.clearly == 0
    for _ in range(20):
        caution.look(500)
    assert caution.clearly < 0.4


def test_where_lrus_edge_lies() -> None:
    """Of 4 places; a stretch of time in which nothing was used any more ends the one before it all the same."""
    table = ReuseTable(2)
    assert table.edge_of(4) == (0, 0, 0)
    table.begin_stretch(100)
    table.watch(0, 5)
    table.begin_stretch(200)
    table.watch(1, 5)
    table.begin_stretch(300)
    assert table.edge_of(4) == (200, 299.5, 0.8)
    assert table.edge_of(6) == (100, 199.5, 0.2)
    table.unwatch(1, 2, 5)
    table.begin_stretch(400)
    assert table.edge_of(4) == (100, 199.5, 0.8)
    assert table.edge_of(6) == (0, 0, 0)
