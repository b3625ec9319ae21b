"""What ``tierkv doctor`` tries: memory, disk, server, GPU, sockets. Each probe gives findings: fine, worth knowing, or
something that will not work, with what to change. None leaves anything behind.
"""

from __future__ import annotations

import ctypes
import json
import mmap
import os
import resource
import secrets
import socket
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Literal, NamedTuple

from tierkv import registry
from tierkv.clock import Deadline, SystemClock
from tierkv.config import Config, NvmeConfig, ValkeyConfig
from tierkv.config_memory import Machine, lockable_bytes, smallest_memory_limit
from tierkv.config_sidecar import SidecarConfig, http_address, read_token
from tierkv.daemon.link import Link, NotLetIn
from tierkv.errors import Away, ConfigError, TierKVError
from tierkv.ids import BlockKey
from tierkv.pages import shared_pages_can_be_huge
from tierkv.tier import BlobTier, Item, Outcome, Want
from tierkv.tiers.nvme_lock import living_owner
from tierkv.tiers.nvme_recover import LOCK_NAME
from tierkv.units import ALIGN_BYTES, MIB, format_bytes, format_seconds

Level = Literal["ok", "note", "bad"]

DISK_S = 1.0
"""So long each of writing and reading is tried."""
DISK_BYTES = 256 * MIB
SERVER_BLOCKS = 16
LEAST_DESCRIPTORS = 1024
DAEMON_S = 2.0
SERVER_S = 10.0


class Finding(NamedTuple):
    about: str
    level: Level
    text: str
    advice: str = ""
    """What to change; empty when all is fine."""


_SIGNS: Mapping[Level, str] = {"ok": "ok  ", "note": "note", "bad": "BAD "}


def tell(findings: Iterable[Finding], *, as_json: bool) -> int:
    """Prints each as it is found, or one JSON object. Returns the exit status: 1 when something will not work."""
    found = []
    for finding in findings:
        found.append(finding)
        if not as_json:
            print(f"{_SIGNS[finding.level]}  {finding.about}: {finding.text}", flush=True)
            if finding.advice:
                print(f"      {finding.advice}", flush=True)
    bad = any(finding.level == "bad" for finding in found)
    if as_json:
        print(json.dumps({"ok": not bad, "findings": [one._asdict() for one in found]}, indent=2))
    return int(bad)


# -- memory -------------------------------------------------------------------------------------------------------


def memory(config: Config, machine: Machine) -> Iterator[Finding]:
    wanted = format_bytes(config.host.capacity_bytes)
    limit = smallest_memory_limit(machine)
    if limit is None:
        yield Finding("memory", "note", "how much memory this process may use cannot be read")
    else:
        yield Finding(
            "memory", "ok", f"host.capacity is {wanted}; {limit.where} is {format_bytes(limit.bytes)}"
        )
    lockable = lockable_bytes()
    if lockable is not None and lockable < config.host.capacity_bytes:
        yield Finding(
            "locked memory",
            "note",
            f"RLIMIT_MEMLOCK is {format_bytes(lockable)}, less than host.capacity",
            "where engines register host RAM with a GPU driver that counts it: ulimit -l unlimited, "
            "or LimitMEMLOCK=infinity",
        )
    else:
        yield Finding("locked memory", "ok", "as much as is wanted")
    yield _huge_pages()
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft < LEAST_DESCRIPTORS:
        yield Finding(
            "open files",
            "note",
            f"only {soft} files may be open (at most {hard})",
            "ulimit -n 4096, or LimitNOFILE=4096",
        )
    else:
        yield Finding("open files", "ok", f"{soft} may be open")


def _huge_pages() -> Finding:
    path = "/sys/kernel/mm/transparent_hugepage/shmem_enabled"
    try:
        text = Path(path).read_text()
    except OSError:
        return Finding(
            "huge pages", "note", "this kernel has none for shared memory; nothing is lost but speed"
        )
    chosen = text.partition("[")[2].partition("]")[0]
    if chosen in ("always", "advise", "within_size", "force"):
        return Finding("huge pages", "ok", f"shared memory gets them ({chosen})")
    if shared_pages_can_be_huge():
        return Finding("huge pages", "ok", f"shared memory gets them when it is populated ({chosen})")
    return Finding(
        "huge pages",
        "note",
        f"shared memory gets none ({chosen}); copies and the start are slower",
        f"echo advise > {path}",
    )


# -- disk ---------------------------------------------------------------------------------------------------------


