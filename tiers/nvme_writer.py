"""A block's way in: frame into a free slot, record into the log, and only then visible.

A block that fails on the way was never visible and its slot is free again. Threads that write one key at the same time
each write a frame; the record with the highest number counts, in memory as after a restart.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from tierkv.clock import Deadline
from tierkv.ids import BlockKey, KeyPrefix
from tierkv.tier import DoneCallback, Item, Outcome
from tierkv.tiers.nvme_disk import Disk, write_fully
from tierkv.tiers.nvme_journal import Hidden, Journal
from tierkv.tiers.nvme_record import key_and_expiry_in, publish_record
from tierkv.tiers.nvme_segments import FRAME_HEADER_BYTES, Segment, SegmentTable
from tierkv.tiers.nvme_space import KEYS_AT_ONCE, NO_SPACE, Space
from tierkv.units import ALIGN_BYTES, align_up


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
    other: _Write | None = None
    """Another write of the same key that began before."""


class Writer:
    """Writes batches. Thread-safe."""

    def __init__(self, disk: Disk, table: SegmentTable, space: Space, journal: Journal) -> None:
        self._disk = disk
        self._table = table
        self._lock = table.lock
        self._space = space
        self._journal = journal
        self._largest_frame_bytes = space.limits.largest_frame_bytes
        self._pending: dict[BlockKey, _Write] = {}
        """The write of a key that began last."""

    def is_pending(self, key: BlockKey) -> bool:
        return key in self._pending

    def put(self, items: Sequence[Item], deadline: Deadline, on_done: DoneCallback) -> None:
        """What ``BlobTier.put_from`` says."""
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

    def doom_key(self, key: BlockKey) -> None:
        """The key is being deleted. Under the metadata lock."""
        write = self._pending.get(key)
        while write is not None:
            if write.seq:  # its record may stand before the tombstone: it was done, and then deleted
                write.doomed = Outcome.DONE
            write = write.other

    def doom_prefix(self, prefix: KeyPrefix) -> None:
        """A clear begins: what is on its way ends with it. Under the metadata lock."""
        for key, last in self._pending.items():
            write: _Write | None = last if key.startswith(prefix) else None
            while write is not None:
                write.doomed = Outcome.CANCELLED
                write = write.other

    def _write(self, index: int, item: Item, deadline: Deadline) -> _Write | Outcome:
        """Writes one frame into a free slot; nothing is visible yet."""
        if deadline.over():
            return Outcome.CANCELLED if deadline.cancelled else Outcome.TIMEOUT
        if self._journal.read_only:
            return Outcome.UNAVAILABLE
        key, expires_ms = key_and_expiry_in(item.header)
        if key != item.key:
            return Outcome.CORRUPT
        frame_bytes = FRAME_HEADER_BYTES + align_up(item.stored_bytes)
        if frame_bytes > self._largest_frame_bytes:
            return Outcome.FULL
        with self._lock:
            if self._is_stored(item.key, expires_ms):
                return Outcome.DONE
            taken = self._table.take(frame_bytes)
            if taken is not None:
                write = self._begin(_Write(index, item, taken[0], taken[1], expires_ms))
        if taken is None:
            place = self._make_room(frame_bytes, deadline)
            if isinstance(place, Outcome):
                return place
            with self._lock:
                write = self._begin(_Write(index, item, *place, expires_ms))
        if self._write_frame(write, frame_bytes):
            return write
        with self._lock:
            self._end(write)
        return Outcome.UNAVAILABLE

    def _begin(self, write: _Write) -> _Write:
        """Under the metadata lock."""
        write.other = self._pending.get(write.item.key)
        self._pending[write.item.key] = write
        return write

    def _is_stored(self, key: BlockKey, expires_ms: int) -> bool:
        """Blocks are named by what is in them, so a key that is there need not be written again. Under the lock."""
        found = self._table.find(key)
        return found is not None and found[0].expires_ms[found[1]] == expires_ms

    def _make_room(self, frame_bytes: int, deadline: Deadline) -> tuple[Segment, int] | Outcome:
        try:
            return self._space.slot_for(frame_bytes, deadline)
        except OSError as error:
            if error.errno in NO_SPACE:
                self._journal.ran_out("no segment can be made", error)
            return Outcome.UNAVAILABLE

    def _write_frame(self, write: _Write, frame_bytes: int) -> bool:
        item, segment = write.item, write.segment
        payload_bytes = frame_bytes - FRAME_HEADER_BYTES
        payload = item.payload if len(item.payload) == payload_bytes else item.payload[:payload_bytes]
        buffers = (item.header[:FRAME_HEADER_BYTES], payload)
        fd, offset = segment.fd, segment.offset(write.slot)
        try:
            write_fully(self._disk, fd, buffers, frame_bytes, offset, ALIGN_BYTES)
        except OSError as error:
            return self._journal.relieve(
                error,
                f"writing to {segment.name}",
                lambda: write_fully(self._disk, fd, buffers, frame_bytes, offset, ALIGN_BYTES),
            )
        return True

    def _publish(self, written: list[_Write], on_done: DoneCallback) -> None:
        """Appends the records of written frames in one write, makes the blocks visible, reports."""
        outcomes: list[tuple[int, Outcome]] = []
        ready: list[_Write] = []
        with self._lock:
            for write in written:
                if write.doomed is None:
                    write.seq = write.segment.seq[write.slot] = self._table.take_seq()
                    ready.append(write)
                else:
                    outcomes.append((write.index, write.doomed))
                    self._end(write)
        published = not ready or self._journal.append(b"".join(map(_record_of, ready)))
        hidden: list[Hidden] = []
        with self._lock:
            for write in ready:
                outcome = self._commit(write, hidden) if published else self._undo(write)
                outcomes.append((write.index, outcome))
                self._end(write)
        self._journal.bury(hidden)
        for index, outcome in outcomes:
            on_done(index, outcome)

    def _commit(self, write: _Write, hidden: list[Hidden]) -> Outcome:
        """Makes a published block visible, unless it was forgotten meanwhile or a later record of its key was first."""
        key = write.item.key
        if write.doomed is not None:
            write.segment.seq[write.slot] = 0
            self._table.hold(write.segment, write.slot)
            hidden.append(Hidden(key, write.segment, write.slot, self._table.take_seq()))
            return write.doomed
        older = self._table.find(key)
        if older is not None:
            if older[0].seq[older[1]] > write.seq:
                write.segment.seq[write.slot] = 0
                return Outcome.DONE
            self._table.hold(*older)
            self._table.unbind(*older)
            self._table.let_go(*older)  # no tombstone: this record supersedes it
        self._table.bind(write.segment, write.slot, key, write.seq, write.item.stored_bytes, write.expires_ms)
        return Outcome.DONE

    def _undo(self, write: _Write) -> Outcome:
        write.segment.seq[write.slot] = 0
        return Outcome.UNAVAILABLE

    def _end(self, write: _Write) -> None:
        """The write no longer holds its slot. Under the metadata lock."""
        last = self._pending[write.item.key]
        if last is not write:
            while last.other is not write:
                assert last.other is not None, "a write is pending until it ends"
                last = last.other
            last.other = write.other
        elif write.other is not None:
            self._pending[write.item.key] = write.other
        else:
            del self._pending[write.item.key]
        self._table.let_go(write.segment, write.slot)


def _record_of(write: _Write) -> bytes:
    segment = write.segment
    return publish_record(write.seq, segment.number, write.slot, segment.slot_bytes, write.item.header)
