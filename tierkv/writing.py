"""Storing blocks: from a caller's buffers or an engine's pages into host RAM. Never waits for a colder tier."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any

from tierkv.copier import CopyPart, KnownMemory, PagedKV, ReadyEvent, told_once
from tierkv.errors import HandleError
from tierkv.executor import deliver
from tierkv.handles import Draft, Sealed
from tierkv.index import Space
from tierkv.intake import Retention, Stored
from tierkv.keys import Chain
from tierkv.logs import RareLog

if TYPE_CHECKING:
    from tierkv.store import TieredStore

Payload = Any
"""Anything with the buffer protocol that is C-contiguous: bytes, memoryview, numpy array."""

Pages = Sequence[Sequence[Sequence[int]]]
"""``pages[i][group]``: the engine's pages of the i-th block in that layer group, in the order of their tokens."""


class Writer:
    """Reserves, fills and registers. Thread-safe."""

    def __init__(self, store: TieredStore) -> None:
        self._store = store
        self._engines = KnownMemory(store.copier)
        self._log = RareLog(store.clock)
        self.asleep = False
        """While the engine sleeps nothing is stored."""

    def reserve(
        self, space: Space, chain: Chain, positions: range, parts: tuple[int, ...], result: Stored
    ) -> Draft | None:
        """Slots for what host RAM lacks; ``None`` when it lacks nothing or there is no room (see ``result``)."""
        if not 0 <= positions.start <= positions.stop <= len(chain):
            raise HandleError(
                f"blocks {positions.start} to {positions.stop}: the chain has {len(chain)} full blocks"
            )
        if self.asleep:
            self._drop(result, "asleep", len(positions))
            return None
        draft = self._store.intake.reserve(space, chain, positions, parts, result)
        if result.dropped:
            for reason, count in result.dropped.items():
                self._store.counters.add(count, "dropped_blocks_total", "host", reason)
            self._store.reaper.kick()
        return draft

    def commit(
        self, space: Space, sealed: Sealed, retention: Retention, expected: int, result: Stored
    ) -> Stored:
        """Registers; from now on the blocks can be matched, once all parts in ``expected`` are there."""
        store = self._store
        before = result.stored
        lost = Stored()
        store.intake.register(space, sealed, retention, expected, lost)
        result.stored += lost.stored
        result.resident += lost.resident
        for reason, count in lost.dropped.items():
            self._drop(result, reason, count)
        store.counters.add(result.stored - before, "stored_blocks_total", "host")
        if store.edges:
            store.reaper.kick_if_short()
        return result

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
        draft = self.reserve(space, chain, range(first, first + len(payloads)), parts, result)
        if draft is None:
            return result
        with draft:
            for i, position in enumerate(draft.blocks.positions):
                draft.fill(i, _buffers(payloads[position - first]))
            sealed = draft.seal()
        return self.commit(space, sealed, retention, expected, result)

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
        draft = self.reserve(space, chain, range(first, first + len(pages)), parts, result)
        if draft is None:
            deliver(future, result)
            return future
        copies = self._copies(draft, chain, first, pages)

        def done(error: str | None) -> None:
            copies.clear()  # the views must not outlive the draft
            if error is not None:
                self._log.warning(
                    "offload", "the copy of %d blocks out of an engine failed: %s", len(draft), error
                )
            if error is None:
                self.commit(space, draft.seal(), retention, expected, result)
            else:
                self._drop(result, "copy_failed", len(draft))
                draft.drop()
            deliver(future, result)

        counters = self._store.counters
        tell = told_once(done, lambda: counters.add(1, "stray_completions_total", "offload"))
        self._store.copier.offload(kv, copies, ready, tell)
        return future

    def _copies(self, draft: Draft, chain: Chain, first: int, pages: Pages) -> list[CopyPart]:
        blocks, layout = draft.blocks, chain.namespace.layout
        copies = []
        for i, position in enumerate(blocks.positions):
            for part in blocks.parts:
                group = layout.parts[part].group
                chosen = tuple(pages[position - first][group])
                if len(chosen) != layout.pages_of(group):
                    raise HandleError(
                        f"block {position}, layer group {layout.groups[group].name!r}: {len(chosen)} pages "
                        f"given, a block has {layout.pages_of(group)}"
                    )
                copies.append(CopyPart(group, draft.view(i, part), chosen))
        return copies


def _buffers(given: Payload) -> list[memoryview]:
    """``given`` is one buffer, or a list of one for each part."""
    parts = given if isinstance(given, list | tuple) else (given,)
    return [memoryview(part) for part in parts]
