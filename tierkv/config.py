"""The configuration: from a TOML file, the environment and keywords to frozen dataclasses, checked before a start.

A keyword beats the environment, that beats the file, that beats the default. What nobody knows is refused, never
ignored. ``config_table`` holds the settings, ``config_check`` what must fit together and to the machine.
"""

from __future__ import annotations

import difflib
import os
import re
import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from tierkv.config_check import KEYWORD, Given, check, valkey_url
from tierkv.config_kinds import URL
from tierkv.config_memory import Machine
from tierkv.config_sidecar import TOKEN_ENV, SidecarConfig
from tierkv.config_table import BY_ENV, BY_KEY, BY_KEYWORD, OPTIONAL_TIERS, SECTIONS, SETTINGS, Setting
from tierkv.errors import ConfigError

FILE_ENV = "TIERKV_CONFIG"
"""The environment variable that names the file, where no argument does."""

_SERVICE_LINK = re.compile(
    r"TIERKV_(\w+_)?("
    r"SERVICE_HOST=|SERVICE_PORT(_\w+)?=\d+$|PORT(_\d+_(TCP|UDP|SCTP))?=\w+://|"
    r"PORT_\d+_(TCP|UDP|SCTP)_(PROTO|PORT|ADDR)=)"
)
"""What Kubernetes puts into the environment of every container next to a service called tierkv or tierkv-x."""

Write = Literal["through", "on_evict", "never"]
Recovery = Literal["none", "quiet", "strict"]


@dataclass(frozen=True, kw_only=True)
class HostConfig:
    capacity_bytes: int
    region_bytes: int
    """A multiple of 4096, at most the capacity."""
    populate: bool
    low_watermark: float
    pin_budget_bytes: int
    eviction: str
    promotion: str


@dataclass(frozen=True, kw_only=True)
class NvmeConfig:
    path: Path
    """Absolute. May not exist yet."""
    capacity_bytes: int
    min_free_bytes: int
    recovery: Recovery
    workers: int
    write: Write
    admission: str
    codec: str
    eviction: str


@dataclass(frozen=True, kw_only=True)
class ValkeyConfig:
    url: str = field(repr=False)
    """Where the server is, with user and password, as ``ValkeyTier`` takes it."""
    ca: Path | None
    cert: Path | None
    key: Path | None
    ttl_s: float
    connections: int
    timeout_s: float
    embedded_memory_bytes: int
    write: Write
    admission: str
    codec: str


@dataclass(frozen=True, kw_only=True)
class LimitsConfig:
    queue_bytes: int
    tenant_share: float | None
    max_blocks: int
    load_deadline_s: float
    lease_deadline_s: float
    shutdown_deadline_s: float


@dataclass(frozen=True, kw_only=True)
class WeightsConfig:
    cache: Path


@dataclass(frozen=True)
class Effective:
    """One setting as it is in force. ``value`` is fit to be shown: no secrets, sizes and times with their units."""

    key: str
    value: object
    origin: str
    """``keyword``, ``environment TIERKV_...``, ``file PATH:key`` or ``default``."""


@dataclass(frozen=True)
class Config:
    """A configuration that was checked. ``nvme`` and ``valkey`` are ``None`` when the tier is off."""

    host: HostConfig
    nvme: NvmeConfig | None
    valkey: ValkeyConfig | None
    limits: LimitsConfig
    sidecar: SidecarConfig
    weights: WeightsConfig
    effective: tuple[Effective, ...] = field(repr=False)
    """Every setting, for people: ``tierkv config check`` and the daemon's status."""
    notes: tuple[str, ...] = field(repr=False)
    """What is no error but good to know."""


def load_config(
    file: str | Path | None = None,
    *,
    environ: Mapping[str, str] | None = None,
    machine: Machine | None = None,
    **settings: object,
) -> Config:
    """Reads and checks the configuration: ``load_config("tierkv.toml", host_capacity="4 GiB")``.

    ``file`` defaults to what the environment variable ``TIERKV_CONFIG`` names, else there is none. ``environ`` defaults
    to the process's, ``machine`` to this one. Raises ``ConfigError`` with the key, the value and the way out.
    """
    environ = os.environ if environ is None else environ
    chosen = environ.get(FILE_ENV) if file is None else file
    given: dict[str, Given] = {}
    for source in (
        _from_file(Path(chosen)) if chosen else (),
        _from_environment(environ),
        _from_keywords(settings),
    ):
        given |= {one.setting.key: one for one in source}
    values = _values(given, environ)
    notes = check(values, given, machine or Machine())
    return _build(values, given, notes)


def setting_in_force(
    key: str, file: str | Path | None = None, *, environ: Mapping[str, str] | None = None
) -> object:
    """One setting, from file, environment or default, without a look at what the others would need: for a command that
    asks a daemon and runs no store. Raises ``ConfigError``."""
    environ = os.environ if environ is None else environ
    chosen = environ.get(FILE_ENV) if file is None else file
    named = [*(_from_file(Path(chosen)) if chosen else ()), *_from_environment(environ)]
    given = [one for one in named if one.setting.key == key]
    setting = BY_KEY[key]
    if given:
        return given[-1].parsed()
    return None if setting.default is None else setting.kind.parse(setting.default)


def _from_file(path: Path) -> Iterable[Given]:
    try:
        text = path.read_bytes().decode()
    except OSError as error:
        raise ConfigError(
            "configuration file", str(path), f"{error.strerror}; name an existing file"
        ) from error
    except UnicodeDecodeError as error:
        raise ConfigError(
            "configuration file", str(path), f"byte {error.start} is not UTF-8, which TOML is"
        ) from error
    try:
        tables = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise ConfigError("configuration file", str(path), f"not valid TOML: {error}") from error
    return [one for section, table in tables.items() for one in _from_table(path, section, table)]


