"""``tierkv top`` on a real terminal, at a real daemon; its picture as a function of two statuses."""

from __future__ import annotations

import codecs
import copy
import fcntl
import json
import os
import pty
import re
import select
import signal
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.daemon_process import (
    PATIENCE_S,
    Daemon,
    environment,
    payloads_of,
    run_tierkv,
    running_daemon,
    spec_of,
    tokens_of,
)
from tierkv.cli_top import ENTER, HOME, LEAVE
from tierkv.cli_top_picture import picture


@pytest.fixture(scope="module")
def daemon(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Daemon]:
    folder = tmp_path_factory.mktemp("top")
    settings = {"nvme_path": str(folder / "disk"), "nvme_capacity": "64 MiB", "nvme_min_free": 0}
    with running_daemon(folder, **settings) as daemon:
        yield daemon


class Terminal:
    """A program on a pseudo-terminal, and what stands on its screen."""

    def __init__(self, process: subprocess.Popen[bytes], fd: int, slave: int) -> None:
        self.process, self._fd, self.slave = process, fd, slave
        self.said = ""
        self._decoder = codecs.getincrementaldecoder("utf-8")()  # a read may end within a letter

    def read_until(self, pattern: str) -> str:
        """The last whole picture, once it has the pattern."""
        end_s = time.monotonic() + PATIENCE_S
        while True:
            shown = self.said.split(HOME)[-2] if self.said.count(HOME) > 1 else ""
            if re.search(pattern, shown):
                return shown
            left_s = end_s - time.monotonic()
            assert left_s > 0, self.said[-3000:]
            if select.select([self._fd], [], [], left_s)[0]:
                self._hear()

    def _hear(self) -> None:
        self.said += self._decoder.decode(os.read(self._fd, 65536))

    def press(self, keys: str) -> None:
        os.write(self._fd, keys.encode())

    def end(self) -> int:
        end_s = time.monotonic() + PATIENCE_S
        while self.process.poll() is None or select.select([self._fd], [], [], 0)[0]:
            assert time.monotonic() < end_s, self.said[-3000:]
            if select.select([self._fd], [], [], 0.1)[0]:
                self._hear()
        return self.process.returncode


@contextmanager
def on_terminal(daemon: Daemon, *words: str, columns: int = 100) -> Iterator[Terminal]:
    master, slave = pty.openpty()
    fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("4H", 50, columns, 0, 0))
    process = subprocess.Popen(
        [sys.executable, "-m", "tierkv.cli", "top", "--socket", str(daemon.socket), "--every", "0.1", *words],
        stdin=slave, stdout=slave, stderr=slave, env=environment(COLUMNS="", LINES=""),
    )  # fmt: skip
    try:
        yield Terminal(process, master, slave)
    finally:
        process.kill()
        process.wait()
        os.close(slave)
        os.close(master)


def test_it_moves_and_says_what_the_status_says(daemon: Daemon) -> None:
    with daemon.client() as client, on_terminal(daemon) as terminal:
        before = termios.tcgetattr(terminal.slave)
        terminal.read_until("TOKENS  none")
        chain = client.open_namespace(spec_of()).chain(tokens_of(4))
        client.put(chain, payloads_of(4))
        with client.load(chain) as lease:
            assert len(lease) == 4
            shown = terminal.read_until(r"TOKENS  asked 64, hit 64 \(100.0%\)")
            shown = terminal.read_until(r"test \(pid \d+\): 4 blocks leased")
            assert "ends in" in shown
        assert client.flush("nvme").result(PATIENCE_S).failed == 0
        shown = terminal.read_until(r"host>nvme +[1-9]")
        assert re.search(r"\nhost +█+·+ +256 KiB +32 MiB", shown.replace("\x1b[K", "").replace("\r", ""))
        terminal.press("q")
        assert terminal.end() == 0
        assert ENTER in terminal.said
        assert terminal.said.endswith(LEAVE)
        assert termios.tcgetattr(terminal.slave) == before


