"""vLLM: ``--kv-transfer-config '{"kv_connector": "TierKVConnector", "kv_connector_module_path":
"tierkv.engines.vllm", "kv_role": "kv_both", "kv_load_failure_policy": "recompute"}'``. See ``docs/engines/vllm.md``.

vLLM makes one connector in its scheduler's process and one in each worker. Both are this class; what they do is in
``vllm_scheduler`` and ``vllm_worker``. Here is what vLLM calls, and what keeps it from whatever may go wrong: a hook
that fails is logged and counted, and answers what a connector with nothing to say would.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any, Final, TypeVar

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorHandshakeMetadata,
    KVConnectorMetadata,
    KVConnectorRole,
    KVConnectorTransferResults,
    KVConnectorWorkerMetadata,
    SupportsHMA,
)

from tierkv.clock import SystemClock
from tierkv.daemon.connect import connect
from tierkv.daemon.remote import RemoteClient
from tierkv.engines import vllm_identity as identity
from tierkv.engines.vllm_asking import Asking
from tierkv.engines.vllm_events import KvEvents
from tierkv.engines.vllm_layout import CacheGroup, cache_groups_of
from tierkv.engines.vllm_logs import say_what_is_on, speak_as_vllm
from tierkv.engines.vllm_messages import StepMeta, WorkerFacts
from tierkv.engines.vllm_names import Names
from tierkv.engines.vllm_options import Options, options_of
from tierkv.engines.vllm_saving import Saves
from tierkv.engines.vllm_scheduler import SchedulerSide
from tierkv.engines.vllm_stats import Counts, TierKVMetrics, TierKVStats
from tierkv.engines.vllm_tables import Tables
from tierkv.engines.vllm_worker import Finished, WorkerSide
from tierkv.errors import LayoutError
from tierkv.executor import ThreadExecutor
from tierkv.logs import RareLog
from tierkv.supervision import Caught

if TYPE_CHECKING:
    import torch
    from vllm.config import VllmConfig
    from vllm.distributed.kv_events import KVCacheEvent
    from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorStats
    from vllm.forward_context import ForwardContext
    from vllm.v1.core.block_pool import BlockPool
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.metrics.cache_hit_source import CacheHitSource
    from vllm.v1.outputs import KVConnectorOutput
    from vllm.v1.request import Request

log = logging.getLogger("tierkv")
T = TypeVar("T")

CLOSE_S: Final = 3.0
NAME_S: Final = 10.0
"""So long a start waits for the name of the weights; a digest that was never made takes longer."""


class TierKVConnector(KVConnectorBase_V1, SupportsHMA):
    """Made by vLLM. Raises ``ConfigError`` at start for options that make no sense; nothing afterwards."""

    def __init__(
        self, vllm_config: VllmConfig, role: KVConnectorRole, kv_cache_config: KVCacheConfig
    ) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        speak_as_vllm()
        transfer = self._kv_transfer_config
        self._counts = Counts()
        self._rare = RareLog(SystemClock())
        self._options = options_of(
            transfer.kv_connector_extra_config,
            producer=transfer.is_kv_producer,
            consumer=transfer.is_kv_consumer,
        )
        self._hash_tokens: int = kv_cache_config.hash_block_size or vllm_config.cache_config.block_size
        identity.engine_blocks_of(self._options, self._hash_tokens)  # what does not fit is refused here
        self._scheme = identity.hash_scheme_of(vllm_config, self._options)
        self._hashes_images = identity.hashes_images(vllm_config)
        self._scheduler: SchedulerSide | None = None
        self._worker: WorkerSide | None = None
        self._names: Names | None = None
        self._pool: BlockPool | None = None
        self._executor: ThreadExecutor | None = None
        self._facts = WorkerFacts(trouble="its memory is not registered")
        self._closed = False
        self._missing: set[int] = set()
        """The engine's blocks that got nothing, to be asked for."""
        self._groups, self._trouble = self._cache_groups()
        if role is KVConnectorRole.SCHEDULER:
            self._say_what_is_off()
        self._client = self._connect(role)
        if role is KVConnectorRole.WORKER:
            self._worker = WorkerSide(self._client, _rank_of(vllm_config), self._counts)

    def _cache_groups(self) -> tuple[tuple[CacheGroup, ...], str | None]:
        """What can be stored of this model, or why nothing can."""
        parallel = self._vllm_config.parallel_config
        try:
            identity.check_parallel(self._vllm_config)
            return cache_groups_of(self._kv_cache_config, parallel.decode_context_parallel_size), None
        except LayoutError as error:
            return (), str(error)

    def _say_what_is_off(self) -> None:
        if self._trouble is not None:
            log.warning("vLLM: nothing is stored or loaded: %s", self._trouble)
        if self._kv_transfer_config.kv_load_failure_policy != "recompute":
            log.warning(
                "vLLM: kv_load_failure_policy is %r: a request whose blocks are lost on their way ends with an error; "
                'put "kv_load_failure_policy": "recompute" into --kv-transfer-config',
                self._kv_transfer_config.kv_load_failure_policy,
            )

    def _connect(self, role: KVConnectorRole) -> RemoteClient:
        owner = f"vllm {role.name.lower()}"
        options: Options = self._options
        if options.socket is not None:
            return connect(options.socket, owner=owner, salt=options.salt, quotas=options.quotas)
        settings = dict(options.settings)
        for tier, place in (("nvme", "nvme_path"), ("valkey", "valkey_url")):
            if settings.get(place):  # vLLM may end it without a word, and what was only in RAM would be gone
                settings.setdefault(f"{tier}_write", "through")
        private = f"vllm-{self._kv_transfer_config.engine_id}"
        return connect(private=private, owner=owner, salt=options.salt, **settings)

    def _guarded(self, name: str, otherwise: T, hook: Callable[..., T], *args: Any) -> T:
        """What a hook gives; ``otherwise`` when it fails. Its time is counted."""
        begun_s, idled_s = time.perf_counter(), self._idled_s()
        caught = Caught()
        result = otherwise
        with caught:
            result = hook(*args)
        self._counts.add("hook_s", time.perf_counter() - begun_s - (self._idled_s() - idled_s))
        if caught.error is not None:
            self._counts.add("hook_errors")
            self._rare.error(
                name, "vLLM: %s failed, and is passed over: %r", name, caught.error, cause=caught.error
            )
        return result

    def _idled_s(self) -> float:
        """What a hook waited where the engine had nothing to compute takes nothing from it."""
        side = self._worker or self._scheduler
        return 0.0 if side is None else side.idled_s

    # -- start ----------------------------------------------------------------------------------------------------

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        self._guarded("register_kv_caches", None, self._register, kv_caches)

    def _register(self, caches: dict[str, torch.Tensor]) -> None:
        if self._trouble is not None or self._worker is None:
            self._facts = WorkerFacts(trouble=self._trouble)
            return
        self._facts = self._worker.register(
            caches,
            self._groups,
            self._kv_cache_config.num_blocks,
            self._vllm_config.compilation_config.static_forward_context,
            next(iter(caches.values())).device.type if caches else "none",
        )
        if self._facts.trouble is not None:
            log.warning("vLLM: nothing is stored or loaded: %s", self._facts.trouble)

    def get_handshake_metadata(self) -> KVConnectorHandshakeMetadata | None:
        return self._facts

    def set_xfer_handshake_metadata_pp_aware(
        self, metadata: dict[tuple[int, int], KVConnectorHandshakeMetadata]
    ) -> None:
        self._guarded("set_xfer_handshake_metadata", None, self._begin, metadata)

    def bind_gpu_block_pool(self, gpu_block_pool: BlockPool) -> None:
        self._pool = gpu_block_pool

    def _begin(self, told: dict[tuple[int, int], Any]) -> None:
        """The workers have said what their memory looks like: now blocks can have names."""
        facts = [its for its in told.values() if isinstance(its, WorkerFacts)]
        trouble = next((its.trouble for its in facts if its.trouble is not None), None)
        if self._trouble is not None or trouble is not None or not facts or self._pool is None:
            self._trouble = self._trouble or trouble or "the workers have not told of their memory"
            return
        if any(its != facts[0] for its in facts):
            self._trouble = "its ranks lay out their memory differently"
            log.warning("vLLM: nothing is stored or loaded: %s", self._trouble)
            return
        config, options = self._vllm_config, self._options
        try:
            layout = identity.layout_of(config, self._groups, facts[0], self._hash_tokens, options)
        except LayoutError as error:
            self._trouble = str(error)
            log.warning("vLLM: nothing is stored or loaded: %s", error)
            return
        self._names = Names(
            self._client,
            lambda: identity.weights_of(config, options),
            lambda weights, epoch: identity.spec_of(config, weights, layout, self._scheme, epoch),
            identity.renewed,
        )
        tables = Tables(layout, self._groups, self._pool.null_block.block_id)
        self._executor = ThreadExecutor(self._client.clock)
        self._scheduler = SchedulerSide(
            Asking(self._client, self._executor, self._names, options.grace_s),
            Saves(self._pool, tables, layout.ranks, options.save_budget),
            tables,
            self._names,
            options,
            self._client.link.lease_s,
            self._counts,
        )
        publishing = config.kv_events_config
        if publishing is not None and publishing.enable_kv_cache_events:
            self._scheduler.events = KvEvents(self._client, self._hash_tokens, layout.engine_blocks)
        say_what_is_on(layout, options, self._client.link.path)
        self._names.find(NAME_S)

    # -- the scheduler's side -------------------------------------------------------------------------------------

    @property
    def requires_kv_delivery(self) -> bool:
        return False  # what is not delivered is computed

    def on_new_request(self, request: Request) -> None:
        if self._scheduler is not None and (self._hashes_images or not request.mm_features):
            self._guarded("on_new_request", None, self._scheduler.on_new_request, request)

    def get_num_new_matched_tokens(
        self, request: Request, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        if self._scheduler is None:
            return 0, False
        nothing: tuple[int | None, bool] = (0, False)
        return self._guarded("matched", nothing, self._scheduler.matched, request, num_computed_tokens)

    def update_state_after_alloc(
        self, request: Request, blocks: KVCacheBlocks, num_external_tokens: int
    ) -> None:
        if self._scheduler is None:
            return
        begun = self._guarded(
            "after_alloc", False, self._scheduler.after_alloc, request, blocks, num_external_tokens
        )
        if not begun and num_external_tokens > 0:
            self._scheduler.refuse(request, blocks)

    def get_external_cache_hit_sources(
        self, request: Request, num_external_tokens: int
    ) -> dict[CacheHitSource, int]:
        if self._scheduler is None or not num_external_tokens:
            return {}
        return self._guarded("sources", {}, self._scheduler.sources, request, num_external_tokens)

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> KVConnectorMetadata:
        if self._scheduler is None:
            return StepMeta()
        self._guarded("plan", None, self._scheduler.plan, scheduler_output)
        return self._scheduler.take(scheduler_output)

    def update_connector_output(self, connector_output: KVConnectorOutput) -> None:
        if self._scheduler is not None:
            self._guarded("update", None, self._scheduler.update, connector_output)

    def request_finished(self, request: Request, block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        return self.request_finished_all_groups(request, (block_ids,))

    def request_finished_all_groups(
        self, request: Request, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        if self._scheduler is None:
            return False, None
        return False, self._guarded("finished", None, self._scheduler.finished, request, block_ids)

    def has_pending_block_frees(self) -> bool:
        return self._scheduler is not None and self._scheduler.holds_pages

    def has_pending_push_work(self) -> bool:
        return self._scheduler is not None and self._scheduler.busy

    def take_events(self) -> Iterable[KVCacheEvent]:
        events = None if self._scheduler is None else self._scheduler.events
        nothing: Iterable[KVCacheEvent] = ()
        return nothing if events is None else self._guarded("take_events", nothing, events.take)

    def reset_cache(self) -> bool | None:
        if self._scheduler is None:
            return True
        return self._guarded("reset_cache", False, self._scheduler.reset)

    # -- a worker's side ------------------------------------------------------------------------------------------

    def start_load_kv(self, forward_context: ForwardContext, **kwargs: Any) -> None:
        if self._worker is not None:
            self._guarded("start_loads", None, self._worker.start_loads, self._meta())

    def wait_for_layer_load(self, layer_name: str) -> None:
        return

    def save_kv_layer(self, layer_name: str, kv_layer: Any, attn_metadata: Any, **kwargs: Any) -> None:
        return

    def wait_for_save(self) -> None:
        if self._worker is not None:
            self._guarded("start_saves", None, self._worker.start_saves, self._meta())

    def _meta(self) -> StepMeta:
        meta = self._connector_metadata
        return meta if isinstance(meta, StepMeta) else StepMeta()

    def get_transfer_results(self, finished_req_ids: set[str]) -> KVConnectorTransferResults:
        if self._worker is None:
            return KVConnectorTransferResults()
        nothing: Finished = (set(), set(), set())
        idle = not self._meta().computes
        over, missing, failed = self._guarded("finished", nothing, self._worker.finished, idle)
        by_request = len(self._kv_cache_config.kv_cache_groups) > 1  # vLLM knows no block by its number there
        self._missing = set() if by_request else missing
        return KVConnectorTransferResults(
            finished_recving=over, failed_recving=failed if by_request else set()
        )

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, set[str] | None]:
        return None, self.get_transfer_results(finished_req_ids).finished_recving

    def get_block_ids_with_load_errors(self) -> set[int]:
        missing, self._missing = self._missing, set()
        return missing

    def build_connector_worker_meta(self) -> KVConnectorWorkerMetadata | None:
        return None if self._worker is None else self._worker.report()

    # -- facts and the end ----------------------------------------------------------------------------------------

    def get_kv_connector_stats(self) -> KVConnectorStats | None:
        return self._counts.take()

    @classmethod
    def build_kv_connector_stats(cls, data: dict[str, Any] | None = None) -> KVConnectorStats | None:
        return TierKVStats(data=data or {})

    @classmethod
    def build_prom_metrics(
        cls, vllm_config: VllmConfig, metric_types: Any, labelnames: Any, per_engine_labelvalues: Any
    ) -> TierKVMetrics:
        return TierKVMetrics(vllm_config, metric_types, labelnames, per_engine_labelvalues)

    def shutdown(self) -> None:
        if self._closed:
            return
        self._closed = True
        if self._worker is not None:
            self._guarded("close", None, self._worker.close, CLOSE_S)
        if self._scheduler is not None and self._scheduler.events is not None:
            self._scheduler.events.close()
        if self._executor is not None:
            stuck: list[str] = []
            self._guarded("close", stuck, self._executor.close, CLOSE_S)
        self._guarded("close", None, self._client.close, CLOSE_S)


def _rank_of(config: VllmConfig) -> int:
    """Among the ranks that share a block, on this host."""
    from vllm.distributed.parallel_state import get_pp_group, get_tp_group

    return int(get_pp_group().rank_in_group * config.parallel_config.tensor_parallel_size) + int(
        get_tp_group().rank_in_group
    )
