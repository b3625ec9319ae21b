"""Runs scenarios, each in a process of its own, and gives back what they found."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tests.vllm.child import ANSWER, RESULT
from tests.vllm.scenarios import LLAMA_PROMPTS

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
                stdin=subprocess.PIPE,
                stdout=out,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def result(self) -> Any:
        """What it returned. Raises ``AssertionError`` with its last lines when it failed."""
        self.close_input()
        try:
            code = self.process.wait(LIMIT_S)
        except subprocess.TimeoutExpired:
            self.kill()
            raise AssertionError(f"{self.name} took more than {LIMIT_S:.0f} s\n{self._tail()}") from None
        told = [line for line in self.log.read_text(errors="replace").splitlines() if line.startswith(RESULT)]
        assert told, f"{self.name} ended with {code}\n{self._tail()}"
        return json.loads(told[-1].removeprefix(RESULT))

    def lines(self) -> list[str]:
        return self.log.read_text(errors="replace").splitlines()

    def wait_for(self, word: str) -> None:
        """Until it says so on a line of its own."""
        self.wait_until(lambda lines: word in lines, word)

    def wait_until(self, holds: Callable[[list[str]], object], what: str) -> None:
        until_s = time.monotonic() + LIMIT_S
        while not holds(self.lines()):
            assert self.process.poll() is None, f"{self.name} ended before: {what}\n{self._tail()}"
            assert time.monotonic() < until_s, f"{self.name} did not say: {what}\n{self._tail()}"
            time.sleep(0.02)

    def kill(self) -> None:
        """With all of its processes, as a machine's end does."""
        os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait(LIMIT_S)
        self.close_input()

    def close_input(self) -> None:
        if self.process.stdin is not None and not self.process.stdin.closed:
            try:
                self.process.stdin.close()
            except BrokenPipeError:  # it was killed with a line unread
                pass

    def _tail(self) -> str:
        lines = self.log.read_text(errors="replace").splitlines()
        return "\n".join(lines[-60:])


class Session(Scenario):
    """An engine that does what it is told, see ``sharing.session``."""

    def __init__(self, log: Path, arguments: dict[str, Any]) -> None:
        super().__init__("sharing.session", log, arguments)
        self._told = 0

    def begin(self, **order: Any) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(order).encode() + b"\n")
        self.process.stdin.flush()

    def answer(self) -> Any:
        """Of the order that was begun first and has none yet."""
        self._told += 1
        self.wait_until(lambda lines: sum(line.startswith(ANSWER) for line in lines) >= self._told, "answer")
        told = [line for line in self.lines() if line.startswith(ANSWER)]
        return json.loads(told[self._told - 1].removeprefix(ANSWER))

    def order(self, **order: Any) -> Any:
        self.begin(**order)
        return self.answer()

    def __enter__(self) -> Session:
        self.wait_for("READY")
        return self

    def __exit__(self, *_: object) -> None:
        self.close_input()
        if self.process.poll() is None:
            try:
                self.process.wait(60)
            except subprocess.TimeoutExpired:
                self.kill()


class Runner:
    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._count = 0

    def start(self, scenario: str, /, **arguments: Any) -> Scenario:
        self._count += 1
        return Scenario(scenario, self._folder / f"{self._count}-{scenario}.log", arguments)

    def run(self, scenario: str, /, **arguments: Any) -> Any:
        return self.start(scenario, **arguments).result()

    def session(self, **arguments: Any) -> Session:
        self._count += 1
        return Session(self._folder / f"{self._count}-session.log", arguments)


class Plain:
    """What vLLM says alone, its own cache off."""

    def __init__(self, runner: Runner) -> None:
        self._runner = runner
        self._known: dict[str, Any] = {}

    def said(self, names: Sequence[str], **options: Any) -> dict[str, list[int]]:
        """By prompt. Those of the tests' usual model are asked for once, all together."""
        names = sorted({*names, *LLAMA_PROMPTS} if not options else names)
        question = json.dumps([names, options], sort_keys=True)
        if question not in self._known:
            answers = self._runner.run("scenarios.plain", names=names, **options)
            self._known[question] = {name: answers[name]["tokens"] for name in names}
        found: dict[str, list[int]] = self._known[question]
        return found

    def run(self, scenario: str, /, **arguments: Any) -> Any:
        return self._runner.run(scenario, **arguments)


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
