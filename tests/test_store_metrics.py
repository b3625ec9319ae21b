"""Counters and events that add up: a script with a known answer sheet, and nothing counted that did not happen."""

from __future__ import annotations

import errno
from collections import Counter
from collections.abc import Mapping
from pathlib import Path

import pytest

from tests.client_support import (
    BLOCK_TOKENS,
    PATIENCE_S,
    Live,
    chain_of,
    full_group,
    held,
    layout_of,
    live,
    loaded,
    put,
    put_all,
)
from tests.nvme_support import peek, poke
from tests.valkey_server import running_server
from tierkv.testing.threads import run_together
from tierkv.testing.totals import check_totals

BLOCK = 4096


def counters(rig: Live) -> dict[str, int]:
    rig.settle()
    stats = rig.client.stats()
    found = stats["counters"]
    assert isinstance(found, dict)
    return found


def assert_grew(before: Mapping[str, int], after: Mapping[str, int], wanted: Mapping[str, int]) -> None:
    grown = {name: after[name] - before.get(name, 0) for name in after if after[name] != before.get(name, 0)}
    tokens = {name: grown.pop(name) for name in list(grown) if "_tokens_total" in name}
    assert tokens == {
        name.replace("_blocks_", "_tokens_"): count * BLOCK_TOKENS
        for name, count in grown.items()
        if name.startswith(("asked_blocks", "hit_blocks"))
    }
    assert grown == wanted


def test_d28_a_script_with_a_known_answer_sheet(tmp_path: Path) -> None:
    with running_server() as server, live(8, nvme=tmp_path, valkey=server.address) as rig:
        space = rig.namespace()
        chain = chain_of(space, 4)
        seen: dict[str, int] = {}

        def step(**wanted: int) -> None:
            nonlocal seen
            now = counters(rig)
            assert_grew(seen, now, {name.replace("__", "/"): value for name, value in wanted.items()})
            seen = now

        step()

        def come(tier: str, count: int) -> dict[str, int]:
            return {f"arrived_blocks_total__{tier}": count}

        def new(count: int) -> dict[str, int]:
            return {
                "stored_blocks_total__host": count,
                "stored_bytes_total__host": count * BLOCK,
                "usable_blocks_total": count,
                **come("host", count),
            }

        put(rig.client, chain, count=3)
        step(**new(3))

        put_all(rig.client, chain)
        step(**new(1))

        put_all(rig.client, chain)
        step()

        assert rig.client.match(chain).blocks == 4
        assert rig.client.match(chain_of(space, 2, seed=9)).blocks == 0
        step(match_total=2, match_blocks_total=4, asked_blocks_total=6)

        with rig.client.load(chain) as lease:
            assert len(lease) == 4
        step(leased_blocks_total=4, hit_blocks_total__host=4)

        rig.flush("nvme")
        step(written_blocks_total__nvme__done=4, written_bytes_total__nvme=4 * BLOCK, **come("nvme", 4))

        rig.flush("valkey")
        step(written_blocks_total__valkey__done=4, written_bytes_total__valkey=4 * BLOCK, **come("valkey", 4))

        rig.client.evict("host")
        step(evicted_blocks_total__host__asked=4)

        assert loaded(rig.client, chain) == 4
        step(
            leased_blocks_total=4,
            asked_blocks_total=4,
            hit_blocks_total__nvme=4,
            **come("host", 4),
            read_blocks_total__nvme__done=4,
            read_bytes_total__nvme=4 * BLOCK,
            promotion_decisions_total__nvme__promote=4,
        )

        rig.client.evict("host")
        rig.client.evict("nvme")
        assert loaded(rig.client, chain) == 4
        step(
            evicted_blocks_total__host__asked=4,
            evicted_blocks_total__nvme__asked=4,
            leased_blocks_total=4,
            asked_blocks_total=4,
            hit_blocks_total__valkey=4,
            **come("host", 4),
            read_blocks_total__valkey__done=4,
            read_bytes_total__valkey=4 * BLOCK,
            promotion_decisions_total__valkey__promote=4,
        )

        assert loaded(rig.client, chain_of(space, 2, seed=9)) == 0
        step(probed_blocks_total__valkey=2, asked_blocks_total=2, missed_blocks_total__absent=2)

        rig.flush("nvme")
        rig.client.evict("host")
        key = chain.namespace.block_key(chain.hashes[3], 0)
        raw = peek(tmp_path, key)
        assert raw is not None
        poke(tmp_path, key, raw[:-1] + bytes([raw[-1] ^ 1]))
        assert loaded(rig.client, chain) == 3
        step(
            written_blocks_total__nvme__done=4,
            written_bytes_total__nvme=4 * BLOCK,
            evicted_blocks_total__host__asked=4,
            evicted_blocks_total__nvme__corrupt=1,
            read_blocks_total__nvme__done=3,
            read_blocks_total__nvme__corrupt=1,
            read_bytes_total__nvme=3 * BLOCK,
            corrupt_blocks_total__nvme__checksum=1,
            promotion_decisions_total__nvme__promote=4,
            leased_blocks_total=3,
            asked_blocks_total=4,
            hit_blocks_total__nvme=3,
            missed_blocks_total__corrupt=1,
            **come("nvme", 4),
            **come("host", 3),
        )

        other = chain_of(space, 8, seed=1)
        put_all(rig.client, other)
        step(**new(8), evicted_blocks_total__host__room=3)

        put_all(rig.client, chain_of(space, 1, seed=2))
        dropped = {
            "evicted_blocks_total__host__dropped_clean": 1,
            "dropped_blocks_total__host__dropped_clean": 1,
            "gone_blocks_total__dropped_clean": 1,
            "never_served_blocks_total": 1,
        }
        step(**new(1), **dropped)

        with rig.client.load(chain_of(space, 7, seed=1)):
            assert put(rig.client, chain_of(space, 3, seed=3)).stored == 1
        step(
            leased_blocks_total=7,
            asked_blocks_total=7,
            hit_blocks_total__host=7,
            dropped_blocks_total__host__no_room=2,
            **new(1),
            **dropped,
        )

        assert rig.client.clear().result(PATIENCE_S).complete
        step(
            evicted_blocks_total__host__cleared=8,
            evicted_blocks_total__nvme__cleared=3,
            evicted_blocks_total__valkey__cleared=4,
            gone_blocks_total__cleared=12,
        )
        check_totals(rig.store)


