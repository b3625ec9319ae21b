"""Threads that die, hang or keep dying, plug-ins that fail: the store still serves, or says that it is unhealthy."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.client_support import (
    PATIENCE_S,
    Gate,
    Live,
    MovableClock,
    audit,
    chain_of,
    held,
    live,
    loaded,
    payloads_of,
    put_all,
)
from tests.valkey_server import eventually
from tierkv.clock import FakeClock
from tierkv.copier import HostCopier, LayerPages, PagedKV
from tierkv.executor import TIMERS, ThreadExecutor
from tierkv.guard import OVERSTAY_S
from tierkv.ids import FamilyId
from tierkv.policies.lru import LruPolicy
from tierkv.policy import BlockInfo, LoadQuote, Promotion, Verdict
from tierkv.supervision import DEATHS, WITHIN_S, Caught, ThreadBook
from tierkv.supervision import PATIENCE_S as WORK_PATIENCE_S
from tierkv.testing.invariants import check_idle
from tierkv.tier import Usage
from tierkv.tiers import valkey_resolve
from tierkv.tiers.valkey_stream import LinkLost, Patience
from tierkv.units import KIB

ERRORS = [SystemExit(3), MemoryError("injected"), KeyError("a plug-in's bug")]


class Once:
    """Raises at its first call, and only there."""

    def __init__(self, error: BaseException) -> None:
        self._error = error
        self._armed = threading.Event()
        self._armed.set()

    def __call__(self, *_: object) -> None:
        if self._armed.is_set():
            self._armed.clear()
            raise self._error

    @property
    def raised(self) -> bool:
        return not self._armed.is_set()


def restarts(rig: Live, lane: str) -> int:
    return rig.count("threads_restarted_total", lane)


def lines(caplog: pytest.LogCaptureFixture, word: str) -> list[str]:
    return [record.getMessage() for record in caplog.records if word in record.getMessage()]


# ---- threads of the executor


@pytest.fixture
def executor() -> Iterator[ThreadExecutor]:
    made = ThreadExecutor(MovableClock())
    yield made
    assert made.close(PATIENCE_S) == []


@pytest.mark.parametrize("error", ERRORS, ids=lambda error: type(error).__name__)
def test_a_worker_that_dies_is_replaced_with_one_line_and_one_count(
    executor: ThreadExecutor, error: BaseException, caplog: pytest.LogCaptureFixture
) -> None:
    executor.open_lane("work", 1)
    done: list[str] = []
    executor.run("work", Once(error), done.append)  # type: ignore[arg-type]
    executor.run("work", lambda: "after", done.append)
    eventually(lambda: done == ["after"], "the lane works on")
    assert executor.threads.restarts == {"work": 1}
    assert executor.threads.troubles() == []
    (line,) = lines(caplog, "tierkv-work-0")
    assert repr(error) in line


def test_a_timer_that_raises_ends_no_deadline(executor: ThreadExecutor) -> None:
    fired = threading.Event()
    for number in range(2 * DEATHS):
        executor.call_later(0.001 * number, Once(SystemExit(number)))
    executor.call_later(0.05, fired.set)
    started_s = time.monotonic()
    assert fired.wait(PATIENCE_S)
    assert time.monotonic() - started_s < PATIENCE_S / 2, "it never rests"
    assert executor.threads.restarts == {TIMERS: 2 * DEATHS}
    assert [trouble.kind for trouble in executor.threads.troubles()] == ["keeps dying"]


def test_a_lane_that_keeps_dying_rests_instead_of_spinning(executor: ThreadExecutor) -> None:
    executor.open_lane("work", 1)
    rested: list[float] = []
    executor._closing.wait = lambda timeout=None: rested.append(timeout) is None  # type: ignore[method-assign,func-returns-value,assignment,arg-type]
    for _ in range(DEATHS + 3):
        executor.run("work", Once(KeyError("again")), lambda _: None)
    eventually(lambda: len(rested) == DEATHS + 3, "all have died")
    assert [rest > 0 for rest in rested] == [False] * (DEATHS - 1) + [True] * 4
    assert executor.threads.keeps_dying("work")


def test_a_lane_recovers_from_dying() -> None:
    clock = FakeClock()
    book = ThreadBook(clock)
    for _ in range(DEATHS - 1):
        assert book.died("work", "w", KeyError(1)) == 0.0
    clock.advance(WITHIN_S + 1)
    assert book.died("work", "w", KeyError(1)) == 0.0, "not within a minute"
    for _ in range(DEATHS - 1):
        rest_s = book.died("work", "w", KeyError("the last one"))
    assert rest_s > 0
    assert "the last one" in book.troubles()[0].sentence
    clock.advance(WITHIN_S + 1)
    assert book.troubles() == []


def test_a_dead_job_lets_go_of_what_it_held(
    executor: ThreadExecutor, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its buffers must not wait for the garbage collector, nor for the next job."""
    import gc
    import weakref

    class Buffer:
        pass

    def job(buffer: Buffer) -> None:
        raise KeyError("with a buffer in its frame")

    monkeypatch.setattr(logging.getLogger("tierkv"), "disabled", True)  # pytest keeps what is logged
    executor.open_lane("work", 1)
    buffer = Buffer()
    gone = weakref.ref(buffer)
    gc.disable()
    try:
        executor.run("work", lambda held=buffer: job(held), lambda _: None)  # type: ignore[misc]
        del buffer
        eventually(lambda: gone() is None, "the buffer is free")
    finally:
        gc.enable()


