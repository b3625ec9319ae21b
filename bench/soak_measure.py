"""What a soak measures: how long each verb kept its caller, how late the interpreter itself is, how much memory is in
use."""

from __future__ import annotations

import os
import threading
import time
from collections import deque
from concurrent.futures import Future
from queue import SimpleQueue

GRACE_S = 0.020
"""What a wait may take beyond its deadline."""

_CONTROL_S = 0.01
"""The deadline of a wait of the control."""
_KEPT = 4096
_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")


class Control:
    """A wait as the store's are, without a store: a thread waits for a future, and another one completes it when its
    deadline has come. How late that is the machine and the interpreter's lock do to any wait here."""

    def __init__(self) -> None:
        self._late: deque[tuple[float, float]] = deque(maxlen=_KEPT)
        self._by_ms: list[int] = [0] * 1024
        self._given: SimpleQueue[tuple[float, Future[None]] | None] = SimpleQueue()
        self._ended = threading.Event()
        self._threads = [
            threading.Thread(target=target, name="soak-control", daemon=True)
            for target in (self._complete, self._wait)
        ]

    def __enter__(self) -> Control:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._given.put(None)
        for thread in self._threads:
            thread.join()

    def _complete(self) -> None:
        changed = threading.Condition()
        while (given := self._given.get()) is not None:
            at_s, future = given
            with changed:
                changed.wait(max(0.0, at_s - time.monotonic()))
            future.set_result(None)

    def _wait(self) -> None:
        while not self._ended.is_set():
            at_s = time.monotonic() + _CONTROL_S
            future: Future[None] = Future()
            self._given.put((at_s, future))
            future.result(60.0)
            now_s = time.monotonic()
            late_s = max(0.0, now_s - at_s)
            self._by_ms[min(int(late_s * 1000), len(self._by_ms) - 1)] += 1
            if late_s > GRACE_S / 4:
                self._late.append((now_s, late_s))

    def worst_s(self, start_s: float, end_s: float) -> float:
        """The longest delay of a wait that was under way between these times."""
        return max(
            (late_s for now_s, late_s in list(self._late) if start_s <= now_s and now_s - late_s <= end_s),
            default=0.0,
        )

    def as_json(self) -> dict[str, object]:
        late = sum(self._by_ms[int(GRACE_S * 1000) :])
        shares = {f"late_ms_p{share:g}": self._percentile_ms(share / 100) for share in (50, 99, 99.9, 100)}
        return {"waits": sum(self._by_ms), "over_deadline_by_20_ms": late, **shares}

    def _percentile_ms(self, share: float) -> int:
        """In whole milliseconds, rounded down."""
        left = sum(self._by_ms) * (1 - share)
        for ms in range(len(self._by_ms) - 1, -1, -1):
            left -= self._by_ms[ms]
            if left < 0:
                return ms
        return 0


class Waits:
    """Of one verb: how many calls, the longest, and those that came back too late. One instance a thread; ``add`` them
    up afterwards."""

    def __init__(self) -> None:
        self.calls = 0
        self.longest_s = 0.0
        self.reached_deadline = 0
        self.worst_over_s = -1.0
        """The most that a call took beyond its deadline; negative: none had to wait that long."""
        self.over = 0
        self.over_beyond_control = 0
        """Of these, the ones that were 20 ms later than the control's waits at that time."""
        self.worst_beyond_control_s = -1.0

    def note(self, start_s: float, deadline_s: float | None, control: Control) -> None:
        """A call has come back. ``deadline_s``: after ``start_s``; ``None`` for a verb that has none."""
        end_s = time.monotonic()
        took_s = end_s - start_s
        self.calls += 1
        self.longest_s = max(self.longest_s, took_s)
        if deadline_s is None:
            return
        over_s = took_s - deadline_s
        self.reached_deadline += over_s >= 0
        self.worst_over_s = max(self.worst_over_s, over_s)
        if over_s > GRACE_S:
            self.over += 1
            beyond_s = over_s - control.worst_s(end_s - over_s - GRACE_S, end_s)
            self.worst_beyond_control_s = max(self.worst_beyond_control_s, beyond_s)
            self.over_beyond_control += beyond_s > GRACE_S

    def add(self, other: Waits) -> None:
        self.calls += other.calls
        self.longest_s = max(self.longest_s, other.longest_s)
        self.worst_over_s = max(self.worst_over_s, other.worst_over_s)
        self.over += other.over
        self.reached_deadline += other.reached_deadline
        self.over_beyond_control += other.over_beyond_control
        self.worst_beyond_control_s = max(self.worst_beyond_control_s, other.worst_beyond_control_s)

    def as_json(self) -> dict[str, object]:
        return {
            "calls": self.calls,
            "longest_ms": round(self.longest_s * 1000, 1),
            "reached_deadline": self.reached_deadline,
            "worst_over_deadline_ms": round(self.worst_over_s * 1000, 1) if self.worst_over_s > 0 else 0,
            "over_deadline_by_20_ms": self.over,
            "of_these_beyond_the_control's": self.over_beyond_control,
            "worst_beyond_the_control's_ms": round(max(0.0, self.worst_beyond_control_s) * 1000, 1),
        }


def resident_bytes() -> int:
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * _PAGE_BYTES
