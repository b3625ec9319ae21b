"""Named points on a block's way at which a process can kill itself, and the shims that know when one is passed.

Nothing of this is in the code under test: the disk is a subclass of ``Disk``, the tiers stand behind a wrapper, and the
points of the host's path lie between the client's verbs, in the hands of whoever calls them.
"""

from __future__ import annotations

import os
import signal
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Sequence

from tierkv.clock import Deadline
from tierkv.frame import FrameHeader
from tierkv.ids import BlockKey, KeyPrefix
from tierkv.tier import (
    BlobTier,
    ClearResult,
    DoneCallback,
    Item,
    Outcome,
    Presence,
    TierCaps,
    Usage,
    Want,
)
from tierkv.tiers.nvme_disk import Buffers, Disk
from tierkv.tiers.nvme_record import Kind

WRITES = ("segment header", "frame", "log header", "record", "tombstone", "clear", "checkpoint")
"""What is written to the disk; each has a point before the write, one in its middle and one after it."""

POINTS = (
    "host: reserved",
    "host: half copied",
    "host: copied",
    "host: sealed",
    "host: committed",
    *(f"{what}: {moment}" for what in WRITES for moment in ("before", "half", "written")),
    "segment: opened",
    "segment: allocated",
    "log: opened",
    "log: synced",
    "log: dropped",
    "checkpoint: opened",
    "checkpoint: synced",
    "checkpoint: not yet renamed",
    "checkpoint: renamed",
    *(
        f"{tier}: {moment}"
        for tier in ("nvme", "valkey")
        for moment in ("first answer", "put returned", "read", "delete", "deleted", "clear", "cleared")
    ),
)

_KINDS = {Kind.PUBLISH: "record", Kind.TOMBSTONE: "tombstone", Kind.CLEAR: "clear"}
_KIND_AT = 16
"""Where in a record its kind stands (docs/tiers-nvme.md)."""


class Points:
    """Counts the passages of every point, and kills its process at the ``passage``-th of ``fatal``. Thread-safe."""

    def __init__(self, fatal: str | None = None, passage: int = 1) -> None:
        assert fatal is None or fatal in POINTS, f"no point is called {fatal!r}"
        self._fatal = fatal
        self._passage = passage
        self._lock = threading.Lock()
        self.passed: Counter[str] = Counter()

    def due(self, name: str) -> bool:
        """Counts a passage; True when this is the one to die at."""
        with self._lock:
            self.passed[name] += 1
            return name == self._fatal and self.passed[name] == self._passage

    def reach(self, name: str) -> None:
        if self.due(name):
            die()


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


class PointDisk(Disk):
    """The real disk, with a point before, in the middle of and after everything that changes what is on it."""

    def __init__(self, points: Points) -> None:
        self._points = points
        self._names: dict[int, str] = {}

    def open(self, path: str, flags: int) -> int:
        fd = super().open(path, flags)
        self._names[fd] = name = os.path.basename(path)
        kind = name.split("-")[0].removesuffix(".new")
        if flags & os.O_CREAT and f"{kind}: opened" in POINTS:
            self._points.reach(f"{kind}: opened")
        return fd

    def pwritev(self, fd: int, buffers: Buffers, offset: int) -> int:  # type: ignore[override]
        what = self._what(self._names[fd], buffers, offset)
        if what is None:
            return super().pwritev(fd, buffers, offset)
        self._points.reach(f"{what}: before")
        if self._points.due(f"{what}: half"):
            write_half(fd, buffers, offset)
            die()
        count = super().pwritev(fd, buffers, offset)
        self._points.reach(f"{what}: written")
        return count

    def _what(self, name: str, buffers: Buffers, offset: int) -> str | None:
        if name.startswith("segment"):
            return "frame" if offset else "segment header"
        if name.startswith("log"):
            return _KINDS[Kind(buffers[0][_KIND_AT])] if offset else "log header"
        return "checkpoint" if name.startswith("checkpoint") else None

    def fallocate(self, fd: int, size_bytes: int) -> None:
        super().fallocate(fd, size_bytes)
        self._points.reach("segment: allocated")

    def fdatasync(self, fd: int) -> None:
        super().fdatasync(fd)
        self._points.reach("log: synced" if self._names[fd].startswith("log") else "checkpoint: synced")

    def rename(self, old: str, new: str) -> None:
        self._points.reach("checkpoint: not yet renamed")
        super().rename(old, new)
        self._points.reach("checkpoint: renamed")

    def unlink(self, path: str) -> None:
        super().unlink(path)
        if os.path.basename(path).startswith("log"):
            self._points.reach("log: dropped")


def write_half(fd: int, buffers: Buffers, offset: int) -> None:
    """Of a frame the header page, of a single page nothing, of records half the bytes: a direct write moves whole
    pages."""
    length_bytes = sum(map(len, buffers))
    if length_bytes % 4096:
        os.pwrite(fd, b"".join(buffers)[: length_bytes // 2], offset)
    elif len(buffers) > 1:
        os.pwritev(fd, buffers[:1], offset)


Say = Callable[..., None]
"""``say(verb, tier, names)``: tells whoever survives this process what is about to happen and what has happened."""


class Telling:
    """A real tier behind a wrapper that says what it is asked and what it has acknowledged, and passes points."""

    def __init__(self, tier: BlobTier, points: Points, say: Say) -> None:
        self.tier = tier
        self.name = tier.name
        self._points = points
        self._say = say

    @property
    def caps(self) -> TierCaps:
        return self.tier.caps

    def start(self) -> None:
        self.tier.start()

    def close(self, deadline: Deadline) -> None:
        self.tier.close(deadline)

    def probe(self, keys: Sequence[BlockKey], deadline: Deadline) -> list[Presence]:
        return self.tier.probe(keys, deadline)

    def get_into(self, wants: Sequence[Want], deadline: Deadline, on_done: DoneCallback) -> None:
        def done(i: int, outcome: Outcome) -> None:
            self._points.reach(f"{self.name}: read")
            on_done(i, outcome)

        self.tier.get_into(wants, deadline, done)

    def put_from(self, items: Sequence[Item], deadline: Deadline, on_done: DoneCallback) -> None:
        self._say("storing", self.name, [item.key for item in items])
        stored: list[BlockKey] = []

        def done(i: int, outcome: Outcome) -> None:
            if outcome is Outcome.DONE:
                stored.append(items[i].key)
            self._points.reach(f"{self.name}: first answer")
            on_done(i, outcome)

        self.tier.put_from(items, deadline, done)
        self._say("stored", self.name, stored)
        self._points.reach(f"{self.name}: put returned")

    def delete(self, keys: Sequence[BlockKey]) -> None:
        self._say("deleting", self.name, keys)
        self._points.reach(f"{self.name}: delete")
        self.tier.delete(keys)
        self._say("gone", self.name, keys)
        self._points.reach(f"{self.name}: deleted")

    def clear(self, prefix: KeyPrefix, deadline: Deadline) -> ClearResult:
        self._say("clearing", self.name, [prefix])
        self._points.reach(f"{self.name}: clear")
        result = self.tier.clear(prefix, deadline)
        if result.complete:
            self._say("cleared", self.name, [prefix])
        self._points.reach(f"{self.name}: cleared")
        return result

    def scan(self) -> Iterator[FrameHeader]:
        return self.tier.scan()

    def usage(self) -> Usage:
        return self.tier.usage()

    def status(self) -> dict[str, object]:
        return self.tier.status()
