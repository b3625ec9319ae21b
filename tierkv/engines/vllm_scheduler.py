"""The scheduler's half of the connector: what to load for whom, what to save when. It sends and looks; for an answer
that is just coming it waits a millisecond a step at most, for all requests together; more where nothing computes.

    on_new_request                the question goes out, while the request still waits in the engine's queue
    get_num_new_matched_tokens    "ask again" until it is answered or its time is over
    update_state_after_alloc      the lease becomes a loan to the workers
    build_connector_meta          blocks that this step fills are saved behind its forward pass
    update_connector_output       loads and saves that are over: leases and pages are given back

One thread, the engine's.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, Final

from tierkv.engines.vllm_asking import Asking, Purpose, Question
from tierkv.engines.vllm_events import KvEvents
from tierkv.engines.vllm_held import Held, use_of
from tierkv.engines.vllm_messages import LoadJob, Prompt, SaveReport, StepMeta
from tierkv.engines.vllm_names import Names
from tierkv.engines.vllm_options import NO_WISHES, Options, Wishes, wishes_of
from tierkv.engines.vllm_saving import Saves
from tierkv.engines.vllm_stats import Counts
from tierkv.engines.vllm_tables import Tables
from tierkv.errors import ConfigError
from tierkv.handles import Lease
from tierkv.loans import lend
from tierkv.watching import Announcement

if TYPE_CHECKING:
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.metrics.cache_hit_source import CacheHitSource
    from vllm.v1.outputs import KVConnectorOutput
    from vllm.v1.request import Request

log = logging.getLogger("tierkv")

STEP_BUDGET_S: Final = 0.001
"""So long a step of the engine may look for answers, for all of its requests together."""
MOST_WAITING: Final = 16
"""Requests in the queue whose blocks are held ahead of their turn; those of more are only brought to host RAM."""
PREFILL_TOKENS: Final = 64
"""A step of so many tokens tells how fast the engine computes prompts."""
LEASE_AGE: Final = 0.5
"""A lease that has waited for this share of what the store allows is asked for anew."""


class SchedulerSide:
    """Made when the workers have said how their memory looks."""

    def __init__(
        self,
        asking: Asking,
        saves: Saves,
        tables: Tables,
        names: Names,
        options: Options,
        lease_s: float,
        counts: Counts,
    ) -> None:
        self._asking = asking
        self._saves = saves
        self._names = names
        self._tables = tables
        self._layout = tables.layout
        self._options = options
        self._most_held_s = LEASE_AGE * lease_s
        self.counts = counts
        self.events: KvEvents | None = None
        """Where vLLM has them on."""
        self._requests: dict[str, Held] = {}
        self._meta = StepMeta()
        self._waiting = 0
        """Questions that hold blocks, or will."""
        self._computing: set[str] = set()
        """Requests of the last step that are not over."""
        self._spent_s = 0.0
        """Of this step's budget."""
        self.idled_s = 0.0
        """Waited where there was nothing to compute."""
        self._drop_again_s = 0.0
        self._announced: dict[str, Announcement] = {}
        """Of requests whose blocks are not all saved."""
        self._began_s = 0.0
        self._step_tokens = 0

    # -- a request comes ------------------------------------------------------------------------------------------

    def on_new_request(self, request: Request) -> None:
        if getattr(request, "resumable", False):  # its tokens may still be taken back
            return
        held = Held(request, self._wishes_of(request), use_of(request))
        self._requests[request.request_id] = held
        if self._wants_load(held):
            self._ask(held, Purpose.HOLD if self._waiting < MOST_WAITING else Purpose.BRING)
        elif held.use is not None or self._announces(held):
            self._ask(held, Purpose.NAME)

    def _wishes_of(self, request: Request) -> Wishes:
        try:
            return wishes_of(request.kv_transfer_params)
        except ConfigError as error:
            log.warning("request %s: %s; passed over", request.request_id, error)
            return NO_WISHES

    def _wants_load(self, held: Held) -> bool:
        if not self._options.load or not held.wishes.load or held.request.skip_reading_prefix_cache:
            return False
        return len(held.request.block_hashes) >= self._layout.engine_blocks

    def _announces(self, held: Held) -> bool:
        return self._options.save and held.wishes.announce and not held.preemptions

    def _ask(self, held: Held, purpose: Purpose) -> Question:
        request, wishes = held.request, held.wishes
        holds = purpose is Purpose.HOLD
        held.question = Question(
            request.request_id,
            list(request.block_hashes),
            request.num_tokens,
            held.use,
            self._options.load_timeout_s if wishes.timeout_s is None else wishes.timeout_s,
            retention=wishes.retention,
            purpose=purpose,
            watch_s=self._options.watch_s if wishes.watch and holds else None,
            announce_s=self._options.watch_s if self._announces(held) else None,
        )
        self._waiting += holds
        self.counts.add("questions")
        self._asking.ask(held.question)
        return held.question

    # -- what it need not compute ---------------------------------------------------------------------------------

    def matched(self, request: Request, local_tokens: int) -> tuple[int | None, bool]:
        held = self._requests.get(request.request_id)
        if held is None:
            return 0, False
        if held.preemptions != request.num_preemptions:
            self._begin_anew(held)
        held.local_tokens = local_tokens
        if held.settled or not self._wants_load(held):
            return 0, False
        if held.use is None and self._most_tokens(request) - local_tokens < self._options.min_load_tokens:
            self._settle(held)  # whatever the answer will be, the engine has as much
            return 0, False
        question = held.question
        if question is None or (question.answered and question.purpose is not Purpose.HOLD):
            self._take_name(held)
            question = self._ask(held, Purpose.HOLD)
        if not self._look(question):
            if time.monotonic() < question.by_s:
                return None, False
            self.counts.add("late")
            self._settle(held)
            return 0, False
        lease = question.lease
        if question.held_s() > self._most_held_s:
            self._drop_question(held)
            return None, False
        more = 0 if lease is None else lease.tokens - local_tokens
        if more < self._options.min_load_tokens:
            if lease is not None:
                held.offered = len(lease)  # the store has them, as the engine does
            self._settle(held)
            return 0, False
        return more, True

    def _drop_old(self) -> None:
        """Leases that have waited for room, or for a place in the engine, so long that the store would soon complain.
        When their turn comes they are asked for anew."""
        now_s = time.monotonic()
        if now_s < self._drop_again_s:
            return
        self._drop_again_s = now_s + min(1.0, self._most_held_s / 4)
        for held in self._requests.values():
            if held.question is not None and held.question.held_s() > self._most_held_s:
                self._drop_question(held)

    def _most_tokens(self, request: Request) -> int:
        """That the store could save the engine."""
        blocks = len(request.block_hashes) // self._layout.engine_blocks
        tokens: int = request.num_tokens
        return min(blocks * self._layout.block_tokens, tokens - 1)

    def _look(self, question: Question) -> bool:
        """Whether there is an answer. Where the blocks are in host RAM it takes less than a millisecond, so the first
        look waits that long, and later ones do while the engine has nothing else to do: both save a step."""
        first, question.looked = not question.looked, True
        if question.answered or question.watch_until_s is not None or not (first or not self._computing):
            return question.answered
        left_s = (STEP_BUDGET_S if self._computing else question.idle_budget_s()) - self._spent_s
        if left_s <= 0:
            return question.answered
        begun_s = time.perf_counter()
        answered = self._asking.look(question, left_s)
        waited_s = time.perf_counter() - begun_s
        self._spent_s += waited_s
        if not self._computing:
            self.idled_s += waited_s
        return answered

    def _settle(self, held: Held) -> None:
        """It has had its answer. What is still to be known of it is its name, for what will be saved."""
        held.settled = True
        if held.question is not None and held.question.purpose is Purpose.NAME:
            return
        self._drop_question(held)
        untold = self._announces(held) and held.request.request_id not in self._announced
        if self._options.save and (held.extras is None or untold):
            self._ask(held, Purpose.NAME)

    def _drop_question(self, held: Held) -> None:
        question = held.question
        if question is None:
            return
        self._take_name(held)
        held.question = None
        self._waiting -= question.purpose is Purpose.HOLD
        self._asking.give_up(question)

    def _take_name(self, held: Held) -> None:
        question = held.question
        if question is None:
            return
        if question.announcement is not None:
            self._announced[held.request.request_id] = question.announcement
        if held.extras is None:
            held.extras = question.extras
        if question.tainted and held.local_tokens:
            held.tainted = True

    def _begin_anew(self, held: Held) -> None:
        """It was preempted: its pages are gone."""
        held.preemptions = held.request.num_preemptions
        self._drop_question(held)
        held.settled, held.offered, held.loaded_blocks = False, 0, 0

    def after_alloc(self, request: Request, blocks: KVCacheBlocks, external_tokens: int) -> bool:
        """The engine has pages for what we promised (or takes it from another connector). True when a load begins."""
        held = self._requests.get(request.request_id)
        if held is None or held.loading is not None:
            return False
        question = held.question
        if external_tokens <= 0 or question is None or question.lease is None or held.settled:
            if not held.settled:
                self._settle(held)
            return False
        lease, question.lease = question.lease, None
        held.loading = lease
        self._meta.loads.append(self._load_job(question, lease, blocks.get_block_ids(), held.local_tokens))
        self._settle(held)
        held.loaded_blocks = len(lease)
        self.counts.add("loads")
        self.counts.add("load_tokens", external_tokens)
        return True

    def refuse(self, request: Request, blocks: KVCacheBlocks) -> None:
        """The engine waits for a load that cannot begin: the workers say that it has failed."""
        self.counts.add("failed_loads")
        request_id, held = request.request_id, self._requests.get(request.request_id)
        self._meta.loads = [job for job in self._meta.loads if job.request_id != request_id]
        own_tokens = 0 if held is None else held.local_tokens
        self._meta.refused[request_id] = self._tables.behind(blocks.get_block_ids(), own_tokens)

    def sources(self, request: Request, tokens: int) -> dict[CacheHitSource, int]:
        """Where the tokens that are about to be loaded were found."""
        from vllm.v1.metrics.cache_hit_source import CacheHitSource

        held = self._requests.get(request.request_id)
        colder = held.loading.colder if held is not None and held.loading is not None else {}
        found: dict[CacheHitSource, int] = {}
        left = tokens
        for tier, blocks in colder.items():
            source = CacheHitSource.DISK if tier == "nvme" else CacheHitSource.EXTERNAL_UNSPECIFIED
            count = min(left, blocks * self._layout.block_tokens)
            left -= count
            if count:
                found[source] = found.get(source, 0) + count
        return found | ({CacheHitSource.HOST: left} if left else {})

    def _load_job(
        self, question: Question, lease: Lease, tables: Sequence[Sequence[int]], local_tokens: int
    ) -> LoadJob:
        hashes = question.hashes[: len(lease) * self._layout.engine_blocks]
        assert question.extras is not None
        assert question.spec is not None
        prompt = Prompt(b"".join(hashes), len(hashes[0]), question.num_tokens, question.extras, question.spec)
        return LoadJob(
            question.request_id,
            prompt,
            lend(lease),
            self._tables.cut(tables, len(lease)),
            local_tokens // self._layout.hash_tokens,
        )

    # -- a step ---------------------------------------------------------------------------------------------------

    def plan(self, output: SchedulerOutput) -> None:
        """What is to be saved behind this step's forward pass."""
        self._drop_old()
        state = output.kv_connector_block_state
        if not self._options.save or state is None:
            return
        for request_id, scheduled in output.num_scheduled_tokens.items():
            held = self._requests.get(request_id)
            if held is not None:
                computed = held.request.num_computed_tokens + scheduled
                self._save(held, computed, partial(state.resolve_block_ids, request_id))

    def take(self, output: SchedulerOutput) -> StepMeta:
        """All that the workers are to do in this step."""
        meta, self._meta = self._meta, StepMeta()
        meta.computes = output.total_num_scheduled_tokens > 0
        self._computing = set(output.num_scheduled_tokens)
        self._spent_s = 0.0
        self._began_s, self._step_tokens = time.monotonic(), output.total_num_scheduled_tokens
        return meta

    def _save(self, held: Held, computed_tokens: int, tables: Callable[[], Sequence[Sequence[int]]]) -> None:
        """Offers what is full: computed by the end of this step, with tokens that are known for good."""
        request, layout = held.request, self._layout
        full = min(computed_tokens, request.num_tokens) // layout.block_tokens
        full = min(full, len(request.block_hashes) // layout.engine_blocks)
        if full <= held.offered or held.wishes.retention.no_store or held.tainted:
            return
        self._take_name(held)
        space = self._names.space
        if held.extras is None or space is None or held.tainted:
            return  # they have no names yet, or never will
        hashes = request.block_hashes[: full * layout.engine_blocks]
        prompt = Prompt(
            b"".join(hashes), len(hashes[0]), request.num_tokens, held.extras, space.namespace.spec
        )
        jobs, held.offered = self._saves.begin(
            request.request_id, prompt, range(held.offered, full), tables(), held.wishes.retention
        )
        self._meta.saves += jobs
        if self.events is not None:
            for job in jobs:
                self.events.began(job, request)

    def update(self, output: KVConnectorOutput) -> None:
        """What the workers have done."""
        try:
            self._end_loads(output)
        finally:  # whatever goes wrong with the others
            self._end_saves(output.kv_connector_worker_meta)
            self._note_step()

    def _end_loads(self, output: KVConnectorOutput) -> None:
        leases = [self._loaded(request_id, output) for request_id in output.finished_recving or ()]
        for lease in filter(None, leases):
            self._asking.release(lease)

    def _end_saves(self, report: object) -> None:
        if not isinstance(report, SaveReport):
            return
        for number, request_id, blocks, stored in self._saves.end(report):
            self.counts.add("saved_blocks", stored)
            self.counts.add("unsaved_blocks", blocks - stored)
            self._end_announcement(request_id)
            if self.events is not None:
                self.events.ended(number, whole=stored == blocks)

    def _note_step(self) -> None:
        """How long a step took; what it computes a token in decides whether a load is worth it (``break_even``)."""
        tokens, self._step_tokens = self._step_tokens, 0
        if not tokens:
            return
        took_s = time.monotonic() - self._began_s
        self.counts.add("step_s", took_s)
        if tokens >= PREFILL_TOKENS:
            self._asking.report_prefill(tokens, took_s)

    def _loaded(self, request_id: str, output: KVConnectorOutput) -> Lease | None:
        """The lease that is not needed any more."""
        held = self._requests.get(request_id)
        if held is None or held.loading is None:
            self.counts.add("stray")
            return None
        lease, held.loading = held.loading, None
        failed = request_id in output.failed_recving or bool(output.invalid_block_ids)
        held.offered = 0 if failed else held.loaded_blocks
        if failed:
            self.counts.add("failed_loads")
        if held.over:
            del self._requests[request_id]
        return lease

    def _end_announcement(self, request_id: str) -> None:
        """When nothing more of a request will be saved: what others still wait for will not come."""
        if (
            request_id in self._announced
            and request_id not in self._requests
            and not self._saves.pending(request_id)
        ):
            self._asking.cancel(self._announced.pop(request_id))

    # -- the end of a request -------------------------------------------------------------------------------------

    def finished(self, request: Request, tables: Sequence[Sequence[int]]) -> dict[str, Any] | None:
        self._computing.discard(request.request_id)
        held = self._requests.get(request.request_id)
        if held is None:
            return None
        try:
            if self._options.save and held.loading is None and held.preemptions == request.num_preemptions:
                computed = request.num_computed_tokens - request.num_in_flight_tokens
                self._save(held, computed, lambda: tables)
        finally:  # nobody asks for it again
            if held.loading is None:
                del self._requests[request.request_id]
            else:
                held.over = True  # its load is still on its way, and the engine keeps the pages for it
            self._drop_question(held)
            self._end_announcement(request.request_id)
        return {"do_remote_prefill": True, "do_remote_decode": False} if held.wishes.announce else None

    def reset(self) -> bool:
        """The weights have changed, or are to be taken so: nothing that was stored is found any more."""
        for held in self._requests.values():
            self._drop_question(held)
            held.offered = 0
            held.tainted = True  # what it has computed so far is of the old weights
        self._names.renew()
        return True

    # -- facts ----------------------------------------------------------------------------------------------------

    @property
    def busy(self) -> bool:
        """Saves whose end the engine has not heard of: it is to go on stepping."""
        return bool(len(self._saves) or self._meta.saves)

    @property
    def holds_pages(self) -> bool:
        """Pages that will soon be free without a preemption."""
        return self._saves.soon_over()
