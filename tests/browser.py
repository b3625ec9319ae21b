"""A real headless Chromium, where this machine has one."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest

NAMES = ("chromium-headless-shell", "chromium", "chromium-browser", "google-chrome")
HOW = "install one (Debian: apt-get install chromium-headless-shell) or name it in TIERKV_BROWSER"


def browser_path() -> str | None:
    """Of a Chromium: TIERKV_BROWSER, or the first that is found."""
    return os.environ.get("TIERKV_BROWSER") or next(filter(None, map(shutil.which, NAMES)), None)


@contextmanager
def running_browser() -> Iterator[Any]:
    """Skips the test, saying why, where there is none."""
    sync_api = pytest.importorskip("playwright.sync_api", reason="the package playwright is not installed")
    path = browser_path()
    if path is None:
        pytest.skip(f"no Chromium on this machine; {HOW}")
    with sync_api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(
            executable_path=path, args=["--no-sandbox"] if os.getuid() == 0 else []
        )
        try:
            yield browser
        finally:
            browser.close()


class Watched:
    """A page, and all that it asked for and complained about."""

    def __init__(self, page: Any) -> None:
        self.page = page
        self.hosts: set[str] = set()
        self.complaints: list[str] = []
        page.on("request", lambda request: self.hosts.add(urlsplit(request.url).netloc))
        page.on("pageerror", lambda error: self.complaints.append(str(error)))
        page.on("console", self._hear)

    def _hear(self, message: Any) -> None:
        if message.type in ("error", "warning"):
            self.complaints.append(f"{message.type}: {message.text}")


def axe_script() -> str:
    package = pytest.importorskip("axe_playwright_python")
    return (Path(package.__file__).parent / "axe.min.js").read_text()
