"""planes_zstd, int8 and fp8_e4m3: the codec contract, and what numbers become: bounds, odd shapes, NaN, outliers."""

from __future__ import annotations

import sys
from typing import Any

import numpy as np
import pytest

from tierkv.codec import NAMES, Codec, codec_named, codec_with_code, fitted
from tierkv.codec_numbers import e4m3_values, half_up, narrow, to_e4m3, widen, words_of
from tierkv.codec_planes import PLANES_ZSTD, PlanesZstdCodec
from tierkv.codec_scaled import exponents_for
from tierkv.errors import CodecError, LayoutError
from tierkv.layout import ITEM_BYTES, GroupKind, LayerGroup, Layout, Segment
from tierkv.testing.codec import CodecContract

LOSSY = ("int8", "fp8_e4m3")
DTYPES = tuple(ITEM_BYTES)


def group_of(dtype: str, layers: int, *inside: Segment) -> LayerGroup:
    size = sum(segment.numbers for segment in inside) * ITEM_BYTES[dtype]
    return LayerGroup("g", GroupKind.FULL, layers, size, inside[0].tokens, inside=inside)


def allowed(name: str, values: Any) -> Any:
    """How far each finite number may be off: [pages, outer, tokens, inner] → the same. Half a step, and the rounding of
    the scale and of the number's own kind."""
    magnitude = np.abs(np.where(np.isfinite(values), values, 0)).astype(np.float64)
    if name == "int8":
        largest = magnitude.max(axis=(0, 2), keepdims=True)
        return 0.5 * (largest / 127 * (1 + 2.0**-10) + 2.0**-24) + magnitude * 2.0**-7
    largest = magnitude.max(axis=(0, 2, 3), keepdims=True)
    return magnitude * (2.0**-4 + 2.0**-8) + largest * 2.0**-17 + 2.0**-110


def check_close(
    name: str, dtype: str, layers: int, inside: tuple[Segment, ...], before: bytes, after: bytes
) -> None:
    """Within bounds; what is not finite, and the rest of its channel, is exactly as it was."""
    item = ITEM_BYTES[dtype]
    numbers = sum(segment.numbers for segment in inside)
    both = [np.frombuffer(raw, np.uint8).reshape(layers, -1, numbers, item) for raw in (before, after)]
    at = 0
    for segment in inside:
        old, new = (
            widen(
                words_of(np.ascontiguousarray(raw[:, :, at : at + segment.numbers]).data, dtype), dtype
            ).reshape(layers, -1, segment.outer, segment.tokens, segment.inner)
            for raw in both
        )
        at += segment.numbers
        for layer in range(layers):
            finite = np.isfinite(old[layer]).all(axis=(0, 2), keepdims=True)
            was, now = (np.where(finite, each[layer], 0).astype(np.float64) for each in (old, new))
            error = np.abs(was - now)
            bound = allowed(name, np.where(finite, old[layer], 0))
            assert (error <= bound).all(), f"off by {error.max()}, allowed there {bound[error > bound][:3]}"
            same = old[layer].view(np.uint32) == new[layer].view(np.uint32)
            assert (same | finite).all(), "a channel with NaN or infinity is not as it was"


class ScaledContract(CodecContract):
    name, dtype = "int8", "bfloat16"
    inside: tuple[Segment, ...] = (Segment(1, 16, 16),)
    sizes = (512, 4096, 65536, 131072)

    def make_codec(self) -> Codec:
        return fitted(codec_named(self.name), group_of(self.dtype, 1, *self.inside), self.dtype)

    def close_enough(self, before: bytes, after: bytes) -> bool:
        check_close(self.name, self.dtype, 1, self.inside, before, after)
        return True


class TestInt8(ScaledContract):
    pass


class TestInt8OfFloats(ScaledContract):
    dtype = "float32"
    sizes = (1024, 4096, 65536)


class TestFp8(ScaledContract):
    name = "fp8_e4m3"


class TestFp8OfHalves(ScaledContract):
    name, dtype = "fp8_e4m3", "float16"


class TestPlanes(CodecContract):
    def make_codec(self) -> Codec:
        return PLANES_ZSTD


class TestPlanesOfFloats(CodecContract):
    def make_codec(self) -> Codec:
        return PlanesZstdCodec(4)


# ---- numbers


def as_bytes(values: Any, dtype: str) -> bytes:
    return narrow(values.astype(np.float32), dtype).tobytes()


