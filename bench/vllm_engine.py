"""A vLLM engine in a process of its own that does what it is told, a line of JSON each, and measures what that costs.

``python -m bench.vllm_engine '{"model": ..., "connector": {...} | null, ...}'``. CPU-seconds are those of the engine's
process and of the private sidecar that it started.
"""

from __future__ import annotations

import ctypes
import json
import os
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

ANSWER: Final = "ANSWER "
ROOT: Final = Path(__file__).parent.parent
PATIENCE_S: Final = 600.0
_SCHEDULED: Final = 2
"""Of the numbers that Linux gives to the clocks of processes: the CPU time of all its threads."""


def cpu_s_of(pid: int) -> float:
    """The CPU time of a process so far, its threads that have ended included, in nanoseconds' resolution."""
    return time.clock_gettime(ctypes.c_int32((~pid << 3) | _SCHEDULED).value)


class Engine:
    """In this process."""

    def __init__(self, model: str, connector: Mapping[str, Any] | None, **options: Any) -> None:
        os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
        os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
        from vllm import LLM, SamplingParams
        from vllm.config import KVTransferConfig

        self._sampling = SamplingParams
        self._id = f"bench-{os.getpid()}"
        transfer = None
        if connector is not None:
            transfer = KVTransferConfig(
                kv_connector="TierKVConnector",
                kv_connector_module_path="tierkv.engines.vllm",
                kv_role="kv_both",
                kv_load_failure_policy="recompute",
                engine_id=self._id,
                kv_connector_extra_config=dict(connector),
            )
        chosen: dict[str, Any] = {
            "block_size": 32,
            "max_model_len": 4096,
            "max_num_batched_tokens": 4096,
            "skip_tokenizer_init": True,
            "enforce_eager": True,
            "disable_log_stats": False,
            **options,
        }
        self.llm = LLM(model=model, kv_transfer_config=transfer, seed=0, **chosen)
        self._connected = connector is not None
        self._pids = [os.getpid(), *([self._sidecar_pid()] if self._connected else [])]

    def _sidecar_pid(self) -> int:
        with self._store() as client:
            return int(client.settings(time.monotonic() + PATIENCE_S)["pid"])

    def _store(self) -> Any:
        from tierkv.daemon.connect import connect

        return connect(private=f"vllm-{self._id}", owner="bench")

    @property
    def scheduler(self) -> Any:
        return self.llm.llm_engine.engine_core.engine_core.scheduler

    def ask(self, tokens: list[int], max_tokens: int = 1) -> dict[str, Any]:
        """Wall and CPU seconds up to the last token."""
        sampling = self._sampling(
            temperature=0, max_tokens=max_tokens, min_tokens=max_tokens, detokenize=False
        )
        cpu_s, wall_s = sum(map(cpu_s_of, self._pids)), time.perf_counter()
        (output,) = self.llm.generate([{"prompt_token_ids": tokens}], sampling, use_tqdm=False)
        wall_s = time.perf_counter() - wall_s
        cpu_s = sum(map(cpu_s_of, self._pids)) - cpu_s
        said = list(output.outputs[0].token_ids)
        return {"wall_s": wall_s, "cpu_s": cpu_s, "cached": output.num_cached_tokens or 0, "tokens": said}

    def settle(self) -> dict[str, Any]:
        """Until everything is saved; what that took is part of a cold prompt's cost."""
        cpu_s = sum(map(cpu_s_of, self._pids))
        until_s = time.monotonic() + PATIENCE_S
        while self.scheduler.has_requests():
            self.llm.llm_engine.step()
            time.sleep(0.001)  # as the loop of an engine in a process of its own does
            assert time.monotonic() < until_s, "the engine does not come to rest"
        return {"cpu_s": sum(map(cpu_s_of, self._pids)) - cpu_s}

    def reset(self) -> None:
        """The engine's own cache is empty afterwards."""
        until_s = time.monotonic() + PATIENCE_S
        while True:
            self.ask([1], 1)
            if self.llm.reset_prefix_cache():
                return
            assert time.monotonic() < until_s, "the engine's own cache is not emptied"

    def converse(self, said: list[list[list[int]]], answer_tokens: int) -> dict[str, Any]:
        """Sessions side by side: ``said[session][turn]``. Each says its next turn, behind all that was said before and
        the engine's answers, as soon as it has its answer."""
        core = self.llm.llm_engine
        sampling = self._sampling(
            temperature=0, max_tokens=answer_tokens, min_tokens=answer_tokens, detokenize=False
        )
        sofar: list[list[int]] = [[] for _ in said]
        asked_s: dict[str, float] = {}
        firsts: list[float] = []
        prompt_tokens = computed = output_tokens = 0

        def say(session: int, turn: int) -> None:
            sofar[session] += said[session][turn]
            name = f"{session}.{turn}"
            asked_s[name] = time.perf_counter()
            core.add_request(name, {"prompt_token_ids": list(sofar[session])}, sampling)

        cpu_s, begun_s = sum(map(cpu_s_of, self._pids)), time.perf_counter()
        for session in range(len(said)):
            say(session, 0)
        while core.has_unfinished_requests():
            for output in core.step():
                name, made = output.request_id, output.outputs[0].token_ids
                if made and name in asked_s:
                    firsts.append(time.perf_counter() - asked_s.pop(name))
                if output.finished:
                    session, turn = map(int, name.split("."))
                    sofar[session] += made
                    prompt_tokens += len(output.prompt_token_ids)
                    computed += len(output.prompt_token_ids) - (output.num_cached_tokens or 0)
                    output_tokens += len(made)
                    if turn + 1 < len(said[session]):
                        say(session, turn + 1)
        return {
            "wall_s": time.perf_counter() - begun_s,
            "cpu_s": sum(map(cpu_s_of, self._pids)) - cpu_s,
            "first_token_s": firsts,
            "prompt_tokens": prompt_tokens,
            "computed_tokens": computed,
            "output_tokens": output_tokens,
        }

    def only_in(self, tier: str) -> None:
        """What is stored is in that tier, and not in host RAM."""
        with self._store() as client:
            report = client.flush(tier).result(PATIENCE_S)
            assert report.failed == 0, report
            client.evict("host")

    def counts(self) -> dict[str, float]:
        connector = self.scheduler.connector
        return {} if connector is None else _both(connector)

    def close(self) -> None:
        self.llm.llm_engine.engine_core.shutdown()


