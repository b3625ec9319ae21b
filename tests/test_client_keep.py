"""pin, flush, evict, sleep and epochs: what is kept where, and what must never go."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.client_support import (
    PATIENCE_S,
    Gate,
    audit,
    chain_of,
    check_lease,
    held,
    layout_of,
    live,
    loaded,
    poison_free_slots,
    put,
    put_all,
    spec_of,
)
from tests.valkey_server import running_server
from tierkv.clock import Deadline
from tierkv.errors import ClosedError, TierError
from tierkv.flush import FlushReport
from tierkv.tier import DoneCallback, Item, Outcome

pytestmark = pytest.mark.usefixtures("face")

# ---- pin


def test_a_pinned_chain_stays_whatever_comes() -> None:
    with live(4) as rig:
        space = rig.namespace()
        mine = chain_of(space, 2)
        put_all(rig.client, mine)
        assert rig.client.pin(mine) == 2
        for seed in range(1, 6):
            put(rig.client, chain_of(space, 3, seed))
        assert loaded(rig.client, mine) == 2
        assert rig.client.unpin(mine) == 2
        assert rig.client.unpin(mine) == 0
        put_all(rig.client, chain_of(space, 4, seed=9))
        assert rig.client.match(mine).blocks == 0


def test_pin_loads_what_a_colder_tier_has(tmp_path: Path) -> None:
    with live(nvme=tmp_path) as rig:
        chain = chain_of(rig.namespace(), 3)
        put_all(rig.client, chain)
        rig.flush("nvme")
        rig.client.evict("host")
        poison_free_slots(rig.store)
        assert rig.client.pin(chain) == 3
        assert held(rig.store, chain)["host"] == [0, 1, 2]
        assert rig.client.evict("host").kept_leased == 3
        rig.client.unpin(chain)
        assert rig.client.evict("host").evicted == 3


def test_pinning_twice_is_pinning_once() -> None:
    with live() as rig:
        chain = chain_of(rig.namespace(), 2)
        put_all(rig.client, chain)
        assert rig.client.pin(chain) == rig.client.pin(chain) == 2
        assert rig.client.stats()["leases"] == 1
        assert rig.client.unpin(chain) == 2
        assert rig.client.stats()["leases"] == 0
        audit(rig.store)


def test_pinning_nothing_holds_nothing() -> None:
    with live() as rig:
        space = rig.namespace()
        for chain in (chain_of(space, 2), space.chain([])):
            assert rig.client.pin(chain) == 0
            assert rig.client.unpin(chain) == 0
        assert rig.client.stats()["leases"] == 0


def test_a_pin_is_never_overdue() -> None:
    with live() as rig:
        chain = chain_of(rig.namespace(), 1)
        put_all(rig.client, chain)
        rig.client.pin(chain)
        rig.clock.advance(1e6)
        rig.store.upkeep.make_rounds()
        assert rig.count("leases_overdue_total") == 0
        rig.client.unpin(chain)


# ---- flush


@pytest.mark.parametrize("tier", ["nvme", "valkey"])
def test_flush_writes_all_that_the_tier_lacks_and_no_more(tmp_path: Path, tier: str) -> None:
    with live(nvme=tmp_path, valkey="embedded") as rig:
        space = rig.namespace()
        put_all(rig.client, chain_of(space, 3))
        assert rig.client.flush(tier).result(PATIENCE_S) == FlushReport(3, 3, 0)
        put_all(rig.client, chain_of(space, 2, seed=1))
        assert rig.client.flush(tier).result(PATIENCE_S) == FlushReport(2, 2, 0)
        assert rig.client.flush(tier).result(PATIENCE_S) == FlushReport(0, 0, 0)
        assert rig.count("written_blocks_total", tier, "done") == 5


def test_flush_of_a_tier_that_is_not_there_or_not_colder(tmp_path: Path) -> None:
    with live(nvme=tmp_path) as rig:
        for name in ("valkey", "host"):
            with pytest.raises(TierError, match=name):
                rig.client.flush(name)


def test_d17_flush_to_a_dead_tier_ends_and_says_so(tmp_path: Path) -> None:
    with running_server() as server, live(valkey=server.address) as rig:
        chain = chain_of(rig.namespace(), 3)
        put_all(rig.client, chain)
        server.kill()
        report = rig.client.flush("valkey", timeout_s=0.5).result(PATIENCE_S)
        assert (report.wanted, report.written, report.failed) == (3, 0, 3)
        assert loaded(rig.client, chain) == 3


def test_flush_waits_for_what_somebody_else_is_writing(tmp_path: Path) -> None:
    """Write-through has just queued the blocks; flush promises that they are in the tier when it is done."""
    with live(nvme=tmp_path, nvme_spec={"write": "through"}) as rig:
        chain = chain_of(rig.namespace(), 3)
        gate = rig.tiers["nvme"].before = Gate("put_from")
        put_all(rig.client, chain)
        gate.reached()
        future = rig.client.flush("nvme")
        assert not future.done()
        gate.open()
        assert future.result(PATIENCE_S).failed == 0
        assert held(rig.store, chain)["nvme"] == [0, 1, 2]


def test_two_flushes_at_once_both_keep_their_promise(tmp_path: Path) -> None:
    with live(nvme=tmp_path) as rig:
        chain = chain_of(rig.namespace(), 3)
        put_all(rig.client, chain)
        gate = rig.tiers["nvme"].before = Gate("put_from")
        first = rig.client.flush("nvme")
        gate.reached()
        second = rig.client.flush("nvme")
        assert not second.done()
        gate.open()
        for future in (first, second):
            assert future.result(PATIENCE_S).failed == 0
            assert held(rig.store, chain)["nvme"] == [0, 1, 2]


def test_d23_what_is_flushed_in_part_is_whole_chains(tmp_path: Path) -> None:
    """The tier takes five of eight blocks: those are heads, none hangs in the air."""
    with live(16, nvme=tmp_path) as rig:
        space = rig.namespace()
        chains = [chain_of(space, 4), chain_of(space, 4, seed=1)]
        for chain in chains:
            put_all(rig.client, chain)
        tier = rig.tiers["nvme"].tier
        put_from = tier.put_from

        def first_five(items: Sequence[Item], deadline: Deadline, on_done: DoneCallback) -> None:
            put_from(items[:5], deadline, on_done)
            for i in range(5, len(items)):
                on_done(i, Outcome.TIMEOUT)

        tier.put_from = first_five  # type: ignore[method-assign]
        report = rig.client.flush("nvme").result(PATIENCE_S)
        assert (report.wanted, report.written) == (8, 5)
        for chain in chains:
            there = held(rig.store, chain)["nvme"]
            assert there == list(range(len(there)))


# ---- evict


def test_evict_takes_copies_and_never_the_last(tmp_path: Path) -> None:
    with live(nvme=tmp_path) as rig:
        space = rig.namespace()
        both, only_here = chain_of(space, 2), chain_of(space, 3, seed=1)
        put_all(rig.client, both)
        rig.flush("nvme")
        put_all(rig.client, only_here)
        gone = rig.client.evict("host")
        assert (gone.evicted, gone.kept_last_copy, gone.kept_leased) == (2, 3, 0)
        assert held(rig.store, both) == {"host": [], "nvme": [0, 1]}
        gone = rig.client.evict("nvme")
        assert (gone.evicted, gone.kept_last_copy) == (0, 2)
        assert loaded(rig.client, both) == 2
        gone = rig.client.evict("nvme")
        assert gone.evicted == 2
        assert rig.tiers["nvme"].usage().blocks == 0
        assert loaded(rig.client, both) == 2
        assert loaded(rig.client, only_here) == 3


def test_evict_of_one_namespace_leaves_others(tmp_path: Path) -> None:
    with live(nvme=tmp_path) as rig:
        mine, other = chain_of(rig.namespace(), 2), chain_of(rig.namespace(salt="x"), 2)
        put_all(rig.client, mine)
        put_all(rig.client, other)
        rig.flush("nvme")
        assert rig.client.evict("host", namespace=mine.namespace).evicted == 2
        assert held(rig.store, mine)["host"] == []
        assert held(rig.store, other)["host"] == [0, 1]


def test_d11_evict_leaves_leased_blocks(tmp_path: Path) -> None:
    with live(nvme=tmp_path) as rig:
        chain = chain_of(rig.namespace(), 4)
        put_all(rig.client, chain)
        rig.flush("nvme")
        short = chain_of(rig.namespace(), 2)
        with rig.client.load(short) as lease:
            gone = rig.client.evict("host")
            assert (gone.evicted, gone.kept_leased) == (2, 2)
            poison_free_slots(rig.store)
            check_lease(rig.store, lease)
        assert loaded(rig.client, chain) == 4


def test_evict_of_a_tier_that_is_not_there() -> None:
    with live() as rig:
        with pytest.raises(TierError, match=r"'nvme'.*\['host'\]"):
            rig.client.evict("nvme")


# ---- sleep and wake


def test_d27_sleep_that_keeps_writes_first_and_frees_host_ram(tmp_path: Path) -> None:
    with live(nvme=tmp_path) as rig:
        space = rig.namespace()
        chain = chain_of(space, 4)
        put_all(rig.client, chain)
        gone = rig.client.sleep(keep=True).result(PATIENCE_S)
        assert (gone.evicted, gone.kept_last_copy) == (4, 0)
        assert rig.store.host.usage().used_bytes == 0
        assert put(rig.client, chain_of(space, 1, seed=1)).dropped == {"asleep": 1}
        rig.client.wake()
        assert loaded(rig.client, chain) == 4
        put_all(rig.client, chain_of(space, 1, seed=1))


def test_d27_sleep_that_does_not_keep_drops_what_is_only_there(tmp_path: Path) -> None:
    with live(nvme=tmp_path) as rig:
        space = rig.namespace()
        written, only_here = chain_of(space, 2), chain_of(space, 2, seed=1)
        put_all(rig.client, written)
        rig.flush("nvme")
        put_all(rig.client, only_here)
        gone = rig.client.sleep(keep=False).result(PATIENCE_S)
        assert gone.evicted == 4
        assert rig.store.host.usage().used_bytes == 0
        rig.client.wake()
        assert loaded(rig.client, written) == 2
        assert loaded(rig.client, only_here) == 0


@pytest.mark.parametrize("keep", [False, True])
def test_sleep_leaves_what_is_leased(tmp_path: Path, keep: bool) -> None:
    with live(nvme=tmp_path) as rig:
        chain = chain_of(rig.namespace(), 3)
        put_all(rig.client, chain)
        with rig.client.load(chain_of(rig.namespace(), 2)) as lease:
            gone = rig.client.sleep(keep=keep).result(PATIENCE_S)
            assert (gone.evicted, gone.kept_leased) == (1, 2)
            poison_free_slots(rig.store)
            check_lease(rig.store, lease)
        rig.client.wake()


def test_sleep_that_keeps_has_nowhere_to_write_to() -> None:
    with live() as rig:
        chain = chain_of(rig.namespace(), 2)
        put_all(rig.client, chain)
        gone = rig.client.sleep(keep=True).result(PATIENCE_S)
        assert (gone.evicted, gone.kept_last_copy) == (0, 2)
        rig.client.wake()
        assert loaded(rig.client, chain) == 2


# ---- epochs


def test_d27_a_new_epoch_finds_nothing_of_the_old_one(tmp_path: Path) -> None:
    with live(nvme=tmp_path, valkey="embedded") as rig:
        old = rig.namespace()
        put_all(rig.client, chain_of(old, 3))
        rig.flush("nvme")
        rig.flush("valkey")
        new, cleared = rig.client.bump_epoch(old.namespace)
        assert new.namespace.spec.weights_epoch == 1
        assert rig.client.match(chain_of(new, 3)).blocks == 0
        assert rig.client.match(chain_of(old, 3)).blocks == 0
        report = cleared.result(PATIENCE_S)
        assert report.complete
        assert {name: result.removed for name, result in report.tiers.items()} == {
            "host": 3,
            "nvme": 3,
            "valkey": 3,
        }
        assert loaded(rig.client, chain_of(new, 3)) == 0
        assert loaded(rig.client, chain_of(old, 3)) == 0
        put_all(rig.client, chain_of(new, 3))
        assert loaded(rig.client, chain_of(new, 3)) == 3


def test_a_new_epoch_keeps_the_ranks_of_this_host() -> None:
    with live() as rig:
        space = rig.client.open_namespace(spec_of(layout_of(tp_size=4)), ranks=(1, 2))
        new, cleared = rig.client.bump_epoch(space.namespace)
        cleared.result(PATIENCE_S)
        assert new.ranks == (1, 2)


def test_after_close_every_verb_says_so() -> None:
    with live() as rig:
        chain = chain_of(rig.namespace(), 1)
        namespace = chain.namespace
        put_all(rig.client, chain)
        rig.client.close()
        rig.client.close()
        for verb in (
            lambda: rig.client.match(chain),
            lambda: rig.client.prefetch(chain),
            lambda: rig.client.load(chain),
            lambda: rig.client.load_async(chain),
            lambda: rig.client.reserve(chain),
            lambda: put(rig.client, chain),
            lambda: rig.client.pin(chain),
            lambda: rig.client.unpin(chain),
            lambda: rig.client.flush("nvme"),
            lambda: rig.client.evict("host"),
            rig.client.clear,
            lambda: rig.client.bump_epoch(namespace),
            lambda: rig.client.sleep(keep=False),
            rig.client.stats,
            rig.client.events,
            rig.namespace,
        ):
            with pytest.raises(ClosedError, match="closed"):
                verb()
