"""One process owns a directory: ``flock`` on a lock file that carries the owner's pid.

The kernel drops the lock when its holder dies, however it dies, so there is no stale lock to clean up and no race
between processes that start at once. The pid in the file is only for the message.
"""

from __future__ import annotations

import fcntl
import os
import time
import weakref

from tierkv.errors import DirectoryInUse, TierError

_PID_WAIT_S = 1.0
"""How long the refused one waits for the winner to write its pid."""

_held: weakref.WeakSet[DirectoryLock] = weakref.WeakSet()


class DirectoryLock:
    """Exclusive ownership of ``directory`` from ``acquire`` to ``release``. Not thread-safe; raises nothing after."""

    def __init__(self, directory: str, name: str) -> None:
        self._directory = directory
        self._path = os.path.join(directory, name)
        self._fd: int | None = None

    def acquire(self) -> None:
        """Takes the directory or raises ``DirectoryInUse`` with the owner's pid; ``TierError`` when it cannot lock."""
        fd = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            owner = _read_owner(fd)
            os.close(fd)
            raise DirectoryInUse(self._directory, owner) from None
        except OSError as error:
            os.close(fd)
            raise TierError(f"{self._path} cannot be locked: {error.strerror}; use a local disk") from error
        self._fd = fd
        _write_owner(fd)
        if not _held:
            _let_children_go()
        _held.add(self)

    def stands(self) -> bool:
        """False when the file that was locked is no longer the one that others would lock."""
        try:
            return self._fd is not None and os.path.samestat(os.fstat(self._fd), os.stat(self._path))
        except OSError:
            return False

    def release(self) -> None:
        """Gives the directory up. The file stays: unlinking it would open a race."""
        if self._fd is not None:
            os.ftruncate(self._fd, 0)
            self.forget()

    def forget(self) -> None:
        """Closes the descriptor without a word in the file: what a forked child does with its copy."""
        if self._fd is not None:
            os.close(self._fd)
            self._fd = None
            _held.discard(self)


def living_owner(path: str | os.PathLike[str]) -> int | None:
    """The process that a lock file names, if it lives; takes nothing."""
    try:
        with open(path, "rb") as file:
            text = file.read(32).strip()
    except OSError:
        return None
    return int(text) if text.isdigit() and _alive(int(text)) else None


def _write_owner(fd: int) -> None:
    try:
        os.ftruncate(fd, 0)
        os.pwrite(fd, b"%d\n" % os.getpid(), 0)
    except OSError:  # a full disk: the lock holds without a name in it
        pass


def _read_owner(fd: int) -> int | None:
    """The pid of a living owner. The winner writes it a moment after it has the lock, so a dead or absent one is
    asked for again for a while."""
    give_up_s = time.monotonic() + _PID_WAIT_S
    while True:
        text = os.pread(fd, 32, 0).strip()
        pid = int(text) if text.isdigit() else None
        if pid is not None and _alive(pid):
            return pid
        if time.monotonic() > give_up_s:
            return pid
        time.sleep(0.002)


def _alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True


_children_let_go = False


def _let_children_go() -> None:
    """A forked child inherits the descriptor and with it the lock, which would then outlive a killed owner."""
    global _children_let_go
    if not _children_let_go:
        _children_let_go = True
        os.register_at_fork(after_in_child=_forget_all)


def _forget_all() -> None:
    for lock in list(_held):
        lock.forget()
