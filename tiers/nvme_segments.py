"""Which slot holds which block: segments carved into slots of one size, and the index of keys. Memory only, no I/O.

The table carries the tier's one metadata lock and never takes it: callers hold it for every method, for no
more than 256 keys at a time, and never across I/O.

A slot is in one of three states. *Free*: in its segment's free list. *Held*: somebody writes it, reads it, or waits
for its tombstone to reach the log; ``holds`` counts them. *Live*: a key is bound to it. A slot is free again when the
last hold has gone and no key is bound, so a slot is never rewritten while an older reader is inside.

Memory: 195 bytes a block, measured with 10⁶ (65 of them the key itself, 36 the columns, the rest the dict).
"""

from __future__ import annotations

import heapq
import threading
from array import array
from bisect import bisect_left, insort
from collections.abc import Iterator

from tierkv.ids import BlockKey
from tierkv.units import ALIGN_BYTES

SEGMENT_HEADER_BYTES = ALIGN_BYTES
FRAME_HEADER_BYTES = ALIGN_BYTES
NEAR_CLASS_PARTS = 16
"""A class is reused for blocks that fill at least all but 1/16 of its slots."""

_SHARDS = 256
_SLOT_BITS = 32
_SLOT_MASK = (1 << _SLOT_BITS) - 1


class Segment:
    """One file of slots of one size, with a column for each fact about a slot."""

    __slots__ = (
        "carve_seq", "expires_ms", "fd", "file_bytes", "free", "holds", "keys", "live", "name", "number",
        "queued", "retired", "seq", "slot_bytes", "slots", "stored_bytes",
    )  # fmt: skip

    def __init__(
        self, number: int, name: str, fd: int, file_bytes: int, slot_bytes: int, slots: int, carve_seq: int
    ) -> None:
        self.number = number
        self.name = name
        self.fd = fd
        self.file_bytes = file_bytes
        self.slot_bytes = slot_bytes
        self.slots = slots
        self.carve_seq = carve_seq
        """Publish records with a lower sequence number speak of an earlier carving."""
        self.keys: list[BlockKey | None] = [None] * slots
        self.seq = array("Q", bytes(8 * slots))
        """Sequence number of the publish record that counts for the slot, from before it is written; else 0."""
        self.stored_bytes = array("I", bytes(4 * slots))
        self.expires_ms = array("Q", bytes(8 * slots))
        self.free = list(range(slots - 1, -1, -1))
        self.holds: dict[int, int] = {}
        self.live = 0
        self.queued = False
        self.retired = False

    def offset(self, slot: int) -> int:
        """Where the slot's header page begins in the file."""
        return SEGMENT_HEADER_BYTES + slot * self.slot_bytes

    def __lt__(self, other: Segment) -> bool:
        return self.number < other.number

    @property
    def empty(self) -> bool:
        return self.live == 0 and not self.holds


class KeyIndex:
    """Key to (segment, slot) as one integer, in shards, so that the growth of one dict stalls nobody."""

    def __init__(self) -> None:
        self.shards: list[dict[BlockKey, int]] = [{} for _ in range(_SHARDS)]
        """By the key's last byte."""

    def keys_by_shard(self) -> Iterator[list[BlockKey]]:
        """All keys, a copy of one shard at a time; safe while others change the index."""
        for shard in self.shards:
            yield list(shard)


