"""``planes_zstd``: the bytes of numbers sorted into planes (all first bytes, then all second ones ...), each
compressed.

A bf16 number's upper byte is sign and exponent, which neighbours share; its lower byte is noise. Apart, the upper
plane shrinks by three times or more and the lower one is kept as it is; mixed, nothing shrinks. Lossless.

What is stored (little-endian): version (1 byte), item bytes (1), for each plane its stored length (4; the highest bit
says that it is kept as it is), then the planes, then the bytes behind the last whole number.
"""

from __future__ import annotations

import struct
import threading
from collections.abc import Callable
from functools import cache
from importlib.util import find_spec
from typing import Any

import numpy as np

from tierkv.errors import CodecAbsent, CodecError, MissingDependency
from tierkv.layout import ITEM_BYTES, LayerGroup

_VERSION = 1
_AS_IT_IS = 1 << 31
_LEVEL = 1
_WORTH = 0.97
"""A plane that does not shrink to this share is kept as it is."""


class PlanesZstdCodec:
    """Needs the package ``zstandard`` (the extra ``zstd``) or Python 3.14's own. Without a shape it takes numbers of
    two bytes, which is right for bf16 and fp16 and loses nothing anywhere."""

    name = "planes_zstd"
    code = 2
    identity = False
    lossless = True

    def __init__(self, item_bytes: int = 2) -> None:
        self._item_bytes = item_bytes
        self._local = threading.local()

    def fitted(self, group: LayerGroup, dtype: str) -> PlanesZstdCodec:
        """The codec for numbers of this kind."""
        narrow = dtype.startswith(("fp8", "float8", "int8", "uint8"))
        return planes_of(ITEM_BYTES.get(dtype, 1 if narrow else 2))

    def require(self) -> None:
        """Raises ``MissingDependency`` where nothing compresses."""
        self._zstd()

    def encode_into(self, decoded: memoryview, stored: memoryview) -> int | None:
        raw = np.frombuffer(decoded, np.uint8)
        item = self._item_bytes
        numbers = len(raw) // item
        planes = np.ascontiguousarray(raw[: numbers * item].reshape(numbers, item).T)
        pieces: list[bytes | memoryview] = []
        front = struct.pack("<BB", _VERSION, item)
        for plane in planes:
            packed = self._zstd().compress(plane.data)
            if len(packed) > _WORTH * numbers:
                front += struct.pack("<I", numbers | _AS_IT_IS)
                pieces.append(plane.data)
            else:
                front += struct.pack("<I", len(packed))
                pieces.append(packed)
        pieces = [front, *pieces, raw[numbers * item :].data]
        length = sum(len(piece) for piece in pieces)
        if length > len(stored):
            return None
        out, at = np.frombuffer(stored, np.uint8), 0
        for piece in pieces:
            out[at : at + len(piece)] = np.frombuffer(piece, np.uint8)
            at += len(piece)
        return length

    def decode_into(self, stored: memoryview, decoded: memoryview) -> None:
        if len(stored) < 2:
            raise CodecError(f"planes_zstd: {len(stored)} stored bytes")
        version, item = struct.unpack_from("<BB", stored)
        if version != _VERSION or item not in (1, 2, 4, 8) or len(stored) < 2 + 4 * item:
            raise CodecError(f"planes_zstd: version {version}, numbers of {item} bytes, {len(stored)} stored")
        numbers, rest = divmod(len(decoded), item)
        lengths = struct.unpack_from(f"<{item}I", stored, 2)
        at = 2 + 4 * item
        out = np.frombuffer(decoded, np.uint8)
        places = out[: numbers * item].reshape(numbers, item)
        for plane, said in enumerate(lengths):
            length = said & ~_AS_IT_IS
            piece = stored[at : at + length]
            if len(piece) != length:
                raise CodecError("planes_zstd: a plane is cut")
            plain = piece if said & _AS_IT_IS else self._unpacked(piece, numbers)
            if len(plain) != numbers:
                raise CodecError(f"planes_zstd: a plane of {len(plain)} bytes, it should have {numbers}")
            places[:, plane] = np.frombuffer(plain, np.uint8)
            at += length
        if len(stored) - at != rest:
            raise CodecError(f"planes_zstd: {len(stored) - at} bytes behind the planes, expected {rest}")
        out[numbers * item :] = np.frombuffer(stored[at:], np.uint8)

    def _unpacked(self, piece: memoryview, numbers: int) -> bytes:
        try:
            zstd = self._zstd()
        except MissingDependency as error:  # somebody else wrote it
            raise CodecAbsent(f"planes_zstd: {error}") from error
        return zstd.decompress(piece, numbers)

    def _zstd(self) -> _Zstd:
        """Of this thread: contexts are dear to make and not to be shared."""
        found: _Zstd | None = getattr(self._local, "zstd", None)
        if found is None:
            found = self._local.zstd = _zstd_of_this_python()
        return found


class _Zstd:
    """Compression and its inverse, whichever package they come from."""

    def __init__(
        self,
        compress: Callable[[Any], bytes],
        decompress: Callable[[Any, int], bytes],
        error: type[Exception],
    ) -> None:
        self.compress = compress
        self._decompress = decompress
        self._error = error

    def decompress(self, packed: memoryview, most_bytes: int) -> bytes:
        """Raises ``CodecError`` for what is damaged or longer than ``most_bytes``."""
        try:
            return self._decompress(packed, most_bytes)
        except (self._error, ValueError, EOFError) as error:
            raise CodecError(f"planes_zstd: {error}") from error


def _zstd_of_this_python() -> _Zstd:
    """Raises ``MissingDependency``."""
    if find_spec("zstandard") is not None:
        import zstandard

        compressor = zstandard.ZstdCompressor(level=_LEVEL)
        decompressor = zstandard.ZstdDecompressor()

        def decompress(packed: Any, most_bytes: int) -> bytes:
            size = zstandard.frame_content_size(packed)
            if size > most_bytes:
                raise CodecError(f"planes_zstd: a plane of {size} bytes, it should have {most_bytes}")
            return bytes(decompressor.decompress(packed, max_output_size=most_bytes + 1))

        return _Zstd(compressor.compress, decompress, zstandard.ZstdError)
    if find_spec("compression") is not None and find_spec("compression.zstd") is not None:
        from importlib import import_module

        zstd: Any = import_module("compression.zstd")

        def decompress_here(packed: Any, most_bytes: int) -> bytes:
            return bytes(zstd.ZstdDecompressor().decompress(packed, max_length=most_bytes + 1))

        return _Zstd(lambda plain: zstd.compress(plain, _LEVEL), decompress_here, zstd.ZstdError)
    raise MissingDependency("codec", PlanesZstdCodec.name, "zstandard", "zstd")


@cache
def planes_of(item_bytes: int) -> PlanesZstdCodec:
    """The codec for numbers of so many bytes; one for all, since each thread keeps what it has made."""
    return PlanesZstdCodec(item_bytes)


PLANES_ZSTD = planes_of(2)
