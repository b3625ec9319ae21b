"""Who waits for the catalog's lock: who answers a request for one of those with time, who lets go for nobody."""

from __future__ import annotations

import ast
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.client_support import (
    BLOCK_TOKENS,
    PATIENCE_S,
    MovableClock,
    audit,
    chain_of,
    full_group,
    layout_of,
    live,
    loaded,
    put,
    put_all,
    window_group,
)
from tests.test_style import ROOT, product_files
from tests.valkey_server import eventually
from tierkv.bounded_lock import within
from tierkv.catalog import HOST, LOCK_BATCH, MOST_LEFT
from tierkv.flights import Flight
from tierkv.loading import Loader
from tierkv.tiers.nvme import NvmeTier

AT_ONCE = {
    ("catalog.py", "pin_run"),
    ("catalog.py", "lease_run"),
    ("loading.py", "_plan"),
    ("intake.py", "land"),
    ("probing.py", "_note"),
    ("catalog.py", "unpin"),
    ("catalog.py", "touch_and_unpin"),
}
"""Who answers a request, and who does not wait: they go to the lock past its gate. ``Room._take`` is told which way."""


# -- who has time -----------------------------------------------------------------------------------------------------


def past_the_gate(path: Path) -> Iterator[tuple[str, str]]:
    """Functions of a file that take the catalog's lock without its gate."""
    ends = ("catalog.lock", "residency.lock", *(("self.lock",) if path.name == "catalog.py" else ()))
    for function in ast.walk(ast.parse(path.read_text())):
        if not isinstance(function, ast.FunctionDef):
            continue
        for node in ast.walk(function):
            taken = [""]
            if isinstance(node, ast.With):
                taken = [ast.unparse(item.context_expr) for item in node.items]
            elif isinstance(node, ast.Call) and ast.unparse(node.func) == "within":
                taken = [ast.unparse(node.args[0])]
            if taken[-1].endswith(ends) and not taken[0].endswith("gate"):
                yield path.name, function.name


def test_only_those_who_answer_a_request_go_past_the_gate() -> None:
    found = {found for path in product_files() for found in past_the_gate(path)}
    assert found == AT_ONCE


def test_that_look_sees_who_goes_past(tmp_path: Path) -> None:
    (tmp_path / "some.py").write_text("def f():\n    with self._catalog.lock:\n        pass\n")
    assert list(past_the_gate(tmp_path / "some.py")) == [("some.py", "f")]
    assert (ROOT / "tierkv" / "catalog.py") in product_files()


class OwnLock:
    """A lock whose taking can be looked at."""

    def __init__(self) -> None:
        self._lock = threading.Lock()

    def acquire(self, blocking: bool = True, timeout: float = -1) -> bool:
        return self._lock.acquire(blocking, timeout)

    def release(self) -> None:
        self._lock.release()

    def __enter__(self) -> bool:
        return self.acquire()

    def __exit__(self, *_: object) -> None:
        self.release()


class WatchedLock(OwnLock):
    """It knows who waits for it, by the names of threads."""

    def __init__(self) -> None:
        super().__init__()
        self.waiting: set[str] = set()

    def acquire(self, blocking: bool = True, timeout: float = -1) -> bool:
        name = threading.current_thread().name
        self.waiting.add(name)
        got = super().acquire(blocking, timeout)
        self.waiting.discard(name)
        return got


@contextmanager
def at_the_same_time(calls: dict[str, Callable[[], object]]) -> Iterator[dict[str, object]]:
    """Threads by name; their results are there behind the ``with``."""
    results: dict[str, object] = {}

    def run(name: str) -> None:
        results[name] = calls[name]()

    threads = [threading.Thread(target=run, args=(name,), name=name) for name in calls]
    for thread in threads:
        thread.start()
    yield results
    for thread in threads:
        thread.join(PATIENCE_S)
        assert not thread.is_alive(), thread.name


def test_a_load_goes_past_those_who_store() -> None:
    with live(32) as rig:
        space = rig.namespace()
        wanted = chain_of(space, 3)
        put_all(rig.client, wanted)
        chains = [chain_of(space, 1, seed) for seed in range(1, 9)]
        catalog: Any = rig.store.catalog
        lock, gate = WatchedLock(), WatchedLock()
        catalog.lock, catalog.gate = lock, gate
        stores = {f"store {i}": lambda i=i: put_all(rig.client, chains[i]) for i in range(len(chains))}
        lock.acquire()
        with at_the_same_time({**stores, "load": lambda: loaded(rig.client, wanted)}) as results:
            try:
                eventually(lambda: len(gate.waiting) == len(stores) - 1, "all but one stand at the gate")
                eventually(lambda: "load" in lock.waiting, "the load stands at the lock")
                assert len(lock.waiting) == 2
            finally:
                lock.release()
        assert results["load"] == 3
        audit(rig.store)


