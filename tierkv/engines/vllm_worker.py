"""A worker's half of the connector: it maps the store's memory and copies between it and the engine's pages, on
threads of its own; on a GPU by streams of its own.

    start_loads   copies out of a loan; ``finished`` tells which are over and which pages got nothing
    start_saves   behind the forward pass: reserve, copy, commit; ``report`` tells which are over

On a GPU both wait, on the device, for an event behind all that vLLM has given to its stream so far: a save for the
pages to be computed, a load for whatever still writes to its pages (vLLM zeroes some, and a step that was under way
when their last request ended writes to them). Either is over when the device has reported that it is. Loads go whole,
not layer by layer: their bytes are taken only when their slots have been looked at after the copy, which must not be
after the model has computed with them.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from functools import partial
from typing import Any, Final

from tierkv.copier import HostCopier, PagedKV, ReadyEvent
from tierkv.daemon.remote import RemoteClient
from tierkv.daemon.remote_pages import PageCopies
from tierkv.engines.vllm_layout import CacheGroup, kernels_of, memory_of
from tierkv.engines.vllm_messages import (
    LoadJob,
    PageTable,
    SaveJob,
    SaveReport,
    StepMeta,
    WorkerFacts,
)
from tierkv.engines.vllm_stats import Counts
from tierkv.engines.vllm_tables import Tables
from tierkv.errors import ConfigError, LayoutError
from tierkv.executor import ThreadExecutor
from tierkv.handles import Lease
from tierkv.intake import Stored
from tierkv.keys import Chain, NamespaceSpec
from tierkv.loans import LentRun, borrow
from tierkv.logs import RareLog
from tierkv.namespaces import OpenNamespace
from tierkv.supervision import Caught

log = logging.getLogger("tierkv")

LOAD_LANE: Final = "vllm-load"
SAVE_LANE: Final = "vllm-save"
LOAD_WAIT_S: Final = 0.002
SAVE_WAIT_S: Final = 0.01
"""So long a step without a forward pass waits for a copy: nothing else is to be done, and looking costs too."""
NULL_BLOCK: Final = 0
"""The first block of vLLM's pool: it keeps nothing."""
MOST_SPACES: Final = 16
"""Namespaces that are remembered: there is one for each epoch of the weights."""

Finished = tuple[set[str], set[int], set[str]]


