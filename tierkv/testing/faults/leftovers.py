"""What a scenario may have left behind: slots, leases, pins, threads, descriptors, processes, files."""

from __future__ import annotations

import gc
import os
import re
import threading
import time
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from pathlib import Path

from tierkv.store import TieredStore
from tierkv.testing.invariants import check_idle

PATIENCE_S = 5.0
"""What was closed may need a moment to be gone."""

NVME_FILES = re.compile(r"lock|checkpoint|log-\d{8}|segment-\d{8}")
"""All that an NVMe tier's directory may hold when nobody has it open."""
_UNDER_WAY = frozenset({"checkpoint.new"})
"""What it holds besides while it is open: a checkpoint is made a portion a call, so a tier at rest may be amid one."""

_LOOK_S = 0.005


def assert_nothing_left(
    store: TieredStore, *, nvme: Path | None = None, patience_s: float = PATIENCE_S
) -> None:
    """A store in which nothing is going on: its invariants hold, nothing is pinned, leased, queued, in flight or handed
    out without an owner, and the folder ``nvme`` holds nothing but the open tier's own files. Waits for work to end."""
    check_at_rest(store, patience_s)
    if nvme is not None:
        _assert_no_strangers(nvme, _UNDER_WAY)


def check_at_rest(store: TieredStore, patience_s: float = PATIENCE_S) -> None:
    """``check_idle`` of a store that lives: its upkeep looks every second whether there is something to write, so the
    store may be at work again between a look and the next. What is wrong for good is so at every look."""
    end_s = time.monotonic() + patience_s
    while True:
        wait_until(lambda: _at_rest(store), "the store comes to rest", patience_s)
        try:
            check_idle(store)
        except AssertionError:
            if time.monotonic() >= end_s:
                raise
            time.sleep(_LOOK_S)
        else:
            return


def assert_only_our_files(folder: Path) -> None:
    """Nothing beside segments, log, checkpoint and lock: what a tier that was closed leaves."""
    _assert_no_strangers(folder, frozenset())


def _assert_no_strangers(folder: Path, besides: Collection[str]) -> None:
    names = (name for name in sorted(os.listdir(folder)) if name not in besides)
    strangers = [name for name in names if not NVME_FILES.fullmatch(name)]
    assert not strangers, f"left in {folder}: {strangers}"


@contextmanager
def nothing_left(*, besides: Collection[str] = (), patience_s: float = PATIENCE_S) -> Iterator[None]:
    """Around the whole life of a store: no thread, descriptor or child process is left at the end of the ``with``.

    ``besides``: those of "threads", "descriptors" and "child processes" that are not looked at, since the scenario
    starts some of its own.
    """
    before = {what: found() for what, found in _LOOKS.items() if what not in besides}
    yield
    for what in before:
        found = _LOOKS[what]
        end_s = time.monotonic() + patience_s
        while left := found() - before[what]:
            assert time.monotonic() < end_s, f"{what} left behind: {', '.join(sorted(left))}"
            gc.collect()
            time.sleep(_LOOK_S)


def wait_until(condition: Callable[[], object], what: str, patience_s: float = PATIENCE_S) -> None:
    """Returns when the condition holds; ``AssertionError`` when it does not come true."""
    end_s = time.monotonic() + patience_s
    while not condition():
        assert time.monotonic() < end_s, f"after {patience_s:g} s still not: {what}"
        time.sleep(_LOOK_S)


def _at_rest(store: TieredStore) -> bool:
    busy = any(edge.queue.busy() for edge in store.edges.values())
    return not busy and store.reaper.idle() and not len(store.loader.flights)


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


_LOOKS: dict[str, Callable[[], set[str]]] = {
    "threads": _threads,
    "descriptors": _descriptors,
    "child processes": _children,
}
