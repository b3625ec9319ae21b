"""A small queue that new blocks must pass, a main queue, and a memory of those that did not pass.

"FIFO queues are all you need for cache eviction", Yang, Zhang, Qiu, Yue, Rashmi (SOSP 2023). Hits only count, up to
three. At the end of the small queue, a tenth of all, a block that was hit more than once moves to the main queue, any
other leaves and is remembered; one that comes back while it is remembered enters the main queue at once. At the end of
the main queue a block that was hit goes round again with one hit less.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Iterator

from tierkv.policies.leaf_first import LeafFirst
from tierkv.policies.ordered import GhostList, OrderedPolicy, walked
from tierkv.policy import BlockInfo

SMALL_SHARE = 0.1
MOST_HITS = 3


class S3FifoPolicy(OrderedPolicy):
    """Blocks move within the queues when a block that was named behind them has left. Memory: some 300 bytes for each
    family and 100 for each ghost, of which there are at most as many as families in the main queue. Families without
    a hash leave no ghost."""

    name = "s3fifo"

    def __init__(self) -> None:
        super().__init__()
        self._small: OrderedDict[int, bytes] = OrderedDict()
        self._main: OrderedDict[int, bytes] = OrderedDict()
        self._hits: dict[int, int] = {}
        self._ghosts = GhostList()
        self._moves: list[int] = []
        """Who goes on, in the order of the last walk."""
        self._moved = 0
        """So many of them have been moved."""
        self._moves_before: dict[int, int] = {}
        """By block that was named: how many go on before it leaves."""

    def knows(self, ident: int) -> bool:
        return ident in self._hits

    def __len__(self) -> int:
        return len(self._hits)

    @property
    def ghosts(self) -> int:
        return len(self._ghosts)

    def order(self) -> Iterator[int]:
        self._moves, self._moved, self._moves_before = [], 0, {}
        moves, before = self._moves, self._moves_before
        small, main = walked(self._small), walked(self._main)
        small_left, main_left = len(self._small), len(self._main)
        again: deque[tuple[int, int]] = deque()
        while small_left or main_left or again:
            left = small_left + main_left + len(again)
            if small_left and (small_left > SMALL_SHARE * left or small_left == left):
                ident = next(small)
                small_left -= 1
                if self._hits.get(ident, 0) > 1:
                    again.append((ident, 0))
                    moves.append(ident)
                    continue
            else:
                if main_left:
                    ident = next(main)
                    main_left -= 1
                    hits = self._hits.get(ident, 0)
                else:
                    ident, hits = again.popleft()
                if hits:
                    again.append((ident, hits - 1))
                    moves.append(ident)
                    continue
            before[ident] = len(moves)
            yield ident

    def _enter(self, info: BlockInfo) -> None:
        named = info.block_hash
        self._hits[info.id] = 0
        if named in self._ghosts:
            self._ghosts.discard(named)
            self._main[info.id] = named
        else:
            self._small[info.id] = named

    def _settle(self) -> None:
        pass

    def _use(self, ident: int) -> None:
        self._hits[ident] = min(MOST_HITS, self._hits[ident] + 1)

    def _leave(self, ident: int, *, evicted: bool) -> None:
        if evicted:
            self._move_those_before(ident)
        del self._hits[ident]
        named = self._small.pop(ident, None)
        if named is None:
            del self._main[ident]
        elif evicted:
            self._ghosts.add(named)
        self._ghosts.trim(len(self._main))

    def _move_those_before(self, ident: int) -> None:
        stop = self._moves_before.get(ident, 0)
        for mover in self._moves[self._moved : stop]:
            named = self._small.pop(mover, None)
            if named is not None:
                self._main[mover] = named
                self._hits[mover] = 0
            elif mover in self._main:
                self._main.move_to_end(mover)
                self._hits[mover] = max(0, self._hits[mover] - 1)
        self._moved = max(self._moved, stop)


class LeafFirstS3Fifo(LeafFirst):
    """As the store uses it."""

    name = S3FifoPolicy.name

    def __init__(self) -> None:
        super().__init__(S3FifoPolicy())
