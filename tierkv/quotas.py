"""Quotas: no tenant can push all others out of a tier.

The operator gives every tenant the same share of host RAM and of each tier that the store evicts from; a session may
ask for less for its own tenant. What is stored never goes beyond: a tenant's own coldest blocks make way for its new
ones. What is loaded is not refused for a quota, since who only reads stores nothing; so it may lift a tenant over its
share for a while, and then that tenant is the first to lose blocks when room is needed.

While nobody has a quota (``on`` is False) nothing is asked here.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping
from typing import Final

from tierkv.catalog import HOST, Catalog
from tierkv.index import Space
from tierkv.tenancy import TenantBooks

MOST_NAMED: Final = 32
"""Tenants in ``facts``: those that hold most."""


class Quotas:
    """Thread-safe. Its lock is a leaf: it may be taken under the catalog's."""

    def __init__(self, catalog: Catalog, share: float, marks: tuple[float, float]) -> None:
        """``share``: of each tier, for any one tenant; 1 is no quota. ``marks``: while less than the first part of a
        tenant's quota of host RAM is free or clean, its blocks are written to the colder tiers, up to the second."""
        self._catalog = catalog
        self._share = share
        self._low, self._high = marks
        self._lock = threading.Lock()
        self._asked: dict[bytes, tuple[TenantBooks, Mapping[int, int]]] = {}
        """By session, what it wants its tenant to be kept to, in bytes by tier."""
        self._drafts: dict[int, tuple[TenantBooks, int]] = {}
        """Bytes that drafts were granted, by the first of their slots."""
        self.short: dict[TenantBooks, None] = {}
        """Tenants of which more should be clean, in the order of their turns."""
        self.capacity_bytes: dict[int, int] = {HOST: catalog.host.arena.capacity_bytes}
        """By tier, as it is now."""
        self.on = False
        if share < 1:
            self._turn_on()

    # -- who has which --------------------------------------------------------------------------------------------

    def declare(self, session: bytes, tag: int, limits: Mapping[int, int]) -> None:
        """A session wants its tenant to hold no more than so many bytes, by tier, as long as it is there. It cannot get
        more than the operator gives."""
        with self._catalog.gate, self._catalog.lock:
            books = self._catalog.index.books_of(tag)
        with self._lock:
            self._asked[session] = books, dict(limits)
            self._note_limits(books)
        self._turn_on()

    def withdraw(self, session: bytes) -> None:
        """The session is gone."""
        with self._lock:
            asked = self._asked.pop(session, None)
            if asked is not None:
                self._note_limits(asked[0])

    def _note_limits(self, books: TenantBooks) -> None:
        strictest: dict[int, int] = {}
        for its, limits in self._asked.values():
            if its is books:
                for tier, limit in limits.items():
                    strictest[tier] = min(limit, strictest.get(tier, limit))
        books.own_limits = strictest

    def _turn_on(self) -> None:
        """From now on each tenant's blocks are kept in an order of their own."""
        for tier in self._catalog.tiers:
            known = tier.policy is None
            while not known:
                with self._catalog.gate, self._catalog.lock:
                    assert tier.policy is not None
                    known = tier.policy.order_tenants()
        self.on = True

    def limit(self, books: TenantBooks, tier: int) -> int | None:
        """Bytes of a tier that a tenant may hold; ``None``: as many as there are."""
        own = books.own_limits.get(tier)
        capacity_bytes = self.capacity_bytes.get(tier)
        if self._share >= 1 or capacity_bytes is None:
            return own
        share_bytes = int(self._share * capacity_bytes)
        return share_bytes if own is None else min(own, share_bytes)

    def over(self, tier: int) -> Iterator[tuple[TenantBooks, int]]:
        """Tenants that hold more of a tier than they may, and how many bytes more. Under the catalog's lock."""
        if not self.on:
            return
        for books in self._catalog.index.tenants.values():
            limit = self.limit(books, tier)
            if limit is not None and books.held[tier] > limit:
                yield books, books.held[tier] - limit

    # -- what comes -----------------------------------------------------------------------------------------------

    def excess(self, books: TenantBooks, tier: int, more_bytes: int) -> int:
        """How many bytes the tenant would be over its quota with so many more; at most 0 when they fit."""
        limit = self.limit(books, tier)
        if limit is None:
            return 0
        return books.held[tier] + books.coming[tier] + more_bytes - limit

    def grant(self, books: TenantBooks, tier: int, count: int, block_bytes: int) -> int:
        """Grants as many of ``count`` blocks as fit into the tenant's quota; they count until ``settle``."""
        with self._lock:
            excess = self.excess(books, tier, count * block_bytes)
            if excess > 0:
                count = max(0, count - -(-excess // block_bytes))
            books.coming[tier] += count * block_bytes
        return count

    def settle(self, books: TenantBooks, tier: int, size_bytes: int) -> None:
        """What was granted is held now, or will not come."""
        if size_bytes:
            with self._lock:
                books.coming[tier] -= size_bytes

    def note_draft(self, slot: int, books: TenantBooks, size_bytes: int) -> None:
        """A draft whose first slot this is was granted so much."""
        with self._lock:
            self._drafts[slot] = books, size_bytes

    def take_draft(self, slot: int) -> tuple[TenantBooks, int] | None:
        """The draft with this first slot is over: what it was granted is the caller's to settle."""
        if not self._drafts:
            return None
        with self._lock:
            return self._drafts.pop(slot, None)

    # -- clean ahead of need --------------------------------------------------------------------------------------

    def look(self, space: Space) -> None:
        """Blocks of a tenant were registered: is enough of what it holds clean?"""
        books = space.books
        if self._short_bytes(books, self._low) > 0:
            self.short[books] = None

    def in_turn(self) -> Iterator[TenantBooks]:
        """Tenants of which more is to be cleaned. Each goes to the end of the line as it is named. Under the catalog's
        lock."""
        for books in list(self.short):
            self.short.pop(books, None)
            if self._short_bytes(books, self._high) > 0:
                self.short[books] = None
                yield books

    def _short_bytes(self, books: TenantBooks, mark: float) -> float:
        """How much more of its quota of host RAM should be free or clean."""
        limit = self.limit(books, HOST)
        if limit is None:
            return 0
        return mark * limit - (limit - books.held[HOST]) - books.clean_bytes

    # -- facts ----------------------------------------------------------------------------------------------------

    def facts(self) -> dict[str, object]:
        """For people: what those tenants that hold most hold, by tier. Nobody's salt is told, nor what it is digested
        to in keys."""
        tenants = sorted(self._catalog.index.tenants.copy().values(), key=lambda books: -sum(books.held))
        return {
            "count": len(tenants),
            "share": self._share if self._share < 1 else None,
            "tenants": {books.name: self._facts_of(books) for books in tenants[:MOST_NAMED]},
        }

    def _facts_of(self, books: TenantBooks) -> dict[str, object]:
        tiers = self._catalog.tiers
        return {
            "held_bytes": {tier.name: books.held[tier.number] for tier in tiers},
            "quota_bytes": {tier.name: self.limit(books, tier.number) for tier in tiers},
            "coming_bytes": {tier.name: books.coming[tier.number] for tier in tiers},
            "refused_blocks": books.refused_blocks,
            "made_way_blocks": books.made_way_blocks,
        }
