"""One order for each tenant, beside the policy of a tier: who of a tenant's own blocks leaves first.

A policy looks at so many families at its cold end and no further, and there may lie other tenants' alone. So where
tenants have quotas the store keeps this order too, least recently used first, in one set of lists: each tenant has one
list for each priority.
"""

from __future__ import annotations

import bisect
from collections.abc import Callable, Iterator, Sequence

from tierkv.ids import FamilyId
from tierkv.policies.lru import MAX_PRIORITY, LruPolicy
from tierkv.policy import BlockInfo

_LISTS = 2 * MAX_PRIORITY + 1
"""Of one tenant."""


class ByTenant(LruPolicy):
    """Costs as much as ``LruPolicy``, whose lists it uses under numbers that name tenant and priority. Not thread-safe:
    the store calls it under its lock."""

    name = "by_tenant"
    most_priority = 2**31 - 1

    def __init__(self) -> None:
        super().__init__()
        self._numbers: dict[int, int] = {}
        """Of tenants, by tag."""

    def knows(self, family: FamilyId) -> bool:
        return family < len(self._where) and bool(self._where[family])

    def on_insert(self, infos: Sequence[BlockInfo]) -> None:
        super().on_insert([info._replace(priority=self._list_of(info)) for info in infos])

    def _list_of(self, info: BlockInfo) -> int:
        number = self._numbers.setdefault(info.tenant, len(self._numbers))
        return number * _LISTS + MAX_PRIORITY + max(-MAX_PRIORITY, min(MAX_PRIORITY, info.priority))

    def victims_of(self, tenant: int, need: int, evictable: Callable[[FamilyId], bool]) -> Iterator[FamilyId]:
        """Like ``victims``, of that tenant's families alone."""
        number = self._numbers.get(tenant)
        if number is None:
            return iter(())
        known, first = self._priorities, number * _LISTS
        lists = known[bisect.bisect_left(known, first) : bisect.bisect_left(known, first + _LISTS)]
        return self._offered(self._coldest(4 * need + 64, lists), evictable)
