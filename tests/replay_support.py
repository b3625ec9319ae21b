"""Traces for tests: the recorded ones of ``bench/traces``, short pieces of them, and made-up ones."""

import random
from functools import cache
from pathlib import Path

from tierkv.replay.formats import read_trace
from tierkv.replay.traces import Request, Trace

TRACES = Path(__file__).parent.parent / "bench" / "traces"
NAMES = ("conv_a", "synth_a", "agentic_a")


@cache
def recorded(name: str) -> Trace:
    return read_trace(TRACES / f"{name}.jsonl.gz")


@cache
def piece(name: str, requests: int) -> Trace:
    """The first so many requests."""
    whole = recorded(name)
    return Trace(f"{name}[:{requests}]", whole.block_tokens, whole.requests[:requests])


def made_up(seed: int, *, requests: int = 300, heads: int = 8, longest: int = 12) -> Trace:
    """Prompts of a few families: each goes on from a prefix of an earlier one, or begins anew."""
    dice = random.Random(seed)
    prompts: list[list[int]] = []
    count = 0
    found = []
    for number in range(requests):
        past: list[int] = []
        if prompts and dice.random() < 0.8:
            past = dice.choice(prompts[-40:])
            past = past[: dice.randint(0, len(past))] if dice.random() < 0.5 else past
        new = dice.randint(0 if past else 1, longest)
        ids = [*past, *range(count, count + new)]
        count += new
        prompts.append(ids)
        if len(prompts) > heads * 10:
            prompts.pop(0)
        found.append(Request(float(number), ids, len(ids) * 16))
    return Trace(f"made_up({seed})", 16, found)


def capacity(trace: Trace, percent: float) -> int:
    return int(trace.blocks * percent / 100)
