"""The directory of the NVMe tier is removed under a store: whoever looks after it reads so in its health."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

import tierkv
from tests.client_support import PATIENCE_S
from tests.valkey_server import eventually


@pytest.mark.parametrize("what", ["", "lock"])
def test_health_names_the_directory_that_was_removed(tmp_path: Path, what: str) -> None:
    disk = tmp_path / "disk"
    with tierkv.open(host_capacity="1 MiB", nvme_path=disk, nvme_capacity="1 MiB", nvme_min_free=0) as client:
        if what:
            (disk / what).unlink()
        else:
            shutil.rmtree(disk)
        said = f"tier nvme takes nothing: {disk}: the lock file (or its directory) was removed or replaced"
        eventually(lambda: said in str(client.health()), "the health tells it", PATIENCE_S)
        assert "start it anew" in str(client.health())
    with tierkv.open(host_capacity="1 MiB", nvme_path=disk, nvme_capacity="1 MiB", nvme_min_free=0) as client:
        eventually(lambda: client.health().state == "ok", "it is well again after a restart", PATIENCE_S)
