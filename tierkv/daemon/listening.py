"""Sockets that the daemon listens on, and the lock that makes a name its own."""

from __future__ import annotations

import fcntl
import os
import socket
from pathlib import Path

from tierkv.errors import ConfigError

BACKLOG = 128


def lock_name(path: Path, key: str) -> int:
    """Holds the name of a unix socket for this process, so that of daemons that start at the same time one gets it.
    The lock's file stays: one that is removed can be locked by two. Returns its descriptor; ``key`` is the setting that
    a ``ConfigError`` names."""
    try:
        fd = os.open(path.with_name(path.name + ".lock"), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except OSError as error:
        raise ConfigError(
            key,
            str(path),
            f"{error.strerror or error}: {path.parent} must exist and be writable for this user",
        ) from None
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        owner = os.pread(fd, 32, 0).decode(errors="replace").strip() or "unknown"
        os.close(fd)
        raise ConfigError(
            key, str(path), f"another daemon (pid {owner}) listens on it; stop that, or choose another path"
        ) from None
    os.ftruncate(fd, 0)
    os.pwrite(fd, f"{os.getpid()}\n".encode(), 0)
    return fd


def listen_unix(path: Path, key: str, mode: int, group: int | None) -> socket.socket:
    """On a name that is locked already, so that what stands there is a dead daemon's. Raises ``ConfigError``."""
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    listening = False
    before = os.umask(0o777 & ~mode)  # so that it is never open to others, not even for a moment
    try:
        if path.is_socket():
            path.unlink()
        listener.bind(str(path))
        if group is not None:
            os.chown(path, -1, group)
        listener.listen(BACKLOG)
        listening = True
        return listener
    except OSError as error:
        raise ConfigError(key, str(path), f"no socket can be made there: {error.strerror or error}") from None
    finally:
        os.umask(before)
        if not listening:
            listener.close()


def listen_tcp(host: str, port: int, key: str) -> socket.socket:
    """Raises ``ConfigError``."""
    try:
        family, kind, proto, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        listener = socket.socket(family, kind, proto)
    except OSError as error:
        raise ConfigError(key, f"{host}:{port}", f"no such address: {error.strerror or error}") from None
    listening = False
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        listener.listen(BACKLOG)
        listening = True
        return listener
    except OSError as error:
        raise ConfigError(
            key, f"{host}:{port}", f"nobody can listen there: {error.strerror or error}; choose another port"
        ) from None
    finally:
        if not listening:
            listener.close()
