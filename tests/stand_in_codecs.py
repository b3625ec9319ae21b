"""``GpuCodecs`` without a GPU: what it would launch is looked at, and done by something else."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from tierkv.cuda import codecs as codecs_module
from tierkv.cuda.codecs import GpuCodecs
from tierkv.engines.encoded_rows import HostRows

Compute = Callable[[str, Any, Any, tuple[Any, ...], Any], None]
"""(name of the kernel, grid, block, tensors, numbers)."""


class StandIn(GpuCodecs):
    """Demands of each launch what a GPU does, and has ``compute`` do it at once."""

    launched: list[tuple[str, Any]]

    def __init__(self, compute: Compute) -> None:
        self._torch = torch
        self._compute = compute
        self.launched = []

    def _launch(self, name: str, grid: Any, block: Any, tensors: tuple[Any, ...], numbers: Any) -> None:
        codec, what, dtype, width = name.split("_")
        assert all(each.is_contiguous() for each in tensors)
        assert all(each.data_ptr() % (int(width) * each.element_size()) == 0 for each in tensors)
        assert len({each.shape[0] for each in tensors}) == 1
        values = tensors[0 if what == "encode" else 2]
        assert values.dtype == getattr(torch, dtype)
        if codec == "int8":
            assert grid == (-(-values.shape[2] // (32 * int(width))), values.shape[0])
            assert grid[1] <= codecs_module._MOST_ROWS
            assert tuple(map(int, numbers)) == tuple(values.shape[1:])
        else:
            assert grid == (values.shape[0],)
            assert int(numbers[0]) == values.shape[1] * values.shape[2]
        self.launched.append((name, grid))
        self._compute(name, grid, block, tensors, numbers)


def by_the_hosts_codecs(name: str, grid: Any, block: Any, tensors: tuple[Any, ...], numbers: Any) -> None:
    codec, what, *_ = name.split("_")
    host = HostRows("int8" if codec == "int8" else "fp8_e4m3")
    if what == "encode":
        values, kept, scales = tensors if codec == "int8" else (tensors[0], tensors[2], tensors[1])
        made = host.encode(values)
        kept.view(torch.uint8).copy_(made.kept)
        raw = scales.view(torch.uint8)
        raw.copy_(made.scales.reshape(raw.shape))
    else:
        kept, scales, values = tensors
        flat = scales.view(torch.uint8).reshape(values.shape[0], -1)
        values.copy_(host.decode(kept.view(torch.uint8), flat, values.dtype))
