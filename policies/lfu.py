"""Least frequently used leaves first, and what was used often long ago is forgotten.

LFU with dynamic aging: "Evaluating Content Management Techniques for Web Proxy Caches", Arlitt, Cherkasova, Dilley,
Friedrich, Jin (1999). A block's rank is its number of uses plus the cache's age when it was used last, and the age is
the rank of the last block that was evicted: so a block that is not used any more is overtaken by new ones in time.
"""

from __future__ import annotations

from collections.abc import Iterator

from tierkv.policies.leaf_first import LeafFirst
from tierkv.policies.ordered import OrderedPolicy
from tierkv.policies.ranked import Ranked
from tierkv.policy import BlockInfo


class LfuPolicy(OrderedPolicy):
    """Of equal ranks the least recently used first. Memory: some 350 bytes for each family, no ghosts."""

    name = "lfu"

    def __init__(self) -> None:
        super().__init__()
        self._ranked = Ranked()
        self._uses: dict[int, int] = {}
        self._age = 0.0

    def knows(self, ident: int) -> bool:
        return ident in self._uses

    def __len__(self) -> int:
        return len(self._uses)

    def order(self) -> Iterator[int]:
        return self._ranked.order()

    def _enter(self, info: BlockInfo) -> None:
        self._uses[info.id] = 1
        self._ranked.set(info.id, self._age + 1)

    def _settle(self) -> None:
        pass

    def _use(self, ident: int) -> None:
        self._uses[ident] += 1
        self._ranked.set(ident, self._age + self._uses[ident])

    def _leave(self, ident: int, *, evicted: bool) -> None:
        if evicted:
            self._age = max(self._age, self._ranked.rank(ident))
        self._ranked.discard(ident)
        del self._uses[ident]


class LeafFirstLfu(LeafFirst):
    """As the store uses it."""

    name = LfuPolicy.name

    def __init__(self) -> None:
        super().__init__(LfuPolicy())
