"""What every test is held to: it leaves no thread, no descriptor and no child process behind."""

from __future__ import annotations

import gc
import os
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

_PATIENCE_S = 5.0
"""What a test has closed may need a moment to be gone."""


@pytest.fixture
def leaks_on_purpose() -> None:
    """For tests that show how something is caught that leaves things behind."""


@pytest.fixture(autouse=True)
def _leaves_nothing_behind(request: pytest.FixtureRequest) -> Iterator[None]:
    threads, descriptors, children = _threads(), _descriptors(), _children()
    yield
    if "leaks_on_purpose" in request.fixturenames:
        return
    for what, now, before in (
        ("threads", _threads, threads),
        ("descriptors", _descriptors, descriptors),
        ("child processes", _children, children),
    ):
        left = _left(now, before)
        assert not left, f"{what} that the test left behind: {', '.join(sorted(left))}"


def _left(now: Callable[[], set[str]], before: set[str]) -> set[str]:
    end_s = time.monotonic() + _PATIENCE_S
    while left := now() - before:
        if time.monotonic() > end_s:
            return left
        gc.collect()
        time.sleep(0.01)
    return set()


def _threads() -> set[str]:
    return {f"{thread.name} ({thread.ident})" for thread in threading.enumerate()}


def _descriptors() -> set[str]:
    found = set()
    for name in os.listdir("/proc/self/fd"):
        try:
            found.add(f"{name} -> {os.readlink(f'/proc/self/fd/{name}')}")
        except FileNotFoundError:  # the one that listed the folder
            continue
    return found


def _children() -> set[str]:
    found = set()
    for task in Path("/proc/self/task").iterdir():
        try:
            found |= {f"pid {pid}" for pid in (task / "children").read_text().split()}
        except (FileNotFoundError, ProcessLookupError):  # that thread has just ended
            continue
    return found
