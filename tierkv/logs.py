"""Logs that cannot flood: a message of one kind is written at most once in ten seconds, with the number of those left
out since.

What can go wrong at the rate of I/O (a copy that fails, a tier that comes and goes) would else write thousands of
lines a second, and the line that matters could not be found among them. Counters keep the exact numbers.
"""

from __future__ import annotations

import logging
import threading

from tierkv.clock import Clock

PERIOD_S = 10.0

MAX_KINDS = 256
"""Kinds that are remembered; beyond that the one that was quiet for longest is forgotten."""


class RareLog:
    """Writes to the logger ``tierkv``, each kind of message at most once in ``period_s``. Thread-safe; takes a
    microsecond when the line is left out."""

    def __init__(self, clock: Clock, *, period_s: float = PERIOD_S) -> None:
        self._clock = clock
        self._period_s = period_s
        self._log = logging.getLogger("tierkv")
        self._lock = threading.Lock()
        self._last: dict[str, tuple[float, int]] = {}
        """By kind: when a line was written, and how many were left out since."""

    def warning(self, kind: str, message: str, *args: object) -> None:
        """``message`` is formatted with ``args`` only when it is written. ``kind`` says which messages are alike: a
        few fixed words, never a key or an error's text, or nothing would be alike."""
        self._write(logging.WARNING, kind, message, args, None)

    def error(self, kind: str, message: str, *args: object, cause: BaseException | None = None) -> None:
        """With the traceback of ``cause``, if one is given."""
        self._write(logging.ERROR, kind, message, args, cause)

    def _write(
        self, level: int, kind: str, message: str, args: tuple[object, ...], cause: BaseException | None
    ) -> None:
        left_out = self._left_out(kind)
        if left_out is None:
            return
        if left_out:
            message, args = f"{message} (%d more like this)", (*args, left_out)
        self._log.log(level, message, *args, exc_info=cause)

    def _left_out(self, kind: str) -> int | None:
        """How many of this kind were left out since the last line, or ``None`` when this one is, too."""
        now_s = self._clock.now_s()
        with self._lock:
            at_s, count = self._last.pop(kind, (float("-inf"), 0))
            if now_s - at_s < self._period_s:
                self._last[kind] = at_s, count + 1
                return None
            if len(self._last) >= MAX_KINDS:
                del self._last[next(iter(self._last))]
            self._last[kind] = now_s, 0
            return count


class ChangeLog:
    """Says when a state that comes and goes is worth a line: at most once in ``period_s``, and what stays is told in
    the end, so that the last line is true. Thread-safe."""

    def __init__(self, clock: Clock, *, period_s: float = PERIOD_S) -> None:
        self._clock = clock
        self._period_s = period_s
        self._lock = threading.Lock()
        self._told: bool | None = None
        self._at_s = float("-inf")

    def begin(self, state: bool) -> None:
        """The state that needs no line."""
        self._told = state

    def due(self, state: bool) -> bool:
        """True when the caller is to tell of ``state`` now; False before ``begin``."""
        if self._told is None or state == self._told:
            return False
        now_s = self._clock.now_s()
        with self._lock:
            if state == self._told or now_s - self._at_s < self._period_s:
                return False
            self._told, self._at_s = state, now_s
            return True
