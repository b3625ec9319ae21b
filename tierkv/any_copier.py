"""One copier for whatever memory an engine has: arrays and CPU tensors by ``HostCopier``, CUDA tensors by
``CudaCopier``, which is made, and loads torch and CuPy, when the first such tensor comes.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Protocol

from tierkv.copier import Copier, CopyPart, HostCopier, PagedKV, ReadyEvent
from tierkv.errors import ClosedError
from tierkv.executor import Executor
from tierkv.layout import Layout

if TYPE_CHECKING:
    from tierkv.cuda.copier import CudaCopier


class HostMemory(Protocol):
    """Where slots lie: an ``Arena`` or what a daemon's looks like from here."""

    @property
    def region_bytes(self) -> int: ...

    def memory(self) -> memoryview: ...


class AnyCopier:
    """A ``Copier``. Thread-safe. ``slots`` gives the host memory to pin for a GPU, when there is some by then;
    ``renew`` is to be called when it is another."""

    def __init__(self, executor: Executor, slots: Callable[[], HostMemory | None] = lambda: None) -> None:
        self._executor = executor
        self._slots = slots
        self._host = HostCopier(executor)
        self._lock = threading.Lock()
        self._cuda: CudaCopier | None = None
        self._pinned: HostMemory | None = None
        self._closed = False

    def check(self, kv: PagedKV, layout: Layout) -> None:
        self._for(kv).check(kv, layout)

    def offload(
        self,
        kv: PagedKV,
        parts: Sequence[CopyPart],
        ready: ReadyEvent | None,
        done: Callable[[str | None], None],
    ) -> None:
        self._for(kv).offload(kv, parts, ready, done)

    def onboard(
        self,
        kv: PagedKV,
        parts: Sequence[CopyPart],
        done: Callable[[str | None], None],
        on_layer: Callable[[int, int], None] | None = None,
        ready: ReadyEvent | None = None,
    ) -> None:
        self._for(kv).onboard(kv, parts, done, on_layer, ready)

    def cuda(self) -> CudaCopier:
        """The one for CUDA tensors, made when it is first asked for. Raises ``ClosedError``."""
        from tierkv.cuda.copier import CudaCopier

        with self._lock:
            if self._cuda is None:
                if self._closed:
                    raise ClosedError("this copier was closed")
                self._cuda = CudaCopier(self._executor)
                self._pin()
            return self._cuda

    def prepare(self, kv: PagedKV) -> None:
        """Does what the first copy of this memory would have to wait for: on a GPU streams, kernels and pinning. Blocks
        for seconds. Raises ``LayoutError``, and ``ConfigError`` where there is no such GPU."""
        if self._for(kv) is not self._host:
            self.cuda().prepare(kv)

    def renew(self) -> None:
        """The slots are in other memory than before, or are there for the first time: a GPU in use pins it in the
        background. Returns at once. Any thread."""
        with self._lock:
            if self._cuda is not None and not self._closed:
                self._pin()

    def _pin(self) -> None:
        assert self._cuda is not None
        slots = self._slots()
        if slots is None or slots is self._pinned:
            return
        try:
            memory = slots.memory()
        except ClosedError:  # the client ends
            return
        self._pinned = slots
        self._cuda.pin(memory, slots.region_bytes)

    def close(self, timeout_s: float) -> None:
        """What a GPU has begun ends, the rest is told that it failed; host memory is unpinned. Before the executor is
        closed, and before the slots' memory goes."""
        with self._lock:
            cuda, self._pinned, self._closed = self._cuda, None, True
        if cuda is not None:
            cuda.close(timeout_s)

    def _for(self, kv: PagedKV) -> Copier:
        first = next((array for group in kv.groups for layer in group for array in layer.arrays), None)
        kind = getattr(getattr(first, "device", None), "type", None)
        return self.cuda() if kind == "cuda" else self._host
