"""On a machine with an NVIDIA GPU: blocks that are encoded there, through the copier into host RAM and back, bit by bit
what an edge makes of them; and pages that are the engine's again at once."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest

from tierkv.cuda.here import why_not

WHY = why_not()
if WHY is not None:
    pytest.skip(WHY, allow_module_level=True)

import cupy  # noqa: E402
import torch  # noqa: E402

from tests.encoded_support import (  # noqa: E402
    CASES,
    Case,
    blank_like,
    block_bytes,
    by_an_edge,
    in_the_order_of_an_edge,
    layout_of,
    pages_of,
)
from tierkv.clock import SystemClock  # noqa: E402
from tierkv.copier import CopyPart, PagedKV  # noqa: E402
from tierkv.cuda.codecs import GpuCodecs  # noqa: E402
from tierkv.cuda.copier import CudaCopier  # noqa: E402
from tierkv.cuda.device import cupy_stream  # noqa: E402
from tierkv.cuda.kernels import Kernels  # noqa: E402
from tierkv.engines.encoded_pages import PageCodec  # noqa: E402
from tierkv.engines.encoded_rows import NUMBERS, HostRows  # noqa: E402
from tierkv.executor import ThreadExecutor  # noqa: E402
from tierkv.layout import ITEM_BYTES, Segment  # noqa: E402
from tierkv.testing.copier import Done  # noqa: E402
from tierkv.testing.payloads import aligned  # noqa: E402
from tierkv.units import MIB  # noqa: E402

PATIENCE_S = 30.0
LAYERS, BLOCKS = 3, 5
LATE_CYCLES = 700_000_000
BIG = Case("as models are", ((Segment(8, 128, 128),), (Segment(8, 128, 128),)), 1)


@contextmanager
def a_copier(arena: memoryview) -> Iterator[Any]:
    executor = ThreadExecutor(SystemClock())
    copier = CudaCopier(executor, arena=arena)
    try:
        yield copier
    finally:
        torch.cuda.synchronize()
        copier.close()
        assert executor.close(10.0) == []


def parts(arena: memoryview, size_bytes: int) -> list[CopyPart]:
    return [
        CopyPart(0, arena[page * size_bytes : (page + 1) * size_bytes], (page,)) for page in range(BLOCKS)
    ]


def through_host_ram(encoding: PageCodec, encoded: PagedKV) -> PagedKV:
    """Other encoded pages, with what came back."""
    size = encoding.layout.payload_bytes(0)
    arena = aligned(BLOCKS * (size + 4096) // MIB * MIB + MIB)
    arriving = encoding.blank(BLOCKS, "cuda")
    with a_copier(arena) as copier:
        copier.check(encoded, encoding.layout)
        down, up = Done(), Done()
        copier.offload(encoded, parts(arena, size), None, down)
        assert down.wait(PATIENCE_S) is None
        torch.cuda.synchronize()
        copier.onboard(arriving, parts(arena, size), up)
        assert up.wait(PATIENCE_S) is None
    return arriving


@pytest.mark.parametrize("dtype", tuple(ITEM_BYTES))
@pytest.mark.parametrize("codec", tuple(NUMBERS))
@pytest.mark.parametrize("case", [*CASES, BIG], ids=lambda case: case.name)
def test_d4_encoded_blocks_are_bit_by_bit_what_an_edge_makes(case: Case, codec: str, dtype: str) -> None:
    layout, kv = layout_of(case, dtype, LAYERS), pages_of(case, dtype, LAYERS, BLOCKS, device="cuda")
    plain = [block_bytes(kv, block) for block in range(BLOCKS)]
    encoding = PageCodec(layout, codec)
    encoded, back = encoding.encode(kv, 0, BLOCKS), blank_like(kv)
    assert encoded.whole == BLOCKS
    encoding.decode(through_host_ram(encoding, encoded.kv), back, [range(BLOCKS)])
    scales = sum(NUMBERS[codec].scale_bytes(segment) for segment in case.inside)
    numbers = sum(segment.numbers for segment in case.inside)
    for block in range(BLOCKS):
        stored, decoded = by_an_edge(codec, layout, plain[block])
        assert in_the_order_of_an_edge(encoded.kv, block, scales, numbers) == stored
        assert block_bytes(back, block) == decoded


@pytest.mark.parametrize("codec", tuple(NUMBERS))
def test_some_pages_of_many_and_each_alone(codec: str) -> None:
    """One block is a view into its pages: kernels that read several numbers at once must find them where they may."""
    for case in CASES:
        layout, kv = layout_of(case, "bfloat16", 1), pages_of(case, "bfloat16", 1, 4, device="cuda")
        encoding, back = PageCodec(layout, codec), blank_like(kv)
        for page in range(4):
            encoded = encoding.encode(kv, page, 1)
            assert encoded.whole == 1
            encoding.decode(encoded.kv, back, [range(1)])
            assert block_bytes(back, 0) == by_an_edge(codec, layout, block_bytes(kv, page))[1], case.name


@pytest.mark.parametrize("dtype", tuple(ITEM_BYTES))
@pytest.mark.parametrize("codec", tuple(NUMBERS))
@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_what_is_not_finite_is_never_encoded(value: float, codec: str, dtype: str) -> None:
    layout, kv = layout_of(BIG, dtype, 2), pages_of(BIG, dtype, 2, BLOCKS, device="cuda")
    kv.groups[0][1].arrays[0][7, 3, 127, 126] = value
    assert PageCodec(layout, codec).encode(kv, 0, BLOCKS).whole == 3


@pytest.mark.parametrize("dtype", tuple(ITEM_BYTES))
@pytest.mark.parametrize("codec", tuple(NUMBERS))
def test_zeros_constants_outliers_and_the_least_numbers(codec: str, dtype: str) -> None:
    layout, kv = layout_of(CASES[0], dtype, 1), pages_of(CASES[0], dtype, 1, 4, device="cuda")
    keys, values = kv.groups[0][0].arrays
    keys[:, 0], values[:, 0] = 0, -0.0
    keys[:, 1] = 3.25
    values[0, 1, 7, 2] = 60000.0
    limits = torch.finfo(getattr(torch, dtype))
    keys[:, 2], values[:, 2] = limits.tiny, -limits.tiny / 2
    keys[:, 3, ::2] = limits.max if codec == "fp8_e4m3" else 65000.0
    encoding, back = PageCodec(layout, codec), blank_like(kv)
    encoded = encoding.encode(kv, 0, 4)
    assert encoded.whole == 4
    encoding.decode(encoded.kv, back, [range(4)])
    for block in range(4):
        assert block_bytes(back, block) == by_an_edge(codec, layout, block_bytes(kv, block))[1], block


def test_more_rows_than_a_grid_is_high() -> None:
    values = torch.randn((70_000, 2, 4), generator=torch.Generator().manual_seed(3))
    kernels, host = GpuCodecs(), HostRows("int8").encode(values)
    kept, scales = kernels.int8_encode(values.cuda())
    assert torch.equal(kept.cpu().view(torch.uint8), host.kept)
    assert torch.equal(scales.cpu().view(torch.uint8), host.scales)
    decoded = kernels.int8_decode(kept, scales, torch.float32)
    assert torch.equal(decoded.cpu(), HostRows("int8").decode(host.kept, host.scales, torch.float32))


@pytest.mark.parametrize("codec", tuple(NUMBERS))
def test_d12_encoding_waits_for_a_late_producer_and_the_pages_are_free_at_once(codec: str) -> None:
    """The pages are written half a second after ``encode`` was called, and anew as soon as it has returned."""
    layout, kv = layout_of(BIG, "bfloat16", 1), pages_of(BIG, "bfloat16", 1, BLOCKS, device="cuda")
    keys = kv.groups[0][0].arrays[0]
    encoding, back = PageCodec(layout, codec), blank_like(kv)
    encoding.prepare(kv)
    kernel = Kernels("copies").get("produce_late", 0)
    torch.cuda.synchronize()
    word = 0x3F803F80  # two times 1.0
    arguments = (
        np.uint64(keys.data_ptr()),
        np.int64(keys.numel() * 2 // 16),
        np.uint32(word),
        np.int64(LATE_CYCLES),
    )
    kernel((64,), (256,), arguments, stream=cupy_stream(cupy, torch.cuda.current_stream()))
    behind = torch.cuda.Event()
    behind.record()
    assert not behind.query(), "the producer was done before encoding was asked for"
    encoded = encoding.encode(kv, 0, BLOCKS)
    keys.fill_(99)
    encoding.decode(through_host_ram(encoding, encoded.kv), back, [range(BLOCKS)])
    assert float((back.groups[0][0].arrays[0].float() - 1).abs().max()) < 2**-7


def test_two_threads_on_streams_of_their_own() -> None:
    layout, size = layout_of(BIG, "bfloat16", LAYERS), 4
    encoding = PageCodec(layout, "int8")
    wrong: list[str] = []

    def work(seed: int) -> None:
        with torch.cuda.stream(torch.cuda.Stream()):
            kv = pages_of(BIG, "bfloat16", LAYERS, size, seed, "cuda")
            back = blank_like(kv)
            encoding.decode(encoding.encode(kv, 0, size).kv, back, [range(size)])
            torch.cuda.current_stream().synchronize()
            for block in range(size):
                if block_bytes(back, block) != by_an_edge("int8", layout, block_bytes(kv, block))[1]:
                    wrong.append(f"block {block} of thread {seed}")

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE_S)
    assert not any(thread.is_alive() for thread in threads)
    assert not wrong
