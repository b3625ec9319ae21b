"""A real Valkey server for tests, and small things around it."""

from __future__ import annotations

import time
from collections.abc import Callable

from tierkv.clock import Deadline, SystemClock
from tierkv.ids import BlockKey
from tierkv.testing.faults.server import ValkeyServer, free_port, running_server

__all__ = ["ValkeyServer", "eventually", "free_port", "name_of", "running_server", "within"]


def eventually(condition: Callable[[], object], what: str, timeout_s: float = 10.0) -> None:
    """Waits for a condition, and fails with ``what`` when it does not come true."""
    end_s = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < end_s, f"after {timeout_s:g} s still not: {what}"
        time.sleep(0.002)


def within(timeout_s: float) -> Deadline:
    return Deadline(SystemClock(), timeout_s)


def name_of(key: BlockKey) -> str:
    """The name of a block on the server, written down a second time."""
    return f"tkv:{key[:12].hex()}:{key[12:].hex()}"
