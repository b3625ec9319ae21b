"""The arithmetic of ``int8`` and ``fp8_e4m3`` on torch tensors, where they are: kernels on a GPU, the codecs' own on a
CPU. Bit by bit the numbers of ``tierkv.codec_scaled``.

*Rows* are values as [rows, tokens, inner], one row for each block and outer index of a segment. All of it is handed to
torch's current stream.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING, NamedTuple, Protocol

import numpy as np

from tierkv.codec_scaled import E4m3Numbers, Int8Numbers, Numbers

if TYPE_CHECKING:
    import torch
    from torch import Tensor

NUMBERS: Mapping[str, Numbers] = MappingProxyType({"int8": Int8Numbers(), "fp8_e4m3": E4m3Numbers()})
"""The codecs that can be used so, by name."""


class EncodedRows(NamedTuple):
    kept: Tensor
    """A byte for each number: [rows, tokens, inner], uint8."""
    scales: Tensor
    """[rows, bytes of a row's scales], uint8."""
    wrong: Tensor
    """[rows], bool: the row holds what is not finite, or what no scale reaches. Its numbers stand for nothing."""


class Rows(Protocol):
    def encode(self, values: Tensor) -> EncodedRows:
        """``values``: contiguous, of fp32, fp16 or bf16."""
        ...

    def decode(self, kept: Tensor, scales: Tensor, dtype: torch.dtype) -> Tensor:
        """Both contiguous, and at the beginning of memory of their own."""
        ...


class HostRows:
    """CPU tensors, by the codecs themselves."""

    def __init__(self, codec: str) -> None:
        self._numbers = NUMBERS[codec]

    def encode(self, values: Tensor) -> EncodedRows:
        import torch

        rows, tokens, inner = values.shape
        raw = values.detach().view(torch.uint8).numpy()
        words = raw.view(np.uint32 if values.element_size() == 4 else np.uint16)
        scales, kept, wrong = self._numbers.encode(
            words.reshape(1, rows, tokens, inner), _name_of(values.dtype)
        )
        return EncodedRows(
            torch.from_numpy(kept.reshape(rows, tokens, inner)),
            torch.from_numpy(scales.reshape(rows, -1)),
            torch.from_numpy(wrong.any(axis=1)),
        )

    def decode(self, kept: Tensor, scales: Tensor, dtype: torch.dtype) -> Tensor:
        import torch

        words = self._numbers.decode(scales.numpy().ravel(), kept.numpy()[None], _name_of(dtype))
        return torch.from_numpy(words.view(np.uint8)).view(dtype).reshape(kept.shape)


class GpuRows:
    """CUDA tensors, by the kernels of ``tierkv.cuda.codecs``. Raises ``MissingDependency`` without CuPy."""

    def __init__(self, codec: str) -> None:
        from tierkv.cuda.codecs import GpuCodecs

        self._int8 = codec == "int8"
        self._kernels = GpuCodecs()

    def encode(self, values: Tensor) -> EncodedRows:
        import torch

        if self._int8:
            kept, scales = self._kernels.int8_encode(values)
            return EncodedRows(
                kept.view(torch.uint8), scales.view(torch.uint8), torch.isnan(scales).any(dim=1)
            )
        codes, exponents = self._kernels.fp8_encode(values)
        # Nothing in what fp8 keeps tells infinity from the largest number, so the values are asked.
        wrong = ~torch.isfinite(values).flatten(1).all(dim=1)
        return EncodedRows(codes, exponents.view(torch.uint8)[:, None], wrong)

    def decode(self, kept: Tensor, scales: Tensor, dtype: torch.dtype) -> Tensor:
        import torch

        if self._int8:
            return self._kernels.int8_decode(kept.view(torch.int8), scales.view(torch.float16), dtype)
        return self._kernels.fp8_decode(kept, scales.view(torch.int8)[:, 0], dtype)


def _name_of(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
