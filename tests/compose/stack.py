"""The services of docker-compose.yml as a test handles them, in a project of their own with ports of their own."""

from __future__ import annotations

import json
import os
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any
from urllib.error import URLError
from urllib.request import Request, urlopen

from tests.daemon_process import ROOT

PROJECT = "tierkv-test"
COMMAND_S = 120.0
ASK_S = 10.0
PATIENCE_S = 600.0
"""For two busy cores; nothing here is about speed."""
LOOK_S = 0.2
FREE_PORTS = {"SIDECAR_PORT": "0", "PROMETHEUS_PORT": "0", "GRAFANA_PORT": "0"}


def until(
    holds: Callable[[], object], what: str, limit_s: float = PATIENCE_S, look_s: float = LOOK_S
) -> None:
    """Returns when it holds; ``AssertionError`` when it does not come true."""
    end_s = time.monotonic() + limit_s
    while not holds():
        assert time.monotonic() < end_s, f"after {limit_s:g} s still not: {what}"
        time.sleep(look_s)


@dataclass
class Stack:
    command: Sequence[str]
    """``docker compose`` or ``docker-compose``."""
    environ: Mapping[str, str]
    """How the engine is reached, and what stands in place of ``.env``."""

    def compose(self, *words: str, limit_s: float = COMMAND_S) -> str:
        """What it printed. ``AssertionError`` with its last words when it fails."""
        return self._run([*self.command, *self._project(), *words], limit_s)

    def start_compose(self, *words: str) -> subprocess.Popen[bytes]:
        command = [*self.command, *self._project(), *words]
        return subprocess.Popen(
            command, env=self._env(), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )

    def docker(self, *words: str, limit_s: float = COMMAND_S) -> str:
        return self._run(["docker", *words], limit_s)

    def inspect(self, service: str, what: str) -> str:
        """Of its container: ``what`` in the words of ``docker inspect --format``."""
        return self.docker("inspect", "--format", what, self.container(service))

    def log(self, service: str) -> list[str]:
        return self._run(["docker", "logs", self.container(service)], COMMAND_S).splitlines()

    def started_at(self, service: str) -> float:
        """Seconds since 1970."""
        said = self.inspect(service, "{{.State.StartedAt}}")  # 2026-01-02T03:04:05.123456789Z
        return datetime.fromisoformat(f"{said[:26].rstrip('Z')}+00:00").timestamp()

    def answer(self, service: str, port: int, path: str, token: str | None = None) -> str | None:
        """Over HTTP, through the port on 127.0.0.1; ``None`` while nobody answers."""
        try:
            place = self.compose("port", service, str(port)).strip()
            asked = Request(f"http://{place}{path}", headers={"Authorization": f"Bearer {token}"})
            with urlopen(asked, timeout=ASK_S) as answer:
                text: str = answer.read().decode()
                return text
        except (URLError, ConnectionError, TimeoutError, AssertionError):
            return None

    def token(self) -> str:
        """Of the sidecar's HTTP face."""
        return self.compose("exec", "-T", "sidecar", "cat", "/run/tierkv-token/token").strip()

    def status(self) -> dict[str, Any]:
        """Of the sidecar, as its own command says it."""
        found: dict[str, Any] = json.loads(
            self.compose("exec", "-T", "sidecar", "tierkv", "status", "--json")
        )
        return found

    def container(self, service: str) -> str:
        return self.compose("ps", "--all", "--quiet", service).strip()

    def _project(self) -> list[str]:
        files = (ROOT / "docker-compose.yml", Path(__file__).parent / "build.yml")
        named = [word for file in files for word in ("--file", str(file))]
        return ["--project-directory", str(ROOT), "--project-name", PROJECT, *named]

    def _env(self) -> dict[str, str]:
        return {**os.environ, **FREE_PORTS, **self.environ}

    def _run(self, command: Sequence[str], limit_s: float) -> str:
        ran = subprocess.run(
            command, env=self._env(), capture_output=True, text=True, check=False, timeout=limit_s
        )
        assert ran.returncode == 0, f"{' '.join(command)}: {ran.stdout[-3000:]}\n{ran.stderr[-2000:]}"
        return ran.stdout