def disk(config: NvmeConfig) -> Iterator[Finding]:
    """In an unnamed file, so that the directory stays as it is, also while a daemon uses it."""
    folder = config.path
    while not folder.exists():  # the configuration was checked: some part of it exists and is writable
        folder = folder.parent
    found = os.statvfs(folder)
    free, need = found.f_bavail * found.f_frsize, config.capacity_bytes + config.min_free_bytes
    used = sum(file.stat().st_blocks * 512 for file in _files(config.path))
    owner = living_owner(config.path / LOCK_NAME)
    if owner is not None:
        yield Finding(
            "nvme owner",
            "note",
            f"process {owner} owns {config.path}: no other can use it",
            "as it should be when that is the daemon of this configuration; else choose another nvme.path",
        )
    level: Level = "ok" if free + used >= need else "note"
    yield Finding(
        "nvme space",
        level,
        f"{format_bytes(free)} free and {format_bytes(used)} in {config.path}; nvme.capacity and nvme.min_free want "
        f"{format_bytes(need)}",
        "" if level == "ok" else "free some, or lower nvme.capacity: the tier stops growing at nvme.min_free",
    )
    try:
        fd = os.open(folder, os.O_TMPFILE | os.O_RDWR | os.O_CLOEXEC, 0o600)
    except OSError as error:
        yield Finding(
            "nvme disk",
            "note",
            f"its speed cannot be tried, {folder} takes no unnamed file: {error.strerror}",
        )
        return
    try:
        yield from _direct(fd, folder)
    finally:
        os.close(fd)


def _files(folder: Path) -> list[Path]:
    try:
        return [path for path in folder.iterdir() if path.is_file()]
    except OSError:
        return []


def _direct(fd: int, folder: Path) -> Iterator[Finding]:
    try:
        direct = os.open(f"/proc/self/fd/{fd}", os.O_RDWR | os.O_DIRECT | os.O_CLOEXEC)
    except OSError as error:
        yield Finding(
            "nvme O_DIRECT", "note", f"{folder} does not take it ({error.strerror}): the page cache is used instead",
            "a file system such as ext4 or xfs takes it; tmpfs and some network ones do not",
        )  # fmt: skip
        return
    try:
        with mmap.mmap(-1, MIB) as piece:
            piece.write(secrets.token_bytes(MIB))  # aligned to a page, and nothing that a disk could compress
            written, write_s = _moved(lambda at: os.pwrite(direct, piece, at), DISK_BYTES)
            os.fdatasync(direct)
            read, read_s = _moved(lambda at: os.preadv(direct, [piece], at), written)
        yield Finding(
            "nvme O_DIRECT", "ok",
            f"works; one thread writes {_speed(written, write_s)} and reads {_speed(read, read_s)} in pieces of 1 MiB",
        )  # fmt: skip
    except OSError as error:
        yield Finding(
            "nvme O_DIRECT",
            "bad",
            f"{folder}: {error.strerror}",
            "see the kernel's log, or choose another disk",
        )
    finally:
        os.close(direct)


def _moved(move: Callable[[int], int], most_bytes: int) -> tuple[int, float]:
    """Moves pieces for ``DISK_S`` at the longest."""
    begin_s, moved = time.monotonic(), 0
    while moved < most_bytes and time.monotonic() - begin_s < DISK_S:
        moved += move(moved)
    return moved, time.monotonic() - begin_s


def _speed(moved_bytes: int, took_s: float) -> str:
    return f"{format_bytes(int(moved_bytes / max(took_s, 1e-9)))}/s"


# -- server -------------------------------------------------------------------------------------------------------


def server(config: ValkeyConfig) -> Iterator[Finding]:
    """With the tier itself: its own connections, its own way of writing."""
    from tierkv.tiers.valkey_url import TlsFiles

    clock = SystemClock()
    tier: BlobTier = registry.load("tier", "valkey", "valkey.url")(
        config.url,
        workers=1,
        ttl_s=60.0,
        connect_timeout_s=min(1.0, config.timeout_s),
        tls_files=TlsFiles(
            *("" if path is None else str(path) for path in (config.ca, config.cert, config.key))
        ),
        embedded_bytes=config.embedded_memory_bytes,
        clock=clock,
    )
    try:
        tier.start()
        yield from _served(tier, Deadline(clock, SERVER_S))
    except TierKVError as error:
        yield Finding(
            "valkey", "bad", str(error), "the store will not start like this; correct what it names"
        )
    finally:
        tier.close(Deadline(clock, 1.0))


