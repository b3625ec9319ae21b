"""Codecs change how a block's bytes are stored on an edge. ``raw`` is the default, ``lz4`` is for data with repeats.

The byte in a frame's header says which codec made the stored bytes, so a block that did not shrink is simply stored
raw. Lossy codecs (``tierkv.codec_scaled``) are part of the namespace, since they change the bytes that come back:
they encode blocks of no other namespace. Which one loses and gains how much is in ``docs/codecs.md``.
"""

from __future__ import annotations

from functools import cache
from typing import Protocol

from tierkv.errors import CodecAbsent, CodecError, ConfigError
from tierkv.layout import LayerGroup


class Codec(Protocol):
    """Turns decoded bytes into stored bytes and back. Stateless and thread-safe."""

    name: str
    code: int
    """The byte in the frame header. Never reused."""
    identity: bool
    """Stored bytes are the decoded bytes, so no copy is needed."""
    lossless: bool

    def encode_into(self, decoded: memoryview, stored: memoryview) -> int | None:
        """Writes the stored form to the front of ``stored``; returns its length, or ``None`` when it does not fit."""
        ...

    def decode_into(self, stored: memoryview, decoded: memoryview) -> None:
        """Fills all of ``decoded``. Raises ``CodecError`` when the stored bytes do not give exactly that many."""
        ...


class RawCodec:
    """Bytes as they are."""

    name = "raw"
    code = 0
    identity = True
    lossless = True

    def encode_into(self, decoded: memoryview, stored: memoryview) -> int | None:
        if len(stored) < len(decoded):
            return None
        _copy(decoded, stored[: len(decoded)])
        return len(decoded)

    def decode_into(self, stored: memoryview, decoded: memoryview) -> None:
        if len(stored) != len(decoded):
            raise CodecError(f"raw: {len(stored)} stored bytes for a block of {len(decoded)}")
        _copy(stored, decoded)


class Lz4Codec:
    """LZ4 block format, fast mode. Gains nothing on raw bf16 KV; meant for sparse or padded blocks and slow links."""

    name = "lz4"
    code = 1
    identity = False
    lossless = True

    def encode_into(self, decoded: memoryview, stored: memoryview) -> int | None:
        import lz4.block

        packed = lz4.block.compress(decoded, mode="fast", store_size=False)
        if len(packed) > len(stored):
            return None
        _copy(memoryview(packed), stored[: len(packed)])
        return len(packed)

    def decode_into(self, stored: memoryview, decoded: memoryview) -> None:
        import lz4.block

        try:
            plain = lz4.block.decompress(stored, uncompressed_size=len(decoded))
        except lz4.block.LZ4BlockError as error:
            raise CodecError(f"lz4: {error}") from error
        if len(plain) != len(decoded):
            raise CodecError(f"lz4: {len(plain)} bytes came out for a block of {len(decoded)}")
        _copy(memoryview(plain), decoded)


def _copy(source: memoryview, target: memoryview) -> None:
    # numpy lets other threads run while it copies; assignment to a memoryview does not.
    import numpy as np

    np.copyto(np.frombuffer(target, dtype=np.uint8), np.frombuffer(source, dtype=np.uint8))


RAW = RawCodec()
LZ4 = Lz4Codec()
NAMES = ("raw", "lz4", "planes_zstd", "int8", "fp8_e4m3")
LOSSY = ("int8", "fp8_e4m3")
"""Those that a namespace has to name."""


@cache
def _by_code() -> dict[int, Codec]:
    # Those that do arithmetic need numpy, which `import tierkv` does not load.
    from tierkv.codec_planes import PLANES_ZSTD
    from tierkv.codec_scaled import FP8_E4M3, INT8

    codecs: tuple[Codec, ...] = (RAW, LZ4, PLANES_ZSTD, INT8, FP8_E4M3)
    return {codec.code: codec for codec in codecs}


def codec_named(name: str) -> Codec:
    """The codec of that name. Raises ``ConfigError`` with the names there are, ``MissingDependency`` for one that
    needs a package."""
    if name not in NAMES:
        raise ConfigError("codec", name, f"unknown; use one of {sorted(NAMES)}")
    codec = next(codec for codec in _by_code().values() if codec.name == name)
    require = getattr(codec, "require", None)
    if require is not None:
        require()
    return codec


def codec_with_code(code: int) -> Codec:
    """The codec that wrote a frame. Raises ``CodecAbsent`` for a code that this release does not know."""
    codec = _by_code().get(code)
    if codec is None:
        raise CodecAbsent(f"codec {code} is not known to this release")
    return codec


def fitted(codec: Codec, group: LayerGroup, dtype: str) -> Codec:
    """The codec for blocks of one layer group: some look at the numbers that a page is made of."""
    fit = getattr(codec, "fitted", None)
    if fit is None:
        return codec
    made: Codec = fit(group, dtype)
    return made
