"""`python -m bench.vllm_ttft --json FILE`: what a real vLLM engine's first token costs, cold and from each tier.

    --rounds N     interleaved rounds (default 9; fewer are for a look only)
    --quick        a random model that takes no time, 2 rounds: shows that it runs
    --only NAME    rows whose name contains NAME (may be repeated)
    --dir PATH     where the NVMe tier puts its files (default .bench)

SmolLM2-135M on the CPU, prompts of 1,024 and 2,048 tokens, one process. A warm row is the cost of a first token whose
prompt comes from outside, but for one token, over that of a hit in the engine's own cache in RAM which leaves one token
to compute too: the limit. CPU-seconds, the private sidecar's included; wall-clock seconds stand beside them. Needs the
environment of `make venv-vllm`. On a machine with other work to do set OMP_WAIT_POLICY=PASSIVE: by default OpenMP's
threads spin while they wait for each other, and the CPU-seconds tell of the neighbours. The limit is then about half as
long, and each ratio harder to reach.
"""

from __future__ import annotations

import argparse
import itertools
import json
import random
import statistics
import sys
import tempfile
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from bench.ending import unwind_at_sigterm
from bench.report import machine
from bench.vllm_engine import Remote
from bench.vllm_models import smollm2, tiny

SHORT, LONG = 1024, 2048
BOUNDS: Final = {
    "cold_with_connector": 1.05,
    "hooks": 0.01,
    "warm_host_1024": 1.25,
    "warm_host_2048": 1.05,
    "warm_nvme_2048": 1.4,
    "warm_valkey_2048": 1.4,
    "warm_new_process_2048": 1.4,
}
VOCABULARY: Final = 2048
PAGES: Final = 200
"""Of each engine, 6,400 tokens. All are used before the first round, as in an engine that has run for a while: a page
that is touched for the first time costs more than what is written into it."""
_seeds = itertools.count(1)


def prompt(tokens: int) -> list[int]:
    """Another one each time."""
    return random.Random(next(_seeds)).choices(range(1, VOCABULARY), k=tokens)


@dataclass
class Measured:
    """CPU and wall seconds of one thing and of its limit, round by round."""

    ours: list[dict[str, float]] = field(default_factory=list)
    limit: list[dict[str, float]] = field(default_factory=list)

    def row(self, name: str) -> dict[str, Any]:
        cpu = [a["cpu_s"] / b["cpu_s"] for a, b in zip(self.ours, self.limit, strict=True)]
        wall = [a["wall_s"] / b["wall_s"] for a, b in zip(self.ours, self.limit, strict=True)]
        value = statistics.median(its["cpu_s"] for its in self.ours)
        limit = statistics.median(its["cpu_s"] for its in self.limit)
        row: dict[str, Any] = {
            "value": value,
            "limit": limit,
            "unit": "CPU-seconds to the first token",
            "ratio": value / limit,
            "ratio_by_round": statistics.median(cpu),
            "upper_95": upper_95(cpu),
            "wall_ratio_by_round": statistics.median(wall),
            "wall_s": statistics.median(its["wall_s"] for its in self.ours),
            "wall_limit_s": statistics.median(its["wall_s"] for its in self.limit),
            "rounds": len(cpu),
            "reach": BOUNDS[name],
        }
        judged = row["upper_95"] if name == "cold_with_connector" else row["ratio"]
        return row | {"ok": judged <= BOUNDS[name]}


def upper_95(ratios: Sequence[float]) -> float:
    """Upper end of the 95 % interval of the median, by resampling the rounds (the bootstrap of Efron, 1979)."""
    dice = random.Random(0)
    medians = sorted(statistics.median(dice.choices(ratios, k=len(ratios))) for _ in range(2000))
    return medians[int(0.975 * len(medians))]