def _both(connector: Any) -> dict[str, float]:
    """What both halves of the connector have counted since the start."""
    from vllm.distributed.kv_transfer import get_kv_transfer_group

    sums: dict[str, float] = {}
    for half in (connector, get_kv_transfer_group()):
        for name, count in half._counts.total.items():
            sums[name] = sums.get(name, 0.0) + count
    return sums


class Remote:
    """An engine in another process: ``remote("ask", tokens=[...])``."""

    def __init__(self, log: Path, *, threads_spin: bool = True, **options: Any) -> None:
        """``threads_spin``: OpenMP's threads burn their cores while waiting, as they do by default; without it several
        busy processes on few cores do not stand in each other's way. ``OMP_WAIT_POLICY`` in the environment wins."""
        environment = {
            **os.environ,
            "HF_HUB_OFFLINE": "1",
            "PYTHONPATH": str(ROOT),
        }
        if not threads_spin:
            environment.setdefault("OMP_WAIT_POLICY", "PASSIVE")
        self._log = log
        with log.open("w") as errors:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "bench.vllm_engine", json.dumps(options)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                env=environment,
                text=True,
            )
        self._hear()

    def __call__(self, verb: str, **words: Any) -> Any:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps([verb, words]) + "\n")
        self._process.stdin.flush()
        return self._hear()

    def _hear(self) -> Any:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if line.startswith(ANSWER):
                return json.loads(line.removeprefix(ANSWER))
        raise RuntimeError(f"the engine has ended:\n{self._log.read_text()[-4000:]}")

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(PATIENCE_S)


def main() -> None:
    options = json.loads(sys.argv[1])
    engine = Engine(options.pop("model"), options.pop("connector"), **options)
    print(f"{ANSWER}null", flush=True)
    for line in sys.stdin:
        verb, words = json.loads(line)
        print(f"{ANSWER}{json.dumps(getattr(engine, verb)(**words))}", flush=True)
    engine.close()


if __name__ == "__main__":
    main()
