"""Completions that come late, twice, or for nobody: counted, and never anybody's trouble."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from tests.client_support import (
    PATIENCE_S,
    Gate,
    audit,
    chain_of,
    check_lease,
    held,
    live,
    loaded,
    poison_free_slots,
    put,
    put_all,
)
from tests.test_copier_engines import simple
from tests.valkey_server import eventually, running_server
from tierkv import frame
from tierkv.clock import Deadline
from tierkv.copier import CopyPart, HostCopier, PagedKV, ReadyEvent
from tierkv.tier import DoneCallback, Item, Outcome, Want


def test_d13_a_read_that_lands_after_its_waiter_has_left(tmp_path: Path) -> None:
    """The bytes are verified and in their slots when nobody waits any more: they stay as any block does."""
    with live(4, nvme=tmp_path) as rig:
        chain = chain_of(rig.namespace(), 3)
        put_all(rig.client, chain)
        rig.flush("nvme")
        rig.client.evict("host")
        gate = rig.tiers["nvme"].after = Gate("get_into")
        with gate.outlasts(lambda timeout_s: rig.client.load_async(chain, timeout_s=timeout_s)) as lease:
            check_lease(rig.store, lease)
        gate.open()
        rig.settle()
        audit(rig.store)
        assert loaded(rig.client, chain) == 3


def test_d17_what_has_come_lands_when_the_time_is_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Blocks land together, but a load whose tier hangs behind the second block of three gets those two."""
    with live(16, nvme=tmp_path) as rig:
        workers = rig.store.edges[1].queue.width
        chain = chain_of(rig.namespace(), 3 * workers)
        put_all(rig.client, chain)
        rig.flush("nvme")
        rig.client.evict("host")
        tier, gate = rig.tiers["nvme"], Gate("get_into")
        get_into = tier.get_into

        def hangs_behind_the_second(wants: Sequence[Want], deadline: Deadline, on_done: DoneCallback) -> None:
            def told(i: int, outcome: Outcome) -> None:
                on_done(i, outcome)
                if i == 1:
                    gate("get_into")

            get_into(wants, deadline, told)

        monkeypatch.setattr(tier, "get_into", hangs_behind_the_second)
        patient = rig.client.load_async(chain, timeout_s=PATIENCE_S)
        gate.reached(workers)
        with rig.client.load(chain, timeout_s=0.05) as lease:
            assert len(lease) == 2
            check_lease(rig.store, lease)
        gate.open()
        with patient.result(PATIENCE_S) as lease:
            assert len(lease) == len(chain)
        rig.settle()
        audit(rig.store)


def test_d17_a_load_without_any_time_begins_nothing(tmp_path: Path) -> None:
    """It gives what is in host RAM: no read is started that nobody would wait for, no server is asked."""
    with running_server() as server, live(8, nvme=tmp_path, valkey=server.address) as rig:
        chain = chain_of(rig.namespace(), 4)
        put_all(rig.client, chain)
        rig.flush("nvme")
        rig.client.evict("host")
        put(rig.client, chain, count=2)
        calls: list[str] = []
        for tier in rig.tiers.values():
            tier.before = calls.append
        for timeout_s in (0.0, -1.0):
            assert loaded(rig.client, chain, timeout_s=timeout_s) == 2
            match = rig.client.prefetch(chain, timeout_s=timeout_s).result(PATIENCE_S)
            assert match.tiers["host"] == 2
            assert match.blocks == 4
        assert not {"get_into", "probe"} & set(calls)
        audit(rig.store)
        assert loaded(rig.client, chain) == 4


def test_d13_a_read_is_cancelled_when_its_last_waiter_leaves(tmp_path: Path) -> None:
    with live(4, nvme=tmp_path) as rig:
        chain = chain_of(rig.namespace(), 3)
        put_all(rig.client, chain)
        rig.flush("nvme")
        rig.client.evict("host")
        gate = rig.tiers["nvme"].before = Gate("get_into")
        short = rig.client.load_async(chain, timeout_s=0.05)
        long = rig.client.load_async(chain, timeout_s=PATIENCE_S)
        gate.reached()
        assert len(short.result(PATIENCE_S)) == 0
        gate.open()
        with long.result(PATIENCE_S) as lease:
            assert len(lease) == 3, "somebody still waited"
        short.result().release()
        rig.client.evict("host")
        gate = rig.tiers["nvme"].before = Gate("get_into")
        with rig.client.load(chain, timeout_s=0.05) as lease:
            assert len(lease) == 0
        gate.open()
        rig.settle()
        assert rig.count("read_blocks_total", "nvme", "cancelled") == 3
        assert rig.store.host.usage().used_bytes == 0
        assert loaded(rig.client, chain) == 3


