"""What copies cost a computation beside them, and how fast the codecs' kernels are beside a copy within the GPU."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

from bench.gpu_copies import SIZES, Found
from bench.gpu_rig import gib_of, measured, rig
from bench.harness import Reach, Row
from tierkv.cuda.codecs import GpuCodecs

MATRIX = 8192
PRODUCTS = 20


def matmul(total_bytes: int, rounds: int) -> Found:
    """A chain of matrix products alone, and while both directions copy without a pause."""
    import torch

    a, b = (torch.randn(MATRIX, MATRIX, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    out = torch.empty_like(a)

    def products() -> float:
        torch.cuda.synchronize()
        begun_s = time.perf_counter()
        for _ in range(PRODUCTS):
            torch.matmul(a, b, out=out)
        torch.cuda.current_stream().synchronize()
        return time.perf_counter() - begun_s

    with rig(SIZES[0], total_bytes) as made:

        def beside() -> float:
            stop = threading.Event()

            def copy() -> None:
                while not stop.is_set():
                    calls = [made.offload(), made.onboard()]
                    for call in calls:
                        call.wait()

            thread = threading.Thread(target=copy)
            thread.start()
            try:
                return products()
            finally:
                stop.set()
                thread.join()

        ours_s, limit_s = measured(beside, products, rounds)
    row = Row(
        "gpu_matmul_beside_copies",
        "ms",
        "ms",
        f"a bf16 product of {MATRIX}³ while 64 KiB pages are offloaded and onboarded; limit: the same alone",
        Reach("ratio", "<=", 1.03),
    )
    return row, [s * 1e3 / PRODUCTS for s in ours_s], [s * 1e3 / PRODUCTS for s in limit_s]


def kernels(rounds: int) -> Iterator[Found]:
    """Bytes read and written a second."""
    import torch

    codecs = GpuCodecs()
    values = torch.randn(4096, 128, 1024, device="cuda").to(torch.bfloat16)  # 1 GiB
    target = torch.empty_like(values)
    kept, scales = codecs.int8_encode(values)
    codes, exponents = codecs.fp8_encode(values)
    full, half = values.numel() * 2, values.numel()
    work: dict[str, tuple[Callable[[], Any], int]] = {
        "int8_encode": (lambda: codecs.int8_encode(values), full + half),
        "int8_decode": (lambda: codecs.int8_decode(kept, scales, values.dtype), full + half),
        "fp8_encode": (lambda: codecs.fp8_encode(values), full + half),
        "fp8_decode": (lambda: codecs.fp8_decode(codes, exponents, values.dtype), full + half),
    }
    for name, (call, moved) in work.items():
        ours_s, limit_s = measured(
            lambda call=call: _seconds(call),  # type: ignore[misc]
            lambda: _seconds(lambda: target.copy_(values)),
            rounds,
        )
        row = Row(
            f"gpu_{name}",
            "gib_per_s",
            "GiB/s",
            f"{name} of 1 GiB of bf16, bytes read and written; limit: a copy of it within the GPU, read and written",
            Reach("ratio", ">=", 0.7),
        )
        yield row, [gib_of(moved, s) for s in ours_s], [gib_of(2 * full, s) for s in limit_s]


def _seconds(call: Callable[[], Any]) -> float:
    """On the GPU's own clock, ten at once."""
    import torch

    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    for _ in range(10):
        call()
    end.record()
    end.synchronize()
    return float(begin.elapsed_time(end)) / 1e4
