"""How the command line asks a daemon: where it is, what is asked about, and how answers and errors are told."""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NoReturn

from tierkv.config import FILE_ENV, setting_in_force
from tierkv.daemon.link import Link, NotLetIn
from tierkv.errors import Away, ConfigError, TierKVError

ASK_S = 10.0
LONGER_S = 10.0
"""Beyond the time that a question gives the daemon."""


class NoDaemon(TierKVError):
    """Nobody answers at the socket."""


class JsonParser(argparse.ArgumentParser):
    """With ``--json`` wrong usage is a JSON object too, beside what argparse says on standard error."""

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        self._as_json = "--json" in (args or ())
        return super().parse_known_args(args, namespace)

    def error(self, message: str) -> NoReturn:
        if self._as_json:
            print(json.dumps({"error": {"kind": "UsageError", "message": message}}))
        super().error(message)


def parser_of(name: str, description: str) -> argparse.ArgumentParser:
    parser = JsonParser(prog=f"tierkv {name}", description=description)
    parser.add_argument(
        "--socket", type=Path, metavar="PATH", help="the daemon's socket (default: sidecar.socket)"
    )
    parser.add_argument(
        "--config", type=Path, metavar="FILE", help=f"where sidecar.socket is looked up (default: {FILE_ENV})"
    )
    parser.add_argument("--json", action="store_true", help="as one JSON object, errors too")
    return parser


def add_prompt(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--namespace",
        metavar="HEX",
        help="its digest, or the first digits of it (default: the only one there is)",
    )
    prompt = parser.add_mutually_exclusive_group(required=True)
    prompt.add_argument(
        "--tokens",
        metavar="IDS",
        help="token ids: a JSON list, or a file with one or with numbers; - is standard input",
    )
    prompt.add_argument(
        "--hashes",
        metavar="HEX",
        help="hashes of the prompt's blocks, with commas between them, or a file of them",
    )


def prompt_words(arguments: argparse.Namespace) -> dict[str, Any]:
    """Raises ``ConfigError`` for what is no list of numbers or hashes."""
    words: dict[str, Any] = {} if arguments.namespace is None else {"namespace": arguments.namespace}
    if arguments.tokens is not None:
        return {**words, "tokens": _tokens(arguments.tokens)}
    return {
        **words,
        "hashes": _text("--hashes", arguments.hashes, "0123456789abcdefABCDEF, \n").replace(",", " ").split(),
    }


def _tokens(given: str) -> list[int]:
    text = _text("--tokens", given, "0123456789,[] \n")
    try:
        found = json.loads(
            text if text.lstrip().startswith("[") else f"[{','.join(text.replace(',', ' ').split())}]"
        )
    except ValueError as error:
        raise ConfigError("--tokens", given, f"no list of token ids: {error}") from None
    if not isinstance(found, list) or not all(type(one) is int for one in found):
        raise ConfigError("--tokens", given, "a list of token ids is expected, such as [1, 2, 3]")
    return found


def _text(option: str, given: str, letters: str) -> str:
    """What was given, when it is made of these letters only; else the content of the file of that name."""
    if given == "-":
        return sys.stdin.read()
    if given and not given.strip(letters) and not Path(given[:255]).is_file():
        return given
    try:
        return Path(given).read_text()
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not text"
        raise ConfigError(option, given, f"{reason}; give a list, or a file with one") from None


def run(
    name: str,
    arguments: argparse.Namespace,
    words: Callable[[], dict[str, Any]],
    show: Callable[[dict[str, Any]], Iterable[str]],
    *,
    fine: Callable[[dict[str, Any]], bool] = lambda answer: True,
) -> int:
    """Asks, and prints the answer. The exit status is 1 when the answer is not ``fine``. With ``--json`` an error is
    one JSON object on standard output, beside the line on standard error."""
    with errors_as_json(arguments):
        answer = ask(arguments, name, words())
    print(json.dumps(answer, indent=2) if arguments.json else "\n".join(map(_printable, show(answer))))
    return 0 if fine(answer) else 1


def _printable(line: str) -> str:
    """Names are their engines' choice: none of them is to begin a line of its own, or to command the terminal."""
    return "".join(letter if letter.isprintable() else "?" for letter in line)


@contextmanager
def errors_as_json(arguments: argparse.Namespace) -> Iterator[None]:
    """With ``--json`` an error is one JSON object on standard output, and raised all the same."""
    try:
        yield
    except TierKVError as error:
        if arguments.json:
            print(json.dumps({"error": error_words(error)}))
        raise


def error_words(error: TierKVError) -> dict[str, str]:
    return {"kind": type(error).__name__, "message": str(error)}


def ask(arguments: argparse.Namespace, name: str, words: dict[str, Any]) -> dict[str, Any]:
    path: Any = arguments.socket or setting_in_force("sidecar.socket", arguments.config)
    within_s = ASK_S if words.get("timeout_s") is None else words["timeout_s"] + LONGER_S
    link = Link(str(Path(path).absolute()), "tierkv command line")
    try:
        if "namespace" not in words and ("tokens" in words or "hashes" in words):
            words = {**words, "namespace": _only_namespace(link)}
        return _asked(link, name, words, within_s)
    except NotLetIn as error:
        raise NoDaemon(str(error)) from None
    except Away as error:
        raise NoDaemon(f"{error}; start one with `tierkv serve`, or name its socket with --socket") from None
    finally:
        link.close()


def _asked(link: Link, name: str, words: dict[str, Any], within_s: float) -> dict[str, Any]:
    question = {"question": name, "body": json.dumps(words).encode()}
    reply = link.call("ask", question, time.monotonic() + within_s)
    answer: dict[str, Any] = json.loads(reply["answer"])
    return answer


def _only_namespace(link: Link) -> str:
    known = _asked(link, "status", {}, ASK_S)["namespaces"]["latest"]
    opened = [one for one in known if one["opened"]]
    if not opened:
        raise ConfigError(
            "--namespace", None, "no engine has opened one since the daemon's start; ask again when one has"
        )
    if len(opened) > 1:
        raise ConfigError(
            "--namespace", None, f"{len(opened)} are open; `tierkv status` lists them, name one"
        )
    digest: str = opened[0]["digest"]
    return digest


def seconds(text: str) -> float:
    """For ``argparse``."""
    from tierkv.units import parse_seconds

    return parse_seconds(text)
