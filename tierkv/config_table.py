"""Every setting, in one table: what it is called, what it takes, what it is when nobody says anything, what it means.

A setting ``section.key`` is given in a TOML file as ``key`` under ``[section]``, as the keyword ``section_key``, or as
the environment variable ``TIERKV_SECTION_KEY``. ``docs/configuration.md`` is written from this table, and a test keeps
the two equal. At most 40 rows: a store that needs more knobs needs better defaults.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tierkv.config_kinds import (
    COUNT,
    FRACTION,
    NAME,
    PATH,
    SECRET,
    SIZE,
    SWITCH,
    TIME,
    URL,
    WORKERS,
    Kind,
    choice,
)
from tierkv.config_sidecar import DEFAULT_SOCKET, GROUP, LISTEN, MODE
from tierkv.errors import ConfigError
from tierkv.units import ALIGN_BYTES, KIB, MIB

MAX_SETTINGS = 40
MAX_REGION_BYTES = 256 * MIB
MIN_INDEX_BLOCKS, MAX_INDEX_BLOCKS = 65_536, 4_194_304

Values = Mapping[str, Any]
"""What other settings hold, by key, and the environment under ``environ``."""


@dataclass(frozen=True)
class Setting:
    """One row. ``default`` is what a user would write; a ``derive`` computes it from the other values instead, and
    then ``default`` says how. ``None``: unset."""

    key: str
    kind: Kind
    default: object
    meaning: str
    derive: Callable[[Values], object] | None = None
    optional: bool = False
    """May be unset, also explicitly: by ``None`` as a keyword or an empty string anywhere."""

    @property
    def section(self) -> str:
        return self.key.partition(".")[0]

    @property
    def env(self) -> str:
        return "TIERKV_" + self.key.replace(".", "_").upper()

    @property
    def keyword(self) -> str:
        return self.key.replace(".", "_")

    @property
    def field(self) -> str:
        """The attribute of the section's dataclass: the key, with its unit."""
        return self.key.partition(".")[2] + self.kind.suffix


