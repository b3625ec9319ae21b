"""The NVMe tier: blocks in pre-allocated segment files on a local disk, found again after a restart.

The parts: ``nvme_segments`` (which slot holds which block), ``nvme_space`` (segments come and go), ``nvme_writer``
(a block's way in), ``nvme_journal`` with ``nvme_log`` and ``nvme_checkpoint`` (what is published), ``nvme_recover``
(what a start finds), ``nvme_record`` (bytes on disk), ``nvme_lock`` (one owner), ``nvme_disk`` (the system calls).
``docs/tiers-nvme.md`` has the format and the order of writes.

Threads: up to ``workers`` threads may be inside at once; the tier starts none. One metadata lock guards the memory; it
is never held across I/O, nor for more than 256 keys.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import NamedTuple

from tierkv.clock import Clock, Deadline
from tierkv.errors import ConfigError, FrameError, TierError
from tierkv.frame import FrameHeader
from tierkv.ids import BlockKey, KeyPrefix
from tierkv.tier import ClearResult, DoneCallback, Item, Outcome, Presence, TierCaps, Usage, Want
from tierkv.tiers.nvme_disk import Disk, probe_direct, read_fully
from tierkv.tiers.nvme_journal import Hidden, Journal
from tierkv.tiers.nvme_lock import DirectoryLock
from tierkv.tiers.nvme_record import clear_records, frame_header_of, key_in
from tierkv.tiers.nvme_recover import (
    LOCK_NAME,
    MODES,
    PROBE_NAME,
    Recovered,
    read_publishes,
    recover,
    refuse_foreign,
)
from tierkv.tiers.nvme_segments import FRAME_HEADER_BYTES, Segment, SegmentTable
from tierkv.tiers.nvme_shrink import blocks_lost_with
from tierkv.tiers.nvme_space import KEYS_AT_ONCE, Limits, Space, segment_bytes_for
from tierkv.tiers.nvme_watch import FileWatch
from tierkv.tiers.nvme_writer import Writer
from tierkv.units import ALIGN_BYTES, GIB, align_up, format_bytes

_LOGS_OF_A_LIFE = 2
"""Files of the log that one life may leave: what a checkpoint was reading, and what it had turned to. More are of
checkpoints that several lives did not finish; the start finishes one, or they would pile up."""

_BAD_MEDIUM = {errno.EIO, errno.EILSEQ, errno.ENODATA}

_READS_AT_ONCE = 16
"""Slots that a worker keeps from being written again while it reads them one after the other."""


class _Place(NamedTuple):
    """A block on disk, held."""

    segment: Segment
    slot: int
    seq: int
    stored_bytes: int


class NvmeTier:
    """A ``BlobTier`` in one directory. See the module's docstring for threads; no method raises in operation.

    ``capacity_bytes`` bounds all files in the directory together, what earlier runs left too. ``min_free_bytes`` is
    left free on the file system (default: 5 % of it, at most 1 GiB). ``recovery`` is ``quiet``, ``none`` or ``strict``
    (see ``nvme_recover``). Memory: 195 bytes a block.
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
        limits = Limits(
            capacity_bytes=capacity_bytes,
            min_free_bytes=min_free_bytes or 0,
            segment_bytes=segment_bytes_for(capacity_bytes, segment_bytes),
        )
        if limits.largest_frame_bytes < 2 * ALIGN_BYTES:
            raise ConfigError("capacity_bytes", capacity_bytes, "holds no block; give it at least '64 KiB'")
        self.caps = TierCaps(
            persistent=True,
            scannable=True,
            evicts_itself=False,
            workers=workers,
            max_block_bytes=limits.largest_frame_bytes,
        )
        self._owner = DirectoryLock(self._path, LOCK_NAME)
        self._table = SegmentTable()
        self._lock = self._table.lock
        self._space = Space(self._disk, self._path, self._table, limits, clock)
        self._journal = Journal(self._disk, self._path, self._table, self._space)
        self._writer = Writer(self._disk, self._table, self._space, self._journal)
        self._watch = FileWatch(self._disk, self._path, self._owner, self._space, self._journal, clock)
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
        if self._min_free_bytes is None:
            _, disk_bytes = self._disk.space_bytes(self._path)
            self._space.limits = replace(self._space.limits, min_free_bytes=min(GIB, disk_bytes // 20))
        self._recovered = found = recover(self._disk, self._path, self._recovery, flags)
        self._journal.begin(found.next_seq, found.logs)
        self._space.begin(flags, found.segments, lambda: blocks_lost_with(self._placed()))
        unfinished = len(found.logs) > _LOGS_OF_A_LIFE
        found.segments, found.logs = [], []
        if found.damaged or unfinished:
            self._journal.checkpoint_now()
        self._watch.begin()
        if expired := self._expired_keys():
            self.delete(expired)

    def close(self, deadline: Deadline) -> None:
        """Syncs the log, so that an orderly end loses nothing, and gives the directory up."""
        self._shut()

    def _shut(self) -> None:
        self._watch.end()
        self._journal.close()
        with self._lock:
            segments = list(self._table.segments.values())
        for segment in [*segments, *self._recovered.segments]:
            self._disk.close(segment.fd)
        self._owner.release()

    # reading

    def probe(self, keys: Sequence[BlockKey], deadline: Deadline) -> list[Presence]:
        """From memory."""
        found: list[Presence] = []
        for start in range(0, len(keys), KEYS_AT_ONCE):
            with self._lock:
                found += map(self._presence, keys[start : start + KEYS_AT_ONCE])
        return found

    def _presence(self, key: BlockKey) -> Presence:
        place = self._table.find(key)
        if place is not None and not self._expired(*place):
            return Presence.PRESENT
        return Presence.PENDING if self._writer.is_pending(key) else Presence.ABSENT

    def _expired(self, segment: Segment, slot: int) -> bool:
        expires_ms = segment.expires_ms[slot]
        return expires_ms != 0 and expires_ms <= self._clock.unix_s() * 1000

    def _expired_keys(self) -> list[BlockKey]:
        """Of blocks whose end came while nobody had the directory."""
        return [
            key
            for segment in self._table.segments.values()
            if any(segment.expires_ms)
            for slot, key in enumerate(segment.keys)
            if key is not None and self._expired(segment, slot)
        ]

    def get_into(self, wants: Sequence[Want], deadline: Deadline, on_done: DoneCallback) -> None:
        lost: list[tuple[BlockKey, int]] = []
        for start in range(0, len(wants), _READS_AT_ONCE):
            batch = wants[start : start + _READS_AT_ONCE]
            places = self._hold_places(batch)
            try:
                for index, (want, place) in enumerate(zip(batch, places, strict=True), start):
                    on_done(index, self._read(want, place, deadline, lost))
            finally:
                self._let_go(places)
        if lost:
            self._forget(lost)
            self._journal.maintain()

    def _hold_places(self, wants: Sequence[Want]) -> list[_Place | None]:
        """Where the blocks lie now; nobody writes there until they are let go. One turn of the lock for all: each
        costs a worker a wait for the others."""
        places: list[_Place | None] = []
        with self._lock:
            for want in wants:
                found = self._table.find(want.key)
                if found is None or self._expired(*found):
                    places.append(None)
                    continue
                segment, slot = found
                self._table.hold(segment, slot)
                places.append(_Place(segment, slot, segment.seq[slot], segment.stored_bytes[slot]))
        return places

    def _let_go(self, places: Sequence[_Place | None]) -> None:
        with self._lock:
            for place in places:
                if place is not None:
                    self._table.let_go(place.segment, place.slot)

    def _read(
        self, want: Want, place: _Place | None, deadline: Deadline, lost: list[tuple[BlockKey, int]]
    ) -> Outcome:
        """Reads one block. What turns out to be no block of this key is put on ``lost``."""
        if deadline.over():
            return Outcome.CANCELLED if deadline.cancelled else Outcome.TIMEOUT
        if place is None:
            return Outcome.MISS
        outcome = self._read_frame(want, place.segment, place.slot, place.stored_bytes)
        if outcome is None:
            lost.append((want.key, place.seq))
            return Outcome.CORRUPT
        return outcome

    def _read_frame(self, want: Want, segment: Segment, slot: int, stored_bytes: int) -> Outcome | None:
        """``None`` when the slot does not hold the block and never will again."""
        padded_bytes = align_up(stored_bytes)
        if padded_bytes > len(want.payload):
            return Outcome.CORRUPT
        buffers = (want.header[:FRAME_HEADER_BYTES], want.payload[:padded_bytes])
        frame_bytes, offset = FRAME_HEADER_BYTES + padded_bytes, segment.offset(slot)
        try:
            count = read_fully(self._disk, segment.fd, buffers, frame_bytes, offset, ALIGN_BYTES)
        except OSError as error:
            return None if error.errno in _BAD_MEDIUM else Outcome.UNAVAILABLE
        if count < frame_bytes or key_in(want.header) != want.key:
            return None
        want.stored_bytes = stored_bytes
        return Outcome.DONE

    # writing

    def put_from(self, items: Sequence[Item], deadline: Deadline, on_done: DoneCallback) -> None:
        self._writer.put(items, deadline, on_done)
        self._journal.maintain()

    # forgetting: invisible, then tombstone, then free

    def delete(self, keys: Sequence[BlockKey]) -> None:
        for start in range(0, len(keys), KEYS_AT_ONCE):
            hidden: list[Hidden] = []
            with self._lock:
                for key in keys[start : start + KEYS_AT_ONCE]:
                    self._writer.doom_key(key)
                    found = self._table.hide(key)
                    if found is not None:
                        hidden.append(Hidden(key, *found, self._table.take_seq()))
            self._journal.bury(hidden)
        self._journal.maintain()

    def clear(self, prefix: KeyPrefix, deadline: Deadline) -> ClearResult:
        """Durable: when it says ``complete``, no power loss brings a block back."""
        with self._lock:
            seq = self._table.take_seq()
            self._writer.doom_prefix(prefix)
        hidden: list[Hidden] = []
        for keys in self._table.index.keys_by_shard():
            mine = [key for key in keys if key.startswith(prefix)]
            for start in range(0, len(mine), KEYS_AT_ONCE):
                with self._lock:
                    hidden += self._hide_older(mine[start : start + KEYS_AT_ONCE], seq)
        durable = self._journal.append(clear_records(seq, prefix), sync=True)
        if durable:
            self._journal.free(hidden)
        self._journal.maintain()
        if durable:
            return ClearResult(removed=len(hidden), complete=True)
        why = self._journal.read_only
        if self._journal.renounce(deadline):
            detail = f"the log takes no more ({why}), so the index was removed: the next start finds nothing"
            return ClearResult(removed=len(hidden), complete=True, detail=detail)
        self._journal.leave_unburied(hidden)
        return ClearResult(removed=len(hidden), complete=False, detail=f"forgotten, but not durably: {why}")

    def _hide_older(self, keys: Sequence[BlockKey], seq: int) -> list[Hidden]:
        hidden = []
        for key in keys:
            found = self._table.find(key)
            if found is not None and found[0].seq[found[1]] < seq:
                self._table.hide(key)
                hidden.append(Hidden(key, *found, self._table.take_seq()))
        return hidden

    def _forget(self, lost: list[tuple[BlockKey, int]]) -> None:
        """Forgets blocks that were found to be damaged, unless they were written anew meanwhile."""
        with self._lock:
            self._corrupt += len(lost)
            hidden = [one for key, seq in lost for one in self._hide_older([key], seq + 1)]
        self._journal.bury(hidden)

    # facts

    def scan(self) -> Iterator[FrameHeader]:
        """The headers of the live blocks that checkpoint and log published up to now, oldest first."""
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
            if self._expired(segment, slot) or seq in seen:
                continue
            seen.add(seq)
            try:
                yield frame_header_of(record)
            except FrameError:
                continue  # it was stored with a header that does not prove itself: a read would say so too

    def _placed(self) -> Iterator[tuple[FrameHeader, int]]:
        """The header of each live block and the number of its segment."""
        for header in self.scan():
            found = self._table.find(header.key)
            if found is not None:
                yield header, found[0].number

    def companions(self, key: BlockKey) -> list[BlockKey]:
        """The keys in the same segment as ``key``, itself included: all of them deleted, the segment can be carved for
        another size. Empty when the key is not here."""
        found = self._table.find(key)
        return [] if found is None else [other for other in found[0].keys if other is not None]

    def usage(self) -> Usage:
        """From counters; now and then it looks whether the files are still there, and whether a disk that was full
        still is. ``used_bytes`` are slots in use, header pages included."""
        self._journal.look_again()
        self._watch.look()
        with self._lock:
            room_bytes = min(self._space.largest_frame_bytes(), self.caps.max_block_bytes)
        return Usage(
            capacity_bytes=self._space.limits.capacity_bytes,
            used_bytes=self._table.live_bytes,
            blocks=self._table.blocks,
            largest_free_bytes=max(0, room_bytes - FRAME_HEADER_BYTES),
            writable=not self._journal.read_only,
            read_only=bool(self._journal.read_only),
        )

    def status(self) -> dict[str, object]:
        table, space = self._table, self._space
        return {
            "path": self._path,
            "io_mode": "direct" if self._not_direct is None else f"buffered, since {self._not_direct}",
            "allocation": space.allocation,
            "growth": space.note or "free",
            "read_only": self._journal.read_only,
            "trouble": f"{self._path}: {self._journal.read_only}" if self._journal.read_only else "",
            "recovery": self._recovered.message,
            "recovered_blocks": self._recovered.blocks,
            "dropped_records": self._recovered.dropped_records,
            "capacity": format_bytes(space.limits.capacity_bytes),
            "free_space_floor": format_bytes(space.limits.min_free_bytes),
            "segment": format_bytes(space.limits.segment_bytes),
            "segments": len(table.segments),
            "empty_segments": len(table.empties),
            "segment_file_bytes": table.file_bytes,
            "released_segments": space.released,
            "lost_segments": self._watch.lost_segments,
            "log_bytes": self._journal.log_bytes,
            "checkpoints": self._journal.checkpoints,
            "corrupt_reads": self._corrupt,
        }
