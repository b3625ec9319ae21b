"""A block stays only if it was seen more often than the one that would leave for it.

W-TinyLFU: "TinyLFU: A Highly Efficient Cache Admission Policy", Einziger, Friedman, Manes (ACM ToS 2017). New blocks
enter a window, one hundredth of all, in LRU order. What falls out of it is a candidate for the main part, a segmented
LRU. When somebody has to leave, the oldest candidate and the coldest block of the main part are compared by a sketch of
how often each was seen lately, also before it came; the one that was seen less leaves.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator

from tierkv.policies.frequency import FrequencySketch
from tierkv.policies.leaf_first import LeafFirst
from tierkv.policies.ordered import OrderedPolicy, walked
from tierkv.policy import BlockInfo

WINDOW_SHARE = 0.01
PROTECTED_SHARE = 0.8


class WTinyLfuPolicy(OrderedPolicy):
    """Memory: some 250 bytes for each family and 16 for the sketch, no ghosts. A family without a hash is counted by
    its id."""

    name = "w_tinylfu"

    def __init__(self) -> None:
        super().__init__()
        self._words: dict[int, int] = {}
        """What each is counted under."""
        self._window: OrderedDict[int, None] = OrderedDict()
        self._candidates: OrderedDict[int, None] = OrderedDict()
        self._probation: OrderedDict[int, None] = OrderedDict()
        self._protected: OrderedDict[int, None] = OrderedDict()
        self._sketch = FrequencySketch()
        self._beaten: dict[int, int] = {}
        """By block of the main part that was named: the candidate that it was compared with."""

    def knows(self, ident: int) -> bool:
        return ident in self._words

    def __len__(self) -> int:
        return len(self._words)

    def order(self) -> Iterator[int]:
        self._beaten = {}
        won: list[int] = []
        main = self._main()
        victim = next(main, None)
        for candidate in walked(self._candidates):
            if victim is None or self._count(candidate) <= self._count(victim):
                yield candidate
                continue
            self._beaten[victim] = candidate
            won.append(candidate)
            yield victim
            victim = next(main, None)
        if victim is not None:
            yield victim
        yield from main
        yield from won
        yield from walked(self._window)

    def _main(self) -> Iterator[int]:
        yield from walked(self._probation)
        yield from walked(self._protected)

    def _count(self, ident: int) -> int:
        word = self._words.get(ident)
        return 0 if word is None else self._sketch.count(word)

    def _enter(self, info: BlockInfo) -> None:
        word = int.from_bytes(info.block_hash[:8], "big") if info.block_hash else info.id
        self._words[info.id] = word
        self._sketch.see(word)
        self._window[info.id] = None

    def _settle(self) -> None:
        self._sketch.fit(len(self))
        while len(self._window) > max(1, int(WINDOW_SHARE * len(self))):
            oldest, _ = self._window.popitem(last=False)
            self._candidates[oldest] = None

    def _use(self, ident: int) -> None:
        self._sketch.see(self._words[ident])
        if ident in self._window:
            self._window.move_to_end(ident)
            return
        self._candidates.pop(ident, None)
        self._probation.pop(ident, None)
        self._protected[ident] = None
        self._protected.move_to_end(ident)
        if len(self._protected) > PROTECTED_SHARE * (len(self) - len(self._window)):
            coldest, _ = self._protected.popitem(last=False)
            self._probation[coldest] = None

    def _leave(self, ident: int, *, evicted: bool) -> None:
        winner = self._beaten.pop(ident, None)
        if evicted and winner is not None and winner in self._candidates:
            del self._candidates[winner]
            self._probation[winner] = None
        del self._words[ident]
        for part in (self._window, self._candidates, self._probation, self._protected):
            part.pop(ident, None)


class LeafFirstWTinyLfu(LeafFirst):
    """As the store uses it."""

    name = WTinyLfuPolicy.name

    def __init__(self) -> None:
        super().__init__(WTinyLfuPolicy())
