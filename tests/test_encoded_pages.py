"""Blocks that are encoded where the engine's bytes are: bit by bit what an edge makes of them, and nothing that has no
such form."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest

torch = pytest.importorskip("torch")

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
from tierkv.copier import CopyPart, LayerPages, PagedKV  # noqa: E402
from tierkv.engines.encoded_pages import EncodedCounts, PageCodec, encoded_layout, form_of  # noqa: E402
from tierkv.engines.encoded_rows import NUMBERS  # noqa: E402
from tierkv.errors import ConfigError, LayoutError  # noqa: E402
from tierkv.keys import Namespace, NamespaceSpec, Weights  # noqa: E402
from tierkv.layout import ITEM_BYTES, GroupKind, LayerGroup, Layout, Segment  # noqa: E402
from tierkv.stream_copier import StreamCopier  # noqa: E402
from tierkv.stream_jobs import CANCELLED  # noqa: E402
from tierkv.testing.copier import Done  # noqa: E402
from tierkv.testing.manual import ManualDevice  # noqa: E402

CODECS = tuple(NUMBERS)
DTYPES = tuple(ITEM_BYTES)
LAYERS, BLOCKS = 2, 3


def name_of(case: Case) -> str:
    return case.name


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize("case", CASES, ids=name_of)
def test_d4_encoded_blocks_are_bit_by_bit_what_an_edge_makes(case: Case, codec: str, dtype: str) -> None:
    layout, kv = layout_of(case, dtype, LAYERS), pages_of(case, dtype, LAYERS, BLOCKS)
    encoding = PageCodec(layout, codec)
    encoded, back = encoding.encode(kv, 0, BLOCKS), blank_like(kv)
    assert encoded.whole == BLOCKS
    encoding.decode(encoded.kv, back, [range(BLOCKS)])
    scales = sum(NUMBERS[codec].scale_bytes(segment) for segment in case.inside)
    numbers = sum(segment.numbers for segment in case.inside)
    for block in range(BLOCKS):
        stored, decoded = by_an_edge(codec, layout, block_bytes(kv, block))
        assert in_the_order_of_an_edge(encoded.kv, block, scales, numbers) == stored
        assert block_bytes(back, block) == decoded


@pytest.mark.parametrize("codec", CODECS)
def test_some_pages_of_many(codec: str) -> None:
    """Those before and behind them are neither read nor written."""
    case, dtype = CASES[0], "bfloat16"
    layout, kv = layout_of(case, dtype, LAYERS), pages_of(case, dtype, LAYERS, 6)
    encoding = PageCodec(layout, codec)
    kv.groups[0][0].arrays[0][:, 0] = float("nan")
    encoded, back = encoding.encode(kv, 2, 3), blank_like(kv)
    assert encoded.whole == 3
    before = block_bytes(back, 0)
    encoding.decode(encoded.kv, back, [range(1, 3)])
    assert [block_bytes(back, page) == before for page in range(6)] == [True, False, False, True, True, True]
    for page in (1, 2):
        assert block_bytes(back, page) == by_an_edge(codec, layout, block_bytes(kv, page + 2))[1]
    encoding.decode(encoded.kv, back, [range(0)])
    assert block_bytes(back, 0) == before


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("where", ["the first block", "the last one"])
def test_what_is_not_finite_is_never_encoded(where: str, value: float, codec: str, dtype: str) -> None:
    case = CASES[1]
    layout, kv = layout_of(case, dtype, LAYERS), pages_of(case, dtype, LAYERS, BLOCKS)
    bad = 0 if where == "the first block" else BLOCKS - 1
    kv.groups[0][-1].arrays[1][2, bad, 15, 4] = value
    encoding = PageCodec(layout, codec)
    assert encoding.encode(kv, 0, BLOCKS).whole == bad
    assert encoding.counts == EncodedCounts(encoded=bad, refused=BLOCKS - bad)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_channel_beyond_any_scale_of_int8_is_not_encoded_and_fp8_has_one_for_it(dtype: str) -> None:
    case = CASES[0]
    layout, kv = layout_of(case, dtype, 1), pages_of(case, dtype, 1, 2)
    kv.groups[0][0].arrays[0][0, 1, 3, 3] = 1e9
    assert PageCodec(layout, "int8").encode(kv, 0, 2).whole == 1
    encoding, back = PageCodec(layout, "fp8_e4m3"), blank_like(kv)
    encoded = encoding.encode(kv, 0, 2)
    assert encoded.whole == 2
    encoding.decode(encoded.kv, back, [range(2)])
    assert block_bytes(back, 1) == by_an_edge("fp8_e4m3", layout, block_bytes(kv, 1))[1]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("codec", CODECS)
def test_zeros_constants_outliers_and_the_least_numbers(codec: str, dtype: str) -> None:
    case = CASES[0]
    layout, kv = layout_of(case, dtype, 1), pages_of(case, dtype, 1, 4)
    keys, values = kv.groups[0][0].arrays
    keys[:, 0], values[:, 0] = 0, -0.0
    keys[:, 1] = 3.25
    values[0, 1, 7, 2] = 60000.0
    tiny = torch.finfo(getattr(torch, dtype)).tiny
    keys[:, 2], values[:, 2] = tiny, -tiny / 2
    keys[:, 3, ::2] = torch.finfo(getattr(torch, dtype)).max if codec == "fp8_e4m3" else 65000.0
    encoding, back = PageCodec(layout, codec), blank_like(kv)
    encoded = encoding.encode(kv, 0, 4)
    assert encoded.whole == 4
    encoding.decode(encoded.kv, back, [range(4)])
    for block in range(4):
        assert block_bytes(back, block) == by_an_edge(codec, layout, block_bytes(kv, block))[1]


@pytest.mark.parametrize("codec", CODECS)
def test_equal_blocks_are_equal_bytes(codec: str) -> None:
    """Also what fills a page up, so that a block that is stored twice has one checksum."""
    case = CASES[5]
    layout, kv = layout_of(case, "float32", 1), pages_of(case, "float32", 1, 2)
    encoding = PageCodec(layout, codec)
    made = []
    for _ in range(2):
        encoded = encoding.encode(kv, 0, 2)
        made.append([block_bytes(encoded.kv, block) for block in range(2)])
        encoded.kv.groups[0][0].arrays[0].fill_(0xA5)  # the next one may get this memory
        del encoded
    assert made[0] == made[1]
    assert len(made[0][0]) % 16 == 0


# ---- layouts


@pytest.mark.parametrize(("codec", "share"), [("int8", 0.508), ("fp8_e4m3", 0.501)])
def test_a_block_is_half_as_long(codec: str, share: float) -> None:
    case = Case("as models are", ((Segment(8, 128, 128),), (Segment(8, 128, 128),)), 1)
    layout = layout_of(case, "bfloat16", 32)
    assert encoded_layout(layout, codec).payload_bytes(0) / layout.payload_bytes(0) == pytest.approx(
        share, abs=0.001
    )


def test_d4_names_of_encoded_blocks_are_no_other_blocks_names() -> None:
    layout = layout_of(CASES[0], "bfloat16", LAYERS)
    other = replace(layout, dtype="float16")
    found = [
        Namespace(NamespaceSpec(Weights("revision", "w"), each, "test", lossy_codec=codec)).digest
        for codec in (None, *CODECS)
        for plain in (layout, other)
        for each in (plain, *(encoded_layout(plain, lossy) for lossy in CODECS if codec == lossy))
    ]
    assert len(found) == len(set(found)) == 10
    assert not encoded_layout(layout, "int8").groups[0].inside, "an edge would encode it again"


@pytest.mark.parametrize("codec", ["planes_zstd", "raw", "none", ""])
def test_codecs_without_such_a_form_are_refused(codec: str) -> None:
    with pytest.raises(ConfigError, match=r"one of \['fp8_e4m3', 'int8'\]"):
        encoded_layout(layout_of(CASES[0], "float32", 1), codec)


def test_layouts_that_cannot_be_encoded() -> None:
    plain = layout_of(CASES[0], "float32", 1)
    [group] = plain.groups
    state = LayerGroup("s", GroupKind.STATE, 1, 64, 16, inside=(Segment(1, 1, 16),))
    for wrong in (
        replace(plain, groups=(replace(group, inside=()),)),
        replace(plain, engine_blocks=2),
        replace(plain, groups=(state,)),
        Layout("test", "float8_e4m3fn", 16, (replace(group, inside=group.inside),)),
    ):
        with pytest.raises(LayoutError, match=r"inside is declared|numbers of"):
            encoded_layout(wrong, "int8")


def test_pages_that_are_not_what_was_declared() -> None:
    layout = layout_of(CASES[0], "float32", 1)
    encoding = PageCodec(layout, "int8")
    keys, values = pages_of(CASES[0], "float32", 1, 2).groups[0][0].arrays
    for arrays in (
        (keys.half(), values.half()),
        (keys,),
        (keys, values, values),
        (keys[..., :5], values),
        (keys, values.to("meta")),
    ):
        with pytest.raises(LayoutError):
            encoding.encode(PagedKV(((LayerPages(tuple(arrays), 1),),)), 0, 2)
    assert encoding.counts == EncodedCounts(encoded=0, refused=10)


@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize(("first", "blocks"), [(2, 2), (3, 1), (-1, 1), (-3, 1), (-2, 4), (1, -1)])
def test_pages_that_there_are_not_are_neither_encoded_nor_filled(first: int, blocks: int, codec: str) -> None:
    """A slice of torch's takes a negative number from the end: it was another page that was encoded."""
    encoding, kv = PageCodec(layout_of(CASES[3], "bfloat16", 1), codec), pages_of(CASES[3], "bfloat16", 1, 3)
    with pytest.raises(LayoutError, match="there are pages 0 to 2"):
        encoding.encode(kv, first, blocks)
    if blocks > 0:
        encoded, back = encoding.encode(kv, 0, 3).kv, blank_like(kv)
        before = [block_bytes(back, block) for block in range(3)]
        with pytest.raises(LayoutError, match="there are pages 0 to 2"):
            encoding.decode(encoded, back, [range(first, first + blocks)])
        assert [block_bytes(back, block) for block in range(3)] == before


