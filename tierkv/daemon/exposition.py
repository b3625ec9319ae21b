"""The store's numbers as Prometheus reads them: ``/metrics``.

The counters are those of ``tierkv.metrics.METRICS``, with ``tierkv_`` before their names; beside them stand gauges of
what is now. A scrape counts nothing and changes nothing.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import accumulate
from typing import Any, Final, NamedTuple

from prometheus_client import CollectorRegistry, ProcessCollector, generate_latest
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)
from prometheus_client.registry import Collector

from tierkv import __version__
from tierkv.metrics import METRICS, Labels
from tierkv.store import TieredStore
from tierkv.timing import BOUNDS_S, Times
from tierkv.totals import tokens_of

PREFIX: Final = "tierkv_"
CONTENT_TYPE: Final = "text/plain; version=0.0.4; charset=utf-8"
STATES: Final = ("ok", "degraded", "unhealthy")


class Gauge(NamedTuple):
    """A number that goes up and down."""

    name: str
    labels: tuple[str, ...]
    meaning: str


GAUGES: Final = (
    Gauge("build_info", ("release",), "always 1; the release that runs"),
    Gauge("ready", (), "1 when the daemon is worth sending requests to (`/readyz`)"),
    Gauge("health", ("state",), "1 for the state it is in: `ok`, `degraded` or `unhealthy`"),
    Gauge("tier_capacity_bytes", ("tier",), "room of a tier; absent where a server decides"),
    Gauge("tier_used_bytes", ("tier",), "of it, in use"),
    Gauge("tier_blocks", ("tier",), "parts that a colder tier holds, as far as it says"),
    Gauge("tier_writable", ("tier",), "1 when a colder tier takes blocks"),
    Gauge("host_clean_bytes", (), "of host RAM, held by blocks that a colder tier has too"),
    Gauge("host_populated_bytes", (), "of host RAM, touched so far"),
    Gauge("edge_pending_bytes", ("edge",), "waiting or on their way over an edge"),
    Gauge("edge_bytes_per_second", ("edge",), "speed of an edge, as measured lately"),
    Gauge("tier_breaker_open", ("tier",), "1 while a colder tier is left alone because it does not answer"),
    Gauge(
        "ceiling_tokens",
        (),
        "of the tokens asked for so far, about how many an endless cache would have given (see the ceiling)",
    ),
    Gauge("blocks", (), "blocks that the index knows, over all tiers"),
    Gauge("leases", (), "leases that are out, pins among them"),
    Gauge("flights", (), "blocks that are being read from a colder tier"),
    Gauge("pinned_bytes", (), "held in host RAM by pins"),
    Gauge("pin_budget_bytes", (), "`host.pin_budget`"),
    Gauge("sessions", (), "engine processes that are connected, or that still hold slots"),
    Gauge("session_connections", (), "their connections"),
    Gauge("session_drafts", (), "of slots that they are writing"),
    Gauge(
        "tenant_bytes",
        ("tenant", "tier"),
        "taken by the tenants that hold most (32 at most); a digest for a name",
    ),
    Gauge("tenant_refused_blocks", ("tenant",), "of these tenants, not taken for their quota's sake so far"),
    Gauge("scrub_progress_ratio", (), "how far the round of the scrub over host RAM is"),
    Gauge("http_requests_under_way", (), "requests that the HTTP face is answering"),
)

HISTOGRAMS: Final = (
    Gauge(
        "edge_call_seconds",
        ("edge",),
        "how long a tier's calls took, each for a batch of blocks, however they ended",
    ),
)

PROCESS: Final = (
    Gauge("process_cpu_seconds_total", (), "seconds of CPU time so far, of user and system (a counter)"),
    Gauge("process_resident_memory_bytes", (), "RAM that it holds, host RAM as far as it was touched"),
    Gauge("process_virtual_memory_bytes", (), "of its address space"),
    Gauge("process_start_time_seconds", (), "when it started, in seconds since 1970"),
    Gauge("process_open_fds", (), "file descriptors that it has open"),
    Gauge("process_max_fds", (), "how many it may have open (`ulimit -n`)"),
)
"""Of ``prometheus_client``; without ``tierkv_`` before their names, as dashboards of any process expect them."""

Sessions = Callable[[], list[dict[str, Any]]]


class StoreCollector(Collector):
    """Any thread. Asks the store when it is scraped."""

    def __init__(self, store: TieredStore, sessions: Sessions, requests: Callable[[], int]) -> None:
        self._store = store
        self._sessions = sessions
        self._requests = requests

    def collect(self) -> Iterator[Metric]:
        values: Mapping[str, dict[Labels, float]] = self._gauges()
        for gauge in GAUGES:
            family = GaugeMetricFamily(PREFIX + gauge.name, _help(gauge.meaning), labels=gauge.labels)
            for labels, value in values.get(gauge.name, {}).items():
                family.add_metric(labels, value)
            yield family
        yield from self._counters()
        yield self._calls()

    def _calls(self) -> Metric:
        (its,) = HISTOGRAMS
        family = HistogramMetricFamily(PREFIX + its.name, _help(its.meaning), labels=its.labels)
        for edge in self._store.edges.values():
            for name, timing in ((edge.down, edge.write_times), (edge.up, edge.read_times)):
                times = timing.times()
                family.add_metric((name,), list(_cumulated(times)), times.sum_s)
        return family

    def _counters(self) -> Iterator[Metric]:
        counted: dict[str, dict[Labels, int]] = defaultdict(dict)
        for words, count in self._store.totals().items():
            counted[words[0]][words[1:]] = count
        for metric in METRICS:
            family = CounterMetricFamily(
                PREFIX + metric.name, f"{metric.unit}: {_help(metric.meaning)}", labels=metric.labels
            )
            values = counted.get(metric.name) or ({(): 0} if not metric.labels else {})
            for labels, count in values.items():
                family.add_metric(labels, count)
            yield family

    def _gauges(self) -> dict[str, dict[Labels, float]]:
        store, found = self._store, defaultdict[str, dict[Labels, float]](dict)
        health, stats = store.health(), store.stats()
        found["build_info"][(__version__,)] = 1
        found["ready"][()] = health.ready
        for state in STATES:
            found["health"][(state,)] = health.state == state
        tiers: Any = stats["tiers"]
        for tier, its in tiers.items():
            for name in ("capacity_bytes", "used_bytes", "blocks", "writable"):
                if isinstance(its.get(name), int | float):
                    found[f"tier_{name}"][(tier,)] = its[name]
        for name in ("clean_bytes", "populated_bytes"):
            found[f"host_{name}"][()] = tiers["host"][name]
        for edge in store.edges.values():
            found["tier_breaker_open"][(edge.name,)] = edge.tier.breaker.is_open
            for name, speed in ((edge.down, edge.write_speed), (edge.up, edge.read_speed)):
                found["edge_pending_bytes"][(name,)] = edge.queue.pending_bytes(name)
                if speed.bytes_per_s is not None:
                    found["edge_bytes_per_second"][(name,)] = speed.bytes_per_s
        tenants: Any = stats["tenants"]
        for name, its in tenants["tenants"].items():
            for tier, size_bytes in its["held_bytes"].items():
                found["tenant_bytes"][name, tier] = size_bytes
            found["tenant_refused_blocks"][(name,)] = its["refused_blocks"]
        asked = tokens_of(store.catalog).values()
        found["ceiling_tokens"][()] = (asked["ceiling"] or 0.0) * (asked["asked_blocks"] or 0)
        pins, scrub, sessions = store.pins.stats(), store.scrub, self._sessions()
        return found | {
            "blocks": {(): store.catalog.index.size},
            "leases": {(): len(store.leases)},
            "flights": {(): len(store.loader.flights)},
            "pinned_bytes": {(): _number(pins["pinned_bytes"])},
            "pin_budget_bytes": {(): store.pins.budget_bytes},
            "sessions": {(): len(sessions)},
            "session_connections": {(): sum(one["connections"] for one in sessions)},
            "session_drafts": {(): sum(one["drafts"] for one in sessions)},
            "scrub_progress_ratio": {(): _number(scrub.progress)},
            "http_requests_under_way": {(): self._requests()},
        }


class Exposition:
    """``text()`` is what ``/metrics`` answers."""

    def __init__(self, store: TieredStore, sessions: Sessions, requests: Callable[[], int]) -> None:
        self._registry = CollectorRegistry(auto_describe=False)
        self._registry.register(StoreCollector(store, sessions, requests))
        ProcessCollector(registry=self._registry)

    def text(self) -> bytes:
        return generate_latest(self._registry)


def _help(meaning: str) -> str:
    return meaning.replace("`", "")


def _number(value: object) -> float:
    return float(value) if isinstance(value, int | float) else 0.0


def _cumulated(times: Times) -> Iterator[tuple[str, int]]:
    """Buckets as Prometheus has them: each with all calls up to its bound."""
    bounds = (*(f"{bound_s:g}" for bound_s in BOUNDS_S), "+Inf")
    yield from zip(bounds, accumulate(times.buckets), strict=True)


def table(kind: str = "gauge", rows: Sequence[Gauge] = GAUGES, prefix: str = PREFIX) -> Iterator[str]:
    """The lines of a table in ``docs/metrics.md``."""
    yield f"| {kind} | labels | what it says |"
    yield "|---|---|---|"
    for gauge in rows:
        labels = ", ".join(f"`{label}`" for label in gauge.labels)
        yield f"| `{prefix}{gauge.name}` | {labels} | {gauge.meaning} |"