def test_keys(daemon: Daemon) -> None:
    with on_terminal(daemon) as terminal:
        terminal.read_until("q leaves")
        terminal.press(" ")
        terminal.read_until("held still")
        terminal.press("\x1b[A")
        terminal.press(" ")
        terminal.read_until("q leaves")
        terminal.process.send_signal(signal.SIGINT)
        assert terminal.end() == 130
        assert LEAVE in terminal.said


def test_without_a_terminal_it_is_shown_once(daemon: Daemon) -> None:
    done = run_tierkv("top", "--socket", daemon.socket)
    assert done.returncode == 0
    assert "no terminal" in done.stderr
    assert f"process {daemon.pid}" in done.stdout
    assert "q leaves" not in done.stdout
    assert run_tierkv("top", "--once", "--socket", daemon.socket).stderr == ""
    told = json.loads(run_tierkv("top", "--json", "--socket", daemon.socket).stdout)
    assert told["pid"] == daemon.pid


def test_without_a_daemon_it_says_so(tmp_path: Path) -> None:
    done = run_tierkv("top", "--once", "--socket", tmp_path / "none.sock")
    assert done.returncode == 1
    assert "start one with `tierkv serve`" in done.stderr


def test_a_daemon_that_goes_is_said_and_comes_back(tmp_path: Path) -> None:
    with running_daemon(tmp_path) as daemon, on_terminal(daemon) as terminal:
        terminal.read_until(f"process {daemon.pid}")
        assert daemon.stop() == 0
        terminal.read_until("! no daemon answers")
        (tmp_path / "notify").unlink()
        with running_daemon(tmp_path) as again:
            terminal.read_until(rf"process {again.pid},(.|\n)*q leaves")
            terminal.press("q")
            assert terminal.end() == 0


def crowded(daemon: Daemon, *owners: str) -> dict[str, Any]:
    """A status with these engines, each with a lease."""
    status: dict[str, Any] = json.loads(run_tierkv("top", "--json", "--socket", daemon.socket).stdout)
    sessions = [
        {"owner": one, "pid": 1, "leased_blocks": 0, "drafts": 0, "calls": 1, "connections": 1}
        for one in owners
    ]
    leases = [
        {"owner": f"{one} (pid 1)", "blocks": 7, "ends_in_s": 9.0, "overdue": False, "namespace": "f" * 64}
        for one in owners
    ]
    prefixes = [
        {"hash": f"{place:064x}", "blocks": 1, "tokens": 16, "loads": 1.0, "tiers": ["host"], "namespace": ""}
        for place in range(20)
    ]
    return status | {
        "hot": prefixes,
        "sessions": {"count": len(owners), "sessions": sessions},
        "leases": {"count": len(owners), "leases": leases},
    }


@pytest.mark.parametrize("columns", [20, 40, 80, 200])
def test_no_line_is_wider_than_the_terminal(daemon: Daemon, columns: int) -> None:
    status = crowded(daemon, *["\x1b[2Jevil\n", "名前" * 60] * 10)
    later = copy.deepcopy(status)
    later["up_s"] += 2.0
    later["counters"]["stored_bytes_total/host"] = (
        status["counters"].get("stored_bytes_total/host", 0) + 2**21
    )
    lines = list(picture(later, status, columns, None))
    assert all(len(line) + sum(letter in "名前" for letter in line) <= columns for line in lines)
    assert not any("\x1b" in line or "\n" in line for line in lines)
    if columns >= 80:
        assert any("1 MiB/s" in line for line in lines)
        assert "  and 12 more" in lines


def test_in_a_small_terminal_all_has_its_place(daemon: Daemon) -> None:
    status = crowded(daemon, *["an engine of a very long name " * 9] * 20)
    status["edges"]["host>nvme"]["breaker_open"] = True
    lines = list(picture(status, status, 80, None, 23))
    assert len(lines) == 23
    text = "\n".join(lines)
    for words in (
        "HOT PREFIX",
        "SESSIONS  20",
        "LEASES  20",
        "0 drafts, 1 calls",
        ": 7 blocks, ends in",
        "breaker open",
    ):
        assert words in text, words
    lines = list(picture(status, status, 80, None, 12))
    assert lines == [line for line in lines if line], "too small even so: the tiers come first"
    assert list(picture(status, status, 80, None, 200)) == list(picture(status, status, 80, None))