@pytest.mark.parametrize("codec", CODECS)
def test_no_pages_are_encoded_to_none(codec: str) -> None:
    encoding, kv = PageCodec(layout_of(CASES[3], "bfloat16", 1), codec), pages_of(CASES[3], "bfloat16", 1, 3)
    for first in (0, 3):
        found = encoding.encode(kv, first, 0)
        assert (found.whole, len(found.kv.groups[0][0].arrays[0])) == (0, 0)
        encoding.decode(found.kv, kv, [range(0)])
    assert encoding.counts == EncodedCounts()


@pytest.mark.parametrize("codec", CODECS)
def test_places_lie_side_by_side_and_fill_a_page(codec: str) -> None:
    for case in CASES:
        [group] = layout_of(case, "float32", 1).groups
        form, at = form_of(codec, group), 0
        for piece in [*(one.scales for one in form.places), *(one.numbers for one in form.places)]:
            assert piece.start == at
            at = piece.stop
        assert at <= form.page_bytes < at + 16


# ---- on their way through streams that are as bad as they may be


class Engine:
    """Encodes, hands the copy in and goes on at once: its pages are somebody else's, and nobody else holds the encoded
    ones."""

    def __init__(self, seed: int, codec: str) -> None:
        self.dice = random.Random(seed)
        self.device = ManualDevice(seed, pinned=lambda address: bool(address // 4096 % 2))
        self.copier = StreamCopier(self.device, staging_bytes=self.dice.choice((64, 512, 4096)), buffers=2)
        self.encoding = PageCodec(layout_of(CASES[0], "bfloat16", LAYERS), codec)
        self.size_bytes = self.encoding.layout.payload_bytes(0)

    def parts(self, slots: list[bytearray]) -> list[CopyPart]:
        return [CopyPart(0, memoryview(slot), (page,)) for page, slot in enumerate(slots)]

    def live_until(self, done: Done, stop: Any) -> None:
        """Steps of the adversary; ``stop`` is called at one of them."""
        at = self.dice.randrange(40)
        for step in range(100_000):
            if step == at:
                stop()
            if done.calls or not self.device.step():
                break
        assert len(done.calls) == 1

    def rest(self) -> None:
        while self.device.step():
            pass


def engines(codec: str) -> Iterator[tuple[int, Engine]]:
    for seed in range(60):
        yield seed, Engine(seed, codec)


@pytest.mark.parametrize("codec", CODECS)
def test_d11_d12_d14_encoded_blocks_arrive_whole_or_not_at_all(codec: str) -> None:
    ended = {"whole": 0, "cancelled": 0}
    for seed, engine in engines(codec):
        kv = pages_of(CASES[0], "bfloat16", LAYERS, BLOCKS, seed)
        plain = [block_bytes(kv, block) for block in range(BLOCKS)]
        slots = [bytearray(engine.size_bytes) for _ in range(BLOCKS)]
        done = Done()
        encoded = engine.encoding.encode(kv, 0, BLOCKS)
        for layer in kv.groups[0]:
            for array in layer.arrays:
                array.fill_(99)
        job = engine.copier.start_offload(encoded.kv, engine.parts(slots), None, done)
        del encoded
        abort = engine.dice.random() < 0.5
        engine.live_until(done, job.cancel if abort and job else lambda: None)
        if done.calls == [CANCELLED]:
            then = list(map(bytes, slots))
            engine.rest()
            assert list(map(bytes, slots)) == then, "a slot was written after the job was over"
            ended["cancelled"] += 1
            continue
        assert done.calls == [None]
        back = blank_like(kv)
        arriving, done = engine.encoding.blank(BLOCKS, "cpu"), Done()
        job = engine.copier.start_onboard(arriving, engine.parts(slots), done)
        engine.live_until(done, lambda: None)
        engine.encoding.decode(arriving, back, [range(BLOCKS)])
        layout = layout_of(CASES[0], "bfloat16", LAYERS)
        for block in range(BLOCKS):
            assert block_bytes(back, block) == by_an_edge(codec, layout, plain[block])[1], seed
        ended["whole"] += 1
    assert min(ended.values()) > 5, ended
