"""Which blocks of a request are copied to host RAM, and what keeps their pages from being used again meanwhile.

A block is saved in the step that fills it: all of its tokens are known and computed. Its pages are held in the
engine's own book of references until every rank has copied them, so that neither the end of the request, nor a
preemption, nor an abort needs to wait for the copy or to call it off. What is held has a bound; beyond it a block is
offered again later.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from itertools import count
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from tierkv.engines.vllm_messages import PageTable, Prompt, SaveJob, SaveReport
from tierkv.engines.vllm_tables import Tables
from tierkv.retention import Retention

if TYPE_CHECKING:
    from vllm.v1.core.block_pool import BlockPool
    from vllm.v1.core.kv_cache_utils import KVCacheBlock

SOON_S: Final = 0.1
"""A copy takes milliseconds; one that takes longer than this waits for a daemon that does not answer."""
MOST_BLOCKS: Final = 64
"""Of one job, so that the first of a long prompt can be found while the last are still copied."""


class _Held(NamedTuple):
    request_id: str
    blocks: list[KVCacheBlock]
    size: int
    """Blocks of the store."""
    begun_s: float


class Saves:
    """Of the scheduler's side. One thread."""

    def __init__(self, pool: BlockPool, tables: Tables, ranks: int, budget: float) -> None:
        self._pool = pool
        self._tables = tables
        self._ranks = ranks
        self._most = max(1, int(budget * len(pool.blocks)))
        self._numbers = count(1)
        self._held: dict[int, _Held] = {}
        self._open: dict[int, int] = {}
        """How many ranks have not said that they are done."""
        self.pages_held = 0
        self.put_off = 0
        """Blocks that found the bound reached; they are offered again."""

    def __len__(self) -> int:
        return len(self._held)

    def soon_over(self) -> bool:
        """Whether something is being copied, and not for so long that nobody knows when it ends."""
        return bool(self._held) and time.monotonic() - next(iter(self._held.values())).begun_s < SOON_S

    def pending(self, request_id: str) -> bool:
        """Whether something of that request is still being copied."""
        return any(held.request_id == request_id for held in self._held.values())

    def begin(
        self,
        request_id: str,
        prompt: Prompt,
        blocks: range,
        tables: Sequence[Sequence[int]],
        retention: Retention,
    ) -> tuple[list[SaveJob], int]:
        """Jobs for those of the blocks that can be saved, and the first block that is still to be offered."""
        jobs: list[SaveJob] = []
        for first, pages, absent in self._runs(
            self._tables.of(tables, blocks.start, blocks.stop), blocks.start
        ):
            if absent is None:
                continue  # the engine does not have all of it: no full attention without its pages
            ids = sorted({page for block in pages for group in block for page in group})
            if self.pages_held + len(ids) > self._most and self._held:
                self.put_off += len(pages)
                return jobs, first
            number = next(self._numbers)
            held = [self._pool.blocks[page] for page in ids]
            self._pool.touch(held)
            self.pages_held += len(held)
            self._held[number] = _Held(request_id, held, len(pages), time.monotonic())
            self._open[number] = self._ranks
            jobs.append(SaveJob(number, prompt, first, pages, absent, retention))
        return jobs, blocks.stop

    def _runs(self, pages: PageTable, first: int) -> Iterator[tuple[int, PageTable, tuple[int, ...] | None]]:
        """Stretches of blocks that lack the same groups."""
        at = 0
        while at < len(pages):
            absent = self._tables.absent(pages[at])
            end = at + 1
            while end < min(len(pages), at + MOST_BLOCKS) and self._tables.absent(pages[end]) == absent:
                end += 1
            yield first + at, pages[at:end], absent
            at = end

    def end(self, report: SaveReport) -> list[tuple[int, str, int, int]]:
        """Lets go of the pages that no rank copies any more: (job, request, blocks, blocks stored) for each. What
        nobody knows (any more) is passed over."""
        over = []
        for number, ranks in report.done.items():
            if number not in self._open:
                continue
            self._open[number] -= ranks
            if self._open[number] <= 0:
                held = self._held.pop(number)
                del self._open[number]
                self._let_go(held.blocks)
                over.append((number, held.request_id, held.size, report.stored.get(number, 0)))
        return over

    def _let_go(self, blocks: list[Any]) -> None:
        self.pages_held -= len(blocks)
        self._pool.free_blocks(reversed(blocks))
