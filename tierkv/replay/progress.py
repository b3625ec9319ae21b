"""How far a long computation is, on one line of a terminal; where there is none, one line for each part."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import TextIO

_WIDTH = 30
_USUAL_COLUMNS = 80


class Progress:
    """Parts of a whole, one after the other. Writes only where a percent has changed, and nothing more once that has
    failed: the figures count, not the bar. Not thread-safe."""

    def __init__(self, stream: TextIO | None, parts: int) -> None:
        """``stream`` is ``None`` in a process whose standard error is closed."""
        self._stream = stream
        self._parts = parts
        self._done = 0
        self._live = stream is not None and stream.isatty()
        self._full, self._empty = ("█", "░") if _has_blocks(stream) else ("#", ".")
        self._shown = ""

    def part(self, label: str) -> Callable[[float], None]:
        """The next part begins; the answer takes how much of it is done, from 0 to 1."""
        number = self._done
        self._done += 1
        if not self._live:
            self._write(f"[{number + 1}/{self._parts}] {label}\n")
            return lambda share: None

        def told(share: float) -> None:
            self._show((number + share) / self._parts, label)

        told(0.0)
        return told

    def _show(self, share: float, label: str) -> None:
        filled = round(_WIDTH * share)
        text = f"{self._full * filled}{self._empty * (_WIDTH - filled)} {share:4.0%} {label}"
        text = text[: self._columns() - 1]  # a line that wraps cannot be wiped
        if text != self._shown:
            self._shown = text
            self._write(f"\r\x1b[K{text}")

    def end(self) -> None:
        """The line is wiped, so that the result stands alone."""
        if self._live and self._shown:
            self._shown = ""
            self._write("\r\x1b[K")

    def _columns(self) -> int:
        if self._stream is None:
            return _USUAL_COLUMNS
        try:
            return os.get_terminal_size(self._stream.fileno()).columns or _USUAL_COLUMNS
        except OSError:
            return _USUAL_COLUMNS

    def _write(self, text: str) -> None:
        if self._stream is None:
            return
        try:
            print(text, end="", file=self._stream, flush=True)
        except OSError:
            self._stream = None


def _has_blocks(stream: TextIO | None) -> bool:
    try:
        "█░".encode(getattr(stream, "encoding", None) or "utf-8")
    except UnicodeEncodeError:
        return False
    return True
