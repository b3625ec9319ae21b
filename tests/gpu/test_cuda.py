"""On a machine with an NVIDIA GPU: the copier contract over every route, order with a late producer, codecs bit by bit.

``make test-gpu`` runs this folder alone, with no conftest and no settings; elsewhere it is skipped in one line.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from tierkv.clock import SystemClock
from tierkv.copier import Copier, CopyPart, LayerPages, PagedKV
from tierkv.cuda.copier import CudaCopier
from tierkv.cuda.here import why_not
from tierkv.executor import ThreadExecutor
from tierkv.routes import DEFAULT_ROUTES, RouteTable
from tierkv.streams import Route
from tierkv.testing.copier import CopierContract, Done
from tierkv.testing.payloads import POISON, Guarded, aligned, is_poisoned, poison
from tierkv.units import ALIGN_BYTES, MIB

WHY = why_not()
if WHY is not None:
    pytest.skip(WHY, allow_module_level=True)

import torch  # noqa: E402

from tierkv.codec import codec_named, fitted  # noqa: E402
from tierkv.codec_numbers import e4m3_values  # noqa: E402
from tierkv.cuda.codecs import GpuCodecs  # noqa: E402
from tierkv.cuda.kernels import Kernels  # noqa: E402
from tierkv.layout import GroupKind, LayerGroup, Segment  # noqa: E402

PATIENCE_S = 30.0


def one_way(route: Route) -> RouteTable:
    return RouteTable(((0, route),), ((0, route),))


class Pinned:
    """Guarded slots out of one stretch of memory, so that it can be pinned once."""

    def __init__(self) -> None:
        self.memory = aligned(64 * MIB)
        self._at = 0
        self._lock = threading.Lock()

    def guarded(self, length_bytes: int) -> Guarded:
        made = Guarded.__new__(Guarded)
        size = length_bytes + 2 * ALIGN_BYTES
        with self._lock:
            if self._at + size > len(self.memory):
                self._at = 0
            start, self._at = self._at, self._at + size
        made._whole = self.memory[start : start + size]
        poison(made._whole)
        made.view = made._whole[ALIGN_BYTES:-ALIGN_BYTES]
        return made


POOL = Pinned()


class OnGpu(CopierContract):
    """Slots that are not pinned: their bytes go through pinned buffers."""

    patience_s = PATIENCE_S
    routes = DEFAULT_ROUTES
    pinned = False
    staging_bytes = 4096

    def make_copier(self) -> Copier:
        executor = ThreadExecutor(SystemClock())
        arena = POOL.memory if self.pinned else None
        copier = CudaCopier(executor, arena=arena, routes=self.routes, staging_bytes=self.staging_bytes)
        if self.pinned:
            wait_until(lambda: copier.device(0).pinning.pinned_bytes == len(POOL.memory))
        self.made = [*getattr(self, "made", []), (executor, copier)]
        return copier

    def close_copier(self, copier: Any) -> None:
        executor, _ = self.made.pop()
        copier.close()
        assert executor.close(10.0) == []

    def slot_for(self, engine: Any, group: int) -> Guarded:
        plain = super().slot_for(engine, group)
        return POOL.guarded(len(plain.view)) if self.pinned else plain

    def to_engine(self, array: Any) -> Any:
        moved = torch.from_numpy(np.array(array)).cuda()
        torch.cuda.synchronize()
        return moved

    def from_engine(self, array: Any) -> Any:
        return array.cpu().numpy()

    def overwrite(self, array: Any, content: Any) -> None:
        array[...] = self.to_engine(content)
        torch.cuda.synchronize()


class TestNotPinned(OnGpu):
    pass


class TestStaged(OnGpu):
    pinned, routes = True, one_way(Route.STAGED)


class TestByCopyEngines(OnGpu):
    pinned, routes = True, one_way(Route.DMA)


class TestByKernel(OnGpu):
    pinned, routes = True, one_way(Route.KERNEL)


def wait_until(condition: Callable[[], bool]) -> None:
    until_s = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < until_s, "it does not come"
        time.sleep(0.005)


# ---- order


@pytest.mark.parametrize("route", Route)
def test_d12_offload_waits_for_a_late_producer(route: Route) -> None:
    """A kernel that writes its result after half a second; the offload was called long before."""
    contract = OnGpu()
    contract.pinned, contract.routes = True, one_way(route)
    copier = contract.make_copier()
    try:
        pages = torch.full((32, 64 * 1024), POISON, dtype=torch.uint8, device="cuda")
        kernel = Kernels("copies").get("produce_late", 0)
        kv = PagedKV(((LayerPages((pages,)),),))
        slot = POOL.guarded(8 * 64 * 1024)
        stream = torch.cuda.Stream()
        torch.cuda.synchronize()
        import cupy

        from tierkv.cuda.device import cupy_stream

        words = pages.numel() // 16
        arguments = (
            np.uint64(pages.data_ptr()),
            np.int64(words),
            np.uint32(0x07070707),
            np.int64(700_000_000),
        )
        kernel((64,), (256,), arguments, stream=cupy_stream(cupy, stream))
        ready = torch.cuda.Event()
        ready.record(stream)
        assert not ready.query(), "the producer was done before the offload was called"
        done = Done()
        copier.offload(kv, [CopyPart(0, slot.view, (3, 1, 4, 15, 9, 2, 6, 5))], ready, done)
        assert not done.calls
        assert is_poisoned(slot.view)
        assert done.wait(PATIENCE_S) is None
        assert (np.frombuffer(slot.view[: 8 * 64 * 1024], np.uint8) == 7).all()
        assert slot.guards_intact()
    finally:
        contract.close_copier(copier)


def test_a_stream_waits_for_a_layer_without_the_host() -> None:
    contract = OnGpu()
    contract.pinned = True
    copier: Any = contract.make_copier()
    try:
        layers = 4
        source = [torch.randint(0, 256, (64, 65536), dtype=torch.uint8, device="cuda") for _ in range(layers)]
        target = [torch.zeros_like(each) for each in source]
        kv, other = (PagedKV((tuple(LayerPages((each,)) for each in made),)) for made in (source, target))
        slot = POOL.guarded(layers * 16 * 65536)
        pages = tuple(range(0, 64, 4))
        done = Done()
        torch.cuda.synchronize()
        copier.offload(kv, [CopyPart(0, slot.view, pages)], None, done)
        assert done.wait(PATIENCE_S) is None
        done, stream = Done(), torch.cuda.Stream()
        job = copier.start_onboard(other, [CopyPart(0, slot.view, pages)], done)
        same = []
        for layer in range(layers):
            assert job.before_layer(stream, 0, layer, PATIENCE_S)
            with torch.cuda.stream(stream):
                same.append((target[layer][list(pages)] == source[layer][list(pages)]).all())
        stream.synchronize()
        assert all(bool(each) for each in same)
        assert done.wait(PATIENCE_S) is None
    finally:
        contract.close_copier(copier)


# ---- another arena


def test_d25_another_arena_is_pinned_in_the_place_of_the_first() -> None:
    """As when a daemon was started anew. What was pinned before can be pinned by others afterwards."""
    import cupy

    executor = ThreadExecutor(SystemClock())
    first, then = aligned(8 * MIB), aligned(8 * MIB)
    copier = CudaCopier(executor, arena=first, region_bytes=4 * MIB)
    try:
        device = copier.device(0)
        wait_until(lambda: device.pinning.pinned_bytes == len(first))
        copier.pin(then, 4 * MIB)
        wait_until(lambda: device.pinning.pinned_bytes == len(then))
        pages = torch.randint(0, 256, (32, 64 * 1024), dtype=torch.uint8, device="cuda")
        torch.cuda.synchronize()
        for memory in (first, then):
            done = Done()
            copier.offload(
                PagedKV(((LayerPages((pages,)),),)), [CopyPart(0, memory[: 64 * 1024], (9,))], None, done
            )
            assert done.wait(PATIENCE_S) is None
            assert bytes(memory[: 64 * 1024]) == pages[9].cpu().numpy().tobytes()
        address = int(np.frombuffer(first, np.uint8).ctypes.data)
        cupy.cuda.runtime.hostRegister(address, len(first), 0)
        cupy.cuda.runtime.hostUnregister(address)
    finally:
        copier.close()
        assert executor.close(10.0) == []


# ---- another thread's recording


def test_copies_and_pinning_beside_a_recording() -> None:
    """An engine records a graph, as vLLM does after its start, while the arena is pinned and blocks are copied."""
    contract = OnGpu()
    copier: Any = contract.make_copier()
    try:
        pages = torch.randint(0, 256, (32, 64 * 1024), dtype=torch.uint8, device="cuda")
        kv = PagedKV(((LayerPages((pages,)),),))
        slot = POOL.guarded(64 * 1024)
        copier.prepare(kv)
        before, done = Done(), Done()
        copier.offload(kv, [CopyPart(0, slot.view, (3,))], None, before)  # all that it uses is made by now
        assert before.wait(PATIENCE_S) is None
        value = torch.zeros(1 << 16, device="cuda")
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()

        def beside() -> None:
            copier.pin(aligned(32 * MIB), MIB)
            copier.offload(kv, [CopyPart(0, slot.view, (9,))], None, done)

        thread = threading.Thread(target=beside)
        with torch.cuda.graph(graph):
            thread.start()
            for _ in range(20):
                value += 1
            thread.join(PATIENCE_S)
            assert done.wait(PATIENCE_S) is None
            wait_until(lambda: copier.device(0).pinning.pinned_bytes == 32 * MIB)
        graph.replay()
        torch.cuda.synchronize()
        assert float(value[0]) == 20
        assert bytes(slot.view[: 64 * 1024]) == pages[9].cpu().numpy().tobytes()
    finally:
        contract.close_copier(copier)


# ---- codecs


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("shape", [(6, 128, 256), (3, 17, 37), (1, 1, 1), (5, 16, 4)])
@pytest.mark.parametrize("name", ["int8", "fp8_e4m3"])
def test_codecs_make_the_same_numbers_as_on_the_host(name: str, shape: Any, dtype: str) -> None:
    rows, tokens, channels = shape
    generator = torch.Generator().manual_seed(1)
    values = torch.randn(shape, generator=generator) * torch.exp(torch.randn(channels, generator=generator))
    values = values.to(getattr(torch, dtype))
    segment = Segment(1, tokens, channels)
    item = values.element_size()
    group = LayerGroup("g", GroupKind.FULL, rows, tokens * channels * item, tokens, inside=(segment,))
    codec = fitted(codec_named(name), group, dtype)
    plain = values.view(torch.uint8).numpy().tobytes()
    stored, back = bytearray(4 * len(plain) + 4096), bytearray(len(plain))
    length = codec.encode_into(memoryview(plain), memoryview(stored))
    assert length is not None
    codec.decode_into(memoryview(stored)[:length], memoryview(back))
    kernels, there = GpuCodecs(), values.cuda()
    front = 16 + 12
    if name == "int8":
        kept, scales = kernels.int8_encode(there)
        decoded = kernels.int8_decode(kept, scales, values.dtype)
        found = scales.cpu().numpy().tobytes() + kept.cpu().numpy().tobytes()
    else:
        kept, exponents = kernels.fp8_encode(there)
        decoded = kernels.fp8_decode(kept, exponents, values.dtype)
        found = exponents.cpu().numpy().tobytes() + kept.cpu().numpy().tobytes()
    assert found == bytes(stored[front:length])
    assert decoded.cpu().view(torch.uint8).numpy().tobytes() == bytes(back)


def test_every_code_of_fp8_is_the_same_number() -> None:
    codes = torch.arange(256, dtype=torch.uint8, device="cuda").reshape(1, 1, 256)
    exponents = torch.zeros(1, dtype=torch.int8, device="cuda")
    found = GpuCodecs().fp8_decode(codes, exponents, torch.float32).cpu().numpy().ravel()
    assert np.array_equal(found, e4m3_values(), equal_nan=True)


def test_channels_that_are_not_finite_are_marked() -> None:
    values = torch.ones((2, 16, 8), device="cuda")
    values[0, 3, 2], values[1, 5, 7] = float("nan"), float("inf")
    _, scales = GpuCodecs().int8_encode(values)
    assert torch.isnan(scales).nonzero().tolist() == [[0, 2], [1, 7]]
