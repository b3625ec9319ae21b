"""What an engine goes through. Each function runs in a process of its own and tells what it saw; the tests judge.

A prompt is named ``LENGTH:SEED``, or several of those joined by ``+``; the same name is the same prompt everywhere.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tests.vllm.engine import Engine, only_in, prompt

CONNECTOR = {"block_tokens": 32, "host_capacity": "256 MiB", "load_timeout_s": 60}
"""Blocks as short as the engine's own, and time enough for the busiest machine."""

LENGTHS = ("1:1", "31:2", "32:3", "33:4", "64:5", "65:6", "500:7", "512:8")
COMMON = ("300:51", "100:51+200:52", "300:51+100:53", "64:54", "64:54+64:55")
SHARED = ("96:41", "200:42", "512:43")
TROUBLED = ("320:21", "200:22")
WISHED = ("160:1", "160:2")
LONG = ("1000:91", "1900:92")
LLAMA_PROMPTS = (*LENGTHS, *COMMON, *SHARED, *TROUBLED, *WISHED)
"""All that the tests ask their usual model."""


def words(name: str) -> list[int]:
    """The tokens of a named prompt."""
    return [token for piece in name.split("+") for token in prompt(*map(int, piece.split(":")))]


def ask_all(engine: Engine, names: Sequence[str], **options: Any) -> dict[str, Any]:
    """One after the other."""
    return {name: engine.one(words(name), **options).plain() for name in names}


def plain(names: Sequence[str], max_tokens: int = 8, **options: Any) -> Any:
    """vLLM alone, its own cache off."""
    engine = Engine(None, enable_prefix_caching=False, **options)
    return ask_all(engine, names, max_tokens=max_tokens)


def lengths(names: Sequence[str], connector: dict[str, Any] | None = None, **options: Any) -> Any:
    """Cold, after the engine has lost its own cache, and with it."""
    engine = Engine(CONNECTOR | (connector or {}), **options)
    found = {"cold": ask_all(engine, names)}
    engine.reset()
    found["warm"] = ask_all(engine, names)
    found["both"] = ask_all(engine, names)
    found["counts"] = engine.counts()
    engine.check_nothing_is_held()
    engine.close()
    return found


def wishes(name: str) -> Any:
    """Salts, and what a request may wish for."""
    engine = Engine(CONNECTOR)
    found: dict[str, Any] = {}

    def ask(title: str, seed: int, **options: Any) -> None:
        engine.settle()
        engine.reset()
        found[title] = engine.one(words(f"{name.split(':')[0]}:{seed}"), **options).plain()

    ask("salt a", 1, salt="a")
    ask("salt b", 1, salt="b")
    ask("no salt", 1)
    ask("salt a again", 1, salt="a")
    ask("not stored", 2, params={"tierkv": {"no_store": True}})
    ask("was not stored", 2, params={"tierkv": {"priority": 3, "ttl_s": 3600}})
    ask("not loaded", 2, params={"tierkv": {"no_load": True}})
    ask("loaded", 2)
    ask("nonsense", 2, params={"tierkv": {"colour": "red"}})
    found["counts"] = engine.counts()
    engine.check_nothing_is_held()
    found["reset"] = engine.connector.reset_cache()
    ask("after reset_cache", 2)
    ask("stored again", 2)
    engine.close()
    return found


def events(name: str) -> Any:
    """What vLLM tells others of the store's blocks, and where it says that tokens came from."""
    from vllm.config import KVEventsConfig

    from tests.vllm.engine import eventually

    quiet = KVEventsConfig(enable_kv_cache_events=True, publisher="null")
    engine = Engine(CONNECTOR, kv_events_config=quiet)
    told: list[Any] = []
    scheduler = engine.scheduler
    publish = scheduler.kv_event_publisher.publish

    def listen(batch: Any) -> None:
        told.extend(batch.events)
        publish(batch)

    scheduler.kv_event_publisher.publish = listen
    engine.one(words(name))
    engine.settle()
    engine.reset()
    engine.one(words(name))
    engine.settle()

    def of_store(kind: str) -> list[Any]:
        return [one for one in told if type(one).__name__ == kind and one.medium == "CPU"]

    found: dict[str, Any] = {
        "stored": [len(one.block_hashes) for one in of_store("BlockStored")],
        "tokens": [token for one in of_store("BlockStored") for token in one.token_ids],
        "first has a parent": of_store("BlockStored")[0].parent_block_hash is not None,
    }
    hashes = {block for one in of_store("BlockStored") for block in one.block_hashes}
    with engine.store() as client:
        client.clear().result(60)

    def all_removed() -> bool:
        engine.one([1], 1)
        return {block for one in of_store("BlockRemoved") for block in one.block_hashes} == hashes

    eventually(all_removed, "all removals are told")
    found["counts"] = engine.counts()
    engine.close()
    return found


def with_store(names: Sequence[str], connector: dict[str, Any], **options: Any) -> Any:
    """One engine of several that share a store, at the same time or one after the other."""
    flush_to = options.pop("flush_to", None)
    engine = Engine(CONNECTOR | connector if "socket" not in connector else _shared(connector), **options)
    found = ask_all(engine, names)
    engine.settle()
    if flush_to:
        only_in(engine, flush_to)
    engine.check_nothing_is_held()
    found["counts"] = engine.counts()
    engine.close()
    return found


def _shared(connector: dict[str, Any]) -> dict[str, Any]:
    return {"block_tokens": 32, "load_timeout_s": 60} | connector
