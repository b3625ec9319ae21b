"""The limit of a look-up: a bare dict and a bare counter under a bare lock, with nothing that a store needs beside."""

from __future__ import annotations

import threading
from collections.abc import Sequence


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
