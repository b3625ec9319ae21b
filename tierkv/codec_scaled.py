"""Lossy codecs that know what numbers a block is made of: ``int8`` and ``fp8_e4m3``.

A *channel* is one place in keys or values, over all tokens of a block: the numbers of a channel are of like size,
those of neighbours often are not. ``int8`` keeps one fp16 scale for each channel and 8 bits a number, ``fp8_e4m3`` a
power of two for each head (or whatever the channels of a page are grouped by) and 8 bits a number with three bits of
fraction.

What is stored says what it is made of, so that decoding needs nothing else (little-endian):

    0   1  version            1   1  dtype (0 fp32, 1 fp16, 2 bf16)      2   2  segments
    4   4  layers             8   4  pages of a layer                    12  4  exceptions
    16  12 a segment: outer, tokens, inner
    then the scales, the numbers in the order of the block, and the exceptions: channels that hold what is not finite
    or that no scale can hold, each as its number and all of its values, bit by bit.
"""

from __future__ import annotations

import itertools
import math
import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from tierkv.codec_numbers import (
    ENDLESS,
    MOST,
    Bytes,
    Floats,
    Words,
    e4m3_values,
    half_up,
    magnitudes,
    narrow,
    to_e4m3,
    widen,
    words_of,
)
from tierkv.errors import CodecError
from tierkv.layout import ITEM_BYTES, LayerGroup, Segment

_FRONT = struct.Struct("<BBHIII")
_SEGMENT = struct.Struct("<III")
_VERSION = 1
_DTYPES = ("float32", "float16", "bfloat16")
_MOST_SEGMENTS = 64
_LEAST_EXPONENT = -100


@dataclass(frozen=True)
class Shape:
    """What a block is made of: ``layers`` × ``pages`` × the segments of a page, numbers of one ``dtype``."""

    dtype: str
    layers: int
    pages: int
    segments: tuple[Segment, ...]

    @property
    def page_numbers(self) -> int:
        return sum(segment.numbers for segment in self.segments)

    @property
    def numbers(self) -> int:
        return self.layers * self.pages * self.page_numbers

    @property
    def channels(self) -> int:
        return self.layers * sum(segment.outer * segment.inner for segment in self.segments)

    def split(self, flat: Words) -> Iterator[tuple[int, Segment, Words]]:
        """For each layer and segment its numbers as [pages, outer, tokens, inner]: views of ``flat``."""
        whole = flat.reshape(self.layers, self.pages, self.page_numbers)
        for layer in range(self.layers):
            at = 0
            for segment in self.segments:
                part = whole[layer, :, at : at + segment.numbers]
                yield layer, segment, part.reshape(self.pages, segment.outer, segment.tokens, segment.inner)
                at += segment.numbers


class Numbers(Protocol):
    """How a codec keeps the numbers of one layer and segment. ``words``: their bit patterns, [pages, outer, tokens,
    inner]."""

    def scale_bytes(self, segment: Segment) -> int: ...

    def encode(self, words: Words, dtype: str) -> tuple[Bytes, Bytes, NDArray[np.bool_]]:
        """(scales as bytes, a byte for each number, [outer, inner] that are exceptions)."""
        ...

    def decode(self, scales: Bytes, kept: Bytes, dtype: str) -> Words: ...


