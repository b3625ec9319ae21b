"""The limit of a look-up: a bare dict and a bare counter under a bare lock, with nothing that a store needs beside."""

from __future__ import annotations

import threading
from collections.abc import Sequence

import numpy as np
import xxhash

from bench.memory import Blocks


class BareIndex:
    """Pins and unpins runs of hashes."""

    def __init__(self, hashes: Sequence[bytes]) -> None:
        self._numbers = {block_hash: number for number, block_hash in enumerate(hashes)}
        self._pins = [0] * len(hashes)
        self._lock = threading.Lock()

    def pin_and_unpin(self, hashes: Sequence[bytes]) -> int:
        """Finds every hash and pins it, then unpins all; returns how many were found."""
        pins = self._pins
        with self._lock:
            found = list(map(self._numbers.get, hashes))
            for number in found:
                assert number is not None
                pins[number] += 1
        with self._lock:
            for number in found:
                assert number is not None
                pins[number] -= 1
        return len(found)


class BareStore:
    """Copies blocks with their checksums into buffers that it goes round, and pins and unpins them."""

    def __init__(self, blocks: int, block_bytes: int) -> None:
        self._buffers = Blocks(blocks, block_bytes).arrays
        self._next = 0
        self._found: dict[bytes, tuple[int, int]] = {}
        self._pins = [0] * blocks
        self._lock = threading.Lock()

    def put(self, hashes: Sequence[bytes], sources: Sequence[memoryview]) -> None:
        for block_hash, source in zip(hashes, sources, strict=True):
            number = self._next
            self._next = (number + 1) % len(self._buffers)
            target = self._buffers[number]
            np.copyto(target, np.frombuffer(source, np.uint8))
            checksum = xxhash.xxh3_64_intdigest(target)
            with self._lock:
                self._found[block_hash] = (number, checksum)

    def pin_and_unpin(self, hashes: Sequence[bytes]) -> None:
        pins = self._pins
        with self._lock:
            found = [self._found[block_hash][0] for block_hash in hashes]
            for number in found:
                pins[number] += 1
        with self._lock:
            for number in found:
                pins[number] -= 1