def test_d28_events_and_residency_say_the_same(tmp_path: Path) -> None:
    """Replaying the events gives what each tier holds."""
    with running_server() as server, live(6, nvme=tmp_path, valkey=server.address) as rig:
        space = rig.namespace()
        chains = [chain_of(space, 3, seed) for seed in range(4)]
        for turn in range(30):
            put(rig.client, chains[turn % 4])
            if turn % 5 == 0:
                rig.flush("nvme" if turn % 2 else "valkey")
            if turn % 7 == 0:
                rig.client.evict("host")
            loaded(rig.client, chains[(turn + 1) % 4])
        rig.client.clear(namespace=rig.namespace(salt="other").namespace).result(PATIENCE_S)
        rig.settle()
        inside: dict[str, set[bytes]] = {"host": set(), "nvme": set(), "valkey": set()}
        usable: set[bytes] = set()
        for event in rig.client.events():
            assert event.block_hash is not None
            if event.tier is None:
                assert (event.kind == "stored") == (event.block_hash not in usable), (
                    "an event without a change"
                )
                (usable.add if event.kind == "stored" else usable.discard)(event.block_hash)
            else:
                there = inside[event.tier]
                assert (event.kind == "arrived") == (event.block_hash not in there), (
                    "an event without a change"
                )
                (there.add if event.kind == "arrived" else there.discard)(event.block_hash)
        for name, there in inside.items():
            wanted = {chain.hashes[position] for chain in chains for position in held(rig.store, chain)[name]}
            assert there == wanted
        assert usable == set().union(*inside.values())


@pytest.mark.parametrize("count", [1, 5])
def test_d28_stores_that_fail_are_not_counted_as_done(tmp_path: Path, count: int) -> None:
    with live(8, nvme=tmp_path) as rig:
        chain = chain_of(rig.namespace(), count)
        put_all(rig.client, chain)
        assert rig.disk is not None

        def broken(call: str, name: str, offset: int) -> None:
            if call == "pwritev" and name.startswith("segment"):
                raise OSError(errno.EIO, "injected")

        rig.disk.before = broken
        report = rig.client.flush("nvme", timeout_s=0.3).result(PATIENCE_S)
        assert report.written == 0
        found = counters(rig)
        assert "written_blocks_total/nvme/done" not in found
        assert "written_bytes_total/nvme" not in found
        assert "arrived" not in {event.kind for event in rig.client.events() if event.tier == "nvme"}
        assert found["stored_blocks_total/host"] == count


