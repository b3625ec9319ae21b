"""One NVIDIA GPU as a ``tierkv.streams.Device``: torch's streams, events and memory; CuPy's kernels; the copy
engines."""

from __future__ import annotations

import ctypes
import itertools
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from tierkv.copier import PagedKV, ReadyEvent
from tierkv.cuda.batches import find_batches
from tierkv.cuda.capture import find_recordings
from tierkv.cuda.here import why_not
from tierkv.cuda.kernels import Kernels
from tierkv.cuda.pinning import Pinning, Reach
from tierkv.errors import ConfigError, LayoutError
from tierkv.executor import Executor
from tierkv.streams import Event, Fired, Lane
from tierkv.supervision import Caught
from tierkv.units import ALIGN_BYTES

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from tierkv.page_runs import Longs

CHUNK_BYTES = 16384
"""As in copies.cu."""
PACK_BLOCKS = 64
"""Blocks of a kernel that moves bytes within the device: enough for more than a bus, few enough to leave most SMs
be."""
BUS_BLOCKS = 24
"""Blocks of a kernel that moves bytes over the bus."""
THREADS = 256
_ANY_DIRECTION = 4
"""cudaMemcpyDefault: the addresses say where the bytes are."""
_PORTABLE_AND_MAPPED = 3
_COPY_KERNEL = "copy_runs"

_HIGH, _LOW = -1, 0
"""Priorities of streams: onboards go before what else the GPU does, offloads do not."""

_numbers = itertools.count()


@dataclass(frozen=True)
class LaneEvent:
    """A point in a lane."""

    event: Any
    lane: Lane

    def synchronize(self) -> None:
        self.event.synchronize()


@dataclass(frozen=True)
class _Drained:
    streams: Sequence[Any]

    def synchronize(self) -> None:
        for stream in self.streams:
            stream.synchronize()


