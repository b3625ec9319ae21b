"""Memory for measurements: page-aligned, touched before the first run, with contents that can be checked."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from tierkv.arena import Arena
from tierkv.units import align_up


class Blocks:
    """``count`` page-aligned buffers of one size, touched; block i starts with the pattern of i in it.

    They lie in an ``Arena``, so that both sides of a measurement work on the kind of memory that the store has.
    """

    def __init__(self, count: int, block_bytes: int, *, seed: int = 0) -> None:
        room_bytes = count * align_up(block_bytes)
        self._arena = Arena(room_bytes, room_bytes)
        slots = self._arena.reserve(count, block_bytes)
        assert slots is not None, "the arena was made for them"
        self.block_bytes = block_bytes
        self._seed = seed
        self.views = [self._arena.view(slot)[:block_bytes] for slot in slots]
        self.arrays: list[NDArray[np.uint8]] = [np.frombuffer(view, dtype=np.uint8) for view in self.views]
        for i in range(count):
            np.copyto(self.arrays[i], self.pattern(i))

    def __len__(self) -> int:
        return len(self.views)

    def pattern(self, number: int) -> NDArray[np.uint8]:
        """The bytes of block ``number``: random, so that nothing on the way can shrink them."""
        return np.random.default_rng((self._seed, number)).integers(0, 256, self.block_bytes, dtype=np.uint8)

    def poison(self) -> None:
        for array in self.arrays:
            array.fill(0xAA)


def require_equal(found: NDArray[np.uint8] | memoryview, wanted: NDArray[np.uint8], what: str) -> None:
    """Raises unless the bytes are equal: a fast wrong answer is none."""
    if not np.array_equal(np.frombuffer(found, dtype=np.uint8), wanted):
        raise RuntimeError(f"{what}: the bytes differ from what was stored")
