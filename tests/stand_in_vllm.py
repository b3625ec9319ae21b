"""The two halves of the vLLM connector where no vLLM is installed: they need some of vLLM's classes to derive their
messages and counts from, and nothing else."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from types import ModuleType
from typing import Any, Final

BASE: Final = "vllm.distributed.kv_transfer.kv_connector.v1.base"
CLASSES: Final = ("KVConnectorHandshakeMetadata", "KVConnectorMetadata", "KVConnectorWorkerMetadata")
METRICS: Final = "vllm.distributed.kv_transfer.kv_connector.v1.metrics"
METRIC_CLASSES: Final = ("KVConnectorStats", "KVConnectorPromMetrics")
MODULES: Final = (
    "vllm_messages", "vllm_layout", "vllm_tables", "vllm_saving", "vllm_stats", "vllm_worker", "vllm_identity",
    "vllm_events", "vllm_scheduler",
)  # fmt: skip


def worker_modules() -> dict[str, Any]:
    """The connector's modules, by name. Nothing of a stand-in is left to be found as vLLM."""
    with _vllm():
        return {name: import_module(f"tierkv.engines.{name}") for name in MODULES}


@contextmanager
def _vllm() -> Iterator[None]:
    try:
        import_module(BASE)
    except ModuleNotFoundError:
        before = dict(sys.modules)
    else:
        yield
        return
    made = {name: ModuleType(name) for name in (*_packages(BASE), BASE, METRICS)}
    for module, classes in ((BASE, CLASSES), (METRICS, METRIC_CLASSES)):
        for name in classes:
            setattr(made[module], name, type(name, (), {}))
    sys.modules.update(made)
    try:
        yield
    finally:
        for name in made:
            if name in before:  # a folder of that name is found as a package without content
                sys.modules[name] = before[name]
            else:
                del sys.modules[name]


def _packages(module: str) -> Iterator[str]:
    words = module.split(".")
    for end in range(1, len(words)):
        yield ".".join(words[:end])
