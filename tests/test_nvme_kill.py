"""``kill -9`` of the owner at every single disk call of a life that stores, deletes, reuses slots, clears, checkpoints.

A child process does the work and says through a pipe what it was told; the parent then opens the directory. What was
acknowledged must be there (the page cache outlives a process), what was forgotten must not be, and whatever else is
there must be right.
"""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from tests.crash_points import PointDisk, Points
from tests.nvme_support import (
    check_names,
    deadline,
    disk_bytes,
    found,
    logs,
    make_tier,
    put,
    put_all,
    quick_folder,
    running,
)
from tierkv.ids import BlockKey
from tierkv.testing.faults.disk import ShimDisk
from tierkv.testing.payloads import key_of, tenant_of
from tierkv.testing.threads import run_together
from tierkv.tier import Outcome
from tierkv.tiers.nvme import NvmeTier
from tierkv.tiers.nvme_disk import Buffers, Disk
from tierkv.units import KIB

CAPACITY_BYTES = 512 * KIB
KEYS = [key_of(i) for i in range(34)]
CLEARED = [key_of(i, tenant=5) for i in range(4)]

Say = Callable[..., None]


class KillingDisk(ShimDisk):
    """Kills its process at the n-th call, or, with ``half``, in the middle of the n-th write."""

    def __init__(self, fatal_call: int, half: bool) -> None:
        super().__init__(self._count)
        self._left = fatal_call
        self._half = half

    def _count(self, call: str, path: str, offset: int) -> None:
        if not self._half:
            self._left -= 1
            if self._left == 0:
                os.kill(os.getpid(), signal.SIGKILL)

    def pwritev(self, fd: int, buffers: Buffers, offset: int) -> int:
        if self._half:
            self._left -= 1
            if self._left == 0:
                _write_half(fd, buffers, offset)
                os.kill(os.getpid(), signal.SIGKILL)
        return super().pwritev(fd, buffers, offset)