def region_bytes(capacity_bytes: int) -> int:
    """The size of the regions that the host's capacity is cut into when nobody chose one.

    A sixteenth, in whole huge pages, at most 256 MiB; a small capacity makes fewer regions of up to one huge page.
    Little of the capacity is lost either way, and 0 means that it cannot hold anything.
    """
    huge = 2 * MIB
    if capacity_bytes < 16 * huge:
        regions = max(1, -(-capacity_bytes // huge))
        return capacity_bytes // regions // ALIGN_BYTES * ALIGN_BYTES
    return min(capacity_bytes // 16 // huge * huge, MAX_REGION_BYTES)


def disk_workers(cores: int) -> int:
    """How many threads move blocks to and from the disk when nobody chose: a call is of up to 8 MiB, so that few keep
    a disk busy, and many on few cores spend their time on taking turns. On two cores 2, 4 and 8 wrote 0.85, 0.94 and
    1.00 of what fio does, and reading cost 93, 111 and 124 us of CPU a MiB."""
    return min(max(2 * cores, 4), 8)


def _index_blocks(values: Values) -> int:
    stored_bytes = values["host.capacity"] + (values["nvme.capacity"] if values["nvme.path"] else 0)
    return int(min(max(stored_bytes // (64 * KIB), MIN_INDEX_BLOCKS), MAX_INDEX_BLOCKS))


def _weights_cache(values: Values) -> Path:
    environ = values["environ"]
    named = environ.get("XDG_CACHE_HOME", "")
    if named.startswith("/"):
        return Path(named, "tierkv", "weights.json")
    try:
        home = Path(environ.get("HOME") or Path.home())
    except (
        RuntimeError
    ):  # never a folder that other users can write to: digests decide what bytes are trusted
        raise ConfigError(
            "weights.cache", None, "no home directory is known; set it, or XDG_CACHE_HOME"
        ) from None
    return home / ".cache" / "tierkv" / "weights.json"


WRITE = choice("through", "on_evict", "never")
RECOVERY = choice("none", "quiet", "strict")

SETTINGS: tuple[Setting, ...] = (
    Setting("host.capacity", SIZE, "1 GiB", "RAM for blocks, allocated at start. Every byte passes through it."),
    Setting("host.region", SIZE, "1/16 of `host.capacity`, at most 256 MiB",
            "The arena is cut into regions of this size, each for one size of block; a block must fit into one.",
            derive=lambda values: region_bytes(values["host.capacity"])),
    Setting("host.populate", SWITCH, True,
            "Touch all pages in the background at start, so that no store waits for one."),
    Setting("host.low_watermark", FRACTION, 0.1,
            "The reaper begins to clean blocks when less than this share of the slots is free or clean (or less than "
            "64 MiB, or a fourth where `host.capacity` is small), and goes on until twice this share is."),
    Setting("host.pin_budget", SIZE, "1/4 of `host.capacity`",
            "At most this much of it is held by `pin`; of a chain that would go beyond, the beginning is pinned.",
            derive=lambda values: values["host.capacity"] // 4),
    Setting("host.eviction", NAME, "density", "Eviction policy: who leaves host RAM first."),
    Setting("host.promotion", NAME, "on_hit",
            "Promotion policy: whether a block in a colder tier is loaded (`on_hit`), or computed again where that is "
            "measured to be quicker (`break_even`)."),
    Setting("nvme.path", PATH, None, "Directory of the NVMe tier, owned by one process. Unset: the tier is off.",
            optional=True),
    Setting("nvme.capacity", SIZE, "16 GiB", "Disk space for blocks, counting what earlier runs left."),
    Setting("nvme.min_free", SIZE, "1 GiB", "The file system always keeps this much free."),
    Setting("nvme.recovery", RECOVERY, "quiet",
            "At start: forget what is there, drop what does not verify, or refuse to start and name it."),
    Setting("nvme.workers", WORKERS, "two for each core, 4 to 8",
            "Threads that read and write the disk. More cost CPU time and move hardly more bytes.",
            derive=lambda values: disk_workers(len(os.sched_getaffinity(0)))),
    Setting("nvme.write", WRITE, "on_evict",
            "When blocks go to the tier: at once, ahead of their eviction from host RAM, or never."),
    Setting("nvme.admission", NAME, "always", "Admission policy: which blocks the tier takes."),
    Setting("nvme.codec", NAME, "raw", "Stored as `raw`, `lz4`, `planes_zstd`, `int8` or `fp8_e4m3`, where that pays."),
    Setting("nvme.eviction", NAME, "density", "Eviction policy: who leaves the disk first."),
    Setting("valkey.url", URL, None,
            "`embedded` (starts a private server), `valkey://host:6379`, `valkeys://host:6379` (TLS) or "
            "`unix:///path`. Unset: the tier is off.", optional=True),
    Setting("valkey.password", SECRET, None, "Password, when it is not in the URL. The user name is in the URL.",
            optional=True),
    Setting("valkey.ca", PATH, None, "File with the authorities to trust for `valkeys://`. Unset: the system's.",
            optional=True),
    Setting("valkey.cert", PATH, None, "File with this client's certificate for `valkeys://`.", optional=True),
    Setting("valkey.key", PATH, None, "File with the key of `valkey.cert`.", optional=True),
    Setting("valkey.ttl", TIME, "1 d", "Blocks are forgotten this long after they were written."),
    Setting("valkey.connections", WORKERS, 4, "Connections for data, each with a thread of its own."),
    Setting("valkey.timeout", TIME, "2 s", "Deadline of one call to the server; then it counts as a miss."),
    Setting("valkey.embedded_memory", SIZE, "1 GiB", "RAM of the server that `embedded` starts."),
    Setting("valkey.write", WRITE, "on_evict", "As `nvme.write`."),
    Setting("valkey.admission", NAME, "always", "As `nvme.admission`."),
    Setting("valkey.codec", NAME, "raw", "As `nvme.codec`."),
    Setting("limits.queue", SIZE, "256 MiB",
            "Blocks that may wait on one edge; beyond it a demotion is put off. A fourth of it may be on its way."),
    Setting("limits.tenant_share", FRACTION, None,
            "Share of host RAM, and of the disk, that the blocks of any one tenant (salt) may take. Unset: all of it.",
            optional=True),
    Setting("limits.max_blocks", COUNT, "one for each 64 KiB of `host.capacity` and `nvme.capacity`, 65536 to 4194304",
            "Blocks that the index knows, over all tiers.", derive=_index_blocks),
    Setting("limits.load_deadline", TIME, "5 s", "A load that takes longer is a miss, where the caller names no time."),
    Setting("limits.lease_deadline", TIME, "60 s", "A lease that is held longer is reported."),
    Setting("limits.shutdown_deadline", TIME, "3 s",
            "Time for closing: half of it for writing to a persistent tier what is only in host RAM."),
    Setting("sidecar.socket", PATH, DEFAULT_SOCKET, "Where `tierkv serve` listens, and where the commands ask."),
    Setting("sidecar.mode", MODE, "0600, or 0660 with `sidecar.group`",
            "Who may connect, as for chmod; also to an HTTP face on a unix socket.",
            derive=lambda values: 0o600 if values["sidecar.group"] is None else 0o660),
    Setting("sidecar.group", GROUP, None,
            "Group of the socket, whose members may connect as far as `sidecar.mode` lets them. Unset: the daemon's "
            "own user and root only.", optional=True),
    Setting("sidecar.http", LISTEN, None,
            "HTTP face for people, probes and Prometheus. Unset: none. On TCP it needs a token.", optional=True),
    Setting("sidecar.token_file", PATH, None,
            "File with the bearer token of the HTTP face. Unset: the environment variable `TIERKV_SIDECAR_TOKEN`.",
            optional=True),
    Setting("weights.cache", PATH, "`$XDG_CACHE_HOME/tierkv/weights.json`",
            "Where digests of weight files are remembered.",
            derive=_weights_cache),
)  # fmt: skip

BY_KEY: dict[str, Setting] = {setting.key: setting for setting in SETTINGS}
BY_ENV: dict[str, Setting] = {setting.env: setting for setting in SETTINGS}
BY_KEYWORD: dict[str, Setting] = {setting.keyword: setting for setting in SETTINGS}
SECTIONS: tuple[str, ...] = tuple(dict.fromkeys(setting.section for setting in SETTINGS))
OPTIONAL_TIERS: dict[str, str] = {"nvme": "nvme.path", "valkey": "valkey.url"}
"""Sections whose tier is off until this setting is given."""


def markdown_table() -> str:
    """The table for ``docs/configuration.md``."""
    lines = ["| setting | takes | default | meaning | environment |", "|---|---|---|---|---|"]
    for setting in SETTINGS:
        takes = setting.kind.name.replace("|", "\\|")
        lines.append(
            f"| `{setting.key}` | {takes} | {_default_text(setting)} | {setting.meaning} | `{setting.env}` |"
        )
    return "\n".join(lines) + "\n"


def _default_text(setting: Setting) -> str:
    if setting.default is None:
        return "unset"
    if setting.derive is not None:
        return str(setting.default)
    return f"`{str(setting.default).lower() if isinstance(setting.default, bool) else setting.default}`"
