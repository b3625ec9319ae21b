"""The code of ``tierkv.cuda`` runs against stand-ins of torch and CuPy: the copier contract over each route, pinned
or not.

What a GPU itself does is shown by ``make test-gpu``, where there is one.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from tests.stand_in_cuda import Device, Machine, Stream, Tensor, installed
from tierkv.any_copier import AnyCopier
from tierkv.arena import Arena
from tierkv.clock import SystemClock
from tierkv.copier import Copier, CopyPart, LayerPages, PagedKV
from tierkv.cuda.copier import CudaCopier
from tierkv.engines.hot_blocks import hot_blocks
from tierkv.executor import ThreadExecutor
from tierkv.routes import RouteTable
from tierkv.streams import Lane, Route
from tierkv.testing.copier import ENGINES, CopierContract, Done
from tierkv.testing.payloads import ALIGN_BYTES, POISON, Guarded, poison

MACHINES: list[Machine] = []


@pytest.fixture(autouse=True)
def machine(monkeypatch: pytest.MonkeyPatch) -> Iterator[Machine]:
    made = installed(monkeypatch)
    MACHINES.append(made)
    yield made
    MACHINES.pop()


def wait_until(condition: Any) -> None:
    until_s = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < until_s
        time.sleep(0.001)


class OnStandIn(CopierContract):
    route = Route.STAGED
    pinned = False
    arena_bytes = 32 << 20
    _lock = threading.Lock()

    def make_copier(self) -> Copier:
        self.executor = ThreadExecutor(SystemClock())
        arena = None
        if self.pinned:
            self.arena = Arena(self.arena_bytes, self.arena_bytes)
            arena, self._at = self.arena.memory(), 0
        routes = RouteTable(((0, self.route),), ((0, self.route),))
        copier = CudaCopier(
            self.executor,
            arena=arena,
            region_bytes=self.arena_bytes,
            routes=routes,
            staging_bytes=2048,
            buffers=2,
        )
        if arena is not None:
            wait_until(lambda: copier.device(0).pinning.pinned_bytes == self.arena_bytes)
        return copier

    def close_copier(self, copier: Any) -> None:
        copier.close()
        assert self.executor.close(10.0) == []

    def slot_for(self, engine: Any, group: int) -> Guarded:
        made = super().slot_for(engine, group)
        if self.pinned:
            size = len(made._whole)
            with self._lock:
                start, self._at = self._at, self._at + size
            assert self._at <= self.arena_bytes, "the test needs a larger arena"
            made._whole = self.arena.memory()[start : start + size]
            poison(made._whole)
            made.view = made._whole[ALIGN_BYTES:-ALIGN_BYTES]
        return made

    def to_engine(self, array: Any) -> Any:
        return MACHINES[-1].note(Tensor(np.array(array)))

    def from_engine(self, array: Any) -> Any:
        return array.array.copy()

    def overwrite(self, array: Any, content: Any) -> None:
        array.array[...] = content


class TestNotPinned(OnStandIn):
    pass


class TestStaged(OnStandIn):
    pinned = True


class TestByCopyEngines(OnStandIn):
    pinned, route = True, Route.DMA


def test_each_route_uses_what_it_is_called_after(machine: Machine) -> None:
    used = {}
    for route in Route:
        contract = OnStandIn()
        contract.pinned, contract.route = True, route
        copier = contract.make_copier()
        engine = ENGINES["one array"]
        parts, _ = contract.parts_of(engine)
        machine.calls.update(memcpy=0, kernel=0)
        assert contract.offload(copier, contract.memory(engine), parts) is None
        used[route] = {name for name, count in machine.calls.items() if count}
        contract.close_copier(copier)
    assert used == {Route.DMA: {"memcpy"}, Route.STAGED: {"memcpy", "kernel"}, Route.KERNEL: {"kernel"}}


def test_the_engines_own_event_is_waited_for_on_the_device(machine: Machine) -> None:
    contract = OnStandIn()
    copier: Any = contract.make_copier()
    engine = ENGINES["one array"]
    kv = contract.memory(engine)
    parts, slots = contract.parts_of(engine)
    ready = machine.torch.cuda.Event(blocking=True)
    done = Done()
    copier.offload(kv, parts, ready, done)
    assert done.wait(20) is None
    contract.check_slots(kv, parts, slots)
    streams = copier.device(0)._streams.values()
    assert any(ready in stream.waited for stream in streams)
    assert ready.recorded_on is None, "a thread waited for it"
    contract.close_copier(copier)


def test_a_stream_of_the_engine_waits_for_each_layer() -> None:
    contract = OnStandIn()
    copier: Any = contract.make_copier()
    engine = ENGINES["one array"]
    parts, _ = contract.parts_of(engine)
    done, stream = Done(), Stream()
    job = copier.start_onboard(contract.memory(engine), parts, done)
    for layer in range(3):
        assert job.before_layer(stream, 0, layer, 20)
    assert done.wait(20) is None
    assert len(stream.waited) >= 3
    contract.close_copier(copier)


def test_a_kernel_that_does_not_compile_fails_the_copy_and_nothing_hangs(machine: Machine) -> None:
    machine.compiles = False
    contract = OnStandIn()
    copier: Any = contract.make_copier()
    engine = ENGINES["one array"]
    parts, _ = contract.parts_of(engine)
    kv = contract.memory(engine)
    assert "copies.cu does not compile" in str(contract.offload(copier, kv, parts))
    with pytest.raises(RuntimeError, match="no such header"):
        copier.prepare(kv)
    machine.compiles = True
    assert contract.offload(copier, kv, parts) is None
    contract.close_copier(copier)


def test_whatever_an_engines_event_raises_fails_the_copy_and_nothing_hangs(
    machine: Machine, caplog: pytest.LogCaptureFixture
) -> None:
    """Its thread is one that all copies of the GPU share."""

    class Odd(Exception):
        pass

    class RaisesOdd:
        def synchronize(self) -> None:
            raise Odd("an engine's own")

    contract = OnStandIn()
    copier: Any = contract.make_copier()
    engine = ENGINES["one array"]
    parts, _ = contract.parts_of(engine)
    kv, down, up = contract.memory(engine), Done(), Done()
    copier.offload(kv, parts, RaisesOdd(), down)
    copier.onboard(kv, parts, up, None, RaisesOdd())
    assert "Odd" in str(down.wait(20))
    assert "Odd" in str(up.wait(20))
    assert not [text for text in caplog.messages if "ended with" in text], "a thread was ended"
    assert contract.offload(copier, kv, parts) is None
    contract.close_copier(copier)


@pytest.mark.parametrize("down", [True, False])
def test_d11_lanes_behind_which_no_event_can_be_recorded_are_waited_for(
    machine: Machine, down: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    contract = OnStandIn()
    copier: Any = contract.make_copier()
    engine = ENGINES["one array"]
    parts, _ = contract.parts_of(engine)
    kv, done, waited = contract.memory(engine), Done(), list[Lane]()
    for lane, stream in copier.device(0)._streams.items():
        monkeypatch.setattr(stream, "synchronize", lambda lane=lane: waited.append(lane))

    def none_left(*_: Any) -> None:
        raise RuntimeError("no event")

    with monkeypatch.context() as patch:
        patch.setattr(machine.torch.cuda.Event, "record", none_left)
        copier.offload(kv, parts, None, done) if down else copier.onboard(kv, parts, done)
        assert "no event" in str(done.wait(20))
    assert waited == ([Lane.PACK, Lane.DOWN] if down else [Lane.UP, Lane.UNPACK])
    assert contract.offload(copier, kv, parts) is None
    contract.close_copier(copier)


def test_any_copier_takes_both_kinds_of_memory_and_pins_its_slots(machine: Machine) -> None:
    executor = ThreadExecutor(SystemClock())
    arena = Arena(1 << 20, 1 << 18)
    copier = AnyCopier(executor, lambda: arena)
    slots = arena.reserve(2, 8192)
    assert slots is not None
    pages = np.arange(8 * 2048, dtype=np.uint32).view(np.uint8).reshape(8, 8192)
    for slot, memory in zip(slots, (pages, machine.note(Tensor(pages.copy()))), strict=True):
        done = Done()
        kv = PagedKV(((LayerPages((memory,)),),))
        copier.offload(kv, [CopyPart(0, arena.view(slot), (5,))], None, done)
        assert done.wait(20) is None
        assert bytes(arena.view(slot)[:8192]) == pages[5].tobytes()
    wait_until(lambda: copier.cuda().device(0).pinning.pinned_bytes == 1 << 20)
    assert len([address for address, size in machine.pinned.items() if size == 1 << 18]) == 4
    copier.close(10.0)
    assert not [address for address, size in machine.pinned.items() if size == 1 << 18]
    assert executor.close(10.0) == []
    arena.close()
    assert POISON


def test_each_gpu_has_streams_of_its_own_and_the_arena_is_pinned_once(machine: Machine) -> None:
    machine.torch.cuda.device_count = lambda: 2
    executor, arena = ThreadExecutor(SystemClock()), Arena(1 << 20, 1 << 18)
    copier = CudaCopier(executor, arena=arena.memory(), region_bytes=1 << 18)
    slots, calls = arena.reserve(2, 8192), []
    assert slots is not None
    wanted = np.arange(2 * 8 * 2048, dtype=np.uint32).view(np.uint8).reshape(2, 8, 8192)
    for index, slot in enumerate(slots):
        pages = machine.note(Tensor(wanted[index].copy(), Device(index=index)))
        calls.append(Done())
        part = CopyPart(0, arena.view(slot), (5,))
        copier.offload(PagedKV(((LayerPages((pages,)),),)), [part], None, calls[-1])
    assert [done.wait(20) for done in calls] == [None, None]
    for index, slot in enumerate(slots):
        assert bytes(arena.view(slot)[:8192]) == wanted[index, 5].tobytes()
    first, second = copier.device(0), copier.device(1)
    streams = [{id(stream) for stream in each._streams.values()} for each in (first, second)]
    assert len(streams[0] | streams[1]) == 8
    wait_until(lambda: first.pinning.pinned_bytes == 1 << 20)
    assert len([address for address, size in machine.pinned.items() if size == 1 << 18]) == 4
    address = np.array([np.frombuffer(arena.view(slots[1]), np.uint8).ctypes.data])
    assert second.reaches(address, np.array([8192])).all(), (
        "what one GPU's copier pinned, the other does not know"
    )
    copier.close()
    assert executor.close(10.0) == []
    arena.close()


@pytest.mark.parametrize("page_bytes", [4096, 512 << 10])
def test_slots_in_device_memory_are_copied_to_and_from_without_the_host(
    machine: Machine, page_bytes: int
) -> None:
    executor = ThreadExecutor(SystemClock())
    copier = AnyCopier(executor)
    hot = hot_blocks(8 << 20, "cuda:0", copier)
    taken = hot.tier.reserve(2, 2 * page_bytes)
    assert taken is not None
    wanted = np.random.default_rng(1).integers(0, 256, (8, page_bytes), np.uint8)
    pages, other = (machine.note(Tensor(each)) for each in (wanted.copy(), np.zeros_like(wanted)))
    parts = [CopyPart(0, hot.tier.tensor(slot), (i, 7 - i)) for i, slot in enumerate(taken)]
    down, up = Done(), Done()
    copier.offload(PagedKV(((LayerPages((pages,)),),)), parts, None, down)
    assert down.wait(20) is None
    copier.onboard(PagedKV(((LayerPages((other,)),),)), parts, up)
    assert up.wait(20) is None
    chosen = [0, 7, 1, 6]
    assert (other.array[chosen] == wanted[chosen]).all()
    assert not other.array[2:6].any()
    assert copier.cuda().on(PagedKV(((LayerPages((pages,)),),)))._bounces is None, (
        "they went through the host"
    )
    copier.close(10.0)
    assert executor.close(10.0) == []
