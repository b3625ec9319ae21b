"""The copier for engines whose KV memory is on NVIDIA GPUs: for each GPU streams of its own, made when it is first
met."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from functools import partial
from typing import Any

from tierkv.copier import CopyPart, PagedKV, ReadyEvent
from tierkv.cuda.device import CudaDevice
from tierkv.cuda.pinning import CallsUnderWay
from tierkv.errors import ClosedError, LayoutError
from tierkv.executor import Executor
from tierkv.layout import Layout
from tierkv.stream_copier import StreamCopier
from tierkv.stream_jobs import CopyJob, Done, LayerCall


class CudaCopier:
    """A ``Copier`` over all GPUs of this process. Thread-safe; calls return at once.

    ``arena``: host memory whose slots are copied to and from, pinned in the background from the first GPU's first use
    on, in stretches of ``region_bytes`` (no slot lies across two regions); ``pin`` puts another in its place.
    ``options`` are those of ``StreamCopier``.
    """

    def __init__(
        self, executor: Executor, *, arena: memoryview | None = None, region_bytes: int = 0, **options: Any
    ) -> None:
        self._executor = executor
        self._arena, self._region_bytes = arena, region_bytes
        self._options = options
        self._lock = threading.Lock()
        self._devices: dict[int, tuple[CudaDevice, StreamCopier]] = {}
        self._under_way = CallsUnderWay()
        self._closed = False

    def check(self, kv: PagedKV, layout: Layout) -> None:
        self.on(kv).check(kv, layout)

    def offload(self, kv: PagedKV, parts: Sequence[CopyPart], ready: ReadyEvent | None, done: Done) -> None:
        self.on(kv).offload(kv, parts, ready, self._under_way.around(done))

    def onboard(
        self,
        kv: PagedKV,
        parts: Sequence[CopyPart],
        done: Done,
        on_layer: LayerCall | None = None,
        ready: ReadyEvent | None = None,
    ) -> None:
        self.on(kv).onboard(kv, parts, self._under_way.around(done), on_layer, ready)

    def start_offload(
        self, kv: PagedKV, parts: Sequence[CopyPart], ready: ReadyEvent | None, done: Done
    ) -> CopyJob | None:
        """As ``StreamCopier.start_offload``."""
        return self.on(kv).start_offload(kv, parts, ready, self._under_way.around(done))

    def start_onboard(
        self,
        kv: PagedKV,
        parts: Sequence[CopyPart],
        done: Done,
        on_layer: LayerCall | None = None,
        ready: ReadyEvent | None = None,
    ) -> CopyJob | None:
        """As ``StreamCopier.start_onboard``."""
        return self.on(kv).start_onboard(kv, parts, self._under_way.around(done), on_layer, ready)

    def on(self, kv: PagedKV) -> StreamCopier:
        """The copier of the GPU that holds the memory. Raises ``LayoutError`` for memory on none."""
        devices = {
            getattr(array, "device", None) for group in kv.groups for layer in group for array in layer.arrays
        }
        if len(devices) != 1 or getattr(next(iter(devices)), "type", None) != "cuda":
            raise LayoutError(f"KV memory on {sorted(map(str, devices))}: it must be on one CUDA device")
        index: int = next(iter(devices)).index  # type: ignore[union-attr]
        return self._opened(index)[1]

    def device(self, index: int) -> CudaDevice:
        """The GPU with this number, opened when it is first asked for. Raises ``ConfigError``."""
        return self._opened(index)[0]

    def prepare(self, kv: PagedKV) -> None:
        """Does what the first copy of this memory would have to wait for, and begins to pin the arena. Blocks for
        seconds. Raises ``LayoutError``, and ``ConfigError`` where there is no such GPU."""
        self.on(kv)
        index: int = kv.groups[0][0].arrays[0].device.index
        self.device(index).prepare()

    def pin(self, arena: memoryview, region_bytes: int) -> None:
        """This arena takes the place of the one so far: its daemon is another one by now. That one is unpinned and let
        go of when the copies that have begun are over. Returns at once."""
        with self._lock:
            self._arena, self._region_bytes = arena, region_bytes
            if self._closed or not self._devices:
                return  # the first device pins it
            next(iter(self._devices.values()))[0].pinning.withdraw()
        self._under_way.after(partial(self._pin_now, arena))

    def _pin_now(self, arena: memoryview) -> None:
        with self._lock:
            if arena is self._arena and not self._closed:  # else there is yet another
                self._pin_by(next(iter(self._devices.values()))[0], arena)

    def _pin_by(self, device: CudaDevice, arena: memoryview) -> None:
        device.pin(arena, self._region_bytes or len(arena))

    def _opened(self, index: int) -> tuple[CudaDevice, StreamCopier]:
        with self._lock:
            if index not in self._devices:
                if self._closed:
                    raise ClosedError("this copier was closed")
                device = CudaDevice(index, self._executor)
                if self._arena is not None and not self._devices:  # pinned once, for all GPUs of the process
                    self._pin_by(device, self._arena)
                elif self._devices:
                    device.share_reach(next(iter(self._devices.values()))[0])
                self._devices[index] = (device, StreamCopier(device, **self._options))
            return self._devices[index]

    def close(self, timeout_s: float = 10.0) -> None:
        """Waits for the copies under way, then unpins; what waits for its turn fails, and what comes afterwards."""
        with self._lock:
            self._closed, self._arena = True, None
            devices = list(self._devices.values())
        for device, copier in devices:
            if copier.close(timeout_s):
                device.close()
