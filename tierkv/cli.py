"""The command line: ``tierkv serve``, ``status``, ``top``, ``match``, ``explain``, ``pin``, ``clear``, ``doctor``,
``config``, ``record``, ``replay``, ``plan``, ``demo``, ``version``.

Exit status: 0 fine, 1 it failed, 2 wrong usage or configuration, 130 interrupted. What is wrong is one line on standard
error. Nothing heavy is imported before the command is known.
"""

from __future__ import annotations

import argparse
import errno
import os
import sys
from collections.abc import Sequence
from importlib import import_module
from io import TextIOWrapper
from typing import Final, NamedTuple

from tierkv import __version__
from tierkv.errors import ConfigError, TierKVError, not_installed

OK, FAILED, USAGE, INTERRUPTED = 0, 1, 2, 130
_NO_ROOM: Final = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO)


class Command(NamedTuple):
    """A word after ``tierkv``. Its module has ``main(argv) -> int``, which reads the rest of the line."""

    name: str
    module: str
    help: str
    extra: str | None = None
    """What to install when a package is missing."""
    function: str = "main"


COMMANDS = (
    Command("version", "tierkv.cli_version", "print the version"),
    Command("config", "tierkv.cli_config", "check the configuration and show what is in force"),
    Command("serve", "tierkv.daemon.serve", "a store that engines on this host share"),
    Command("status", "tierkv.cli_status", "how a daemon is, what it holds and for whom"),
    Command("top", "tierkv.cli_top", "the same, live"),
    Command("match", "tierkv.cli_prompts", "how much of a prompt need not be computed", function="match"),
    Command("explain", "tierkv.cli_prompts", "why blocks of a prompt are a miss", function="explain"),
    Command("pin", "tierkv.cli_prompts", "keep a prompt's blocks in host RAM", function="pin"),
    Command("clear", "tierkv.cli_prompts", "forget blocks in every tier", function="clear"),
    Command("doctor", "tierkv.cli_doctor", "try all that the configuration names, and say what to change"),
    Command("record", "tierkv.cli_record", "write what requests ask a daemon for, as a trace"),
    Command("replay", "tierkv.replay.command", "what each policy would have hit on recorded traffic"),
    Command("plan", "tierkv.replay.plan_command", "from recorded traffic: which sizes of the tiers to buy"),
    Command("demo", "tierkv.demo", "a real model gets its KV cache back from every tier", extra="demo"),
)


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command and returns the exit status. Wrong usage raises ``SystemExit(2)``, as argparse does."""
    words = list(sys.argv[1:] if argv is None else argv)
    command = _command(words)
    _let_any_text_out()
    try:
        status = _run(command, words[1:])
        if sys.stdout is not None:  # it was closed before we began
            sys.stdout.flush()
        return status
    except ConfigError as error:
        return _say(f"tierkv {command.name}: {error}", USAGE)
    except TierKVError as error:
        return _say(f"tierkv {command.name}: {error}", FAILED)
    except BrokenPipeError:
        _forget_stdout()  # the reader has left (`tierkv ... | head`), which is no failure of ours
        return FAILED
    except OSError as error:
        if error.errno not in _NO_ROOM:
            raise
        _forget_stdout()
        return _say(f"tierkv {command.name}: the output cannot be written: {error.strerror}", FAILED)
    except KeyboardInterrupt:
        return _say(f"tierkv {command.name}: interrupted", INTERRUPTED)


def _command(words: list[str]) -> Command:
    parser = argparse.ArgumentParser(
        prog="tierkv",
        description="A tiered store for the KV cache of LLM inference engines.",
        epilog="tierkv COMMAND --help tells more.",
    )
    parser.add_argument("--version", action="version", version=f"tierkv {__version__}")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    for command in COMMANDS:
        commands.add_parser(command.name, help=command.help, add_help=False)
    chosen = parser.parse_args(words[:1]).command
    return next(command for command in COMMANDS if command.name == chosen)


def _run(command: Command, words: list[str]) -> int:
    try:
        module = import_module(command.module)
        return int(getattr(module, command.function)(words))
    except ModuleNotFoundError as error:
        missing = (error.name or "").partition(".")[0]
        if command.extra is None or missing in ("", "tierkv"):
            raise
        return _say(f"tierkv {command.name}: {not_installed(missing, command.extra)}", USAGE)


def _say(line: str, status: int) -> int:
    print(" ".join(line.split()), file=sys.stderr)
    return status


def _let_any_text_out() -> None:
    """A name that the terminal's encoding lacks is written with escapes; it does not end the command."""
    if isinstance(sys.stdout, TextIOWrapper) and sys.stdout.errors == "strict":
        sys.stdout.reconfigure(errors="backslashreplace")


def _forget_stdout() -> None:
    """Standard output goes nowhere from now on, so that the interpreter's last flush does not fail again."""
    if sys.stdout is None:
        return
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, sys.stdout.fileno())
    os.close(nowhere)


if __name__ == "__main__":
    sys.exit(main())