def test_d13_a_new_load_does_not_wait_for_a_read_that_was_given_up(tmp_path: Path) -> None:
    with live(8, nvme=tmp_path) as rig:
        chain = chain_of(rig.namespace(), 3)
        put_all(rig.client, chain)
        rig.flush("nvme")
        rig.client.evict("host")
        gate = rig.tiers["nvme"].before = Gate("get_into")
        rig.client.load(chain, timeout_s=0.05).release()
        again = rig.client.load_async(chain, timeout_s=PATIENCE_S)
        gate.open()
        with again.result(PATIENCE_S) as lease:
            check_lease(rig.store, lease)
        rig.settle()
        eventually(lambda: loaded(rig.client, chain) == 3, "it can be loaded")


def test_d13_a_block_that_came_by_another_way_while_it_was_read(tmp_path: Path) -> None:
    """The engine computes and stores what a slow read is about to bring: one of the two is given back."""
    with live(6, nvme=tmp_path) as rig:
        chain = chain_of(rig.namespace(), 3)
        put_all(rig.client, chain)
        rig.flush("nvme")
        rig.client.evict("host")
        gate = rig.tiers["nvme"].before = Gate("get_into")
        future = rig.client.load_async(chain, timeout_s=PATIENCE_S)
        gate.reached()
        put_all(rig.client, chain)
        poison_free_slots(rig.store)
        gate.open()
        with future.result(PATIENCE_S) as lease:
            assert len(lease) == 3
            check_lease(rig.store, lease)
        rig.settle()
        assert rig.store.host.usage().used_bytes == 3 * 4096


class Stuttering:
    """Wraps a tier's calls so that completions come twice, for blocks that nobody asked for, and once more later."""

    def __init__(self, get_into: Callable[..., None], put_from: Callable[..., None], second: Outcome) -> None:
        self._get_into, self._put_from, self._second = get_into, put_from, second
        self.kept: list[DoneCallback] = []

    def _stutter(self, on_done: DoneCallback) -> DoneCallback:
        def twice(i: int, outcome: Outcome) -> None:
            on_done(i, outcome)
            on_done(i, self._second)
            on_done(i + 1000, Outcome.DONE)
            on_done(-1, Outcome.DONE)

        self.kept.append(on_done)
        return twice

    def get_into(self, wants: Sequence[Want], deadline: Deadline, on_done: DoneCallback) -> None:
        self._get_into(wants, deadline, self._stutter(on_done))

    def put_from(self, items: Sequence[Item], deadline: Deadline, on_done: DoneCallback) -> None:
        self._put_from(items, deadline, self._stutter(on_done))


@pytest.mark.parametrize("second", [Outcome.DONE, Outcome.TIMEOUT, Outcome.CORRUPT, Outcome.MISS])
def test_d13_completions_twice_and_for_nobody(tmp_path: Path, second: Outcome) -> None:
    with live(6, nvme=tmp_path) as rig:
        tier = rig.tiers["nvme"].tier
        stuttering = Stuttering(tier.get_into, tier.put_from, second)
        tier.get_into = stuttering.get_into  # type: ignore[method-assign]
        tier.put_from = stuttering.put_from  # type: ignore[method-assign]
        chain = chain_of(rig.namespace(), 3)
        put_all(rig.client, chain)
        rig.flush("nvme")
        assert rig.count("written_blocks_total", "nvme", "done") == 3
        rig.client.evict("host")
        assert loaded(rig.client, chain) == 3
        rig.settle()
        assert rig.count("read_blocks_total", "nvme", "done") == 3
        assert rig.store.host.usage().used_bytes == 3 * 4096
        for late in stuttering.kept:
            late(0, Outcome.DONE)
            late(0, Outcome.CORRUPT)
        audit(rig.store)
        put_all(rig.client, chain_of(rig.namespace(), 3, seed=1))
        assert loaded(rig.client, chain) == 3
        status = rig.client.stats()["tiers"]["nvme"]  # type: ignore[index]
        assert status["stray_completions"] >= 3 * 3 * 2


class Forgetful:
    """Reports nothing at all."""

    def get_into(self, wants: Sequence[Want], deadline: Deadline, on_done: DoneCallback) -> None:
        pass

    def put_from(self, items: Sequence[Item], deadline: Deadline, on_done: DoneCallback) -> None:
        pass


def test_d13_completions_that_never_come(tmp_path: Path) -> None:
    with live(6, nvme=tmp_path) as rig:
        tier = rig.tiers["nvme"].tier
        chain = chain_of(rig.namespace(), 3)
        put_all(rig.client, chain)
        rig.flush("nvme")
        rig.client.evict("host")
        get_into = tier.get_into
        tier.get_into = Forgetful().get_into  # type: ignore[method-assign]
        assert loaded(rig.client, chain) == 0
        tier.get_into = get_into  # type: ignore[method-assign]
        put_from = tier.put_from
        tier.put_from = Forgetful().put_from  # type: ignore[method-assign]
        put_all(rig.client, chain_of(rig.namespace(), 2, seed=1))
        report = rig.client.flush("nvme", timeout_s=5.0).result(PATIENCE_S)
        assert (report.written, report.failed) == (0, 2)
        tier.put_from = put_from  # type: ignore[method-assign]
        assert loaded(rig.client, chain) == 3
        audit(rig.store)


