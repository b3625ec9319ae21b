"""Asking a remote tier which blocks of a chain it holds. Its answer is a hint: the server evicts on its own."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from tierkv.catalog import LOCK_BATCH
from tierkv.clock import Deadline
from tierkv.edges import Edge
from tierkv.ids import BlockHash, FamilyId
from tierkv.index import Space
from tierkv.jobs import Job, Priority
from tierkv.keys import Chain
from tierkv.tier import Presence

if TYPE_CHECKING:
    from tierkv.store import TieredStore

PROBE_BLOCKS = 512
"""Blocks that one call asks about; the next one follows only when all of these were there."""


class Probe:
    """One probe of the tail of a chain. ``done`` is called once, on the tier's worker, whatever happens.

    A call has the tier's own time, also when who asked has left: what it says is worth knowing, and so is its silence.
    """

    def __init__(
        self,
        store: TieredStore,
        edge: Edge,
        space: Space,
        chain: Chain,
        first: int,
        tail: Sequence[BlockHash],
        done: Callable[[], None],
        whose: int = 0,
    ) -> None:
        self._store = store
        self._whose = whose
        self._edge = edge
        self._space = space
        self._chain = chain
        self._first = first
        self._tail = tail
        self._done = done
        self._clears = store.catalog.clears
        self.unanswered = False
        """Whether the tier could not say if it holds the first block behind those that it has."""

    def begin(self) -> None:
        """Returns at once; when the queue is full, nothing is asked."""
        job = Job(Priority.PROBE, f"probe>{self._edge.name}", 0, self._ask, self._done, self._whose)
        if not self._edge.queue.submit(job):
            self._done()

    def _ask(self) -> None:
        parts = [
            part for part in range(self._space.expected.bit_length()) if self._space.expected >> part & 1
        ]
        for start in range(0, len(self._tail), PROBE_BLOCKS):
            hashes = self._tail[start : start + PROBE_BLOCKS]
            keys = [self._space.key(block_hash, part) for block_hash in hashes for part in parts]
            deadline = Deadline(self._store.clock, self._edge.timeout_s)
            found = self._edge.tier.probe(keys, deadline)
            self._store.counters.add(len(keys), "probed_blocks_total", self._edge.name)
            masks = self._usable(parts, found)
            self._note(self._first + start, hashes[: len(masks)], masks)
            if len(masks) < len(hashes) or deadline.over():
                return

    def _usable(self, parts: Sequence[int], found: Sequence[Presence]) -> list[int]:
        """For each block the bitmap of parts that are there, up to the first that lacks a part which no block can do
        without. A window or a state may have been declared absent when the block was stored."""
        masks: list[int] = []
        for i in range(0, len(found), len(parts)):
            there = zip(parts, found[i : i + len(parts)], strict=True)
            mask = sum(1 << part for part, presence in there if presence is Presence.PRESENT)
            if not mask or mask & self._space.needed != self._space.needed:
                self.unanswered = Presence.UNKNOWN in found[i : i + len(parts)]
                break
            masks.append(mask)
        return masks

    def _note(self, first: int, hashes: Sequence[BlockHash], masks: Sequence[int]) -> None:
        """Takes the hint into the catalog."""
        catalog = self._store.catalog
        for start in range(0, len(hashes), LOCK_BATCH):
            with catalog.lock:
                if not catalog._takes_hints(self._space, self._clears):
                    return
                for i in range(start, min(start + LOCK_BATCH, len(hashes))):
                    position = first + i
                    found = catalog._find_or_add(
                        self._space, hashes[i], self._chain.parent_of(position), position, masks[i]
                    )
                    if isinstance(found, str):
                        break
                    self._gain(FamilyId(found), masks[i])
                catalog._tell_arrivals()

    def _gain(self, family: FamilyId, mask: int) -> None:
        index = self._store.catalog.index
        expected = index.expected[family]
        if (self._edge.number, family) in self._store.catalog.leaving:
            return  # the answer may be older than the delete
        if mask & expected == expected and index.residency[self._edge.number][family] & expected != expected:
            self._store.catalog._gain(family, self._edge.number, expected)
