"""Numbers as KV caches hold them, in numpy: bf16, fp16 and fp32, and 8-bit floats of the kind e4m3.

numpy has neither bf16 nor e4m3; both are done on bit patterns. Rounding is to nearest, ties to even, as GPUs do it.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

Bytes = NDArray[np.uint8]
Floats = NDArray[np.float32]
Words = NDArray[Any]
"""uint16 or uint32."""

MOST = {"float32": 3.4028234663852886e38, "float16": 65504.0, "bfloat16": 3.3895313892515355e38}
"""The largest finite number of each kind."""

ENDLESS = {"float32": 0x7F800000, "float16": 0x7C00, "bfloat16": 0x7F80}
"""The pattern of infinity; beyond it are those that are no numbers."""

_E4M3_MOST = 448.0
_E4M3_NAN = 0x7F


def words_of(raw: bytes | memoryview, dtype: str) -> Words:
    """The bit patterns of numbers, as unsigned integers of their size: a view."""
    return np.frombuffer(raw, np.uint32 if dtype == "float32" else np.uint16)


def magnitudes(words: Words) -> Words:
    """Without their signs. Greater patterns are greater numbers, and from ``ENDLESS`` on none."""
    unsigned: Words = words & words.dtype.type(0x7FFFFFFF if words.itemsize == 4 else 0x7FFF)
    return unsigned


def widen(words: Words, dtype: str) -> Floats:
    """As float32, a copy."""
    if dtype == "float32":
        return words.view(np.float32).copy()
    if dtype == "float16":
        return words.view(np.float16).astype(np.float32)
    return (words.astype(np.uint32) << np.uint32(16)).view(np.float32)


def narrow(values: Floats, dtype: str) -> Words:
    """The inverse of ``widen``, rounded."""
    if dtype == "float32":
        return np.ascontiguousarray(values).view(np.uint32)
    if dtype == "float16":
        with np.errstate(over="ignore"):
            return values.astype(np.float16).view(np.uint16)
    bits = np.ascontiguousarray(values).view(np.uint32)
    rounded = bits + (np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1)))
    return (rounded >> np.uint32(16)).astype(np.uint16)


def half_up(values: Floats) -> NDArray[np.float16]:
    """float32 that are not negative as float16, rounded up; infinite where float16 ends."""
    with np.errstate(over="ignore"):
        near = values.astype(np.float16)
    below = near.astype(np.float32) < values
    return np.where(below, np.nextafter(near, np.float16(np.inf)), near)


def to_e4m3(values: Floats) -> Bytes:
    """Nearest e4m3 of each; beyond 448 the largest, NaN stays NaN."""
    bits = np.ascontiguousarray(values).view(np.uint32)
    sign = ((bits >> np.uint32(24)) & np.uint32(0x80)).astype(np.uint8)
    magnitude = np.abs(values)
    # From 2^-6 on: three bits of fraction, found by adding half of what is cut off, ties to even.
    plain = bits & np.uint32(0x7FFFFFFF)
    rounded = plain + (np.uint32(0x7FFFF) + ((plain >> np.uint32(20)) & np.uint32(1)))
    normal = ((rounded >> np.uint32(20)).astype(np.int32) - (120 << 3)).astype(np.uint8)
    # Below: multiples of 2^-9.
    with np.errstate(invalid="ignore"):
        small = np.rint(np.minimum(magnitude, 1.0) * np.float32(512)).astype(np.uint8)
        code = np.where(magnitude < np.float32(2**-6), small, normal)
        code = np.where(magnitude > np.float32(_E4M3_MOST), np.uint8(0x7E), code)
    return np.where(np.isnan(values), np.uint8(_E4M3_NAN), code) | sign


@cache
def e4m3_values() -> Floats:
    """The number of each of the 256 codes."""
    code = np.arange(256)
    exponent, fraction = (code >> 3) & 15, code & 7
    small = fraction * 2.0**-9
    normal = (1 + fraction / 8) * 2.0 ** (exponent - 7.0)
    values = np.where(exponent == 0, small, normal)
    values[(code & 0x7F) == _E4M3_NAN] = np.nan
    return np.where(code & 0x80, -values, values).astype(np.float32)
