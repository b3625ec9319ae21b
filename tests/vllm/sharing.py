"""Scenarios with several engines, or several things that must not be mixed."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from tests.vllm.child import ANSWER
from tests.vllm.engine import Engine, only_in
from tests.vllm.models import SIZES, write_adapter
from tests.vllm.scenarios import CONNECTOR, _shared, ask_all, words


def session(connector: dict[str, Any], **options: Any) -> Any:
    """An engine that does what it is told: a line of JSON each, on standard input. ``READY``, and a line for each
    answer."""
    engine = Engine(_shared(connector) if "socket" in connector else CONNECTOR | connector, **options)
    print("READY", flush=True)
    for line in sys.stdin:
        order = json.loads(line)
        what = order.pop("do")
        answer: Any = None
        if what == "ask":
            print(f"ASKED {order['name']}", flush=True)
            answer = engine.one(words(order.pop("name")), **order).plain()
        elif what == "settle":
            engine.settle()
        elif what == "reset":
            engine.reset()
        elif what == "only_in":
            only_in(engine, order["tier"])
        elif what == "held":
            engine.check_nothing_is_held()
        elif what == "counts":
            answer = engine.counts()
        print(f"{ANSWER}{json.dumps(answer)}", flush=True)
    engine.close()
    return "closed"


def adapters(name: str, folder: str, *, bare: bool) -> Any:
    """Two adapters and none, each with the prompt of the others; then one is trained further, under its old name;
    then its files change once more, and nobody tells the engine. ``bare``: vLLM alone, its own cache off."""
    from vllm.lora.request import LoRARequest

    one, two = Path(folder, "one"), Path(folder, "two")
    write_adapter(one, 1)
    write_adapter(two, 2)
    loras = {"none": None, "one": LoRARequest("one", 1, str(one)), "two": LoRARequest("two", 2, str(two))}
    lora_options = {"enable_lora": True, "max_loras": 2, "max_lora_rank": 8}
    caching = {"enable_prefix_caching": False} if bare else {}
    engine = Engine(None if bare else CONNECTOR, **lora_options, **caching)
    found: dict[str, Any] = {}

    def ask(turn: str, title: str, lora: Any) -> None:
        found[f"{title}, {turn}"] = engine.one(words(name), lora=lora).plain()
        if not bare:
            engine.settle()
            engine.reset()

    for turn in ("cold", "warm"):
        for title, lora in loras.items():
            ask(turn, title, lora)
    write_adapter(one, 3)
    for turn in ("cold", "warm"):
        ask(turn, "renewed", LoRARequest("one", 1, str(one), load_inplace=True))
    write_adapter(one, 4)
    for turn in ("cold", "warm"):
        ask(turn, "not told", loras["one"])
    if not bare:
        engine.check_nothing_is_held()
        found["counts"] = engine.counts()
    engine.close()
    return found


def mixed(names: list[str]) -> Any:
    """Prompts that are alike up to a point, and several at once."""
    engine = Engine(CONNECTOR, max_num_batched_tokens=128)
    found: dict[str, Any] = {"cold": ask_all(engine, names)}
    engine.reset()
    answers = engine.ask([words(name) for name in names])
    found["at once"] = {name: answer.plain() for name, answer in zip(names, answers, strict=True)}
    engine.check_nothing_is_held()
    found["counts"] = engine.counts()
    engine.close()
    return found


def embeddings(length: int, *, bare: bool) -> Any:
    """Two prompts that are given as vectors and not as tokens: the same number of them, and nothing else alike."""
    import torch

    caching = {"enable_prefix_caching": False} if bare else {}
    engine = Engine(None if bare else CONNECTOR, enable_prompt_embeds=True, **caching)
    width = SIZES["hidden_size"]
    vectors = {
        title: torch.randn(length, width, generator=torch.Generator().manual_seed(seed))
        * SIZES["initializer_range"]
        for seed, title in enumerate(("one", "two"))
    }
    found: dict[str, Any] = {}
    for turn in ("cold", "warm"):
        for title, its in vectors.items():
            found[f"{title}, {turn}"] = engine.answer([{"prompt_embeds": its}])[0].plain()
        if not bare:
            engine.settle()
            engine.reset()
    if not bare:
        engine.check_nothing_is_held()
        found["counts"] = engine.counts()
    engine.close()
    return found