class SaysItTwice(HostCopier):
    """A copier whose completions come twice."""

    second: str | None = None

    def offload(
        self,
        kv: PagedKV,
        parts: Sequence[CopyPart],
        ready: ReadyEvent | None,
        done: Callable[[str | None], None],
    ) -> None:
        def twice(error: str | None) -> None:
            done(error)
            done(self.second)

        super().offload(kv, parts, ready, twice)

    def onboard(
        self,
        kv: PagedKV,
        parts: Sequence[CopyPart],
        done: Callable[[str | None], None],
        on_layer: Callable[[int, int], None] | None = None,
        ready: ReadyEvent | None = None,
    ) -> None:
        def twice(error: str | None) -> None:
            done(error)
            done(self.second)

        super().onboard(kv, parts, twice, on_layer, ready)


class SaysItTwiceDifferently(SaysItTwice):
    second = "no, it failed"


@pytest.mark.parametrize("copier", [SaysItTwice, SaysItTwiceDifferently])
def test_d13_a_copier_that_says_it_twice(copier: type[HostCopier]) -> None:
    with live(4, block_bytes=16 * 1024, copier=copier) as rig:
        engine, chain, pages = simple(rig)
        engine.write(chain, pages)
        for _ in range(2):
            stored = rig.client.offload(engine.kv, pages, chain).result(PATIENCE_S)
            assert (stored.stored + stored.resident, stored.dropped) == (2, {})
        assert loaded(rig.client, chain) == 2
        engine.poison()
        with rig.client.load(chain) as lease:
            assert rig.client.onboard(lease, engine.kv, pages).result(PATIENCE_S)
            assert rig.client.onboard(lease, engine.kv, pages).result(PATIENCE_S)
        engine.assert_holds(chain, pages)
        assert rig.count("stored_blocks_total", "host") == 2
        assert rig.count("dropped_blocks_total", "host", "copy_failed") == 0


def test_d13_an_aborted_write_that_ends_later(tmp_path: Path) -> None:
    """A flush gives up at its deadline while the disk is still at it; the blocks count when they are there."""
    with live(4, nvme=tmp_path) as rig:
        chain = chain_of(rig.namespace(), 3)
        put_all(rig.client, chain)
        gate = rig.tiers["nvme"].before = Gate("put_from")
        timeout_s = 0.05
        while not gate.waiting:  # on a busy machine the deadline may pass before the write begins
            report = rig.client.flush("nvme", timeout_s=timeout_s).result(PATIENCE_S)
            assert (report.wanted, report.written, report.failed) == (3, 0, 3)
            timeout_s *= 2
            assert timeout_s < PATIENCE_S, "no write was begun"
        gate.open()
        rig.settle()
        assert held(rig.store, chain)["nvme"] == [0, 1, 2]
        assert put(rig.client, chain).resident == 3


def test_d8_a_block_whose_head_turned_out_damaged_is_not_missed_by_a_flush(tmp_path: Path) -> None:
    """Two workers read two blocks; the second one is there before the first is found to be damaged. It hangs from
    nothing now: a flush neither writes it nor says that the disk has failed."""
    with running_server() as server, live(8, nvme=tmp_path, valkey=server.address) as rig:
        space = rig.namespace()
        chain = chain_of(space, 2)
        put_all(rig.client, chain)
        rig.flush("valkey")
        rig.client.evict("host")
        tier, gate = rig.tiers["valkey"], Gate("get_into")
        head = rig.store.catalog.index.space(space.namespace.digest).key(chain.hashes[0], 0)
        get_into = tier.get_into

        def the_head_last(wants: Sequence[Want], deadline: Deadline, on_done: DoneCallback) -> None:
            if any(want.key == head for want in wants):
                gate("get_into")
            get_into(wants, deadline, on_done)
            gate.open()

        tier.get_into = the_head_last  # type: ignore[method-assign]
        for key in server.do("KEYS", "*"):
            value = server.do("GET", key)
            if frame.unpack(value[: frame.HEADER_BYTES]).depth == 0:
                server.do("SET", key, value[:-1] + bytes([value[-1] ^ 1]))
        assert loaded(rig.client, chain) == 0
        rig.settle()
        assert held(rig.store, chain)["host"] == [1]
        report = rig.client.flush("nvme").result(PATIENCE_S)
        assert (report.wanted, report.written, report.failed) == (0, 0, 0)
        audit(rig.store)
        put(rig.client, chain, count=1)
        assert loaded(rig.client, chain) == 2, "its head is there again"
