"""Where the private sidecar of an engine listens: a path that follows from the engine's id, for this user alone."""

from __future__ import annotations

import hashlib
import os
import re
import socket
import stat
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path

from tierkv.config_sidecar import SOCKET_PATH_BYTES
from tierkv.daemon.listening import lock_of, try_lock, unlock
from tierkv.errors import ConfigError

_READABLE = 24
"""So many characters of an id are seen in the name of its socket; a digest says the rest."""
_SOCKET, _START = ".sock", ".start"


def place_of(name: str, environ: Mapping[str, str]) -> Path:
    """The socket of the engine called so. Its folder is made if need be. Raises ``ConfigError``."""
    if not name:
        raise ConfigError(
            "private", name, "an engine's id is text that its processes have in common, and no others"
        )
    digest = hashlib.sha256(name.encode(errors="surrogateescape")).hexdigest()[:16]
    file = f"{re.sub(r'[^A-Za-z0-9_-]', '_', name)[:_READABLE]}-{digest}{_SOCKET}"
    wrong = ""
    for folder in _folders(environ):
        path = folder / file
        if len(os.fsencode(path)) > SOCKET_PATH_BYTES:
            wrong = wrong or f"{folder} is too long for a socket"
            continue
        try:
            _make_private(folder)
            return path
        except OSError as error:
            wrong = wrong or f"{folder}: {error.strerror}"
    raise ConfigError("private", name, f"no place for its socket: {wrong}; set XDG_RUNTIME_DIR or TMPDIR")


def start_lock_of(path: Path) -> Path:
    """Who has it starts the sidecar."""
    return path.with_suffix(_START)


def takes_connections(path: Path) -> bool:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        try:
            probe.settimeout(1.0)
            probe.connect(os.fspath(path))
        except OSError:
            return False
        return True


def sweep(folder: Path) -> None:
    """Removes what sidecars have left that were killed together with their engines. The living hold a lock."""
    left = [*folder.glob(f"*{_SOCKET}"), *folder.glob(f"*{_SOCKET}.lock"), *folder.glob(f"*{_START}")]
    for name in {path.name.partition(".")[0] for path in left}:
        path = folder / f"{name}{_SOCKET}"
        try:
            start = try_lock(start_lock_of(path))  # nobody starts one meanwhile
            if start is None:
                continue
            try:
                remove_dead(path)
            finally:
                unlock(start_lock_of(path), start)
        except OSError:
            continue


def remove_dead(path: Path) -> bool:
    """Removes what a dead sidecar has left of its socket; False when it lives. For who has the start lock."""
    fd = try_lock(lock_of(path))
    if fd is None:
        return False
    path.unlink(missing_ok=True)
    unlock(lock_of(path), fd)
    return True


def _folders(environ: Mapping[str, str]) -> Iterator[Path]:
    """The same in all processes of an engine, since they have the environment in common."""
    runtime = environ.get("XDG_RUNTIME_DIR", "")
    if runtime.startswith("/"):
        yield Path(runtime, "tierkv")
    for parent in dict.fromkeys((environ.get("TMPDIR") or tempfile.gettempdir(), "/tmp")):
        yield Path(parent, f"tierkv-{os.getuid()}").absolute()


def _make_private(folder: Path) -> None:
    """Raises ``OSError`` for a folder that others could change."""
    folder.mkdir(mode=0o700, exist_ok=True)
    facts = os.lstat(folder)
    if not stat.S_ISDIR(facts.st_mode) or facts.st_uid != os.getuid() or facts.st_mode & 0o077:
        raise PermissionError(1, "it must be a directory of this user with mode 0700", str(folder))