def test_d28_stores_without_room_are_not_counted_as_stored() -> None:
    with live(2) as rig:
        space = rig.namespace()
        put_all(rig.client, chain_of(space, 2))
        before = counters(rig)
        with rig.client.load(chain_of(space, 2)):
            for seed in range(1, 6):
                assert put(rig.client, chain_of(space, 2, seed)).stored == 0
        assert_grew(
            before,
            counters(rig),
            {
                "dropped_blocks_total/host/no_room": 10,
                "leased_blocks_total": 2,
                "asked_blocks_total": 2,
                "hit_blocks_total/host": 2,
            },
        )


def test_d28_counters_of_many_threads_add_up(tmp_path: Path) -> None:
    with live(64, nvme=tmp_path, nvme_spec={"write": "through"}) as rig:
        space = rig.namespace()

        def work(seed: int) -> None:
            for turn in range(20):
                chain = chain_of(space, 3, seed=turn % 5 + 10 * (seed % 2))
                put(rig.client, chain)
                with rig.client.load(chain, timeout_s=PATIENCE_S) as lease:
                    assert len(lease) == 3

        run_together([lambda seed=seed: work(seed) for seed in range(6)], 2 * PATIENCE_S)  # type: ignore[misc]
        found = counters(rig)
        assert found["stored_blocks_total/host"] == 30
        assert found["written_blocks_total/nvme/done"] == 30
        assert found["written_bytes_total/nvme"] == 30 * BLOCK
        assert found["leased_blocks_total"] == 6 * 20 * 3
        kinds = Counter((event.kind, event.tier) for event in rig.client.events())
        assert kinds == {("arrived", "host"): 30, ("stored", None): 30, ("arrived", "nvme"): 30}


def test_d28_bytes_are_those_of_all_parts(tmp_path: Path) -> None:
    layout = layout_of(full_group(8192), full_group(100, name="small"), tp_size=2)
    with live(16, block_bytes=8192, region_blocks=4, nvme=tmp_path) as rig:
        space = rig.namespace(layout)
        chain = chain_of(space, 2)
        for rank in range(2):
            put(rig.client, chain, rank=rank)
        rig.flush("nvme")
        rig.client.evict("host")
        assert loaded(rig.client, chain) == 2
        found = counters(rig)
        assert found["written_blocks_total/nvme/done"] == found["read_blocks_total/nvme/done"] == 8
        assert found["written_bytes_total/nvme"] == found["read_bytes_total/nvme"] == 2 * 2 * 8292
        assert [event.kind for event in rig.client.events()].count("stored") == 2


def test_d28_an_idle_scrape_changes_nothing(tmp_path: Path) -> None:
    with running_server() as server, live(8, nvme=tmp_path, valkey=server.address) as rig:
        chain = chain_of(rig.namespace(), 4)
        put_all(rig.client, chain)
        rig.flush("nvme")
        rig.client.match(chain)
        loaded(rig.client, chain)
        first = counters(rig)
        asked, last = rig.client.stats()["asked"], rig.store.events.last
        for _ in range(3):
            rig.client.explain(chain)
            rig.store.upkeep.make_rounds()
            assert counters(rig) == first
            assert rig.client.stats()["asked"] == asked
        assert rig.store.events.last == last


@pytest.mark.parametrize(
    "wrong",
    [
        ("evicted_blocks_total", "host", "room"),
        ("gone_blocks_total", "room"),
        ("never_served_blocks_total",),
        ("missed_blocks_total", "absent"),
        ("evicted_blocks_total", "host"),
        ("unheard_of_total",),
    ],
)
def test_the_books_are_checked(wrong: tuple[str, ...]) -> None:
    with live(4) as rig:
        put_all(rig.client, chain_of(rig.namespace(), 2))
        check_totals(rig.store)
        rig.store.counters.add(1, *wrong)
        with pytest.raises(AssertionError):
            check_totals(rig.store)
        rig.store.counters._values.clear()