def test_who_is_inside_one_call_for_too_long_is_named() -> None:
    clock = FakeClock()
    book = ThreadBook(clock)
    book.begins("copy", "tierkv-copy-0")
    book.be_patient("populate", float("inf"))
    book.begins("populate", "tierkv-populate-0")
    clock.advance(WORK_PATIENCE_S + 1)
    (trouble,) = book.troubles()
    assert trouble.kind == "stuck"
    assert "tierkv-copy-0" in trouble.sentence
    book.ends("tierkv-copy-0")
    assert book.troubles() == []


def test_a_thread_that_is_gone_is_noticed() -> None:
    book = ThreadBook(FakeClock())
    thread = threading.Thread(target=lambda: None, name="t")
    book.hired("work", thread)
    assert book.troubles() == [], "it has not begun"
    thread.start()
    thread.join()
    assert [trouble.kind for trouble in book.troubles()] == ["gone"]
    book.dismiss()
    assert book.troubles() == []


def test_caught_lets_through_what_is_not_an_error_of_the_code_inside() -> None:
    caught = Caught()
    with pytest.raises(KeyboardInterrupt), caught:
        raise KeyboardInterrupt
    with caught:
        raise SystemExit
    assert isinstance(caught.error, SystemExit)
    with caught:
        pass
    assert caught.error is None


# ---- every kind of thread of a store


@pytest.mark.parametrize("error", ERRORS, ids=lambda error: type(error).__name__)
@pytest.mark.parametrize("call", ["get_into", "put_from", "usage", "delete"])
def test_d13_a_tier_that_raises_costs_a_miss_and_no_thread(
    tmp_path: Path, call: str, error: BaseException
) -> None:
    with live(8, nvme=tmp_path) as rig:
        chain = chain_of(rig.namespace(), 4)
        put_all(rig.client, chain)
        if call != "put_from":
            rig.flush("nvme")
        once = Once(error)
        tier: Any = rig.tiers["nvme"].tier
        original = getattr(tier, call)

        def broken(*arguments: Any) -> Any:
            once()
            return original(*arguments)

        setattr(tier, call, broken)
        if call == "put_from":
            rig.client.flush("nvme").result(PATIENCE_S)
            rig.flush("nvme")
        elif call == "usage":
            rig.store.upkeep.make_rounds()
        elif call == "delete":
            rig.client.evict("nvme")
        else:
            rig.client.evict("host")
            assert loaded(rig.client, chain) == 0
        eventually(lambda: once.raised, "it has raised")
        rig.settle()
        assert loaded(rig.client, chain) == 4
        assert restarts(rig, "nvme") == (call in ("get_into", "put_from"))
        assert rig.client.health().state == "ok"
        audit(rig.store)


