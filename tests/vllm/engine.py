"""A real vLLM engine in this process (or in three), with the connector or without, for a scenario."""

from __future__ import annotations

import os
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import tierkv
from tests.vllm.models import model
from tierkv.daemon.private import PrivateClient
from tierkv.daemon.remote import RemoteClient

PATIENCE_S = 120.0
"""Bounds every wait of a scenario; nothing is expected to take anywhere near as long."""
SALTED = 7
"""Any number that no other prompt begins with."""


@dataclass(frozen=True)
class Answer:
    """What came of one prompt."""

    tokens: list[int]
    cached: int
    """Tokens of the prompt that were not computed."""
    reason: str | None
    seconds: float
    queued_s: float
    """From its arrival in the engine to its first step."""

    def plain(self) -> dict[str, Any]:
        return asdict(self)


def prompt(tokens: int, seed: int = 0, vocabulary: int = 2048) -> list[int]:
    """The same in every process; of two seeds no beginning is alike."""
    return random.Random(seed).choices(range(vocabulary), k=tokens)


def eventually(holds: Callable[[], object], what: str) -> None:
    until_s = time.monotonic() + PATIENCE_S
    while not holds():
        assert time.monotonic() < until_s, f"not in {PATIENCE_S:.0f} s: {what}"
        time.sleep(0.02)


