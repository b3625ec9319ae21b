"""What a setting may hold: how it is read from a file, a keyword or the environment, and how it is shown.

A parser takes whatever TOML, Python or the environment gave (there everything is text) and returns the value, or
raises ``ValueError`` with what it would have taken.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from tierkv.units import format_bytes, format_seconds, parse_bytes, parse_seconds

_MAX_COUNT = 2**30
_MAX_WORKERS = 256
_MAX_TIME_S = 3650 * 86400.0
_TRUE = {"true", "1", "yes", "on"}
_FALSE = {"false", "0", "no", "off"}


@dataclass(frozen=True)
class Kind:
    """A type of setting. ``suffix`` is the unit that the dataclass field carries in its name."""

    name: str
    parse: Callable[[object], object]
    show: Callable[[object], object] = lambda value: value
    suffix: str = ""
    show_raw: Callable[[object], object] = lambda raw: raw
    """Makes what the user wrote fit for an error message (secrets!)."""


def choice(*names: str) -> Kind:
    """One of a few words."""

    def parse(raw: object) -> str:
        if not isinstance(raw, str) or raw not in names:
            raise ValueError(f"it must be one of {', '.join(names)}")
        return raw

    return Kind(" | ".join(f"`{name}`" for name in names), parse)


def _size(raw: object) -> int:
    if not isinstance(raw, str | int):
        raise ValueError("it must be a size such as '512 MiB', '4 GiB' or a number of bytes")
    return parse_bytes(raw)


def _time(raw: object) -> float:
    if not isinstance(raw, str | int | float):
        raise ValueError("it must be a time such as '250 ms', '2 s' or '1 h'")
    value = parse_seconds(raw)
    if value == 0:
        raise ValueError("it must be longer than nothing; every wait has a deadline")
    if value > _MAX_TIME_S:
        raise ValueError("it must be at most 10 years (3650 d)")
    return value


def _count(raw: object) -> int:
    if isinstance(raw, str) and raw.strip().isascii() and raw.strip().isdecimal():
        raw = int(raw)
    if not isinstance(raw, int) or isinstance(raw, bool) or not 1 <= raw <= _MAX_COUNT:
        raise ValueError(f"it must be a whole number of at least 1 and at most {_MAX_COUNT}")
    return raw


def _workers(raw: object) -> int:
    value = _count(raw)
    if value > _MAX_WORKERS:
        raise ValueError(f"each is a thread; it must be at most {_MAX_WORKERS}")
    return value


def _fraction(raw: object) -> float:
    hint = "it must be a fraction from 0 to below 1, such as 0.1"
    if isinstance(raw, str):
        try:
            raw = float(raw)
        except ValueError:
            raise ValueError(hint) from None
    if not isinstance(raw, int | float) or isinstance(raw, bool) or not 0 <= raw < 1:
        raise ValueError(hint)
    return float(raw)


def _switch(raw: object) -> bool:
    if isinstance(raw, bool):
        return raw
    if isinstance(raw, str) and raw.strip().lower() in _TRUE | _FALSE:
        return raw.strip().lower() in _TRUE
    raise ValueError("it must be true or false")


def _path(raw: object) -> Path:
    if not isinstance(raw, str | Path) or "\0" in str(raw):
        raise ValueError("it must be a path")
    try:
        return Path(raw).expanduser()
    except RuntimeError:
        raise ValueError("its home directory is not known; write the path in full") from None


def _name(raw: object) -> str:
    if not isinstance(raw, str):
        raise ValueError("it must be a name")
    return raw


def _secret(raw: object) -> str:
    if not isinstance(raw, str):
        raise ValueError("it must be text")
    return raw


def _url(raw: object) -> str:
    if not isinstance(raw, str):
        raise ValueError("it must be an address such as 'valkey://localhost:6379'")
    return raw  # taken apart by `config_check`, together with the password


def _redacted(value: object) -> object:
    """Without user and password, wherever a URL may stand in it."""
    if not isinstance(value, str):
        return value if value is None or isinstance(value, int | float) else f"a {type(value).__name__}"
    from tierkv.tiers.valkey_url import redacted

    return redacted(value) if "@" in value else value


def _stars(value: object) -> object:
    return None if value is None else "***"


def _bytes_text(value: object) -> str:
    """In binary units where that is exact, else with the number of bytes."""
    assert isinstance(value, int)
    short = format_bytes(value)
    return short if parse_bytes(short) == value else f"{short} ({value} bytes)"


def _seconds_text(value: object) -> str:
    """In the largest unit that divides it, as it would be written."""
    assert isinstance(value, float)
    for unit, length_s in (("d", 86400.0), ("h", 3600.0), ("min", 60.0)):
        if value >= length_s and value % length_s == 0:
            return f"{value / length_s:.15g} {unit}"
    return f"{value:.15g} s" if value >= 1 else format_seconds(value)


SIZE = Kind("size", _size, _bytes_text, "_bytes")
TIME = Kind("time", _time, _seconds_text, "_s")
COUNT = Kind("number", _count)
WORKERS = Kind("number", _workers)
FRACTION = Kind("fraction", _fraction)
SWITCH = Kind("`true` | `false`", _switch)
PATH = Kind("path", _path, str)
NAME = Kind("name", _name)
SECRET = Kind("text, never shown", _secret, _stars, show_raw=_stars)
URL = Kind("URL", _url, _redacted, show_raw=_redacted)
