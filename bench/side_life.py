"""Rows ``ready_s`` and ``idle_cpu``: a daemon that starts, and one that nobody asks anything."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager

from bench.harness import Reach, Row, Sample, Settings, Sides
from bench.sidecar_process import folder, start_daemon, stop
from tierkv.units import GIB, MIB

IDLE_S = 10.0


class Ready:
    """From the start of the process to READY=1."""

    name = "ready_s"
    rows = (
        Row(
            "ready_s",
            "s",
            "s",
            "until a daemon with an arena of 1 GiB says that it is ready (its memory is touched behind that); limit: "
            "an interpreter that imports numpy, msgpack and xxhash",
            Reach("value", "<=", 1.0),
        ),
    )

    @contextmanager
    def open(self, settings: Settings) -> Iterator[Sides]:
        yield Sides(_ready, _bare_start)


def _ready() -> Sample:
    with folder() as place:
        process, took_s = start_daemon(place, GIB)
        stop(process)
    return {"s": took_s}


def _bare_start() -> Sample:
    start_s = time.perf_counter()
    subprocess.run([sys.executable, "-c", "import numpy, msgpack, xxhash"], check=True)
    return {"s": time.perf_counter() - start_s}


class Idle:
    """CPU of a daemon with a client that is connected and asks nothing."""

    name = "idle_cpu"
    rows = (
        Row(
            "idle_cpu",
            "share",
            "cores",
            f"CPU of an idle daemon, as a share of one core, over {IDLE_S:g} s; limit: of a process that sleeps a "
            "second at a time (at least one tick of the clock)",
            Reach("value", "<=", 0.005),
        ),
    )

    @contextmanager
    def open(self, settings: Settings) -> Iterator[Sides]:
        with folder() as place:
            process, _ = start_daemon(place, 64 * MIB)
            sleeper = subprocess.Popen([sys.executable, "-c", "import time\nwhile True: time.sleep(1)"])
            time.sleep(2.0)
            try:
                yield Sides(lambda: _cpu(process.pid), lambda: _cpu(sleeper.pid), most_rounds=2)
            finally:
                stop(process)
                stop(sleeper)


def _cpu(pid: int) -> Sample:
    before_s = _cpu_s(pid)
    time.sleep(IDLE_S)
    return {"share": max(_cpu_s(pid) - before_s, 1 / os.sysconf("SC_CLK_TCK")) / IDLE_S}


def _cpu_s(pid: int) -> float:
    """utime + stime; the name in brackets may hold spaces."""
    with open(f"/proc/{pid}/stat") as file:
        fields = file.read().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