def there_and_back(name: str, group: LayerGroup, dtype: str, plain: bytes) -> tuple[bytes, int]:
    codec = fitted(codec_named(name), group, dtype)
    stored, after = bytearray(3 * len(plain) + 4096), bytearray(len(plain))
    length = codec.encode_into(memoryview(plain), memoryview(stored))
    assert length is not None
    codec_with_code(codec.code).decode_into(memoryview(stored)[:length], memoryview(after))
    return bytes(after), length


def kv_like(shape: tuple[int, ...], seed: int = 0) -> Any:
    """Numbers of a cache: channels of unlike size, a few a hundred times the others."""
    dice = np.random.default_rng(seed)
    sizes = np.exp(dice.normal(0, 1, shape[-1])) * np.where(dice.random(shape[-1]) < 0.03, 100, 1)
    return dice.normal(0, 1, shape) * sizes


SHAPES = {
    "fused, tokens first": (2, (Segment(2, 16, 64),)),
    "heads first, keys and values apart": (3, (Segment(3, 128, 32), Segment(3, 128, 32))),
    "a latent of odd width": (2, (Segment(1, 16, 37),)),
    "apart and unequal": (1, (Segment(2, 5, 7), Segment(2, 5, 3))),
    "one number": (1, (Segment(1, 1, 1),)),
}


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", LOSSY)
@pytest.mark.parametrize("pages", [1, 3])
def test_numbers_come_back_within_their_bounds(name: str, dtype: str, shape: str, pages: int) -> None:
    layers, inside = SHAPES[shape]
    count = layers * pages
    plain = b"".join(
        as_bytes(kv_like((segment.outer, segment.tokens, segment.inner), seed=7 * i + j), dtype)
        for i in range(count)
        for j, segment in enumerate(inside)
    )
    after, length = there_and_back(name, group_of(dtype, layers, *inside), dtype, plain)
    check_close(name, dtype, layers, inside, plain, after)
    numbers = len(plain) // ITEM_BYTES[dtype]
    scales = 2 * layers * sum(segment.outer * segment.inner for segment in inside)
    assert length <= numbers + scales + 64


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", LOSSY)
def test_nan_infinity_constants_outliers_and_zeros(name: str, dtype: str) -> None:
    values = kv_like((2, 32, 24))
    values[0, :, 0] = 0
    values[0, :, 1] = 3.140625
    values[0, 5, 2] = np.nan
    values[1, 6, 3] = np.inf
    values[1, :, 4] = -np.inf
    values[1, 9, 5] = 60000
    values[1, :, 6] = 1e-9
    values[0, :, 7] = -0.0
    plain = as_bytes(values, dtype)
    group = group_of(dtype, 1, Segment(2, 32, 24))
    after, _ = there_and_back(name, group, dtype, plain)
    check_close(name, dtype, 1, group.inside, plain, after)


@pytest.mark.parametrize("name", LOSSY)
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_numbers_beyond_any_scale_are_kept_as_they_are(name: str, dtype: str) -> None:
    values = kv_like((1, 16, 8))
    values[0, 3, 2] = 3e38
    group = group_of(dtype, 1, Segment(1, 16, 8))
    after, _ = there_and_back(name, group, dtype, as_bytes(values, dtype))
    found, given = (
        widen(words_of(raw, dtype), dtype).reshape(16, 8) for raw in (after, as_bytes(values, dtype))
    )
    assert abs(found[3, 2] / 3e38 - 1) < 0.07
    assert name != "int8" or (found[:, 2] == given[:, 2]).all()


def test_int8_scales_cost_under_two_percent_from_128_tokens_on() -> None:
    group = group_of("bfloat16", 4, Segment(2, 128, 64))
    plain = as_bytes(kv_like((4, 2, 128, 64)), "bfloat16")
    _, length = there_and_back("int8", group, "bfloat16", plain)
    assert length - len(plain) // 2 < 0.02 * length


def test_without_a_declared_inside_nothing_is_encoded() -> None:
    group = LayerGroup("g", GroupKind.FULL, 1, 4096, 16)
    for name in LOSSY:
        for codec in (codec_named(name), fitted(codec_named(name), group, "bfloat16")):
            assert codec.encode_into(memoryview(bytes(4096)), memoryview(bytearray(8192))) is None
    inside = group_of("bfloat16", 1, Segment(1, 16, 8))
    codec = fitted(codec_named("int8"), inside, "fp8_e4m3")
    assert codec.encode_into(memoryview(bytes(256)), memoryview(bytearray(8192))) is None


def test_an_inside_that_is_not_the_page_is_refused() -> None:
    group = LayerGroup("g", GroupKind.FULL, 1, 4096, 16, inside=(Segment(1, 16, 100),))
    with pytest.raises(LayoutError, match="that is 3200 bytes of bfloat16, a page has 4096"):
        Layout("x", "bfloat16", 16, (group,))


