"""A put's bytes into the slots that a daemon gave.

Two things hide what a put would wait for. While the daemon looks for slots, the caller's thread takes checksums. And
the blocks of a large put are copied by two threads, each of which takes the next one that is left, so that neither
waits for the other: one core cannot copy and take checksums as fast as memory is.
"""

from __future__ import annotations

import os
import threading
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Final

import xxhash

from tierkv.errors import ArgumentError, ClosedError, TierKVError
from tierkv.executor import Executor
from tierkv.filling import Payload, buffers_of
from tierkv.handles import DraftBlocks, SlotMemory, copy_in
from tierkv.units import MIB

LANE: Final = "put"
AHEAD_BYTES: Final = 4 * MIB
"""For a larger block the answer would have to wait, and perhaps for nothing: the daemon may have the block already."""
SHARED_BYTES: Final = 4 * MIB
"""From here on a second thread is worth waking."""
_LOOK_S: Final = 1.0

Sums = tuple[int, ...]


class Ahead:
    """``sums``: checksums of a put's first blocks, by their place among the payloads."""

    def __init__(self, payloads: Sequence[Payload], first: int, part_bytes: Sequence[int]) -> None:
        self._payloads = payloads
        self._first = first
        self._part_bytes = part_bytes
        self.sums: dict[int, Sums] = {}

    def take(self, is_over: Callable[[], bool]) -> None:
        """Until then. What is no payload is left for the copy to complain about."""
        if sum(self._part_bytes) > AHEAD_BYTES:
            return
        for i, given in enumerate(self._payloads):
            if is_over():
                return
            try:
                views = buffers_of(given, self._first + i)
            except ArgumentError:
                return
            self.sums[i] = tuple([xxhash.xxh3_64_intdigest(view) for view in views])


class Filler:
    """Copies into slots with the caller's thread and one more, which is started when it is first needed. Any thread."""

    def __init__(self, executor: Executor) -> None:
        self._executor = executor
        self.alone = len(os.sched_getaffinity(0)) == 1
        """A second thread would only take turns with the first."""
        self._lock = threading.Lock()
        self._hired = False

    def fill(
        self, memory: SlotMemory, blocks: DraftBlocks, payloads: Sequence[Payload], ahead: Ahead, first: int
    ) -> list[Sums]:
        """Copies all ``blocks``; ``payloads[i]`` is that of block ``first + i``. Returns their checksums. Nobody writes
        into the slots any more when this is over. Raises ``ArgumentError``, ``HandleError`` and ``ClosedError``."""
        work = _Work(memory, blocks, payloads, ahead.sums, first)
        total_bytes = len(blocks.positions) * sum(blocks.part_bytes)
        helped = not self.alone and len(blocks.positions) > 1 and total_bytes >= SHARED_BYTES
        if helped:
            self._share(work)
        return work.finish()

    def _share(self, work: _Work) -> None:
        with self._lock:
            if not self._hired:
                self._executor.open_lane(LANE, 1)
                self._hired = True
        with suppress(ClosedError):  # the client ends: the caller's thread does it alone
            self._executor.run(LANE, work.help, lambda _: None)


class _Work:
    """The blocks of one put that are left to copy."""

    def __init__(
        self,
        memory: SlotMemory,
        blocks: DraftBlocks,
        payloads: Sequence[Payload],
        known: dict[int, Sums],
        first: int,
    ) -> None:
        self._memory = memory
        self._blocks = blocks
        self._payloads = payloads
        self._known = known
        self._first = first
        self._left = deque(range(len(blocks.positions)))
        self._sums: list[Sums | None] = [None] * len(blocks.positions)
        self._helping = False
        self._helped = threading.Event()

    def help(self) -> None:
        """By the other thread, which may come when all is done. What goes wrong here meets the caller's thread too."""
        self._helping = True
        try:
            with suppress(TierKVError):
                self._copy_what_is_left()
        finally:
            self._helped.set()

    def finish(self) -> list[Sums]:
        """By the caller's thread, whether it has asked for help or not."""
        try:
            self._copy_what_is_left()
        finally:
            self._left.clear()
            # Whoever comes from here on finds nothing to do. Who is copying has no deadline, as a copy in this thread
            # has none: the slot must not be given back under it.
            while self._helping and not self._helped.wait(_LOOK_S):
                pass
        found = [self._copy(i) if sums is None else sums for i, sums in enumerate(self._sums)]
        self._payloads = ()
        return found

    def _copy_what_is_left(self) -> None:
        while True:
            try:
                i = self._left.popleft()
            except IndexError:
                return
            self._sums[i] = self._copy(i)

    def _copy(self, index: int) -> Sums:
        position = self._blocks.positions[index]
        given = position - self._first
        views = buffers_of(self._payloads[given], position)
        return copy_in(self._memory, self._blocks, index, views, self._known.get(given))
