"""What the measurements on a GPU stand on: an engine's pages on the device, pinned slots, one copier, and the
limit."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np

from tierkv.arena import Arena
from tierkv.clock import SystemClock
from tierkv.copier import CopyPart, LayerPages, PagedKV
from tierkv.cuda.copier import CudaCopier
from tierkv.executor import ThreadExecutor
from tierkv.routes import DEFAULT_ROUTES, RouteTable
from tierkv.units import MIB

PATIENCE_S = 60.0
LAYERS = 16


@dataclass(frozen=True)
class Size:
    """Pages of one size, and how many of them lie side by side in a slot, layer by layer."""

    page_bytes: int
    pages_a_block: int

    @property
    def payload_bytes(self) -> int:
        return LAYERS * self.pages_a_block * self.page_bytes


class Rig:
    """``total_bytes`` of an engine's pages, scattered over its memory, and the slots for them."""

    def __init__(self, size: Size, total_bytes: int, routes: RouteTable = DEFAULT_ROUTES) -> None:
        import torch

        self._torch = torch
        self.size = size
        self.blocks = max(1, total_bytes // size.payload_bytes)
        self.bytes = self.blocks * size.payload_bytes
        count = self.blocks * size.pages_a_block
        self.kv = self._memory(count)
        self.other = self._memory(count)
        self._arena = Arena(2 * self.bytes, size.payload_bytes)
        self._executor = ThreadExecutor(SystemClock())
        self.copier = CudaCopier(
            self._executor, arena=self._arena.memory(), region_bytes=size.payload_bytes, routes=routes
        )
        self.device = self.copier.device(0)
        self._wait_pinned()
        order = np.random.default_rng(1).permutation(count).tolist()
        slots = self._arena.reserve(2 * self.blocks, size.payload_bytes)
        assert slots is not None
        n = size.pages_a_block
        self.parts, self.other_parts = (
            [
                CopyPart(0, self._arena.view(slots[first + i]), tuple(order[i * n : (i + 1) * n]))
                for i in range(self.blocks)
            ]
            for first in (0, self.blocks)
        )

    def _memory(self, count: int) -> PagedKV:
        torch = self._torch
        make = [
            torch.randint(0, 256, (count, self.size.page_bytes), dtype=torch.uint8, device="cuda")
            for _ in range(LAYERS)
        ]
        torch.cuda.synchronize()
        return PagedKV((tuple(LayerPages((each,)) for each in make),))

    def _wait_pinned(self) -> None:
        until_s = time.monotonic() + PATIENCE_S
        while self.device.pinning.pinned_bytes < self._arena.capacity_bytes:
            if self.device.pinning.trouble is not None or time.monotonic() > until_s:
                raise RuntimeError(f"the slots are not pinned: {self.device.pinning.trouble}")
            time.sleep(0.005)

    def offload(self) -> Call:
        call = Call()
        self.copier.offload(self.kv, self.parts, None, call)
        return call

    def onboard(self, on_layer: Callable[[int, int], None] | None = None) -> Call:
        """Into other pages than those that are offloaded, from other slots: both may run at once."""
        call = Call()
        self.copier.onboard(self.other, self.other_parts, call, on_layer)
        return call

    def check(self) -> None:
        """Offload, onboard elsewhere, compare every byte."""
        self.offload().wait()
        done = Call()
        self.copier.onboard(self.other, self.parts, done)
        done.wait()
        for ours, theirs in zip(self.kv.groups[0], self.other.groups[0], strict=True):
            if not bool((ours.arrays[0] == theirs.arrays[0]).all()):
                raise RuntimeError(f"pages of {self.size.page_bytes} bytes came back otherwise")

    def close(self) -> None:
        self._torch.cuda.synchronize()
        self.copier.close()
        self._executor.close(10.0)
        self.parts = self.other_parts = []
        self._arena.close()


class Call:
    """A ``done`` that knows when it was called."""

    def __init__(self) -> None:
        self._event = threading.Event()
        self._begun_s = time.perf_counter()
        self.took_s = 0.0
        self._error: str | None = None

    def __call__(self, error: str | None) -> None:
        self.took_s = time.perf_counter() - self._begun_s
        self._error = error
        self._event.set()

    def wait(self) -> float:
        """Seconds from the call to its end."""
        if not self._event.wait(PATIENCE_S) or self._error is not None:
            raise RuntimeError(f"a copy failed: {self._error or 'it did not end'}")
        return self.took_s


@contextmanager
def rig(size: Size, total_bytes: int, routes: RouteTable = DEFAULT_ROUTES) -> Iterator[Rig]:
    made = Rig(size, total_bytes, routes)
    try:
        yield made
    finally:
        made.close()


class Contiguous:
    """The limit: one ``cudaMemcpyAsync`` of a contiguous pinned buffer, each way on a stream of its own."""

    def __init__(self, size_bytes: int) -> None:
        import torch

        self._torch = torch
        self._host = [torch.empty(size_bytes, dtype=torch.uint8, pin_memory=True) for _ in range(2)]
        self._device = [torch.empty(size_bytes, dtype=torch.uint8, device="cuda") for _ in range(2)]
        self._streams = [torch.cuda.Stream() for _ in range(2)]
        torch.cuda.synchronize()

    def seconds(self, ways: Sequence[str]) -> float:
        begun_s = time.perf_counter()
        for way in ways:
            which = int(way == "up")
            with self._torch.cuda.stream(self._streams[which]):
                if way == "up":
                    self._device[1].copy_(self._host[1], non_blocking=True)
                else:
                    self._host[0].copy_(self._device[0], non_blocking=True)
        for stream in self._streams:
            stream.synchronize()
        return time.perf_counter() - begun_s


def measured(ours: Callable[[], float], limit: Callable[[], float], rounds: int) -> tuple[Any, Any]:
    """Seconds of both, in turn (ours, limit, limit, ours), after one run of each that does not count."""
    ours()
    limit()
    found: tuple[list[float], list[float]] = ([], [])
    for _ in range(rounds):
        found[0].append(ours())
        found[1].extend((limit(), limit()))
        found[0].append(ours())
    return found


def gib_of(size_bytes: int, seconds: float) -> float:
    return size_bytes / MIB / 1024 / seconds
