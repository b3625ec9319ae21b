"""Real processes that hang and die: signals with an end, so that no test leaves a stopped process behind."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager, suppress


@contextmanager
def hung(pid: int) -> Iterator[None]:
    """The process stands still (SIGSTOP) inside the ``with`` and goes on (SIGCONT) after it, whatever happens."""
    os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGCONT)


def kill(pid: int) -> None:
    """SIGKILL: no handler, no clean-up. Whoever started the process waits for it."""
    os.kill(pid, signal.SIGKILL)
