"""Priority and end of a request's blocks, through every tier, on every way in, and over a restart."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.client_support import (
    PATIENCE_S,
    Live,
    chain_of,
    check_lease,
    full_group,
    held,
    layout_of,
    live,
    loaded,
    put,
    put_all,
)
from tests.retention_support import (
    THROUGH,
    WAYS,
    Always,
    ends_in_s,
    families_of,
    frames_on_disk,
    on_disk,
    priorities,
)
from tests.valkey_server import eventually, name_of, running_server
from tierkv.errors import ConfigError
from tierkv.intake import Stored
from tierkv.keys import Chain
from tierkv.policy import Promotion
from tierkv.retention import KEEP, Retention

Way = Callable[[Live, Chain, Retention], Stored]
ways = pytest.mark.parametrize("way", WAYS, ids=lambda way: way.__name__)


# ---- what a retention may say


@pytest.mark.parametrize(
    ("wish", "message"),
    [
        ({"priority": 128}, r"priority = 128: it must be from -127 to 127"),
        ({"priority": "high"}, r"priority = 'high': it must be a whole number"),
        ({"priority": True}, r"priority = True"),
        ({"priority": np.zeros(2, np.int64)}, r"priority = array.*: it must be a whole number"),
        ({"ttl_s": np.zeros(2)}, r"ttl_s = array.*: it must be a number of seconds"),
        ({"ttl_s": 10**400}, r"ttl_s = 1000.*: it must be a number of seconds"),
        ({"no_store": "yes"}, r"no_store = 'yes': it must be True or False"),
        ({"ttl_s": 0}, r"ttl_s = 0: it must be a number of seconds above 0"),
        ({"ttl_s": -1.0}, r"ttl_s = -1.0"),
        ({"ttl_s": math.nan}, r"ttl_s = nan"),
        ({"ttl_s": "1 h"}, r"ttl_s = '1 h'"),
        ({"coldest": 1}, r"coldest = 1: it must be the name of a tier"),
        ({"no_store": True, "priority": 3}, r"no_store = True: .*leave them out"),
        ({"no_store": True, "ttl_s": 3.0}, r"no_store = True"),
    ],
)
def test_d29_a_retention_that_makes_no_sense_is_refused(wish: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Retention(**wish)


@ways
def test_d29_a_tier_that_is_not_there_is_refused_before_anything_is_stored(way: Way) -> None:
    with live() as rig:
        chain = chain_of(rig.namespace(), 2)
        with pytest.raises(ConfigError, match=r"coldest = 'nvme': this store has the tiers host"):
            way(rig, chain, Retention(coldest="nvme"))
        assert rig.client.match(chain).blocks == 0


# ---- priority


@ways
def test_higher_priority_stays_longer_in_host_ram(way: Way) -> None:
    with live(6) as rig:
        space = rig.namespace()
        dear, plain, cheap = (chain_of(space, 2, seed) for seed in range(3))
        way(rig, dear, Retention(priority=5))
        way(rig, cheap, Retention(priority=-5))
        way(rig, plain, KEEP)
        for seed in (3, 4):
            put_all(rig.client, chain_of(space, 1, seed))
        assert [loaded(rig.client, chain) for chain in (dear, plain, cheap)] == [2, 2, 0]
        put_all(rig.client, chain_of(space, 4, 5))
        assert [loaded(rig.client, chain) for chain in (dear, plain, cheap)] == [2, 0, 0]


@ways
def test_higher_priority_stays_longer_on_disk_also_after_a_restart(way: Way, tmp_path: Path) -> None:
    small: dict[str, Any] = {"nvme": tmp_path, "nvme_bytes": 10 * 8192}
    with live(16, **small) as rig:
        space = rig.namespace()
        dear, plain, cheap = (chain_of(space, 2, seed) for seed in range(3))
        way(rig, dear, Retention(priority=5))
        way(rig, cheap, Retention(priority=-5))
        way(rig, plain, KEEP)
        rig.flush("nvme")
        assert sorted(header.priority for header in frames_on_disk(rig)) == [-5, -5, 0, 0, 5, 5]
    with live(16, **small) as rig:
        space = rig.namespace()
        assert [priorities(rig, chain) for chain in (dear, plain, cheap)] == [[5, 5], [0, 0], [-5, -5]]
        held_by_step = []
        for seed in range(3, 8):
            put_all(rig.client, chain_of(space, 1, seed), priority=1)
            rig.flush("nvme")
            held_by_step.append([len(held(rig.store, chain)["nvme"]) for chain in (dear, plain, cheap)])
            rig.client.evict("host")
        assert all(dear_left == 2 for dear_left, _, _ in held_by_step)
        assert all(cheap_left == 0 or plain_left == 2 for _, plain_left, cheap_left in held_by_step)
        assert held_by_step[-1][2] == 0, "the disk was full"
        assert loaded(rig.client, dear) == 2


def test_a_priority_goes_to_the_server_and_to_the_next_machine() -> None:
    with running_server() as server:
        with live(valkey=server.address) as rig:
            chain = chain_of(rig.namespace(), 3)
            put_all(rig.client, chain, priority=7)
            rig.flush("valkey")
        with live(valkey=server.address) as rig:
            chain = chain_of(rig.namespace(), 3)
            assert loaded(rig.client, chain) == 3
            assert priorities(rig, chain) == [7, 7, 7]


def test_a_block_that_is_loaded_for_one_request_keeps_its_priority(tmp_path: Path) -> None:
    """``SERVE`` makes it the first to leave host RAM; what was wished for it is not forgotten."""
    promotion = Always(Promotion.SERVE)
    with live(4, nvme=tmp_path, promotion=promotion) as rig:
        space = rig.namespace()
        chain, other = chain_of(space, 2), chain_of(space, 2, 1)
        put_all(rig.client, chain, priority=9)
        rig.flush("nvme")
        rig.client.evict("host")
        put_all(rig.client, other)
        assert loaded(rig.client, chain) == 2
        put_all(rig.client, chain_of(space, 2, 2))
        assert held(rig.store, chain)["host"] == []
        assert held(rig.store, other)["host"] == [0, 1]
        assert priorities(rig, chain) == [9, 9]
        promotion.answer = Promotion.PROMOTE
        assert loaded(rig.client, chain) == 2
        put_all(rig.client, chain_of(space, 2, 3))
        assert held(rig.store, chain)["host"] == [0, 1]


def test_the_highest_priority_counts_and_reaches_back_to_the_head() -> None:
    with live(12) as rig:
        space = rig.namespace()
        chain = chain_of(space, 6)
        put_all(rig.client, chain, priority=-3)
        put(rig.client, chain, first=2, count=2, priority=4)
        assert priorities(rig, chain) == [4, 4, 4, 4, -3, -3]
        put_all(rig.client, chain, priority=2)
        assert priorities(rig, chain) == [4, 4, 4, 4, 2, 2]
        put_all(rig.client, chain)
        assert priorities(rig, chain) == [4, 4, 4, 4, 2, 2]
        with rig.client.load(chain, retention=Retention(priority=3)) as lease:
            check_lease(rig.store, lease)
        assert priorities(rig, chain) == [4, 4, 4, 4, 3, 3]


def test_a_longer_prompt_of_higher_priority_lifts_the_blocks_that_it_goes_on_from() -> None:
    """Else 70 low heads would stand at the cold end, none of which may leave before its tail, and hide all others."""
    with live(300) as rig:
        space = rig.namespace()
        for seed in range(100):
            put_all(rig.client, chain_of(space, 1, seed), priority=-1)
            chain = chain_of(space, 2, seed)
            assert put(rig.client, chain, first=1, priority=5).stored == 1
            assert priorities(rig, chain) == [5, 5]
        for seed in range(100, 200):
            put_all(rig.client, chain_of(space, 1, seed))
        for seed in range(200, 250):
            assert put(rig.client, chain_of(space, 1, seed)).dropped == {}


@pytest.mark.parametrize("verb", ["load", "load_async", "prefetch"])
def test_a_request_that_loads_lifts_what_it_gets_and_no_more(verb: str, tmp_path: Path) -> None:
    with live(nvme=tmp_path) as rig:
        space = rig.namespace()
        chain, longer = chain_of(space, 3), chain_of(space, 5)
        put_all(rig.client, longer, ttl_s=100.0)
        rig.flush("nvme")
        rig.client.evict("host")
        wish = Retention(priority=6, ttl_s=1000.0)
        if verb == "prefetch":
            rig.client.prefetch(chain, retention=wish).result(PATIENCE_S)
        elif verb == "load":
            rig.client.load(chain, retention=wish).release()
        else:
            rig.client.load_async(chain, retention=wish).result(PATIENCE_S).release()
        assert priorities(rig, longer) == [6, 6, 6, 0, 0]
        assert ends_in_s(rig, longer) == pytest.approx([1000, 1000, 1000, 100, 100], abs=5)
        rig.client.load(chain, retention=Retention(no_store=True)).release()
        rig.client.load(chain).release()
        assert priorities(rig, longer) == [6, 6, 6, 0, 0]


# ---- the end


@ways
@pytest.mark.parametrize("tier", ["host", "nvme", "valkey"])
def test_d20_past_its_end_a_block_is_a_miss_in_every_tier_at_once(
    way: Way, tier: str, tmp_path: Path
) -> None:
    with running_server() as server, live(nvme=tmp_path, valkey=server.address) as rig:
        chain = chain_of(rig.namespace(), 3)
        way(rig, chain, Retention(ttl_s=60.0))
        if tier != "host":
            rig.flush(tier)
            rig.client.evict("host")
            assert held(rig.store, chain) == {"host": [], "nvme": [], "valkey": []} | {tier: [0, 1, 2]}
        assert rig.client.match(chain).blocks == 3
        rig.clock.advance(59.0)
        assert rig.client.match(chain).blocks == 3
        rig.clock.advance(1.0)
        assert rig.client.match(chain).blocks == 0
        assert loaded(rig.client, chain) == 0
        rig.store.upkeep.make_rounds()
        rig.settle()
        assert held(rig.store, chain) == {"host": [], "nvme": [], "valkey": []}
        assert on_disk(rig) == 0, "nothing of it lies on the disk any more"
        way(rig, chain, KEEP)
        assert loaded(rig.client, chain) == 3
        assert ends_in_s(rig, chain) == [0, 0, 0]


def test_d27_what_has_ended_on_disk_while_nobody_was_there_is_gone(tmp_path: Path) -> None:
    with live(nvme=tmp_path) as rig:
        put_all(rig.client, chain_of(rig.namespace(), 2), ttl_s=60.0)
        put_all(rig.client, chain_of(rig.namespace(), 2, seed=1))
        rig.flush("nvme")
        clock = rig.clock
    clock.advance(60.0)
    with live(nvme=tmp_path, clock=clock) as rig:
        assert rig.client.match(chain_of(rig.namespace(), 2)).blocks == 0
        assert loaded(rig.client, chain_of(rig.namespace(), 2, seed=1)) == 2
        assert on_disk(rig) == 2


def test_expired_blocks_give_their_slots_back_at_the_next_round() -> None:
    with live(4) as rig:
        space = rig.namespace()
        put_all(rig.client, chain_of(space, 2), ttl_s=60.0)
        put_all(rig.client, chain_of(space, 2, seed=1))
        rig.clock.advance(60.0)
        rig.store.upkeep.make_rounds()
        assert rig.store.host.usage().used_bytes == 2 * 4096
        assert rig.count("expired_blocks_total") == 2
        assert loaded(rig.client, chain_of(space, 2, seed=1)) == 2


def test_d15_under_a_lease_the_bytes_stay_and_nobody_else_gets_them() -> None:
    with live(4) as rig:
        space = rig.namespace()
        chain = chain_of(space, 2)
        put_all(rig.client, chain, ttl_s=60.0)
        with rig.client.load(chain) as lease:
            rig.clock.advance(100.0)
            rig.store.upkeep.make_rounds()
            put(rig.client, chain_of(space, 4, seed=1))
            check_lease(rig.store, lease)
            assert rig.client.match(chain).blocks == loaded(rig.client, chain) == 0
        rig.store.upkeep.make_rounds()
        assert rig.store.host.usage().used_bytes == 2 * 4096


def test_a_block_past_its_end_that_is_leased_can_be_stored_again() -> None:
    with live(4) as rig:
        chain = chain_of(rig.namespace(), 2)
        put_all(rig.client, chain, ttl_s=60.0)
        with rig.client.load(chain) as lease:
            rig.clock.advance(100.0)
            put_all(rig.client, chain, ttl_s=10.0)
            assert loaded(rig.client, chain) == 2
            check_lease(rig.store, lease)
        rig.clock.advance(10.0)
        assert rig.client.match(chain).blocks == 0


def test_an_ancestor_past_its_end_ends_the_run_though_what_hangs_from_it_stays(tmp_path: Path) -> None:
    with live(nvme=tmp_path) as rig:
        chain = chain_of(rig.namespace(), 4)
        put(rig.client, chain, ttl_s=60.0, count=2)
        put(rig.client, chain, first=2)
        rig.flush("nvme")
        rig.clock.advance(60.0)
        rig.store.upkeep.make_rounds()
        rig.settle()
        assert rig.client.match(chain).blocks == 0
        assert held(rig.store, chain) == {"host": [2, 3], "nvme": [2, 3]}
        put(rig.client, chain, count=2)
        assert loaded(rig.client, chain) == 4


@ways
def test_a_later_end_wins_and_reaches_disk_and_server(way: Way, tmp_path: Path) -> None:
    options = {"nvme_spec": THROUGH, "valkey_spec": THROUGH}
    with running_server() as server, live(nvme=tmp_path, valkey=server.address, **options) as rig:
        chain = chain_of(rig.namespace(), 3)
        names = [name_of(chain.namespace.block_key(block_hash, 0)) for block_hash in chain.hashes]
        way(rig, chain, Retention(ttl_s=100.0))
        rig.settle()
        first_ms = [header.expires_ms for header in frames_on_disk(rig)]
        assert len(first_ms) == 3
        way(rig, chain, Retention(ttl_s=1000.0))
        rig.settle()
        later_ms = [header.expires_ms for header in frames_on_disk(rig)]
        assert [after - before for before, after in zip(first_ms, later_ms, strict=True)] == pytest.approx(
            [900_000] * 3, abs=5000
        )
        with server.client as client:
            assert all(900_000 < client.pttl(name) <= 1_000_000 for name in names)
        rig.client.evict("host")
        rig.clock.advance(500.0)
        assert loaded(rig.client, chain) == 3
        rig.clock.advance(500.0)
        assert loaded(rig.client, chain) == 0


@ways
def test_an_end_that_would_be_sooner_changes_nothing_and_is_told(way: Way) -> None:
    with live() as rig:
        chain = chain_of(rig.namespace(), 3)
        put(rig.client, chain, count=2)
        put(rig.client, chain, first=2, ttl_s=100.0)
        assert way(rig, chain, Retention(ttl_s=50.0)).kept_beyond == 3
        assert ends_in_s(rig, chain) == pytest.approx([0, 0, 100], abs=5)
        assert way(rig, chain, Retention(ttl_s=500.0)).kept_beyond == 2
        assert ends_in_s(rig, chain) == pytest.approx([0, 0, 500], abs=5)
        assert way(rig, chain, KEEP).kept_beyond == 0, "no wish is no wish"
        assert ends_in_s(rig, chain) == pytest.approx([0, 0, 500], abs=5)
        way(rig, chain, Retention(ttl_s=math.inf))
        assert ends_in_s(rig, chain) == [0, 0, 0]


def test_an_end_that_is_little_later_writes_nothing_anew(tmp_path: Path) -> None:
    """A prompt with a ttl that is used every second must not be written to the disk every second."""
    with live(nvme=tmp_path, nvme_spec=THROUGH) as rig:
        chain = chain_of(rig.namespace(), 2)
        for _ in range(30):
            put_all(rig.client, chain, ttl_s=100.0)
            rig.client.load(chain, retention=Retention(ttl_s=100.0)).release()
            rig.settle()
            rig.clock.advance(1.0)
        assert rig.client.match(chain).blocks == 2
        assert 2 <= rig.count("written_blocks_total", "nvme", "done") <= 8
        rig.clock.advance(89.0)
        assert rig.client.match(chain).blocks == 2, "an end comes at most a tenth of the ttl early"


def test_an_end_that_is_put_off_while_only_the_disk_has_the_block(tmp_path: Path) -> None:
    with live(nvme=tmp_path, nvme_spec=THROUGH) as rig:
        chain = chain_of(rig.namespace(), 2)
        put_all(rig.client, chain, ttl_s=100.0)
        rig.settle()
        rig.client.evict("host")
        rig.client.load(chain, retention=Retention(ttl_s=1000.0)).release()
        eventually(
            lambda: rig.count("written_blocks_total", "nvme", "done") == 4, "the copies are written anew"
        )
        rig.settle()
        rig.client.evict("host")
        rig.clock.advance(500.0)
        assert loaded(rig.client, chain) == 2


def test_an_end_outlives_the_process_and_a_block_of_two_parts_has_one(tmp_path: Path) -> None:
    layout = layout_of(full_group(name="a"), full_group(name="b"))
    with live(12, nvme=tmp_path) as rig:
        chain = chain_of(rig.namespace(layout), 3)
        put_all(rig.client, chain, ttl_s=100.0, priority=3)
        rig.flush("nvme")
        clock = rig.clock
    with live(12, nvme=tmp_path, clock=clock) as rig:
        rig.namespace(layout)
        assert ends_in_s(rig, chain) == pytest.approx([100] * 3, abs=10)
        assert priorities(rig, chain) == [3, 3, 3]
        rig.clock.advance(100.0)
        rig.store.upkeep.make_rounds()
        rig.settle()
        assert (on_disk(rig), rig.store.catalog.index.size) == (0, 0)


def test_d20_a_ttl_of_ones_own_goes_before_that_of_the_server() -> None:
    with running_server() as server:
        with live(valkey=server.address, valkey_options={"ttl_s": 600.0}, valkey_spec=THROUGH) as rig:
            space = rig.namespace()
            chains = [chain_of(space, 1, seed) for seed in range(3)]
            for chain, wish in zip(chains, ({}, {"ttl_s": 60.0}, {"ttl_s": 6000.0}), strict=True):
                put_all(rig.client, chain, **wish)
            rig.settle()
        names = [name_of(chain.namespace.block_key(chain.hashes[0], 0)) for chain in chains]
        with server.client as client:
            assert [client.pttl(name) / 1000 for name in names] == pytest.approx([600, 60, 6000], rel=0.05)


def test_a_dirty_block_past_its_end_is_written_nowhere(tmp_path: Path) -> None:
    with live(4, nvme=tmp_path) as rig:
        space = rig.namespace()
        put_all(rig.client, chain_of(space, 3), ttl_s=60.0)
        rig.clock.advance(60.0)
        assert rig.client.flush("nvme").result(PATIENCE_S).written == 0
        assert on_disk(rig) == 0
        put_all(rig.client, chain_of(space, 4, seed=1))


def test_d16_a_round_takes_out_what_can_go_however_much_cannot() -> None:
    """4096 families a round; those that are leased, and rows that only wait for their children, do not count."""
    with live(64) as rig:
        space = rig.namespace()
        leased, parents, others = chain_of(space, 8), chain_of(space, 16, seed=1), chain_of(space, 8, seed=2)
        put_all(rig.client, leased, ttl_s=10.0)
        put(rig.client, parents, count=8, ttl_s=10.0)
        put(rig.client, parents, first=8)
        with rig.client.load(leased):
            rig.clock.advance(10.0)
            rig.store.upkeep.make_rounds()
            put_all(rig.client, others, ttl_s=10.0)
            rig.clock.advance(10.0)
            assert sorted(rig.store.catalog.index.expired(rig.clock.now_s())) == sorted(
                families_of(rig, others)
            )
            rig.store.upkeep.make_rounds()
            assert held(rig.store, others)["host"] == []
        rig.store.upkeep.make_rounds()
        assert held(rig.store, leased)["host"] == []
