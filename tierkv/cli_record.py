"""``tierkv record``: what requests ask a daemon for, as a trace that ``tierkv replay`` and ``tierkv plan`` read.

Blocks are numbered in the order in which they appear, so the file holds no tokens, no payload and no hashes: only which
requests share which prefixes, how long they are, and when they came.
"""

from __future__ import annotations

import gzip
import signal
import sys
import time
from argparse import Namespace
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from io import TextIOWrapper
from json import dumps
from pathlib import Path
from typing import Any, Final, TextIO

from tierkv.cli_ask import ASK_S, NoDaemon, error_words, errors_as_json, parser_of, seconds
from tierkv.config import setting_in_force
from tierkv.daemon.link import Link, NotLetIn
from tierkv.daemon.traffic_verb import NAME_BYTES
from tierkv.errors import Away, ConfigError, TierKVError

LOOK_S: Final = 0.5
MOST_BLOCKS: Final = 4_000_000
"""Different blocks that are told apart, in some 500 MiB of this process."""


class Full(TierKVError):
    """More different blocks than are told apart."""


class Numbering:
    """Requests as lines of a trace. Not thread-safe."""

    def __init__(self, namespace: str | None) -> None:
        self._wanted = namespace
        self._numbers: dict[bytes, int] = {}
        self._start_s: float | None = None
        self.block_tokens: int | None = None
        self.written = 0
        self.blocks = 0
        self.other = 0
        """Requests of other namespaces, or whose blocks have another length than those of the first."""

    @property
    def different(self) -> int:
        return len(self._numbers)

    def line(self, asked: Sequence[Any]) -> str | None:
        """Of one request, as the daemon tells it; ``None`` for one that is left out. Raises ``Full``."""
        at_s, namespace, tokens, block_tokens, own, names = asked
        if self.block_tokens is None and self._is_wanted(namespace):
            self.block_tokens = block_tokens
        if not self._is_wanted(namespace) or block_tokens != self.block_tokens:
            self.other += 1
            return None
        if self._start_s is None:
            self._start_s = at_s
        blocks = [names[at : at + NAME_BYTES] for at in range(0, len(names), NAME_BYTES)]
        if len(self._numbers) + len(blocks) > MOST_BLOCKS:
            raise Full(
                f"more than {MOST_BLOCKS:,} different blocks: the recording ends here, and is complete so far"
            )
        # The same content in another namespace is another block.
        ids = [self._numbers.setdefault(namespace + name, len(self._numbers)) for name in blocks]
        self.written += 1
        self.blocks += len(ids)
        words = {
            "timestamp": round(1000 * (at_s - self._start_s), 3),
            "input_length": tokens,
            "block_tokens": block_tokens,
            "own_blocks": own,
            "hash_ranges": ranges(ids),
        }
        return dumps(words, separators=(",", ":")) + "\n"

    def _is_wanted(self, namespace: bytes) -> bool:
        return self._wanted is None or namespace.hex().startswith(self._wanted)


def ranges(ids: Sequence[int]) -> list[list[int]]:
    """Numbers that follow each other, as ``[first, count]``."""
    found: list[list[int]] = []
    for ident in ids:
        if found and found[-1][0] + found[-1][1] == ident:
            found[-1][1] += 1
        else:
            found.append([ident, 1])
    return found


class Recording:
    """Asks the daemon again and again. ``say`` is told what went wrong on the way."""

    def __init__(self, link: Link, numbering: Numbering, say: Callable[[str], None]) -> None:
        self._link = link
        self._numbering = numbering
        self._say = say
        self._after: int | None = None
        self._known: tuple[int, int] | None = None
        self.lost = 0
        self.full: Full | None = None

    def look(self) -> list[str]:
        """Lines for what has come since the last look; the first one only begins. Raises ``Away``."""
        words = {} if self._after is None else {"after": self._after}
        told = self._link.call("requests", words, time.monotonic() + ASK_S)
        which = (told["pid"], told["recording"])
        if self._known is not None and which != self._known:
            self._say(
                "the daemon was started anew, or was not asked for long: what came meanwhile is missing"
            )
        elif told["lost"]:
            self.lost += told["lost"]
            self._say(f"{told['lost']} requests are missing: they came faster than they were written")
        self._known, self._after = which, told["last"]
        lines = []
        try:
            for asked in told["requests"]:
                line = self._numbering.line(asked)
                if line is not None:
                    lines.append(line)
        except Full as error:
            self.full = error
        return lines


