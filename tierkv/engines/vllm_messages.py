"""What the scheduler's side of the connector and its workers' side say to each other, once a step each way.

Plain data, which vLLM carries: leases as loans (slots and generations), chains as the engine's own hashes with what
they leave out. A worker keeps nothing of a request but the copies that are on their way.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorHandshakeMetadata,
    KVConnectorMetadata,
    KVConnectorWorkerMetadata,
)

from tierkv.keys import Extras, NamespaceSpec
from tierkv.loans import Loan
from tierkv.retention import Retention

PageTable = tuple[tuple[tuple[int, ...], ...], ...]
"""``table[i][group]``: the engine's pages of the i-th block in that layer group of the store's layout."""


@dataclass(frozen=True)
class Prompt:
    """The full engine blocks of a request by the engine's hashes, with what these leave out. ``num_tokens`` is the
    length of the whole sequence."""

    hashes: bytes
    """All in one, each ``hash_bytes`` long."""
    hash_bytes: int
    num_tokens: int
    extras: Extras
    spec: NamespaceSpec
    """Of the namespace that the blocks are named in."""

    def engine_hashes(self) -> list[bytes]:
        step = self.hash_bytes
        return [self.hashes[at : at + step] for at in range(0, len(self.hashes), step)]


@dataclass(frozen=True)
class LoadJob:
    """Blocks that a request waits for."""

    request_id: str
    prompt: Prompt
    loan: Loan
    tables: tuple[list[int], ...]
    """The engine's block tables of the request, as far as the loan goes."""
    skip: int
    """Leading engine blocks (in units of the hashes) that the engine has itself."""


@dataclass(frozen=True)
class SaveJob:
    """Blocks ``first ..`` of a prompt, whose pages stay as they are until every rank has said that it is done."""

    number: int
    prompt: Prompt
    first: int
    pages: PageTable
    absent: tuple[int, ...]
    retention: Retention


@dataclass
class StepMeta(KVConnectorMetadata):
    """From the scheduler to every worker."""

    loads: list[LoadJob] = field(default_factory=list)
    saves: list[SaveJob] = field(default_factory=list)
    refused: dict[str, list[int]] = field(default_factory=dict)
    """Requests whose load came to nothing before it began, with the engine's blocks that they wait for."""
    computes: bool = False
    """The step has a forward pass."""


@dataclass
class SaveReport(KVConnectorWorkerMetadata):
    """From the workers to the scheduler: saves that are over on so many ranks, and what came of them."""

    done: dict[int, int] = field(default_factory=dict)
    stored: dict[int, int] = field(default_factory=dict)
    """Blocks that are in host RAM now, by job; the least of all ranks."""

    def aggregate(self, other: KVConnectorWorkerMetadata) -> SaveReport:
        assert isinstance(other, SaveReport)
        merged = SaveReport(dict(self.done), dict(self.stored))
        for number, ranks in other.done.items():
            merged.done[number] = merged.done.get(number, 0) + ranks
        for number, blocks in other.stored.items():
            merged.stored[number] = min(merged.stored.get(number, blocks), blocks)
        return merged


@dataclass(frozen=True)
class LayerFacts:
    """How a worker found the pages of one layer in its memory."""

    shape: tuple[int, ...]
    """Of a page."""
    dtype: str
    page_bytes: int


@dataclass
class WorkerFacts(KVConnectorHandshakeMetadata):
    """What a worker has found when the engine's memory was registered: part of the names of all bytes."""

    device: str = ""
    kernels: str = ""
    """Attention backends and instruction sets: they lay out the inside of a page."""
    layers: dict[str, LayerFacts] = field(default_factory=dict)
    trouble: str | None = None
    """Why this worker cannot load or save."""
