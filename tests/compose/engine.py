"""A Docker engine: the one that answers already, or one that is started for these tests alone and ended after them.

    python -m tests.compose.engine      one line about why there can be none; nothing when there can

The own one keeps to itself: its socket and folders are its own, it sets no rule of a firewall and forwards no address.
Containers reach each other and nothing else.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tierkv.testing.faults.leftovers import wait_until

ANSWER_S = 10.0
START_S = 60.0
END_S = 60.0
HOW = "(Debian: apt-get install docker.io docker-compose debootstrap iptables)"


class NoEngine(Exception):
    """There is no engine and none can be started here. The message says why."""


def why_none() -> str | None:
    """What is missing; ``None`` when an engine answers, or one can be tried."""
    if shutil.which("docker") is None:
        return f"docker is not installed {HOW}"
    if compose_command() is None:
        return f"neither `docker compose` nor docker-compose is installed {HOW}"
    if _answers({}):
        return None
    if shutil.which("dockerd") is None:
        return f"no Docker engine answers, and dockerd is not installed {HOW}"
    if os.geteuid() != 0:
        return "no Docker engine answers, and only root can start one"
    return None


def compose_command() -> list[str] | None:
    """Compose v2 where it is installed, else docker-compose."""
    if shutil.which("docker"):
        ran = subprocess.run(["docker", "compose", "version"], capture_output=True, check=False)
        if ran.returncode == 0:
            return ["docker", "compose"]
    return ["docker-compose"] if shutil.which("docker-compose") else None


@contextmanager
def docker_engine(folder: Path) -> Iterator[dict[str, str]]:
    """The variables that commands need to reach an engine. An own one keeps its images in ``folder``, so that a second
    run finds them. Raises ``NoEngine``."""
    why = why_none()
    if why is not None:
        raise NoEngine(why)
    if _answers({}):
        yield {}
        return
    with tempfile.TemporaryDirectory(prefix="tierkv-docker-") as place:
        with _own_engine(folder, Path(place)) as environ:
            yield environ


@contextmanager
def _own_engine(folder: Path, place: Path) -> Iterator[dict[str, str]]:
    environ = {"DOCKER_HOST": f"unix://{place}/docker.sock"}
    options = {
        "data-root": folder / "engine",
        "exec-root": place / "exec",
        "pidfile": place / "pid",
        "host": environ["DOCKER_HOST"],
        "iptables": "false",
        "ip6tables": "false",
        "ip-forward": "false",
    }
    log = place / "log"
    # It ends with its parent, in whatever way that ends, and what it mounted goes with it.
    command = ["unshare", "--mount", "setpriv", "--pdeathsig", "TERM", "dockerd"]
    with (
        log.open("w") as output,
        subprocess.Popen(
            [*command, *(f"--{name}={value}" for name, value in options.items())],
            stdout=output,
            stderr=subprocess.STDOUT,
        ) as process,
    ):
        try:
            wait_until(lambda: process.poll() is not None or _answers(environ), "the engine answers", START_S)
            if process.poll() is not None:
                raise NoEngine(f"dockerd ended: {log.read_text().strip().splitlines()[-1]}")
            yield environ
        finally:
            process.terminate()
            try:
                process.wait(END_S)
            except subprocess.TimeoutExpired:
                process.kill()


def _answers(environ: dict[str, str]) -> bool:
    asked = ["docker", "version", "--format", "{{.Server.Version}}"]
    try:
        ran = subprocess.run(
            asked, capture_output=True, check=False, timeout=ANSWER_S, env={**os.environ, **environ}
        )
    except subprocess.TimeoutExpired:
        return False
    return ran.returncode == 0


if __name__ == "__main__":
    print(why_none() or "", end="")
