"""Runs scenarios, each in a process of its own, and gives back what they found."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tests.vllm.child import RESULT

ROOT = Path(__file__).parent.parent.parent
LIMIT_S = 900.0
"""A scenario takes half a minute of two processors; on a busy machine it may take long."""


class Scenario:
    """A scenario that runs; ``lines`` of what it says go to ``log``."""

    def __init__(self, name: str, log: Path, arguments: dict[str, Any]) -> None:
        self.name = name
        self.log = log
        environment = {
            **os.environ,
            "HF_HUB_OFFLINE": "1",
            "PYTHONUNBUFFERED": "1",
            "OMP_WAIT_POLICY": "PASSIVE",
        }
        with log.open("w") as out:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "tests.vllm.child", name, json.dumps(arguments)],
                cwd=ROOT,
                env=environment,
                stdout=out,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def result(self) -> Any:
        """What it returned. Raises ``AssertionError`` with its last lines when it failed."""
        try:
            code = self.process.wait(LIMIT_S)
        except subprocess.TimeoutExpired:
            self.kill()
            raise AssertionError(f"{self.name} took more than {LIMIT_S:.0f} s\n{self._tail()}") from None
        told = [line for line in self.log.read_text(errors="replace").splitlines() if line.startswith(RESULT)]
        assert told, f"{self.name} ended with {code}\n{self._tail()}"
        return json.loads(told[-1].removeprefix(RESULT))

    def wait_for(self, word: str) -> None:
        """Until it says so on a line of its own."""
        until_s = time.monotonic() + LIMIT_S
        while word not in self.log.read_text(errors="replace").splitlines():
            assert self.process.poll() is None, f"{self.name} ended before it said {word}\n{self._tail()}"
            assert time.monotonic() < until_s, f"{self.name} did not say {word}\n{self._tail()}"
            time.sleep(0.05)

    def kill(self) -> None:
        """With all of its processes, as a machine's end does."""
        os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait(LIMIT_S)

    def _tail(self) -> str:
        lines = self.log.read_text(errors="replace").splitlines()
        return "\n".join(lines[-60:])


class Runner:
    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._count = 0

    def start(self, name: str, **arguments: Any) -> Scenario:
        self._count += 1
        return Scenario(name, self._folder / f"{self._count}-{name}.log", arguments)

    def run(self, name: str, **arguments: Any) -> Any:
        return self.start(name, **arguments).result()


@contextmanager
def sidecar(folder: Path, **settings: str) -> Iterator[str]:
    """``tierkv serve``; gives its address."""
    socket = folder / "tierkv.sock"
    environment = {
        **os.environ,
        "TIERKV_SIDECAR_SOCKET": str(socket),
        **{f"TIERKV_{name.upper()}": value for name, value in settings.items()},
    }
    with (folder / "sidecar.log").open("w") as out:
        process = subprocess.Popen(
            [sys.executable, "-m", "tierkv.cli", "serve"], cwd=ROOT, env=environment, stdout=out, stderr=out
        )
    try:
        until_s = time.monotonic() + 60
        while not socket.exists():
            assert process.poll() is None, (folder / "sidecar.log").read_text()
            assert time.monotonic() < until_s, "the sidecar did not start"
            time.sleep(0.05)
        yield f"unix://{socket}"
    finally:
        process.send_signal(signal.SIGCONT)
        process.send_signal(signal.SIGTERM)
        process.wait(60)
