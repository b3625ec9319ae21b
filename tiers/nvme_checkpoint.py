"""The checkpoint: the log without what is dead, so that it neither grows for ever nor takes long to read.

It is made by whoever calls the tier, a portion a call, since a tier starts no threads: at most 4096 records are copied
and synced between two calls of ``step``, so that no call is much longer for it. Records are copied from the old
checkpoint and the closed log files as they stand; a record lives when its sequence number is still that of a slot.

Why that is safe: a slot has its number before its record is appended and loses it before its tombstone is appended.
The log is rotated, its last writers have left, then the numbers are taken. So a tombstone in the closed files has
taken its number out already, and a block that dies later has its tombstone in the new file, which stays.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator

import numpy as np
import numpy.typing as npt

from tierkv.tiers.nvme_disk import Disk, read_fully, write_fully
from tierkv.tiers.nvme_log import IndexLog
from tierkv.tiers.nvme_record import CHECKPOINT_MAGIC, RECORD_BYTES, RECORD_DTYPE, Kind, file_header

CHECKPOINT_NAME = "checkpoint"
NEW_NAME = "checkpoint.new"
PORTION_BYTES = 4096 * RECORD_BYTES

_OPAQUE = np.dtype((np.void, RECORD_BYTES))

LiveNumbers = Callable[[], npt.NDArray[np.uint64]]
"""The sequence numbers of all slots that have one, sorted."""


class Checkpointer:
    """Writes one checkpoint at a time, in steps. One thread at a time (the tier sees to it)."""

    def __init__(
        self,
        disk: Disk,
        directory: str,
        log: IndexLog,
        live_numbers: LiveNumbers,
        next_seq: Callable[[], int],
    ) -> None:
        self._disk = disk
        self._directory = directory
        self._log = log
        self._live_numbers = live_numbers
        self._next_seq = next_seq
        self._work: Iterator[None] | None = None
        self.written = 0
        """Checkpoints finished since the start."""

    @property
    def active(self) -> bool:
        return self._work is not None

    def step(self) -> None:
        """Begins a checkpoint or does the next portion of it. After an ``OSError`` the attempt is given up: the old
        checkpoint and all log files still stand, and the next step begins anew."""
        if self._work is None:
            self._work = self._write()
        try:
            next(self._work, None)
        except OSError:
            self._work = None
            raise

    def _write(self) -> Iterator[None]:
        self._log.rotate()
        while (closed := self._log.closed_files()) is None:
            yield
        live = self._live_numbers()
        new_path = os.path.join(self._directory, NEW_NAME)
        fd = self._disk.open(new_path, os.O_RDWR | os.O_CREAT | os.O_TRUNC)
        try:
            records = 0
            for portion in self._old_records([file.fd for file in closed]):
                fields = portion.view(RECORD_DTYPE)
                kept = portion[(fields["kind"] == Kind.PUBLISH) & _among(fields["seq"], live)]
                if len(kept):
                    data = memoryview(kept.tobytes())
                    write_fully(self._disk, fd, (data,), len(data), RECORD_BYTES * (1 + records))
                    records += len(kept)
                    self._disk.fdatasync(fd)
                yield
            covered = closed[-1].generation + 1 if closed else self._log.generation
            head = file_header(CHECKPOINT_MAGIC, covered, self._next_seq(), records)
            write_fully(self._disk, fd, (memoryview(head),), len(head), 0)
            self._disk.fdatasync(fd)
            self._disk.rename(new_path, os.path.join(self._directory, CHECKPOINT_NAME))
        except (OSError, GeneratorExit):
            self._discard(new_path)
            raise
        finally:
            self._disk.close(fd)
        self._disk.sync_directory(self._directory)
        self._log.drop(closed)
        self.written += 1
        self._work = None

    def _old_records(self, log_fds: list[int]) -> Iterator[npt.NDArray[np.void]]:
        """Records as opaque pieces, since a copy by fields would not carry the bytes between the fields. A portion is
        good until the next is asked for."""
        buffer = bytearray(PORTION_BYTES)
        old = self._open_old()
        try:
            for fd in [*([old] if old is not None else []), *log_fds]:
                offset = RECORD_BYTES
                while True:
                    count = (
                        read_fully(self._disk, fd, (memoryview(buffer),), PORTION_BYTES, offset)
                        // RECORD_BYTES
                    )
                    if count:
                        yield np.frombuffer(buffer, dtype=_OPAQUE, count=count)
                    if count < PORTION_BYTES // RECORD_BYTES:
                        break
                    offset += PORTION_BYTES
        finally:
            if old is not None:
                self._disk.close(old)

    def _open_old(self) -> int | None:
        try:
            return self._disk.open(os.path.join(self._directory, CHECKPOINT_NAME), os.O_RDONLY)
        except FileNotFoundError:
            return None

    def _discard(self, path: str) -> None:
        try:
            self._disk.unlink(path)
        except OSError:
            pass  # the next start removes it

    def remove(self) -> None:
        """Unlinks the checkpoint. Raises ``OSError``."""
        try:
            self._disk.unlink(os.path.join(self._directory, CHECKPOINT_NAME))
        except FileNotFoundError:
            pass

    def abandon(self) -> None:
        """Gives up an unfinished checkpoint; used at close."""
        if self._work is not None:
            self._work.close()  # type: ignore[attr-defined]
            self._work = None


def _among(numbers: npt.NDArray[np.uint64], live: npt.NDArray[np.uint64]) -> npt.NDArray[np.bool_]:
    if not len(live):
        return np.zeros(len(numbers), dtype=np.bool_)
    at = np.minimum(np.searchsorted(live, numbers), len(live) - 1)
    return np.equal(live[at], numbers)