def test_a_front_that_lies_is_an_error() -> None:
    group = group_of("bfloat16", 1, Segment(1, 16, 8))
    codec = fitted(codec_named("int8"), group, "bfloat16")
    stored = bytearray(4096)
    length = codec.encode_into(memoryview(as_bytes(kv_like((1, 16, 8)), "bfloat16")), memoryview(stored))
    assert length is not None
    for at, value in ((0, 9), (1, 3), (2, 0), (4, 0), (12, 1), (16, 0), (20, 15)):
        wrong = stored[:length]
        wrong[at] = value
        with pytest.raises(CodecError):
            codec.decode_into(memoryview(wrong), memoryview(bytearray(256)))


def test_planes_shrink_what_lz4_does_not() -> None:
    plain = as_bytes(kv_like((64, 1024)), "bfloat16")
    room = memoryview(bytearray(len(plain)))
    planes = PLANES_ZSTD.encode_into(memoryview(plain), room)
    assert planes is not None
    assert planes < 0.8 * len(plain)
    assert (codec_named("lz4").encode_into(memoryview(plain), room) or len(plain)) > 0.97 * len(plain)


def test_planes_follow_the_numbers_of_the_group() -> None:
    group = LayerGroup("g", GroupKind.FULL, 1, 4096, 16)
    made = [fitted(PLANES_ZSTD, group, dtype) for dtype in ("bfloat16", "float32", "fp8_e4m3")]
    assert [codec._item_bytes for codec in made] == [2, 4, 1]  # type: ignore[attr-defined]


def test_codes_and_names_are_apart_and_known() -> None:
    codecs = [codec_named(name) for name in NAMES]
    assert [codec.code for codec in codecs] == [0, 1, 2, 3, 4], "a code is never used for another codec"
    assert [codec_with_code(codec.code).name for codec in codecs] == list(NAMES)
    assert [codec.lossless for codec in codecs] == [True, True, True, False, False]


# ---- the numbers themselves, against torch


def test_e4m3_is_what_torch_makes() -> None:
    torch = pytest.importorskip("torch")
    codes = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn)
    assert np.array_equal(e4m3_values(), codes.float().numpy(), equal_nan=True)
    halves = np.arange(65536, dtype=np.uint16).view(np.float16).astype(np.float32)
    dice = np.random.default_rng(3)
    halves = halves[np.isfinite(halves)]
    values = np.concatenate((halves, dice.normal(0, 50, 200_000), 2.0 ** dice.uniform(-14, 9, 100_000)))
    values = values[np.abs(values) <= 448].astype(np.float32)
    wanted = torch.from_numpy(values).to(torch.float8_e4m3fn).view(torch.uint8).numpy()
    assert (to_e4m3(values) == wanted).all()
    assert (to_e4m3(np.array([1e9, -1e9, np.inf], np.float32)) == [0x7E, 0xFE, 0x7E]).all()


def test_bf16_is_what_torch_makes() -> None:
    torch = pytest.importorskip("torch")
    values = np.random.default_rng(1).normal(0, 1e3, 100_000).astype(np.float32)
    wanted = torch.from_numpy(values).to(torch.bfloat16)
    assert (narrow(values, "bfloat16").view(np.int16) == wanted.view(torch.int16).numpy()).all()
    assert (widen(narrow(values, "bfloat16"), "bfloat16") == wanted.float().numpy()).all()


def test_scales_are_rounded_up_and_exponents_fit() -> None:
    values = np.abs(np.random.default_rng(2).normal(0, 100, 10_000)).astype(np.float32)
    up = half_up(values).astype(np.float32)
    assert (up >= values).all()
    assert (up - values <= values * 2.0**-10).all()
    assert np.isinf(half_up(np.array([70000], np.float32))).all()
    largest = np.array([0, 1e-40, 448, 449, 1, 3e38], np.float32)
    exponents = exponents_for(largest).astype(float)
    assert (largest <= 448 * 2.0**exponents).all()
    assert exponents.tolist()[:5] == [-100, -100, 0, 1, -8]


def test_zstd_that_is_missing_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    import tierkv.codec_planes as module

    monkeypatch.setattr(module, "find_spec", lambda name: None)
    with pytest.raises(ValueError, match=r"install 'tierkv-store\[zstd\]'"):
        PlanesZstdCodec(8).encode_into(memoryview(bytes(64)), memoryview(bytearray(640)))
    assert sys.version_info
