"""Sockets that the daemon listens on, and the lock that makes a name its own."""

from __future__ import annotations

import errno
import fcntl
import os
import socket
from pathlib import Path

from tierkv.errors import AddressInUse, ConfigError

BACKLOG = 128


def lock_name(path: Path, key: str) -> int:
    """Holds the name of a unix socket for this process, so that of daemons that start at the same time one gets it.
    Returns a descriptor for ``unlock_name``; ``key`` is the setting that an error names. Raises ``ConfigError``, and
    ``AddressInUse`` when another has it."""
    try:
        fd = try_lock(lock_of(path))
    except OSError as error:
        raise ConfigError(
            key,
            str(path),
            f"{error.strerror or error}: {path.parent} must exist and be writable for this user",
        ) from None
    if fd is None:
        raise AddressInUse(
            key,
            str(path),
            f"another daemon (pid {owner_of(lock_of(path))}) listens on it; stop that, or choose another path",
        )
    return fd


def unlock_name(path: Path, fd: int) -> None:
    """Gives a name up that ``lock_name`` holds."""
    unlock(lock_of(path), fd)


def lock_of(path: Path) -> Path:
    return path.with_name(path.name + ".lock")


def try_lock(path: Path) -> int | None:
    """Makes a file and locks it for this process, whose id it holds then; ``None`` when another has it. The lock goes
    with the process, the file with ``unlock``. Raises ``OSError``."""
    while True:
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        locked = False
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            locked = _is_still(path, fd)  # else it was removed meanwhile, and others lock another
            if locked:
                os.ftruncate(fd, 0)
                os.pwrite(fd, f"{os.getpid()}\n".encode(), 0)
                return fd
        except BlockingIOError:
            return None
        finally:
            if not locked:
                os.close(fd)


def unlock(path: Path, fd: int) -> None:
    """Removes the file while it is locked, so that nobody locks one that is no longer there."""
    path.unlink(missing_ok=True)
    os.close(fd)


def owner_of(path: Path) -> str:
    """The id of the process that locked a file, as far as it can be read."""
    try:
        return path.read_text(errors="replace").strip() or "unknown"
    except OSError:
        return "unknown"


def _is_still(path: Path, fd: int) -> bool:
    try:
        there = os.stat(path, follow_symlinks=False)
    except FileNotFoundError:
        return False
    mine = os.fstat(fd)
    return (there.st_dev, there.st_ino) == (mine.st_dev, mine.st_ino)


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
    """Raises ``ConfigError``, and ``AddressInUse`` for a port that another has."""
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
        refusal = AddressInUse if error.errno == errno.EADDRINUSE else ConfigError
        raise refusal(
            key, f"{host}:{port}", f"nobody can listen there: {error.strerror or error}; choose another port"
        ) from None
    finally:
        if not listening:
            listener.close()
