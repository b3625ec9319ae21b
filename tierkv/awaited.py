"""Parents whose children are on their way to a blob tier: they must not leave it meanwhile, for after a restart nobody
could find the children there."""

from __future__ import annotations

from collections import Counter

from tierkv.ids import FamilyId
from tierkv.index import FamilyIndex


class Awaited:
    """Under the catalog's lock."""

    def __init__(self, index: FamilyIndex) -> None:
        self._parent = index.parent
        self._children: Counter[tuple[int, int]] = Counter()
        """By (tier, parent)."""

    def comes(self, family: FamilyId, tier: int) -> None:
        """The family is on its way to the tier."""
        if parent := self._parent[family]:
            self._children[tier, parent] += 1

    def came(self, family: FamilyId, tier: int) -> None:
        """Its way is over, well or not."""
        if parent := self._parent[family]:
            self._children[tier, parent] -= 1
            if not self._children[tier, parent]:
                del self._children[tier, parent]

    def __contains__(self, place: tuple[int, FamilyId]) -> bool:
        """(tier, family): a child of it is on its way there."""
        return place in self._children