class WorkerSide:
    """One for each rank. The verbs are for the engine's thread and return at once, but for ``finished``."""

    def __init__(self, client: RemoteClient, rank: int, counts: Counts) -> None:
        self._client = client
        self._rank = rank
        self.counts = counts
        self._kv: PagedKV | None = None
        self._groups: tuple[CacheGroup, ...] = ()
        self._executor = ThreadExecutor(client.clock)
        self._executor.open_lane(LOAD_LANE, 1)
        self._executor.open_lane(SAVE_LANE, 1)
        self._copies = PageCopies(HostCopier(self._executor))
        self._mark: Callable[[], ReadyEvent] | None = None
        """Gives an event behind all that the engine has asked of its device so far. ``None``: what it has asked for is
        done when its call returns."""
        self._log = RareLog(client.clock)
        self._spaces: dict[NamespaceSpec, OpenNamespace] = {}
        self._changed = threading.Condition()
        self._loading = self._saving = 0
        self.idled_s = 0.0
        """Waited in steps that had nothing to compute."""
        self._loaded: deque[tuple[str, list[int]]] = deque()
        """Requests whose load is over, with the engine's blocks that got nothing."""
        self._saved: deque[tuple[int, int]] = deque()
        """Saves that are over, with the blocks that are in host RAM now."""

    def register(
        self,
        caches: Mapping[str, Any],
        groups: tuple[CacheGroup, ...],
        num_blocks: int,
        layers: Mapping[str, Any],
        device: str,
    ) -> WorkerFacts:
        """Takes up the engine's memory."""
        self._groups = groups
        names = [name for group in groups for name in group.layers]
        facts = WorkerFacts(device, kernels_of(layers, names))
        try:
            kv, facts.layers = memory_of(caches, groups, num_blocks)
            if device != "cpu":
                self._use_streams(kv, device)
            self._kv = kv
        except (ConfigError, LayoutError) as error:
            facts.trouble = str(error)
        return facts

    def _use_streams(self, kv: PagedKV, device: str) -> None:
        """Pages on a GPU are copied by the client's copier, both ways: it has the streams, and pins the mapped arena in
        the background. Raises ``LayoutError`` and ``ConfigError``."""
        if device != "cuda":
            raise LayoutError(f"its KV cache is on {device!r}: there are copiers for 'cpu' and 'cuda'")
        self._client.copier.prepare(kv)
        self._copies = PageCopies(self._client.copier)
        self._mark = _mark_on_cuda
        # Meets the daemon, if it is there: then its arena is pinned before the first block comes.
        self._executor.run(LOAD_LANE, self._client.health, lambda _: None)

    # -- loads ----------------------------------------------------------------------------------------------------

    def start_loads(self, meta: StepMeta) -> None:
        for request_id, blocks in meta.refused.items():
            self._loading += 1
            self._end_load(request_id, blocks)
        begun = 0
        try:
            ready = self._mark() if meta.loads and self._mark is not None else None
            for job in meta.loads:
                self._executor.run(LOAD_LANE, partial(self._load, job, ready), lambda _: None)
                begun += 1
        finally:  # the engine waits for each of them, whatever goes wrong here
            self._loading += len(meta.loads)
            for job in meta.loads[begun:]:
                self._end_load(job.request_id, self._blocks_of(job, 0))

    def _load(self, job: LoadJob, ready: ReadyEvent | None) -> None:
        begun_s = time.monotonic()
        caught = Caught()
        with caught:
            space, chain = self._chain(job)
            run = self._borrowed(job, chain)
            if run is not None:
                assert self._kv is not None
                parts = space.parts_of(self._rank)
                self._copies.check(self._kv, chain)
                pages = self._pages_of(job)
                said: list[str | None] = []
                copied = self._copies.onboard(run, self._kv, pages, parts, job.skip, None, ready, said.append)
                size = _bytes_of(pages, job)
                copied.add_done_callback(
                    lambda future: self._copied(job, run, parts, future, said, begun_s, size)
                )
                return
        if caught.error is not None:
            self._log.warning("load", "the load of request %s failed: %r", job.request_id, caught.error)
        self._end_load(job.request_id, self._blocks_of(job, 0))

    def _borrowed(self, job: LoadJob, chain: Chain) -> Lease | None:
        memory = self._client.link.memory
        if memory is None or memory.instance != job.loan.instance:
            self._client.health()  # meets the daemon, if it is there
        return borrow(job.loan, chain, self._client.link.memory)

    def _copied(
        self,
        job: LoadJob,
        run: Lease,
        parts: tuple[int, ...],
        future: Future[bool],
        said: list[str | None],
        begun_s: float,
        copied_bytes: int,
    ) -> None:
        """``said``: what the copier told, if it was asked."""
        missing = self._blocks_of(job, 0)
        caught = Caught()
        with caught:  # a future keeps what its callbacks raise, and the engine would wait for ever
            whole = not future.cancelled() and future.exception() is None and future.result()
            if whole:
                self.counts.add("load_s", time.monotonic() - begun_s)
                self.counts.add("load_bytes", copied_bytes)
                missing = []
            elif said == [None] and isinstance(run.lessor, LentRun):
                sound = run.lessor.whole(parts)
                missing = self._blocks_of(job, 0 if sound == len(run) else sound)
        if caught.error is not None:
            self._log.warning("load", "the load of request %s failed: %r", job.request_id, caught.error)
        self._end_load(job.request_id, missing)

    def _pages_of(self, job: LoadJob) -> PageTable:
        return Tables(job.prompt.spec.layout, self._groups, NULL_BLOCK).of(job.tables, 0, job.loan.blocks)

    def _blocks_of(self, job: LoadJob, first: int) -> list[int]:
        """The engine's blocks that a load from its block ``first`` on was to fill."""
        layout = job.prompt.spec.layout
        found: set[int] = set()
        for number, group in enumerate(self._groups):
            own = job.skip * layout.hash_tokens // group.block_tokens
            found.update(job.tables[group.table][max(first * layout.pages_of(number), own) :])
        return sorted(found)

    def _end_load(self, request_id: str, missing: list[int]) -> None:
        with self._changed:
            self._loaded.append((request_id, missing))
            self._changed.notify_all()

    def finished(self, idle: bool) -> Finished:
        """Requests whose load is over; the engine's blocks that got nothing; the requests that those belong to."""
        if idle and (self._loading or self._saving) and not self._loaded and not self._saved:
            begun_s = time.perf_counter()
            with self._changed:
                wait_s = LOAD_WAIT_S if self._loading else SAVE_WAIT_S
                self._changed.wait_for(lambda: self._loaded or self._saved, wait_s)
            self.idled_s += time.perf_counter() - begun_s
        over: set[str] = set()
        missing: set[int] = set()
        failed: set[str] = set()
        while self._loaded:
            request_id, blocks = self._loaded.popleft()
            self._loading -= 1
            over.add(request_id)
            if blocks:
                failed.add(request_id)
                missing.update(blocks)
        return over, missing, failed

    # -- saves ----------------------------------------------------------------------------------------------------

    def start_saves(self, meta: StepMeta) -> None:
        self._saving += len(meta.saves)
        begun = 0
        try:
            ready = self._mark() if meta.saves and self._mark is not None else None
            for job in meta.saves:
                self._executor.run(SAVE_LANE, partial(self._save, job, ready), lambda _: None)
                begun += 1
        finally:  # their pages are held until each is told to be over
            for job in meta.saves[begun:]:
                self._note_saved(job, 0)

    def _save(self, job: SaveJob, ready: ReadyEvent | None) -> None:
        caught = Caught()
        with caught:
            _, chain = self._chain(job)
            assert self._kv is not None
            saved = self._client.offload(
                self._kv,
                job.pages,
                chain,
                first=job.first,
                rank=self._rank,
                absent=job.absent,
                ready=ready,
                retention=job.retention,
            )
            saved.add_done_callback(lambda future: self._end_save(job, future))
            return
        self._log.warning("save", "%d blocks were not saved: %r", len(job.pages), caught.error)
        self._note_saved(job, 0)

    def _note_saved(self, job: SaveJob, kept: int) -> None:
        with self._changed:
            self._saved.append((job.number, kept))
            self._changed.notify_all()

    def _end_save(self, job: SaveJob, future: Future[Stored]) -> None:
        kept = 0
        with Caught():
            if not future.cancelled() and future.exception() is None:
                result = future.result()
                kept = result.stored + result.resident
        self._note_saved(job, kept)

    def report(self) -> SaveReport | None:
        """Saves that are over since the last one."""
        if not self._saved:
            return None
        report = SaveReport()
        while self._saved:
            number, kept = self._saved.popleft()
            self._saving -= 1
            report.done[number] = 1
            report.stored[number] = kept
        return report

    # -- names ----------------------------------------------------------------------------------------------------

    def _chain(self, job: LoadJob | SaveJob) -> tuple[OpenNamespace, Chain]:
        prompt = job.prompt
        space = self._spaces.get(prompt.spec)
        if space is None:
            space = self._client.open_namespace(prompt.spec)
            if len(self._spaces) >= MOST_SPACES:
                self._spaces.clear()
            self._spaces[prompt.spec] = space
        chain = space.chain(
            engine_hashes=prompt.engine_hashes(), num_tokens=prompt.num_tokens, extras=prompt.extras
        )
        return space, chain

    # -- the end --------------------------------------------------------------------------------------------------

    def close(self, timeout_s: float) -> None:
        """Waits for the copies that are on their way: they write into the engine's memory, and read it."""
        self._executor.close(timeout_s)


def _mark_on_cuda() -> ReadyEvent:
    import torch

    caught = Caught()
    with caught:
        event: Any = torch.cuda.Event()
        event.record(torch.cuda.current_stream())
        ready: ReadyEvent = event
        return ready
    return _NoMark(f"it could not be recorded: {caught.error!r}")


class _NoMark:
    """In the place of an event that the device would not record: what waits for it fails, and is reported so."""

    def __init__(self, why: str) -> None:
        self._why = why

    def synchronize(self) -> None:
        raise RuntimeError(self._why)


def _bytes_of(pages: PageTable, job: LoadJob) -> int:
    """What a load copies."""
    layout = job.prompt.spec.layout
    total = 0
    for number, group in enumerate(layout.groups):
        own = job.skip * layout.hash_tokens // group.engine_block_tokens
        count = sum(len(block[number]) for block in pages) - own
        total += max(0, count) * group.page_bytes * group.layers
    return total
