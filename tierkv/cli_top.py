"""``tierkv top``: the page for operators in a terminal. Press q to leave, space to hold it still.

Asks the daemon's own socket, so it needs no HTTP. Without a terminal, or with ``--once``, it shows one picture
and ends.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import re
import select
import shutil
import sys
import termios
import tty
from collections.abc import Iterator, Sequence
from typing import Final

from tierkv.cli_ask import ask, parser_of, seconds
from tierkv.cli_top_picture import Answer, picture
from tierkv.errors import TierKVError

PERIOD_S: Final = 2.0
ENTER, LEAVE = "\x1b[?1049h\x1b[?25l", "\x1b[?25h\x1b[?1049l"
HOME, CLEAR_LINE, CLEAR_BELOW = "\x1b[H", "\x1b[K", "\x1b[J"
_ARROWS: Final = re.compile(r"\x1b[\[O][0-9;]*[ -~]")
"""What a terminal sends for keys without a letter: they begin like Escape and mean nothing here."""
QUIT: Final = ("q", "Q", "\x1b", "")


def main(argv: Sequence[str]) -> int:
    arguments = _parser().parse_args(argv)
    if arguments.json:
        print(json.dumps(ask(arguments, "status", {}), indent=2))
        return 0
    if arguments.once or not (sys.stdin.isatty() and sys.stdout.isatty()):
        first = ask(arguments, "status", {})
        if not arguments.once:
            print("standard input and output are no terminal: this is shown once", file=sys.stderr)
        print("\n".join(picture(first, None, shutil.get_terminal_size().columns, "")))
        return 0
    with screen():
        return _watch(arguments)


def _parser() -> argparse.ArgumentParser:
    parser = parser_of("top", "The daemon's tiers, hits, edges, sessions and hot prefixes, live.")
    parser.add_argument("--once", action="store_true", help="show it once")
    parser.add_argument("--every", type=seconds, default=PERIOD_S, metavar="TIME", help="default 2 s")
    return parser


@contextlib.contextmanager
def screen() -> Iterator[None]:
    """The other screen of the terminal, with keys as they are pressed. It is as it was afterwards, whatever happens."""
    before = termios.tcgetattr(sys.stdin)
    tty.setcbreak(sys.stdin)
    sys.stdout.write(ENTER)
    try:
        yield
    finally:
        sys.stdout.write(LEAVE)
        sys.stdout.flush()
        termios.tcsetattr(sys.stdin, termios.TCSADRAIN, before)


def _watch(arguments: argparse.Namespace) -> int:
    shown: Answer | None = None
    before: Answer | None = None
    held = False
    while True:
        trouble: str | None = None
        if not held:
            try:
                now = ask(arguments, "status", {})
                before, shown = shown if _same(shown, now) else None, now
            except TierKVError as error:
                trouble = str(error)
        size = shutil.get_terminal_size()
        rows = size.lines - 1  # the last one stays free, or the screen scrolls
        word = trouble or ("held still; space goes on" if held else None)
        lines = [trouble or "asking ..."] if shown is None else list(
            picture(shown, before, size.columns, word, rows)
        )  # fmt: skip
        draw(lines[:rows])
        key = _key(arguments.every)
        if key in QUIT:
            return 0
        held ^= key == " "


def _same(one: Answer | None, other: Answer) -> bool:
    """Both are of one daemon, so that rates can be made of them."""
    return one is not None and one["started_at"] == other["started_at"]


def draw(lines: Sequence[str]) -> None:
    sys.stdout.write(HOME + "".join(f"{line}{CLEAR_LINE}\n" for line in lines) + CLEAR_BELOW)
    sys.stdout.flush()


def _key(timeout_s: float) -> str | None:
    """The first key that is pressed in this time; an empty one when the terminal is gone."""
    if not select.select([sys.stdin], [], [], max(0.05, timeout_s))[0]:
        return None
    try:
        pressed = os.read(sys.stdin.fileno(), 64).decode(errors="replace")
    except OSError:
        return ""
    if not pressed:
        return ""
    return _ARROWS.sub("", pressed)[:1] or None