class Int8Numbers:
    """value ≈ q × scale, |q| ≤ 127: off by at most half a step of 1/127 of the channel's largest magnitude."""

    def scale_bytes(self, segment: Segment) -> int:
        return 2 * segment.outer * segment.inner

    def encode(self, words: Words, dtype: str) -> tuple[Bytes, Bytes, NDArray[np.bool_]]:
        largest = magnitudes(words).max(axis=(0, 2), initial=0)
        with np.errstate(over="ignore", invalid="ignore"):
            scale = half_up(widen(largest, dtype) / np.float32(127))  # up: no value is beyond 127 steps
        wrong = ~np.isfinite(scale)
        scale[wrong] = np.nan
        step = np.where(wrong | (scale == 0), np.inf, scale.astype(np.float32)).astype(np.float32)
        steps = widen(words, dtype)
        with np.errstate(invalid="ignore"):
            np.divide(steps, step[None, :, None, :], out=steps)
            if wrong.any():
                steps[~np.isfinite(steps)] = 0
            kept = np.rint(steps, out=steps).astype(np.int8)
        return np.ascontiguousarray(scale).view(np.uint8).ravel(), kept.view(np.uint8), wrong

    def decode(self, scales: Bytes, kept: Bytes, dtype: str) -> Words:
        _, outer, _, inner = kept.shape
        step = np.nan_to_num(scales.view(np.float16).astype(np.float32), posinf=0, neginf=0).reshape(
            outer, inner
        )
        values: Floats = kept.view(np.int8).astype(np.float32)
        np.multiply(values, step[None, :, None, :], out=values)
        if 128 * float(np.abs(step).max()) > MOST[dtype]:
            # What was finite stays so, also where its nearest number of steps is beyond the end.
            np.clip(values, -MOST[dtype], MOST[dtype], out=values)
        return narrow(values, dtype)


class E4m3Numbers:
    """value ≈ e4m3 × 2^exponent: off by at most 1/16 of each value, or 2^-10 of the range's smallest numbers."""

    def scale_bytes(self, segment: Segment) -> int:
        return segment.outer

    def encode(self, words: Words, dtype: str) -> tuple[Bytes, Bytes, NDArray[np.bool_]]:
        magnitude = magnitudes(words)
        endless = words.dtype.type(ENDLESS[dtype])
        wrong: NDArray[np.bool_] = magnitude.max(axis=(0, 2), initial=0) >= endless
        if wrong.any():
            magnitude = np.where(magnitude < endless, magnitude, 0)
        exponents = exponents_for(widen(magnitude.max(axis=(0, 2, 3), initial=0), dtype))
        kept = np.empty(words.shape, np.uint8)
        for outer, exponent in enumerate(exponents.tolist()):
            if dtype == "float32":
                values = widen(words[:, outer], dtype)
                with np.errstate(invalid="ignore"):
                    kept[:, outer] = to_e4m3(values * np.ldexp(np.float32(1), -exponent))
            else:
                np.take(_encoding(dtype, exponent), words[:, outer], out=kept[:, outer], mode="clip")
        return exponents.view(np.uint8), kept, wrong

    def decode(self, scales: Bytes, kept: Bytes, dtype: str) -> Words:
        rows = [
            np.take(_decoding(dtype, exponent), kept[:, outer])
            for outer, exponent in enumerate(scales.view(np.int8).tolist())
        ]
        return np.stack(rows, axis=1)


@lru_cache(maxsize=64)
def _encoding(dtype: str, exponent: int) -> Bytes:
    """The code of each of the 65,536 numbers of a kind of two bytes."""
    values = widen(np.arange(65536, dtype=np.uint16), dtype)
    with np.errstate(over="ignore", invalid="ignore"):
        return to_e4m3(values * np.ldexp(np.float32(1), -exponent))


@lru_cache(maxsize=256)
def _decoding(dtype: str, exponent: int) -> Words:
    """The number of each code. What was finite stays so, also where its nearest number is beyond the end."""
    with np.errstate(over="ignore"):
        values = e4m3_values() * np.ldexp(np.float32(1), exponent).astype(np.float32)
    return narrow(np.clip(values, -MOST[dtype], MOST[dtype]), dtype)


def exponents_for(largest: Floats) -> NDArray[np.int8]:
    """For each magnitude the smallest exponent (not below -100) with which it fits into e4m3, whose largest is
    448."""
    fraction, exponent = np.frexp(largest)
    fitting = exponent - np.where(fraction <= np.float32(0.875), 9, 8)
    return np.where(largest > 0, np.maximum(fitting, _LEAST_EXPONENT), _LEAST_EXPONENT).astype(np.int8)


