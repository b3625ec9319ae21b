"""A bounded memory of departures: which blocks have left which tier, when and why, so that a miss can be explained.

A ring of records, 26 bytes each, the oldest overwritten. A block is remembered by eight bytes of its hash
and the number of its namespace's space: two blocks of one namespace look alike with a chance of 1 in 2**64 for each
pair, and then only an explanation is wrong. Writing costs a fraction of a microsecond; nothing is written for a hit.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np

NOT_TAKEN = 255
"""In the place of a tier: the block was offered, and host RAM did not take it."""

MOST_DEPARTURES = 1 << 20
_RECORD = struct.Struct("<8sqifBB")
_MARK_BYTES = 8
_MARK = np.dtype({"names": ["mark"], "formats": ["<u8"], "offsets": [0], "itemsize": _RECORD.size})
_CHUNK = 1 << 16
"""Rows that a search compares at a time, so that other threads get their turn."""
_BITS = 20


class Departure(NamedTuple):
    """One block has left one tier (or was not taken)."""

    tier: int
    """Number of the tier's column; ``NOT_TAKEN`` for a block that never got in."""
    reason: str
    at_s: float
    """On the store's clock, to a fraction of a second."""
    parts: int
    """Bitmap of the parts that the tier held."""


class Departures:
    """The newest ``capacity`` departures. ``note`` is called under the catalog's lock; ``find`` by anybody."""

    def __init__(self, capacity: int, start_s: float) -> None:
        self.capacity = max(1, min(capacity, MOST_DEPARTURES))
        self.noted = 0
        """Departures ever noted; the next one goes to row ``noted % capacity``."""
        self._start_s = start_s
        self._reasons: dict[str, int] = {}
        # Zeroed memory is touched only as departures come.
        table: np.ndarray[Any, np.dtype[Any]] = np.zeros(self.capacity, _MARK)
        self._marks: np.ndarray[Any, np.dtype[np.uint64]] = table["mark"]
        self._records: memoryview[int] = memoryview(table.view(np.uint8))

    def note(self, gone: Sequence[tuple[int, bytes, int]], tier: int, reason: str, at_s: float) -> None:
        """Blocks, each as (number of its space, hash, parts that were there), have left for one reason."""
        code = self._code(reason)
        age, row, capacity = at_s - self._start_s, self.noted % self.capacity, self.capacity
        records, size, write = self._records, _RECORD.size, _RECORD.pack_into
        for space, block_hash, parts in gone:
            write(records, row * size, block_hash, parts, space, age, tier, code)
            row += 1
            if row == capacity:
                row = 0
        self.noted += len(gone)

    def note_run(
        self, space: int, hashes: Sequence[bytes], parts: int, tier: int, reason: str, at_s: float
    ) -> None:
        """The same of blocks of one space that were there with the same parts."""
        alike = _RECORD.pack(b"", parts, space, at_s - self._start_s, tier, self._code(reason))[_MARK_BYTES:]
        done, size = 0, _RECORD.size
        while done < len(hashes):
            row = self.noted % self.capacity
            some = hashes[done : done + self.capacity - row]
            written = b"".join([block_hash[:_MARK_BYTES] + alike for block_hash in some])
            self._records[row * size : row * size + len(written)] = written
            done += len(some)
            self.noted += len(some)

    def _code(self, reason: str) -> int:
        code = self._reasons.get(reason)
        if code is None:
            code = self._reasons[reason] = len(self._reasons)
        return code

    def find(self, blocks: Iterable[tuple[int, bytes]]) -> dict[tuple[int, bytes], list[Departure]]:
        """What is remembered of each of the blocks (number of its space, hash), newest first. Takes milliseconds when
        the memory is full; takes no lock, so a row that is overwritten meanwhile may be missing from the answer."""
        wanted = {(int.from_bytes(block[1][:8], "little"), block[0]): block for block in blocks}
        reasons = list(self._reasons)
        found: dict[tuple[int, bytes], list[Departure]] = {}
        for row in self._rows([mark for mark, _ in wanted]):
            raw, parts, space, age, tier, code = _RECORD.unpack_from(self._records, row * _RECORD.size)
            block = wanted.get((int.from_bytes(raw, "little"), space))
            if block is not None:
                one = Departure(tier, reasons[code], self._start_s + age, parts)
                found.setdefault(block, []).append(one)
        return found

    def _rows(self, wanted: Sequence[int]) -> list[int]:
        """Rows that may have one of the marks, newest first."""
        marks = np.array(wanted, np.uint64)
        low = np.zeros(1 << _BITS, bool)  # most rows are ruled out by their low bits
        low[marks & np.uint64(len(low) - 1)] = True
        next_row, used = self.noted % self.capacity, min(self.noted, self.capacity)
        rows: list[int] = []
        for start in range(0, used, _CHUNK):
            chunk = self._marks[start : min(start + _CHUNK, used)]
            rows += (np.flatnonzero(low[chunk & np.uint64(len(low) - 1)]) + start).tolist()
        return sorted(rows, key=lambda row: (row - next_row) % self.capacity, reverse=True)