# -- who lets go ------------------------------------------------------------------------------------------------------


def test_a_lease_is_released_while_the_lock_is_taken() -> None:
    with live(8) as rig:
        chain = chain_of(rig.namespace(), 3)
        put_all(rig.client, chain)
        lease = rig.client.load(chain)
        families, catalog = list(lease.families), rig.store.catalog
        with catalog.lock:
            with at_the_same_time({"release": lease.release}):
                pass
            assert [catalog.index.pins[family] for family in families] == [1, 1, 1], (
                "nobody has the lock but we"
            )
            catalog._catch_up()
            assert [catalog.index.pins[family] for family in families] == [0, 0, 0]
        audit(rig.store)


@pytest.mark.parametrize("who", ["eviction", "clear", "upkeep", "a count"])
def test_what_is_left_is_done_before_anybody_looks_at_pins(who: str) -> None:
    with live(4) as rig:
        space = rig.namespace()
        chain = chain_of(space, 4)
        put_all(rig.client, chain)
        lease = rig.client.load(chain)
        families, catalog = list(lease.families), rig.store.catalog
        with catalog.lock, at_the_same_time({"release": lease.release}):
            pass
        assert len(catalog._left) == 1
        if who == "eviction":
            put_all(rig.client, chain_of(space, 4, seed=1))  # there is room for four
        elif who == "clear":
            assert rig.client.clear().result(PATIENCE_S).complete
            assert rig.store.host.usage().used_bytes == 0, "a block is held by nobody"
        elif who == "upkeep":
            rig.store.upkeep.make_rounds()
        else:
            assert catalog.leased_families() == 0
        assert not catalog._left
        assert not any(catalog.index.pins[family] for family in families)
        audit(rig.store)


def test_a_block_that_was_let_go_grows() -> None:
    """Its last lease was released while the lock was taken: to who stores it anew nobody holds it."""
    with live(8, region_blocks=1) as rig:
        chain = chain_of(rig.namespace(layout_of(full_group(), window_group(BLOCK_TOKENS))), 2)
        put(rig.client, chain, count=1, absent=(1,))
        put(rig.client, chain, first=1, count=1)
        lease, catalog = rig.client.load(chain), rig.store.catalog
        with catalog.lock, at_the_same_time({"release": lease.release}):
            pass
        assert len(catalog._left) == 1
        assert put(rig.client, chain).stored == 1
        assert catalog.index.residency[HOST][lease.families[0]] == 0b11
        audit(rig.store)