def main(argv: Sequence[str]) -> int:
    """Records until the time is over, or until Ctrl-C or SIGTERM. Raises ``ConfigError`` and ``NoDaemon``."""
    parser = parser_of(
        "record",
        "Write what requests ask a daemon for as a trace that tierkv replay and tierkv plan read. It holds no tokens, "
        "no payload and no hashes: only which requests share which prefixes, how long they are and when they came. "
        "Ends with Ctrl-C.",
    )
    parser.add_argument("file", type=Path, metavar="FILE", help="where to; compressed when it ends in .gz")
    parser.add_argument("--for", dest="for_s", type=seconds, metavar="TIME", help="so long, such as '1 h'")
    parser.add_argument("--namespace", metavar="HEX", help="of one namespace: the first digits of its digest")
    arguments = parser.parse_args(argv)
    with errors_as_json(arguments):
        summary, why = _recorded(arguments)
    if arguments.json:
        print(dumps(summary if why is None else {**summary, "error": error_words(why)}, indent=2))
    else:
        print("\n".join(_shown(summary)))
    if why is not None:
        raise why
    return 0


def _recorded(arguments: Namespace) -> tuple[dict[str, Any], TierKVError | None]:
    """What was recorded, and what ended it, if that was not the time or the user."""
    numbering = Numbering(_digits(arguments.namespace))
    if not arguments.file.parent.is_dir():
        raise ConfigError(
            "FILE", str(arguments.file), "its folder is not there; make it, or name a file elsewhere"
        )
    path: Any = arguments.socket or setting_in_force("sidecar.socket", arguments.config)
    link = Link(str(Path(path).absolute()), "tierkv command line")
    try:
        recording, ending = Recording(link, numbering, _say), _Ending()
        _begin(recording)
        with ending.listening(), _written(arguments.file) as out:
            _say("recording")
            why = _record(recording, out, arguments.for_s, ending)
    finally:
        link.close()
    summary = {
        "file": str(arguments.file),
        "requests": numbering.written,
        "blocks": numbering.blocks,
        "different_blocks": numbering.different,
        "block_tokens": numbering.block_tokens,
        "left_out": numbering.other,
        "lost": recording.lost,
    }
    return summary, why


def _begin(recording: Recording) -> None:
    try:
        recording.look()
    except NotLetIn as error:
        raise NoDaemon(str(error)) from None
    except Away as error:
        raise NoDaemon(f"{error}; start one with tierkv serve, or name its socket with --socket") from None


def _record(recording: Recording, out: TextIO, for_s: float | None, ending: _Ending) -> TierKVError | None:
    """Returns what ended it, if that was not the time or the user."""
    try:
        end_s = float("inf") if for_s is None else time.monotonic() + for_s
        while not ending.wanted and recording.full is None and (left_s := end_s - time.monotonic()) > 0:
            lines = recording.look()
            out.writelines(lines)
            out.flush()
            if not lines:
                time.sleep(min(LOOK_S, left_s))
        if recording.full is None:
            out.writelines(recording.look())  # what came until now
    except Away as error:
        return NoDaemon(f"{error}; what was recorded until then is in the file")
    return recording.full


class _Ending:
    """Whether the user wants it to end: Ctrl-C or SIGTERM, which must not break off a call half-way. The second Ctrl-C
    does what it always does."""

    def __init__(self) -> None:
        self.wanted = False

    @contextmanager
    def listening(self) -> Iterator[None]:
        before = {number: signal.signal(number, self._note) for number in (signal.SIGINT, signal.SIGTERM)}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def _note(self, number: int, frame: object) -> None:
        self.wanted = True
        signal.signal(signal.SIGINT, signal.default_int_handler)


@contextmanager
def _written(path: Path) -> Iterator[TextIO]:
    """Raises ``ConfigError`` when it cannot be opened, or written to."""
    try:
        with path.open("wb") as raw:
            if path.suffix == ".gz":
                with gzip.open(raw, "wt") as packed:
                    yield packed
            else:
                with TextIOWrapper(raw) as plain:
                    yield plain
    except OSError as error:
        raise ConfigError(
            "FILE", str(path), f"it cannot be written: {error.strerror}; name a file elsewhere"
        ) from None


def _digits(text: str | None) -> str | None:
    if text is not None and (not text or text.lower().strip("0123456789abcdef")):
        raise ConfigError(
            "--namespace", text, "give the first hex digits of its digest; tierkv status lists them"
        )
    return None if text is None else text.lower()


def _say(line: str) -> None:
    print(f"tierkv record: {line}", file=sys.stderr, flush=True)


def _shown(summary: dict[str, Any]) -> Iterator[str]:
    tokens = "" if summary["block_tokens"] is None else f" of {summary['block_tokens']} tokens"
    yield (
        f"{summary['file']}: {summary['requests']:,} requests for {summary['blocks']:,} blocks{tokens}, "
        f"{summary['different_blocks']:,} of them different"
    )
    if summary["left_out"]:
        yield (
            f"{summary['left_out']:,} requests of other namespaces, or with blocks of another length, are left out"
        )
    if summary["lost"]:
        yield f"{summary['lost']:,} requests are missing: they came faster than they were written"