class CudaDevice:
    """Thread-safe. Uses four lanes of the executor, for what the GPU reports and for copies within host memory.

    Raises ``ConfigError`` where there is no such GPU.
    """

    def __init__(self, index: int, executor: Executor) -> None:
        if (why := why_not()) is not None:
            raise ConfigError("cuda", index, why)
        import cupy
        import torch

        if not 0 <= index < torch.cuda.device_count():
            raise ConfigError("cuda", index, f"this machine has {torch.cuda.device_count()} GPUs")
        self._torch, self._cupy = torch, cupy
        self.index = index
        self._executor = executor
        self._kernels = Kernels("copies")
        self._batches = find_batches()
        self._recordings = find_recordings()
        self._reach = Reach()
        self._memory: list[Any] = []
        name = f"cuda{index}-{next(_numbers)}"
        self._lanes = {what: f"{name}-{what}" for what in ("down", "up", "host", "engine", "pin")}
        for lane in self._lanes.values():
            executor.open_lane(lane, 1)
        with torch.cuda.device(index):
            self._streams = {
                lane: torch.cuda.Stream(priority=_HIGH if lane in (Lane.UP, Lane.UNPACK) else _LOW)
                for lane in Lane
            }
            self._launch_on = {lane: cupy_stream(cupy, stream) for lane, stream in self._streams.items()}
            torch.cuda.current_stream().synchronize()
        self.pinning = self._new_pinning()
        """Of the memory that was given last."""
        self._retired: list[Pinning] = []
        self._pinned_memory: memoryview | None = None

    # -- memory ---------------------------------------------------------------------------------------------------

    def check_memory(self, kv: PagedKV) -> None:
        for array in (array for group in kv.groups for layer in group for array in layer.arrays):
            device: Any = getattr(array, "device", None)
            if getattr(device, "type", None) != "cuda" or device.index != self.index:
                raise LayoutError(f"{type(array).__name__} on {device}: this copier is for cuda:{self.index}")

    def staging(self, size_bytes: int, *, on_host: bool) -> int:
        torch = self._torch
        if on_host:
            memory = torch.empty(size_bytes, dtype=torch.uint8, pin_memory=True)
        else:
            with torch.cuda.device(self.index):
                memory = torch.empty(size_bytes, dtype=torch.uint8, device="cuda")
                torch.cuda.current_stream().synchronize()  # whoever had this memory before is through with it
        self._memory.append(memory)
        return int(memory.data_ptr())

    def _new_pinning(self) -> Pinning:
        runtime = self._cupy.cuda.runtime
        return Pinning(
            self._reach,
            lambda address, size: runtime.hostRegister(address, size, _PORTABLE_AND_MAPPED),
            runtime.hostUnregister,
        )

    def pin(self, memory: memoryview, stretch_bytes: int) -> None:
        """Pins host memory in the background, see ``Pinning``; returns at once. Keeps the memory until ``close``, or
        until other memory is given: then what was pinned before is unpinned, and no copy may use it any more."""
        address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
        whole = len(memory) // ALIGN_BYTES * ALIGN_BYTES
        before, mine = self.pinning, self._new_pinning()
        self._retired.append(before)
        self.pinning = mine

        def work() -> None:
            with self._here():
                before.close()
                self._retired.remove(before)
                self._pinned_memory = memory
                mine.run(address, whole, stretch_bytes)

        self._executor.run(self._lanes["pin"], work, lambda _: None)

    def prepare(self) -> None:
        """Compiles what the first copy would have to wait for. Blocks for about a second, once in a CuPy's life."""
        with self._here():
            self._kernels.get(_COPY_KERNEL, self.index)

    def add_pool(self, address: int, size_bytes: int) -> None:
        """Memory of this device that serves as slots (``tierkv.tiers.hbm``)."""
        self._reach.add(address, size_bytes)

    def share_reach(self, other: CudaDevice) -> None:
        """What is pinned for one GPU of a process is pinned for all. Before the first copy."""
        self._reach = other._reach

    def reaches(self, address: Longs, size: Longs) -> NDArray[np.bool_]:
        return self._reach.holds(address, size)

    # -- order ----------------------------------------------------------------------------------------------------

    def record(self, lane: Lane) -> Event:
        with self._here():
            event = self._torch.cuda.Event(blocking=True)  # a thread that waits for it sleeps
            event.record(self._streams[lane])
        return LaneEvent(event, lane)

    def wait(self, lane: Lane, event: Event) -> None:
        assert isinstance(event, LaneEvent)
        self._streams[lane].wait_event(event.event)

    def knows(self, ready: ReadyEvent) -> bool:
        return isinstance(ready, self._torch.cuda.Event)

    def wait_for_engine(self, lane: Lane, ready: ReadyEvent) -> None:
        self._streams[lane].wait_event(ready)

    def engine_waits(self, stream: Any, event: Event) -> None:
        assert isinstance(event, LaneEvent)
        stream.wait_event(event.event)

    # -- copies ---------------------------------------------------------------------------------------------------

    def dma(self, lane: Lane, dst: Longs, src: Longs, size: Longs) -> None:
        stream = self._streams[lane].cuda_stream
        with self._here():
            if self._batches is not None and len(size) > 1:
                to, source, count = map(np.ascontiguousarray, (dst, src, size))
                self._batches.copy(to, source, count, stream)
                return
            copy = self._cupy.cuda.runtime.memcpyAsync
            for move in zip(dst.tolist(), src.tolist(), size.tolist(), strict=True):
                copy(*move, _ANY_DIRECTION, stream)

    def kernel(self, lane: Lane, dst: Longs, src: Longs, size: Longs) -> None:
        torch, count = self._torch, len(size)
        if not count:
            return
        over_bus = not bool(self._on_device(dst[:1]) and self._on_device(src[:1]))
        pieces = -(-int(size.max()) // CHUNK_BYTES)
        blocks = min(count * pieces, BUS_BLOCKS if over_bus else PACK_BLOCKS)
        with self._here(), torch.cuda.stream(self._streams[lane]):
            # Allocated, used and given back on this one stream: torch hands it out again in the stream's order.
            table = torch.from_numpy(np.concatenate((dst, src, size))).pin_memory()
            table = table.to(f"cuda:{self.index}", non_blocking=True)
            kernel = self._kernels.get(_COPY_KERNEL, self.index)
            arguments = (np.uint64(table.data_ptr()), np.int64(count), np.int64(pieces))
            kernel((blocks,), (THREADS,), arguments, stream=self._launch_on[lane])

    def _on_device(self, address: Longs) -> bool:
        attributes = self._cupy.cuda.runtime.pointerGetAttributes(int(address[0]))
        return int(attributes.type) == int(self._cupy.cuda.runtime.memoryTypeDevice)

    # -- what comes back ------------------------------------------------------------------------------------------

    def call_when(self, event: Event, fired: Fired) -> None:
        assert isinstance(event, LaneEvent)
        lane = self._lanes["down" if event.lane in (Lane.PACK, Lane.DOWN) else "up"]
        self._executor.run(lane, partial(self._outcome, event), fired)

    def call_when_ready(self, ready: ReadyEvent, fired: Fired) -> None:
        self._executor.run(self._lanes["engine"], partial(self._outcome, ready), fired)

    def drained(self, lanes: Sequence[Lane]) -> ReadyEvent:
        return _Drained([self._streams[lane] for lane in lanes])

    def copy_on_host(self, dst: Longs, src: Longs, size: Longs, copied: Fired) -> None:
        def work() -> str | None:
            for move in zip(dst.tolist(), src.tolist(), size.tolist(), strict=True):
                ctypes.memmove(*move)
            return None

        self._executor.run(self._lanes["host"], work, copied)

    def close(self) -> None:
        """Waits for what is under way on its streams, then unpins. The executor's owner ends the threads."""
        for stream in self._streams.values():
            stream.synchronize()
        for pinning in (*self._retired, self.pinning):
            pinning.close()
        self._pinned_memory = None
        self._memory.clear()

    @contextmanager
    def _here(self) -> Iterator[None]:
        """This device is the current one, for torch and for CuPy."""
        with (
            self._recordings.let_be(),
            self._torch.cuda.device(self.index),
            self._cupy.cuda.Device(self.index),
        ):
            yield

    def _outcome(self, event: ReadyEvent) -> str | None:
        """Waits for it; returns what went wrong."""
        caught = Caught(in_generator=False)
        with caught, self._recordings.let_be():
            event.synchronize()
        return None if caught.error is None else repr(caught.error)


def cupy_stream(cupy: Any, stream: Any) -> Any:
    """The same stream for CuPy's launches."""
    wrap = getattr(cupy.cuda.Stream, "from_external", None)
    if wrap is not None and hasattr(stream, "__cuda_stream__"):
        return wrap(stream)
    return cupy.cuda.ExternalStream(stream.cuda_stream, stream.device.index)