def test_a_load_is_over_at_its_deadline_whoever_has_the_lock(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The disk hangs, and the lock is not to be had until the load has come back."""
    reading, go_on = threading.Event(), threading.Event()
    honest = NvmeTier.get_into

    def hangs(self: NvmeTier, *arguments: Any) -> None:
        reading.set()
        assert go_on.wait(PATIENCE_S)
        honest(self, *arguments)

    with live(8, nvme=tmp_path) as rig:
        chain = chain_of(rig.namespace(), 3)
        put_all(rig.client, chain)
        rig.flush("nvme")
        rig.client.evict("host")
        monkeypatch.setattr(NvmeTier, "get_into", hangs)
        call = {"load": lambda: len(rig.client.load(chain, timeout_s=0.3))}
        with at_the_same_time(call) as results:
            assert reading.wait(PATIENCE_S)
            with rig.store.catalog.gate, rig.store.catalog.lock:
                eventually(lambda: "load" in results, "the load is over")
            go_on.set()
        assert results["load"] == 0
        rig.settle()
        audit(rig.store)


def test_no_more_is_left_than_is_done_at_once() -> None:
    with live(8) as rig:
        chain = chain_of(rig.namespace(), 1)
        put_all(rig.client, chain)
        leases = [rig.client.load(chain) for _ in range(MOST_LEFT + 2)]
        catalog, [family] = rig.store.catalog, leases[0].families
        with catalog.lock, at_the_same_time({"first": lambda: [its.release() for its in leases[:-2]]}):
            pass
        assert len(catalog._left) == MOST_LEFT
        leases[-1].release()
        assert catalog.index.pins[family] == 1
        leases[-2].release()
        audit(rig.store)


def naive(lock: threading.Lock, patience_s: float, work: Callable[[], object]) -> object:
    """As one would write it; an error between the second and the third line keeps the lock for ever."""
    if lock.acquire(True, patience_s):
        try:
            return work()
        finally:
            lock.release()
    return None


def locked_after(take: Callable[[threading.Lock, float, Callable[[], object]], object]) -> bool:
    """Whether the lock is still taken after a call that a signal's handler has broken off, wherever that can be."""

    class Interrupted(Exception):
        pass

    def interrupt(*_: object) -> None:
        raise Interrupted

    lock = threading.Lock()
    before = signal.signal(signal.SIGALRM, interrupt)
    try:
        for turn in range(4000):
            try:
                signal.setitimer(signal.ITIMER_REAL, 1e-6 * (1 + turn % 20))
                for _ in range(50):
                    take(lock, 0.0, lambda: None)
            except Interrupted:
                pass
            finally:
                try:
                    signal.setitimer(signal.ITIMER_REAL, 0)
                except Interrupted:
                    pass
            if lock.locked():
                return True
    finally:
        signal.signal(signal.SIGALRM, before)
    return False


def test_a_signal_leaves_the_lock_free() -> None:
    assert not locked_after(within)
    assert locked_after(naive)


# -- who has little time ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("resident", [True, False])
def test_a_load_without_time_waits_for_the_lock_a_moment_only(tmp_path: Path, resident: bool) -> None:
    """Somebody has the lock and does not give it back. Nothing is found, nothing is held, and it is counted."""
    with live(8, nvme=tmp_path) as rig:
        chain = chain_of(rig.namespace(), 3)
        put_all(rig.client, chain)
        rig.flush("nvme")
        if not resident:
            rig.client.evict("host")
        with rig.store.catalog.gate, rig.store.catalog.lock:
            with at_the_same_time({"load": lambda: len(rig.client.load(chain, timeout_s=0.0))}) as results:
                pass
        assert results["load"] == 0
        assert rig.store.counters.get("missed_blocks_total", "deadline") == 3
        assert loaded(rig.client, chain, timeout_s=PATIENCE_S) == 3
        audit(rig.store)


class BusyLock(OwnLock):
    """One gets it when nine tenths of one's time have passed."""

    def __init__(self, clock: MovableClock) -> None:
        super().__init__()
        self._clock = clock

    def acquire(self, blocking: bool = True, timeout: float = -1) -> bool:
        if 0 < timeout < threading.TIMEOUT_MAX:
            self._clock.advance(0.9 * timeout)
        return super().acquire(blocking, timeout)


@pytest.mark.parametrize("resident", [True, False])
def test_a_long_load_waits_for_the_lock_no_longer_than_a_short_one(resident: bool) -> None:
    """It takes the lock for one batch after the other, and its time is one for all."""
    blocks, timeout_s, clock = 5 * LOCK_BATCH, 100.0, MovableClock()
    with live(blocks, clock=clock) as rig:
        chain = chain_of(rig.namespace(), blocks if resident else blocks + 1)
        put(rig.client, chain, count=blocks)
        catalog: Any = rig.store.catalog
        plain, catalog.lock = catalog.lock, BusyLock(clock)
        begun_s = clock.now_s()
        assert loaded(rig.client, chain, timeout_s=timeout_s) == blocks
        catalog.lock = plain
        assert clock.now_s() - begun_s < timeout_s + 10
        audit(rig.store)


def test_a_load_whose_time_ends_before_it_could_begin(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It has found its blocks on the disk, and then the lock is not to be had."""
    with live(8, nvme=tmp_path) as rig:
        chain = chain_of(rig.namespace(), 3)
        put_all(rig.client, chain)
        rig.flush("nvme")
        rig.client.evict("host")
        plan, lock = Loader._plan, rig.store.catalog.lock

        def too_late(self: Loader, *arguments: Any) -> list[Flight]:
            with lock:
                return plan(self, *arguments)

        monkeypatch.setattr(Loader, "_plan", too_late)
        assert loaded(rig.client, chain, timeout_s=0.2) == 0
        monkeypatch.setattr(Loader, "_plan", plan)
        assert rig.store.counters.get("missed_blocks_total", "deadline") == 3
        assert loaded(rig.client, chain, timeout_s=PATIENCE_S) == 3
        rig.settle()
        audit(rig.store)
