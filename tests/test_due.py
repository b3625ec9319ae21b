"""Who waits ends his own wait at the deadline: nothing but the machine stands between a caller and his time."""

from __future__ import annotations

import gc
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.client_support import (
    PATIENCE_S,
    Gate,
    Live,
    MovableClock,
    audit,
    chain_of,
    check_lease,
    live,
    loaded,
    put,
    put_all,
)
from tierkv.clock import Deadline, FakeClock, SystemClock
from tierkv.due import Due
from tierkv.policies.on_hit import OnHitPolicy
from tierkv.policy import LoadQuote, Promotion, Usage

# -- the future


def due(timeout_s: float) -> Due[str]:
    return Due(Deadline(SystemClock(), timeout_s))


def test_who_waits_completes_it_at_the_deadline() -> None:
    future, told = due(0.01), []

    def expire() -> None:
        told.append(threading.current_thread())
        future.set_result("late")

    future.ends_by(expire)
    assert future.result() == "late"
    assert told == [threading.current_thread()]


def test_nobody_completes_it_before_the_deadline() -> None:
    future = due(PATIENCE_S)
    future.ends_by(lambda: pytest.fail("its time was not over"))
    with pytest.raises(TimeoutError):
        future.result(0.01)
    threading.Timer(0.01, lambda: future.set_result("in time")).start()
    assert future.result() == "in time"
    assert future.result(0) == "in time"


def test_who_has_less_patience_than_there_is_time_goes_on_waiting_afterwards() -> None:
    """The deadline comes first, but what it begins is completed by somebody else, later."""
    future, begun = due(0.01), threading.Event()
    future.ends_by(begun.set)
    with pytest.raises(TimeoutError):
        future.result(0.02)
    assert begun.is_set()
    threading.Timer(0.01, lambda: future.set_result("done")).start()
    assert future.result(PATIENCE_S) == "done"


def test_the_deadline_is_that_of_the_clock_it_was_given() -> None:
    clock = FakeClock()
    future: Due[str] = Due(Deadline(clock, 0.01))
    future.ends_by(lambda: future.set_result("late"))
    with pytest.raises(TimeoutError):
        future.result(0.05)
    clock.advance(0.01)
    assert future.result(PATIENCE_S) == "late"


def test_a_deadline_beyond_what_a_lock_can_wait_for() -> None:
    future = due(1e12)
    threading.Timer(0.01, lambda: future.set_result("done")).start()
    assert future.result() == "done"


class Waited:
    def expire(self) -> None:
        pass


@pytest.mark.parametrize("end", [lambda future: future.set_result("done"), Due.cancel])
def test_a_future_that_is_over_holds_nothing(end: Callable[[Due[str]], Any]) -> None:
    """Nor is what it has waited for left to the garbage collector."""
    future, waited = due(PATIENCE_S), Waited()
    known = weakref.ref(waited)
    future.ends_by(waited.expire)
    gc.disable()
    try:
        end(future)
        del waited
        assert known() is None
    finally:
        gc.enable()


# -- the verbs, while the thread of timers is held up


@contextmanager
def no_timers(rig: Live) -> Iterator[threading.Event]:
    """Nobody but the caller can end a wait in this block. The event tells that it was given up."""
    free, busy, given_up = threading.Event(), threading.Event(), threading.Event()

    def hold_up() -> None:
        busy.set()
        if not free.wait(PATIENCE_S):
            given_up.set()

    rig.store.executor.call_later(0.0, hold_up)
    assert busy.wait(PATIENCE_S)
    try:
        yield given_up
    finally:
        free.set()


@pytest.mark.parametrize(
    "verb",
    [
        lambda client, chain: client.load(chain, timeout_s=0.05).release(),
        lambda client, chain: client.load_async(chain, timeout_s=0.05).result().release(),
        lambda client, chain: client.prefetch(chain, timeout_s=0.05).result(),
        lambda client, chain: client.pin(chain, timeout_s=0.05),
    ],
    ids=["load", "load_async", "prefetch", "pin"],
)
def test_d16_who_loads_waits_for_no_timer(tmp_path: Path, verb: Callable[[Any, Any], Any]) -> None:
    with live(4, nvme=tmp_path) as rig:
        chain = chain_of(rig.namespace(), 3)
        put_all(rig.client, chain)
        rig.flush("nvme")
        rig.client.evict("host")
        gate = rig.tiers["nvme"].before = Gate("get_into")
        with no_timers(rig) as given_up:
            verb(rig.client, chain)
            assert not given_up.is_set()
        gate.open()
        rig.settle()
        assert rig.count("load_deadline_total") == 1, "by the caller or by the timer, not by both"
        assert loaded(rig.client, chain) == 3


