"""What befalls the server, the link and the disk during a soak, one thing after the other."""

from __future__ import annotations

import errno
import random
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

from bench.soak_rig import Rig
from tierkv.testing.faults.disk import at, failing

Wait = Callable[[float], None]
"""Returns after so many seconds, or at once when the soak ends."""


def stop_server(rig: Rig, wait: Wait, seconds: float) -> None:
    rig.server.hang()
    try:
        wait(seconds)
    finally:
        rig.server.go_on()


def kill_server(rig: Rig, wait: Wait, seconds: float) -> None:
    """All its blocks are gone when it is back."""
    rig.server.kill()
    try:
        wait(seconds)
    finally:
        rig.server.start()


def throttle(rig: Rig, wait: Wait, seconds: float) -> None:
    rig.link.spoil(bytes_per_s=50_000, upload_bytes_per_s=100_000, delay_s=0.01)
    wait(seconds)
    rig.link.heal()


def black_hole(rig: Rig, wait: Wait, seconds: float) -> None:
    rig.link.spoil(black_hole=True)
    wait(seconds)
    rig.link.heal()


def cut(rig: Rig, wait: Wait, seconds: float) -> None:
    """All connections end, and new ones are closed at once."""
    rig.link.heal()
    rig.link.spoil(refuse=True)
    wait(seconds)
    rig.link.heal()


def fill_disk(rig: Rig, wait: Wait, seconds: float) -> None:
    """Not one byte is free: really so on a small file system, else the calls that need space say it."""
    ballast = rig.nvme.parent / "ballast"
    if not rig.small_disk:
        calls = [failing(errno.ENOSPC, at("fallocate")), failing(errno.ENOSPC, at("pwritev", "log"))]

        def full(call: str, file: str, offset: int) -> None:
            for hook in calls:
                hook(call, file, offset)

        rig.disk.before = full
    else:
        with open(ballast, "wb", buffering=0) as file, suppress(OSError):
            while True:
                file.write(bytes(65_536))
    try:
        wait(seconds)
    finally:
        rig.disk.heal()
        ballast.unlink(missing_ok=True)


TROUBLES = (stop_server, kill_server, throttle, black_hole, cut, fill_disk)


class Troubles:
    """A thread that makes trouble until it is told to end. ``now`` is what it is at."""

    def __init__(self, rig: Rig, seed: int, seconds: float) -> None:
        self._rig = rig
        self._dice = random.Random(f"{seed} troubles")
        self._seconds = seconds
        self._ended = threading.Event()
        self.now = "none yet"
        self.met: Counter[str] = Counter()

    def _run(self) -> None:
        while not self._ended.is_set():
            for trouble in self._dice.sample(TROUBLES, len(TROUBLES)):
                if self._ended.is_set():
                    return
                self.now = trouble.__name__.replace("_", " ")
                trouble(self._rig, self._wait, self._seconds * self._dice.uniform(0.5, 1.5))
                self.met[self.now] += 1
                self.now = "peace"
                self._wait(self._seconds * self._dice.uniform(0.5, 1.5))

    def all_met(self) -> bool:
        """True when each trouble there is has come and gone."""
        return len(self.met) == len(TROUBLES)

    def _wait(self, seconds: float) -> None:
        self._ended.wait(seconds)

    @contextmanager
    def going_on(self) -> Iterator[None]:
        thread = threading.Thread(target=self._run, name="soak-troubles", daemon=True)
        thread.start()
        try:
            yield
        finally:
            self._ended.set()
            thread.join()