class ScaledCodec:
    """A lossy codec. Stateless; made for one shape of blocks by ``fitted``, without which it encodes nothing."""

    identity = False
    lossless = False

    def __init__(
        self, name: str, code: int, numbers: Numbers, group: LayerGroup | None = None, dtype: str = ""
    ) -> None:
        self.name = name
        self.code = code
        self._numbers = numbers
        self._group = group
        self._dtype = dtype

    def fitted(self, group: LayerGroup, dtype: str) -> ScaledCodec:
        """The codec for blocks of this group. Where a page's inside is not declared, or its numbers are none that can
        be scaled, it encodes nothing."""
        known = group if group.inside and dtype in ITEM_BYTES else None
        return ScaledCodec(self.name, self.code, self._numbers, known, dtype)

    # -- there ----------------------------------------------------------------------------------------------------

    def encode_into(self, decoded: memoryview, stored: memoryview) -> int | None:
        shape = self._shape_of(len(decoded))
        if shape is None:
            return None
        front_bytes, scales_bytes = self._sizes(shape)
        numbers_at = front_bytes + scales_bytes
        if numbers_at + shape.numbers > len(stored):
            return None
        words = words_of(decoded, shape.dtype)
        out = np.frombuffer(stored, np.uint8)
        scales = out[front_bytes:numbers_at]
        kept = out[numbers_at : numbers_at + shape.numbers]
        exceptions = self._encode_all(shape, words, scales, kept)
        end = numbers_at + shape.numbers
        for channel, values in exceptions:
            piece = np.frombuffer(struct.pack("<I", channel) + values.tobytes(), np.uint8)
            if end + len(piece) > len(stored):
                return None
            out[end : end + len(piece)] = piece
            end += len(piece)
        front = _FRONT.pack(
            _VERSION,
            _DTYPES.index(shape.dtype),
            len(shape.segments),
            shape.layers,
            shape.pages,
            len(exceptions),
        )
        front += b"".join(_SEGMENT.pack(each.outer, each.tokens, each.inner) for each in shape.segments)
        out[:front_bytes] = np.frombuffer(front, np.uint8)
        return end

    def _encode_all(self, shape: Shape, words: Words, scales: Bytes, kept: Bytes) -> list[tuple[int, Words]]:
        """Fills scales and numbers; returns the exceptions: (channel, its values bit by bit)."""
        exceptions: list[tuple[int, Words]] = []
        at, channel = 0, 0
        places = shape.split(kept)
        for (_, segment, part), (_, _, place) in zip(shape.split(words), places, strict=True):
            found, numbers, wrong = self._numbers.encode(part, shape.dtype)
            scales[at : at + len(found)] = found
            place[...] = numbers
            at += len(found)
            for outer, inner in np.argwhere(wrong).tolist():
                exceptions.append((channel + outer * segment.inner + inner, part[:, outer, :, inner]))
            channel += segment.outer * segment.inner
        return exceptions

    def _shape_of(self, size_bytes: int) -> Shape | None:
        if self._group is None:
            return None
        pages, rest = divmod(size_bytes, self._group.layers * self._group.page_bytes)
        return None if rest else Shape(self._dtype, self._group.layers, pages, self._group.inside)

    def _sizes(self, shape: Shape) -> tuple[int, int]:
        """Bytes of what stands in front, and of the scales."""
        scales = shape.layers * sum(map(self._numbers.scale_bytes, shape.segments))
        return _FRONT.size + _SEGMENT.size * len(shape.segments), scales

    # -- and back -------------------------------------------------------------------------------------------------

    def decode_into(self, stored: memoryview, decoded: memoryview) -> None:
        shape, exceptions = self._read_front(stored)
        item = ITEM_BYTES[shape.dtype]
        front_bytes, scales_bytes = self._sizes(shape)
        numbers_at = front_bytes + scales_bytes
        end = numbers_at + shape.numbers
        if shape.numbers * item != len(decoded):
            raise CodecError(
                f"{self.name}: {shape.numbers * item} decoded bytes for a block of {len(decoded)}"
            )
        if end > len(stored):
            raise CodecError(f"{self.name}: {len(stored)} stored bytes, they should be {end} at least")
        raw = np.frombuffer(stored, np.uint8)
        words = words_of(decoded, shape.dtype)
        at = front_bytes
        kept = shape.split(raw[numbers_at:end])
        for (_, segment, place), (_, _, numbers) in zip(shape.split(words), kept, strict=True):
            size = self._numbers.scale_bytes(segment)
            place[...] = self._numbers.decode(
                raw[at : at + size].copy(), np.ascontiguousarray(numbers), shape.dtype
            )
            at += size
        self._restore(shape, raw[end:], exceptions, words)

    def _read_front(self, stored: memoryview) -> tuple[Shape, int]:
        """Raises ``CodecError`` unless it is one that this release has written."""
        if len(stored) < _FRONT.size:
            raise CodecError(f"{self.name}: {len(stored)} stored bytes")
        version, dtype, count, layers, pages, exceptions = _FRONT.unpack_from(stored)
        if version != _VERSION or dtype >= len(_DTYPES) or not 0 < count <= _MOST_SEGMENTS:
            raise CodecError(f"{self.name}: version {version}, dtype {dtype}, {count} segments")
        if len(stored) < _FRONT.size + count * _SEGMENT.size:
            raise CodecError(f"{self.name}: {len(stored)} stored bytes, cut in their front")
        found = [_SEGMENT.unpack_from(stored, _FRONT.size + i * _SEGMENT.size) for i in range(count)]
        if any(math.prod(each) == 0 for each in found) or not layers:
            raise CodecError(f"{self.name}: an empty segment")
        return Shape(_DTYPES[dtype], layers, pages, tuple(Segment(*each) for each in found)), exceptions

    def _restore(self, shape: Shape, raw: Bytes, count: int, words: Words) -> None:
        """Puts the exceptions in their places."""
        by_number = _channels(shape) if count else []
        at = 0
        for _ in range(count):
            if at + 4 > len(raw):
                raise CodecError(f"{self.name}: an exception is cut")
            [channel] = struct.unpack_from("<I", raw, at)
            place = _place_of(shape, by_number, channel, words)
            if place is None or at + 4 + place.nbytes > len(raw):
                raise CodecError(f"{self.name}: channel {channel} is none, or cut")
            values = raw[at + 4 : at + 4 + place.nbytes].tobytes()
            place[...] = np.frombuffer(values, place.dtype).reshape(place.shape)
            at += 4 + place.nbytes
        if at != len(raw):
            raise CodecError(f"{self.name}: {len(raw) - at} bytes more than there should be")


def _channels(shape: Shape) -> Sequence[int]:
    """The first channel of each (layer, segment), in order."""
    sizes = [segment.outer * segment.inner for _ in range(shape.layers) for segment in shape.segments]
    return list(itertools.accumulate(sizes, initial=0))


def _place_of(shape: Shape, firsts: Sequence[int], channel: int, words: Words) -> Words | None:
    """Where a channel lies in the block, as [pages, tokens]."""
    if not 0 <= channel < firsts[-1]:
        return None
    which = int(np.searchsorted(firsts, channel, side="right")) - 1
    layer, number = divmod(which, len(shape.segments))
    segment = shape.segments[number]
    at = sum(each.numbers for each in shape.segments[:number])
    whole = words.reshape(shape.layers, shape.pages, shape.page_numbers)
    part = whole[layer, :, at : at + segment.numbers]
    outer, inner = divmod(channel - firsts[which], segment.inner)
    view = part.reshape(shape.pages, segment.outer, segment.tokens, segment.inner)
    return view[:, outer, :, inner]


INT8 = ScaledCodec("int8", 3, Int8Numbers())
FP8_E4M3 = ScaledCodec("fp8_e4m3", 4, E4m3Numbers())
