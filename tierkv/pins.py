"""Chains that somebody wants to stay in host RAM whatever comes, within a budget.

A pin cannot be evicted, so all of them together may hold only so much of host RAM: what is beyond the budget is not
pinned, from the tail of the chain on. Blocks that several pinned chains share count once.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass

from tierkv.clock import Clock
from tierkv.handles import Lease
from tierkv.ids import FamilyId, KeyPrefix
from tierkv.index import Space
from tierkv.keys import Chain
from tierkv.logs import RareLog
from tierkv.metrics import Counters

_Name = tuple[bytes, bytes]


@dataclass(eq=False)
class _Pin:
    lease: Lease
    owner: str
    until_s: float | None


class PinBook:
    """Leases without a deadline, by the last block of their chain. Thread-safe."""

    def __init__(
        self, budget_bytes: int, bytes_of: Callable[[FamilyId], int], clock: Clock, counters: Counters
    ) -> None:
        """``bytes_of``: what a family that is pinned takes of host RAM."""
        self.budget_bytes = budget_bytes
        self._bytes_of = bytes_of
        self._clock = clock
        self._counters = counters
        self._log = RareLog(clock)
        self._lock = threading.Lock()
        self._pins: dict[_Name, _Pin] = {}
        self._held: dict[FamilyId, tuple[int, int]] = {}
        """By family: how many pins hold it, and its bytes."""
        self._pinned_bytes = 0

    def at_most(self, space: Space, chain: Chain) -> int:
        """Leading blocks beyond which the budget is used up in any case: more need not be loaded."""
        with self._lock:
            left_bytes = self.budget_bytes - self._pinned_bytes
            own = self._pins.get(_name(chain))
            if own is not None:
                left_bytes += sum(self._held[family][1] for family in own.lease.families)
            least_bytes = space.bytes_of(space.needed)
            for position, block_hash in enumerate(chain.hashes):
                if space.get(block_hash) not in self._held:
                    left_bytes -= least_bytes
                if left_bytes < 0:
                    return position
        return len(chain)

    def add(self, chain: Chain, lease: Lease, owner: str, ttl_s: float | None) -> int:
        """Keeps a lease over the beginning of a chain in the place of an earlier one over the same chain; returns how
        many blocks it covers, as far as the budget goes. ``ttl_s``: until then, else until ``remove``."""
        if not len(lease):
            lease.release()
            return 0
        lease.at_s = float("inf")
        until_s = None if ttl_s is None else self._clock.now_s() + ttl_s
        with self._lock:
            earlier = self._pins.pop(_name(chain), None)
            if earlier is not None:
                self._give_back(earlier.lease)
            fitting = self._take(lease)
            if fitting:
                self._pins[_name(chain)] = _Pin(lease, owner, until_s)
        if fitting:
            lease.shorten(fitting)
        else:
            lease.release()
        if earlier is not None:
            earlier.lease.release()
        return fitting

    def note_refused(self, blocks: int, owner: str) -> None:
        """So many blocks were there and are not pinned, since the budget is used up."""
        self._counters.add(blocks, "pin_over_budget_blocks_total")
        self._log.warning(
            "pin", "%d blocks of %s are not pinned: %d of %d bytes of host.pin_budget are used",
            blocks, owner, self._pinned_bytes, self.budget_bytes,
        )  # fmt: skip

    def remove(self, chain: Chain) -> int:
        """Releases the lease over a chain; returns how many blocks it covered."""
        with self._lock:
            pin = self._pins.pop(_name(chain), None)
            if pin is None:
                return 0
            self._give_back(pin.lease)
        blocks = len(pin.lease)
        pin.lease.release()
        return blocks

    def remove_under(self, prefix: KeyPrefix) -> None:
        """Releases all leases of a namespace, a tenant, or everybody."""
        self._remove_where(lambda pin: pin.lease.chain.namespace.prefix.startswith(prefix))

    def expire(self) -> None:
        """Releases those whose time is over."""
        now_s = self._clock.now_s()
        self._remove_where(lambda pin: pin.until_s is not None and pin.until_s <= now_s)

    def _remove_where(self, over: Callable[[_Pin], bool]) -> None:
        with self._lock:
            gone = {name: pin for name, pin in self._pins.items() if over(pin)}
            for name, pin in gone.items():
                del self._pins[name]
                self._give_back(pin.lease)
        for pin in gone.values():
            pin.lease.release()

    def stats(self) -> dict[str, object]:
        """Plain values."""
        with self._lock:
            owners: dict[str, int] = {}
            for pin in self._pins.values():
                owners[pin.owner] = owners.get(pin.owner, 0) + len(pin.lease)
            return {
                "budget_bytes": self.budget_bytes,
                "pinned_bytes": self._pinned_bytes,
                "pinned_blocks": len(self._held),
                "chains": len(self._pins),
                "blocks_by_owner": owners,
            }

    def _take(self, lease: Lease) -> int:
        """Counts a lease's blocks, from the head on, as far as they fit; returns how many."""
        for position, family in enumerate(lease.families):
            count, size = self._held.get(family, (0, 0))
            if not count:
                size = self._bytes_of(family)
                if self._pinned_bytes + size > self.budget_bytes:
                    return position
                self._pinned_bytes += size
            self._held[family] = count + 1, size
        return len(lease)

    def _give_back(self, lease: Lease) -> None:
        for family in lease.families:
            count, size = self._held.pop(family)
            if count > 1:
                self._held[family] = count - 1, size
            else:
                self._pinned_bytes -= size


def _name(chain: Chain) -> _Name:
    return chain.namespace.digest, chain.hashes[-1] if chain.hashes else b""
