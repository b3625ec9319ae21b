"""Storing blocks: from a caller's buffers or an engine's pages into host RAM. Never waits for a colder tier."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future
from typing import TYPE_CHECKING

from tierkv.copier import KnownMemory, PagedKV, ReadyEvent, told_once
from tierkv.errors import ClosedError, HandleError
from tierkv.executor import deliver
from tierkv.filling import Payload, fill_all
from tierkv.handles import Draft, DraftBlocks, Sealed
from tierkv.index import Space
from tierkv.intake import Stored
from tierkv.keys import Chain
from tierkv.logs import RareLog
from tierkv.paging import Pages, copies_into
from tierkv.retaining import raise_run, stay_of
from tierkv.retention import KEEP, NO_WISH, Retention, Stay

if TYPE_CHECKING:
    from tierkv.store import TieredStore

_STORED_BLOCKS = ("stored_blocks_total", "host")
_STORED_BYTES = ("stored_bytes_total", "host")


class Writer:
    """Reserves, fills and registers. Thread-safe."""

    def __init__(self, store: TieredStore) -> None:
        self._store = store
        self._engines = KnownMemory(store.copier)
        self._log = RareLog(store.clock)
        self.asleep = False
        """While the engine sleeps nothing is stored."""

    def reserve(
        self,
        space: Space,
        chain: Chain,
        positions: range,
        parts: tuple[int, ...],
        retention: Retention,
        result: Stored,
    ) -> Draft | None:
        """Slots for what host RAM lacks; ``None`` when it lacks nothing or there is no room (see ``result``)."""
        stay = stay_of(self._store.catalog, retention)
        draft = self._draft(self._take(space, chain, positions, parts, retention, result))
        if not retention.no_store and not self.asleep:
            self._raise(space, chain, positions, stay, result, anew=False)
        return draft

    def _draft(self, blocks: DraftBlocks | None) -> Draft | None:
        return None if blocks is None else Draft(blocks, self._store.host, self._store.intake.discard)

    def _take(
        self,
        space: Space,
        chain: Chain,
        positions: range,
        parts: tuple[int, ...],
        retention: Retention,
        result: Stored,
    ) -> DraftBlocks | None:
        if not 0 <= positions.start <= positions.stop <= len(chain):
            raise HandleError(
                f"blocks {positions.start} to {positions.stop}: the chain has {len(chain)} full blocks"
            )
        if retention.no_store or self.asleep:
            refused = "no_store" if retention.no_store else "asleep"
            self._drop(result, refused, len(positions))
            self._store.intake.note_refused(space, chain.hashes[positions.start : positions.stop], refused)
            return None
        blocks = self._store.intake.reserve(space, chain, positions, parts, result)
        if result.dropped:
            for reason, count in result.dropped.items():
                self._store.counters.add(count, "dropped_blocks_total", "host", reason)
            self._store.reaper.kick()
        return blocks

    def commit(
        self, space: Space, sealed: Sealed, retention: Retention, expected: int, result: Stored
    ) -> Stored:
        """Registers; from now on the blocks can be matched, once all parts in ``expected`` are there."""
        stay = stay_of(self._store.catalog, retention)
        blocks = sealed.take()
        if retention.no_store:
            self._store.intake.discard(blocks)
            self._drop(result, "no_store", len(blocks.positions))
        else:
            self._register(space, blocks, sealed.checksums, stay, expected, result)
        return result

    def _register(
        self,
        space: Space,
        blocks: DraftBlocks,
        sums: Sequence[tuple[int, ...]],
        stay: Stay,
        expected: int,
        result: Stored,
    ) -> None:
        store, before, dropped = self._store, result.stored, result.dropped.copy()
        store.intake.register(space, blocks, sums, stay, expected, result)
        for reason, count in result.dropped.items():
            if count > dropped.get(reason, 0):
                store.counters.add(count - dropped.get(reason, 0), "dropped_blocks_total", "host", reason)
        stored = result.stored - before
        store.counters.add_all(((stored, _STORED_BLOCKS), (stored * sum(blocks.part_bytes), _STORED_BYTES)))
        store.ceiling.stored(space.mark, blocks.chain.hashes, blocks.positions)
        if store.edges:
            store.reaper.kick_if_short()

    def _drop(self, result: Stored, reason: str, count: int) -> None:
        result.drop(reason, count)
        self._store.counters.add(count, "dropped_blocks_total", "host", reason)

    def put(
        self,
        space: Space,
        chain: Chain,
        first: int,
        payloads: Sequence[Payload],
        parts: tuple[int, ...],
        retention: Retention,
        expected: int,
    ) -> Stored:
        """Copies and registers in the calling thread."""
        result = Stored()
        stay = NO_WISH if retention is KEEP else stay_of(self._store.catalog, retention)
        positions = range(first, first + len(payloads))
        blocks = self._take(space, chain, positions, parts, retention, result)
        if blocks is not None:
            sums: Sequence[tuple[int, ...]] = ()
            try:
                sums = fill_all(self._store.host, blocks, payloads, first)
            finally:
                if not sums:
                    self._store.intake.discard(blocks)
            self._register(space, blocks, sums, stay, expected, result)
        if stay is not NO_WISH or self._store.catalog.retains:
            self._retain(space, chain, positions, retention, stay, result)
        return result

    def _retain(
        self, space: Space, chain: Chain, positions: range, retention: Retention, stay: Stay, result: Stored
    ) -> None:
        """What of these blocks is there, from this call or from another, is kept at least as wished."""
        if not retention.no_store and not self.asleep:
            self._raise(space, chain, positions, stay, result, anew=True)

    def _raise(
        self, space: Space, chain: Chain, positions: range, stay: Stay, result: Stored, *, anew: bool
    ) -> None:
        result.kept_beyond += raise_run(self._store.catalog, space, chain.hashes, positions, stay, anew=anew)
        if stay is not NO_WISH:
            self._store.reaper.kick_if_short()  # copies with an earlier end are to be written anew

    def offload(
        self,
        space: Space,
        chain: Chain,
        first: int,
        kv: PagedKV,
        pages: Pages,
        parts: tuple[int, ...],
        retention: Retention,
        expected: int,
        ready: ReadyEvent | None,
    ) -> Future[Stored]:
        """Starts the copy out of the engine's pages; the blocks are registered when it is over."""
        self._engines.check(kv, chain.namespace)
        result = Stored()
        future: Future[Stored] = Future()
        stay = stay_of(self._store.catalog, retention)
        positions = range(first, first + len(pages))
        draft = self._draft(self._take(space, chain, positions, parts, retention, result))
        if draft is None:
            self._retain(space, chain, positions, retention, stay, result)
            deliver(future, result)
            return future
        copies = copies_into(draft, pages, first)
        under_way, copy = self._store.intake.under_way, next(self._store.intake.numbers)
        under_way[copy] = draft.blocks

        def done(error: str | None) -> None:
            copies.clear()  # the views must not outlive the draft
            if error is not None:
                self._log.warning(
                    "offload", "the copy of %d blocks out of an engine failed: %s", len(draft), error
                )
            blocks = draft.blocks
            try:
                if error is None:
                    sealed = draft.seal()
                    self._register(space, sealed.take(), sealed.checksums, stay, expected, result)
                    self._retain(space, chain, positions, retention, stay, result)
                else:
                    self._drop(result, "copy_failed", len(draft))
                    hashes = [chain.hashes[position] for position in blocks.positions]
                    self._store.intake.note_refused(space, hashes, "copy_failed")
                    draft.drop()
            except ClosedError:  # the store was closed, its memory is gone
                self._drop(result, "closed", len(blocks.positions))
            finally:  # whatever else is raised, nobody waits for ever
                under_way.pop(copy, None)
                deliver(future, result)

        counters = self._store.counters
        tell = told_once(done, lambda: counters.add(1, "stray_completions_total", "offload"))
        self._store.copier.offload(kv, copies, ready, tell)
        return future
