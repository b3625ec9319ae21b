"""How full the server is, asked rarely and never waited for long."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import replace

from tierkv.clock import Clock, Deadline
from tierkv.tier import Usage
from tierkv.tiers.valkey_resp import MOST_DIGITS, Reply

_EVERY_S = 2.0
_PATIENCE_S = 0.1

_UNKNOWN = Usage(capacity_bytes=0, used_bytes=0, blocks=0, largest_free_bytes=0, writable=False)


class UsageGauge:
    """The last reading, renewed by whoever asks when it is old. Thread-safe; only one thread at a time waits for it."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._asking = threading.Lock()
        self._last = _UNKNOWN
        self._next_s = clock.now_s()

    def read(self, ask: Callable[[Deadline], Usage | None]) -> Usage:
        """The last reading, or a new one. When ``ask`` gives ``None``, the last one counts as not writable."""
        if self._clock.now_s() < self._next_s or not self._asking.acquire(blocking=False):
            return self._last
        try:
            reading = ask(Deadline(self._clock, _PATIENCE_S))
            self._last = reading if reading is not None else replace(self._last, writable=False)
            self._next_s = self._clock.now_s() + _EVERY_S
        finally:
            self._asking.release()
        return self._last

    def expire(self) -> None:
        """Much has changed: the next reader asks anew."""
        self._next_s = self._clock.now_s()


def usage_of(info: Reply, blocks: Reply, largest_bytes: int) -> Usage | None:
    """Reads the replies to INFO and DBSIZE; ``None`` when the server does not tell."""
    if not isinstance(info, bytes) or not isinstance(blocks, int):
        return None
    facts = dict(line.split(":", 1) for line in info.decode("utf-8", "replace").splitlines() if ":" in line)
    used_bytes = _number(facts.get("used_memory"))
    # Without a limit of its own the server has the machine's memory.
    capacity_bytes = (
        _number(facts.get("maxmemory")) or _number(facts.get("total_system_memory")) or used_bytes
    )
    evicts = facts.get("maxmemory_policy", "noeviction") != "noeviction"
    free_bytes = capacity_bytes if evicts else capacity_bytes - used_bytes
    return Usage(
        capacity_bytes=capacity_bytes,
        used_bytes=min(used_bytes, capacity_bytes),
        blocks=blocks,
        largest_free_bytes=max(0, min(free_bytes, capacity_bytes, largest_bytes)),
        writable=facts.get("role") != "slave" and facts.get("loading", "0") == "0",
    )


def _number(digits: str | None) -> int:
    """0 for what is no size: Python reads no number of thousands of digits, which a server may well send."""
    if digits is None or not digits.isascii() or not digits.isdigit() or len(digits) > MOST_DIGITS:
        return 0
    return int(digits)
