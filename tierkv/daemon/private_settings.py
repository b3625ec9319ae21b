"""The settings of a private sidecar: how they get into its process, and how those who come later compare theirs.

They travel as environment variables, so that what is in force in the child follows the one rule that there is: a
keyword beats the environment, that beats the file. Only its own user can read them there.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sized
from pathlib import Path
from typing import Any

from tierkv.config import FILE_ENV, Config
from tierkv.config_table import BY_ENV, BY_KEYWORD, SETTINGS
from tierkv.daemon.session import Session
from tierkv.daemon.words import Words
from tierkv.errors import ConfigError

OWN = ("sidecar.socket", "sidecar.mode", "sidecar.group")
"""Settings that a private sidecar has of its own."""
_NOT_COMPARED = ("sidecar", "weights")
"""Sections that change nothing about the store."""


def environment_of(settings: Mapping[str, object], environ: Mapping[str, str]) -> dict[str, str]:
    """The variables that say the same as these keywords over that environment; for keywords that ``load_config`` has
    taken. Raises ``ConfigError`` for those that nobody can choose."""
    given = {name: text for name, text in environ.items() if name in BY_ENV and BY_ENV[name].key not in OWN}
    if environ.get(FILE_ENV):
        given[FILE_ENV] = str(Path(environ[FILE_ENV]).absolute())
    for name, value in settings.items():
        setting = BY_KEYWORD[name]
        if setting.key in OWN:
            raise ConfigError(
                setting.key, value, "the socket of a private sidecar follows from its id; leave it out"
            )
        given[setting.env] = _text(value)
    return given


def _text(value: object) -> str:
    if value is None:
        return ""
    if isinstance(value, bool):
        return "true" if value else "false"
    return str(value)


def settings_verb(
    config: Config, environ: Mapping[str, str], sessions: Callable[[], Sized]
) -> Callable[[Session, Words], dict[str, Any]]:
    """The verb ``settings`` of a private sidecar: what it was started with, for a successor, and what is in force."""
    given = {name: text for name, text in environ.items() if name in BY_ENV or name == FILE_ENV}
    values = {key: list(pair) for key, pair in values_of(config).items()}

    def answer(session: Session, words: Words) -> dict[str, Any]:
        return {"given": given, "values": values, "pid": os.getpid(), "sessions": len(sessions())}

    return answer


def values_of(config: Config) -> dict[str, tuple[str, str]]:
    """By key: the value, and how it is shown to people. Secrets are in it, so it is for the sidecar's user only."""
    shown = {one.key: one.value for one in config.effective}
    found = {}
    for setting in SETTINGS:
        if setting.section not in _NOT_COMPARED:
            value = getattr(getattr(config, setting.section), setting.field, None)
            found[setting.key] = (repr(value), str(shown[setting.key]))
    return found


def compare(name: str, mine: Config, told: Mapping[str, Any]) -> None:
    """Raises ``ConfigError`` for the first setting that differs from that of the sidecar which is running."""
    theirs = told["values"]
    for key, (value, shown) in values_of(mine).items():
        there = theirs.get(key)
        if there is None or there[0] != value:
            what = "another value" if there is None or there[1] == shown else there[1]
            raise ConfigError(
                key,
                shown,
                f"the private sidecar {name!r} (pid {told['pid']}) runs with {what}; all processes of an engine give "
                "the same settings, or none",
            )
