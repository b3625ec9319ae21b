"""The limit of a disk where fio is not installed: eight threads of bare `preadv`/`pwritev` with O_DIRECT.

Each thread takes the next block of the batch when it is done with its last, on buffers that were touched before.
"""

from __future__ import annotations

import os
import random
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from bench.harness import Sample
from bench.limit_fio import Direction
from tierkv.units import MIB

THREADS = 8
NAME = f"a bare preadv/pwritev pool of {THREADS} threads with O_DIRECT (fio is not installed)"


class BarePool:
    """Reads and writes random blocks of one file. Close it at the end."""

    name = NAME

    def __init__(self, path: Path, block_bytes: int, file_blocks: int, buffers: Sequence[memoryview]) -> None:
        self._descriptor = os.open(path, os.O_RDWR | os.O_DIRECT | os.O_CLOEXEC)
        self._pool = ThreadPoolExecutor(THREADS, thread_name_prefix="bench-pool")
        self._block_bytes = block_bytes
        self._file_blocks = file_blocks
        self._buffers = buffers
        self._random = random.Random(7)

    def run(self, direction: Direction, blocks: int) -> Sample:
        """The same measures as fio: MiB/s, and the CPU of this process for each MiB."""
        move = os.preadv if direction == "read" else os.pwritev
        places = self._random.sample(range(self._file_blocks), blocks)
        start_s, cpu_start_s = time.perf_counter(), time.process_time()
        for start in range(0, blocks, len(self._buffers)):
            batch = places[start : start + len(self._buffers)]
            for future in [
                self._pool.submit(self._move, move, place, buffer)
                for place, buffer in zip(batch, self._buffers, strict=False)
            ]:
                future.result()
        elapsed_s, cpu_s = time.perf_counter() - start_s, time.process_time() - cpu_start_s
        moved_mib = blocks * self._block_bytes / MIB
        return {"mib_per_s": moved_mib / elapsed_s, "cpu_us_per_mib": cpu_s * 1e6 / moved_mib}

    def _move(
        self, move: Callable[[int, list[memoryview], int], int], place: int, buffer: memoryview
    ) -> None:
        if move(self._descriptor, [buffer], place * self._block_bytes) != self._block_bytes:
            raise RuntimeError(f"the bare pool moved less than a block at block {place}")

    def close(self) -> None:
        self._pool.shutdown()
        os.close(self._descriptor)
