"""All leases that are out, with their owners and deadlines."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Iterable

from tierkv.handles import Lease
from tierkv.ids import FamilyId


class LeaseBook:
    """Who holds what. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._numbers = itertools.count(1)
        self._out: dict[int, Lease] = {}
        self._reported: set[int] = set()

    def next_number(self) -> int:
        return next(self._numbers)

    def add(self, lease: Lease) -> None:
        self._out[lease.number] = lease  # one dict store, atomic under the interpreter lock

    def remove(self, lease: Lease) -> None:
        self._out.pop(lease.number, None)
        self._reported.discard(lease.number)

    def __len__(self) -> int:
        return len(self._out)

    def all(self) -> list[Lease]:
        return list(self._out.values())

    def overdue(self, now_s: float) -> list[Lease]:
        """Leases past their deadline that were not reported yet."""
        late = [lease for lease in self.all() if lease.at_s <= now_s and lease.number not in self._reported]
        self._reported.update(lease.number for lease in late)
        return late

    def owners_of(self, families: Iterable[FamilyId]) -> tuple[str, ...]:
        """In words, which owners hold leases over any of the families."""
        wanted = set(families)
        if not wanted:
            return ()
        held = (lease for lease in self.all() if wanted.intersection(lease.families))
        return tuple(f"{len(lease)} blocks leased by {lease.owner}" for lease in held)