def _write_half(fd: int, buffers: Buffers, offset: int) -> None:
    """Of a frame the header page, of a single page nothing, of records half the bytes."""
    length_bytes = sum(map(len, buffers))
    if length_bytes % 4096:
        os.pwrite(fd, b"".join(buffers)[: length_bytes // 2], offset)
    elif len(buffers) > 1:
        os.pwritev(fd, buffers[:1], offset)


def live(tier: NvmeTier, say: Say) -> None:
    """One life. ``say(verb, *keys)`` before and after each thing that must be remembered."""

    def store(keys: list[BlockKey], **settings: Any) -> None:
        say("storing", keys)
        done = put(tier, keys, **settings)
        say("stored", [key for key, outcome in zip(keys, done, strict=True) if outcome is Outcome.DONE])

    def delete(keys: list[BlockKey]) -> None:
        say("deleting", keys)
        tier.delete(keys)
        say("gone", keys)

    store(KEYS[:6])
    store(CLEARED)
    delete(KEYS[:3])
    store(KEYS[6:10])  # into slots that were just freed
    store(KEYS[5:6], expires_ms=4_000_000_000_000)  # the same block, written anew
    say("deleting", CLEARED)
    assert tier.clear(tenant_of(5), deadline()).complete
    say("gone", CLEARED)
    for start in range(10, 34, 4):  # more than the log takes before a checkpoint
        store(KEYS[start : start + 4])
        delete(KEYS[start : start + 3])
    assert tier.status()["checkpoints"], "the life is too short to reach a checkpoint"


def live_in_threads(tier: NvmeTier, say: Say) -> None:
    """Four threads that never stop, each with keys of its own, in a tier that is full most of the time."""

    def work(number: int) -> None:
        dice = random.Random(number)
        mine = KEYS[number::4]
        while True:
            keys = dice.sample(mine, 3)
            say("storing", keys)
            done = put(tier, keys)
            say("stored", [key for key, outcome in zip(keys, done, strict=True) if outcome is Outcome.DONE])
            keys = dice.sample(mine, 3)
            say("deleting", keys)
            tier.delete(keys)
            say("gone", keys)

    run_together([partial(work, number) for number in range(4)], 60.0)


Said = list[tuple[str, list[BlockKey]]]


def run_child(
    path: Path, disk: Disk, life: Callable[[NvmeTier, Say], None] = live, lines: int | None = None
) -> tuple[int, Said]:
    """The child's exit status and what it said. After ``lines`` lines, if that is given, the parent kills it."""
    reader, writer = os.pipe()
    pid = os.fork()
    if pid == 0:
        status = 1
        try:
            os.close(reader)

            def say(verb: str, keys: list[BlockKey]) -> None:
                os.write(writer, json.dumps([verb, [key.hex() for key in keys]]).encode() + b"\n")

            tier = make_tier(path, CAPACITY_BYTES, disk=disk)
            tier.start()
            life(tier, say)
            tier.close(deadline())
            status = 0
        finally:
            os._exit(status)
    os.close(writer)
    said = []
    with os.fdopen(reader) as output:
        for line in output:
            said.append(json.loads(line))
            if len(said) == lines:
                os.kill(pid, signal.SIGKILL)
    _, status = os.waitpid(pid, 0)
    return status, [(verb, [BlockKey(bytes.fromhex(key)) for key in keys]) for verb, keys in said]


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    with quick_folder(tmp_path) as folder:
        yield folder


@pytest.mark.parametrize("half", [False, True], ids=["before the call", "in the middle of the write"])
def test_d10_d21_d23_killed_at_every_call(folder: Path, half: bool) -> None:
    for fatal_call in range(1, 1000):
        path = folder / str(fatal_call)
        status, said = run_child(path, KillingDisk(fatal_call, half))
        if os.WIFEXITED(status):
            assert os.WEXITSTATUS(status) == 0, "the life failed by itself"
            assert fatal_call > (30 if half else 100), "the life is too short"
            return
        assert os.WTERMSIG(status) == signal.SIGKILL
        check_after(path, said, recovery="quiet" if half else "strict")
        shutil.rmtree(path, ignore_errors=True)  # it may have died before it was made
    pytest.fail("the life never ends")


@pytest.mark.parametrize("lines", [40, 160, 640, 1280])
def test_d21_d23_killed_while_threads_work(folder: Path, lines: int) -> None:
    status, said = run_child(folder / "nvme", Disk(), live_in_threads, lines)
    assert os.WTERMSIG(status) == signal.SIGKILL
    check_after(folder / "nvme", said, recovery="strict")


def test_d22_d23_checkpoints_that_are_never_finished_leave_no_pile_of_logs(folder: Path) -> None:
    """Every life dies in its first checkpoint."""
    path = folder / "nvme"
    said: Said = []
    for _ in range(8):
        status, more = run_child(path, PointDisk(Points("checkpoint: opened")))
        said += more
        assert os.WTERMSIG(status) == signal.SIGKILL
        assert len(logs(path)) <= 4, [log.name for log in logs(path)]
    check_after(path, said, recovery="strict")
    assert len(logs(path)) == 1


def check_after(path: Path, said: Said, recovery: str) -> None:
    must: set[BlockKey] = set()
    may: set[BlockKey] = set()
    for verb, keys in said:
        may = (may | set(keys)) if verb in ("storing", "deleting") else may - set(keys)
        must = (must | set(keys)) if verb == "stored" else must - set(keys)
    with running(path, CAPACITY_BYTES, recovery=recovery) as tier:
        everything = [*KEYS, *CLEARED]
        scanned = [header.key for header in tier.scan()]
        there = found(tier, everything)
        assert must <= set(there), "an acknowledged block is gone"
        assert set(there) <= must | may, "a forgotten block is back"
        assert sorted(scanned) == sorted(there)
        assert tier.usage().blocks == len(there)
        tier.delete(everything)
        assert tier.usage().used_bytes == 0
        put_all(tier, KEYS[:8])
        assert found(tier, everything) == KEYS[:8]
    check_names(path)
    assert disk_bytes(path) <= CAPACITY_BYTES
