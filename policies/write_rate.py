"""A disk is written to no faster than it should wear: so many times its capacity a day.

A token bucket (Turner, "New directions in communications", 1986) filled at that rate, which holds what an hour brings.
As long as it is empty blocks are put off, and dropped when host RAM needs their room.
"""

from __future__ import annotations

from collections.abc import Mapping

from tierkv.clock import Clock, SystemClock
from tierkv.errors import ConfigError
from tierkv.policy import BlockInfo, Verdict
from tierkv.tier import Usage

DAY_S = 86_400.0
BURST_S = 3_600.0


class WriteRatePolicy:
    """Admits ``drive_writes_a_day`` times the tier's capacity in a day, THROTTLE beyond. A data-centre drive is
    commonly rated for 1 to 3 such writes a day over five years. Memory: two numbers. Not thread-safe: the store calls
    it under its lock."""

    name = "write_rate"

    def __init__(self, *, drive_writes_a_day: float = 1.0, clock: Clock | None = None) -> None:
        if not drive_writes_a_day > 0:
            raise ConfigError("drive_writes_a_day", drive_writes_a_day, "it must be a positive number")
        self._times_a_day = drive_writes_a_day
        self._clock = SystemClock() if clock is None else clock
        self._left_bytes: float | None = None
        self._then_s = self._clock.now_s()
        self._admitted = self._throttled = 0

    def admit(self, info: BlockInfo, block_hash: bytes, usage: Usage) -> Verdict:
        rate = self._times_a_day * usage.capacity_bytes / DAY_S
        now_s = self._clock.now_s()
        most = max(rate * BURST_S, info.bytes)
        left = most if self._left_bytes is None else self._left_bytes + rate * (now_s - self._then_s)
        self._then_s, self._left_bytes = now_s, min(left, most)
        if self._left_bytes < info.bytes:
            self._throttled += 1
            return Verdict.THROTTLE
        self._left_bytes -= info.bytes
        self._admitted += 1
        return Verdict.ADMIT

    def counters(self) -> Mapping[str, int]:
        return {"admitted": self._admitted, "throttled": self._throttled}
