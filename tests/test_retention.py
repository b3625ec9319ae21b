"""Retention: priority, end, reach and no_store, through every tier and on every path."""

from __future__ import annotations

from tests.client_support import (
    chain_of,
    check_lease,
    live,
    loaded,
    put,
    put_all,
)
from tierkv.retention import Retention
from tierkv.testing.payloads import fill


def test_a_block_past_its_expiry_is_a_miss_and_can_be_stored_again() -> None:
    with live() as rig:
        chain = chain_of(rig.namespace(), 2)
        put_all(rig.client, chain, ttl_s=60.0)
        assert rig.client.match(chain).blocks == 2
        rig.clock.advance(60.0)
        assert rig.client.match(chain).blocks == 0
        assert loaded(rig.client, chain) == 0
        put_all(rig.client, chain)
        assert rig.client.match(chain).blocks == 2
        assert loaded(rig.client, chain) == 2


def test_expired_blocks_give_their_slots_back() -> None:
    with live(4) as rig:
        space = rig.namespace()
        put_all(rig.client, chain_of(space, 2), ttl_s=60.0)
        put_all(rig.client, chain_of(space, 2, seed=1))
        rig.clock.advance(60.0)
        for _ in range(3):
            rig.store.upkeep.make_rounds()
        assert rig.store.host.usage().used_bytes == 2 * 4096
        assert rig.count("expired_blocks_total") == 2
        assert loaded(rig.client, chain_of(space, 2, seed=1)) == 2


def test_a_leased_block_outlives_its_expiry() -> None:
    with live(4) as rig:
        space = rig.namespace()
        chain = chain_of(space, 2)
        put_all(rig.client, chain, ttl_s=60.0)
        with rig.client.load(chain) as lease:
            rig.clock.advance(100.0)
            for _ in range(3):
                rig.store.upkeep.make_rounds()
            put(rig.client, chain_of(space, 4, seed=1))
            check_lease(rig.store, lease)
        assert rig.client.match(chain).blocks == 0


def test_higher_priority_stays_longer() -> None:
    with live(4) as rig:
        space = rig.namespace()
        dear, cheap = chain_of(space, 2), chain_of(space, 2, seed=1)
        put_all(rig.client, dear, priority=5)
        put_all(rig.client, cheap)
        put_all(rig.client, chain_of(space, 2, seed=2))
        assert loaded(rig.client, dear) == 2
        assert loaded(rig.client, cheap) == 0


def test_commit_takes_a_retention() -> None:
    with live() as rig:
        chain = chain_of(rig.namespace(), 1)
        draft = rig.client.reserve(chain)
        assert draft is not None
        fill(draft.view(0, 0), chain.namespace.block_key(chain.hashes[0], 0))
        rig.client.commit(draft.seal(), chain, retention=Retention(ttl_s=5.0))
        assert loaded(rig.client, chain) == 1
        rig.clock.advance(5.0)
        assert rig.client.match(chain).blocks == 0
