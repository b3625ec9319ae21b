"""Rows ``index_bytes_per_block``, ``longest_lock_hold_ms`` and ``heartbeat_gap_p999_ms``: growing from nothing.

Each run is a process of its own: `python -m bench.meta_growth ours|bare BLOCKS`, which prints one sample as JSON.
"""

from __future__ import annotations

import json
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from types import TracebackType

from bench.grown import grow, open_unfilled
from bench.harness import Reach, Row, Sample, Settings, Sides, percentile
from tierkv.tuning import tune_interpreter, tune_malloc

PROMPT_BLOCKS = 1000
BEAT_S = 0.001
TIMEOUT_S = 600


class Growth:
    """One store grows from 0 to 10^6 blocks, while another thread wants to run every millisecond."""

    name = "growth"
    rows = (
        Row(
            "index_bytes_per_block",
            "bytes",
            "bytes",
            "resident memory that a store of host RAM gained for each block, LRU and events included; "
            "limit: a dict of as many 32-byte digests to small integers",
            Reach("value", "<=", 300),
        ),
        Row(
            "longest_lock_hold_ms",
            "hold_ms",
            "ms",
            "the longest time that one holder kept the catalog's lock; limit: the longest time that the same growth of "
            "a sharded dict kept one",
            Reach("value", "<=", 5),
        ),
        Row(
            "heartbeat_gap_p999_ms",
            "gap_ms",
            "ms",
            "p99.9 of how much later than asked for a thread woke that sleeps 1 ms at a time, garbage collector on; "
            "limit: the same beside a thread that fills a dict",
            Reach("value", "<=", 10),
        ),
    )

    @contextmanager
    def open(self, settings: Settings) -> Iterator[Sides]:
        def run(side: str) -> Sample:
            return in_fresh_process(side, settings.grown_blocks)

        yield Sides(partial(run, "ours"), partial(run, "bare"), most_rounds=2)


def in_fresh_process(side: str, blocks: int) -> Sample:
    """What a process gained is only seen in one that has freed nothing before."""
    command = [sys.executable, "-m", "bench.meta_growth", side, str(blocks)]
    done = subprocess.run(command, check=True, capture_output=True, text=True, timeout=TIMEOUT_S)
    sample: Sample = json.loads(done.stdout)
    return sample


def grow_ours(blocks: int) -> Sample:
    with open_unfilled(blocks) as client:
        before_bytes = resident_bytes()
        lock = TimedLock(client.store.catalog.lock)
        client.store.catalog.lock = lock  # type: ignore[assignment]
        with Heartbeat() as heart:
            for seed in range(blocks // PROMPT_BLOCKS):
                grow(client, PROMPT_BLOCKS, seed)
        gained_bytes = resident_bytes() - before_bytes
        return {
            "bytes": gained_bytes / (blocks // PROMPT_BLOCKS * PROMPT_BLOCKS),
            "hold_ms": lock.longest_s * 1e3,
            "gap_ms": heart.gap_p999_ms(),
        }


def grow_bare(blocks: int) -> Sample:
    before_bytes = resident_bytes()
    shards: list[dict[bytes, int]] = [{} for _ in range(256)]
    lock = TimedLock(threading.Lock())
    with Heartbeat() as heart:
        for first in range(0, blocks, 256):
            digests = [
                (number * 0x9E3779B97F4A7C15 % (1 << 256)).to_bytes(32, "little")
                for number in range(first, first + 256)
            ]
            with lock:
                for number, digest in enumerate(digests, first):
                    shards[digest[0]][digest] = number
    gained_bytes = resident_bytes() - before_bytes
    return {"bytes": gained_bytes / blocks, "hold_ms": lock.longest_s * 1e3, "gap_ms": heart.gap_p999_ms()}


def resident_bytes() -> int:
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * 4096


class TimedLock:
    """A lock that knows how long it was held at most."""

    def __init__(self, lock: threading.Lock) -> None:
        self._lock = lock
        self._since_s = 0.0
        self.longest_s = 0.0

    def __enter__(self) -> None:
        self._lock.acquire()
        self._since_s = time.perf_counter()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.longest_s = max(self.longest_s, time.perf_counter() - self._since_s)
        self._lock.release()


class Heartbeat:
    """A thread that sleeps a millisecond at a time and notes how much later than asked for it woke."""

    def __init__(self) -> None:
        self._stop = threading.Event()
        self._gaps_s: list[float] = []
        self._thread = threading.Thread(target=self._beat, name="bench-heartbeat", daemon=True)

    def _beat(self) -> None:
        while not self._stop.is_set():
            start_s = time.perf_counter()
            time.sleep(BEAT_S)
            self._gaps_s.append(time.perf_counter() - start_s - BEAT_S)

    def gap_p999_ms(self) -> float:
        return percentile(self._gaps_s, 0.999) * 1e3

    def __enter__(self) -> Heartbeat:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stop.set()
        self._thread.join()


if __name__ == "__main__":
    tune_malloc()
    tune_interpreter()
    print(json.dumps({"ours": grow_ours, "bare": grow_bare}[sys.argv[1]](int(sys.argv[2]))))