class SegmentTable:
    """All segments of a directory, their free slots by size class, and the index."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.next_seq = 1
        self.index = KeyIndex()
        self._shards = self.index.shards
        self.segments: dict[int, Segment] = {}
        self.empties: dict[int, Segment] = {}
        """Segments without a live or held slot: they may be carved for another class, or unlinked."""
        self.empty_bytes = 0
        self.blocks = 0
        self.live_bytes = 0
        self.file_bytes = 0
        self.slots = 0
        self._next_number = 1
        self._sizes: list[int] = []  # the classes that exist, sorted
        self._segments_of: dict[int, int] = {}  # class -> number of its segments
        self._open: dict[int, list[Segment]] = {}  # class -> heap of segments that may have a free slot

    def take_seq(self) -> int:
        """A sequence number for a record or a carving; no other ever has it."""
        self.next_seq += 1
        return self.next_seq - 1

    # segments come and go

    def next_number(self) -> int:
        self._next_number += 1
        return self._next_number - 1

    def adopt(self, segment: Segment) -> None:
        """Takes a segment into use whose columns recovery has filled."""
        for slot, key in enumerate(segment.keys):
            if key is not None:
                self._shards[key[-1]][key] = segment.number << _SLOT_BITS | slot
                segment.live += 1
        self.blocks += segment.live
        self.live_bytes += segment.live * segment.slot_bytes
        self.add(segment)

    def add(self, segment: Segment) -> None:
        """Takes a segment into use."""
        self.segments[segment.number] = segment
        self._next_number = max(self._next_number, segment.number + 1)
        self.file_bytes += segment.file_bytes
        self.slots += segment.slots
        if segment.slot_bytes not in self._segments_of:
            insort(self._sizes, segment.slot_bytes)
        self._segments_of[segment.slot_bytes] = self._segments_of.get(segment.slot_bytes, 0) + 1
        self._offer(segment)
        self._note_empty(segment)

    def retire(self, segment: Segment) -> None:
        """Takes a segment that nobody holds out of use: it is neither read nor written any more. Its keys are still
        bound; whoever retires it unbinds them in portions."""
        assert not segment.holds, "a held segment must not be retired"
        segment.retired = True
        del self.segments[segment.number]
        self._note_taken(segment)
        self.file_bytes -= segment.file_bytes
        self.slots -= segment.slots
        self._segments_of[segment.slot_bytes] -= 1
        if not self._segments_of[segment.slot_bytes]:
            del self._segments_of[segment.slot_bytes]
            del self._sizes[bisect_left(self._sizes, segment.slot_bytes)]
            self._open.pop(segment.slot_bytes, None)

    # classes

    def class_for(self, frame_bytes: int) -> int:
        """The slot size for a new segment: an existing class that is near enough, else the exact size."""
        for size in self._near(frame_bytes):
            return size
        return frame_bytes

    def _near(self, frame_bytes: int, waste_bytes: int | None = None) -> Iterator[int]:
        largest = frame_bytes + (frame_bytes // NEAR_CLASS_PARTS if waste_bytes is None else waste_bytes)
        for at in range(bisect_left(self._sizes, frame_bytes), len(self._sizes)):
            if self._sizes[at] > largest:
                return
            yield self._sizes[at]

    def largest_free_slot(self) -> int:
        """Size of the largest free slot; 0 when there is none."""
        for size in reversed(self._sizes):
            if self._first_open(size) is not None:
                return size
        return 0

    # slots

    def take(self, frame_bytes: int, waste_bytes: int | None = None) -> tuple[Segment, int] | None:
        """A free slot for a frame, held; the lowest segment first, so that the high ones fall empty. ``waste_bytes``
        is how much larger than the frame it may be, 1/16 unless said."""
        heap = self._open.get(frame_bytes)
        if heap and heap[0].free and not heap[0].retired:
            return self._take_from(heap[0])
        for size in self._near(frame_bytes, waste_bytes):
            segment = self._first_open(size)
            if segment is not None:
                return self._take_from(segment)
        return None

    def _take_from(self, segment: Segment) -> tuple[Segment, int]:
        slot = segment.free.pop()
        if not segment.live and not segment.holds:
            self._note_taken(segment)
        segment.holds[slot] = 1
        return segment, slot

    def hold(self, segment: Segment, slot: int) -> None:
        segment.holds[slot] = segment.holds.get(slot, 0) + 1

    def let_go(self, segment: Segment, slot: int) -> None:
        """Ends one hold; the last one frees a slot that no key is bound to."""
        left = segment.holds[slot] - 1
        if left:
            segment.holds[slot] = left
            return
        del segment.holds[slot]
        if segment.keys[slot] is None:
            segment.free.append(slot)
            if not segment.queued:
                self._offer(segment)
            if not segment.live and not segment.holds:
                self._note_empty(segment)

    def bind(
        self, segment: Segment, slot: int, key: BlockKey, seq: int, stored_bytes: int, expires_ms: int
    ) -> None:
        """Makes the block in a held slot visible."""
        segment.keys[slot] = key
        segment.seq[slot] = seq
        segment.stored_bytes[slot] = stored_bytes
        segment.expires_ms[slot] = expires_ms
        segment.live += 1
        self._shards[key[-1]][key] = segment.number << _SLOT_BITS | slot
        self.blocks += 1
        self.live_bytes += segment.slot_bytes

    def unbind(self, segment: Segment, slot: int) -> None:
        """Makes the block in a slot invisible. The caller holds the slot, or has retired the segment."""
        key = segment.keys[slot]
        assert key is not None, "only a live slot can be unbound"
        segment.keys[slot] = None
        segment.seq[slot] = 0
        segment.live -= 1
        shard = self._shards[key[-1]]
        if (
            shard.get(key) == segment.number << _SLOT_BITS | slot
        ):  # a retired segment's key may live elsewhere
            del shard[key]
        self.blocks -= 1
        self.live_bytes -= segment.slot_bytes

    def hide(self, key: BlockKey) -> tuple[Segment, int] | None:
        """Makes a block invisible and holds its slot; ``None`` when there is none."""
        found = self.find(key)
        if found is not None:
            segment, slot = found
            segment.holds[slot] = segment.holds.get(slot, 0) + 1
            self.unbind(segment, slot)
        return found

    def find(self, key: BlockKey) -> tuple[Segment, int] | None:
        """Where the key is; ``None`` also when its segment was just retired."""
        place = self._shards[key[-1]].get(key)
        if place is None:
            return None
        segment = self.segments.get(place >> _SLOT_BITS)
        return None if segment is None else (segment, place & _SLOT_MASK)

    def _note_empty(self, segment: Segment) -> None:
        if segment.empty and not segment.retired and segment.number not in self.empties:
            self.empties[segment.number] = segment
            self.empty_bytes += segment.file_bytes

    def _note_taken(self, segment: Segment) -> None:
        if self.empties.pop(segment.number, None) is not None:
            self.empty_bytes -= segment.file_bytes

    def _offer(self, segment: Segment) -> None:
        if segment.free and not segment.queued and not segment.retired:
            segment.queued = True
            heapq.heappush(self._open.setdefault(segment.slot_bytes, []), segment)

    def _first_open(self, size: int) -> Segment | None:
        heap = self._open.get(size)
        while heap:
            segment = heap[0]
            if segment.free and not segment.retired:
                return segment
            segment.queued = False
            heapq.heappop(heap)
        return None
