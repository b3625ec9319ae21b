"""Flush: everything that is in host RAM and not in a tier is written there, whatever the watermarks say."""

from __future__ import annotations

from concurrent.futures import Future
from dataclasses import dataclass
from typing import TYPE_CHECKING

from tierkv.catalog import HOST
from tierkv.errors import TierError
from tierkv.ids import FamilyId
from tierkv.index import IN_HOST
from tierkv.reaper import Flush, flush_order

if TYPE_CHECKING:
    from tierkv.store import TieredStore


@dataclass(frozen=True)
class FlushReport:
    """What a flush did, in blocks (families)."""

    wanted: int
    written: int
    failed: int
    """The tier did not take them, or not in time."""


def flush_tier(store: TieredStore, tier: str, timeout_s: float) -> Future[FlushReport]:
    """Starts a flush; the future is done when all is written or failed, by the deadline at the latest."""
    number = store.tier_number(tier)
    if number == HOST:
        raise TierError("tier 'host': a flush writes from host RAM to a colder tier; name one")
    resident = [
        FamilyId(family)
        for space in list(store.catalog.index.spaces)
        for family in space.ids()
        if store.catalog.index.state[family] & IN_HOST
    ]
    future: Future[FlushReport] = Future()
    families = flush_order(store.catalog, store.edges[number], resident)
    wanted = len(families)

    def finish(flush: Flush) -> None:
        timer.cancel()
        future.set_result(FlushReport(wanted, flush.written, wanted - flush.written))

    flush = Flush(store.edges[number], families, finish)
    timer = store.executor.call_later(timeout_s, lambda: store.reaper.abandon(flush))
    store.reaper.flush(flush)
    return future