def _served(tier: BlobTier, deadline: Deadline) -> Iterator[Finding]:
    keys = [BlockKey(secrets.token_bytes(32)) for _ in range(SERVER_BLOCKS)]
    tier.probe(keys[:1], deadline)  # the first one also connects
    status = tier.status()
    if not status.get("reachable", True):
        yield Finding(
            "valkey", "bad", f"no server answers: {status.get('trouble')}",
            "start it, or correct valkey.url; a store starts without it, and uses it when it comes",
        )  # fmt: skip
        return
    began_s = time.monotonic()
    for _ in range(20):
        tier.probe(keys[:1], deadline)
    round_trip_s = (time.monotonic() - began_s) / 20
    header, payload = (
        memoryview(mmap.mmap(-1, size)) for size in (ALIGN_BYTES, MIB)
    )  # aligned, as the tier wants it
    payload[:] = secrets.token_bytes(MIB)
    outcomes: list[Outcome] = []
    done = lambda _, outcome: outcomes.append(outcome)  # noqa: E731
    began_s = time.monotonic()
    tier.put_from([Item(key, header, payload, MIB) for key in keys], deadline, done)
    put_s = time.monotonic() - began_s
    began_s = time.monotonic()
    tier.get_into([Want(key, header, payload) for key in keys], deadline, done)
    get_s = time.monotonic() - began_s
    tier.delete(keys)
    failed = [outcome for outcome in outcomes if outcome is not Outcome.DONE]
    text = (
        f"{status.get('address')}, version {status.get('server_version') or 'unknown'}: round trip "
        f"{format_seconds(round_trip_s)}, one connection writes {_speed(len(keys) * MIB, put_s)} and reads "
        f"{_speed(len(keys) * MIB, get_s)}"
    )
    if failed:
        yield Finding(
            "valkey", "bad", f"{text}; {len(failed)} of {len(outcomes)} blocks failed ({failed[0].name.lower()})",
            "look at the server's maxmemory and proto-max-bulk-len, and at the rights of its user",
        )  # fmt: skip
    else:
        yield Finding("valkey", "ok", text)


# -- GPU, sockets -------------------------------------------------------------------------------------------------


def gpu() -> Finding:
    """Asks the driver how many there are, which makes no context on any."""
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return Finding("cuda", "note", "no driver here; the daemon needs none, engines on a GPU do")
    count = ctypes.c_int()
    status = driver.cuInit(0) or driver.cuDeviceGetCount(ctypes.byref(count))
    if status:
        return Finding(
            "cuda",
            "note",
            f"the driver answers with error {status}",
            "the daemon needs no GPU; engines do: try nvidia-smi",
        )
    return Finding("cuda", "ok", f"{count.value} GPUs")


def sockets(config: SidecarConfig) -> Iterator[Finding]:
    yield _place("socket", "sidecar.socket", config.socket)
    link = Link(str(config.socket), "tierkv doctor")
    try:
        link.call("health", {}, time.monotonic() + DAEMON_S)
        yield Finding("daemon", "ok", f"one answers at {config.socket}")
    except NotLetIn as error:
        yield Finding("daemon", "note", str(error))
    except Away:
        yield Finding("daemon", "note", f"none answers at {config.socket}")
    except TierKVError as error:
        yield Finding("daemon", "bad", str(error), "update the daemon and this command together")
    finally:
        link.close()
    if config.http is None:
        return
    place = http_address(config.http)
    if isinstance(place, Path):
        yield _place("http", "sidecar.http", place)
        return
    try:
        read_token(config.token_file, os.environ)
    except ConfigError as error:
        yield Finding("http", "bad", str(error), error.hint)
        return
    if config.token_file is not None and config.token_file.stat().st_mode & 0o077:
        yield Finding(
            "http",
            "note",
            f"{config.token_file} can be read by other users",
            f"chmod 600 {config.token_file}",
        )
    elif _is_taken(*place):
        yield Finding(
            "http",
            "note",
            f"somebody listens on {config.http}",
            "as it should be when that is the daemon of this configuration; else choose another sidecar.http",
        )
    else:
        yield Finding("http", "ok", f"{config.http}, with a token")


def _is_taken(host: str, port: int) -> bool:
    """Whether somebody listens there already; whoever answers nothing is not asked for long."""
    try:
        socket.create_connection((host, port), DAEMON_S).close()
    except OSError:
        return False
    return True


def _place(about: str, key: str, path: Path) -> Finding:
    folder = path.parent
    if not folder.is_dir():
        return Finding(
            about,
            "bad",
            f"{key} = {path}: {folder} is not there",
            f"mkdir -m 750 {folder}, or RuntimeDirectory=",
        )
    if not os.access(folder, os.W_OK | os.X_OK, effective_ids=True):
        return Finding(
            about, "bad", f"{key} = {path}: {folder} is not writable for this user", "change its owner"
        )
    if path.exists() and not path.is_socket():
        return Finding(
            about, "bad", f"{path} is there and is no socket", f"move it away, or choose another {key}"
        )
    return Finding(about, "ok", f"{path} can be made")
