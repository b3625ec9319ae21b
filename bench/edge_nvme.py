"""Rows ``nvme_read``, ``nvme_write`` and ``nvme_cpu``: the NVMe tier as the store's workers use it.

Batches of 64 blocks are split into calls of at most 8 MiB for as many workers as a store has by default on this
machine. Every block that was read is verified as the store does it. Every block that is written gets its frame, with a
checksum that is known from when it came into host RAM, and takes the place of one that is deleted in the same run. fio
does none of this, so the limit of ``nvme_cpu`` is fio's CPU plus one xxh3_64 for each block; the same is added to ours
where it writes.
"""

from __future__ import annotations

import os
import shutil
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path

import numpy as np

from bench.harness import Reach, Row, Sample, Settings, Sides, Worst
from bench.limit_copy import checksum_cpu_us_per_mib
from bench.limit_fio import Direction, Fio, find_fio
from bench.limit_pool import BarePool
from bench.memory import Blocks, require_equal
from bench.names import chain_of, header_for, keys_of, namespace_for
from tierkv import frame
from tierkv.clock import Deadline, SystemClock
from tierkv.config_table import disk_workers
from tierkv.errors import FrameError
from tierkv.executor import ThreadExecutor
from tierkv.tier import BlobTier, Item, Outcome, Want
from tierkv.units import ALIGN_BYTES, MIB

WORKERS = disk_workers(len(os.sched_getaffinity(0)))
CALL_BYTES = 8 * MIB
TIMEOUT_S = 60.0
LANE = "nvme"