class Engine:
    """``connector``: its extra configuration, or ``None`` for vLLM alone."""

    def __init__(
        self,
        connector: dict[str, Any] | None,
        *,
        name: str = "llama",
        processes: int = 1,
        kv_role: str = "kv_both",
        kv_space_gib: float = 1,
        policy: str = "recompute",
        **options: Any,
    ) -> None:
        os.environ["VLLM_CPU_KVCACHE_SPACE"] = str(int(max(1, kv_space_gib)))
        os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0" if processes == 1 else "1"
        if options.get("tensor_parallel_size", 1) > 1:
            os.environ["VLLM_CPU_OMP_THREADS_BIND"] = "nobind"  # a rank for each NUMA node, else it refuses
        from vllm import LLM
        from vllm.config import KVTransferConfig

        self.id = f"test-{os.getpid()}-{time.monotonic_ns()}"
        transfer = None
        self.extra = connector
        if connector is not None:
            transfer = KVTransferConfig(
                kv_connector="TierKVConnector",
                kv_connector_module_path="tierkv.engines.vllm",
                kv_role=kv_role,
                kv_load_failure_policy=policy,
                engine_id=self.id,
                kv_connector_extra_config=connector,
            )
        chosen: dict[str, Any] = {
            "dtype": "float32",
            "block_size": 32,
            "max_model_len": 2048,
            "skip_tokenizer_init": True,
            "enforce_eager": True,
            "disable_log_stats": False,
            "generation_config": "vllm",
            **options,
        }
        self.one_process = processes == 1
        self.llm = LLM(model=str(model(name)), kv_transfer_config=transfer, seed=0, **chosen)

    # -- prompts --------------------------------------------------------------------------------------------------

    def sampling(self, max_tokens: int = 8, **wishes: Any) -> Any:
        from vllm import SamplingParams

        extra = {"extra_args": {"kv_transfer_params": wishes["params"]}} if wishes.get("params") else {}
        return SamplingParams(
            temperature=0, max_tokens=max_tokens, min_tokens=max_tokens, detokenize=False, **extra
        )

    def ask(
        self,
        prompts: Sequence[Sequence[int]],
        max_tokens: int = 8,
        *,
        salt: str | None = None,
        lora: Any = None,
        params: dict[str, Any] | None = None,
    ) -> list[Answer]:
        """All at once."""
        given = [{"prompt_token_ids": list(one)} | ({"cache_salt": salt} if salt else {}) for one in prompts]
        return self.answer(given, max_tokens, lora=lora, params=params)

    def answer(
        self,
        given: Sequence[dict[str, Any]],
        max_tokens: int = 8,
        *,
        lora: Any = None,
        params: dict[str, Any] | None = None,
    ) -> list[Answer]:
        """The same, of prompts in vLLM's words."""
        begun_s = time.monotonic()
        outputs = self.llm.generate(
            list(given), self.sampling(max_tokens, params=params), use_tqdm=False, lora_request=lora
        )
        took_s = time.monotonic() - begun_s
        return [
            Answer(
                list(one.outputs[0].token_ids),
                one.num_cached_tokens or 0,
                one.outputs[0].finish_reason,
                round(took_s, 3),
                round(_queued_s(one), 3),
            )
            for one in outputs
        ]

    def one(self, tokens: Sequence[int], max_tokens: int = 8, **options: Any) -> Answer:
        return self.ask([tokens], max_tokens, **options)[0]

    def reset(self) -> None:
        """vLLM's own cache is empty afterwards; the store's is not. An engine lets go of the last pages one step
        later, so some steps are made."""

        def is_reset() -> bool:
            self.llm.generate([{"prompt_token_ids": [1]}], self.sampling(1), use_tqdm=False)
            return bool(self.llm.reset_prefix_cache())

        self.settle()
        eventually(is_reset, "the engine's own cache is empty")

    # -- inside ---------------------------------------------------------------------------------------------------

    @property
    def connector(self) -> Any:
        """The scheduler's half; of an engine in this process."""
        assert self.one_process
        return self.llm.llm_engine.engine_core.engine_core.scheduler.connector

    @property
    def scheduler(self) -> Any:
        assert self.one_process
        return self.llm.llm_engine.engine_core.engine_core.scheduler

    def settle(self) -> None:
        """Until all that was to be saved is."""
        if self.extra is None or not self.one_process:
            time.sleep(0 if self.extra is None else 0.5)
            return

        def idle() -> bool:
            if self.scheduler.has_requests():
                self.llm.llm_engine.step()
            return not self.scheduler.has_requests()

        eventually(idle, "the engine is idle")

    def counts(self) -> dict[str, float]:
        """What the connector has counted, over all of vLLM's processes, as Prometheus is told."""
        found = {}
        for metric in self.llm.get_metrics():
            if metric.name.startswith("vllm:tierkv_"):
                name = metric.name.removeprefix("vllm:tierkv_").removesuffix("_total")
                found[name] = found.get(name, 0.0) + float(getattr(metric, "value", 0.0))
        return found

    def store(self) -> RemoteClient:
        """Another client of the engine's store. To be closed."""
        assert self.extra is not None
        if "socket" in self.extra:
            return tierkv.connect(self.extra["socket"], owner="test")
        return tierkv.connect(private=f"vllm-{self.id}", owner="test")

    def sidecar_pid(self) -> int:
        with self.store() as client:
            assert isinstance(client, PrivateClient)
            return int(client.settings(time.monotonic() + PATIENCE_S)["pid"])

    def check_nothing_is_held(self) -> None:
        """Leases, drafts and pages are back."""
        self.settle()
        with self.store() as client:
            eventually(lambda: not client.stats()["leases"], "no lease is held")
        if self.one_process:
            pool = self.scheduler.kv_cache_manager.block_pool
            assert pool.get_num_free_blocks() == pool.num_gpu_blocks - 1, "pages are held"
            side = self.connector._scheduler
            assert not side._requests, side._requests
            assert not side._waiting
            assert not len(side._saves)

    def close(self) -> None:
        self.llm.llm_engine.engine_core.shutdown()


def _queued_s(output: Any) -> float:
    stats = output.metrics
    return stats.scheduled_ts - stats.queued_ts if stats is not None else 0.0


def flush(client: RemoteClient, tier: str) -> None:
    report = client.flush(tier).result(PATIENCE_S)
    assert report.failed == 0, report


def only_in(engine: Engine, tier: str) -> None:
    """All that is stored is in that tier, and nowhere in host RAM."""
    with engine.store() as client:
        flush(client, tier)
        client.evict("host")