class Bench:
    """The engines, and what they are asked in one round."""

    def __init__(self, options: argparse.Namespace, say: Callable[[str], None], stack: ExitStack) -> None:
        self._options = options
        self._say = say
        self._stack = stack
        self._logs = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="tierkv-bench-")))
        self._disk = Path(stack.enter_context(tempfile.TemporaryDirectory(dir=options.dir)))
        self._model = str(tiny() if options.quick else smollm2())
        self._dtype = "float32" if options.quick else "bfloat16"
        self._short, self._long = (256, 512) if options.quick else (SHORT, LONG)
        self.measured: dict[str, Measured] = {}
        self.hooks: dict[str, float] = {}
        self._warm: dict[str, list[int]] = {}
        self._engines: dict[str, Remote] = {}

    def wanted(self, *names: str) -> bool:
        only = self._options.only
        return not only or any(part in name for part in only for name in names)

    def start(self) -> None:
        self._engines["plain"] = self._engine("plain", None)
        host = {"host_capacity": "1 GiB", "load_timeout_s": 60}
        if self.wanted("cold_with_connector", "hooks", "warm_host_1024", "warm_host_2048"):
            self._engines["host"] = self._engine("host", host)
        if self.wanted("warm_nvme_2048"):
            disk = {"nvme_path": str(self._disk / "nvme"), "nvme_capacity": "2 GiB", "nvme_min_free": "1 MiB"}
            self._engines["nvme"] = self._engine("nvme", host | disk)
        if self.wanted("warm_valkey_2048"):
            self._engines["valkey"] = self._engine(
                "valkey", host | {"valkey_url": self._valkey(), "valkey_timeout": "60 s"}
            )
        for name, engine in self._engines.items():
            self._say(f"{name}: a prompt of {self._long} tokens is computed")
            self._touch(engine)
            self._warm[name] = prompt(self._long)
            engine("ask", tokens=self._warm[name])
            engine("settle")

    def _touch(self, engine: Remote) -> None:
        """Every page of the engine's, by prompts that nobody asks for again."""
        for _ in range(PAGES * 32 // self._long + 1):
            engine("ask", tokens=prompt(self._long))
        engine("settle")
        engine("reset")

    def _valkey(self) -> str:
        from tierkv.testing.faults.server import running_server

        server = self._stack.enter_context(running_server("--maxmemory", "2gb"))
        return server.address

    def _engine(self, name: str, connector: dict[str, Any] | None) -> Remote:
        self._say(f"{name}: an engine starts")
        engine = Remote(
            self._logs / f"{name}.log",
            model=self._model,
            connector=connector,
            dtype=self._dtype,
            num_gpu_blocks_override=PAGES,
        )
        self._stack.callback(engine.close)
        return engine

    def round(self) -> None:
        plain = self._engines["plain"]
        cold = self._cold(plain)
        short = self._own_hit(plain, self._short)
        long = self._own_hit(plain, self._long)
        if "host" in self._engines:
            engine = self._engines["host"]
            self._note("cold_with_connector", self._cold(engine), cold)
            self._note("warm_host_1024", self._warm_hit(engine, prompt(self._short)), short)
            self._note("warm_host_2048", self._warm_hit(engine, self._warm["host"]), long)
        for tier in ("nvme", "valkey"):
            if tier in self._engines:
                engine = self._engines[tier]
                engine("only_in", tier=tier)
                self._note(f"warm_{tier}_2048", self._warm_hit(engine, self._warm[tier]), long)
        if self.wanted("warm_new_process_2048"):
            self._new_process()

    def _note(self, name: str, ours: dict[str, float], limit: dict[str, float]) -> None:
        its = self.measured.setdefault(name, Measured())
        its.ours.append(ours)
        its.limit.append(limit)

    def _cold(self, engine: Remote) -> dict[str, float]:
        """A prompt that nobody has; what is saved of it is part of the cost."""
        answer = engine("ask", tokens=prompt(self._short))
        assert answer["cached"] == 0
        answer["cpu_s"] += engine("settle")["cpu_s"]
        return dict(answer)

    def _own_hit(self, engine: Remote, tokens: int) -> dict[str, float]:
        """One token behind a prompt that the engine has in its own cache."""
        beginning = self._warm["plain"][:tokens]
        answer = engine("ask", tokens=[*beginning, 0])
        if answer["cached"] != tokens:
            engine("ask", tokens=beginning)
            answer = engine("ask", tokens=[*beginning, 0])
        assert answer["cached"] == tokens, answer["cached"]
        return dict(answer)

    def _warm_hit(self, engine: Remote, tokens: list[int]) -> dict[str, float]:
        """The same prompt after the engine has lost its own cache."""
        if tokens is not self._warm.get("host") and len(tokens) == self._short:
            engine("ask", tokens=tokens)
            engine("settle")
        engine("reset")
        answer = engine("ask", tokens=tokens)
        assert answer["cached"] == len(tokens) - 1, answer["cached"]
        return dict(answer)

    def _new_process(self) -> None:
        """The disk of one engine's sidecar, read by the next engine's."""
        disk = {
            "host_capacity": "1 GiB",
            "load_timeout_s": 60,
            "nvme_path": str(self._disk / "kept"),
            "nvme_capacity": "2 GiB",
            "nvme_min_free": "1 MiB",
        }
        first = "kept" not in self._warm
        engine = self._engine("new process", disk)
        if first:
            self._warm["kept"] = prompt(self._long)
            engine("ask", tokens=self._warm["kept"])
            engine("settle")
            engine("only_in", tier="nvme")
            engine.close()
            engine = self._engine("new process", disk)
        self._touch(engine)  # what only the first prompts of a process cost
        answer = engine("ask", tokens=self._warm["kept"])
        assert answer["cached"] == self._long - 1, answer["cached"]
        self._note("warm_new_process_2048", dict(answer), self._own_hit_of(engine, self._warm["kept"]))
        engine.close()

    def _own_hit_of(self, engine: Remote, tokens: list[int]) -> dict[str, float]:
        engine("ask", tokens=[*tokens, 0])  # its last block is in the engine's cache only after this
        answer = engine("ask", tokens=[*tokens, 1])
        assert answer["cached"] == len(tokens), answer["cached"]
        return dict(answer)

    def rows(self) -> dict[str, dict[str, Any]]:
        rows = {name: its.row(name) for name, its in self.measured.items() if self.wanted(name)}
        if "host" in self._engines:
            counts = self._engines["host"]("counts")
            share = counts["hook_s"] / counts["step_s"]
            rows["hooks"] = {
                "value": counts["hook_s"],
                "limit": counts["step_s"],
                "unit": "seconds of the engine's own threads, of steps with a forward pass",
                "ratio": share,
                "reach": BOUNDS["hooks"],
                "ok": share <= BOUNDS["hooks"],
            }
        return rows


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m bench.vllm_ttft", description=(__doc__ or "").split("\n")[0]
    )
    parser.add_argument("--json", type=Path, metavar="FILE")
    parser.add_argument("--rounds", type=int, metavar="N")
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--only", action="append", default=[], metavar="NAME")
    parser.add_argument("--dir", type=Path, default=Path(".bench"), metavar="PATH")
    options = parser.parse_args(arguments)
    options.dir.mkdir(parents=True, exist_ok=True)
    rounds = options.rounds or (2 if options.quick else 9)
    with ExitStack() as stack:
        bench = Bench(options, _say, stack)
        bench.start()
        for number in range(rounds):
            _say(f"round {number + 1} of {rounds}")
            bench.round()
        rows = bench.rows()
    print(f"{machine()}; {rounds} rounds\n\n{table(rows)}")
    if options.json is not None:
        options.json.parent.mkdir(parents=True, exist_ok=True)
        options.json.write_text(json.dumps(rows, indent=2) + "\n")
    return 0


def table(rows: dict[str, dict[str, Any]]) -> str:
    lines = [
        f"{'row':24}{'ours':>9}{'limit':>9}{'ratio':>8}{'by round':>10}{'<= 95 %':>9}{'wall':>7}{'reach':>8}"
    ]
    for name, row in rows.items():
        more = [row.get("ratio_by_round"), row.get("upper_95"), row.get("wall_ratio_by_round")]
        shown = ["" if value is None else f"{value:.3f}" for value in more]
        lines.append(
            f"{name:24}{row['value']:9.3f}{row['limit']:9.3f}{row['ratio']:8.3f}"
            f"{shown[0]:>10}{shown[1]:>9}{shown[2]:>7}{row['reach']:8.2f}  {'ok' if row['ok'] else 'short'}"
        )
    return "\n".join(lines)


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


if __name__ == "__main__":
    unwind_at_sigterm()
    sys.exit(main())
