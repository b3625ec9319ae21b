"""Scenarios in which something goes wrong while an engine loads or saves. One engine each, in this process, which
makes the moment of a failure a choice instead of a chance."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tests.vllm.engine import Engine, eventually, only_in
from tests.vllm.scenarios import CONNECTOR, ask_all, words
from tierkv.engines.vllm_worker import LOAD_LANE, SAVE_LANE
from tierkv.testing.faults.server import running_server

DAMAGE_STEP = 4096 * 8 + 1
"""Bytes from one flipped bit on the disk to the next: every block has several."""


def worker_of(engine: Engine) -> Any:
    """The worker's half."""
    from vllm.distributed.kv_transfer import get_kv_transfer_group

    return get_kv_transfer_group()._worker  # type: ignore[attr-defined]


@contextmanager
def held_lane(engine: Engine, lane: str) -> Iterator[Callable[[], None]]:
    """The worker's copies of one direction stand still until the end, or until what is given is called."""
    gate, reached = threading.Event(), threading.Event()

    def stand() -> None:
        reached.set()
        gate.wait()

    worker_of(engine)._executor.run(lane, stand, lambda _: None)
    assert reached.wait(60)
    try:
        yield gate.set
    finally:
        gate.set()


class Steps:
    """An engine, step by step."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.core = engine.llm.llm_engine
        self.said: dict[str, list[int]] = {}
        self.reasons: dict[str, str | None] = {}
        self._numbers = iter(range(1000))

    def add(self, name: str, max_tokens: int = 8) -> str:
        number = f"step-{next(self._numbers)}"
        given = {"prompt_token_ids": words(name)}
        self.core.add_request(number, given, self.engine.sampling(max_tokens))
        return number

    def step(self) -> None:
        for output in self.core.step():
            if output.finished:
                self.said[output.request_id] = list(output.outputs[0].token_ids)
                self.reasons[output.request_id] = output.outputs[0].finish_reason

    def until(self, holds: Callable[[], object], what: str) -> None:
        def look() -> bool:
            if not holds():
                self.step()
            return bool(holds())

        eventually(look, what)

    def request(self, number: str) -> Any:
        """Of vLLM's scheduler; its id there has a tail."""
        requests = self.engine.scheduler.requests
        found = [its for name, its in requests.items() if f"{name}-".startswith(f"{number}-")]
        return found[0] if found else None

    def status(self, number: str) -> str:
        request = self.request(number)
        return request.status.name if request is not None else "gone"

    def finish(self, number: str) -> list[int]:
        self.until(lambda: number in self.said, f"{number} is finished")
        return self.said[number]

    def abort(self, number: str) -> None:
        self.core.abort_request([number])
        self.until(lambda: not self.engine.scheduler.has_requests(), "nothing is left of it")


def aborts(name: str) -> Any:
    """D13, D14: a request is aborted at every stage; nothing is held afterwards, and the prompt still gives the
    same."""
    engine = Engine(CONNECTOR, max_num_batched_tokens=64, max_num_seqs=4)
    first = engine.one(words(name)).plain()
    steps = Steps(engine)
    held: dict[str, Any] = {}

    def check(stage: str) -> None:
        engine.check_nothing_is_held()
        engine.reset()
        held[stage] = engine.one(words(name)).plain()
        engine.settle()
        engine.reset()

    engine.settle()
    engine.reset()
    number = steps.add(name)
    steps.abort(number)
    check("queued")

    number = steps.add(name)
    steps.step()
    steps.abort(number)
    check("asked")

    with held_lane(engine, LOAD_LANE) as go_on:
        number = steps.add(name)
        steps.until(lambda: steps.status(number) == "WAITING_FOR_REMOTE_KVS", "it loads")
        steps.core.abort_request([number])
        steps.step()
        held["while it loads"] = steps.status(number)
        go_on()
        steps.until(lambda: not engine.scheduler.has_requests(), "nothing is left of it")
    check("loading")

    fresh = "400:77"
    number = steps.add(fresh)
    steps.until(
        lambda: (request := steps.request(number)) and request.num_computed_tokens >= 64, "it is computed"
    )
    steps.abort(number)
    check("prefill")

    number = steps.add("300:78", max_tokens=64)
    steps.until(lambda: (request := steps.request(number)) and request.num_output_tokens > 3, "it decodes")
    steps.abort(number)
    check("decode")

    with held_lane(engine, SAVE_LANE) as go_on:
        number = steps.add("200:79")
        steps.until(
            lambda: (request := steps.request(number)) and request.num_output_tokens > 0, "it decodes"
        )
        steps.core.abort_request([number])
        steps.step()
        held["pages while it is saved"] = engine.connector._scheduler._saves.pages_held
        go_on()
        steps.until(lambda: not engine.scheduler.has_requests(), "nothing is left of it")
    check("saving")

    from vllm.v1.outputs import KVConnectorOutput

    stray = KVConnectorOutput(finished_recving={"nobody", number}, finished_sending={"nobody"})
    engine.connector.update_connector_output(stray)
    engine.connector.update_connector_output(stray)
    check("stray")
    answer = {"first": first, "held": held, "counts": engine.counts()}
    engine.close()
    return answer