def _from_table(path: Path, section: str, table: object) -> Iterable[Given]:
    if section not in SECTIONS and isinstance(table, dict):
        raise ConfigError(
            "section",
            f"[{section}]",
            f"no such section{_did_you_mean(section, SECTIONS)}; {_ALL_SECTIONS} (in {path})",
        )
    if section not in SECTIONS:
        inside = [key for key in BY_KEY if key.endswith(f".{section}")]
        wanted = f"did you mean {', '.join(inside)}?" if inside else _ALL_SECTIONS
        raise ConfigError(
            section,
            _presentable(section, table),
            f"it stands outside a section, where no setting does; {wanted} (in {path})",
        )
    if not isinstance(table, dict):
        raise ConfigError(
            section, table, f"it is a section: write [{section}] and its settings under it (in {path})"
        )
    for name, raw in table.items():
        key = f"{section}.{name}"
        if key not in BY_KEY:
            raise ConfigError(
                key,
                _presentable(key, raw),
                f"no such setting{_did_you_mean(key, BY_KEY, _LISTED)} (in {path})",
            )
        yield Given(BY_KEY[key], raw, f"file {path}:{key}", folder=path.absolute().parent)


def _from_environment(environ: Mapping[str, str]) -> Iterable[Given]:
    for name in sorted(environ):
        if (
            not name.startswith("TIERKV_")
            or name in (FILE_ENV, TOKEN_ENV)
            or _SERVICE_LINK.match(f"{name}={environ[name]}")
        ):
            continue
        if name not in BY_ENV:
            near = _did_you_mean(name, [*BY_ENV, FILE_ENV], _LISTED, common="TIERKV_")
            hint = f"no such setting{near}; unset it"
            raise ConfigError(f"environment {name}", _presentable(name, environ[name]), hint)
        yield Given(BY_ENV[name], environ[name], f"environment {name}")


def _from_keywords(settings: Mapping[str, object]) -> Iterable[Given]:
    for name, raw in settings.items():
        if name not in BY_KEYWORD:
            raise ConfigError(
                name, _presentable(name, raw), f"no such setting{_did_you_mean(name, BY_KEYWORD, _LISTED)}"
            )
        yield Given(BY_KEYWORD[name], raw, KEYWORD)


_ALL_SECTIONS = f"there are {', '.join(SECTIONS)}"
_LISTED = " (`tierkv config table` lists them all)"
_NEAR = 0.65
"""Names that share less than this of their letters are not taken for each other."""


def _did_you_mean(word: str, known: Iterable[str], otherwise: str = "", *, common: str = "") -> str:
    """The nearest of the known names if one is near, else ``otherwise``. ``common`` is what all of them begin with."""
    by_likeness = {_likeness(word.removeprefix(common), name.removeprefix(common)): name for name in known}
    nearest = max(by_likeness)
    return f" (did you mean {by_likeness[nearest]!r}?)" if nearest >= _NEAR else otherwise


def _likeness(word: str, name: str) -> float:
    """From 0 to 1. A section that both begin with says nothing about what follows it."""
    for section in SECTIONS:
        both = re.compile(rf"{section}[._]", re.IGNORECASE)
        if both.match(word) and both.match(name):
            word, name = both.sub("", word, count=1), both.sub("", name, count=1)
    return difflib.SequenceMatcher(None, word, name).ratio()


def _presentable(name: str, raw: object) -> object:
    """What an unknown setting holds, for the message. It may be a password whose name was mistyped."""
    if re.search("pass|pw|secret|token|auth", name, re.IGNORECASE):
        return "***"
    return URL.show_raw(raw)


def _values(given: Mapping[str, Given], environ: Mapping[str, str]) -> dict[str, Any]:
    """The value of every setting, by its key: given ones, then defaults, then those that derive from others."""
    values: dict[str, Any] = {"environ": environ}
    for setting in SETTINGS:
        if setting.key in given:
            values[setting.key] = given[setting.key].parsed()
        elif setting.derive is None:
            values[setting.key] = None if setting.default is None else setting.kind.parse(setting.default)
    for setting in SETTINGS:
        if setting.key not in given and setting.derive is not None:
            values[setting.key] = setting.derive(values)
    return values


def _build(values: Mapping[str, Any], given: Mapping[str, Given], notes: list[str]) -> Config:
    sections: dict[str, dict[str, Any]] = {section: {} for section in SECTIONS}
    for setting in SETTINGS:
        sections[setting.section][setting.field] = values[setting.key]
    return Config(
        host=HostConfig(**sections["host"]),
        nvme=NvmeConfig(**sections["nvme"]) if values[OPTIONAL_TIERS["nvme"]] is not None else None,
        valkey=_valkey(sections["valkey"]) if values[OPTIONAL_TIERS["valkey"]] is not None else None,
        limits=LimitsConfig(**sections["limits"]),
        sidecar=SidecarConfig(**sections["sidecar"]),
        weights=WeightsConfig(**sections["weights"]),
        effective=tuple(_effective(setting, values, given) for setting in SETTINGS),
        notes=tuple(notes),
    )


def _valkey(fields: Mapping[str, Any]) -> ValkeyConfig:
    rest = {name: value for name, value in fields.items() if name not in ("url", "password")}
    return ValkeyConfig(url=valkey_url(fields["url"], fields["password"]), **rest)


def _effective(setting: Setting, values: Mapping[str, Any], given: Mapping[str, Given]) -> Effective:
    value = values[setting.key]
    origin = given[setting.key].origin if setting.key in given else "default"
    return Effective(setting.key, None if value is None else setting.kind.show(value), origin)
