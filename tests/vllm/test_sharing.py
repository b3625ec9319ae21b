"""Several engines with one store, and what must not be mixed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.vllm.engine import eventually
from tests.vllm.running import Plain, Runner, Session, sidecar
from tests.vllm.scenarios import COMMON, LONG, SHARED
from tests.vllm.test_basics import cached, expected, said
from tierkv.testing.faults.server import running_server

NAMES = list(SHARED)


@pytest.fixture(scope="session")
def llama(plain: Plain) -> Any:
    return {name: plain.said(NAMES)[name] for name in NAMES}


def test_two_engines_on_one_sidecar(runner: Runner, tmp_path: Path, llama: Any) -> None:
    """One process and three: the same names, the same bytes. Another model's are others."""
    with sidecar(tmp_path, host_capacity="512 MiB") as address:
        connector = {"socket": address}
        first = runner.run("scenarios.with_store", names=NAMES, connector=connector)
        second = runner.run("scenarios.with_store", names=NAMES, connector=connector, processes=3)
        other = runner.run("scenarios.with_store", names=NAMES[:1], connector=connector, name="other")
    assert said(first, NAMES) == said(second, NAMES) == llama
    assert cached(first, NAMES) == dict.fromkeys(NAMES, 0)
    assert cached(second, NAMES) == {name: expected(name) for name in NAMES}
    assert other[NAMES[0]]["cached"] == 0


def test_two_engines_on_two_sidecars_that_share_valkey(runner: Runner, llama: Any) -> None:
    with running_server() as server:
        connector = {"valkey_url": server.address}
        first = runner.run("scenarios.with_store", names=NAMES, connector=connector)
        second = runner.run("scenarios.with_store", names=NAMES, connector=connector)
    assert said(first, NAMES) == said(second, NAMES) == llama
    assert cached(second, NAMES) == {name: expected(name) for name in NAMES}


def test_prefix_caching_off(runner: Runner, llama: Any) -> None:
    """The engine has no cache of its own; the second turn is as warm as after a reset."""
    found = runner.run("scenarios.lengths", names=NAMES, enable_prefix_caching=False)
    for turn in ("cold", "warm", "both"):
        assert said(found[turn], NAMES) == llama
    assert cached(found["cold"], NAMES) == dict.fromkeys(NAMES, 0)
    assert cached(found["both"], NAMES) == {name: expected(name) for name in NAMES}


@pytest.mark.parametrize(
    ("options", "block"),
    [
        ({"block_size": 128, "connector": {"block_tokens": 128}}, 128),
        ({"prefix_caching_hash_algo": "sha256_cbor", "connector": {"block_tokens": 64}}, 64),
        ({"prefix_caching_hash_algo": "xxhash"}, 32),
    ],
    ids=["128", "cbor and two engine blocks", "xxhash"],
)
def test_blocks_and_hashes(runner: Runner, llama: Any, options: dict[str, Any], block: int) -> None:
    found = runner.run("scenarios.lengths", names=NAMES, **options)
    for turn in ("cold", "warm"):
        assert said(found[turn], NAMES) == llama
    assert cached(found["warm"], NAMES) == {name: expected(name, block) for name in NAMES}
    assert not found["counts"].get("hook_errors")


def test_d4_a_sliding_window_and_full_attention(runner: Runner, plain: Plain) -> None:
    names = ["40:44", "96:45", "330:46", "512:47"]
    want = plain.said(names, name="hybrid")
    found = runner.run("scenarios.lengths", names=names, name="hybrid")
    for turn in ("cold", "warm", "both"):
        assert said(found[turn], names) == want, turn
    assert cached(found["warm"], names) == {name: expected(name) for name in names}
    assert not found["counts"].get("hook_errors")
    assert not found["counts"].get("failed_loads")


def test_chunks_and_common_beginnings(runner: Runner, plain: Plain) -> None:
    names = list(COMMON)
    want = {name: plain.said(names)[name] for name in names}
    found = runner.run("sharing.mixed", names=names)
    for turn in ("cold", "at once"):
        assert said(found[turn], names) == want, turn
    assert cached(found["at once"], names) == {name: expected(name) for name in names}


