"""The whole store in one thread against a seeded adversary: 300 seeds, two thirds of them with tiers that fail.

Another seed is one command: ``python -m tierkv.testing.adversary --seed 17 --verbose``. What each life checks after
every event stands in ``tierkv.testing.invariants``, what clients do in ``tierkv.testing.sim_clients``.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from functools import cache

import pytest

from tests.store_support import FAULTS, Told, live, simulate
from tierkv.testing.invariants import check_invariants
from tierkv.testing.sim_tier import Faults, Mood
from tierkv.testing.sim_world import LAYOUTS, Shape, bytes_of, world

CHUNK = 10
SEEDS = range(300)


@cache
def told(seed: int) -> Told:
    """Each life is lived once, whoever asks."""
    return live(seed)


def chunks(seeds: range) -> list[range]:
    return [seeds[start : start + CHUNK] for start in range(0, len(seeds), CHUNK)]


@pytest.mark.parametrize("seeds", chunks(SEEDS), ids=str)
def test_d9_d10_d11_d13_d16_d17_d27_d30_lives(seeds: range) -> None:
    for seed in seeds:
        told(seed)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_d8_lives_with_every_shape_of_block(layout: str) -> None:
    """Among them two layer groups of which one is a window, two ranks, n = 4; a state; a part that all ranks share."""
    for seed in range(2000, 2003):
        simulate(seed, layouts=(layout,))
        simulate(seed, layouts=(layout,), faults=FAULTS)


@pytest.mark.parametrize("seeds", chunks(range(3000, 3020)), ids=str)
def test_no_wake_up_is_lost(seeds: range) -> None:
    """Time does not pass as long as anything can happen, so a deadline that is met was somebody's forgetfulness."""
    for seed in seeds:
        life = simulate(seed, patient=True)
        assert ("load_deadline_total",) not in life.counters


def test_d17_what_waits_for_a_dead_tier_is_bounded() -> None:
    shape = replace(
        Shape.of(1, ("plain",)),
        nvme_bytes=None,
        valkey_bytes=100_000,
        writes=("through", "through"),
        nest_chance=0.0,
    )
    with world(shape, faults=Faults(unavailable=1.0)) as made:
        space = made.client.open_namespace(made.specs()[0])
        for prompt in range(300):
            chain = space.chain([prompt] * 17)
            made.client.put(chain, [bytes_of(space.namespace.block_key(chain.hashes[0], 0), 4096)])
            made.sim.pass_time(0.1)  # what failed rests for a while
        edge = made.store.edges[1]
        assert edge.tier.breaker.is_open
        assert len(edge.backlog) <= shape.limits.max_families
        check_invariants(made.store)


def test_d16_a_region_that_cannot_be_emptied_is_left_alone() -> None:
    """A block of another size finds no region, since each holds something leased: then the rest stays as well."""
    shape = replace(
        Shape.of(1, ("plain", "large")),
        nvme_bytes=None,
        valkey_bytes=None,
        host_bytes=4 * 16384,
        region_bytes=16384,
    )
    with world(shape) as made:
        small, large = [made.client.open_namespace(spec) for spec in made.specs()]
        chains = [small.chain([prompt] * 17) for prompt in range(16)]
        for chain in chains:
            made.client.put(chain, [bytes_of(small.namespace.block_key(chain.hashes[0], 0), 4096)])
        leases = {}
        for chain in chains:
            lease = made.client.load(chain)
            region = made.store.host.arena.region_of(lease.ref(0, 0).slot)
            if leases.setdefault(region, lease) is not lease:
                lease.release()
        assert len(leases) == 4
        chain = large.chain([0] * 17)
        stored = made.client.put(chain, [bytes_of(large.namespace.block_key(chain.hashes[0], 0), 10_000)])
        assert stored.dropped == {"no_room": 1}
        assert [made.client.match(chain).blocks for chain in chains] == [1] * 16
        for lease in leases.values():
            lease.release()
        stored = made.client.put(chain, [bytes_of(large.namespace.block_key(chain.hashes[0], 0), 10_000)])
        assert stored.stored == 1
        assert sum(made.client.match(chain).blocks for chain in chains) == 12, "one region was emptied"


def test_a_seed_is_the_reproduction() -> None:
    assert simulate(3, faults=FAULTS) == simulate(3, faults=FAULTS)
    assert simulate(3, faults=FAULTS) != simulate(4, faults=FAULTS)


def test_the_seeds_meet_all_that_they_should() -> None:
    """Every verb, every fault, every tier, every shape of block; or the lives above say less than they seem to."""
    done: Counter[str] = Counter()
    injected: Counter[str] = Counter()
    counters: Counter[tuple[str, ...]] = Counter()
    for seed in SEEDS:
        life = told(seed)
        done.update(life.done)
        injected.update(life.injected)
        counters.update(life.counters)
    assert done["blocks stored"] > 1000
    assert done["blocks leased"] > 1000
    for verb in ("_put", "_reserve", "_end_draft", "_offload", "_onboard", "_match", "_load", "_prefetch", "_release",
                 "_cancel", "_clear", "_evict", "_flush", "_sleep", "_wake", "_bump_epoch", "_load_now", "_pin",
                 "_unpin", "_change_mood"):  # fmt: skip
        assert done[verb] > 10, verb
    for mood in Mood:
        assert done[f"mood {mood.value}"] > 5, mood
    for fault in FAULTS.__dataclass_fields__:
        assert injected[fault] > 0, fault
    for tier in ("nvme", "valkey"):
        for outcome in ("done", "miss", "corrupt", "cancelled", "unavailable"):
            assert counters["read_blocks_total", tier, outcome] > 0, (tier, outcome)
        for outcome in ("done", "full", "timeout", "unavailable"):
            assert counters["written_blocks_total", tier, outcome] > 0, (tier, outcome)
    for reason in ("room", "dropped_clean", "cleared", "expired", "asked"):
        assert counters["evicted_blocks_total", "host", reason] > 0, reason
    for reason in ("no_room", "incomplete", "asleep"):
        assert counters["dropped_blocks_total", "host", reason] > 0, reason
    assert counters["evicted_blocks_total", "nvme", "capacity"] > 0
    assert counters["leases_overdue_total",] > 0
    assert {layout for seed in SEEDS for layout in Shape.of(seed).layouts} == set(LAYOUTS)


def test_every_damage_that_was_read_was_noticed() -> None:
    """Each block that a tier brought back wrong is a counted miss; the bytes of every hit were compared anyway."""
    damaged = corrupt = 0
    for seed in SEEDS:
        life = told(seed)
        damaged += life.injected.get("damaged", 0)
        corrupt += sum(
            count for labels, count in life.counters.items() if labels[0] == "corrupt_blocks_total"
        )
    assert damaged > 0
    assert corrupt == damaged
