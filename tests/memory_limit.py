"""A limit of memory for one process, kept by the kernel: it kills who goes beyond it. Where this user may set one."""

from __future__ import annotations

import contextlib
import time
import uuid
from collections.abc import Iterator
from pathlib import Path

CGROUPS = Path("/sys/fs/cgroup")


class MemoryLimit:
    """``enforced`` is false where no group can be made; then nothing is limited."""

    def __init__(self, folder: Path | None, counter: str) -> None:
        self._folder = folder
        self._counter = counter

    @property
    def enforced(self) -> bool:
        return self._folder is not None

    def kills(self) -> int:
        """Processes of the group that were killed for want of memory."""
        if self._folder is None:
            return 0
        words = (self._folder / self._counter).read_text().split()
        return int(words[words.index("oom_kill") + 1])


@contextlib.contextmanager
def memory_limit(pid: int, limit_bytes: int) -> Iterator[MemoryLimit]:
    """What the process takes from now on is counted. It must have ended when this ends."""
    if (CGROUPS / "memory").is_dir():
        parent, limits, counter = CGROUPS / "memory", ("memory.limit_in_bytes",), "memory.oom_control"
    else:
        parent, limits, counter = CGROUPS, ("memory.max", "memory.swap.max"), "memory.events"
    folder = parent / f"tierkv-test-{uuid.uuid4().hex[:12]}"
    values = (str(limit_bytes), "0")
    try:
        folder.mkdir()
        for name, value in zip(limits, values, strict=False):
            (folder / name).write_text(value)
        (folder / "cgroup.procs").write_text(str(pid))
    except OSError:  # another user, or a kernel without the controller
        with contextlib.suppress(OSError):
            folder.rmdir()
        yield MemoryLimit(None, counter)
        return
    limit = MemoryLimit(folder, counter)
    try:
        yield limit
    finally:
        until_s = time.monotonic() + 10
        while True:
            try:
                folder.rmdir()
                break
            except OSError:  # the process is still ending
                assert time.monotonic() < until_s, f"{folder} is not empty"
                time.sleep(0.01)
