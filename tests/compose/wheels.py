"""All packages that the images install, downloaded once by this machine's pip, and an index of them on 127.0.0.1.

So a container needs no way to a package index, and torch is its CPU build.
"""

from __future__ import annotations

import hashlib
import re
import shutil
import subprocess
import sys
import threading
import tomllib
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

from tests.daemon_process import ROOT

IMAGE_PYTHON = "3.11"
DOWNLOAD_S = 1800.0
USUAL_PORT = 18471
"""The address is an argument of the build: with another one, nothing of an earlier build is taken over."""
BEFORE_3_11_3 = "async-timeout>=4.0.3"
"""``valkey`` asks for it there, and pip goes by the version that it runs with itself, not by the image's."""


def requirements(torch: str) -> list[str]:
    """What the Dockerfile installs besides the store itself, with torch as asked for."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    extra = project["project"]["optional-dependencies"]["demo"]
    built_with = project["build-system"]["requires"]
    return ["build", torch, BEFORE_3_11_3, *built_with, *project["project"]["dependencies"], *extra]


def alone() -> list[str]:
    """What the Dockerfile installs without its dependencies."""
    return re.findall(r"--no-deps (\S+==\S+)", (ROOT / "Dockerfile").read_text())


def download(folder: Path, torch: str) -> Path:
    """An index as pip reads it, a folder for each package; what it holds is downloaded unless it is there."""
    wanted, bare = requirements(torch), alone()
    digest = hashlib.sha256("\n".join([*wanted, *bare]).encode()).hexdigest()[:12]
    index, half_done = folder / f"index-{digest}", folder / "downloading"
    if not index.exists():
        shutil.rmtree(half_done, ignore_errors=True)
        _pip_download(half_done, wanted)
        _pip_download(half_done, ["--no-deps", *bare])
        for file in [path for path in half_done.iterdir() if path.is_file()]:
            name = re.sub(r"[-_.]+", "-", file.name.split("-")[0]).lower()
            (half_done / name).mkdir(exist_ok=True)
            file.rename(half_done / name / file.name)
        half_done.rename(index)
    return index


def _pip_download(folder: Path, words: list[str]) -> None:
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--dest", str(folder)]
    command += ["--python-version", IMAGE_PYTHON, "--only-binary", ":all:"]
    ran = subprocess.run([*command, *words], capture_output=True, text=True, check=False, timeout=DOWNLOAD_S)
    assert ran.returncode == 0, f"pip download of {' '.join(words)}: {ran.stderr}"


@contextmanager
def served(index: Path) -> Iterator[str]:
    """The address of the index while the ``with`` lasts."""
    handler = partial(_Quiet, directory=str(index))
    try:
        server = ThreadingHTTPServer(("127.0.0.1", USUAL_PORT), handler)
    except OSError:  # somebody else's
        server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    thread = threading.Thread(target=server.serve_forever, name="package index")
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}/"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


class _Quiet(SimpleHTTPRequestHandler):
    def log_message(self, *args: object) -> None:
        """Says nothing about each request."""