def test_d1_d2_adapters_do_not_mix(runner: Runner, plain: Plain, tmp_path: Path) -> None:
    name = "160:61"
    want = plain.run("sharing.adapters", name=name, folder=str(tmp_path / "bare"), bare=True)
    found = runner.run("sharing.adapters", name=name, folder=str(tmp_path / "adapters"), bare=False)
    counts = found.pop("counts")
    assert {title: its["tokens"] for title, its in found.items()} == {
        title: its["tokens"] for title, its in want.items()
    }
    told = {tuple(want[f"{title}, cold"]["tokens"]) for title in ("none", "one", "two", "renewed")}
    assert len(told) == 4, "the adapters say different things, or the test would show nothing"
    assert {title: its["cached"] for title, its in found.items()} == {
        f"{title}, {turn}": 159 if turn == "warm" and title != "not told" else 0
        for title in ("none", "one", "two", "renewed", "not told")
        for turn in ("cold", "warm")
    }
    assert not counts.get("hook_errors")


def test_d1_prompts_that_are_vectors_do_not_mix(runner: Runner, plain: Plain) -> None:
    """vLLM's token ids say nothing of them; the hashes that it takes over them do."""
    length = 160
    want = plain.run("sharing.embeddings", length=length, bare=True)
    found = runner.run("sharing.embeddings", length=length, bare=False)
    counts = found.pop("counts")
    assert {title: its["tokens"] for title, its in found.items()} == {
        title: its["tokens"] for title, its in want.items()
    }
    assert want["one, cold"]["tokens"] != want["two, cold"]["tokens"], "or the test would show nothing"
    warm = length - 1
    assert {title: its["cached"] for title, its in found.items()} == {
        "one, cold": 0,
        "two, cold": 0,
        "one, warm": warm,
        "two, warm": warm,
    }
    assert not counts.get("hook_errors")


def test_a_real_model(runner: Runner, plain: Plain) -> None:
    """SmolLM2, in three processes."""
    names = ["300:71", "512:72"]
    options = {"name": "smollm2", "dtype": "bfloat16"}
    want = plain.said(names, processes=3, **options)
    found = runner.run("scenarios.lengths", names=names, processes=3, **options)
    assert said(found["warm"], names) == said(found["cold"], names) == want
    assert cached(found["warm"], names) == {name: expected(name) for name in names}


def _orders(running: Session, *orders: dict[str, Any]) -> list[Any]:
    return [running.order(**order) for order in orders]


def test_prefill_in_one_engine_and_decode_in_another(runner: Runner, tmp_path: Path, plain: Plain) -> None:
    """The decode side asks first and waits for what the other announces; later the producer is killed in the middle."""
    names = list(LONG)
    want = plain.said(names, max_tokens=16)
    with sidecar(tmp_path, host_capacity="512 MiB") as address:
        connector = {"socket": address, "watch_s": 60, "grace_s": 30}
        prefill = runner.session(connector=connector, kv_role="kv_producer", max_num_batched_tokens=64)
        decode = runner.session(connector=connector, kv_role="kv_consumer")
        there, here = {"do_remote_decode": True}, {"do_remote_prefill": True}
        with prefill, decode:
            decode.begin(do="ask", name=names[0], max_tokens=16, params=here)
            made = prefill.order(do="ask", name=names[0], max_tokens=1, params=there)
            assert made["tokens"] == want[names[0]][:1]
            found = decode.answer()
            assert found["tokens"] == want[names[0]]
            assert found["cached"] == expected(names[0])

            decode.begin(do="ask", name=names[1], max_tokens=16, params=here)
            prefill.begin(do="ask", name=names[1], max_tokens=1, params=there)
            prefill.wait_for(f"ASKED {names[1]}")
            _wait_until_something_is_stored(address, expected(names[0]) // 32)
            prefill.kill()
            found = decode.answer()
            assert found["tokens"] == want[names[1]]
            assert 0 < found["cached"] <= expected(names[1])
            assert found["queued_s"] < 60
            _orders(decode, {"do": "held"})


def _wait_until_something_is_stored(address: str, before: int) -> None:
    import tierkv

    with tierkv.connect(address, owner="test") as client:

        def more() -> bool:
            counters = client.stats()["counters"]
            assert isinstance(counters, dict)
            return counters.get("stored_blocks_total/host", 0) > before + 1

        eventually(more, "the producer has stored some of its blocks")