def preemption(names: list[str], max_tokens: int) -> Any:
    """More requests than the engine has pages for: some are thrown out, and come back with what was saved of them."""
    engine = Engine(CONNECTOR, num_gpu_blocks_override=44, max_model_len=1024, max_num_batched_tokens=256)
    found: dict[str, Any] = {"answers": []}
    for _ in range(2):
        answers = engine.ask([words(name) for name in names], max_tokens)
        found["answers"].append([answer.plain() for answer in answers])
        engine.settle()
    found["preemptions"] = sum(
        metric.value for metric in engine.llm.get_metrics() if metric.name == "vllm:num_preemptions"
    )
    engine.check_nothing_is_held()
    found["counts"] = engine.counts()
    engine.close()
    return found


def damaged(names: list[str], folder: str, where: str) -> Any:
    """Bits are flipped where the blocks lie: ``disk``, which is verified, or ``ram``, which stands for a store that
    does not look (the scrub finds that later)."""
    disk = {"nvme_path": folder, "nvme_capacity": "256 MiB", "nvme_min_free": "1 MiB"}
    engine = Engine(CONNECTOR | disk)
    found = {"cold": ask_all(engine, names)}
    engine.reset()
    if where == "disk":
        only_in(engine, "nvme")
        _flip_on_disk(Path(folder))
    else:
        _flip_in_ram(engine)
    found["warm"] = ask_all(engine, names)
    engine.settle()
    engine.reset()
    found["again"] = ask_all(engine, names) if where == "disk" else {}
    engine.check_nothing_is_held()
    found["counts"] = engine.counts()
    engine.close()
    return found


def _flip_on_disk(folder: Path) -> None:
    segments = [path for path in folder.iterdir() if path.stat().st_size > 1024 * 1024]
    assert segments
    for path in segments:
        with path.open("r+b", buffering=0) as file:
            for at in range(20_000, path.stat().st_size, DAMAGE_STEP):
                byte = os.pread(file.fileno(), 1, at)
                os.pwrite(file.fileno(), bytes([byte[0] ^ 0x40]), at)
            os.fsync(file.fileno())


def _flip_in_ram(engine: Engine) -> None:
    import numpy as np

    memory = worker_of(engine)._client.link.memory
    arena = np.frombuffer(memory._memory, np.uint8)
    touched = arena[0 : 32 * 1024 * 1024]
    touched[3::64] ^= 0xC0  # exponents of float32


def killed(name: str, *, freeze_first: bool, model: str = "llama") -> Any:
    """The sidecar dies between the question and its answer, or between the match and the load."""
    engine = Engine(CONNECTOR | {"load_timeout_s": 10}, name=model)
    found: dict[str, Any] = {"cold": engine.one(words(name)).plain()}
    engine.settle()
    engine.reset()
    pid = engine.sidecar_pid()
    if freeze_first:
        os.kill(pid, signal.SIGSTOP)
        timer = threading.Timer(1.0, os.kill, (pid, signal.SIGKILL))
        timer.start()
        found["killed"] = engine.one(words(name)).plain()
        timer.join()
    else:
        steps = Steps(engine)
        worker = worker_of(engine)
        with held_lane(engine, LOAD_LANE) as go_on:
            number = steps.add(name)
            steps.until(lambda: steps.status(number) == "WAITING_FOR_REMOTE_KVS", "it loads")
            before = worker._client.link.memory.instance
            os.kill(pid, signal.SIGKILL)
            eventually(
                lambda: worker._client.health() and worker._client.link.memory.instance != before,
                "the worker has met another sidecar",
            )
            go_on()
            found["killed"] = {"tokens": steps.finish(number), "reason": steps.reasons[number]}
    eventually(lambda: engine.connector._client.health().ready, "another sidecar runs")
    for title in ("after", "stored again"):
        engine.settle()
        engine.reset()
        found[title] = engine.one(words(name)).plain()
    engine.check_nothing_is_held()
    found["counts"] = engine.counts()
    engine.close()
    return found


def frozen(name: str) -> Any:
    """Valkey stops in the middle of a load, and goes on later."""
    with running_server() as server:
        timeouts = {"valkey_url": server.address, "valkey_timeout": "1 s", "load_timeout_s": 3}
        engine = Engine(CONNECTOR | timeouts)
        found: dict[str, Any] = {"cold": engine.one(words(name)).plain()}
        engine.settle()
        only_in(engine, "valkey")
        engine.reset()
        server.hang()
        try:
            found["frozen"] = engine.one(words(name)).plain()
            engine.settle()
            engine.reset()
            found["other"] = engine.one(words("100:55")).plain()
        finally:
            server.go_on()
        with engine.store() as client:
            eventually(lambda: client.health().state == "ok", "the store reaches it again")
        engine.settle()
        only_in(engine, "valkey")
        engine.reset()
        found["thawed"] = engine.one(words(name)).plain()
        engine.check_nothing_is_held()
        found["counts"] = engine.counts()
        engine.close()
    return found


def slow(name: str) -> Any:
    """An answer that comes later than the request may wait: it is computed, and what comes is given back."""
    engine = Engine(CONNECTOR | {"load_timeout_s": 1})
    found: dict[str, Any] = {"cold": engine.one(words(name)).plain()}
    engine.settle()
    engine.reset()
    pid = engine.sidecar_pid()
    os.kill(pid, signal.SIGSTOP)
    begun_s = time.monotonic()
    try:
        found["stopped"] = engine.one(words(name)).plain()
    finally:
        os.kill(pid, signal.SIGCONT)
    found["seconds"] = time.monotonic() - begun_s
    engine.settle()
    engine.reset()
    with engine.store() as client:
        eventually(lambda: client.health().ready, "the sidecar answers again")
    found["going on"] = engine.one(words(name)).plain()
    engine.check_nothing_is_held()
    found["counts"] = engine.counts()
    engine.close()
    return found
