"""A daemon for measurements, and a bare echo server: each a process of its own."""

from __future__ import annotations

import json
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from tierkv.daemon.connect import connect
from tierkv.daemon.remote import RemoteClient
from tierkv.units import MIB

START_S = 30.0
READY = "READY=1"


@contextmanager
def folder() -> Iterator[Path]:
    """In /tmp: the path of a socket must be short."""
    path = Path(tempfile.mkdtemp(prefix="tkv-"))
    try:
        yield path
    finally:
        shutil.rmtree(path)


@contextmanager
def daemon(place: Path, capacity_bytes: int) -> Iterator[str]:
    """Its address. Host RAM alone."""
    process, _ = start_daemon(place, capacity_bytes)
    try:
        yield f"unix://{place / 'socket'}"
    finally:
        stop(process)


def start_daemon(
    place: Path, capacity_bytes: int, **settings: str | int | float
) -> tuple[subprocess.Popen[bytes], float]:
    """The process, and after how many seconds it said that it is ready. ``settings``: like ``nvme_write="through"``."""
    config = place / "tierkv.toml"
    given = {"host_capacity": capacity_bytes, "host_region": min(64 * MIB, capacity_bytes), **settings}
    lines = [f"{name.replace('_', '.', 1)} = {json.dumps(value)}" for name, value in given.items()]
    config.write_text("\n".join(lines) + "\n")
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as ear:
        name = str(place / "notify")
        with suppress(FileNotFoundError):
            Path(name).unlink()
        ear.bind(name)
        ear.settimeout(START_S)
        start_s = time.perf_counter()
        process = subprocess.Popen(
            [
                sys.executable,
                "-m",
                "tierkv.cli",
                "serve",
                "--config",
                str(config),
                "--socket",
                str(place / "socket"),
            ],
            env={"NOTIFY_SOCKET": name, "PATH": ""},
            stderr=subprocess.DEVNULL,
        )
        said = ear.recv(100).decode()
        took_s = time.perf_counter() - start_s
    if said != READY:
        raise RuntimeError(f"the daemon said {said!r}")
    return process, took_s


def stop(process: subprocess.Popen[bytes]) -> None:
    process.terminate()
    process.wait(START_S)


@contextmanager
def client_of(address: str) -> Iterator[RemoteClient]:
    client = connect(address, owner="bench")
    try:
        until_s = time.monotonic() + START_S
        while not client.health().ready:
            if time.monotonic() > until_s:
                raise RuntimeError(f"the daemon is not ready after {START_S} s: {client.health()}")
            time.sleep(0.05)
        yield client
    finally:
        client.close()


@contextmanager
def echo(place: Path) -> Iterator[socket.socket]:
    """A connection to a process that answers so many bytes with so many: 8 bytes name both numbers."""
    path = str(place / "echo")
    process = subprocess.Popen([sys.executable, "-m", "bench.limit_echo", path])
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        until_s = time.monotonic() + START_S
        while True:
            try:
                sock.connect(path)
                break
            except OSError:
                if time.monotonic() > until_s:
                    raise
                time.sleep(0.02)
        yield sock
    finally:
        sock.close()
        stop(process)
