"""What is cheap to compute again for its size, and seldom used, leaves first.

GreedyDual-Size-Frequency: "Improving WWW Proxies Performance with Greedy-Dual-Size-Frequency Caching Policy",
Cherkasova (1998). A block's rank is the cache's age plus uses × cost / size, and the age is the rank of the last block
that was evicted. The cost is what computing the block again takes, where that was measured, and its bytes where not.
"""

from __future__ import annotations

from collections.abc import Iterator

from tierkv.policies.leaf_first import LeafFirst
from tierkv.policies.ordered import OrderedPolicy
from tierkv.policies.ranked import Ranked
from tierkv.policy import BlockInfo


class GdsfPolicy(OrderedPolicy):
    """Of equal ranks the least recently used first. Costs that were measured are compared with one another by their
    own mean, so that only their proportions count, also beside blocks without one. Memory: some 400 bytes for each
    family, no ghosts."""

    name = "gdsf"

    def __init__(self) -> None:
        super().__init__()
        self._ranked = Ranked()
        self._uses: dict[int, int] = {}
        self._worth: dict[int, float] = {}
        """Cost for each byte, 1 for the mean of what was measured."""
        self._age = 0.0
        self._measured_s = self._measured_bytes = 0.0

    def knows(self, ident: int) -> bool:
        return ident in self._uses

    def __len__(self) -> int:
        return len(self._uses)

    def order(self) -> Iterator[int]:
        return self._ranked.order()

    def _enter(self, info: BlockInfo) -> None:
        worth = 1.0
        if info.recompute_s is not None and info.recompute_s > 0 and info.bytes > 0:
            self._measured_s += info.recompute_s
            self._measured_bytes += info.bytes
            worth = info.recompute_s / info.bytes * self._measured_bytes / self._measured_s
        self._uses[info.id] = 1
        self._worth[info.id] = worth
        self._ranked.set(info.id, self._age + worth)

    def _settle(self) -> None:
        pass

    def _use(self, ident: int) -> None:
        self._uses[ident] += 1
        self._ranked.set(ident, self._age + self._uses[ident] * self._worth[ident])

    def _leave(self, ident: int, *, evicted: bool) -> None:
        if evicted:
            self._age = max(self._age, self._ranked.rank(ident))
        self._ranked.discard(ident)
        del self._uses[ident], self._worth[ident]


class LeafFirstGdsf(LeafFirst):
    """As the store uses it."""

    name = GdsfPolicy.name

    def __init__(self) -> None:
        super().__init__(GdsfPolicy())