def test_d16_who_flushes_waits_for_no_timer(tmp_path: Path) -> None:
    with live(4, nvme=tmp_path) as rig:
        chain = chain_of(rig.namespace(), 3)
        put_all(rig.client, chain)
        gate = rig.tiers["nvme"].before = Gate("put_from")
        with no_timers(rig) as given_up:
            report = rig.client.flush("nvme", timeout_s=0.05).result()
            assert not given_up.is_set()
        assert (report.wanted, report.written, report.failed) == (3, 0, 3)
        gate.open()


def test_d16_who_clears_waits_for_no_timer(tmp_path: Path) -> None:
    with live(4, nvme=tmp_path) as rig:
        space = rig.namespace()
        put_all(rig.client, chain_of(space, 3))
        rig.flush("nvme")
        gate = rig.tiers["nvme"].before = Gate("clear")
        with no_timers(rig) as given_up:
            report = rig.client.clear(namespace=space, timeout_s=0.05).result()
            assert not given_up.is_set()
        assert not report.complete
        assert report.tiers["host"].removed == 3
        gate.open()


# -- what is left to do when the time is over


class Counted:
    """A lock that counts how often somebody waits for it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.waits = 0

    def acquire(self, blocking: bool = True, timeout: float = -1) -> bool:
        self.waits += blocking and timeout != 0.0
        return self._lock.acquire(blocking, timeout)

    def release(self) -> None:
        self._lock.release()

    def __enter__(self) -> None:
        self.acquire()

    def __exit__(self, *_: object) -> None:
        self.release()


def test_a_load_without_time_waits_for_the_catalogs_lock_once(tmp_path: Path) -> None:
    """To pin what is known. More would be more waits for who has lost his turn at the interpreter while he held it."""
    with live(8, nvme=tmp_path) as rig:
        chain, unknown = (chain_of(rig.namespace(), 4, seed) for seed in (0, 1))
        put_all(rig.client, chain)
        rig.flush("nvme")
        rig.client.evict("host")
        put(rig.client, chain, count=2)
        usual = rig.store.catalog.lock
        for wanted, found in ((chain, 2), (unknown, 0)):
            counted = Counted()
            rig.store.catalog.lock = counted  # type: ignore[assignment]
            lease = rig.client.load(wanted, timeout_s=0.0)
            rig.store.catalog.lock = usual
            assert counted.waits == 1
            assert len(lease) == found
            check_lease(rig.store, lease)
            lease.release()
        audit(rig.store)


class Slow(OnHitPolicy):
    """Thinks so long that the time of who asks is over."""

    clock: MovableClock | None = None

    def decide(self, quote: LoadQuote, usage: Usage) -> Promotion:
        if self.clock is not None:
            self.clock.advance(100.0)
        return super().decide(quote, usage)


@pytest.mark.parametrize("verb", ["load", "load_async", "prefetch"])
def test_d16_nothing_is_begun_when_the_time_was_over_while_it_was_planned(tmp_path: Path, verb: str) -> None:
    policy = Slow()
    with live(8, nvme=tmp_path, promotion=policy) as rig:
        chain = chain_of(rig.namespace(), 4)
        put_all(rig.client, chain)
        rig.flush("nvme")
        rig.client.evict("host")
        put(rig.client, chain, count=1)
        calls: list[str] = []
        rig.tiers["nvme"].before = calls.append
        policy.clock = rig.clock
        if verb == "load":
            lease = rig.client.load(chain, timeout_s=50.0)
        elif verb == "load_async":
            lease = rig.client.load_async(chain, timeout_s=50.0).result(PATIENCE_S)
        else:
            rig.client.prefetch(chain, timeout_s=50.0).result(PATIENCE_S)
            lease = rig.client.load(chain, timeout_s=0.0)
        policy.clock = None
        with lease:
            assert len(lease) == 1
            check_lease(rig.store, lease)
        assert "get_into" not in calls
        assert rig.count("missed_blocks_total", "deadline") == 3
        audit(rig.store)
        assert loaded(rig.client, chain) == 4
