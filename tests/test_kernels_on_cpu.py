"""The CUDA kernels, compiled for the CPU, make bit by bit what the host's codecs make, and copy what the table says.

What only a GPU can show (streams, the copy engines, its own conversion to fp8, speed) is ``tests/gpu``'s.
"""

from __future__ import annotations

import random
from functools import partial
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from tests.encoded_support import CASES, Case, blank_like, block_bytes, by_an_edge, layout_of, pages_of  # noqa: E402
from tests.kernels_on_cpu import CpuKernels, why_not  # noqa: E402
from tests.stand_in_codecs import StandIn  # noqa: E402
from tierkv.codec_numbers import e4m3_values  # noqa: E402
from tierkv.cuda import codecs as codecs_module  # noqa: E402
from tierkv.cuda.device import CHUNK_BYTES, THREADS  # noqa: E402
from tierkv.engines.encoded_pages import PageCodec  # noqa: E402
from tierkv.engines.encoded_rows import NUMBERS, GpuRows, HostRows  # noqa: E402
from tierkv.layout import ITEM_BYTES  # noqa: E402

WHY = why_not()
pytestmark = pytest.mark.skipif(WHY is not None, reason=str(WHY))

CODECS = tuple(NUMBERS)
DTYPES = tuple(ITEM_BYTES)
LAYERS, BLOCKS = 1, 3


def by_the_kernels(name: str, grid: Any, block: Any, tensors: tuple[Any, ...], numbers: Any) -> None:
    kernels, pointers = CpuKernels("codecs"), [each.data_ptr() for each in tensors]
    if name.startswith("int8"):
        kernels.by_channel(name, pointers, *map(int, numbers), grid, block)
    else:
        kernels.by_row(name, pointers, int(numbers[0]), grid, block)


@pytest.fixture(autouse=True)
def on_this_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(codecs_module, "GpuCodecs", partial(StandIn, by_the_kernels))


def by_kernels(case: Case, codec: str, dtype: str) -> PageCodec:
    made = PageCodec(layout_of(case, dtype, LAYERS), codec)
    made._by_kind["cpu"] = GpuRows(codec)
    return made


def check_rows(codec: str, values: Any) -> None:
    """Values as [rows, tokens, channels], which are finite, become the same bytes and come back the same."""
    kernels, host = GpuRows(codec), HostRows(codec)
    ours, theirs = kernels.encode(values), host.encode(values)
    assert not ours.wrong.any()
    assert not theirs.wrong.any()
    assert torch.equal(ours.scales, theirs.scales)
    assert torch.equal(ours.kept, theirs.kept)
    back = kernels.decode(ours.kept, ours.scales, values.dtype)
    expected = host.decode(theirs.kept, theirs.scales, values.dtype)
    assert torch.equal(back.view(torch.uint8), expected.view(torch.uint8))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_d4_encoded_blocks_are_bit_by_bit_what_an_edge_makes(case: Case, codec: str, dtype: str) -> None:
    layout, kv = layout_of(case, dtype, LAYERS), pages_of(case, dtype, LAYERS, BLOCKS)
    encoding, back = by_kernels(case, codec, dtype), blank_like(kv)
    encoded = encoding.encode(kv, 0, BLOCKS)
    assert encoded.whole == BLOCKS
    encoding.decode(encoded.kv, back, [range(BLOCKS)])
    plain = PageCodec(layout, codec).encode(kv, 0, BLOCKS)
    for block in range(BLOCKS):
        assert block_bytes(encoded.kv, block) == block_bytes(plain.kv, block)
        assert block_bytes(back, block) == by_an_edge(codec, layout, block_bytes(kv, block))[1]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize(
    "shape", [(2, 128, 256), (3, 17, 37), (1, 1, 1), (2, 16, 4), (1, 9, 132), (2, 300, 3)]
)
def test_shapes_that_fill_no_block_of_threads(shape: Any, codec: str, dtype: str) -> None:
    dice = torch.Generator().manual_seed(5)
    loud = torch.exp(3 * torch.randn(shape[2], generator=dice))
    check_rows(codec, (torch.randn(shape, generator=dice) * loud).to(getattr(torch, dtype)))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("codec", CODECS)
