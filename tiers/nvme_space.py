"""Room for blocks: segments are made, carved anew, and given up, within the capacity and above the free-space floor.

One thread at a time makes room, without the metadata lock while it is at the disk; others that need room wait for it
until their deadline. The index log has its share of the capacity set aside: 1 KiB for each slot and a base.
"""

from __future__ import annotations

import errno
import os
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType

from tierkv.clock import Clock, Deadline
from tierkv.tier import Outcome
from tierkv.tiers.nvme_disk import Disk, aligned_buffer, is_linked, remove_file, write_fully
from tierkv.tiers.nvme_record import RECORD_BYTES, SEGMENT_MAGIC, file_header
from tierkv.tiers.nvme_recover import segment_name
from tierkv.tiers.nvme_segments import SEGMENT_HEADER_BYTES, Segment, SegmentTable
from tierkv.units import ALIGN_BYTES, GIB, KIB, MIB, format_bytes

LOG_BYTES_PER_SLOT = 4 * RECORD_BYTES
"""Old checkpoint, new checkpoint, and a log that is checkpointed when it has one record a slot; a fourth to spare."""
KEYS_AT_ONCE = 256
"""The most keys that are handled under one hold of the metadata lock."""

RETRY_S = 5.0
"""After the disk was full: how long nothing is tried that needs space."""
_UNSUPPORTED = {errno.EOPNOTSUPP, errno.EINVAL, errno.ENOSYS}
NO_SPACE = {errno.ENOSPC, errno.EDQUOT}


