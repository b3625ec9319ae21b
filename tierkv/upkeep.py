"""What must happen once in a while: incomplete families, blocks and pins come to their end, overdue leases are
reported."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from tierkv.catalog import HOST, LOCK_BATCH, Catalog
from tierkv.clock import Clock
from tierkv.edges import Edge
from tierkv.executor import Executor, Timer
from tierkv.expiring import Expiring
from tierkv.handles import Lease
from tierkv.hot import HotPrefixes
from tierkv.index import IN_HOST
from tierkv.intake import Intake
from tierkv.leases import LeaseBook
from tierkv.logs import RareLog
from tierkv.metrics import Counters
from tierkv.pins import PinBook
from tierkv.reaper import Reaper

PERIOD_S = 1.0
INCOMPLETE_S = 30.0
"""A family of which a part is still missing after this long is not going to be whole."""


class Upkeep:
    """Makes its rounds every second on the executor's timer thread; each round looks at a bounded number of things."""

    def __init__(
        self,
        catalog: Catalog,
        intake: Intake,
        pins: PinBook,
        expiring: Expiring,
        reaper: Reaper,
        edges: Sequence[Edge],
        leases: LeaseBook,
        hot: HotPrefixes,
        executor: Executor,
        clock: Clock,
        counters: Counters,
    ) -> None:
        self._catalog = catalog
        self._intake = intake
        self._pins = pins
        self._expiring = expiring
        self._reaper = reaper
        self._edges = edges
        self._leases = leases
        self._hot = hot
        self._executor = executor
        self._clock = clock
        self._counters = counters
        self._log = RareLog(clock)
        self._timer: Timer | None = None
        self.on_overdue: Callable[[Lease], None] = lambda lease: None
        """Told of each lease that is past its deadline, once."""
        self._closed = False

    def start(self) -> None:
        self._timer = self._executor.call_later(PERIOD_S, self._round)

    def close(self) -> None:
        self._closed = True
        if self._timer is not None:
            self._timer.cancel()

    def _round(self) -> None:
        if self._closed:
            return
        try:
            self.make_rounds()
        finally:  # a round that fails is not the last one
            self._timer = self._executor.call_later(PERIOD_S, self._round)

    def make_rounds(self) -> None:
        """One round; tests call it by hand."""
        self._intake.collect_orphans()
        self._catalog.catch_up()
        self._drop_incomplete()
        self._pins.expire()
        self._expiring.sweep()
        for lease in self._leases.overdue(self._clock.now_s()):
            self._counters.add(1, "leases_overdue_total")
            self._log.warning(
                "overdue", "a lease of %s is past its deadline (%d blocks)", lease.owner, len(lease)
            )
            self.on_overdue(lease)
        for edge in self._edges:
            edge.tier.look_after()
            edge.ask_usage()
        self._teach_policies()
        self._hot.take_in()
        self._reaper.kick_if_short()

    def _teach_policies(self) -> None:
        """One that took the place of a policy that failed is told of up to 4 x 256 families a round."""
        for tier in self._catalog.tiers:
            for _ in range(4):
                if tier.policy is not None and tier.policy.learning:
                    with self._catalog.gate, self._catalog.lock:
                        tier.policy.learn()

    def _drop_incomplete(self) -> None:
        catalog, index = self._catalog, self._catalog.index
        before_s = self._clock.now_s() - INCOMPLETE_S
        for _ in range(LOCK_BATCH):
            with catalog.gate, catalog.lock:
                if not catalog.incomplete or catalog.incomplete[0][0] > before_s:
                    return
                _, family, generation = catalog.incomplete.popleft()
                if index.generation[family] != generation or index.state[family] & IN_HOST:
                    continue
                if index.pins[family]:
                    catalog.incomplete.append((self._clock.now_s(), family, generation))
                elif index.residency[HOST][family]:
                    self._counters.add(1, "dropped_blocks_total", "host", "incomplete")
                    catalog._lose(family, HOST, evicted=False, reason="incomplete")