class Batches:
    """Reads and writes random batches of blocks through the tier, on the store's kind of workers."""

    def __init__(self, tier: BlobTier, settings: Settings) -> None:
        self._tier = tier
        self._settings = settings
        self._clock = SystemClock()
        self._executor = ThreadExecutor(self._clock)
        self._executor.open_lane(LANE, WORKERS)
        self._chain = chain_of(namespace_for(settings.block_bytes), settings.disk_blocks)
        self._keys = keys_of(self._chain)
        self._random = np.random.default_rng(11)
        self.blocks = Blocks(settings.batch_blocks, settings.block_bytes)
        self._headers = Blocks(settings.batch_blocks, ALIGN_BYTES)
        self._checksums = [frame.checksum(view) for view in self.blocks.views]
        self._written: dict[int, int] = {}
        """Which of the source blocks each stored block is a copy of."""
        self._last: Sequence[int] = ()

    def fill(self) -> None:
        """Stores every block, twice, so that no later write meets a part of the disk that was never written."""
        for _ in range(2):
            for start in range(0, self._settings.disk_blocks, self._settings.batch_blocks):
                self._put(range(start, min(start + self._settings.batch_blocks, self._settings.disk_blocks)))

    def read(self) -> Sample:
        return self._timed(self._get)

    def write(self) -> Sample:
        sample = self._timed(self._put)
        return {**sample, "cpu_us_per_mib": sample["cpu_us_per_mib"] + checksum_cpu_us_per_mib(self.blocks)}

    def _timed(self, move: Callable[[Sequence[int]], None]) -> Sample:
        count = self._settings.batch_blocks
        order = self._random.permutation(self._settings.disk_blocks)[
            : self._settings.batches * count
        ].tolist()
        start_s, cpu_start_s = time.perf_counter(), time.process_time()
        for start in range(0, len(order), count):
            move(order[start : start + count])
        elapsed_s, cpu_s = time.perf_counter() - start_s, time.process_time() - cpu_start_s
        moved_mib = len(order) * self._settings.block_bytes / MIB
        return {"mib_per_s": moved_mib / elapsed_s, "cpu_us_per_mib": cpu_s * 1e6 / moved_mib}

    def check(self) -> None:
        """Reads one more batch into poisoned buffers and looks at every byte."""
        self.blocks.poison()
        numbers = self._random.permutation(self._settings.disk_blocks)[: self._settings.batch_blocks].tolist()
        self._get(numbers)
        for place, number in enumerate(numbers):
            require_equal(
                self.blocks.views[place], self.blocks.pattern(self._written[number]), f"block {number}"
            )
        self.restore()

    def restore(self) -> None:
        """Puts the patterns back into the buffers, which writes are made from."""
        for place, array in enumerate(self.blocks.arrays):
            np.copyto(array, self.blocks.pattern(place))

    def close(self) -> None:
        if stuck := self._executor.close(TIMEOUT_S):
            raise RuntimeError(f"threads are stuck in the tier: {stuck}")

    def _get(self, numbers: Sequence[int]) -> None:
        keys = self._keys

        def call(places: range, numbers: Sequence[int], deadline: Deadline) -> None:
            wants = [
                Want(keys[number], self._headers.views[place], self.blocks.views[place])
                for place, number in zip(places, numbers, strict=True)
            ]

            def on_done(index: int, outcome: Outcome) -> None:
                want = wants[index]
                _require_done(outcome, "get_into")
                frame.verify(frame.unpack(want.header), want.key, want.payload[: want.stored_bytes])

            self._tier.get_into(wants, deadline, on_done)

        self._run(call, numbers)

    def _put(self, numbers: Sequence[int]) -> None:
        known = [self._keys[number] for number in numbers if number in self._written]
        if known:
            self._tier.delete(known)

        def call(places: range, numbers: Sequence[int], deadline: Deadline) -> None:
            items = [self._item(place, number) for place, number in zip(places, numbers, strict=True)]
            self._tier.put_from(items, deadline, lambda index, outcome: _require_done(outcome, "put_from"))

        self._run(call, numbers)
        self._written.update((number, place) for place, number in enumerate(numbers))

    def _item(self, place: int, number: int) -> Item:
        key, payload, header = self._keys[number], self.blocks.views[place], self._headers.views[place]
        known = self._checksums[place]
        header[: frame.HEADER_BYTES] = frame.pack(header_for(self._chain, number, key, len(payload), known))
        return Item(key, header, payload, len(payload))

    def _run(self, call: Callable[[range, Sequence[int], Deadline], None], numbers: Sequence[int]) -> None:
        """Splits a batch into calls, hands them to the workers and waits for the last one."""
        size = max(1, CALL_BYTES // self._settings.block_bytes)
        deadline = Deadline(self._clock, TIMEOUT_S)
        calls = [range(start, min(start + size, len(numbers))) for start in range(0, len(numbers), size)]
        tracker = _Tracker(len(calls))
        for places in calls:
            work = partial(call, places, [numbers[place] for place in places], deadline)
            self._executor.run(LANE, partial(tracker.guard, work), tracker.one_done)
        tracker.wait()


class _Tracker:
    """Counts calls that are still out, and keeps the first error of a worker for the one who waits."""

    def __init__(self, calls: int) -> None:
        self._left = calls
        self._lock = threading.Lock()
        self._over = threading.Event()
        self._errors: list[RuntimeError | FrameError] = []

    def guard(self, call: Callable[[], None]) -> None:
        try:
            call()
        except (RuntimeError, FrameError) as error:
            self._errors.append(error)

    def one_done(self, _: None) -> None:
        with self._lock:
            self._left -= 1
            if not self._left:
                self._over.set()

    def wait(self) -> None:
        if not self._over.wait(TIMEOUT_S):
            raise RuntimeError("the tier did not finish a batch in time")
        if self._errors:
            raise self._errors[0]


def _require_done(outcome: Outcome, what: str) -> None:
    if outcome is not Outcome.DONE:
        raise RuntimeError(f"{what} ended with {outcome.value}")


class NvmeEdge:
    """One direction, read or write; throughput and CPU come from the same samples."""

    def __init__(self, direction: Direction) -> None:
        self._direction: Direction = direction
        self.name = f"nvme_{direction}"
        self.rows = (
            Row(
                f"nvme_{direction}",
                "mib_per_s",
                "MiB/s",
                f"{direction}s of 1 MiB blocks, batches of 64, {WORKERS} workers, O_DIRECT, each block "
                f"{'verified' if direction == 'read' else 'framed, in the place of a deleted one'}; "
                "limit: fio, depth 16",
                Reach("ratio", ">=", 0.9),
            ),
            Row(
                f"nvme_cpu_{direction}",
                "cpu_us_per_mib",
                "us/MiB",
                f"CPU of the process for a {direction} of a MiB with one xxh3_64; limit: fio's usr + sys, "
                "and one xxh3_64",
                Reach("ratio", "<=", 1.5),
            ),
        )

    @contextmanager
    def open(self, settings: Settings) -> Iterator[Sides]:
        with ExitStack() as stack:
            settings.directory.mkdir(parents=True, exist_ok=True)
            folder = Path(tempfile.mkdtemp(prefix="nvme-", dir=settings.directory))
            stack.callback(shutil.rmtree, folder)
            batches = stack.enter_context(_batches(folder / "tier", settings))
            limit = stack.enter_context(_disk_limit(folder / "limit", batches.blocks, settings))
            blocks = settings.batches * settings.batch_blocks

            def limit_run() -> Sample:
                sample = limit.run(self._direction, blocks)
                checksum_us = checksum_cpu_us_per_mib(batches.blocks)
                return {**sample, "cpu_us_per_mib": sample["cpu_us_per_mib"] + checksum_us}

            yield Sides(
                batches.read if self._direction == "read" else batches.write,
                limit_run,
                batches.check,
                (limit.name,),
            )


NVME_CPU = Worst("nvme_cpu", ("nvme_cpu_read", "nvme_cpu_write"))


@contextmanager
def _batches(path: Path, settings: Settings) -> Iterator[Batches]:
    tier = open_nvme(path, settings)
    tier.start()
    try:
        batches = Batches(tier, settings)
        try:
            batches.fill()
            yield batches
        finally:
            batches.close()
    finally:
        tier.close(Deadline(SystemClock(), TIMEOUT_S))


def open_nvme(path: Path, settings: Settings) -> BlobTier:
    """The tier with room for all blocks of the measurement and a batch on its way."""
    from tierkv.tiers.nvme import NvmeTier

    blocks = settings.disk_blocks + 2 * settings.batch_blocks
    capacity_bytes = blocks * (settings.block_bytes + 2 * ALIGN_BYTES) + 16 * MIB
    return NvmeTier(path, capacity_bytes, clock=SystemClock(), min_free_bytes=0, workers=WORKERS)


@contextmanager
def _disk_limit(path: Path, blocks: Blocks, settings: Settings) -> Iterator[Fio | BarePool]:
    """fio, or the bare pool, on a file that was written in full."""
    with open(path, "wb") as file:
        file.writelines(blocks.views[number % len(blocks)] for number in range(settings.disk_blocks))
        file.flush()
        os.fsync(file.fileno())
    fio = find_fio(path, settings.block_bytes, settings.disk_blocks)
    if fio is not None:
        yield fio
        return
    pool = BarePool(path, settings.block_bytes, settings.disk_blocks, blocks.views)
    try:
        yield pool
    finally:
        pool.close()