def test_zeros_constants_outliers_and_the_least_and_largest_numbers(codec: str, dtype: str) -> None:
    limits = torch.finfo(getattr(torch, dtype))
    largest = limits.max if codec == "fp8_e4m3" else min(limits.max, 8e6)
    values = torch.randn((8, 16, 8), generator=torch.Generator().manual_seed(6)).double()
    values[0], values[1] = 0, -0.0
    values[2] = 3.25
    values[3, 7, 2] = 60000.0
    values[4], values[4, 3, 3] = limits.tiny, -limits.tiny
    values[5] = limits.smallest_normal / 8
    values[6], values[6, :, ::2] = largest, -largest
    values[7] *= 1e-6
    check_rows(codec, values.to(getattr(torch, dtype)))


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("codec", CODECS)
def test_every_number_of_two_bytes(codec: str, dtype: str) -> None:
    """Beside others of its like, and of int8 every eighth alone in its channel."""
    words = torch.from_numpy(np.arange(65536, dtype=np.uint16).view(np.int16)).view(getattr(torch, dtype))
    largest = 8e6 if codec == "int8" else torch.finfo(words.dtype).max
    usable = words[torch.isfinite(words) & (words.abs().float() <= largest)]
    usable = usable[: len(usable) // 4096 * 4096]
    check_rows(codec, usable.reshape(-1, 64, 64))
    if codec == "int8":
        check_rows(codec, usable[::8].reshape(1, 1, -1).contiguous())


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_what_is_not_finite_is_found(value: float, codec: str, dtype: str) -> None:
    values = torch.ones((4, 16, 8), dtype=getattr(torch, dtype))
    values[2, 15, 7] = value
    assert GpuRows(codec).encode(values).wrong.tolist() == [False, False, True, False]


def test_int8_has_no_scale_beyond_what_fp16_reaches() -> None:
    values = torch.ones((2, 16, 8))
    values[1, 0, 0] = 127 * 65504.0
    check_rows("int8", values)
    values[1, 0, 0] = 127 * 65504.0 * (1 + 2**-20)
    assert GpuRows("int8").encode(values).wrong.tolist() == HostRows("int8").encode(values).wrong.tolist() == [
        False, True,
    ]  # fmt: skip


@pytest.mark.parametrize("dtype", DTYPES)
def test_d9_every_scale_of_int8_is_the_same_step(dtype: str) -> None:
    """Also those that no encoder makes: infinite, negative, not a number."""
    scales = torch.from_numpy(np.arange(65536, dtype=np.uint16).view(np.uint8)).reshape(64, 2048)
    steps = torch.tensor([0, 1, 127, 128, 129, 255], dtype=torch.uint8)
    kept = steps[None, :, None].expand(64, 6, 1024).contiguous()
    ours, theirs = (make("int8").decode(kept, scales, getattr(torch, dtype)) for make in (GpuRows, HostRows))
    assert torch.equal(ours.view(torch.uint8), theirs.view(torch.uint8))
    assert bool(torch.isfinite(ours).all())


def test_every_code_of_fp8_is_the_same_number() -> None:
    codes = torch.arange(256, dtype=torch.uint8).reshape(1, 1, 256)
    found = StandIn(by_the_kernels).fp8_decode(codes, torch.zeros(1, dtype=torch.int8), torch.float32)
    assert np.array_equal(found.numpy().ravel(), e4m3_values(), equal_nan=True)


@pytest.mark.parametrize("seed", range(6))
def test_the_copy_kernel_copies_what_the_table_says_and_nothing_else(seed: int) -> None:
    """Runs of all lengths that begin anywhere, few blocks for many pieces and the other way round."""
    dice = random.Random(seed)
    memory = np.frombuffer(dice.randbytes(1 << 18), np.uint8)
    target, wanted = np.full(1 << 19, 0xA5, np.uint8), np.full(1 << 19, 0xA5, np.uint8)
    rows, at, step = [], 0, dice.choice((1, 4, 16))
    while at < len(target) - 3 * CHUNK_BYTES:
        size = dice.choice((1, 3, 16, 100, 4096, CHUNK_BYTES, CHUNK_BYTES + step, 2 * CHUNK_BYTES + 5))
        size = max(step, size // step * step)
        source = dice.randrange((len(memory) - size) // step) * step
        rows.append((target.ctypes.data + at, memory.ctypes.data + source, size))
        wanted[at : at + size] = memory[source : source + size]
        at += -(-(size + dice.randrange(64)) // step) * step
    table = np.array(rows, np.int64).T.copy()
    pieces = -(-int(table[2].max()) // CHUNK_BYTES)
    CpuKernels("copies").copy(
        table.ctypes.data, len(rows), pieces, dice.choice((1, 7, 64)), dice.choice((32, THREADS))
    )
    assert (target == wanted).all()
