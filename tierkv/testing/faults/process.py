"""Real processes that hang and die: signals with an end, so that no test leaves a stopped process behind."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

_LOOK_S = 0.001


@contextmanager
def hung(pid: int) -> Iterator[None]:
    """The process stands still (SIGSTOP) inside the ``with`` and goes on (SIGCONT) after it, whatever happens."""
    os.kill(pid, signal.SIGSTOP)
    try:
        while not _stands(pid):  # its threads stop one after the other
            time.sleep(_LOOK_S)
        yield
    finally:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGCONT)


def kill(pid: int) -> None:
    """SIGKILL: no handler, no clean-up. Whoever started the process waits for it."""
    os.kill(pid, signal.SIGKILL)


def _stands(pid: int) -> bool:
    """Whether all threads of a process have stopped, or are gone."""
    for task in Path(f"/proc/{pid}/task").glob("*/stat"):
        try:
            state = task.read_text().rpartition(")")[2].split()[0]
        except (FileNotFoundError, ProcessLookupError):
            continue
        if state not in "TtZX":
            return False
    return True
