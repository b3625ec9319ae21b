"""Engines on different hosts, and engines whose parts are in different processes."""

from __future__ import annotations

from pathlib import Path

from tests.vllm.running import Plain, Runner, sidecar
from tests.vllm.scenarios import LONG, SHARED
from tests.vllm.test_basics import cached, expected, said
from tierkv.testing.faults.server import running_server


def test_d8_two_ranks_each_keep_their_own_half(runner: Runner, plain: Plain) -> None:
    """Tensor parallelism: every block is in two parts, each saved and loaded by the worker that has its heads."""
    names = list(SHARED)
    options = {"processes": 3, "tensor_parallel_size": 2, "distributed_executor_backend": "mp"}
    want = plain.said(names, **options)
    found = runner.run("scenarios.lengths", names=names, **options)
    assert said(found["cold"], names) == said(found["warm"], names) == want
    assert cached(found["cold"], names) == dict.fromkeys(names, 0)
    assert cached(found["warm"], names) == {name: expected(name) for name in names}
    assert not found["counts"]["hook_errors"]
    assert not found["counts"]["failed_loads"]


def test_prefill_on_one_host_and_decode_on_another(runner: Runner, tmp_path: Path, plain: Plain) -> None:
    """Each host has its sidecar, and they share a Valkey server: nobody on the second announces what comes, so the
    decode side looks until it is there."""
    name = LONG[0]
    want = plain.said([name], max_tokens=16)[name]
    here, there = tmp_path / "prefill", tmp_path / "decode"
    here.mkdir()
    there.mkdir()
    with running_server() as server:
        tiers = {"host_capacity": "256 MiB", "valkey_url": server.address, "valkey_write": "through"}
        with sidecar(here, **tiers) as producing, sidecar(there, **tiers) as consuming:
            prefill = runner.session(connector={"socket": producing}, kv_role="kv_producer")
            decode = runner.session(
                connector={"socket": consuming, "watch_s": 60, "grace_s": 60, "load_timeout_s": 60},
                kv_role="kv_consumer",
            )
            with prefill, decode:
                decode.begin(do="ask", name=name, max_tokens=16, params={"do_remote_prefill": True})
                made = prefill.order(do="ask", name=name, max_tokens=1, params={"do_remote_decode": True})
                assert made["tokens"] == want[:1]
                found = decode.answer()
                assert found["tokens"] == want
                assert found["cached"] == expected(name)
                for engine in (prefill, decode):
                    engine.order(do="held")
