"""A real daemon in a process of its own, for tests, and ways to ask it."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import select
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

import tierkv
from tests.memory_limit import memory_limit

ROOT = Path(__file__).parent.parent
PATIENCE_S = 60.0
"""For a busy machine; nothing here is about speed."""
BLOCK_TOKENS = 16
BLOCK_BYTES = 64 * 1024


@dataclass
class Daemon:
    """``tierkv serve``. ``told`` is what it said to systemd."""

    process: subprocess.Popen[str]
    folder: Path
    notified: socket.socket
    token: str | None = None
    told: list[str] = field(default_factory=list)

    @property
    def pid(self) -> int:
        return self.process.pid

    @property
    def socket(self) -> Path:
        return self.folder / "t.sock"

    @property
    def config(self) -> Path:
        return self.folder / "t.toml"

    @property
    def log(self) -> str:
        return (self.folder / "log").read_text()

    def wait_for(self, state: str) -> None:
        """Until it tells systemd so."""
        while state not in self.told:
            ended = (
                self.process.poll() is not None
            )  # before the look: it may have said it with its last breath
            if select.select([self.notified], [], [], 0.2)[0]:
                self.told.append(self.notified.recv(4096).decode())
            else:
                assert not ended, self.log

    def client(self) -> tierkv.daemon.remote.RemoteClient:  # type: ignore[name-defined]
        return tierkv.connect(f"unix://{self.socket}", owner="test")

    def stop(self) -> int:
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(PATIENCE_S)

    def connect_http(self) -> http.client.HTTPConnection:
        """To where the log says that it listens."""
        (where,) = (line.split("HTTP on ")[1] for line in self.log.splitlines() if "HTTP on " in line)
        if where.startswith("http://"):
            return http.client.HTTPConnection(where.removeprefix("http://"), timeout=PATIENCE_S)
        return UnixConnection(where.removeprefix("unix://"))

    def ask(
        self, path: str, body: Any = None, *, token: str | None = None, method: str | None = None
    ) -> tuple[int, Any]:
        """The status and the answer: JSON as values, else text. With this daemon's token unless another is given."""
        status, kind, text = self.ask_raw(path, body, token=token, method=method)
        return status, json.loads(text) if kind == "application/json" else text.decode()

    def ask_raw(
        self, path: str, body: Any = None, *, token: str | None = None, method: str | None = None
    ) -> tuple[int, str, bytes]:
        token = self.token if token is None else token
        headers = {} if not token else {"Authorization": f"Bearer {token}"}
        with contextlib.closing(self.connect_http()) as connection:
            data = body if isinstance(body, bytes | None) else json.dumps(body).encode()
            connection.request(method or ("GET" if body is None else "POST"), path, data, headers)
            answer = connection.getresponse()
            return answer.status, answer.headers.get_content_type(), answer.read()

    def metrics(self) -> dict[tuple[str, tuple[tuple[str, str], ...]], float]:
        """By name and labels."""
        from prometheus_client.parser import text_string_to_metric_families

        status, text = self.ask("/metrics")
        assert status == 200
        return {
            (sample.name, tuple(sorted(sample.labels.items()))): sample.value
            for family in text_string_to_metric_families(text)
            for sample in family.samples
        }


class UnixConnection(http.client.HTTPConnection):
    def __init__(self, path: str) -> None:
        super().__init__("localhost", timeout=PATIENCE_S)
        self._path = path

    def connect(self) -> None:
        self.sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.sock.settimeout(PATIENCE_S)
        self.sock.connect(self._path)


def write_config(folder: Path, **settings: object) -> Path:
    """``host_capacity="64 MiB"`` and so on; the socket and small sizes are there already."""
    chosen = {"host_capacity": "32 MiB", "sidecar_socket": str(folder / "t.sock"), **settings}
    lines = []
    for name, value in chosen.items():
        section, _, key = name.partition("_")
        shown = str(value).lower() if isinstance(value, bool) else json.dumps(value)
        lines.append(f"{section}.{key} = {shown}")
    path = folder / "t.toml"
    path.write_text("\n".join(lines))
    return path


def environment(**more: str) -> dict[str, str]:
    clean = {name: value for name, value in os.environ.items() if not name.startswith("TIERKV_")}
    return {**clean, "PYTHONPATH": str(ROOT), **more}


@contextlib.contextmanager
def running_daemon(
    folder: Path, *, token: str | None = None, memory_bytes: int | None = None, **settings: object
) -> Iterator[Daemon]:
    """Started, and ready by its own word. ``memory_bytes``: the kernel kills it when it takes more than so much beyond
    what it has then; whether it did is looked at in the end."""
    config = write_config(folder, **settings)
    notified = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
    notified.settimeout(PATIENCE_S)
    (folder / "notify").unlink(missing_ok=True)
    notified.bind(str(folder / "notify"))
    more = {"NOTIFY_SOCKET": str(folder / "notify")} | (
        {} if token is None else {"TIERKV_SIDECAR_TOKEN": token}
    )
    with notified, open(folder / "log", "w") as log:
        process = subprocess.Popen(
            [sys.executable, "-m", "tierkv.cli", "serve", "--config", str(config)],
            stdout=log, stderr=log, text=True, env=environment(**more),
        )  # fmt: skip
        daemon = Daemon(process, folder, notified, token)
        try:
            daemon.wait_for("READY=1")
            if memory_bytes is None:
                yield daemon
            else:
                with memory_limit(process.pid, memory_bytes) as limit:
                    try:
                        yield daemon
                        assert limit.kills() == 0, f"the daemon has taken more than {memory_bytes} bytes"
                    finally:
                        process.kill()  # only then can the limit go
                        process.wait()
        finally:
            if process.poll() is None:
                process.terminate()
            try:
                process.wait(PATIENCE_S)
            finally:
                process.kill()
                process.wait()


def run_tierkv(*words: object, **environ: str) -> subprocess.CompletedProcess[str]:
    """The command line, to its end."""
    return subprocess.run(
        [sys.executable, "-m", "tierkv.cli", *map(str, words)],
        capture_output=True, text=True, check=False, timeout=PATIENCE_S, env=environment(**environ),
    )  # fmt: skip


def spec_of(salt: str | None = None) -> tierkv.NamespaceSpec:
    group = tierkv.LayerGroup(
        "all", tierkv.GroupKind.FULL, layers=1, page_bytes=BLOCK_BYTES, engine_block_tokens=BLOCK_TOKENS
    )
    layout = tierkv.Layout("plain", "float16", hash_tokens=BLOCK_TOKENS, groups=(group,))
    return tierkv.NamespaceSpec(
        weights=tierkv.Weights("revision", "v1"), layout=layout, engine="test", salt=salt
    )


def tokens_of(blocks: int, first: int = 0) -> list[int]:
    return [first * 100_000 + i for i in range(blocks * BLOCK_TOKENS + 1)]


def payloads_of(blocks: int) -> list[np.ndarray[Any, Any]]:
    return [np.full(BLOCK_BYTES, i % 251, np.uint8) for i in range(blocks)]
