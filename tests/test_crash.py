"""``kill -9`` of a process that stores, loads, flushes and clears: at random moments and at every named point.

The same directory and the same server go through all crashes of a run, so that what one leaves behind meets the next.
A failing run names its seed; ``CRASH_SEED`` replays the same kills in the same order (the threads' own order is the
machine's).
"""

from __future__ import annotations

import contextlib
import os
import random
import shutil
import signal
import time
from collections import Counter
from pathlib import Path

import pytest

from tests.client_support import chain_of
from tests.crash_check import Ledger, Seen, check_after_crash
from tests.crash_life import (
    BLOCKS,
    PATIENCE_S,
    Rig,
    Teller,
    load_of,
    run_child,
    store_in_steps,
    tell_persistent,
)
from tests.crash_points import POINTS, PointDisk, Points, die
from tests.valkey_server import ValkeyServer, running_server
from tierkv.tiers.nvme_disk import Buffers

STEPS = 60
RANDOM = "random"
A_FEW = (
    ("segment: allocated", 2),
    ("host: half copied", 3),
    ("frame: half", 9),
    ("record: before", 12),
    ("record: half", 6),
    ("record: written", 15),
    ("tombstone: written", 2),
    ("clear: written", 1),
    ("checkpoint: half", 1),
    ("checkpoint: renamed", 1),
    ("valkey: first answer", 8),
    (RANDOM, 150),
)


class Torture:
    """One directory and one server through a series of lives and deaths."""

    def __init__(self, path: Path, server: ValkeyServer, seed: int) -> None:
        self._directory = path
        self._path = path / "nvme-0"
        self._server = server
        self._seed = seed
        self._round = 0
        self.ledger = Ledger()
        self.deaths: Counter[str] = Counter()
        self.seen = Seen()
        self.kept_by_flush = 0

    def move(self) -> None:
        """To an empty directory: one that is full makes no segments any more."""
        shutil.rmtree(self._path)
        self._path = self._directory / f"nvme-{self._round}"
        self.ledger.forget("nvme")

    def kill(self, point: str, passage: int) -> bool:
        """A life that ends at the ``passage``-th passage of a point (or line that it says), if it comes that far."""
        self._round += 1
        try:
            return self._kill(point, passage)
        except Exception as error:
            error.add_note(f"seed {self._seed}, crash {self._round}: {point}, passage {passage}")
            raise

    def _kill(self, point: str, passage: int) -> bool:
        at_random = point == RANDOM
        status, said = run_child(
            self._path,
            self._server.address,
            Points(None if at_random else point, passage),
            load_of(self._seed * 1000 + self._round, STEPS),
            lines=passage if at_random else None,
        )
        died = os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGKILL
        assert died or (os.WIFEXITED(status) and not os.WEXITSTATUS(status)), "the life failed by itself"
        self.deaths[point] += died
        self.ledger.take(said)
        torn = point.endswith("half")
        self.seen = check_after_crash(
            self._path,
            self._server,
            self.ledger,
            "quiet" if torn else "strict",
        )
        self.kept_by_flush += self.seen.kept_by_flush
        return died


def test_d10_d21_d23_a_killed_writer_leaves_what_it_acknowledged(tmp_path: Path) -> None:
    with running_server() as server:
        torture = Torture(tmp_path, server, seed=1)
        for point, passage in A_FEW:
            assert torture.kill(point, passage), f"the life never came to {point}, passage {passage}"
            assert torture.seen.loaded > 0, "hits come back"
        assert torture.kept_by_flush > 0


@pytest.mark.torture
@pytest.mark.timeout(3600)
def test_d10_d21_d23_two_hundred_crashes(tmp_path: Path) -> None:
    seed = int(os.environ.get("CRASH_SEED", random.SystemRandom().randrange(1_000_000)))
    dice = random.Random(seed)
    plan = [(point, dice.choice([1, 2, dice.randint(1, 30)])) for point in POINTS for _ in range(3)]
    plan += [(RANDOM, dice.randint(2, 900)) for _ in range(max(60, 200 - len(plan)))]
    dice.shuffle(plan)
    started_s = time.monotonic()
    with running_server() as server:
        torture = Torture(tmp_path, server, seed)
        print(f"\nseed {seed}: {len(plan)} lives")
        for number, (point, passage) in enumerate(plan, 1):
            if number > 1 and (point.startswith("segment") or number % 25 == 0):
                torture.move()
            while not torture.kill(point, passage) and passage > 1:
                passage //= 2  # a life that never came that far
            seen = torture.seen
            print(
                f"{number:4d}/{len(plan)} {time.monotonic() - started_s:5.0f} s  {point}, {passage}: "
                f"{seen.on_disk} blocks on disk, {seen.on_server} on the server, {seen.loaded} loaded, "
                f"{seen.kept_by_flush} by flush, {seen.open_fates} open"
            )
        never = [point for point in POINTS if not torture.deaths[point]]
        assert sum(torture.deaths.values()) >= 200
        assert not never, f"nobody ever died at {never}"


# ---- the checks see what they are for


class ForgetfulDisk(PointDisk):
    """Says that writes of one kind were done, and does not do them."""

    def __init__(self, points: Points, forgets: str | None) -> None:
        super().__init__(points)
        self._forgets = forgets

    def pwritev(self, fd: int, buffers: Buffers, offset: int) -> int:
        if self._what(self._names[fd], buffers, offset) == self._forgets:
            return sum(map(len, buffers))
        return super().pwritev(fd, buffers, offset)


def store_and_take_out(rig: Rig, points: Points, say: Teller) -> None:
    """Two chains are flushed; the longer one has left the disk again when the process dies."""
    first, second = chain_of(rig.spaces[0], BLOCKS, 1), chain_of(rig.spaces[0], 2, 2)
    store_in_steps(rig, first, points)
    tell_persistent(rig, first, say)
    rig.client.flush("valkey").result(PATIENCE_S)
    assert rig.client.evict("nvme").evicted == rig.client.evict("host").evicted == BLOCKS
    store_in_steps(rig, second, points)
    tell_persistent(rig, second, say)
    die()


@pytest.mark.parametrize(
    ("forgets", "complaint"),
    [
        (None, None),
        ("tombstone", "forgotten blocks are back|do not verify"),
        ("record", "acknowledged blocks are gone"),
        ("frame", "do not verify"),
    ],
)
def test_the_check_after_a_crash_sees_a_write_that_was_left_out(
    tmp_path: Path, forgets: str | None, complaint: str | None
) -> None:
    points, path = Points(), tmp_path / "nvme"
    ledger = Ledger()
    with running_server() as server:
        disk = ForgetfulDisk(points, forgets)
        status, said = run_child(path, server.address, points, store_and_take_out, disk=disk)
        assert os.WTERMSIG(status) == signal.SIGKILL
        ledger.take(said)
        with pytest.raises(AssertionError, match=complaint) if complaint else contextlib.nullcontext():
            check_after_crash(path, server, ledger, "quiet")
