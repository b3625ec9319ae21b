"""int8 and fp8_e4m3 on the GPU, where the bytes are: the same numbers as ``tierkv.codec_scaled`` makes on the host.

Values are ``[rows, tokens, channels]``, contiguous, fp32, fp16 or bf16; a row is one layer, segment and outer index,
as in ``codecs.cu``. What is not finite is the caller's: int8 marks its channels with a NaN for a scale, fp8 keeps
NaN and makes infinity the largest number. Work is handed to torch's current stream.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from tierkv.cuda.kernels import Kernels

if TYPE_CHECKING:
    from torch import Tensor

_ACROSS, _DOWN = 32, 8
_THREADS = 256
_MOST_ROWS = 65535
"""A grid is no higher; its width has no such bound."""


class GpuCodecs:
    """The kernels of ``codecs.cu``. Thread-safe. Raises ``MissingDependency`` without CuPy."""

    def __init__(self) -> None:
        import cupy
        import torch

        self._torch, self._cupy = torch, cupy
        self._kernels = Kernels("codecs")

    def int8_encode(self, values: Tensor) -> tuple[Tensor, Tensor]:
        """(int8 like ``values``, fp16 scales [rows, channels])."""
        rows, _, channels = values.shape
        kept = self._torch.empty(values.shape, dtype=self._torch.int8, device=values.device)
        scales = self._torch.empty((rows, channels), dtype=self._torch.float16, device=values.device)
        self._by_channel("int8_encode", values.dtype, values.shape, values, kept, scales)
        return kept, scales

    def int8_decode(self, kept: Tensor, scales: Tensor, dtype: Any) -> Tensor:
        values = self._torch.empty(kept.shape, dtype=dtype, device=kept.device)
        self._by_channel("int8_decode", dtype, kept.shape, kept, scales, values)
        return values

    def fp8_encode(self, values: Tensor) -> tuple[Tensor, Tensor]:
        """(a byte for each of ``values``, int8 exponents [rows])."""
        kept = self._torch.empty(values.shape, dtype=self._torch.uint8, device=values.device)
        exponents = self._torch.empty(values.shape[0], dtype=self._torch.int8, device=values.device)
        self._by_row("fp8_encode", values.dtype, values.shape, values, exponents, kept)
        return kept, exponents

    def fp8_decode(self, kept: Tensor, exponents: Tensor, dtype: Any) -> Tensor:
        values = self._torch.empty(kept.shape, dtype=dtype, device=kept.device)
        self._by_row("fp8_decode", dtype, kept.shape, kept, exponents, values)
        return values

    def _by_channel(self, name: str, dtype: Any, shape: Any, *tensors: Tensor) -> None:
        rows, tokens, channels = shape
        width = _width(channels, tensors)
        numbers = (np.int32(tokens), np.int32(channels))
        for first in range(0, rows, _MOST_ROWS):
            some = tuple(each[first : first + _MOST_ROWS] for each in tensors)
            grid = (-(-channels // (_ACROSS * width)), min(_MOST_ROWS, rows - first))
            self._launch(f"{name}_{_name(dtype)}_{width}", grid, (_ACROSS, _DOWN), some, numbers)

    def _by_row(self, name: str, dtype: Any, shape: Any, *tensors: Tensor) -> None:
        rows, size = shape[0], shape[1] * shape[2]
        width = _width(size, tensors)
        self._launch(f"{name}_{_name(dtype)}_{width}", (rows,), (_THREADS,), tensors, (np.int64(size),))

    def _launch(self, name: str, grid: Any, block: Any, tensors: tuple[Tensor, ...], numbers: Any) -> None:
        from tierkv.cuda.device import cupy_stream

        device = tensors[0].device.index
        stream = cupy_stream(self._cupy, self._torch.cuda.current_stream(device))
        arguments = (*(np.uint64(each.data_ptr()) for each in tensors), *numbers)
        with self._torch.cuda.device(device), self._cupy.cuda.Device(device):
            self._kernels.get(name, device)(grid, block, arguments, stream=stream)


def _width(length: int, tensors: tuple[Tensor, ...]) -> int:
    """How many numbers a thread takes at once: four, where rows of ``length`` and all of the memory begin so."""
    even = length % 4 == 0 and all(each.data_ptr() % (4 * each.element_size()) == 0 for each in tensors)
    return 4 if even else 1


def _name(dtype: Any) -> str:
    return str(dtype).removeprefix("torch.")
