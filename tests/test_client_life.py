"""A client's life: leases and their deadlines, events, facts, close with work outstanding, and forks."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

import tierkv
from tests.client_support import (
    EMBEDDED,
    PATIENCE_S,
    Gate,
    audit,
    chain_of,
    check_lease,
    held,
    live,
    loaded,
    payloads_of,
    poison_free_slots,
    put,
    put_all,
    spec_of,
)
from tests.valkey_server import eventually, running_server
from tierkv.errors import ClosedError, ForkError, TierKVError
from tierkv.testing.payloads import check, fill

pytestmark = pytest.mark.usefixtures("face")

# ---- D15: leases


def test_d15_a_lease_past_its_deadline_is_reported_once_and_still_protects() -> None:
    with live(4, lease_deadline_s=60.0) as rig:
        space = rig.namespace()
        chain = chain_of(space, 2)
        put_all(rig.client, chain)
        lease = rig.client.load(chain, owner="request 7")
        rig.store.upkeep.make_rounds()
        assert rig.count("leases_overdue_total") == 0
        rig.clock.advance(61.0)
        for _ in range(3):
            rig.store.upkeep.make_rounds()
        assert rig.count("leases_overdue_total") == 1
        for seed in range(1, 5):
            put(rig.client, chain_of(space, 4, seed))
        poison_free_slots(rig.store)
        check_lease(rig.store, lease)
        assert rig.client.stats()["leases"] == 1
        lease.release()
        put_all(rig.client, chain_of(space, 4, seed=9))
        assert rig.client.match(chain).blocks == 0


def test_d15_thousands_of_cycles_leave_nothing_behind(tmp_path: Path, face: str) -> None:
    with live(8, nvme=tmp_path) as rig:
        space = rig.namespace()
        start_bytes = rig.store.host.free_bytes()
        chains = [chain_of(space, 1, seed) for seed in range(32)]
        payloads = [payloads_of(chain) for chain in chains]
        for turn in range(10_000 if face == EMBEDDED else 2_000):
            chain = chains[turn % 32]
            rig.client.put(chain, payloads[turn % 32])
            rig.client.match(chain)
            with rig.client.load(chain, timeout_s=PATIENCE_S) as lease:
                assert len(lease) == 1
            if turn % 500 == 0:
                check_lease_of(rig.client.load(chain))
                rig.flush("nvme")
                rig.client.evict("host")
        rig.settle()
        audit(rig.store)
        rig.client.clear().result(PATIENCE_S)
        assert rig.store.host.free_bytes() == start_bytes
        assert rig.store.catalog.index.size == 0
        assert rig.client.stats()["leases"] == 0


def check_lease_of(lease: tierkv.Lease) -> None:
    with lease:
        check(lease.view(0), lease.chain.namespace.block_key(lease.chain.hashes[0], 0))


def test_leases_of_many_threads_come_back_whole() -> None:
    with live(8) as rig:
        chain = chain_of(rig.namespace(), 4)
        put_all(rig.client, chain)
        failures: list[BaseException] = []

        def work() -> None:
            try:
                for _ in range(300):
                    leases = [rig.client.load(chain) for _ in range(3)]
                    for lease in leases:
                        lease.release()
                        lease.release()
            except BaseException as error:
                failures.append(error)
                raise

        threads = [threading.Thread(target=work) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(PATIENCE_S)
        assert failures == []
        assert rig.client.stats()["leases"] == 0
        audit(rig.store)


# ---- events and facts


def test_events_tell_each_change_once_and_in_order(tmp_path: Path) -> None:
    with live(2, nvme=tmp_path) as rig:
        space = rig.namespace()
        chain = chain_of(space, 2)
        put_all(rig.client, chain)
        rig.flush("nvme")
        rig.client.evict("host")
        loaded(rig.client, chain)
        events = rig.client.events()
        assert [event.seq for event in events] == list(range(1, len(events) + 1))
        digest, hashes = chain.namespace.digest, chain.hashes
        assert {event.namespace for event in events} == {digest}
        for position, block_hash in enumerate(hashes):
            mine = [event for event in events if event.block_hash == block_hash]
            assert [(event.kind, event.tier) for event in mine] == [
                ("arrived", "host"),
                ("stored", None),
                ("arrived", "nvme"),
                ("left", "host"),
                ("arrived", "host"),
            ]
            assert {event.parent_hash for event in mine} == {hashes[position - 1] if position else None}
        assert rig.client.events(events[-1].seq) == []
        assert rig.client.events(events[-2].seq) == events[-1:]


def test_events_can_be_waited_for() -> None:
    with live() as rig:
        chain = chain_of(rig.namespace(), 1)
        assert rig.client.events(0, timeout_s=0.01) == []
        found: list[list[object]] = []
        waiter = threading.Thread(target=lambda: found.append(rig.client.events(0, timeout_s=PATIENCE_S)))
        waiter.start()
        put_all(rig.client, chain)
        waiter.join(PATIENCE_S)
        assert not waiter.is_alive()
        assert found[0]


def test_d28_an_idle_scrape_changes_nothing(tmp_path: Path) -> None:
    with running_server() as server, live(nvme=tmp_path, valkey=server.address) as rig:
        chain = chain_of(rig.namespace(), 3)
        put_all(rig.client, chain)
        rig.flush("nvme")
        loaded(rig.client, chain)
        rig.settle()
        first = rig.client.stats()
        second = rig.client.stats()
        assert first["counters"] == second["counters"]
        assert first["families"] == second["families"] == 3
        assert rig.client.events() == rig.client.events()


def test_stats_are_plain_values_that_name_every_tier(tmp_path: Path) -> None:
    import json

    with live(nvme=tmp_path, valkey="embedded") as rig:
        put_all(rig.client, chain_of(rig.namespace(), 2))
        stats = json.loads(json.dumps(rig.client.stats()))
        assert list(stats["tiers"]) == ["host", "nvme", "valkey"]
        assert stats["tiers"]["host"]["used_bytes"] == 2 * 4096
        assert stats["tiers"]["nvme"]["breaker"] == "closed"
        assert stats["tiers"]["nvme"]["io_mode"]
        assert stats["counters"]["stored_blocks_total/host"] == 2


# ---- close


def closing_time_s(client: tierkv.Client) -> float:
    start_s = time.monotonic()
    client.close()
    return time.monotonic() - start_s


@pytest.mark.embedded_only
def test_d17_close_with_ten_reads_outstanding_at_a_hung_server() -> None:
    with running_server() as server:
        with live(
            16, valkey=server.address, valkey_options={"workers": 4}, valkey_spec={"timeout_s": 60.0}
        ) as rig:
            space = rig.namespace()
            chains = [chain_of(space, 1, seed) for seed in range(10)]
            for chain in chains:
                put_all(rig.client, chain)
            rig.flush("valkey")
            rig.client.evict("host")
            server.hang()
            waiting = [rig.client.load_async(chain, timeout_s=60.0) for chain in chains]
            assert closing_time_s(rig.client) < 5.0 + 2.0
            for future in waiting:
                with future.result(PATIENCE_S) as lease:
                    assert len(lease) == 0
        server.go_on()


@pytest.mark.embedded_only
def test_close_answers_whoever_waits(tmp_path: Path) -> None:
    """A thread in load, a flush and a prefetch end when the store is closed, not at their own deadlines."""
    with live(4, nvme=tmp_path, nvme_options={"workers": 1}) as rig:
        space = rig.namespace()
        chain, other = chain_of(space, 2), chain_of(space, 2, seed=1)
        put_all(rig.client, chain)
        rig.flush("nvme")
        rig.client.evict("host")
        put_all(rig.client, other)
        gate = rig.tiers["nvme"].before = Gate("get_into")
        found: list[int] = []

        def load() -> None:
            with rig.client.load(chain, timeout_s=600.0) as lease:
                found.append(len(lease))

        thread = threading.Thread(target=load)
        thread.start()
        gate.reached()
        prefetch = rig.client.prefetch(chain, timeout_s=600.0)
        flush = rig.client.flush("nvme", timeout_s=600.0)
        closing = threading.Thread(target=rig.client.close)
        closing.start()
        eventually(lambda: rig.store.closed, "the store is closing")
        gate.open()
        for each in (thread, closing):
            each.join(PATIENCE_S)
            assert not each.is_alive()
        assert prefetch.result(PATIENCE_S).blocks in (0, 2)
        assert flush.result(PATIENCE_S).wanted == 2
        assert found[0] in (0, 2)


def test_close_twice_and_at_once_from_many_threads(tmp_path: Path) -> None:
    with live(nvme=tmp_path) as rig:
        put_all(rig.client, chain_of(rig.namespace(), 3))
        threads = [threading.Thread(target=rig.client.close) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(PATIENCE_S)
            assert not thread.is_alive()
        rig.client.close()


@pytest.mark.embedded_only
def test_handles_outlive_the_close(tmp_path: Path) -> None:
    with live(nvme=tmp_path) as rig:
        space = rig.namespace()
        chain = chain_of(space, 2)
        put_all(rig.client, chain)
        lease = rig.client.load(chain)
        view = lease.view(1)
        draft = rig.client.reserve(chain_of(space, 1, seed=1))
        assert draft is not None
        target = draft.view(0, 0)
        rig.client.close()
        check(view, chain.namespace.block_key(chain.hashes[1], 0))
        fill(target, chain.namespace.block_key(chain.hashes[0], 0))
        with pytest.raises(ClosedError):
            lease.view(0)
        with pytest.raises(ClosedError):
            draft.view(0, 0)
        lease.release()
        draft.drop()


def test_verbs_of_many_threads_end_when_the_store_is_closed_under_them(tmp_path: Path) -> None:
    with live(16, nvme=tmp_path, nvme_spec={"write": "through"}) as rig:
        space = rig.namespace()
        turns = [0] * 4
        ends: list[BaseException] = []

        def work(number: int) -> None:
            try:
                while True:
                    chain = chain_of(space, 3, seed=turns[number] % 8)
                    put(rig.client, chain)
                    with rig.client.load(chain, timeout_s=PATIENCE_S) as lease:
                        if len(lease):
                            check(lease.view(0), chain.namespace.block_key(chain.hashes[0], 0))
                    turns[number] += 1
            except (TierKVError, AssertionError, ValueError) as error:
                ends.append(error)

        threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
        for thread in threads:
            thread.start()
        eventually(lambda: min(turns) > 20, "all threads are at work")
        rig.client.close()
        for thread in threads:
            thread.join(PATIENCE_S)
            assert not thread.is_alive()
        assert [type(error) for error in ends] == [ClosedError] * 4, ends


@pytest.mark.embedded_only
def test_d23_close_writes_what_was_queued(tmp_path: Path) -> None:
    """Write-through: the blocks wait behind a slow disk when the store is closed, and are there after a restart."""
    with live(8, nvme=tmp_path, nvme_options={"workers": 1}, nvme_spec={"write": "through"}) as rig:
        space = rig.namespace()
        gate = rig.tiers["nvme"].before = Gate("put_from")
        chains = [chain_of(space, 2, seed) for seed in range(4)]
        for chain in chains:
            put_all(rig.client, chain)
        gate.reached()
        closing = threading.Thread(target=rig.client.close)
        closing.start()
        eventually(lambda: rig.store.closed, "the store is closing")
        gate.open()
        closing.join(PATIENCE_S)
    with live(8, nvme=tmp_path) as rig:
        space = rig.namespace()
        assert [loaded(rig.client, chain_of(space, 2, seed)) for seed in range(4)] == [2, 2, 2, 2]


@pytest.mark.embedded_only
def test_the_context_manager_closes() -> None:
    with tierkv.open(host_capacity="1 MiB") as client:
        chain = chain_of(client.open_namespace(spec_of()), 1)
        assert client.put(chain, [[bytes(4096)]]).stored == 1
    with pytest.raises(ClosedError):
        client.match(chain)


@pytest.mark.embedded_only
def test_open_takes_up_what_an_earlier_store_left(tmp_path: Path) -> None:
    settings = {
        "host_capacity": "1 MiB",
        "nvme_path": str(tmp_path),
        "nvme_capacity": "4 MiB",
        "nvme_min_free": 0,
    }
    with tierkv.open(**settings) as client:
        chain = chain_of(client.open_namespace(spec_of()), 3)
        put_all(client, chain)
        assert client.flush("nvme").result(PATIENCE_S).written == 3
    with tierkv.open(**settings) as client:
        assert loaded(client, chain_of(client.open_namespace(spec_of()), 3)) == 3


# ---- D26: forks


def in_a_child(call: Callable[[], str]) -> str:
    """What ``call`` says in a forked child."""
    read, write = os.pipe()
    pid = os.fork()
    if pid == 0:  # nothing of pytest may run here
        said = b"died"
        try:
            said = call().encode()
        finally:
            os.write(write, said)
            os._exit(0)
    os.close(write)
    with open(read, "rb") as pipe:
        answer = pipe.read().decode()
    os.waitpid(pid, 0)
    return answer


def test_d26_a_client_used_after_a_fork_says_so(tmp_path: Path) -> None:
    with live(nvme=tmp_path) as rig:
        client = rig.client
        chain = chain_of(rig.namespace(), 2)
        put_all(client, chain)
        verbs: dict[str, Callable[[], object]] = {
            "match": lambda: client.match(chain),
            "prefetch": lambda: client.prefetch(chain),
            "load": lambda: client.load(chain),
            "load_async": lambda: client.load_async(chain),
            "put": lambda: put(client, chain),
            "reserve": lambda: client.reserve(chain),
            "pin": lambda: client.pin(chain),
            "unpin": lambda: client.unpin(chain),
            "flush": lambda: client.flush("nvme"),
            "evict": lambda: client.evict("host"),
            "clear": client.clear,
            "bump_epoch": lambda: client.bump_epoch(chain.namespace),
            "sleep": lambda: client.sleep(keep=True),
            "stats": client.stats,
            "events": client.events,
            "open_namespace": lambda: client.open_namespace(spec_of()),
        }

        def child() -> str:
            wrong = []
            for name, verb in verbs.items():
                try:
                    verb()
                    wrong.append(f"{name} worked")
                except ForkError as error:
                    if str(os.getppid()) not in str(error) or str(os.getpid()) not in str(error):
                        wrong.append(f"{name}: {error}")
                except TierKVError as error:
                    wrong.append(f"{name}: {error!r}")
            client.close()
            return "; ".join(wrong) or "all well"

        assert in_a_child(child) == "all well"
        assert loaded(client, chain) == 2
        rig.flush("nvme")
        assert held(rig.store, chain)["nvme"] == [0, 1]


@pytest.mark.embedded_only
def test_d26_a_child_may_open_a_client_of_its_own() -> None:
    with live() as rig:
        chain = chain_of(rig.namespace(), 2)
        put_all(rig.client, chain)

        def child() -> str:
            with tierkv.open(host_capacity="1 MiB") as own:
                mine = chain_of(own.open_namespace(spec_of()), 2)
                put_all(own, mine)
                return f"{loaded(own, mine)} blocks"

        assert in_a_child(child) == "2 blocks"
        assert loaded(rig.client, chain) == 2
