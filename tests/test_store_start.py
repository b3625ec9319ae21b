"""A store starts as a whole or not at all, whatever a tier of a third party raises: nothing of it stays behind (which
``conftest`` looks at after every test: threads, descriptors, processes), and the directory is free again."""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import tierkv
from tests.test_registry import install
from tests.valkey_server import running_server
from tierkv.client import Client
from tierkv.clock import Deadline
from tierkv.errors import ConfigError, TierError
from tierkv.frame import FrameHeader
from tierkv.testing.memory import MemoryBlobTier, MemoryStorage

MODULE = "tkv_frail"
ENTRIES = "[tierkv.tiers]\nshelf = {module}:Shelf\n"
SOURCE = f"import sys\nShelf = sys.modules[{__name__!r}].Shelf\n"


class Unforeseen(RuntimeError):
    """What no contract speaks of."""


class Shelf(MemoryBlobTier):
    """A third party's tier with a thread and a file; it fails where ``fails_in`` says."""

    name = "shelf"
    fails_in = ""
    error: type[Exception] = Unforeseen

    def __init__(self) -> None:
        super().__init__(storage=MemoryStorage())
        self._over = threading.Event()
        self._thread: threading.Thread | None = None
        self._file = -1
        if self.fails_in == "workers":  # before the store is whole
            self.caps = SimpleNamespace(evicts_itself=False)  # type: ignore[assignment]

    def _maybe_fail(self, where: str) -> None:
        if where == self.fails_in:
            raise self.error(where)

    def start(self) -> None:
        if self.error is TierError:
            self._maybe_fail("start")
        super().start()
        self._thread = threading.Thread(target=self._over.wait, name="shelf")
        self._thread.start()
        self._file = os.open("/dev/null", os.O_RDONLY)
        self._maybe_fail("start")

    def scan(self) -> Iterator[FrameHeader]:
        self._maybe_fail("scan")
        return super().scan()

    def close(self, deadline: Deadline) -> None:
        assert self._thread is not None, "it is not closed unless it was started"
        self._over.set()
        self._thread.join()
        os.close(self._file)
        super().close(deadline)
        self._maybe_fail("close")


@pytest.fixture
def shelf(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is installed as a package of its own."""
    monkeypatch.syspath_prepend(tmp_path / "site")
    monkeypatch.delitem(sys.modules, MODULE, raising=False)
    install(tmp_path / "site", "tkv-frail", SOURCE, ENTRIES)


def opened(tmp_path: Path, **changes: Any) -> Client:
    settings = {
        "host_capacity": "1 MiB",
        "nvme_path": tmp_path / "disk",
        "nvme_capacity": "1 MiB",
        "nvme_min_free": 0,
        "valkey_url": "embedded",
        **changes,
    }
    return tierkv.open(**settings)


@pytest.mark.usefixtures("shelf")
@pytest.mark.parametrize(
    ("where", "error"),
    [
        ("start", Unforeseen),
        ("start", TierError),
        ("scan", Unforeseen),
        ("workers", AttributeError),
    ],
)
def test_a_start_that_fails_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, where: str, error: type[Exception]
) -> None:
    monkeypatch.setattr(Shelf, "fails_in", where)
    monkeypatch.setattr(Shelf, "error", error)
    with pytest.raises(error, match=where):
        opened(tmp_path, tiers=["shelf"])
    monkeypatch.setattr(Shelf, "fails_in", "")
    with opened(tmp_path, tiers=["shelf"]) as client:
        assert [column.name for column in client.store.catalog.tiers] == ["host", "nvme", "shelf", "valkey"]


@pytest.mark.usefixtures("shelf")
def test_what_closing_raises_does_not_hide_why_the_start_failed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(Shelf, "fails_in", "close")
    with running_server() as server, pytest.raises(TierError, match="database 99 cannot be used"):
        opened(tmp_path, tiers=["shelf"], valkey_url=f"{server.address}/99")
    assert "tier shelf cannot be closed: Unforeseen('close')" in caplog.text


@pytest.mark.usefixtures("shelf")
def test_a_tier_that_cannot_be_closed_keeps_no_other_open(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    client = opened(tmp_path, tiers=["shelf"])
    monkeypatch.setattr(Shelf, "fails_in", "close")
    with pytest.raises(Unforeseen):
        client.close()
    monkeypatch.setattr(Shelf, "fails_in", "")
    opened(tmp_path).close()


def test_a_directory_of_others_leaves_nothing(tmp_path: Path) -> None:
    (tmp_path / "disk").mkdir()
    (tmp_path / "disk" / "thesis.tex").write_text("not ours")
    with pytest.raises(ConfigError, match="disk"):
        opened(tmp_path)
    (tmp_path / "disk" / "thesis.tex").unlink()
    opened(tmp_path).close()
