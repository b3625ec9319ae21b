"""Flush: everything that is in host RAM and not in a tier is written there, whatever the watermarks say."""

from __future__ import annotations

from concurrent.futures import Future
from dataclasses import dataclass
from typing import TYPE_CHECKING

from tierkv.catalog import HOST
from tierkv.clearing import Evicted
from tierkv.clock import Deadline
from tierkv.due import Due
from tierkv.errors import TierError
from tierkv.executor import deliver
from tierkv.flushes import Flush
from tierkv.ids import EVERYTHING, FamilyId
from tierkv.index import IN_HOST
from tierkv.picking import flush_order

if TYPE_CHECKING:
    from tierkv.store import TieredStore


@dataclass(frozen=True)
class FlushReport:
    """What a flush did, in blocks (families)."""

    wanted: int
    """In host RAM and not in the tier when it began, without those whose ancestors are nowhere. Those that left
    meanwhile are neither written nor failed."""
    written: int
    failed: int
    """The tier did not take them, or not in time."""


def flush_tier(store: TieredStore, tier: str, timeout_s: float) -> Future[FlushReport]:
    """Starts a flush; the future is done when all is written or failed, by the deadline at the latest."""
    future: Due[FlushReport] = Due(Deadline(store.clock, timeout_s))
    number = store.tier_number(tier)
    if number == HOST:
        raise TierError("tier 'host': a flush writes from host RAM to a colder tier; name one")
    resident = [
        FamilyId(family)
        for space in list(store.catalog.index.spaces)
        for family in space.ids()
        if store.catalog.index.state[family] & IN_HOST
    ]
    families = flush_order(store.catalog, store.edges[number], resident)
    wanted = len(families)

    def finish(flush: Flush) -> None:
        timer.cancel()
        deliver(future, FlushReport(wanted, flush.written, flush.failed + flush.left))

    def expire() -> None:
        store.reaper.flushes.abandon(flush)

    flush = Flush(store.edges[number], families, finish)
    timer = store.executor.call_later(future.deadline.remaining_s(), expire)
    future.ends_by(expire)
    store.reaper.flush(flush)
    return future


def empty_host(store: TieredStore, timeout_s: float) -> Future[Evicted]:
    """Writes what is only in host RAM to the first persistent tier, then evicts all that has another copy."""
    future: Future[Evicted] = Future()
    target = next((edge.name for edge in store.edges.values() if edge.tier.caps.persistent), None)
    if target is None:
        deliver(future, store.clearing.evict(HOST, EVERYTHING, timeout_s))
    else:
        flush_tier(store, target, timeout_s).add_done_callback(
            lambda _: deliver(future, store.clearing.evict(HOST, EVERYTHING, timeout_s))
        )
    return future
