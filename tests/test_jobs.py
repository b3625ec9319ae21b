"""The queue of a tier: who goes first, how much may be on its way, and that nothing waits for ever."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest

from tests.client_support import PATIENCE_S
from tests.valkey_server import eventually
from tierkv.clock import SystemClock
from tierkv.executor import ThreadExecutor
from tierkv.jobs import Job, Priority, TierQueue
from tierkv.units import KIB

DOWN, UP = "host>tier", "tier>host"


class Rig:
    """A queue on real threads, and jobs that stay on their worker until they are let go."""

    def __init__(self, workers: int, *, queue_bytes: int = 64 * KIB, in_flight_bytes: int = 16 * KIB) -> None:
        self.executor = ThreadExecutor(SystemClock())
        self.queue = TierQueue(
            self.executor, "tier", workers, queue_bytes=queue_bytes, in_flight_bytes=in_flight_bytes
        )
        self.begun: list[str] = []
        self.ended: list[str] = []
        self._gates: dict[str, threading.Event] = {}

    def submit(
        self,
        name: str,
        priority: Priority = Priority.ONBOARD,
        edge: str = UP,
        cost_bytes: int = KIB,
        *,
        held: bool = False,
    ) -> bool:
        gate = self._gates[name] = threading.Event()
        if not held:
            gate.set()

        def work() -> None:
            self.begun.append(name)
            assert gate.wait(PATIENCE_S)

        return self.queue.submit(Job(priority, edge, cost_bytes, work, lambda: self.ended.append(name)))

    def let_go(self, *names: str) -> None:
        for name in names:
            self._gates[name].set()

    def wait_begun(self, *names: str) -> None:
        eventually(lambda: set(names) <= set(self.begun), f"{names} have begun")

    def wait_idle(self) -> None:
        eventually(lambda: not self.queue.busy(), "the queue is empty")

    def close(self) -> None:
        for gate in self._gates.values():
            gate.set()
        assert self.executor.close(PATIENCE_S) == []


@pytest.fixture
def one() -> Iterator[Rig]:
    rig = Rig(1)
    yield rig
    rig.close()


@pytest.fixture
def three() -> Iterator[Rig]:
    rig = Rig(3)
    yield rig
    rig.close()


def test_the_urgent_goes_first_and_equals_in_their_order(one: Rig) -> None:
    one.submit("first", held=True)
    one.wait_begun("first")
    for name, priority in (
        ("demote", Priority.DEMOTE),
        ("prefetch", Priority.PREFETCH),
        ("onboard 1", Priority.ONBOARD),
        ("probe", Priority.PROBE),
        ("onboard 2", Priority.ONBOARD),
    ):
        assert one.submit(name, priority, DOWN if priority is Priority.DEMOTE else UP)
    one.let_go("first")
    one.wait_idle()
    assert one.begun == ["first", "probe", "onboard 1", "onboard 2", "prefetch", "demote"]
    assert one.ended == one.begun


def test_bytes_in_flight_are_bounded_for_each_edge(three: Rig) -> None:
    three.submit("a", cost_bytes=12 * KIB, held=True)
    three.wait_begun("a")
    three.submit("b", cost_bytes=8 * KIB)
    three.submit("down", Priority.DEMOTE, DOWN, 12 * KIB)
    three.wait_begun("down")
    assert "b" not in three.begun, "20 KiB were in flight on an edge with a budget of 16"
    assert three.queue.pending_bytes(UP) == 20 * KIB
    assert three.queue.over_budget(UP)
    three.let_go("a")
    three.wait_idle()
    assert "b" in three.ended
    assert three.queue.pending_bytes(UP) == 0
    assert not three.queue.over_budget(UP)


def test_a_job_larger_than_every_budget_runs_alone(one: Rig) -> None:
    assert one.submit("huge", cost_bytes=1024 * KIB)
    one.wait_idle()
    assert one.ended == ["huge"]


def test_a_full_queue_says_no(one: Rig) -> None:
    one.submit("running", held=True)
    one.wait_begun("running")
    assert one.submit("60", cost_bytes=60 * KIB)
    assert not one.submit("5 more", cost_bytes=5 * KIB)
    assert one.submit("4 more", cost_bytes=4 * KIB)
    assert one.submit("other edge", Priority.DEMOTE, DOWN, 60 * KIB)
    one.let_go("running")
    one.wait_idle()
    assert set(one.ended) == {"running", "60", "4 more", "other edge"}


def test_demotions_leave_a_worker_to_whoever_waits(three: Rig) -> None:
    for i in range(3):
        three.submit(f"demote {i}", Priority.DEMOTE, DOWN, held=True)
    three.wait_begun("demote 0", "demote 1")
    three.submit("onboard")
    three.wait_begun("onboard")
    assert "demote 2" not in three.begun
    three.let_go("demote 0")
    three.wait_begun("demote 2")
    three.let_go("demote 1", "demote 2")
    three.wait_idle()


def test_a_tier_with_one_worker_demotes_too(one: Rig) -> None:
    one.submit("demote", Priority.DEMOTE, DOWN)
    one.wait_idle()
    assert one.ended == ["demote"]


def test_d17_closing_hands_back_what_has_not_begun(one: Rig) -> None:
    one.submit("running", held=True)
    one.wait_begun("running")
    one.submit("waiting 1")
    one.submit("waiting 2", Priority.DEMOTE, DOWN)
    left = one.queue.close()
    assert [job.priority for job in left] == [Priority.ONBOARD, Priority.DEMOTE]
    assert not one.submit("late")
    for job in left:
        job.done()
    assert one.ended == ["waiting 1", "waiting 2"]
    one.let_go("running")
    one.wait_idle()
    assert one.begun == ["running"]


def test_many_threads_submit_and_every_job_ends_once() -> None:
    rig = Rig(3, queue_bytes=1024 * KIB)
    try:

        def feed(number: int) -> None:
            for i in range(100):
                priority = list(Priority)[i % 4]
                assert rig.submit(f"{number}.{i}", priority, DOWN if priority is Priority.DEMOTE else UP)

        threads = [threading.Thread(target=feed, args=(n,)) for n in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(PATIENCE_S)
        rig.wait_idle()
        wanted = sorted(f"{n}.{i}" for n in range(4) for i in range(100))
        assert sorted(rig.begun) == wanted
        assert sorted(rig.ended) == wanted
        assert rig.queue.pending_bytes(UP) == rig.queue.pending_bytes(DOWN) == 0
    finally:
        rig.close()
