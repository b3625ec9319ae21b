"""The NVMe tier's disk behind a hook: ENOSPC, EIO, EINVAL, short, slow and blocked calls, by place or by number.

disk = ShimDisk(failing(errno.ENOSPC, at("fallocate")))
disk = ShimDisk(failing(errno.EIO, strike=Strike(3, "pwritev")))
NvmeTier(path, capacity, clock=clock, disk=disk)
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable

from tierkv.testing.faults.strike import Strike
from tierkv.tiers.nvme_disk import Buffers, Disk

Place = Callable[[str, str, int], bool]
"""``place(call, file, offset)``: is it this call?"""

Hook = Callable[[str, str, int], int | None]
"""``hook(call, file, offset)``, before each call: raises, blocks, kills, or says how many bytes to let through."""

CALLS = (
    "open", "open_direct", "preadv", "pwritev", "fallocate", "truncate", "fdatasync", "sync_directory", "rename",
    "unlink",
)  # fmt: skip
"""The calls that a hook is asked about. Behind a successful write stands one more: ``pwritev_done``."""

_PATIENCE_S = 60.0


def at(call: str, file: str = "", *, header: bool = True) -> Place:
    """Calls of this name on files whose name begins with ``file``; without ``header`` not those at offset 0."""
    return lambda what, name, offset: what == call and name.startswith(file) and (header or offset > 0)


def anywhere(call: str, file: str, offset: int) -> bool:
    """Every call, but not the word that a write is over."""
    return call in CALLS


class ShimDisk(Disk):
    """The real disk behind one hook, ``before``, which may be changed at any time. Calls are named after the methods of
    ``Disk``, files by their name without the folder. Thread-safe."""

    def __init__(self, before: Hook = lambda call, file, offset: None) -> None:
        self.before = before
        self._paths: dict[int, str] = {}
        self._lock = threading.Lock()

    def heal(self) -> None:
        """Nothing fails any more."""
        self.before = lambda call, file, offset: None

    def _ask(self, call: str, path: str, offset: int = 0) -> int | None:
        return self.before(call, os.path.basename(path), offset)

    def _path(self, fd: int) -> str:
        with self._lock:
            return self._paths[fd]

    def open(self, path: str, flags: int) -> int:
        self._ask("open_direct" if flags & os.O_DIRECT else "open", path)
        fd = super().open(path, flags)
        with self._lock:
            self._paths[fd] = path
        return fd

    def preadv(self, fd: int, buffers: Buffers, offset: int) -> int:  # type: ignore[override]
        limit = self._ask("preadv", self._path(fd), offset)
        return super().preadv(fd, _front(buffers, limit), offset)

    def pwritev(self, fd: int, buffers: Buffers, offset: int) -> int:  # type: ignore[override]
        limit = self._ask("pwritev", self._path(fd), offset)
        count = super().pwritev(fd, _front(buffers, limit), offset)
        self._ask("pwritev_done", self._path(fd), offset)
        return count

    def fallocate(self, fd: int, size_bytes: int) -> None:
        self._ask("fallocate", self._path(fd))
        super().fallocate(fd, size_bytes)

    def truncate(self, fd: int, size_bytes: int) -> None:
        self._ask("truncate", self._path(fd))
        super().truncate(fd, size_bytes)

    def fdatasync(self, fd: int) -> None:
        self._ask("fdatasync", self._path(fd))
        super().fdatasync(fd)

    def sync_directory(self, path: str) -> None:
        self._ask("sync_directory", path)
        super().sync_directory(path)

    def rename(self, old: str, new: str) -> None:
        self._ask("rename", old)
        super().rename(old, new)

    def unlink(self, path: str) -> None:
        self._ask("unlink", path)
        super().unlink(path)


def _front(buffers: Buffers, limit: int | None) -> Buffers:
    if limit is None:
        return buffers
    front = []
    for buffer in buffers:
        front.append(buffer[:limit])
        limit -= len(front[-1])
    return [buffer for buffer in front if len(buffer)]


# ---- hooks


def failing(code: int, place: Place = anywhere, strike: Strike | None = None) -> Hook:
    """Calls at the place fail with this errno: all of them, or those that the strike hits."""

    def hook(call: str, file: str, offset: int) -> None:
        if place(call, file, offset) and (strike is None or strike.hits(call)):
            raise OSError(code, f"injected: {os.strerror(code)}")

    return hook


def short(limit_bytes: int, place: Place = anywhere, strike: Strike | None = None) -> Hook:
    """Reads and writes at the place move at most ``limit_bytes`` (0: nothing, and say so)."""

    def hook(call: str, file: str, offset: int) -> int | None:
        hit = (
            call in ("preadv", "pwritev")
            and place(call, file, offset)
            and (strike is None or strike.hits(call))
        )
        return limit_bytes if hit else None

    return hook


def slow(seconds: float, place: Place = anywhere, strike: Strike | None = None) -> Hook:
    """Calls at the place take that much longer."""
    pause = threading.Event()

    def hook(call: str, file: str, offset: int) -> None:
        if place(call, file, offset) and (strike is None or strike.hits(call)):
            pause.wait(seconds)

    return hook


class Gate:
    """A hook that blocks the calls at a place until ``open`` is set. ``reached`` is set when the first one stands
    there; while ``shut`` is False nothing is stopped."""

    def __init__(self, place: Place, strike: Strike | None = None) -> None:
        self._place = place
        self._strike = strike
        self.shut = True
        self.reached = threading.Event()
        self.open = threading.Event()

    def __call__(self, call: str, file: str, offset: int) -> None:
        if not self.shut or not self._place(call, file, offset):
            return
        if self._strike is not None and not self._strike.hits(call):
            return
        self.reached.set()
        assert self.open.wait(_PATIENCE_S), "the gate was never opened"


def blocked(place: Place = anywhere, strike: Strike | None = None) -> Gate:
    """A gate at the place: like a disk that does not come back."""
    return Gate(place, strike)
