"""Copies between an engine's pages and the mapped arena of a daemon: this process makes them itself."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future

from tierkv.clock import SystemClock
from tierkv.copier import Copier, KnownMemory, PagedKV, ReadyEvent, told_once
from tierkv.errors import ClosedError
from tierkv.executor import deliver
from tierkv.handles import Draft, Lease, Sealed
from tierkv.intake import Stored
from tierkv.keys import Chain
from tierkv.loans import LentRun
from tierkv.logs import RareLog
from tierkv.paging import Pages, copies_into, copies_of


class PageCopies:
    """Thread-safe."""

    def __init__(self, copier: Copier) -> None:
        self._copier = copier
        self._engines = KnownMemory(copier)
        self._log = RareLog(SystemClock())

    def check(self, kv: PagedKV, chain: Chain) -> None:
        """Raises ``LayoutError`` for memory that does not look as the namespace says."""
        self._engines.check(kv, chain.namespace)

    def offload(
        self,
        kv: PagedKV,
        pages: Pages,
        first: int,
        draft: Draft | None,
        ready: ReadyEvent | None,
        result: Stored,
        commit: Callable[[Sealed], object],
    ) -> Future[Stored]:
        """Copies pages into a draft, then commits it. ``result`` is given when that is over."""
        future: Future[Stored] = Future()
        if draft is None:
            deliver(future, result)
            return future
        copies = copies_into(draft, pages, first)

        def done(error: str | None) -> None:
            copies.clear()  # the views must not outlive the draft
            blocks = len(draft)
            try:
                if error is None:
                    commit(draft.seal())
                else:
                    self._log.warning(
                        "offload", "the copy of %d blocks out of an engine failed: %s", blocks, error
                    )
                    result.drop("copy_failed", blocks)
                    draft.drop()
            except ClosedError:  # the client was closed meanwhile
                result.drop("no_daemon", blocks)
            finally:  # whatever else is raised, nobody waits for ever
                deliver(future, result)

        self._copier.offload(kv, copies, ready, told_once(done, lambda: None))
        return future

    def onboard(
        self,
        lease: Lease,
        kv: PagedKV,
        pages: Pages,
        parts: tuple[int, ...],
        skip: int,
        on_layer: Callable[[int, int], None] | None,
        ready: ReadyEvent | None = None,
        told: Callable[[str | None], None] = lambda error: None,
    ) -> Future[bool]:
        """Copies a lease's blocks into pages, after ``ready``; True when all came and were still what was leased.
        ``told`` hears before what the copier said, ``None`` when it has copied all."""
        future: Future[bool] = Future()
        run = lease.lessor
        if not isinstance(run, LentRun):
            deliver(future, run is not None and not len(lease))
            return future
        found = copies_of(run, lease, pages, parts, skip)
        if found is None:
            deliver(future, False)
            return future
        refs = [ref for ref, _ in found]
        copies = [copy for _, copy in found]
        found.clear()

        def done(error: str | None) -> None:
            copies.clear()
            told(error)
            if error is not None:
                self._log.warning(
                    "onboard", "the copy of %d parts into an engine failed: %s", len(refs), error
                )
            held = not lease.released and all(run.still_holds(ref.family, ref.part) for ref in refs)
            deliver(future, error is None and held)

        self._copier.onboard(kv, copies, told_once(done, lambda: None), on_layer, ready)
        return future
