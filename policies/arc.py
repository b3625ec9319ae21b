"""Two LRU lists, of blocks used once and of blocks used more often, whose sizes follow from what comes back.

"ARC: A Self-Tuning, Low Overhead Replacement Cache", Megiddo and Modha (FAST 2003). Two ghost lists remember what left
each list; a block that comes back from one of them says that its list was too small, and ``target``, the size that the
first list should have, moves. The store asks for room before it says what comes in, so the target moves one step
later than in the paper.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator

from tierkv.policies.leaf_first import LeafFirst
from tierkv.policies.ordered import GhostList, OrderedPolicy, walked
from tierkv.policy import BlockInfo


class ArcPolicy(OrderedPolicy):
    """Memory: some 200 bytes for each family and 100 for each ghost, of which there are at most as many as resident
    families. Families without a hash leave no ghost."""

    name = "arc"

    def __init__(self) -> None:
        super().__init__()
        self._once: OrderedDict[int, bytes] = OrderedDict()
        self._often: OrderedDict[int, bytes] = OrderedDict()
        self._once_ghosts = GhostList()
        self._often_ghosts = GhostList()
        self._target = 0.0

    def knows(self, ident: int) -> bool:
        return ident in self._once or ident in self._often

    def __len__(self) -> int:
        return len(self._once) + len(self._often)

    @property
    def ghosts(self) -> int:
        return len(self._once_ghosts) + len(self._often_ghosts)

    def order(self) -> Iterator[int]:
        once, often = walked(self._once), walked(self._often)
        first, second = len(self._once), len(self._often)
        while first or second:
            if first and (first > self._target or not second):
                first -= 1
                yield next(once)
            else:
                second -= 1
                yield next(often)

    def _enter(self, info: BlockInfo) -> None:
        named = info.block_hash
        first, second = len(self._once_ghosts), len(self._often_ghosts)
        if named and named in self._once_ghosts:
            self._target = min(self._target + max(1.0, second / first), float(self._places))
            self._once_ghosts.discard(named)
            self._often[info.id] = named
        elif named and named in self._often_ghosts:
            self._target = max(self._target - max(1.0, first / second), 0.0)
            self._often_ghosts.discard(named)
            self._often[info.id] = named
        else:
            self._once[info.id] = named

    def _settle(self) -> None:
        self._trim()

    def _use(self, ident: int) -> None:
        named = self._once.pop(ident, None)
        self._often[ident] = self._often[ident] if named is None else named
        self._often.move_to_end(ident)

    def _leave(self, ident: int, *, evicted: bool) -> None:
        named = self._once.pop(ident, None)
        ghosts = self._once_ghosts
        if named is None:
            named = self._often.pop(ident)
            ghosts = self._often_ghosts
        if evicted:
            ghosts.add(named)
            self._trim()

    def _trim(self) -> None:
        self._once_ghosts.trim(max(0, self._places - len(self._once)))
        self._often_ghosts.trim(max(0, self._places - len(self._once_ghosts)))


class LeafFirstArc(LeafFirst):
    """As the store uses it."""

    name = ArcPolicy.name

    def __init__(self) -> None:
        super().__init__(ArcPolicy())
