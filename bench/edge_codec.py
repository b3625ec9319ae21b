"""Rows ``codec_...``: what each codec makes of real keys and values, and how fast; beside lz4, zstd and blosc2."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import numpy as np

from bench.harness import Row, Sample, Settings, Sides, Unavailable
from bench.real_kv import blocks
from tierkv.codec import Codec, codec_named, fitted
from tierkv.layout import LayerGroup
from tierkv.units import MIB

MOST_BLOCKS = 4
DTYPE = "bfloat16"


@dataclass(frozen=True)
class Way:
    """Something that makes blocks smaller. ``None`` from ``pack``: it does not fit into as many bytes."""

    pack: Callable[[bytes, memoryview], int | None]
    unpack: Callable[[memoryview, memoryview], None]


class CodecEdge:
    """One codec over a few blocks, there and back. Shown, not judged."""

    def __init__(self, name: str) -> None:
        self._codec = name
        self.name = f"codec_{name}"
        what = f"{name} over bf16 blocks of SmolLM2 on a text, a second of one thread's CPU"
        copy = "limit: np.copyto of the same bytes"
        self.rows = (
            Row(f"codec_{name}_encode", "encode_gb", "GB/s", f"{what}: encode, decoded bytes; {copy}"),
            Row(f"codec_{name}_decode", "decode_gb", "GB/s", f"{what}: decode, decoded bytes; {copy}"),
            Row(f"codec_{name}_ratio", "ratio", "x", f"{what}: decoded bytes / stored bytes; limit: 1"),
        )

    @contextmanager
    def open(self, settings: Settings) -> Iterator[Sides]:
        plain, group = blocks(min(MOST_BLOCKS, max(1, settings.memory_blocks // 8)), DTYPE)
        way = way_of(self._codec, group)
        size = len(plain[0])
        stored = [memoryview(bytearray(2 * size)) for _ in plain]
        after = [memoryview(bytearray(size)) for _ in plain]
        lengths = [0] * len(plain)

        def ours() -> Sample:
            begun_s = time.thread_time()
            for i, block in enumerate(plain):
                length = way.pack(block, stored[i])
                lengths[i] = size if length is None else length
            packed_s = time.thread_time()
            for i in range(len(plain)):
                way.unpack(stored[i][: lengths[i]], after[i])
            end_s = time.thread_time()
            total = len(plain) * size
            return {
                "encode_gb": total / 1e9 / (packed_s - begun_s),
                "decode_gb": total / 1e9 / (end_s - packed_s),
                "ratio": total / sum(lengths),
            }

        def limit() -> Sample:
            begun_s = time.thread_time()
            for block, target in zip(plain, after, strict=True):
                np.copyto(np.frombuffer(target, np.uint8), np.frombuffer(block, np.uint8))
            speed = len(plain) * size / 1e9 / (time.thread_time() - begun_s)
            return {"encode_gb": speed, "decode_gb": speed, "ratio": 1.0}

        def check() -> None:
            ours()
            for block, target in zip(plain, after, strict=True):
                if self._codec not in ("int8", "fp8_e4m3") and target != block:
                    raise RuntimeError(f"{self._codec}: the bytes came back otherwise")

        yield Sides(ours, limit, check, (f"blocks of {size / MIB:.1f} MiB, 128 tokens",), most_rounds=4)


def way_of(name: str, group: LayerGroup) -> Way:
    """Raises ``Unavailable`` for a package that is not installed."""
    if name == "zstd":
        return _zstd()
    if name == "blosc2":
        return _blosc2()
    codec: Codec = fitted(codec_named(name), group, DTYPE)
    return Way(lambda plain, room: codec.encode_into(memoryview(plain), room), codec.decode_into)


def _zstd() -> Way:
    zstandard = _imported("zstandard")
    compressor, decompressor = zstandard.ZstdCompressor(level=1), zstandard.ZstdDecompressor()
    return Way(
        lambda plain, room: _put(compressor.compress(plain), room),
        lambda stored, target: _take(decompressor.decompress(stored), target),
    )


def _blosc2() -> Way:
    """With its own byte planes (the filter ``shuffle``) and zstd behind them, in one thread."""
    blosc2 = _imported("blosc2")
    blosc2.set_nthreads(1)
    filters = {"codec": blosc2.Codec.ZSTD, "clevel": 1, "filter": blosc2.Filter.SHUFFLE}
    return Way(
        lambda plain, room: _put(blosc2.compress(plain, typesize=2, **filters), room),
        lambda stored, target: _take(blosc2.decompress(bytes(stored)), target),
    )


def _imported(package: str) -> Any:
    """Raises ``Unavailable`` also for one that is there and cannot be imported: the other rows are measured."""
    if find_spec(package) is None:
        raise Unavailable(f"the package {package!r} is not installed: pip install {package}")
    try:
        return import_module(package)
    except ImportError as error:
        raise Unavailable(f"the package {package!r} cannot be imported: {error}") from error


def _put(packed: bytes, room: memoryview) -> int | None:
    if len(packed) > len(room):
        return None
    np.copyto(np.frombuffer(room[: len(packed)], np.uint8), np.frombuffer(packed, np.uint8))
    return len(packed)


def _take(plain: bytes, target: memoryview) -> None:
    np.copyto(np.frombuffer(target, np.uint8), np.frombuffer(plain, np.uint8))