@pytest.mark.parametrize("error", ERRORS, ids=lambda error: type(error).__name__)
def test_the_copier_answers_although_its_thread_dies(error: BaseException) -> None:
    class Event:
        def synchronize(self) -> None:
            raise error

    with live(8, copier=HostCopier) as rig:
        chain = chain_of(rig.namespace(), 1)
        kv = PagedKV([[LayerPages([np.zeros((1, 4 * KIB), np.uint8)])]])
        stored = rig.client.offload(kv, [[[0]]], chain, ready=Event()).result(PATIENCE_S)
        assert stored.dropped == {"copy_failed": 1}
        assert rig.client.offload(kv, [[[0]]], chain).result(PATIENCE_S).stored == 1
        with rig.client.load(chain) as lease:
            failed = rig.client.onboard(lease, kv, [[[0]]], on_layer=Once(error)).result(PATIENCE_S)
            assert not failed
            assert rig.client.onboard(lease, kv, [[[0]]]).result(PATIENCE_S)
        rig.store.intake.collect_orphans()


@pytest.mark.parametrize("error", ERRORS, ids=lambda error: type(error).__name__)
@pytest.mark.parametrize("where", ["step", "pick"])
def test_the_reaper_goes_on(tmp_path: Path, error: BaseException, where: str) -> None:
    with live(8, nvme=tmp_path, nvme_spec={"write": "through"}) as rig:
        chain = chain_of(rig.namespace(), 4)
        once = Once(error)
        if where == "step":
            original: Any = rig.store.reaper._look_whether_stuck
            rig.store.reaper._look_whether_stuck = lambda: (once(), original())[1]  # type: ignore[method-assign]
        else:  # in the middle of a batch: two families are taken, the third raises
            original = rig.store.demotion.describe
            taken: list[object] = []

            def describe(*arguments: Any) -> Any:
                taken.append(arguments)
                if len(taken) == 3:
                    once()
                return original(*arguments)

            rig.store.demotion.describe = describe  # type: ignore[method-assign]
        put_all(rig.client, chain)
        eventually(lambda: once.raised, "it has raised")
        eventually(lambda: restarts(rig, "reaper") == 1, "it was replaced")
        rig.store.upkeep.make_rounds()
        rig.flush("nvme")
        assert rig.client.evict("host").evicted == 4
        assert loaded(rig.client, chain) == 4
        rig.settle()
        check_idle(rig.store)


def test_upkeep_and_the_scrub_go_on() -> None:
    error = MemoryError("injected")
    with live(8) as rig:
        put_all(rig.client, chain_of(rig.namespace(), 4))
        for part, method in ((rig.store.upkeep, "make_rounds"), (rig.store.scrub, "_look")):
            rounds: list[object] = []
            original = getattr(part, method)
            once = Once(error)

            def broken(*arguments: Any, once: Once = once, call: Any = original, log: Any = rounds) -> Any:
                once()
                log.append(arguments)
                return call(*arguments)

            setattr(part, method, broken)
            rig.store.scrub._pass_s = 1e-6
            eventually(lambda seen=rounds: len(seen) >= 1, f"{method} goes on", PATIENCE_S)  # type: ignore[misc]
            assert once.raised
        assert restarts(rig, "scrub") == 1
        assert restarts(rig, TIMERS) == 1


