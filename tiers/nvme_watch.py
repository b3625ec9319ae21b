"""Notices when somebody removes the tier's files under it: what is written to them would be gone after the next start.

A segment that was removed is given up: its blocks are misses, and its room on the disk comes back. Without its log, its
checkpoint or its lock the tier can promise nothing any more and goes read-only; so it does when its directory was moved
or another process may have taken it. What is in memory is still served: each read proves itself.
"""

from __future__ import annotations

import math
import os

from tierkv.clock import Clock
from tierkv.tiers.nvme_checkpoint import CHECKPOINT_NAME
from tierkv.tiers.nvme_disk import Disk
from tierkv.tiers.nvme_journal import Journal
from tierkv.tiers.nvme_lock import DirectoryLock
from tierkv.tiers.nvme_space import Space

LOOK_EVERY_S = 1.0
"""One look costs a system call for each file: 0.3 ms for 512 segments."""


class FileWatch:
    """Looks now and then. Thread-safe: two looks at once do no harm."""

    def __init__(
        self, disk: Disk, directory: str, owner: DirectoryLock, space: Space, journal: Journal, clock: Clock
    ) -> None:
        self._disk = disk
        self._checkpoint = os.path.join(directory, CHECKPOINT_NAME)
        self._owner = owner
        self._space = space
        self._journal = journal
        self._clock = clock
        self._look_at_s = math.inf
        self._had_checkpoint = False
        self.lost_segments = 0
        """Segments that somebody removed."""

    def begin(self) -> None:
        """The tier runs from now on."""
        self._look_at_s = self._clock.now_s()

    def end(self) -> None:
        """The tier closes: what happens to the files is no longer its business."""
        self._look_at_s = math.inf

    def look(self) -> None:
        """Looks, if the last look was long enough ago. Called between the tier's own work, never under its lock."""
        now_s = self._clock.now_s()
        if now_s < self._look_at_s:
            return
        self._look_at_s = now_s + LOOK_EVERY_S
        missing = self._missing()
        if missing and not self._journal.read_only:
            self._journal.read_only = (
                f"{missing} was removed or replaced while the tier was running; start it anew"
            )
        self.lost_segments += self._space.give_up_removed()

    def _missing(self) -> str:
        """The first file without which nothing would be found again; empty when all are there."""
        if not self._owner.stands():
            return "the lock file (or its directory)"
        name = self._journal.missing_log()
        if name:
            return name
        there = self._disk.exists(self._checkpoint)
        lost = self._had_checkpoint and not there
        self._had_checkpoint = there
        return CHECKPOINT_NAME if lost else ""
