"""The books of a store: what came must equal what went and what is there, tier by tier."""

from __future__ import annotations

from tierkv.index import DOOMED, USABLE
from tierkv.metrics import METRICS, Labels
from tierkv.store import TieredStore


def check_totals(store: TieredStore) -> None:
    """Counts again what each tier holds, and compares. Call it when nobody is in the middle of a step.

    For each tier: arrived = there + left (for whatever reason). For the store: became usable = usable + gone. For
    requests: asked = hit + missed + what was only looked at. Every counter stands in the table, with its labels.
    """
    found = store.totals()
    _check_names(found)
    index = store.catalog.index
    rows = [row for row in range(1, index._next) if index.hashes[row] is not None]
    for tier in store.catalog.tiers:
        there = sum(index.whole_in[row] >> tier.number & 1 for row in rows)
        arrived = found.get(("arrived_blocks_total", tier.name), 0)
        left = _sum(found, "evicted_blocks_total", tier.name)
        assert arrived == there + left, f"{tier.name}: {arrived} arrived, {there} are there, {left} left"
        events = sum(
            count
            for (kind, where, _), count in store.events.counts().items()
            if kind == "left" and where == tier.name
        )
        assert events == left, f"{tier.name}: {events} events say that a block left, the counters say {left}"
    usable = sum(bool(index.state[row] & USABLE and not index.state[row] & DOOMED) for row in rows)
    came, gone = _sum(found, "usable_blocks_total"), _sum(found, "gone_blocks_total")
    assert came == usable + gone, f"{came} became usable, {usable} are, {gone} are gone"
    never = _sum(found, "never_served_blocks_total")
    assert never <= gone, f"{never} gone blocks were never served, {gone} are gone"
    asked = _sum(found, "asked_blocks_total")
    hit, missed = _sum(found, "hit_blocks_total"), _sum(found, "missed_blocks_total")
    assert hit + missed <= asked, f"{asked} blocks were asked for, {hit} hit and {missed} missed"


def _sum(found: dict[Labels, int], *begin: str) -> int:
    return sum(count for labels, count in found.items() if labels[: len(begin)] == begin)


def _check_names(found: dict[Labels, int]) -> None:
    known = {metric.name: len(metric.labels) for metric in METRICS}
    for name, *values in found:
        assert name in known, f"{name} is not in tierkv.metrics.METRICS"
        assert len(values) == known[name], f"{name} has the labels {values}"