@dataclass(frozen=True, slots=True)
class Limits:
    """How much of a disk the tier may use."""

    capacity_bytes: int
    """Of all files in the directory together."""
    min_free_bytes: int
    """No segment is made that would leave the file system less than this."""
    segment_bytes: int
    """About how large a segment is; a larger block gets a segment of its own."""

    @property
    def log_base_bytes(self) -> int:
        """Set aside for the log beside what it has for each slot: enough for thousands of records where there is room,
        so that a tier of few large blocks does not write a checkpoint all the time."""
        small_bytes = min(max(self.capacity_bytes // 16, 8 * KIB), 256 * KIB)
        return max(small_bytes, min(self.capacity_bytes // 256, 8 * MIB))

    @property
    def largest_frame_bytes(self) -> int:
        """The largest frame that would ever find room."""
        room = self.capacity_bytes - self.log_base_bytes - LOG_BYTES_PER_SLOT - SEGMENT_HEADER_BYTES
        return min(room // ALIGN_BYTES * ALIGN_BYTES, GIB)

    def records_before_checkpoint(self, slots: int) -> int:
        return max(self.log_base_bytes // LOG_BYTES_PER_SLOT, slots)


def default_segment_bytes(capacity_bytes: int) -> int:
    """1/16 of a small capacity, 256 MiB of a larger one, and never more than about 512 segments."""
    return max(min(max(capacity_bytes // 16, 64 * KIB), 256 * MIB), _least_segment_bytes(capacity_bytes))


def segment_bytes_for(capacity_bytes: int, wanted_bytes: int | None) -> int:
    """What was asked for, within reason."""
    if wanted_bytes is None:
        return default_segment_bytes(capacity_bytes)
    return max(wanted_bytes, _least_segment_bytes(capacity_bytes))


def _least_segment_bytes(capacity_bytes: int) -> int:
    return capacity_bytes // 512  # each segment keeps a descriptor open


class Space:
    """Finds or makes a free slot. Thread-safe."""

    def __init__(self, disk: Disk, directory: str, table: SegmentTable, limits: Limits, clock: Clock) -> None:
        self._disk = disk
        self._directory = directory
        self._table = table
        self._lock = table.lock
        self._changed = threading.Condition(table.lock)
        self.clock = clock
        self._open_flags = os.O_RDWR
        self._growing = False
        self._no_growth_before_s = clock.now_s()
        self._stopped = False
        """The disk, not the capacity, was last in the way of a new segment."""
        self.limits = limits
        self.allocation = "fallocate"
        self.note = ""
        """Why the tier does not grow, when it does not."""
        self.released = 0
        """Segments given up because the disk or the capacity had no room for them."""

    def begin(
        self, open_flags: int, recovered: list[Segment], lost_with: Callable[[], Mapping[int, int]]
    ) -> None:
        """Takes what recovery found and gives up what a smaller capacity has no room for. ``open_flags`` open the
        segments to come; ``lost_with()`` says for the number of a segment how many blocks are lost with it."""
        self._open_flags = open_flags
        for segment in recovered:
            with self._lock:
                self._table.adopt(segment)
        if self.growable_bytes() < 0:
            lost = lost_with()
            while self.growable_bytes() < 0 and self.release_one(lost=lost):
                continue

    def is_there_again(self) -> bool:
        """True when the file system has room for a segment above the floor. Asks it."""
        try:
            free_bytes, _ = self._disk.space_bytes(self._directory)
        except OSError:
            return False
        return free_bytes >= self.limits.min_free_bytes + self.limits.segment_bytes

    def slot_for(self, frame_bytes: int, deadline: Deadline) -> tuple[Segment, int] | Outcome:
        """A held slot for a frame of this size, or why there is none. Raises ``OSError`` (no space) when the tier
        cannot even make its first segment."""
        while True:  # each turn waits for one who makes room, or makes some that others may snatch
            with self._lock:
                taken = self._table.take(frame_bytes)
                if taken is not None:
                    return taken
                if deadline.over():
                    return Outcome.CANCELLED if deadline.cancelled else Outcome.TIMEOUT
                if self._growing:
                    self._changed.wait(min(deadline.remaining_s(), 1.0))
                    continue
                self._growing = True
            try:
                grown = self._grow(frame_bytes)
            finally:
                with self._lock:
                    self._growing = False
                    self._changed.notify_all()
            if not grown:
                with self._lock:
                    return self._table.take(frame_bytes, waste_bytes=frame_bytes) or Outcome.FULL

    def largest_frame_bytes(self) -> int:
        """The largest frame that finds room now: in a free slot, or where empty segments and growth make it room.
        Under the lock."""
        growable_bytes = 0 if self._stopped else self.growable_bytes()
        room = growable_bytes + self._table.empty_bytes - SEGMENT_HEADER_BYTES - LOG_BYTES_PER_SLOT
        return max(self._table.largest_free_slot(), room // ALIGN_BYTES * ALIGN_BYTES)

    def growable_bytes(self) -> int:
        """What new segments may still take of the capacity, the file system's floor apart."""
        table, limits = self._table, self.limits
        return (
            limits.capacity_bytes
            - limits.log_base_bytes
            - table.slots * LOG_BYTES_PER_SLOT
            - table.file_bytes
        )

    # growth: one thread at a time

    def _grow(self, frame_bytes: int) -> bool:
        with self._lock:
            slot_bytes = self._table.class_for(frame_bytes)
            spare = self._spare_for(slot_bytes)
            if spare is not None:
                self._table.retire(spare)
        if spare is not None:
            return self._carve_anew(spare, slot_bytes)
        return self._make_room(slot_bytes) and self._make(slot_bytes)

    def _spare_for(self, slot_bytes: int) -> Segment | None:
        """An empty segment that can be carved for this size with little waste, and whose slots the log has room for."""
        for segment in self._table.empties.values():
            usable = segment.file_bytes - SEGMENT_HEADER_BYTES
            slots = usable // slot_bytes
            more_log_bytes = (slots - segment.slots) * LOG_BYTES_PER_SLOT
            if slots * slot_bytes >= usable - usable // 16 and more_log_bytes <= max(
                0, self.growable_bytes()
            ):
                return segment
        return None

    def _carve_anew(self, segment: Segment, slot_bytes: int) -> bool:
        slots = (segment.file_bytes - SEGMENT_HEADER_BYTES) // slot_bytes
        try:
            self._put_into_use(segment.number, segment.fd, segment.file_bytes, slot_bytes, slots)
        except OSError as error:
            self.note = f"{segment.name} could not be carved anew: {error.strerror}"
            self._remove(segment)
            return False
        return True

    def _make_room(self, slot_bytes: int) -> bool:
        """Unlinks empty segments until a new one of at least one slot fits; none when they would not suffice."""
        if self._slots_that_fit(slot_bytes):
            return True
        with self._lock:
            empties = sorted(self._table.empties.values(), key=lambda segment: segment.file_bytes)
            spare_bytes = sum(segment.file_bytes + segment.slots * LOG_BYTES_PER_SLOT for segment in empties)
            if self.growable_bytes() + spare_bytes < SEGMENT_HEADER_BYTES + slot_bytes + LOG_BYTES_PER_SLOT:
                return False
        while not self._slots_that_fit(slot_bytes):
            with self._lock:
                empty = max(
                    self._table.empties.values(), key=lambda segment: segment.file_bytes, default=None
                )
                if empty is None:
                    return False
                self._table.retire(empty)
            self._remove(empty)
        return True

    def _slots_that_fit(self, slot_bytes: int) -> int:
        """How many slots a new segment may have by the capacity and the floor."""
        if self.clock.now_s() < self._no_growth_before_s:
            return 0
        free_bytes, _ = self._disk.space_bytes(self._directory)
        with self._lock:
            by_capacity = (self.growable_bytes() - SEGMENT_HEADER_BYTES) // (slot_bytes + LOG_BYTES_PER_SLOT)
        by_floor = (free_bytes - self.limits.min_free_bytes - SEGMENT_HEADER_BYTES) // slot_bytes
        self._stopped = by_floor < 1 <= by_capacity
        if self._stopped:
            self.note = f"{format_bytes(free_bytes)} are free, the floor is {format_bytes(self.limits.min_free_bytes)}"
        return max(0, min(max(1, self.limits.segment_bytes // slot_bytes), by_capacity, by_floor))

    def _make(self, slot_bytes: int) -> bool:
        """Makes a segment. Without space on the disk an empty segment is given up and the making tried once more;
        then the tier stays as large as it is for a while, which is an error only when it has no segment at all."""
        for last in (False, True):
            slots = self._slots_that_fit(slot_bytes)
            if not slots:
                return False
            try:
                self._make_file(slot_bytes, slots)
            except OSError as error:
                if error.errno in NO_SPACE and not last and self.release_one(only_empty=True):
                    continue
                self.note = f"a new segment could not be made: {error.strerror}"
                self._no_growth_before_s = self.clock.now_s() + RETRY_S
                self._stopped = True
                if error.errno in NO_SPACE and not self._table.segments:
                    raise
                return False
            self.note = ""
            return True
        return False

    def _make_file(self, slot_bytes: int, slots: int) -> None:
        with self._lock:
            number = self._table.next_number()
        path = os.path.join(self._directory, segment_name(number))
        file_bytes = SEGMENT_HEADER_BYTES + slots * slot_bytes
        fd = self._disk.open(path, self._open_flags | os.O_CREAT | os.O_EXCL)
        try:
            self._allocate(fd, file_bytes)
            self._put_into_use(number, fd, file_bytes, slot_bytes, slots)
        except OSError:
            remove_file(self._disk, fd, path)
            raise

    def _allocate(self, fd: int, file_bytes: int) -> None:
        try:
            self._disk.fallocate(fd, file_bytes)
        except OSError as error:
            if error.errno not in _UNSUPPORTED:
                raise
            self.allocation = f"sparse files, since fallocate fails here: {error.strerror}"
            self._disk.truncate(fd, file_bytes)

    def _put_into_use(self, number: int, fd: int, file_bytes: int, slot_bytes: int, slots: int) -> None:
        """Writes the segment's header, which ends every earlier carving, and offers its slots."""
        with self._lock:
            carve_seq = self._table.take_seq()
        page = aligned_buffer(SEGMENT_HEADER_BYTES)
        page[:RECORD_BYTES] = file_header(SEGMENT_MAGIC, number, slot_bytes, slots, carve_seq, file_bytes)
        write_fully(self._disk, fd, (page,), SEGMENT_HEADER_BYTES, 0, ALIGN_BYTES)
        segment = Segment(number, segment_name(number), fd, file_bytes, slot_bytes, slots, carve_seq)
        with self._lock:
            self._table.add(segment)

    # segments are given up

    def release_one(
        self, *, only_empty: bool = False, lost: Mapping[int, int] = MappingProxyType({})
    ) -> bool:
        """Gives up one segment that nobody is inside: an empty one, else (unless ``only_empty``) the one with which
        the fewest blocks are ``lost``, or that has the fewest. They are forgotten. The file's absence is their
        tombstone: a number that returns has a later carving. False when there is none."""
        with self._lock:
            segments = self._table.empties if only_empty else self._table.segments
            free = [segment for segment in segments.values() if not segment.holds]
            segment = min(
                free, key=lambda one: (lost.get(one.number, 0), one.live, -one.file_bytes), default=None
            )
            if segment is None:
                return False
            self._table.retire(segment)
        self._give_up(segment)
        self.released += 1
        return True

    def give_up_removed(self) -> int:
        """Gives up segments whose files somebody has removed, unless somebody is inside; returns how many. Their blocks
        are forgotten, and so is what a tombstone would say of them: the file's absence says it."""
        with self._lock:
            segments = list(self._table.segments.values())
        suspects = [segment for segment in segments if not is_linked(self._disk, segment.fd)]
        with (
            self._lock
        ):  # a segment that was given up meanwhile is not in the table; its descriptor says nothing
            here = self._table.segments
            removed = [one for one in suspects if here.get(one.number) is one and not one.holds]
            for segment in removed:
                self._table.retire(segment)
        for segment in removed:
            self._give_up(segment)
        return len(removed)

    def _give_up(self, segment: Segment) -> None:
        self._forget_blocks(segment)
        self._remove(segment)

    def _forget_blocks(self, segment: Segment) -> None:
        for start in range(0, segment.slots, KEYS_AT_ONCE):
            with self._lock:
                for slot in range(start, min(start + KEYS_AT_ONCE, segment.slots)):
                    if segment.keys[slot] is not None:
                        self._table.unbind(segment, slot)

    def _remove(self, segment: Segment) -> None:
        """Unlinks a retired segment, or empties it where that fails."""
        trouble = remove_file(self._disk, segment.fd, os.path.join(self._directory, segment.name))
        if trouble:
            self.note = f"{segment.name} could not be removed: {trouble}"
            return
        self._no_growth_before_s = self.clock.now_s()
        self._stopped = False
