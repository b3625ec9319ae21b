"""Stand-ins for the few calls of torch and CuPy that ``tierkv.cuda`` makes, over the host's memory, so that its code
runs where no GPU is. They do at once what a GPU does in its own time: order is the adversary's business, not theirs.
"""

from __future__ import annotations

import ctypes
import itertools
import sys
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from tierkv.cuda import device as device_module
from tierkv.cuda import kernels as kernels_module


@dataclass(frozen=True)
class Device:
    type: str = "cuda"
    index: int = 0


DEVICE = Device()


class Tensor:
    """Memory of the "GPU"."""

    def __init__(self, array: Any, device: Device = DEVICE) -> None:
        self.array = array
        self.device = device

    @property
    def shape(self) -> tuple[int, ...]:
        return self.array.shape

    def data_ptr(self) -> int:
        return int(self.array.ctypes.data)

    def element_size(self) -> int:
        return int(self.array.itemsize)

    def stride(self, dim: int | None = None) -> Any:
        strides = tuple(each // self.array.itemsize for each in self.array.strides)
        return strides if dim is None else strides[dim]

    @property
    def dtype(self) -> str:
        return f"torch.{self.array.dtype}"

    def dim(self) -> int:
        return int(self.array.ndim)

    def select(self, dim: int, index: int) -> Tensor:
        return Tensor(np.moveaxis(self.array, dim, 0)[index])

    def is_contiguous(self) -> bool:
        return bool(self.array.flags.c_contiguous)

    def permute(self, *dims: int) -> Tensor:
        return Tensor(self.array.transpose(dims))

    def unflatten(self, dim: int, sizes: tuple[int, ...]) -> Tensor:
        shape = self.array.shape
        made = self.array.view()
        made.shape = (*shape[:dim], *sizes, *shape[dim + 1 :])
        return Tensor(made)

    def numel(self) -> int:
        return int(self.array.size)

    def pin_memory(self) -> Tensor:
        return self

    def to(self, device: str, *, non_blocking: bool) -> Tensor:
        assert device in ("cuda:0", "cuda:1")
        return Tensor(self.array.copy())

    def __getitem__(self, key: Any) -> Tensor:
        return Tensor(self.array[key])


class Event:
    def __init__(self, *, blocking: bool = False) -> None:
        self.blocking = blocking
        self.recorded_on: Stream | None = None

    def record(self, stream: Stream) -> None:
        self.recorded_on = stream

    def synchronize(self) -> None:
        assert self.recorded_on is not None


class Stream:
    _numbers = itertools.count(100)

    def __init__(self, *, priority: int = 0) -> None:
        self.cuda_stream = next(self._numbers)
        self.device = DEVICE
        self.waited: list[Any] = []

    def wait_event(self, event: Any) -> None:
        self.waited.append(event)

    def synchronize(self) -> None:
        pass


class CompileException(Exception):
    """CuPy's is no RuntimeError either."""


class Machine:
    """Torch and CuPy of one machine with one GPU. ``calls`` counts what was used; ``pinned`` are registered
    stretches."""

    def __init__(self) -> None:
        self.calls = {"memcpy": 0, "kernel": 0}
        self.pinned: dict[int, int] = {}
        self.compiles = True
        self.most_pinned_bytes: int | None = None
        """The limit on locked memory."""
        self.device_memory: list[tuple[int, int]] = []
        current = Stream()
        self.torch = SimpleNamespace(
            uint8=np.uint8,
            empty=self._empty,
            from_numpy=Tensor,
            cuda=SimpleNamespace(
                Event=Event, Stream=Stream, device_count=lambda: 1, current_stream=lambda *_: current,
                device=lambda index: nullcontext(), stream=self._stream,
            ),
        )  # fmt: skip
        runtime = SimpleNamespace(
            memcpyAsync=self._memcpy,
            hostRegister=self._register,
            hostUnregister=self.pinned.pop,
            pointerGetAttributes=lambda address: SimpleNamespace(type=2 if self._on_device(address) else 1),
            memoryTypeDevice=2,
        )
        self.cupy = SimpleNamespace(
            RawModule=self._module,
            cuda=SimpleNamespace(
                runtime=runtime,
                compiler=SimpleNamespace(CompileException=CompileException),
                Device=lambda index: nullcontext(),
                Stream=SimpleNamespace(),
                ExternalStream=lambda pointer, index: pointer,
            ),
        )

    @contextmanager
    def _stream(self, stream: Stream) -> Iterator[None]:
        yield

    def _empty(self, size: int, *, dtype: Any, device: Any = None, pin_memory: bool = False) -> Tensor:
        made = Tensor(np.zeros(size, dtype))
        if pin_memory:
            self.pinned[made.data_ptr()] = size
        else:
            self.note(made)
        return made

    def note(self, tensor: Tensor) -> Tensor:
        """A tensor is in the GPU's memory."""
        first = tensor.array
        while isinstance(first.base, np.ndarray):
            first = first.base
        self.device_memory.append((first.ctypes.data, first.nbytes))
        return tensor

    def _register(self, address: int, size: int, flags: int) -> None:
        assert address % 4096 == 0
        assert size % 4096 == 0
        assert flags == 3
        if self.most_pinned_bytes is not None and sum(self.pinned.values()) + size > self.most_pinned_bytes:
            raise RuntimeError("cudaErrorMemoryAllocation: out of memory")
        self.pinned[address] = size

    def _on_device(self, address: int) -> bool:
        return any(first <= address < first + size for first, size in self.device_memory)

    def reachable(self, address: int, size: int) -> bool:
        """On the GPU, or within one registration: what CUDA demands of both sides of a copy that runs by itself."""
        return self._on_device(address) or any(
            first <= address and address + size <= first + length for first, length in self.pinned.items()
        )

    def _memcpy(self, to: int, source: int, size: int, kind: int, stream: int) -> None:
        assert kind == 4
        assert stream >= 100, "the default stream"
        assert self.reachable(to, size), "a copy to memory that is not pinned"
        assert self.reachable(source, size), "a copy from memory that is not pinned"
        self.calls["memcpy"] += 1
        ctypes.memmove(to, source, size)

    def _module(self, code: str, options: tuple[str, ...]) -> Any:
        assert "copy_runs" in code
        return SimpleNamespace(get_function=self._function)

    def _function(self, name: str) -> Any:
        if not self.compiles:
            raise CompileException("no such header")
        return self._copy_runs

    def _copy_runs(self, grid: Any, block: Any, arguments: Any, *, stream: Any) -> None:
        table, count, pieces = (int(each) for each in arguments)
        rows = np.frombuffer((ctypes.c_int64 * (3 * count)).from_address(table), np.int64).reshape(3, count)
        assert 1 <= grid[0] <= count * pieces
        assert int(rows[2].max()) <= pieces * 16384
        self.calls["kernel"] += 1
        for to, source, size in rows.T.tolist():
            assert self.reachable(to, size)
            assert self.reachable(source, size)
            ctypes.memmove(to, source, size)


def installed(monkeypatch: pytest.MonkeyPatch) -> Machine:
    """This process has that machine's torch and CuPy."""
    made = Machine()
    monkeypatch.setitem(sys.modules, "torch", made.torch)
    monkeypatch.setitem(sys.modules, "cupy", made.cupy)
    monkeypatch.setattr(device_module, "why_not", lambda: None)
    monkeypatch.setattr(device_module, "find_batches", lambda: None)
    monkeypatch.setattr(kernels_module, "find_spec", lambda name: object())
    return made
