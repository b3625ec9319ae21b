"""Segmented LRU: what was used once leaves before what was used twice.

"Caching Strategies to Improve Disk System Performance", Karedla, Love, Wherry (1994). New blocks enter a list on
probation; a hit there moves a block to the protected list, which holds at most four fifths of all; what it has too much
goes back to the hot end of the other.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator

from tierkv.policies.leaf_first import LeafFirst
from tierkv.policies.ordered import OrderedPolicy, walked
from tierkv.policy import BlockInfo

PROTECTED_SHARE = 0.8


class SlruPolicy(OrderedPolicy):
    """Memory: some 110 bytes for each family, no ghosts."""

    name = "slru"

    def __init__(self) -> None:
        super().__init__()
        self._probation: OrderedDict[int, None] = OrderedDict()
        self._protected: OrderedDict[int, None] = OrderedDict()

    def knows(self, ident: int) -> bool:
        return ident in self._probation or ident in self._protected

    def __len__(self) -> int:
        return len(self._probation) + len(self._protected)

    def order(self) -> Iterator[int]:
        yield from walked(self._probation)
        yield from walked(self._protected)

    def _enter(self, info: BlockInfo) -> None:
        self._probation[info.id] = None

    def _settle(self) -> None:
        pass

    def _use(self, ident: int) -> None:
        self._probation.pop(ident, None)
        self._protected[ident] = None
        self._protected.move_to_end(ident)
        if len(self._protected) > PROTECTED_SHARE * len(self):
            coldest, _ = self._protected.popitem(last=False)
            self._probation[coldest] = None

    def _leave(self, ident: int, *, evicted: bool) -> None:
        if self._probation.pop(ident, self) is self:
            del self._protected[ident]


class LeafFirstSlru(LeafFirst):
    """As the store uses it."""

    name = SlruPolicy.name

    def __init__(self) -> None:
        super().__init__(SlruPolicy())
