"""The index log: the only thing that publishes a block.

Appends do not wait for each other: a place at the end is reserved under a lock, and the records are written to it
without one. So a crash may leave a hole before records that are whole; recovery steps over what does not verify.

The log is a series of files, ``log-N``. A checkpoint begins by turning to the next one (``rotate``), so that what was
closed no longer changes and can be copied in peace.
"""

from __future__ import annotations

import os
import threading
from dataclasses import dataclass

from tierkv.tiers.nvme_disk import Disk, is_linked, remove_file, write_fully
from tierkv.tiers.nvme_record import LOG_MAGIC, RECORD_BYTES, file_header

LOG_HEADER_BYTES = RECORD_BYTES


def log_name(generation: int) -> str:
    return f"log-{generation:08d}"


@dataclass(slots=True, eq=False)
class LogFile:
    """One file of the log. ``writers`` are appends that have a place in it and are not yet through."""

    generation: int
    path: str
    fd: int
    end: int
    writers: int = 0


@dataclass(frozen=True, slots=True)
class Place:
    """Where an append goes."""

    file: LogFile
    offset: int


class IndexLog:
    """Appends records and turns files. Thread-safe; its lock is never held across I/O."""

    def __init__(self, disk: Disk, directory: str) -> None:
        self._disk = disk
        self._directory = directory
        self._lock = threading.Lock()
        self._closed: list[LogFile] = []
        self._current: LogFile | None = None
        self._records = 0

    def adopt(self, files: list[LogFile]) -> None:
        """Goes on with the files that recovery found, in order of generation, the last one open for appends; with
        none, a first one is made. Raises ``OSError``."""
        self._closed, last = files[:-1], files[-1:]
        self._current = last[0] if last else self._create(1)
        self._records = sum((file.end - LOG_HEADER_BYTES) // RECORD_BYTES for file in files)

    @property
    def records(self) -> int:
        """Records appended since the last checkpoint began, dead ones too."""
        return self._records

    @property
    def size_bytes(self) -> int:
        return sum(file.end for file in self._files())

    def _files(self) -> list[LogFile]:
        with self._lock:
            return [*self._closed, *([self._current] if self._current else [])]

    def reserve(self, length_bytes: int) -> Place:
        """A place for an append. Whoever has one must ``finish`` it."""
        with self._lock:
            file = self._current
            assert file is not None, "the log is open"
            place = Place(file, file.end)
            file.end += length_bytes
            file.writers += 1
            self._records += length_bytes // RECORD_BYTES
            return place

    def write(self, place: Place, records: bytes, *, sync: bool) -> None:
        """Writes records to their place; may be repeated. Raises ``OSError``."""
        write_fully(self._disk, place.file.fd, (memoryview(records),), len(records), place.offset)
        if sync:
            self._disk.fdatasync(place.file.fd)

    def finish(self, place: Place) -> None:
        with self._lock:
            place.file.writers -= 1

    def rotate(self) -> None:
        """Turns to a new file, unless the present one is still empty: a checkpoint that is begun again and again, and
        never finished, must not leave a file each time. One thread at a time. Raises ``OSError``, and then the log
        stays as it was."""
        with self._lock:
            assert self._current is not None, "the log is open"
            if self._current.end == LOG_HEADER_BYTES:
                self._records = 0
                return
            generation = self._current.generation + 1
        fresh = self._create(generation)
        with self._lock:
            self._closed.append(self._current)
            self._current = fresh
            self._records = 0

    def closed_files(self) -> list[LogFile] | None:
        """The files that no longer change, oldest first; ``None`` while an append is still on its way into one."""
        with self._lock:
            if any(file.writers for file in self._closed):
                return None
            return list(self._closed)

    @property
    def generation(self) -> int:
        """Of the file that appends go to."""
        with self._lock:
            assert self._current is not None, "the log is open"
            return self._current.generation

    def drop(self, files: list[LogFile]) -> None:
        """Removes files that a checkpoint has taken over. One whose name stays is empty, and left to the next start."""
        with self._lock:
            self._closed = [file for file in self._closed if file not in files]
        for file in files:
            remove_file(self._disk, file.fd, file.path)

    def missing(self) -> str:
        """The name of a file that was removed by somebody else; empty when all are there."""
        suspects = [file for file in self._files() if not is_linked(self._disk, file.fd)]
        here = self._files()  # one that a checkpoint has just dropped is not among them
        return next((os.path.basename(file.path) for file in suspects if file in here), "")

    def remove(self) -> None:
        """Unlinks all files, the oldest first; what is appended from now on is lost. Raises ``OSError``."""
        for file in self._files():
            try:
                self._disk.unlink(file.path)
            except FileNotFoundError:
                continue

    def sync(self) -> None:
        """Makes all finished appends durable. Raises ``OSError``."""
        for file in self._files():
            self._disk.fdatasync(file.fd)

    def close(self) -> None:
        with self._lock:
            files = [*self._closed, *([self._current] if self._current else [])]
            self._closed, self._current = [], None
        for file in files:
            self._disk.close(file.fd)

    def _create(self, generation: int) -> LogFile:
        path = os.path.join(self._directory, log_name(generation))
        fd = self._disk.open(path, os.O_RDWR | os.O_CREAT | os.O_TRUNC)
        try:
            header = memoryview(file_header(LOG_MAGIC, generation))
            write_fully(self._disk, fd, (header,), LOG_HEADER_BYTES, 0)
            self._disk.sync_directory(self._directory)
        except OSError:
            self._disk.close(fd)
            raise
        return LogFile(generation, path, fd, LOG_HEADER_BYTES)
