"""The NVMe tier: blocks in pre-allocated segment files on a local disk, found again after a restart.

The parts: ``nvme_segments`` (which slot holds which block), ``nvme_space`` (segments come and go), ``nvme_log`` and
``nvme_checkpoint`` (what is published), ``nvme_recover`` (what a start finds), ``nvme_record`` (bytes on disk),
``nvme_lock`` (one owner), ``nvme_disk`` (the system calls). ``docs/tiers-nvme.md`` has the format and the order of
writes.

Threads: up to ``workers`` threads may be inside at once; the tier starts none. One metadata lock guards the memory; it
is never held across I/O, nor for more than 256 keys.
"""

from __future__ import annotations

import errno
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from tierkv.clock import Clock, Deadline
from tierkv.errors import ConfigError, FrameError, TierError
from tierkv.frame import FrameHeader
from tierkv.ids import BlockKey, KeyPrefix
from tierkv.tier import ClearResult, DoneCallback, Item, Outcome, Presence, TierCaps, Usage, Want
from tierkv.tiers.nvme_checkpoint import Checkpointer
from tierkv.tiers.nvme_disk import Disk, probe_direct, read_fully, write_fully
from tierkv.tiers.nvme_lock import DirectoryLock
from tierkv.tiers.nvme_log import IndexLog
from tierkv.tiers.nvme_record import (
    clear_record,
    expires_ms_in,
    frame_header_of,
    key_in,
    publish_record,
    tombstone_record,
)
from tierkv.tiers.nvme_recover import (
    LOCK_NAME,
    MODES,
    PROBE_NAME,
    Recovered,
    read_publishes,
    recover,
    refuse_foreign,
)
from tierkv.tiers.nvme_segments import Segment, SegmentTable
from tierkv.tiers.nvme_space import KEYS_AT_ONCE, NO_SPACE, Limits, Space, default_segment_bytes
from tierkv.units import ALIGN_BYTES, GIB, align_up, format_bytes

HEADER_PAGE_BYTES = ALIGN_BYTES
_BAD_MEDIUM = {errno.EIO, errno.EILSEQ, errno.ENODATA}


@dataclass(slots=True, eq=False)
class _Write:
    """A block on its way in: its slot is held, its key is not visible."""

    index: int
    item: Item
    segment: Segment
    slot: int
    expires_ms: int
    seq: int = 0
    doomed: Outcome | None = None
    """What it ends as, since it was deleted or cleared while it was written."""


@dataclass(slots=True)
class _Buried:
    """A block that is invisible already and whose slot is held until its tombstone stands in the log."""

    key: BlockKey
    segment: Segment
    slot: int
    seq: int


