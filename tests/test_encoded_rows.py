"""The GPU's half of the arithmetic without one: what ``GpuCodecs`` would launch is done by the host's codecs, so that
all but the kernels themselves runs. The kernels are ``tests/test_kernels_on_cpu.py``'s."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from tests.encoded_support import CASES, Case, blank_like, block_bytes, layout_of, pages_of  # noqa: E402
from tests.stand_in_codecs import StandIn, by_the_hosts_codecs  # noqa: E402
from tierkv.cuda import codecs as codecs_module  # noqa: E402
from tierkv.engines.encoded_pages import PageCodec  # noqa: E402
from tierkv.engines.encoded_rows import NUMBERS, GpuRows, HostRows  # noqa: E402
from tierkv.layout import ITEM_BYTES  # noqa: E402

CODECS = tuple(NUMBERS)
DTYPES = tuple(ITEM_BYTES)
MOST_ROWS = 5
LAYERS, BLOCKS = 2, 4


@pytest.fixture(autouse=True)
def stand_in(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(codecs_module, "GpuCodecs", partial(StandIn, by_the_hosts_codecs))
    monkeypatch.setattr(codecs_module, "_MOST_ROWS", MOST_ROWS)


def on_a_gpu(case: Case, codec: str, dtype: str) -> PageCodec:
    made = PageCodec(layout_of(case, dtype, LAYERS), codec)
    made._by_kind["cpu"] = GpuRows(codec)
    return made


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_both_halves_make_the_same_bytes(case: Case, codec: str, dtype: str) -> None:
    kv = pages_of(case, dtype, LAYERS, BLOCKS)
    host, gpu = PageCodec(layout_of(case, dtype, LAYERS), codec), on_a_gpu(case, codec, dtype)
    for first, blocks in ((0, BLOCKS), (1, 1), (3, 1)):
        ours, theirs = gpu.encode(kv, first, blocks), host.encode(kv, first, blocks)
        assert ours.whole == theirs.whole == blocks
        made = blank_like(kv), blank_like(kv)
        gpu.decode(ours.kv, made[0], [range(blocks)])
        host.decode(theirs.kv, made[1], [range(blocks)])
        for block in range(blocks):
            assert block_bytes(ours.kv, block) == block_bytes(theirs.kv, block)
            assert block_bytes(made[0], block) == block_bytes(made[1], block)


@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_what_is_not_finite_is_found(value: float, codec: str) -> None:
    case = CASES[1]
    kv = pages_of(case, "bfloat16", LAYERS, BLOCKS)
    kv.groups[0][1].arrays[1][2, 2, 15, 4] = value
    assert on_a_gpu(case, codec, "bfloat16").encode(kv, 0, BLOCKS).whole == 2


def test_memory_that_begins_oddly_is_read_number_by_number() -> None:
    memory = torch.randn(1 + 3 * 4 * 8)
    codecs: Any = StandIn(by_the_hosts_codecs)
    for start, width in ((0, 4), (1, 1)):
        values = memory[start : start + 96].view(3, 4, 8)
        codecs.int8_encode(values)
        codecs.fp8_encode(values)
        assert [name for name, _ in codecs.launched[-2:]] == [
            f"int8_encode_float32_{width}",
            f"fp8_encode_float32_{width}",
        ]


def test_d9_a_grid_is_no_higher_than_a_gpu_takes() -> None:
    """It failed beyond 65,535 rows: 8192 blocks of 8 heads."""
    codecs: Any = StandIn(by_the_hosts_codecs)
    values = torch.randn(2 * MOST_ROWS + 1, 4, 8)
    kept, scales = codecs.int8_encode(values)
    host = HostRows("int8").encode(values)
    assert torch.equal(kept.view(torch.uint8), host.kept)
    assert torch.equal(scales.view(torch.uint8), host.scales)
    assert [grid[1] for _, grid in codecs.launched] == [MOST_ROWS, MOST_ROWS, 1]
