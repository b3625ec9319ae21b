"""The process of a private sidecar, as the engine's process that started it sees it.

It ends when that process does, in whatever way: it holds a pidfd of it. What it logs comes out of this process's
logger ``tierkv``; a thread carries it over, and takes note of the process's end.
"""

from __future__ import annotations

import fcntl
import logging
import os
import re
import select
import socket
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Mapping
from pathlib import Path

from tierkv.errors import SidecarError

log = logging.getLogger("tierkv")

READY_S = 60.0
"""So long it may take to be ready: it reads what a disk holds."""
_LOOK_S = 0.1
_END_S = 2.0
_PIPE_BYTES = 2**20
"""What it may log while this process does not read: more than it ever does, so that it does not wait for us."""
_TAIL_LINES = 12
_LINE = re.compile(r"\S+ \S+ (DEBUG|INFO|WARNING|ERROR|CRITICAL) (.*)")


class Child:
    """One life of a sidecar. Any thread."""

    def __init__(self, name: str, path: Path, given: Mapping[str, str]) -> None:
        """Starts it. Raises ``SidecarError``."""
        self._name = name
        self._tail: deque[str] = deque(maxlen=_TAIL_LINES)
        self._expected = self._late = False
        self._listened = threading.Event()
        """Nobody here waits for its notices any more."""
        if not sys.executable:
            raise SidecarError("a private sidecar needs a Python interpreter, and sys.executable is empty")
        self._notices = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC)
        started = False
        try:
            self._notices.bind("")  # the kernel chooses an abstract name, which leaves nothing behind
            self.process = self._spawn(path, given)
            started = True
        except OSError as error:
            raise SidecarError(f"the private sidecar {name!r} cannot be started: {error}") from error
        finally:
            if not started:
                self._notices.close()
        self.pid = self.process.pid
        self._reader = threading.Thread(target=self._read, name="tierkv-sidecar-log", daemon=True)
        self._reader.start()

    def _spawn(self, path: Path, given: Mapping[str, str]) -> subprocess.Popen[bytes]:
        command = [sys.executable, "-P", "-m", "tierkv.cli", "serve", "--socket", str(path), "--mode", "0600"]
        command += ["--group", "", "--with-parent", str(os.getpid()), "--while-used"]
        others = {name: text for name, text in os.environ.items() if not name.startswith("TIERKV_")}
        address = self._notices.getsockname()
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,  # so that Ctrl-C, meant for the engine, does not reach it
            env={
                **others,
                **given,
                "PYTHONPATH": os.pathsep.join(entry for entry in sys.path if entry),
                "NOTIFY_SOCKET": "@" + address[1:].decode(),  # never the engine's own, where it has one
            },
        )
        assert process.stdout is not None
        try:
            fcntl.fcntl(process.stdout, fcntl.F_SETPIPE_SZ, _PIPE_BYTES)
        except OSError:  # it keeps the usual size
            pass
        return process

    def wait_ready(self, by_s: float, given_up: threading.Event) -> None:
        """Until then, on ``time.monotonic``. Raises ``SidecarError`` with its last lines when it is not ready; it has
        ended then."""
        ready = False
        try:
            ready = self._is_ready(by_s, given_up)
        finally:
            self._listened.set()
            if not ready:
                self._expected = True  # what it said is told in the error
                self.kill()
        if not ready:
            self._reader.join(_END_S)
            how = "was not ready in time" if self._late else f"ended with status {self.process.returncode}"
            said = "; ".join(self._tail) or "it said nothing"
            raise SidecarError(f"the private sidecar {self._name!r} {how}: {said}")
        self._tail.clear()

    def _is_ready(self, by_s: float, given_up: threading.Event) -> bool:
        while self.process.poll() is None:
            if select.select([self._notices], [], [], _LOOK_S)[0] and self._notices.recv(4096) == b"READY=1":
                return True
            if time.monotonic() >= by_s or given_up.is_set():
                self._late = True
                return False
        return False

    def wait_end(self, timeout_s: float) -> bool:
        """It is about to end by itself."""
        self._expected = True
        try:
            self.process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            return False
        self._reader.join(_END_S)
        return True

    def kill(self) -> None:
        """Ends it at once, if it lives."""
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()

    def _read(self) -> None:
        """To the end of its log, and of the process."""
        pipe = self.process.stdout
        assert pipe is not None
        with pipe:
            for raw in pipe:
                line = raw.decode(errors="replace").rstrip()
                self._tail.append(line)
                said = _LINE.fullmatch(line)
                level = logging.WARNING if said is None else int(logging.getLevelName(said[1]))
                log.log(level, "sidecar %d: %s", self.process.pid, said[2] if said is not None else line)
        status = self.process.wait()
        self._listened.wait(READY_S)
        self._notices.close()
        if status and not self._expected:
            log.warning(
                "the private sidecar %r (pid %d) has ended with status %d", self._name, self.pid, status
            )
