"""Pins: what stays whatever comes, within ``host.pin_budget``, and gives it back to the byte."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest

import tierkv
from tests.client_support import (
    PATIENCE_S,
    Live,
    audit,
    chain_of,
    full_group,
    held,
    layout_of,
    live,
    loaded,
    put,
    put_all,
    window_group,
)
from tierkv.errors import TierKVError
from tierkv.testing.threads import run_together

BLOCK = 4096


def pins(rig: Live) -> dict[str, Any]:
    found = rig.client.stats()["pins"]
    assert isinstance(found, dict)
    return found


def pinned_bytes(rig: Live) -> int:
    return int(pins(rig)["pinned_bytes"])


def test_d16_beyond_the_budget_the_beginning_is_pinned_and_the_rest_is_told(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with live(8, pin_budget_bytes=3 * BLOCK) as rig:
        space = rig.namespace()
        chain = chain_of(space, 5)
        put_all(rig.client, chain)
        with caplog.at_level(logging.WARNING, "tierkv"):
            assert rig.client.pin(chain, owner="the system prompt") == 3
        assert rig.count("pin_over_budget_blocks_total") == 2
        [line] = [record.message for record in caplog.records]
        assert line.startswith(
            "2 blocks of the system prompt are not pinned: 12288 of 12288 bytes of host.pin_budget"
        )
        assert pins(rig) == {
            "budget_bytes": 3 * BLOCK,
            "pinned_bytes": 3 * BLOCK,
            "pinned_blocks": 3,
            "chains": 1,
            "blocks_by_owner": {"the system prompt": 3},
        }
        for seed in range(1, 6):
            put(rig.client, chain_of(space, 5, seed))
        assert loaded(rig.client, chain) == 3
        assert rig.client.unpin(chain) == 3
        assert pinned_bytes(rig) == 0
        put_all(rig.client, chain_of(space, 8, seed=9))
        assert rig.client.match(chain).blocks == 0


def test_what_cannot_be_pinned_is_not_loaded_for_it(tmp_path: Path) -> None:
    with live(8, nvme=tmp_path, pin_budget_bytes=2 * BLOCK) as rig:
        space = rig.namespace()
        chain = chain_of(space, 6)
        put_all(rig.client, chain)
        rig.flush("nvme")
        rig.client.evict("host")
        assert rig.client.pin(chain) == 2
        assert held(rig.store, chain)["host"] == [0, 1]
        assert rig.count("pin_over_budget_blocks_total") == 4
        assert rig.client.pin(chain_of(space, 3, seed=1)) == 0
        assert rig.client.unpin(chain) == 2


def test_blocks_that_two_pinned_chains_share_count_once() -> None:
    with live(8, pin_budget_bytes=5 * BLOCK) as rig:
        space = rig.namespace()
        short, long, other = chain_of(space, 3), chain_of(space, 4), chain_of(space, 3, seed=1)
        put_all(rig.client, long)
        put_all(rig.client, other)
        assert [rig.client.pin(chain) for chain in (short, long, other)] == [3, 4, 1]
        assert pinned_bytes(rig) == 5 * BLOCK
        assert rig.client.unpin(long) == 4
        assert pinned_bytes(rig) == 4 * BLOCK
        assert rig.client.pin(other) == 2, "pinning again takes up what has become free"
        assert rig.client.unpin(short) == 3
        assert rig.client.pin(other) == 3
        assert pinned_bytes(rig) == 3 * BLOCK
        rig.client.unpin(other)
        assert pins(rig)["pinned_blocks"] == pinned_bytes(rig) == 0


def test_a_pin_takes_what_its_slots_take_all_parts_of_a_block() -> None:
    layout = layout_of(full_group(5000, name="a"), window_group(32, 4096, name="b"))
    with live(16, region_blocks=4, pin_budget_bytes=3 * (8192 + 4096)) as rig:
        chain = chain_of(rig.namespace(layout), 4)
        put(rig.client, chain, count=2)
        put(rig.client, chain, first=2, absent=[1])
        assert rig.client.pin(chain_of(rig.namespace(layout), 2)) == 2
        assert pinned_bytes(rig) == 2 * (8192 + 4096)
        rig.client.clear().result(PATIENCE_S)
        assert pinned_bytes(rig) == 0


@pytest.mark.parametrize("how", ["all", "namespace", "tenant", "epoch"])
def test_d27_a_clear_gives_the_budget_back(how: str) -> None:
    with live(8, pin_budget_bytes=4 * BLOCK) as rig:
        mine, other = rig.namespace(salt="me"), rig.namespace(salt="you")
        for space in (mine, other):
            put_all(rig.client, chain_of(space, 2))
            assert rig.client.pin(chain_of(space, 2)) == 2
        if how == "epoch":
            rig.client.bump_epoch(mine)[1].result(PATIENCE_S)
        else:
            what = {"all": {}, "namespace": {"namespace": mine}, "tenant": {"tenant_salt": "me"}}[how]
            rig.client.clear(**what).result(PATIENCE_S)  # type: ignore[arg-type]
        left = 0 if how == "all" else 2
        assert (pinned_bytes(rig), pins(rig)["chains"]) == (left * BLOCK, left // 2)
        assert rig.client.unpin(chain_of(mine, 2)) == 0
        assert rig.client.unpin(chain_of(other, 2)) == left
        assert rig.client.stats()["leases"] == 0


def test_close_gives_all_pins_back() -> None:
    with live(4) as rig:
        chain = chain_of(rig.namespace(), 2)
        put_all(rig.client, chain)
        rig.client.pin(chain)
        rig.client.close()
        assert rig.store.pins.stats()["pinned_bytes"] == len(rig.store.leases) == 0


def test_a_pin_for_a_time_ends_by_itself() -> None:
    with live(4, pin_budget_bytes=2 * BLOCK) as rig:
        space = rig.namespace()
        chain = chain_of(space, 2)
        put_all(rig.client, chain)
        assert rig.client.pin(chain, ttl_s=60.0) == 2
        rig.clock.advance(59.0)
        rig.store.upkeep.make_rounds()
        put(rig.client, chain_of(space, 4, seed=1))
        assert loaded(rig.client, chain) == 2
        assert rig.client.pin(chain, ttl_s=60.0) == 2, "again: another minute"
        rig.clock.advance(59.0)
        rig.store.upkeep.make_rounds()
        assert pinned_bytes(rig) == 2 * BLOCK
        rig.clock.advance(1.0)
        rig.store.upkeep.make_rounds()
        assert (pinned_bytes(rig), rig.count("leases_overdue_total")) == (0, 0)
        put_all(rig.client, chain_of(space, 4, seed=2))
        for wrong in (0.0, -1.0, float("nan"), float("inf")):
            with pytest.raises(TierKVError, match="ttl_s"):
                rig.client.pin(chain, ttl_s=wrong)


def test_d20_a_pin_does_not_put_off_the_end_of_a_block() -> None:
    with live(4) as rig:
        chain = chain_of(rig.namespace(), 2)
        put_all(rig.client, chain, ttl_s=60.0)
        assert rig.client.pin(chain) == 2
        rig.clock.advance(60.0)
        rig.store.upkeep.make_rounds()
        assert rig.client.match(chain).blocks == 0
        assert rig.store.host.usage().used_bytes == 2 * BLOCK
        rig.client.unpin(chain)
        rig.store.upkeep.make_rounds()
        assert rig.store.host.usage().used_bytes == 0


def test_the_budget_holds_however_many_pin_at_once() -> None:
    with live(32, pin_budget_bytes=7 * BLOCK) as rig:
        space = rig.namespace()
        chains = [chain_of(space, 3, seed) for seed in range(8)]
        for chain in chains:
            put_all(rig.client, chain)

        def work(chain: Any) -> None:
            for _ in range(50):
                rig.client.pin(chain)
                assert 0 <= pinned_bytes(rig) <= 7 * BLOCK
                rig.client.unpin(chain)

        run_together([lambda chain=chain: work(chain) for chain in chains[:4]], PATIENCE_S)  # type: ignore[misc]
        assert pinned_bytes(rig) == pins(rig)["pinned_blocks"] == rig.client.stats()["leases"] == 0
        audit(rig.store)
        assert [rig.client.pin(chain) for chain in chains[:3]] == [3, 3, 1]
        for chain in chains[:3]:
            rig.client.unpin(chain)


def test_d29_the_budget_is_a_quarter_of_host_ram_unless_it_is_said() -> None:
    for settings, bytes_ in (
        ({}, 4 << 20),
        ({"host_pin_budget": "1 MiB"}, 1 << 20),
        ({"host_pin_budget": 0}, 0),
    ):
        with tierkv.open(host_capacity="16 MiB", host_populate=False, **settings) as client:
            assert client.store.pins.budget_bytes == bytes_


# ---- pinned blocks and the others


@pytest.mark.parametrize("priority", [0, -3])
def test_d16_pinned_blocks_that_nobody_uses_do_not_hide_those_that_may_leave(priority: int) -> None:
    """They lie at the cold end, where a policy looks at 4 x need + 64 families and no further."""
    with live(300) as rig:
        space = rig.namespace()
        mine = [chain_of(space, 1, seed) for seed in range(100)]
        for chain in mine:
            put_all(rig.client, chain, priority=priority)
            assert rig.client.pin(chain) == 1
        for seed in range(1000, 1300):
            assert put(rig.client, chain_of(space, 1, seed)).dropped == {}
        assert rig.client.match(mine[0]).blocks == 1
        for chain in mine:
            rig.client.unpin(chain)
        audit(rig.store)
        for seed in range(1400, 1700):
            put_all(rig.client, chain_of(space, 1, seed))
        assert sum(rig.client.match(chain).blocks for chain in mine) == 0, (
            "unpinned, they leave like all others"
        )


def test_d16_leased_blocks_on_disk_do_not_hide_those_that_may_leave_it(tmp_path: Path) -> None:
    with live(400, nvme=tmp_path, nvme_bytes=220 * 8192, nvme_spec={"write": "through"}) as rig:
        space = rig.namespace()
        mine = [chain_of(space, 1, seed) for seed in range(100)]
        for chain in mine:
            put_all(rig.client, chain)
            rig.client.pin(chain)
        rig.settle()
        for seed in range(1000, 1200):
            put_all(rig.client, chain_of(space, 1, seed))
            rig.settle()
        assert rig.count("evicted_blocks_total", "nvme", "capacity") > 50
        assert rig.count("written_blocks_total", "nvme", "done") == 300
        assert all(held(rig.store, chain)["nvme"] == [0] for chain in mine)
        for chain in mine:
            rig.client.unpin(chain)
