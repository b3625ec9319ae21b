"""All counters of a store in one table, those included that are kept where they cost nothing.

What ``tierkv.metrics.METRICS`` lists, ``totals`` gives; what has not happened yet is not in it.
"""

from __future__ import annotations

from collections.abc import Iterable

from tierkv.catalog import Catalog
from tierkv.ceiling import Tally
from tierkv.edges import Edge
from tierkv.metrics import Labels

MOST_NAMESPACES = 32
"""Namespaces in ``asked``: those that most was asked of."""


def totals(catalog: Catalog, edges: Iterable[Edge]) -> dict[Labels, int]:
    """Counters by name and labels; they only grow. Takes no lock for long, so two that belong together may be a few
    apart while the store works."""
    found = dict(catalog.counters.snapshot())
    for (kind, tier, reason), count in catalog.events.counts().items():
        name = {
            "arrived": ("arrived_blocks_total", tier),
            "stored": ("usable_blocks_total",),
            "removed": ("gone_blocks_total", reason),
        }.get(kind)
        if name is not None:  # what left a tier is counted by itself
            labels = tuple(word or "unknown" for word in name)
            found[labels] = found.get(labels, 0) + count
    asked = sum_of([space.tally for space in list(catalog.index.spaces)])
    tokens = tokens_of(catalog)
    colder = sum(count for labels, count in found.items() if labels[0] == "hit_blocks_total")
    colder_tokens = sum(count for labels, count in found.items() if labels[0] == "hit_tokens_total")
    found["leased_blocks_total",] = catalog.leased_blocks
    found["asked_blocks_total",] = asked.asked
    found["hit_blocks_total", "host"] = max(0, asked.hit - colder)
    found["asked_tokens_total",] = tokens.asked
    found["hit_tokens_total", "host"] = max(0, tokens.hit - colder_tokens)
    for edge in edges:
        found["breaker_opened_total", edge.name] = edge.tier.breaker.opened_total
        found["stray_completions_total", edge.name] = edge.tier.strays
    return {labels: count for labels, count in found.items() if count}


def sum_of(tallies: list[Tally]) -> Tally:
    total = Tally()
    for tally in tallies:
        total.asked += tally.asked
        total.hit += tally.hit
        total.first_seen += tally.first_seen
    return total


def tokens_of(catalog: Catalog) -> Tally:
    """What requests asked for in tokens: those of whole blocks."""
    total = Tally()
    for space in list(catalog.index.spaces):
        if space.layout is not None:
            total.asked += space.tally.asked * space.layout.block_tokens
            total.hit += space.tally.hit * space.layout.block_tokens
            total.first_seen += space.tally.first_seen * space.layout.block_tokens
    return total


def asked(catalog: Catalog) -> dict[str, object]:
    """What was asked for, what was given, and what an endless cache would have given: in all, and by namespace (the
    first bytes of its digest) for those that most was asked of."""
    spaces = sorted(catalog.index.spaces, key=lambda space: -space.tally.asked)
    return {
        **sum_of([space.tally for space in spaces]).values(),
        "namespaces": {
            space.digest.hex()[:16]: space.tally.values()
            for space in spaces[:MOST_NAMESPACES]
            if space.tally.asked
        },
    }
