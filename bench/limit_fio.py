"""The limit of a disk: fio, O_DIRECT, 16 blocks in flight, random blocks of a file that was written before.

io_uring where the kernel lets us, else libaio (some containers forbid io_uring), and the notes say which.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from bench.harness import Sample
from tierkv.units import MIB

DEPTH = 16
HUGE_PAGES = {"GLIBC_TUNABLES": "glibc.malloc.hugetlb=1"}
"""Puts fio's buffers into huge pages, as the store's are: without them the limit would be a third slower."""
TIMEOUT_S = 300

Direction = Literal["read", "write"]


@dataclass(frozen=True)
class Fio:
    """fio on one file. ``run`` moves ``blocks`` different random blocks."""

    path: Path
    engine: str
    block_bytes: int
    file_blocks: int

    @property
    def name(self) -> str:
        return f"fio with {self.engine}, O_DIRECT, depth {DEPTH}, buffers in huge pages where malloc has them"

    def run(self, direction: Direction, blocks: int) -> Sample:
        """MiB/s by fio's own clock, and the CPU (usr + sys) that it says it used, for each MiB."""
        job = _fio(self.path, self.engine, direction, self.block_bytes, self.file_blocks, blocks)
        moved_mib = job[direction]["io_bytes"] / MIB
        if moved_mib * MIB != blocks * self.block_bytes:
            raise RuntimeError(f"fio moved {moved_mib} MiB instead of {blocks} blocks")
        cpu_s = (job["usr_cpu"] + job["sys_cpu"]) / 100 * job["job_runtime"] / 1e3
        return {"mib_per_s": job[direction]["bw_bytes"] / MIB, "cpu_us_per_mib": cpu_s * 1e6 / moved_mib}


def find_fio(path: Path, block_bytes: int, file_blocks: int) -> Fio | None:
    """fio with the first engine that works on ``path``, or ``None`` where it is not installed."""
    if shutil.which("fio") is None:
        return None
    for engine in ("io_uring", "libaio"):
        fio = Fio(path, engine, block_bytes, file_blocks)
        try:
            fio.run("read", min(DEPTH, file_blocks))
        except (subprocess.CalledProcessError, RuntimeError):
            continue
        return fio
    return None


def _fio(
    path: Path, engine: str, direction: Direction, block_bytes: int, file_blocks: int, blocks: int
) -> dict[str, Any]:
    command = [
        "fio",
        "--name=limit",
        f"--filename={path}",
        f"--size={file_blocks * block_bytes}",
        f"--bs={block_bytes}",
        f"--io_size={blocks * block_bytes}",
        f"--rw=rand{direction}",
        f"--ioengine={engine}",
        f"--iodepth={DEPTH}",
        "--direct=1",
        "--randrepeat=0",
        "--overwrite=1",
        "--fallocate=none",
        # fio would change a little of each buffer before it writes it, which is work that no limit needs.
        "--scramble_buffers=0",
        "--output-format=json",
    ]
    environment = {**os.environ, **HUGE_PAGES}
    done = subprocess.run(
        command, check=True, capture_output=True, text=True, timeout=TIMEOUT_S, env=environment
    )
    report = json.loads(done.stdout[done.stdout.index("{") :])
    job: dict[str, Any] = report["jobs"][0]
    if job["error"]:
        raise RuntimeError(f"fio with {engine}: error {job['error']} on {path}")
    return job
