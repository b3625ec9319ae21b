"""The scheduler's half of the vLLM connector against a real store, without vLLM: which leases it holds how long, what
it loads, what it does not save again."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest

from tests.client_support import BLOCK_TOKENS, Live, chain_of, live, put_all
from tests.stand_in_vllm import worker_modules
from tests.valkey_server import eventually
from tierkv.engines.vllm_asking import Asking, Question
from tierkv.engines.vllm_options import Options
from tierkv.executor import ThreadExecutor
from tierkv.keys import Adapter, Chain, Extras
from tierkv.layout import GroupKind

modules = worker_modules()
LONG_S = 1000.0
STEP = SimpleNamespace(
    kv_connector_block_state=None, total_num_scheduled_tokens=1, num_scheduled_tokens={"x": 1}
)
"""A step in which others compute."""

LOADED = SimpleNamespace(
    finished_recving={"r"}, failed_recving=(), invalid_block_ids=(), kv_connector_worker_meta=None
)


class NoSaves:
    """Notes what was offered."""

    def __init__(self) -> None:
        self.offered: list[range] = []
        self.broken = False

    def begin(self, request_id: str, prompt: Any, blocks: range, *_: Any) -> tuple[list[Any], int]:
        if self.broken:
            raise RuntimeError("the pool is not what it was")
        self.offered.append(blocks)
        return [], blocks.stop

    def pending(self, request_id: str) -> bool:
        return False

    def __len__(self) -> int:
        return 0


def request_of(chain: Chain, number: str = "r") -> Any:
    return SimpleNamespace(
        request_id=number, num_preemptions=0, lora_request=None, kv_transfer_params=None,
        block_hashes=[bytes(one) for one in chain.hashes], num_tokens=chain.num_tokens,
        num_computed_tokens=chain.num_tokens, num_in_flight_tokens=0, skip_reading_prefix_cache=False,
    )  # fmt: skip


@contextmanager
def a_scheduler(
    rig: Live,
    chain: Chain,
    lease_s: float = LONG_S,
    named: Callable[[Question], None] = lambda question: None,
    options: Options = Options(load_timeout_s=LONG_S),  # noqa: B008  (immutable)
) -> Iterator[Any]:
    """With the questions all about ``chain``, whose layout is that of one layer group."""
    layout = chain.namespace.layout
    group = modules["vllm_layout"].CacheGroup(0, GroupKind.FULL, BLOCK_TOKENS, None, False, ("a",))
    tables = modules["vllm_tables"].Tables(layout, (group,), 0)

    def name(question: Question) -> Chain:
        question.spec = chain.namespace.spec
        named(question)
        return chain

    executor = ThreadExecutor(rig.client.clock)
    try:
        yield modules["vllm_scheduler"].SchedulerSide(
            Asking(rig.client, executor, name, grace_s=0.05),
            NoSaves(),
            tables,
            SimpleNamespace(space=SimpleNamespace(namespace=chain.namespace)),
            options,
            lease_s,
            modules["vllm_stats"].Counts(),
        )
    finally:
        executor.close(5.0)


def answer(scheduler: Any, request: Any, local_tokens: int = 0) -> tuple[int, bool]:
    """Asked until there is one."""
    found: list[tuple[int, bool]] = []

    def said() -> bool:
        more, later = scheduler.matched(request, local_tokens)
        if more is not None:
            found.append((more, later))
        return more is not None

    eventually(said, "the question is answered")
    return found[0]


def leases_are(rig: Live, count: int) -> Callable[[], bool]:
    return lambda: rig.store.stats()["leases"] == count


def test_d15_a_lease_goes_back_before_its_deadline_though_nobody_asks_about_its_request() -> None:
    """All places of the engine are taken by others for longer than the store lets anybody hold a lease."""
    with live() as rig:
        chain = chain_of(rig.namespace(), 3)
        put_all(rig.client, chain)
        with a_scheduler(rig, chain, lease_s=0.2) as scheduler:
            request = request_of(chain)
            scheduler.on_new_request(request)
            eventually(lambda: scheduler._requests["r"].question.lease is not None, "it is answered")

            def stepped() -> bool:
                scheduler.plan(STEP)
                scheduler.take(STEP)
                return leases_are(rig, 0)()

            eventually(stepped, "the lease is back")
            assert scheduler._waiting == 0
            scheduler._most_held_s = LONG_S
            assert answer(scheduler, request) == (3 * BLOCK_TOKENS, True), "its turn: it is asked for anew"
            scheduler.finished(request, [[]])
            eventually(leases_are(rig, 0), "the lease is back")
            assert not scheduler._waiting


def test_d15_an_end_that_fails_leaves_nothing_behind() -> None:
    with live() as rig:
        chain = chain_of(rig.namespace(), 3)
        put_all(rig.client, chain)
        with a_scheduler(rig, chain) as scheduler:
            request = request_of(chain)
            scheduler.on_new_request(request)
            eventually(leases_are(rig, 1), "it is answered")
            scheduler._saves.broken = True
            with pytest.raises(RuntimeError):
                scheduler.finished(request, [[1, 2, 3]])
            eventually(leases_are(rig, 0), "the lease is back")
            assert not scheduler._requests
            assert not scheduler._waiting


def test_d28_what_engine_and_store_both_have_is_not_saved_again() -> None:
    """A conversation goes on: its next turn begins with what was saved in the last one."""
    with live() as rig:
        space = rig.namespace()
        before, after = chain_of(space, 3), chain_of(space, 5)
        put_all(rig.client, before)
        with a_scheduler(rig, after) as scheduler:
            request = request_of(after)
            scheduler.on_new_request(request)
            assert answer(scheduler, request, 3 * BLOCK_TOKENS) == (0, False)
            scheduler.finished(request, [[1, 2, 3, 4, 5]])
            assert scheduler._saves.offered == [range(3, 5)]


def test_a_load_begins_behind_what_the_engine_has_also_where_it_takes_less_than_was_offered() -> None:
    """vLLM cuts what it takes to whole blocks, for some models."""
    with live() as rig:
        chain = chain_of(rig.namespace(), 4)
        put_all(rig.client, chain)
        with a_scheduler(rig, chain) as scheduler:
            request = request_of(chain)
            scheduler.on_new_request(request)
            assert answer(scheduler, request, BLOCK_TOKENS) == (3 * BLOCK_TOKENS, True)
            blocks = SimpleNamespace(get_block_ids=lambda: ([7, 8, 9],))
            assert scheduler.after_alloc(request, blocks, 2 * BLOCK_TOKENS)
            [job] = scheduler.take(STEP).loads
            assert job.skip == 1
            assert job.tables == ([7, 8, 9],)
            scheduler.update(
                SimpleNamespace(
                    finished_recving={"r"},
                    failed_recving=(),
                    invalid_block_ids=(),
                    kv_connector_worker_meta=None,
                )
            )
            scheduler.finished(request, [[7, 8, 9]])
            eventually(leases_are(rig, 0), "the lease is back")


def test_d13_a_load_that_fails_as_it_begins_is_over_once_and_without_the_engines_own_blocks() -> None:
    """vLLM ends with an error when it is told twice that a request has its blocks, and takes those that other requests
    share for lost when they are among them."""
    with live() as rig:
        chain = chain_of(rig.namespace(), 3)
        put_all(rig.client, chain)
        with a_scheduler(rig, chain) as scheduler:
            request = request_of(chain)
            scheduler.on_new_request(request)
            assert answer(scheduler, request, BLOCK_TOKENS) == (2 * BLOCK_TOKENS, True)
            blocks = SimpleNamespace(get_block_ids=lambda: ([7, 8, 9],))
            settle = scheduler._settle
            scheduler._settle = _fail
            with pytest.raises(RuntimeError):
                scheduler.after_alloc(request, blocks, 2 * BLOCK_TOKENS)
            scheduler._settle = settle
            scheduler.refuse(request, blocks)
            meta = scheduler.take(STEP)
            assert meta.loads == []
            assert meta.refused == {"r": [8, 9]}
            scheduler.update(LOADED)
            eventually(leases_are(rig, 0), "the lease is back")
            scheduler.finished(request, [[7, 8, 9]])
            assert not scheduler._requests


@pytest.mark.parametrize("load", [True, False], ids=["the answer is late", "nothing is loaded"])
def test_d2_what_the_engines_cache_had_of_a_changed_adapter_is_not_saved(load: bool) -> None:
    """That it was changed is known later than what the engine had: the files are read meanwhile."""
    with live() as rig:
        chain = chain_of(rig.namespace(), 3)
        gate = threading.Event()

        def named(question: Question) -> None:
            assert gate.wait(20)
            question.tainted = True
            question.extras = Extras(adapter=Adapter("one", "second"))

        options = Options(load_timeout_s=0.05, load=load)
        with a_scheduler(rig, chain, named=named, options=options) as scheduler:
            request = request_of(chain)
            request.lora_request = SimpleNamespace(
                lora_name="one", lora_path="/one", lora_int_id=1, load_inplace=False
            )
            scheduler.on_new_request(request)
            assert answer(scheduler, request, BLOCK_TOKENS) == (0, False)
            gate.set()
            eventually(lambda: scheduler._requests["r"].question.extras is not None, "it has a name")
            scheduler.finished(request, [[1, 2, 3]])
            assert not scheduler._saves.offered


def test_d13_an_error_as_a_load_ends_keeps_no_save_from_its_end() -> None:
    """The pages that it reads are held until then."""
    with live() as rig:
        chain = chain_of(rig.namespace(), 3)
        with a_scheduler(rig, chain) as scheduler:
            ended: list[Any] = []
            scheduler._saves.end = lambda report: ended.append(report) or []
            scheduler._loaded = _fail
            report = modules["vllm_messages"].SaveReport({1: 1}, {1: 3})
            told = SimpleNamespace(**vars(LOADED) | {"kv_connector_worker_meta": report})
            with pytest.raises(RuntimeError):
                scheduler.update(told)
            assert ended == [report]


def _fail(*_: object) -> None:
    raise RuntimeError("a bug")
