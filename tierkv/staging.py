"""Page-aligned memory for headers and encoded payloads on their way to and from a blob tier.

Payloads in ``raw`` form go straight from and into arena slots; only frame headers (one page each, the unit of a direct
disk access) and encoded payloads need memory of their own. Sheets are made once for each worker and used again.
"""

from __future__ import annotations

import mmap
import threading

from tierkv.units import ALIGN_BYTES, align_up


class Sheet:
    """Header pages for one job."""

    __slots__ = ("pages",)

    def __init__(self, pages: int) -> None:
        memory = memoryview(mmap.mmap(-1, pages * ALIGN_BYTES))
        self.pages = [memory[i * ALIGN_BYTES : (i + 1) * ALIGN_BYTES] for i in range(pages)]


class SheetPool:
    """Sheets for jobs that run at the same time. Thread-safe; ``take`` never waits."""

    def __init__(self, pages_per_sheet: int) -> None:
        self._pages = pages_per_sheet
        self._lock = threading.Lock()
        self._free: list[Sheet] = []

    def take(self, pages: int) -> Sheet:
        """A sheet with at least that many pages. As many sheets exist as jobs have run at the same time."""
        if pages > self._pages:
            return Sheet(pages)
        with self._lock:
            return self._free.pop() if self._free else Sheet(self._pages)

    def give_back(self, sheet: Sheet) -> None:
        if len(sheet.pages) == self._pages:
            with self._lock:
                self._free.append(sheet)


def aligned(length_bytes: int) -> memoryview:
    """Fresh zeroed memory on a page boundary, its length rounded up to a page."""
    return memoryview(mmap.mmap(-1, max(ALIGN_BYTES, align_up(length_bytes))))
