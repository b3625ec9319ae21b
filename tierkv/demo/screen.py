"""What is seen while the demo works: a line for each step, with a bar while something long is computed.

On a terminal the line is drawn anew as time goes by. Anywhere else it begins with what is being done, gets a dot for
each tenth of a long computation, and ends with the result.
"""

from __future__ import annotations

import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TextIO

_BAR = 20
_LABEL = 38
_INDENT = 10
_ANEW = "\r\x1b[K"
"""Back to the beginning of the line, and what was there is wiped away."""


class Screen:
    """One thread uses it."""

    def __init__(self, out: TextIO, *, redraw: bool) -> None:
        """``redraw``: the output is a terminal."""
        self._out = out
        self._redraw = redraw
        self._start_s = time.monotonic()
        self._step: Step | None = None

    @property
    def elapsed_s(self) -> float:
        return time.monotonic() - self._start_s

    def headline(self, text: str) -> None:
        self._line(f"\n{text}\n")

    def question(self, text: str) -> None:
        self._line(f"{'':{_INDENT}}Q: {text}")

    def answer(self, text: str) -> None:
        self._line(f"{'':{_INDENT}}A: {text}")

    def note(self, text: str) -> None:
        self._line(f"{'':{_INDENT}}{text}")

    def problem(self, text: str) -> None:
        self._line(f"{'':{_INDENT}}WRONG: {text}")

    @contextmanager
    def step(self, what: str) -> Iterator[Step]:
        """Something that takes time."""
        step = self._step = Step(self, what)
        try:
            step.begin()
            yield step
        finally:
            self._step = None
            step.end()

    def say(self, text: str) -> None:
        """A word about the step that runs."""
        if self._step is not None:
            self._step.say(text)

    def layers(self, done: int, of: int) -> None:
        """How far the step that runs has come."""
        if self._step is not None:
            self._step.advance(done / of)

    def tick(self) -> None:
        """Draws the line anew."""
        if self._step is not None:
            self._step.draw()

    def _line(self, text: str) -> None:
        self._out.write(text + "\n")
        self._out.flush()


class Step:
    """One line."""

    def __init__(self, screen: Screen, what: str) -> None:
        self._screen, self._out = screen, screen._out
        self._what = what
        self._began_s = screen.elapsed_s
        self._share = 0.0
        self._dots = 0
        self._broken = False
        """Other lines have come between."""
        self._result: str | None = None

    def begin(self) -> None:
        if self._screen._redraw:
            self.draw()
        else:
            self._write(self._head())

    def say(self, text: str) -> None:
        line = f"{'':{_INDENT}}{text}\n"
        if self._screen._redraw:
            self._write(f"{_ANEW}{line}")
        else:
            self._write(line if self._broken else f"\n{line}")
            self._broken = True

    def advance(self, share: float) -> None:
        self._share = share
        if self._screen._redraw:
            self.draw()
        elif (dots := int(share * 10)) > self._dots:
            self._write("." * (dots - self._dots))
            self._dots = dots

    def done(self, result: str) -> None:
        self._result = result

    def draw(self) -> None:
        if not self._screen._redraw:
            return
        bar = ""
        if 0 < self._share < 1:
            full = int(self._share * _BAR)
            bar = f"[{'#' * full}{'-' * (_BAR - full)}] "
        line = f"{self._head()}{bar}{self._screen.elapsed_s - self._began_s:.0f} s"
        self._write(f"{_ANEW}{line[: shutil.get_terminal_size().columns - 1]}")

    def end(self) -> None:
        result = "not done" if self._result is None else self._result
        if self._screen._redraw:
            before = f"{_ANEW}{self._head()}"
        elif self._broken:
            before = f"{'':{_INDENT}}"
        else:
            before = " " if self._dots else ""
        self._write(f"{before}{result}\n")

    def _head(self) -> str:
        return f"{self._began_s:6.1f} s  {self._what:<{_LABEL}} "

    def _write(self, text: str) -> None:
        self._out.write(text)
        self._out.flush()
