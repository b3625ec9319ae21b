"""What the connector counts, in vLLM's own statistics: its log, its Prometheus face."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from typing import Any, Final

from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorPromMetrics, KVConnectorStats

COUNTED: Final[Mapping[str, str]] = {
    "questions": "Questions to the store about requests.",
    "late": "Requests that computed because the store did not answer in time.",
    "loads": "Requests whose blocks were loaded.",
    "load_tokens": "Tokens that were loaded instead of computed.",
    "load_bytes": "Bytes copied from host RAM into the engine's pages.",
    "load_s": "Seconds from the start of a load to its end, added up.",
    "failed_loads": "Loads that came to nothing; the request computed instead.",
    "saved_blocks": "Blocks of the store that were saved, or were there already.",
    "unsaved_blocks": "Blocks for which there was no room, or no daemon.",
    "stray": "Completions that nobody waited for; they change nothing.",
    "hook_errors": "Errors inside the connector; the engine went on without it.",
    "hook_s": "Seconds that the engine's own threads spent in the connector.",
    "step_s": "Seconds of engine steps with a forward pass.",
}


class Counts:
    """Adds up; several threads may add. ``take`` gives what came since the last one."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._new: dict[str, float] = {}
        self.total: dict[str, float] = {}

    def add(self, name: str, count: float = 1) -> None:
        with self._lock:
            self._new[name] = self._new.get(name, 0) + count
            self.total[name] = self.total.get(name, 0) + count

    def take(self) -> TierKVStats | None:
        if not self._new:
            return None
        with self._lock:
            new, self._new = self._new, {}
        return TierKVStats(data=dict(new))


class TierKVStats(KVConnectorStats):
    """``data``: what was counted, by the names of ``COUNTED``."""

    data: dict[str, float]

    def reset(self) -> None:
        self.data = {}

    def aggregate(self, other: KVConnectorStats) -> TierKVStats:
        for name, count in other.data.items():
            self.data[name] = self.data.get(name, 0) + count
        return self

    def reduce(self) -> dict[str, int | float]:
        return {name: round(count, 6) for name, count in self.data.items() if name in COUNTED}

    def is_empty(self) -> bool:
        return not any(self.data.values())


class TierKVMetrics(KVConnectorPromMetrics):
    """``vllm:tierkv_*_total`` for each engine."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._counters = {}
        for name, meaning in COUNTED.items():
            metric = self._counter_cls(
                name=f"vllm:tierkv_{name}", documentation=meaning, labelnames=self._labelnames
            )
            self._counters[name] = {
                engine: metric.labels(*values) for engine, values in self.per_engine_labelvalues.items()
            }

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        for name, count in transfer_stats_data.items():
            if name in self._counters and count > 0:
                self._counters[name][engine_idx].inc(count)
