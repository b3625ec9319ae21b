"""How far a long computation is, on one line of a terminal; where there is none, one line for each part."""

from __future__ import annotations

from collections.abc import Callable
from typing import TextIO

_WIDTH = 30


class Progress:
    """Parts of a whole, one after the other. Writes only where a percent has changed. Not thread-safe."""

    def __init__(self, stream: TextIO, parts: int) -> None:
        self._stream = stream
        self._parts = parts
        self._done = 0
        self._live = stream.isatty()
        self._shown = ""

    def part(self, label: str) -> Callable[[float], None]:
        """The next part begins; the answer takes how much of it is done, from 0 to 1."""
        number = self._done
        self._done += 1
        if not self._live:
            print(f"[{number + 1}/{self._parts}] {label}", file=self._stream, flush=True)
            return lambda share: None

        def told(share: float) -> None:
            self._show((number + share) / self._parts, label)

        told(0.0)
        return told

    def _show(self, share: float, label: str) -> None:
        filled = round(_WIDTH * share)
        text = f"{'█' * filled}{'░' * (_WIDTH - filled)} {share:4.0%} {label}"
        if text != self._shown:
            self._shown = text
            print(f"\r\x1b[K{text}", end="", file=self._stream, flush=True)

    def end(self) -> None:
        """The line is wiped, so that the result stands alone."""
        if self._live and self._shown:
            self._shown = ""
            print("\r\x1b[K", end="", file=self._stream, flush=True)