class NvmeTier:
    """A ``BlobTier`` in one directory. See the module's docstring for threads; no method raises in operation.

    ``capacity_bytes`` bounds all files in the directory together, what earlier runs left too. ``min_free_bytes`` is
    left free on the file system (default: 5 % of it, at most 1 GiB). ``recovery`` is ``quiet``, ``none`` or ``strict``
    (see ``nvme_recover``). Memory: about 190 bytes a block.
    """

    name = "nvme"

    def __init__(
        self,
        path: str | os.PathLike[str],
        capacity_bytes: int,
        *,
        clock: Clock,
        min_free_bytes: int | None = None,
        segment_bytes: int | None = None,
        recovery: str = "quiet",
        workers: int = 8,
        disk: Disk | None = None,
    ) -> None:
        """Checks the settings; touches no disk. Raises ``ConfigError``."""
        self._path = os.path.abspath(os.fspath(path))
        self._clock = clock
        self._recovery = recovery
        self._min_free_bytes = min_free_bytes
        self._disk = disk if disk is not None else Disk()
        if recovery not in MODES:
            raise ConfigError("recovery", recovery, f"use one of {', '.join(MODES)}")
        if workers < 1:
            raise ConfigError("workers", workers, "at least 1 worker thread is needed")
        if min_free_bytes is not None and min_free_bytes < 0:
            raise ConfigError("min_free_bytes", min_free_bytes, "a size is at least 0")
        if segment_bytes is not None and segment_bytes < ALIGN_BYTES:
            raise ConfigError("segment_bytes", segment_bytes, f"a segment has at least {ALIGN_BYTES} bytes")
        self._limits = Limits(
            capacity_bytes=capacity_bytes,
            min_free_bytes=min_free_bytes or 0,
            segment_bytes=segment_bytes
            if segment_bytes is not None
            else default_segment_bytes(capacity_bytes),
        )
        largest_bytes = self._limits.largest_frame_bytes
        if largest_bytes < 2 * ALIGN_BYTES:
            raise ConfigError("capacity_bytes", capacity_bytes, "holds no block; give it at least '64 KiB'")
        self.caps = TierCaps(
            persistent=True,
            scannable=True,
            evicts_itself=False,
            workers=workers,
            max_block_bytes=largest_bytes,
        )
        self._owner = DirectoryLock(self._path, LOCK_NAME)
        self._lock = threading.Lock()
        self._table = SegmentTable()
        self._log = IndexLog(self._disk, self._path)
        self._checkpointing = threading.Lock()
        self._checkpointer = Checkpointer(
            self._disk, self._path, self._log, self._live_numbers, self._peek_seq
        )
        self._space: Space | None = None
        self._next = 1
        self._pending: dict[BlockKey, list[_Write]] = {}
        self._read_only = ""
        self._not_direct: str | None = None
        self._recovered = Recovered()
        self._corrupt = 0

    # start and close

    def start(self) -> None:
        """Takes the directory (made when absent) and finds what is in it.

        Raises ``ConfigError`` (not a directory, not tierkv's), ``DirectoryInUse``, ``FormatError`` (a future version)
        and ``TierError`` (cannot be used; damaged, in strict mode).
        """
        try:
            self._disk.make_directory(self._path)
            refuse_foreign(self._disk, self._path)
            self._owner.acquire()
        except (FileExistsError, NotADirectoryError) as error:
            raise ConfigError(
                "path", self._path, "is a file, not a directory; choose another path"
            ) from error
        except OSError as error:
            raise TierError(
                f"{self._path} cannot be used: {error.strerror}; choose a writable directory"
            ) from error
        try:
            self._open()
        except OSError as error:
            self._shut()
            raise TierError(f"{self._path} cannot be used: {error.strerror}") from error
        except (ConfigError, TierError):
            self._shut()
            raise

    def _open(self) -> None:
        self._not_direct = probe_direct(self._disk, os.path.join(self._path, PROBE_NAME))
        flags = os.O_RDWR | (0 if self._not_direct else os.O_DIRECT)
        self._recovered = recover(self._disk, self._path, self._recovery, flags)
        self._next = self._recovered.next_seq
        if self._min_free_bytes is None:
            _, disk_bytes = self._disk.space_bytes(self._path)
            self._limits = Limits(
                self._limits.capacity_bytes, min(GIB, disk_bytes // 20), self._limits.segment_bytes
            )
        self._space = Space(
            self._disk, self._path, self._table, self._lock, self._limits, flags, self._take_seq, self._clock
        )
        for segment in self._recovered.segments:
            self._table.adopt(segment)
        self._log.adopt(self._recovered.logs)
        self._recovered.segments, self._recovered.logs = [], []
        self._space.shrink_to_capacity()

    def close(self, deadline: Deadline) -> None:
        """Syncs the log, so that an orderly end loses nothing, and gives the directory up."""
        self._checkpointer.abandon()
        try:
            self._log.sync()
        except OSError as error:
            self._read_only = self._read_only or f"the log could not be synced: {error.strerror}"
        self._shut()

    def _shut(self) -> None:
        self._log.close()
        for segment in self._table.segments.values():
            self._disk.close(segment.fd)
        self._table = SegmentTable()
        self._owner.release()

    # reading

    def probe(self, keys: Sequence[BlockKey], deadline: Deadline) -> list[Presence]:
        """From memory, without the lock."""
        now_ms = int(self._clock.unix_s() * 1000)
        found = []
        for key in keys:
            place = self._table.find(key)
            if place is not None and not _expired(place[0].expires_ms[place[1]], now_ms):
                found.append(Presence.PRESENT)
            else:
                found.append(Presence.PENDING if key in self._pending else Presence.ABSENT)
        return found

    def get_into(self, wants: Sequence[Want], deadline: Deadline, on_done: DoneCallback) -> None:
        lost: list[tuple[BlockKey, int]] = []
        for index, want in enumerate(wants):
            on_done(index, self._read(want, deadline, lost))
        if lost:
            self._corrupt += len(lost)
            self._forget(lost)
            self._maintain()

    def _read(self, want: Want, deadline: Deadline, lost: list[tuple[BlockKey, int]]) -> Outcome:
        """Reads one block. What turns out to be no block of this key is put on ``lost``."""
        if deadline.over():
            return Outcome.CANCELLED if deadline.cancelled else Outcome.TIMEOUT
        with self._lock:
            found = self._table.find(want.key)
            if found is None:
                return Outcome.MISS
            segment, slot = found
            seq, stored_bytes = segment.seq[slot], segment.stored_bytes[slot]
            if _expired(segment.expires_ms[slot], self._clock.unix_s() * 1000):
                return Outcome.MISS
            self._table.hold(segment, slot)
        try:
            outcome = self._read_frame(want, segment, slot, stored_bytes)
        finally:
            with self._lock:
                self._table.let_go(segment, slot)
        if outcome is None:
            lost.append((want.key, seq))
            return Outcome.CORRUPT
        return outcome

    def _read_frame(self, want: Want, segment: Segment, slot: int, stored_bytes: int) -> Outcome | None:
        """``None`` when the slot does not hold the block and never will again."""
        padded_bytes = align_up(stored_bytes)
        if padded_bytes > len(want.payload):
            return Outcome.CORRUPT
        buffers = (want.header[:HEADER_PAGE_BYTES], want.payload[:padded_bytes])
        try:
            count = read_fully(self._disk, segment.fd, buffers, segment.offset(slot), ALIGN_BYTES)
        except OSError as error:
            return None if error.errno in _BAD_MEDIUM else Outcome.UNAVAILABLE
        if count < HEADER_PAGE_BYTES + padded_bytes or key_in(want.header) != want.key:
            return None
        want.stored_bytes = stored_bytes
        return Outcome.DONE

    # writing: frame, then record, then visible

    def put_from(self, items: Sequence[Item], deadline: Deadline, on_done: DoneCallback) -> None:
        written: list[_Write] = []
        try:
            for index, item in enumerate(items):
                result = self._write(index, item, deadline)
                if isinstance(result, Outcome):
                    on_done(index, result)
                    continue
                written.append(result)
                if len(written) >= KEYS_AT_ONCE:
                    batch, written = written, []
                    self._publish(batch, on_done)
        finally:
            if written:
                self._publish(written, on_done)
        self._maintain()

    def _write(self, index: int, item: Item, deadline: Deadline) -> _Write | Outcome:
        """Writes one frame into a free slot; nothing is visible yet."""
        if deadline.over():
            return Outcome.CANCELLED if deadline.cancelled else Outcome.TIMEOUT
        if self._read_only:
            return Outcome.UNAVAILABLE
        if key_in(item.header) != item.key:
            return Outcome.CORRUPT
        frame_bytes = HEADER_PAGE_BYTES + align_up(item.stored_bytes)
        if frame_bytes > self.caps.max_block_bytes:
            return Outcome.FULL
        expires_ms = expires_ms_in(item.header)
        if self._is_stored(item.key, expires_ms):
            return Outcome.DONE
        place = self._slot_for(frame_bytes, deadline)
        if isinstance(place, Outcome):
            return place
        write = _Write(index, item, *place, expires_ms)
        with self._lock:
            self._pending.setdefault(item.key, []).append(write)
        if self._write_frame(write, frame_bytes):
            return write
        with self._lock:
            self._end(write)
        return Outcome.UNAVAILABLE

    def _is_stored(self, key: BlockKey, expires_ms: int) -> bool:
        """Blocks are named by what is in them, so a key that is there need not be written again."""
        found = self._table.find(key)
        return found is not None and found[0].expires_ms[found[1]] == expires_ms

    def _slot_for(self, frame_bytes: int, deadline: Deadline) -> tuple[Segment, int] | Outcome:
        assert self._space is not None, "the tier is started"
        try:
            return self._space.slot_for(frame_bytes, deadline)
        except OSError as error:
            if error.errno in NO_SPACE:
                self._read_only = f"no segment can be made: {error.strerror}"
            return Outcome.UNAVAILABLE

    def _write_frame(self, write: _Write, frame_bytes: int) -> bool:
        buffers = (
            write.item.header[:HEADER_PAGE_BYTES],
            write.item.payload[: frame_bytes - HEADER_PAGE_BYTES],
        )
        fd, offset = write.segment.fd, write.segment.offset(write.slot)
        return self._with_relief(
            f"writing to {write.segment.name}",
            lambda: write_fully(self._disk, fd, buffers, offset, ALIGN_BYTES),
        )

    def _publish(self, written: list[_Write], on_done: DoneCallback) -> None:
        """Appends the records of written frames in one write, makes the blocks visible, reports."""
        outcomes: list[tuple[int, Outcome]] = []
        ready: list[_Write] = []
        with self._lock:
            for write in written:
                if write.doomed is not None:
                    outcomes.append((write.index, write.doomed))
                    self._end(write)
                elif self._is_stored(write.item.key, write.expires_ms):
                    outcomes.append((write.index, Outcome.DONE))
                    self._end(write)
                else:
                    write.seq = write.segment.seq[write.slot] = self._take_seq()
                    ready.append(write)
        records = b"".join(
            publish_record(w.seq, w.segment.number, w.slot, w.segment.slot_bytes, w.item.header)
            for w in ready
        )
        published = not ready or self._append(records)
        buried: list[_Buried] = []
        with self._lock:
            for write in ready:
                if published:
                    outcome = self._commit(write, buried)
                else:
                    write.segment.seq[write.slot] = 0
                    outcome = Outcome.UNAVAILABLE
                outcomes.append((write.index, outcome))
                self._end(write)
        if buried:
            self._bury(buried)
        for index, outcome in outcomes:
            on_done(index, outcome)

    def _commit(self, write: _Write, buried: list[_Buried]) -> Outcome:
        """Makes a published block visible, unless it was deleted meanwhile or a later record of its key was first."""
        key = write.item.key
        if write.doomed is not None:
            write.segment.seq[write.slot] = 0
            self._table.hold(write.segment, write.slot)
            buried.append(_Buried(key, write.segment, write.slot, self._take_seq()))
            return write.doomed
        older = self._table.find(key)
        if older is not None:
            if older[0].seq[older[1]] > write.seq:
                write.segment.seq[write.slot] = 0
                return Outcome.DONE
            self._table.hold(*older)
            self._table.unbind(*older)
            self._table.let_go(*older)
        self._table.bind(write.segment, write.slot, key, write.seq, write.item.stored_bytes, write.expires_ms)
        return Outcome.DONE

    def _end(self, write: _Write) -> None:
        """The write no longer holds its slot. Under the lock."""
        others = self._pending[write.item.key]
        others.remove(write)
        if not others:
            del self._pending[write.item.key]
        self._table.let_go(write.segment, write.slot)

    # forgetting: invisible, then tombstone, then free

    def delete(self, keys: Sequence[BlockKey]) -> None:
        for start in range(0, len(keys), KEYS_AT_ONCE):
            buried: list[_Buried] = []
            with self._lock:
                for key in keys[start : start + KEYS_AT_ONCE]:
                    for write in self._pending.get(key, ()):
                        if write.seq:  # its record may stand before this tombstone: done, and then deleted
                            write.doomed = Outcome.DONE
                    found = self._table.find(key)
                    if found is not None:
                        buried.append(self._hide(key, *found))
            self._bury(buried)
        self._maintain()

    def clear(self, prefix: KeyPrefix, deadline: Deadline) -> ClearResult:
        """Durable: when it says ``complete``, no power loss brings a block back."""
        with self._lock:
            seq = self._take_seq()
            for key, writes in self._pending.items():
                if key.startswith(prefix):
                    for write in writes:
                        write.doomed = Outcome.CANCELLED
        hidden: list[_Buried] = []
        for keys in self._table.index.keys_by_shard():
            mine = [key for key in keys if key.startswith(prefix)]
            for start in range(0, len(mine), KEYS_AT_ONCE):
                with self._lock:
                    for key in mine[start : start + KEYS_AT_ONCE]:
                        found = self._table.find(key)
                        if found is not None and found[0].seq[found[1]] < seq:
                            hidden.append(self._hide(key, *found))
        durable = self._append(clear_record(seq, prefix), sync=True)
        if durable:
            self._free(hidden)
        self._maintain()
        detail = "" if durable else f"forgotten, but not durably: {self._read_only}"
        return ClearResult(removed=len(hidden), complete=durable, detail=detail)

    def _forget(self, lost: list[tuple[BlockKey, int]]) -> None:
        """Forgets blocks that were found to be damaged, unless they were written anew meanwhile."""
        buried: list[_Buried] = []
        with self._lock:
            for key, seq in lost:
                found = self._table.find(key)
                if found is not None and found[0].seq[found[1]] == seq:
                    buried.append(self._hide(key, *found))
        self._bury(buried)

    def _hide(self, key: BlockKey, segment: Segment, slot: int) -> _Buried:
        self._table.hold(segment, slot)
        self._table.unbind(segment, slot)
        return _Buried(key, segment, slot, self._take_seq())

    def _bury(self, buried: list[_Buried]) -> None:
        """Appends tombstones, then frees the slots. A slot whose tombstone the log does not take stays held: the tier
        is read-only then."""
        if buried and self._append(b"".join(tombstone_record(one.seq, one.key) for one in buried)):
            self._free(buried)

    def _free(self, buried: list[_Buried]) -> None:
        for start in range(0, len(buried), KEYS_AT_ONCE):
            with self._lock:
                for one in buried[start : start + KEYS_AT_ONCE]:
                    self._table.let_go(one.segment, one.slot)

    # the log

    def _append(self, records: bytes, *, sync: bool = False) -> bool:
        """Writes records to the log. A log that takes no more makes the tier read-only."""
        place = self._log.reserve(len(records))
        try:
            done = self._with_relief("writing the log", lambda: self._log.write(place, records, sync=sync))
        finally:
            self._log.finish(place)
        if not done and not self._read_only:
            self._read_only = "the log could not be written"
        return done

    def _with_relief(self, what: str, write: Callable[[], None]) -> bool:
        """Does a write. Without space on the disk a segment is given up and the write tried once more; without space
        again the tier is read-only."""
        assert self._space is not None, "the tier is started"
        for last in (False, True):
            try:
                write()
            except OSError as error:
                if error.errno in NO_SPACE:
                    if not last and self._space.release_one():
                        continue
                    self._read_only = f"{what}: {error.strerror}"
                elif error.errno == errno.EROFS:
                    self._read_only = f"{what}: {error.strerror}"
                return False
            return True
        return False

    def _maintain(self) -> None:
        """Does a portion of a checkpoint when one is due and nobody else is at it."""
        due = self._log.records >= self._limits.records_before_checkpoint(self._table.slots)
        if not (due or self._checkpointer.active) or self._read_only:
            return
        if self._checkpointing.acquire(blocking=False):
            try:
                self._with_relief("writing a checkpoint", self._checkpointer.step)
            finally:
                self._checkpointing.release()

    def _live_numbers(self) -> npt.NDArray[np.uint64]:
        with self._lock:
            columns = [segment.seq for segment in self._table.segments.values()]
        numbers = np.concatenate(
            [np.frombuffer(column, np.uint64) for column in columns] or [np.empty(0, np.uint64)]
        )
        numbers = numbers[numbers > 0]
        numbers.sort()
        return numbers

    def _take_seq(self) -> int:
        """The next sequence number. Under the lock."""
        self._next += 1
        return self._next - 1

    def _peek_seq(self) -> int:
        return self._next

    # facts

    def scan(self) -> Iterator[FrameHeader]:
        """The headers of the live blocks that checkpoint and log published up to now, oldest first."""
        now_ms = int(self._clock.unix_s() * 1000)
        seen: set[int] = set()  # a record may stand twice
        for number, slot, seq, record in read_publishes(self._disk, self._path):
            segment = self._table.segments.get(number)
            if (
                segment is None
                or slot >= segment.slots
                or segment.seq[slot] != seq
                or segment.keys[slot] is None
            ):
                continue
            if _expired(segment.expires_ms[slot], now_ms) or seq in seen:
                continue
            seen.add(seq)
            try:
                yield frame_header_of(record)
            except FrameError:
                continue  # it was stored with a header that does not prove itself: a read would say so too

    def companions(self, key: BlockKey) -> list[BlockKey]:
        """The keys in the same segment as ``key``, itself included: all of them deleted, the segment can be carved for
        another size. Empty when the key is not here."""
        found = self._table.find(key)
        return [] if found is None else [other for other in found[0].keys if other is not None]

    def usage(self) -> Usage:
        """From counters. ``used_bytes`` are slots in use, header pages included."""
        table = self._table
        with self._lock:
            largest_bytes = self._space.largest_frame_bytes() if self._space is not None else 0
        return Usage(
            capacity_bytes=self._limits.capacity_bytes,
            used_bytes=table.live_bytes,
            blocks=table.blocks,
            largest_free_bytes=max(0, min(largest_bytes, self.caps.max_block_bytes) - HEADER_PAGE_BYTES),
            writable=not self._read_only,
        )

    def status(self) -> dict[str, object]:
        table, space = self._table, self._space
        return {
            "path": self._path,
            "io_mode": "direct" if self._not_direct is None else f"buffered, since {self._not_direct}",
            "allocation": space.allocation if space is not None else "not started",
            "growth": (space.note or "free") if space is not None else "not started",
            "read_only": self._read_only,
            "recovery": self._recovered.message,
            "recovered_blocks": self._recovered.blocks,
            "dropped_records": self._recovered.dropped_records,
            "capacity": format_bytes(self._limits.capacity_bytes),
            "free_space_floor": format_bytes(self._limits.min_free_bytes),
            "segments": len(table.segments),
            "empty_segments": len(table.empties),
            "segment_file_bytes": table.file_bytes,
            "released_segments": space.released if space is not None else 0,
            "log_bytes": self._log.size_bytes,
            "checkpoints": self._checkpointer.written,
            "corrupt_reads": self._corrupt,
        }


def _expired(expires_ms: int, now_ms: float) -> bool:
    return 0 < expires_ms <= now_ms
