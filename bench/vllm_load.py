"""`python -m bench.vllm_load --json FILE`: an agentic workload on a real vLLM engine, alone and with tierkv.

    --sessions N,N   how many at a time (default 1,2,4,8)
    --rounds N       of both engines in turn at each load (default 3); the medians are reported
    --chart FILE     a picture of it (default: beside the JSON, .png)
    --quick          2 and 4 sessions of 4 turns, one round: shows that it runs

Each session has a system prompt in common with the others, then 12 turns that grow: what was said so far, a
question, an answer of 75 tokens. The engine's own pages hold less than what all sessions together have said, so it
throws out what it will need again. A random Llama of 4 layers on the CPU, one process. Needs the environment of
`make venv-vllm`.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

from bench.ending import unwind_at_sigterm
from bench.harness import percentile
from bench.report import machine
from bench.vllm_engine import Remote
from bench.vllm_models import tiny

SYSTEM_TOKENS, QUESTION_TOKENS, ANSWER_TOKENS = 512, 64, 75
TURNS: Final = 12
PAGES: Final = 230
"""Of the engine: 7,360 tokens. Eight sessions have 17,440 at their end, and each alone 2,180."""
BOUNDS: Final = {"p95": 0.8, "throughput": 1.1}
SIDES: Final = ("alone", "tierkv")


def prompts(sessions: int, turns: int, seed: int) -> list[list[list[int]]]:
    """For each session what is said in each turn; the first turn begins with what all have in common."""
    dice = random.Random(seed)
    system = dice.choices(range(2048), k=SYSTEM_TOKENS)
    return [
        [
            [*(system if turn == 0 else []), *dice.choices(range(2048), k=QUESTION_TOKENS)]
            for turn in range(turns)
        ]
        for _ in range(sessions)
    ]


def measure(sessions: int, turns: int, seed: int, engines: dict[str, Remote]) -> dict[str, dict[str, float]]:
    """Both engines, one after the other, with the same prompts, each beginning with nothing."""
    found = {}
    for side in SIDES:
        engine = engines[side]
        engine("settle")
        engine("reset")
        told = engine("converse", said=prompts(sessions, turns, seed), answer_tokens=ANSWER_TOKENS)
        firsts = told["first_token_s"]
        found[side] = {
            "p50_s": percentile(firsts, 0.5),
            "p95_s": percentile(firsts, 0.95),
            "p99_s": percentile(firsts, 0.99),
            "tokens_per_s": told["output_tokens"] / told["wall_s"],
            "wall_s": told["wall_s"],
            "cpu_s": told["cpu_s"],
            "computed_share": told["computed_tokens"] / told["prompt_tokens"],
        }
    return found


def median_of(rounds: Sequence[dict[str, dict[str, float]]]) -> dict[str, dict[str, float]]:
    return {
        side: {name: statistics.median(one[side][name] for one in rounds) for name in rounds[0][side]}
        for side in SIDES
    }


def verdict(level: dict[str, Any]) -> dict[str, Any]:
    """tierkv over vLLM alone."""
    ratios = {
        name: level["tierkv"][name] / level["alone"][name]
        for name in ("p50_s", "p95_s", "p99_s", "tokens_per_s", "cpu_s")
    }
    ok = ratios["p95_s"] <= BOUNDS["p95"] and ratios["tokens_per_s"] >= BOUNDS["throughput"]
    return level | {"ratio": ratios, "ok": ok}


def draw(levels: dict[str, dict[str, Any]], path: Path) -> None:
    """Waits and throughput beside each other, by load."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, (waits, speed) = pyplot.subplots(1, 2, figsize=(11, 4.2), layout="constrained")
    loads = [int(name) for name in levels]
    for side, colour in zip(SIDES, ("#8a8a8a", "#1b6ca8"), strict=True):
        name = "vLLM alone" if side == "alone" else "vLLM with tierkv"
        for measure_name, style in (("p50_s", ":"), ("p95_s", "-"), ("p99_s", "--")):
            values = [level[side][measure_name] for level in levels.values()]
            label = f"{name}, {measure_name[:3]}"
            waits.plot(loads, values, style, color=colour, marker="o", markersize=4, label=label)
        values = [level[side]["tokens_per_s"] for level in levels.values()]
        speed.plot(loads, values, color=colour, marker="o", label=name)
    waits.set(
        title="Time to first token", xlabel="sessions at a time", ylabel="seconds", xscale="log", yscale="log"
    )
    speed.set(title="Throughput", xlabel="sessions at a time", ylabel="output tokens a second", xscale="log")
    speed.set_ylim(bottom=0)
    for axes in (waits, speed):
        axes.set_xticks(loads, [str(load) for load in loads])
        axes.minorticks_off()
        axes.grid(alpha=0.3)
        axes.legend(fontsize=8)
    figure.savefig(path, dpi=110)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m bench.vllm_load", description=(__doc__ or "").split("\n")[0]
    )
    parser.add_argument("--json", type=Path, metavar="FILE")
    parser.add_argument("--chart", type=Path, metavar="FILE")
    parser.add_argument("--sessions", default=None, metavar="N,N")
    parser.add_argument("--rounds", type=int, metavar="N")
    parser.add_argument("--quick", action="store_true")
    options = parser.parse_args(arguments)
    loads = [int(load) for load in (options.sessions or ("2,4" if options.quick else "1,2,4,8")).split(",")]
    rounds = options.rounds or (1 if options.quick else 3)
    turns = 4 if options.quick else TURNS
    with tempfile.TemporaryDirectory(prefix="tierkv-bench-") as folder:
        engines = {}
        for side in SIDES:
            _say(f"{side}: an engine starts")
            connector = None if side == "alone" else {"host_capacity": "1 GiB", "load_timeout_s": 60}
            engines[side] = Remote(
                Path(folder, f"{side}.log"),
                threads_spin=False,
                model=str(tiny()),
                connector=connector,
                dtype="float32",
                num_gpu_blocks_override=PAGES,
                max_num_batched_tokens=2048,
                max_num_seqs=max(loads),
            )
        try:
            measure(1, 2, 0, engines)  # what only the first prompts of a process cost
            levels = {}
            for load in loads:
                made = []
                for number in range(rounds):
                    _say(f"{load} sessions, round {number + 1} of {rounds}")
                    made.append(measure(load, turns, 100 * load + number, engines))
                levels[str(load)] = verdict(median_of(made))
        finally:
            for engine in engines.values():
                engine.close()
    print(f"{machine()}; {rounds} rounds of {turns} turns\n\n{table(levels)}")
    if options.json is not None:
        options.json.parent.mkdir(parents=True, exist_ok=True)
        highest = levels[str(max(loads))]
        told = {"levels": levels, "highest": highest["ratio"] | {"ok": highest["ok"]}, "reach": BOUNDS}
        options.json.write_text(json.dumps(told, indent=2) + "\n")
    chart = options.chart or (options.json.with_suffix(".png") if options.json is not None else None)
    if chart is not None:
        draw(levels, chart)
    return 0


def table(levels: dict[str, dict[str, Any]]) -> str:
    lines = [
        f"{'sessions':>8}  {'':8}{'p50':>8}{'p95':>8}{'p99':>8}{'tokens/s':>10}{'CPU s':>8}{'computed':>10}"
    ]
    for load, level in levels.items():
        for side in SIDES:
            its = level[side]
            lines.append(
                f"{load:>8}  {side:8}{its['p50_s']:8.3f}{its['p95_s']:8.3f}{its['p99_s']:8.3f}"
                f"{its['tokens_per_s']:10.1f}{its['cpu_s']:8.1f}{its['computed_share']:10.0%}"
            )
        ratio = level["ratio"]
        lines.append(
            f"{'':8}  {'ratio':8}{ratio['p50_s']:8.2f}{ratio['p95_s']:8.2f}{ratio['p99_s']:8.2f}"
            f"{ratio['tokens_per_s']:10.2f}{ratio['cpu_s']:8.2f}"
        )
    return "\n".join(lines)


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


if __name__ == "__main__":
    unwind_at_sigterm()
    sys.exit(main())
