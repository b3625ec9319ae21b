"""Counters that add up: only growing, one increment for each thing that happened, by tier, direction and reason.

Ratios are for the reader to work out. A success is counted after the log record or the server's OK, never before.
``METRICS`` lists all counters; ``docs/metrics.md`` is made of it.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping, Sequence
from typing import Final, NamedTuple

Labels = tuple[str, ...]


class Metric(NamedTuple):
    """A counter as people should know it."""

    name: str
    labels: tuple[str, ...]
    unit: str
    """``blocks``: whole families; ``parts``: one layer group on one rank of a block."""
    meaning: str


METRICS: Final = (
    Metric("asked_blocks_total", (), "blocks", "asked for, each request once (see the ceiling)"),
    Metric("hit_blocks_total", ("tier",), "blocks", "given to a request, by the tier where it found them"),
    Metric("asked_tokens_total", (), "tokens", "of the blocks that were asked for"),
    Metric("hit_tokens_total", ("tier",), "tokens", "of the blocks that were given: need not be computed"),
    Metric(
        "missed_blocks_total", ("reason",), "blocks", "a request that loaded did not get, by the first reason"
    ),
    Metric("leased_blocks_total", (), "blocks", "leased; every lease counts"),
    Metric("match_total", (), "calls", "looks at the index, of `match` and at the end of `prefetch`"),
    Metric("match_blocks_total", (), "blocks", "found by them"),
    Metric(
        "stored_blocks_total", ("tier",), "blocks", "registered by `put`, `commit` or `offload`, by each rank"
    ),
    Metric("stored_bytes_total", ("tier",), "bytes", "payload of these"),
    Metric(
        "dropped_blocks_total", ("tier", "reason"), "blocks", "offered and not stored, or a last copy lost"
    ),
    Metric("arrived_blocks_total", ("tier",), "blocks", "became whole in a tier; one event `arrived` each"),
    Metric("evicted_blocks_total", ("tier", "reason"), "blocks", "left a tier; one event `left` each"),
    Metric("usable_blocks_total", (), "blocks", "became usable; one event `stored` each"),
    Metric("gone_blocks_total", ("reason",), "blocks", "no longer in any tier; one event `removed` each"),
    Metric(
        "never_served_blocks_total", (), "blocks", "of these, cleared ones aside, never leased since stored"
    ),
    Metric("expired_blocks_total", (), "blocks", "taken out because their time was over"),
    Metric(
        "written_blocks_total", ("tier", "outcome"), "parts", "written to a colder tier, by how that ended"
    ),
    Metric("written_bytes_total", ("tier",), "bytes", "stored there, after the codec; only what is `done`"),
    Metric(
        "encoded_blocks_total",
        ("tier", "outcome"),
        "parts",
        "met an edge's codec: `encoded`; `kept` raw, for they did not shrink; `passed_over`, for the link is quicker; "
        "`not_asked_for`, for the codec is lossy and their namespace does not name it",
    ),
    Metric("admission_rejected_total", ("tier",), "blocks", "its admission policy did not want"),
    Metric("read_blocks_total", ("tier", "outcome"), "parts", "read from a colder tier, by how that ended"),
    Metric("read_bytes_total", ("tier",), "bytes", "payload that arrived and was verified"),
    Metric("corrupt_blocks_total", ("tier", "reason"), "parts", "came back and did not verify"),
    Metric("probed_blocks_total", ("tier",), "parts", "asked a server about"),
    Metric("promotion_decisions_total", ("tier", "decision"), "blocks", "weighed by the promotion policy"),
    Metric(
        "load_cut_total", ("reason",), "blocks", "a request wanted from a colder tier and did not ask it for"
    ),
    Metric("load_deadline_total", (), "loads", "ended by their deadline"),
    Metric("recovered_unreachable_total", ("tier", "reason"), "parts", "a restart found and could not use"),
    Metric(
        "onboarded_parts_total", ("outcome",), "parts", "copied into an engine's pages, by how that ended"
    ),
    Metric("leases_overdue_total", (), "leases", "past their deadline and reported"),
    Metric(
        "stray_completions_total",
        ("what",),
        "completions",
        "late, double or unknown ones; they had no effect",
    ),
    Metric(
        "pin_over_budget_blocks_total",
        (),
        "blocks",
        "were there and not pinned: `host.pin_budget` was used up",
    ),
    Metric("announcements_total", ("end",), "times", "an announcement ended, by how"),
    Metric("watches_total", ("end",), "times", "a watch ended, by how"),
    Metric("scrubbed_blocks_total", ("tier",), "blocks", "in host RAM, checked by the scrub"),
    Metric("scrubbed_bytes_total", ("tier",), "bytes", "payload of these"),
    Metric("threads_restarted_total", ("lane",), "threads", "died and were replaced"),
    Metric("policy_failures_total", ("duty",), "times", "a policy failed and a built-in one took its place"),
    Metric("breaker_opened_total", ("tier",), "times", "a tier was left alone because it did not answer"),
)


class Counters:
    """Named counters with up to three labels. Thread-safe; an increment takes well under a microsecond."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._values: dict[Labels, int] = {}

    def add(self, amount: int, *labels: str) -> None:
        """``add(4096, "read_bytes_total", "nvme")``: the first label is the counter's name."""
        with self._lock:
            self._values[labels] = self._values.get(labels, 0) + amount

    def add_all(self, amounts: Sequence[tuple[int, Labels]]) -> None:
        """Several at once, each with its labels."""
        with self._lock:
            values = self._values
            for amount, labels in amounts:
                values[labels] = values.get(labels, 0) + amount

    def get(self, *labels: str) -> int:
        return self._values.get(labels, 0)

    def sum(self, name: str) -> int:
        """Over all labels of a counter."""
        with self._lock:
            return sum(value for labels, value in self._values.items() if labels[0] == name)

    def snapshot(self) -> Mapping[Labels, int]:
        with self._lock:
            return dict(self._values)


def table() -> Iterator[str]:
    """The lines of the table in ``docs/metrics.md``."""
    yield "| counter | labels | unit | what it counts |"
    yield "|---|---|---|---|"
    for metric in METRICS:
        labels = ", ".join(f"`{label}`" for label in metric.labels)
        yield f"| `{metric.name}` | {labels} | {metric.unit} | {metric.meaning} |"
