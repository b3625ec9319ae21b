"""What the classic policies share: they keep an order of all families, and everybody is offered in it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import islice

from tierkv.ids import FamilyId
from tierkv.policy import BlockInfo

_FEW = 256


def offered(order: Iterator[int], need: int, evictable: Callable[[FamilyId], bool]) -> Iterator[FamilyId]:
    """Those of an order that may leave, after no more looks than the protocol allows."""
    for _, ident in zip(range(4 * need + 64), order, strict=False):
        if evictable(FamilyId(ident)):
            yield FamilyId(ident)


def walked(families: Mapping[int, object]) -> Iterator[int]:
    """The keys in their order. Mostly the first few are all that is asked for, so the others are listed later."""
    first = list(islice(families, _FEW))
    yield from first
    if len(first) == _FEW:
        known = set(first)
        yield from [ident for ident in list(families) if ident not in known]


class OrderedPolicy(ABC):
    """An eviction policy that says its whole order. Alone it knows nothing of parents and children: the store sees to
    it that only leaves leave, and ``LeafFirst`` that it need not look for them. Not thread-safe: the store calls it
    under its lock."""

    name: str

    def __init__(self) -> None:
        self._inserted = self._hit = self._removed = self._evicted = 0
        self._places = 0
        """The most families that were here at a time."""

    def on_insert(self, infos: Sequence[BlockInfo]) -> None:
        known = [info.id for info in infos if self.knows(info.id)]
        if known:
            self.on_remove(known, evicted=False)
        self._inserted += len(infos)
        for info in reversed(infos):  # the tail of a prompt is older than its head
            self._enter(info)
        self._places = max(self._places, len(self))
        self._settle()

    def on_hit(self, ids: Sequence[FamilyId]) -> None:
        for ident in reversed(ids):
            if self.knows(ident):
                self._hit += 1
                self._use(ident)

    def on_remove(self, ids: Sequence[FamilyId], *, evicted: bool) -> None:
        for ident in ids:
            if self.knows(ident):
                self._removed += 1
                self._evicted += evicted
                self._leave(ident, evicted=evicted)

    def victims(self, need: int, evictable: Callable[[FamilyId], bool]) -> Iterator[FamilyId]:
        return offered(self.order(), need, evictable)

    def counters(self) -> Mapping[str, int]:
        return {
            "inserted": self._inserted,
            "hit": self._hit,
            "removed": self._removed,
            "evicted": self._evicted,
        }

    @abstractmethod
    def order(self) -> Iterator[int]:
        """Everybody, who should leave first. Lazy, and changes nothing of what may be seen."""

    @abstractmethod
    def knows(self, ident: int) -> bool: ...

    @abstractmethod
    def __len__(self) -> int:
        """Resident families."""

    @abstractmethod
    def _enter(self, info: BlockInfo) -> None: ...

    @abstractmethod
    def _use(self, ident: int) -> None:
        """A family that is known was used."""

    @abstractmethod
    def _leave(self, ident: int, *, evicted: bool) -> None:
        """A family that is known has left."""

    @abstractmethod
    def _settle(self) -> None:
        """All of a call have come in."""


class GhostList:
    """Names of families that have left, the oldest dropped. Memory: some 100 bytes each."""

    def __init__(self) -> None:
        self._names: dict[bytes, None] = {}

    def __len__(self) -> int:
        return len(self._names)

    def __contains__(self, named: bytes) -> bool:
        return named in self._names

    def add(self, named: bytes) -> None:
        """The newest, or nothing where a family has no name."""
        if named:
            self._names.pop(named, None)
            self._names[named] = None

    def discard(self, named: bytes) -> None:
        self._names.pop(named, None)

    def trim(self, most: int) -> None:
        while len(self._names) > most:
            del self._names[next(iter(self._names))]
