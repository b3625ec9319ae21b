"""A queue in the order of arrival, and a hand that passes over what was used since it came by.

"SIEVE is Simpler than LRU: an Efficient Turn-Key Eviction Algorithm for Web Caches", Zhang, Yang, Yue, Vigfusson,
Rashmi (NSDI 2024). A hit only sets a mark. The hand goes from the oldest towards the newest block and from there to the
oldest again; a marked block loses its mark and stays where it is, an unmarked one leaves.
"""

from __future__ import annotations

from collections.abc import Iterator

from tierkv.policies.leaf_first import LeafFirst
from tierkv.policies.ordered import OrderedPolicy
from tierkv.policy import BlockInfo

_END = -1
"""Stands between the newest and the oldest."""


class SievePolicy(OrderedPolicy):
    """The hand moves when a block that it has named has left, up to that block. Memory: some 250 bytes for each family,
    no ghosts."""

    name = "sieve"

    def __init__(self) -> None:
        super().__init__()
        self._newer: dict[int, int] = {_END: _END}
        self._older: dict[int, int] = {_END: _END}
        self._marked: set[int] = set()
        self._hand = _END
        """Whom it looks at next; ``_END``: the oldest."""
        self._named: set[int] = set()

    def knows(self, ident: int) -> bool:
        return ident in self._newer

    def __len__(self) -> int:
        return len(self._newer) - 1

    def order(self) -> Iterator[int]:
        self._named = set()
        passed = []
        for ident in self._round():
            if ident in self._marked:
                passed.append(ident)
                continue
            self._named.add(ident)
            yield ident
        for ident in passed:
            self._named.add(ident)
            yield ident

    def _round(self) -> Iterator[int]:
        """Everybody, from the hand on. Whoever has just been given may leave meanwhile."""
        start = self._hand
        ident = self._newer[_END] if start == _END else start
        turned = start == _END
        while ident in self._newer:
            if ident == _END:
                if turned:
                    return
                turned, ident = True, self._newer[_END]
                if ident == start:
                    return
                continue
            following = self._newer[ident]
            yield ident
            if following == start and turned:
                return
            ident = following

    def _enter(self, info: BlockInfo) -> None:
        newest = self._older[_END]
        self._newer[newest], self._older[info.id] = info.id, newest
        self._newer[info.id], self._older[_END] = _END, info.id

    def _settle(self) -> None:
        pass

    def _use(self, ident: int) -> None:
        self._marked.add(ident)

    def _leave(self, ident: int, *, evicted: bool) -> None:
        if evicted and ident in self._named:
            self._named.discard(ident)
            self._move_hand_to(ident)
        following = self._newer.pop(ident)
        before = self._older.pop(ident)
        self._newer[before], self._older[following] = following, before
        if self._hand == ident:
            self._hand = following
        self._marked.discard(ident)

    def _move_hand_to(self, ident: int) -> None:
        """Marks that it passes are wiped; with one round all, when the block itself had one."""
        at = self._newer[_END] if self._hand == _END else self._hand
        for _ in range(2 * len(self)):
            if at == ident and ident not in self._marked:
                break
            self._marked.discard(at)
            at = self._newer[at]
            if at == _END:
                at = self._newer[_END]
        self._hand = ident


class LeafFirstSieve(LeafFirst):
    """As the store uses it."""

    name = SievePolicy.name

    def __init__(self) -> None:
        super().__init__(SievePolicy())
