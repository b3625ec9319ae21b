"""``tierkv config check``: what is in force and where each value came from. ``tierkv config table``: all settings."""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Sequence
from pathlib import Path

from tierkv.config import FILE_ENV, Config, load_config
from tierkv.config_sidecar import http_address, read_token
from tierkv.config_table import markdown_table
from tierkv.errors import ConfigError

BEGIN = "<!-- the table of settings, written by `tierkv config table --into FILE` -->\n"
END = "<!-- end of the table of settings -->\n"


def main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="tierkv config")
    actions = parser.add_subparsers(metavar="ACTION", required=True)
    check = actions.add_parser("check", help="check the configuration and print what is in force")
    check.add_argument("file", nargs="?", help=f"TOML file (default: what {FILE_ENV} names, else none)")
    check.add_argument(
        "--config", dest="file_too", metavar="FILE", help="the same, as the other commands say it"
    )
    check.add_argument("--json", action="store_true", help="as one JSON object, also when it is wrong")
    check.set_defaults(run=_check)
    table = actions.add_parser("table", help="print the table of all settings in Markdown")
    table.add_argument("--into", metavar="FILE", type=Path, help="renew the table in this file instead")
    table.set_defaults(run=_table)
    arguments = parser.parse_args(argv)
    status: int = arguments.run(arguments)
    return status


def _check(arguments: argparse.Namespace) -> int:
    try:
        config = load_config(arguments.file or arguments.file_too)
        http = config.sidecar.http
        if http is not None and isinstance(http_address(http), tuple):
            read_token(config.sidecar.token_file, os.environ)  # which engines with the same file need not
    except ConfigError as error:
        if arguments.json:
            wrong = {"key": error.key, "value": _plain(error.value), "hint": error.hint}
            print(json.dumps({"ok": False, "error": wrong}, indent=2))
        raise
    print(_as_json(config) if arguments.json else as_text(config))
    return 0


def _as_json(config: Config) -> str:
    settings = {one.key: {"value": one.value, "origin": one.origin} for one in config.effective}
    return json.dumps({"ok": True, "settings": settings, "notes": config.notes}, indent=2)


def _plain(value: object) -> object:
    return value if isinstance(value, str | int | float | bool | None) else str(value)


def as_text(config: Config) -> str:
    """Three columns: setting, value, origin. Tiers that are off take one line."""
    off = {name for name in ("nvme", "valkey") if getattr(config, name) is None}
    rows = [
        (one.key, _show(one.value), one.origin)
        for one in config.effective
        if one.key.partition(".")[0] not in off
    ]
    wide = [max(len(row[column]) for row in rows) for column in (0, 1)]
    lines = [f"{key:{wide[0]}}  {value:{wide[1]}}  {origin}" for key, value, origin in rows]
    lines += [f"{name}: off" for name in sorted(off)]
    lines += [f"note: {note}" for note in config.notes]
    return "\n".join(lines)


def _show(value: object) -> str:
    if value is None:
        return "unset"
    return str(value).lower() if isinstance(value, bool) else str(value)


def _table(arguments: argparse.Namespace) -> int:
    if arguments.into is None:
        print(markdown_table(), end="")
        return 0
    try:
        text = arguments.into.read_text()
    except OSError as error:
        raise ConfigError("--into", str(arguments.into), f"{error.strerror}; name an existing file") from None
    if BEGIN not in text or END not in text:
        raise ConfigError(
            "--into", str(arguments.into), f"it needs the two lines {BEGIN.strip()!r} and {END.strip()!r}"
        )
    arguments.into.write_text(with_table(text))
    return 0


def with_table(text: str) -> str:
    """The text with the table between the two marks renewed."""
    before, _, rest = text.partition(BEGIN)
    _, _, after = rest.partition(END)
    return f"{before}{BEGIN}\n{markdown_table()}\n{END}{after}"