def test_an_arena_that_cannot_be_populated_is_one_line_and_serves(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with live(8) as rig:
        store = rig.store
        store.populating = True
        assert not rig.client.health().ready
        assert "populated" in str(rig.client.health())
        store.host.populate = Once(MemoryError("no pages"))  # type: ignore[assignment,method-assign]
        store.executor.open_lane("populate", 1)
        store.executor.run("populate", store._populate, lambda _: None)
        eventually(lambda: not store.populating, "it was given up")
        assert rig.client.health().ready
        chain = chain_of(rig.namespace(), 4)
        put_all(rig.client, chain)
        assert loaded(rig.client, chain) == 4
        eventually(lambda: len(lines(caplog, "no pages")) == 1, "one line")


def test_a_store_whose_threads_keep_dying_says_so_and_serves_from_host_ram(tmp_path: Path) -> None:
    with live(8, nvme=tmp_path, breaker_failures=1000) as rig:
        chain = chain_of(rig.namespace(), 4)
        put_all(rig.client, chain)
        other = chain_of(rig.namespace(), 4, seed=1)
        put_all(rig.client, other)
        rig.flush("nvme")
        rig.client.evict("host")
        assert loaded(rig.client, chain) == 4

        def broken(*_: object) -> None:
            raise KeyError("always")

        rig.tiers["nvme"].get_into = broken  # type: ignore[assignment,method-assign]
        while not rig.store.executor.threads.keeps_dying("nvme"):
            assert loaded(rig.client, other, timeout_s=PATIENCE_S) == 0
        health = rig.client.health()
        assert health.state == "unhealthy"
        assert not health.ready
        assert "keep dying" in str(health)
        assert "always" in str(health)
        assert loaded(rig.client, chain) == 4
        assert rig.client.stats()["threads"]["restarted"]["nvme"] >= DEATHS  # type: ignore[index]
        rig.clock.advance(WITHIN_S + 1)
        assert rig.client.health().state != "unhealthy"


# ---- hung calls


def test_d17_a_disk_that_hangs_is_seen_and_then_nobody_waits_for_it(tmp_path: Path) -> None:
    with live(16, nvme=tmp_path, nvme_spec={"timeout_s": 0.5}, load_deadline_s=0.2) as rig:
        space = rig.namespace()
        chains = [chain_of(space, 4, seed=seed) for seed in range(3)]
        for chain in chains:
            put_all(rig.client, chain)
        rig.flush("nvme")
        rig.client.evict("host")
        gate = Gate("get_into")
        rig.tiers["nvme"].before = gate
        for chain in chains:
            assert len(rig.client.load(chain)) == 0
        gate.reached(3)
        assert rig.client.health().state == "ok", "nobody is late yet"
        rig.clock.advance(OVERSTAY_S + 1)
        health = rig.client.health()
        assert health.state == "degraded"
        assert "3 of 3 workers are stuck" in str(health)
        assert "get_into" in str(health)
        assert rig.client.stats()["tiers"]["nvme"]["stuck_calls"] == 3  # type: ignore[index]
        rig.store.upkeep.make_rounds()
        assert rig.store.edges[1].tier.breaker.is_open
        before = rig.count("load_deadline_total")
        assert len(rig.client.load(chains[0], timeout_s=PATIENCE_S)) == 0, "at once, not after the deadline"
        assert rig.count("load_deadline_total") == before
        gate.open()
        rig.settle()
        rig.clock.advance(1.0)
        loaded(rig.client, chains[0])  # an open breaker is tried with one call
        rig.settle()
        assert loaded(rig.client, chains[0], timeout_s=PATIENCE_S) == 4
        assert rig.client.health().state == "ok"


def test_a_timer_thread_that_is_held_up_makes_the_store_unhealthy() -> None:
    with live(4) as rig:
        inside, go_on = threading.Event(), threading.Event()
        rig.store.executor.call_later(0.0, lambda: (inside.set(), go_on.wait(PATIENCE_S))[0])  # type: ignore[func-returns-value]
        assert inside.wait(PATIENCE_S)
        rig.clock.advance(10.0)
        health = rig.client.health()
        assert health.state == "unhealthy"
        assert "timers" in str(health)
        go_on.set()
        eventually(lambda: rig.client.health().state == "ok", "the timers go on")


def test_a_tier_that_does_not_answer_is_a_reason(tmp_path: Path) -> None:
    with live(4, nvme=tmp_path) as rig:
        assert str(rig.client.health()) == "ok"
        rig.store.edges[1].tier.breaker.trip()
        rig.clock.advance(7.0)
        health = rig.client.health()
        assert (health.state, health.ready) == ("degraded", True)
        assert [reason.part for reason in health.reasons] == ["nvme"]
        assert "7 s" in str(health)
        rig.store.edges[1].tier.breaker.leave(True)
        assert rig.disk is not None
        rig.client.store.edges[1].tier._usage = Usage(1, 1, 0, 0, writable=False)
        assert "takes nothing" in str(rig.client.health())


# ---- policies of plug-ins


class Foreign(LruPolicy):
    """A plug-in: orders like LRU, until it is told to fail."""

    name = "foreign"

    def __init__(self) -> None:
        super().__init__()
        self.fail: dict[str, Callable[[], Any]] = {}

    def _maybe(self, call: str) -> Any:
        return self.fail[call]() if call in self.fail else None

    def on_insert(self, infos: Sequence[BlockInfo]) -> None:
        self._maybe("on_insert")
        super().on_insert(infos)

    def on_hit(self, ids: Sequence[FamilyId]) -> None:
        self._maybe("on_hit")
        super().on_hit(ids)

    def on_remove(self, ids: Sequence[FamilyId], *, evicted: bool) -> None:
        self._maybe("on_remove")
        super().on_remove(ids, evicted=evicted)

    def victims(self, need: int, evictable: Callable[[FamilyId], bool]) -> Iterator[FamilyId]:
        named = self._maybe("victims")
        if named is not None:
            yield from named(evictable)
        yield from super().victims(need, evictable)


def fail_with(error: BaseException) -> Callable[..., None]:
    def fail(*_: object) -> None:
        raise error

    return fail


@pytest.fixture
def foreign() -> Foreign:
    return Foreign()


def with_policy(rig: Live, policy: Foreign) -> None:
    rig.store.catalog.host_policy.policy = policy
    rig.store.catalog.host_policy.name = policy.name


@pytest.mark.parametrize("error", ERRORS, ids=lambda error: type(error).__name__)
@pytest.mark.parametrize("call", ["on_insert", "on_hit", "on_remove", "victims"])
def test_a_policy_that_raises_is_replaced_and_nothing_is_lost(
    call: str, error: BaseException, caplog: pytest.LogCaptureFixture, foreign: Foreign
) -> None:
    with live(8) as rig:
        with_policy(rig, foreign)
        space = rig.namespace()
        old = chain_of(space, 4)
        put_all(rig.client, old)
        foreign.fail[call] = fail_with(error)
        young = chain_of(space, 4, seed=1)
        put_all(rig.client, young)
        assert loaded(rig.client, old) == 4
        newest = chain_of(space, 6, seed=2)
        put_all(rig.client, newest)  # evicts
        assert loaded(rig.client, newest) == 6
        health = rig.client.health()
        assert (health.state, health.ready) == ("degraded", True)
        assert "'foreign'" in str(health)
        assert call in str(health)
        assert "'lru'" in str(health)
        assert len(lines(caplog, "'foreign'")) == 1
        assert rig.count("policy_failures_total", "eviction of host") == 1
        rig.store.upkeep.make_rounds()
        assert not rig.store.catalog.host_policy.learning
        rig.settle()
        check_idle(rig.store)


def test_the_successor_learns_what_is_there_in_small_bites(foreign: Foreign) -> None:
    with live(1000) as rig:
        with_policy(rig, foreign)
        space = rig.namespace()
        chain = chain_of(space, 1000)
        put_all(rig.client, chain)
        foreign.fail["on_hit"] = fail_with(KeyError(1))
        assert len(rig.client.load(chain)) == 1000
        successor = rig.store.catalog.host_policy.policy
        assert type(successor) is LruPolicy
        assert len(successor) == 0
        with rig.store.catalog.lock:
            rig.store.catalog.host_policy.learn()
        assert len(successor) == 256
        for lease in rig.store.leases.all():
            lease.release()
        put_all(rig.client, chain_of(space, 600, seed=1))  # while it learns
        rig.store.upkeep.make_rounds()
        rig.store.upkeep.make_rounds()
        rig.settle()
        check_idle(rig.store)


NAMED: dict[str, Callable[[Any], Iterator[Any]]] = {
    "a leased block, without asking": lambda evictable: iter([1]),
    "no number": lambda evictable: iter(["block"]),
    "nobody": lambda evictable: iter([None]),
    "a row that is not there": lambda evictable: iter(i for i in (10**9, -1) if evictable(i)),
    "one twice": lambda evictable: iter([i for i in (8, 8) if evictable(i)]),
    "for ever": lambda evictable: iter(lambda: evictable(1), "never"),  # type: ignore[arg-type]
}


@pytest.mark.parametrize("named", NAMED.values(), ids=NAMED.keys())
def test_d11_a_policy_that_names_what_may_not_leave_cannot_evict_it(
    named: Callable[[Any], Iterator[Any]], foreign: Foreign
) -> None:
    with live(8) as rig:
        with_policy(rig, foreign)
        space = rig.namespace()
        put_all(rig.client, chain_of(space, 4))
        put_all(rig.client, chain_of(space, 4, seed=1))
        lease = rig.client.load(chain_of(space, 4))
        foreign.fail["victims"] = lambda: named
        newest = chain_of(space, 2, seed=2)
        rig.client.put(newest, payloads_of(newest))
        assert len(lease) == 4
        for i in range(4):
            lease.view(i)
        assert loaded(rig.client, chain_of(space, 4)) == 4
        assert "'foreign'" in str(rig.client.health())
        lease.release()
        put_all(rig.client, newest)
        rig.settle()
        check_idle(rig.store)


def test_what_the_stores_own_question_raises_is_not_blamed_on_the_policy(foreign: Foreign) -> None:
    with live(8) as rig:
        put_all(rig.client, chain_of(rig.namespace(), 8))

        def broken(_: FamilyId) -> bool:
            raise AssertionError("a bug of the store")

        own = rig.store.catalog.host_policy.policy
        for policy in (LruPolicy(), foreign):
            rig.store.catalog.host_policy.policy = policy
            policy.on_insert([rig.store.catalog.info(FamilyId(1))])
            with pytest.raises(AssertionError, match="a bug of the store"):
                list(rig.store.catalog.host_policy.victims(1, broken))
        assert not rig.store.catalog.failures.sentences
        rig.store.catalog.host_policy.policy = own


@pytest.mark.parametrize("answer", [KeyError("a bug"), SystemExit(1), None, "admit"], ids=repr)
def test_admission_and_promotion_that_fail_are_replaced(tmp_path: Path, answer: Any) -> None:
    class Wrong:
        name = "wrong"

        def admit(self, info: BlockInfo, block_hash: bytes, usage: Usage) -> Verdict:
            return self._answer()  # type: ignore[no-any-return]

        def decide(self, quote: LoadQuote, usage: Usage) -> Promotion:
            return self._answer()  # type: ignore[no-any-return]

        def counters(self) -> dict[str, int]:
            return {}

        def _answer(self) -> Any:
            if isinstance(answer, BaseException):
                raise answer
            return answer

    spec = {"write": "through", "admission": Wrong()}
    with live(8, nvme=tmp_path, nvme_spec=spec, promotion=Wrong()) as rig:
        chain = chain_of(rig.namespace(), 4)
        put_all(rig.client, chain)
        eventually(lambda: held(rig.store, chain)["nvme"] == [0, 1, 2, 3], "it was admitted")
        assert rig.client.evict("host").evicted == 4
        assert loaded(rig.client, chain) == 4
        assert len(rig.client.health().reasons) == 2
        assert "'always'" in str(rig.client.health())
        assert "'on_hit'" in str(rig.client.health())
        rig.settle()
        check_idle(rig.store)


# ---- the thread that looks up names


@pytest.mark.parametrize("error", ERRORS, ids=lambda error: type(error).__name__)
@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_d17_a_look_up_that_dies_holds_nobody_up(
    monkeypatch: pytest.MonkeyPatch, error: BaseException
) -> None:
    once = Once(error)
    original = valkey_resolve._look_up

    def broken(host: str, port: int, flags: int) -> Any:
        if not flags:
            once()
        return original("127.0.0.1", port, flags)

    resolver = valkey_resolve.Resolver("tier.invalid", 6379)
    monkeypatch.setattr(valkey_resolve, "_look_up", broken)
    clock = MovableClock()
    from tierkv.clock import Deadline

    patience = Patience(Deadline(clock, PATIENCE_S), PATIENCE_S)
    with pytest.raises(LinkLost, match="broken off"):
        resolver.addresses(patience)
    assert resolver.addresses(patience)


def test_d17_without_a_thread_for_a_look_up_the_tier_is_unavailable(monkeypatch: pytest.MonkeyPatch) -> None:
    resolver = valkey_resolve.Resolver("tier.invalid", 6379)
    from tierkv.clock import Deadline

    patience = Patience(Deadline(MovableClock(), PATIENCE_S), PATIENCE_S)
    with monkeypatch.context() as patched:
        patched.setattr(threading.Thread, "start", fail_with(RuntimeError("can't start new thread")))
        with pytest.raises(LinkLost, match="can't start"):
            resolver.addresses(patience)
    monkeypatch.setattr(valkey_resolve, "_look_up", lambda *_: [(2, ("127.0.0.1", 6379))])
    assert resolver.addresses(patience)


def test_every_thread_has_a_name(tmp_path: Path) -> None:
    before = set(threading.enumerate())
    with live(8, nvme=tmp_path, copier=HostCopier) as rig:
        mine = [thread.name for thread in threading.enumerate() if thread not in before]
        lanes = {name.removeprefix("tierkv-").rsplit("-", 1)[0] for name in mine}
        assert lanes == {"nvme", "copy", "reaper", "scrub", TIMERS}
        assert all(thread.daemon for thread in threading.enumerate() if thread not in before)
        assert rig.client.stats()["threads"] == {"restarted": {}, "stuck_s": {}}
