"""All leases that are out, with their owners and deadlines."""

from __future__ import annotations

from collections.abc import Iterable

from tierkv.handles import Lease
from tierkv.ids import FamilyId


class LeaseBook:
    """Who holds what. Thread-safe: each step is one operation on a set, atomic under the interpreter lock."""

    def __init__(self) -> None:
        self._out: set[Lease] = set()
        self._reported: set[Lease] = set()
        self.add = self._out.add

    def remove(self, lease: Lease) -> None:
        self._out.discard(lease)
        if self._reported:
            self._reported.discard(lease)

    def __len__(self) -> int:
        return len(self._out)

    def all(self) -> list[Lease]:
        return list(self._out.copy())

    def overdue(self, now_s: float) -> list[Lease]:
        """Leases past their deadline that were not reported yet."""
        late = [lease for lease in self.all() if lease.at_s <= now_s and lease not in self._reported]
        self._reported.update(late)
        return late

    def owners_of(self, families: Iterable[FamilyId]) -> tuple[str, ...]:
        """In words, which owners hold leases over any of the families."""
        wanted = set(families)
        if not wanted:
            return ()
        held = (lease for lease in self.all() if wanted.intersection(lease.families))
        return tuple(f"{len(lease)} blocks leased by {lease.owner}" for lease in held)
