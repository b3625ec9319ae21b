"""What must fit together, and to the machine, before a store starts. Every refusal names key, value and way out."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

from tierkv.config_table import OPTIONAL_TIERS, Setting
from tierkv.errors import ConfigError

if TYPE_CHECKING:
    from tierkv.tiers.valkey_url import Address


@dataclass(frozen=True)
class Machine:
    """Where facts about this machine are read; tests name other folders."""

    proc: Path = Path("/proc")
    cgroup: Path = Path("/sys/fs/cgroup")


@dataclass(frozen=True)
class Given:
    """A setting that somebody gave, as they wrote it."""

    setting: Setting
    raw: object
    origin: str
    folder: Path | None = None
    """What a relative path starts from: the folder of the file, or (``None``) where the process is."""

    def parsed(self) -> object:
        """The value. Raises ``ConfigError``."""
        if self.setting.optional and (self.raw is None or self.raw == ""):
            return None
        if self.raw is None:
            raise self.error(
                f"it always has a value; leave it out to get the default, {self.setting.default!r}"
            )
        try:
            value = self.setting.kind.parse(self.raw)
        except ValueError as error:
            raise self.error(str(error)) from None
        if isinstance(value, Path):
            return Path(self.folder or Path.cwd(), value)
        return value

    def error(self, hint: str) -> ConfigError:
        return ConfigError(
            self.setting.key, self.setting.kind.show_raw(self.raw), f"{hint} (from {self.origin})"
        )


def default_cache_home(environ: Mapping[str, str]) -> Path:
    """Where small things that can be made again are kept."""
    named = environ.get("XDG_CACHE_HOME", "")
    home = Path(named) if named.startswith("/") else Path(environ.get("HOME") or "/tmp", ".cache")
    return home / "tierkv"


def valkey_address(url: str, password: str | None) -> Address | None:
    """Where the server is, ``None`` for ``embedded``. Raises ``ConfigError`` whose hint says what is wrong."""
    from tierkv.tiers.valkey_url import EMBEDDED, parse_address  # loads ssl, so only where a server is named

    if url == EMBEDDED:
        return None
    if password is None:
        return parse_address(url)
    scheme, mark, rest = url.partition("://")
    credentials, _, place = rest.rpartition("@")
    if ":" in credentials:
        raise ConfigError(
            "valkey.password", "***", "the password is in valkey.url too; leave one of them out"
        )
    return parse_address(f"{scheme}{mark}{credentials}:{quote(password, safe='')}@{place}")


def check(values: Mapping[str, Any], given: Mapping[str, Given], machine: Machine) -> list[str]:
    """Raises ``ConfigError`` for the first thing that cannot work; returns notes on what is good to know."""
    _no_settings_of_tiers_that_are_off(values, given)
    return []


def _no_settings_of_tiers_that_are_off(values: Mapping[str, Any], given: Mapping[str, Given]) -> None:
    for key, one in given.items():
        switch = OPTIONAL_TIERS.get(one.setting.section)
        if switch is not None and values[switch] is None and values[key] is not None:
            raise one.error(f"the tier is off, since {switch} is not set; set {switch}, or leave this out")
