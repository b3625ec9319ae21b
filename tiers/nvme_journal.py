"""How blocks are published and forgotten: the log, its sequence numbers, its checkpoints, and what a full disk means.

Forgetting has three steps that other files rely on: ``SegmentTable.hide`` (invisible at once, the slot still held),
``bury`` (the tombstone stands in the log), and only then is the slot free for other bytes.
"""

from __future__ import annotations

import errno
import math
import threading
from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from tierkv.clock import Deadline
from tierkv.ids import BlockKey
from tierkv.tiers.nvme_checkpoint import Checkpointer
from tierkv.tiers.nvme_disk import Disk
from tierkv.tiers.nvme_log import IndexLog, LogFile
from tierkv.tiers.nvme_record import RECORD_BYTES, tombstone_record
from tierkv.tiers.nvme_segments import Segment, SegmentTable
from tierkv.tiers.nvme_space import KEYS_AT_ONCE, NO_SPACE, RETRY_S, Space

_MAX_PATIENCE_S = 600.0


class Hidden(NamedTuple):
    """A block that is invisible already and whose slot is held until its tombstone stands in the log."""

    key: BlockKey
    segment: Segment
    slot: int
    seq: int
    """Of the tombstone."""


class Journal:
    """Thread-safe."""

    def __init__(self, disk: Disk, directory: str, table: SegmentTable, space: Space) -> None:
        self._disk = disk
        self._directory = directory
        self._table = table
        self._lock = table.lock
        self._space = space
        self._log = IndexLog(disk, directory)
        self._checkpointer = Checkpointer(
            disk, directory, self._log, self._live_numbers, lambda: table.next_seq
        )
        self._checkpointing = threading.Lock()
        self.read_only = ""
        """Why nothing is written any more; empty while the tier takes blocks."""
        self._look_again_s = math.inf
        """When a tier that is read-only because the disk was full asks whether it still is."""
        self._patience_s = RETRY_S
        self._last_trouble = ""
        self._may_go_on: Callable[[], bool] = lambda: True
        """Asked when it is time to look again."""
        self._for_good = False
        """The index was removed: what is stored from now on would never be found again."""
        self._unburied: list[Hidden] = []
        """Blocks that are invisible and whose tombstones the log did not take: at most one for each slot."""

    def begin(self, next_seq: int, files: list[LogFile]) -> None:
        """Goes on where recovery stopped. Raises ``OSError``."""
        self._table.next_seq = next_seq
        self._log.adopt(files)

    def close(self) -> None:
        """Syncs what was appended, so that an orderly end loses nothing."""
        self._checkpointer.abandon()
        try:
            self._log.sync()
        except OSError as error:
            self.read_only = self.read_only or f"the log could not be synced: {error.strerror}"
        self._log.close()

    @property
    def log_bytes(self) -> int:
        return self._log.size_bytes

    @property
    def checkpoints(self) -> int:
        """Checkpoints written since the start."""
        return self._checkpointer.written

    def append(self, records: bytes, *, sync: bool = False) -> bool:
        """Writes records to the log. A log that takes no more makes the tier read-only."""
        place = self._log.reserve(len(records))
        try:
            done = self.with_relief("writing the log", lambda: self._log.write(place, records, sync=sync))
        finally:
            self._log.finish(place)
        if done:
            self._patience_s = RETRY_S
        elif not self.read_only:
            self._stop(self._last_trouble, lambda: True)
        return done

    def with_relief(self, what: str, write: Callable[[], None]) -> bool:
        """Does a write; False when it fails, with what ``relieve`` says."""
        try:
            write()
        except OSError as error:
            return self.relieve(error, what, write)
        return True

    def relieve(self, error: OSError, what: str, write: Callable[[], None]) -> bool:
        """After a write that failed. Without space on the disk a segment is given up and the write tried once more;
        without space again the tier is read-only."""
        if error.errno in NO_SPACE and self._space.release_one():
            try:
                write()
            except OSError as again:
                error = again
            else:
                return True
        self._last_trouble = f"{what}: {error.strerror}"
        if error.errno in NO_SPACE:
            self.ran_out(what, error)
        elif error.errno == errno.EROFS:
            self._stop(self._last_trouble, lambda: True)
        return False

    def ran_out(self, what: str, error: OSError) -> None:
        """The disk is full: the tier is read-only until it has space again."""
        self._stop(f"{what}: {error.strerror}", self._space.is_there_again)

    def _stop(self, why: str, may_go_on: Callable[[], bool]) -> None:
        """Read-only, until ``may_go_on``. Each try may cost something (with a quota, say, of which the file system
        tells nothing, a segment), so it is tried less and less often while nothing can be written."""
        self.read_only = why
        if self._for_good:
            return
        self._may_go_on = may_go_on
        self._look_again_s = self._space.clock.now_s() + self._patience_s
        self._patience_s = min(2 * self._patience_s, _MAX_PATIENCE_S)

    def look_again(self) -> None:
        """Whoever filled the disk may have gone, or what could not be written can: then the tier takes blocks once
        more. Costs two comparisons, and once in a while a system call or a portion of a checkpoint; called between the
        tier's own work."""
        now_s = self._space.clock.now_s()
        if now_s < self._look_again_s:
            return
        self._look_again_s = now_s + RETRY_S
        if not self._may_go_on():
            return
        self._look_again_s = math.inf
        with self._lock:
            unburied, self._unburied = self._unburied, []
        self.read_only = ""
        self.bury(unburied)

    def _is_unstuck(self) -> bool:
        """Does a portion of the checkpoint that could not be written; True when it stands."""
        written = self._checkpointer.written
        if not self._checkpointing.acquire(blocking=False):
            return False
        try:
            went_well = self.with_relief("writing a checkpoint", self._checkpointer.step)
        finally:
            self._checkpointing.release()
        over = self._checkpointer.written > written
        if went_well and not over:
            self._look_again_s = -math.inf  # the next portion with the next call
        return over

    def missing_log(self) -> str:
        """The name of a file of the log that somebody removed, if there is one."""
        return self._log.missing()

    def renounce(self, deadline: Deadline) -> bool:
        """The last resort of a clear that the log does not take: without an index the next start finds nothing, and
        what was cleared cannot come back. The tier is read-only already, and now for good. False when not even that
        can be done."""
        if not self._checkpointing.acquire(timeout=min(deadline.remaining_s(), threading.TIMEOUT_MAX)):
            return False
        try:
            self._for_good, self._look_again_s = True, math.inf
            self._checkpointer.remove()
            self._log.remove()
            self._disk.sync_directory(self._directory)
        except OSError:
            return False
        finally:
            self._checkpointing.release()
        return True

    def bury(self, hidden: list[Hidden]) -> None:
        """Appends tombstones, then frees the slots. A slot whose tombstone the log does not take stays held: the tier
        is read-only then, and if it ever ends being so, the tombstones come first."""
        if not hidden:
            return
        if self.append(b"".join(tombstone_record(one.seq, one.key) for one in hidden)):
            self.free(hidden)
        else:
            self.leave_unburied(hidden)

    def leave_unburied(self, hidden: list[Hidden]) -> None:
        """What is invisible only as long as this process lives."""
        with self._lock:
            self._unburied += hidden

    def free(self, hidden: list[Hidden]) -> None:
        """Lets slots go whose blocks the log no longer publishes."""
        for start in range(0, len(hidden), KEYS_AT_ONCE):
            with self._lock:
                for one in hidden[start : start + KEYS_AT_ONCE]:
                    self._table.let_go(one.segment, one.slot)

    def maintain(self) -> None:
        """Does a portion of a checkpoint when one is due and nobody else is at it. Called at the end of every call
        that wrote. While none can be written the log has twice its length; then the tier is read-only."""
        due_records = self._space.limits.records_before_checkpoint(self._table.slots)
        due = self._log.records >= due_records
        if not (due or self._checkpointer.active) or self.read_only:
            return
        if self._checkpointing.acquire(blocking=False):
            try:
                went_well = self.with_relief("writing a checkpoint", self._checkpointer.step)
            finally:
                self._checkpointing.release()
            if not went_well and self.log_bytes > 2 * due_records * RECORD_BYTES:
                self._get_stuck()

    def _get_stuck(self) -> None:
        """The log would grow for ever."""
        if not self.read_only:
            self._stop(self._last_trouble, self._is_unstuck)

    def checkpoint_now(self) -> None:
        """Writes a whole checkpoint, so that what recovery dropped is not met again. Before the first call only."""
        written = self._checkpointer.written
        while self._checkpointer.written == written:
            if not self.with_relief("writing a checkpoint", self._checkpointer.step):
                return

    def _live_numbers(self) -> npt.NDArray[np.uint64]:
        with self._lock:
            columns = [segment.seq for segment in self._table.segments.values()]
        parts = [np.frombuffer(column, np.uint64) for column in columns]
        numbers = np.concatenate([*parts, np.empty(0, np.uint64)])
        numbers = numbers[numbers > 0]
        numbers.sort()
        return numbers
