"""Cold, warm, in one process and in three; what lengths give, who shares, what a request may wish for."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tests.vllm.running import Plain, Runner
from tests.vllm.scenarios import LENGTHS, SHARED, WISHED, words

NAMES = list(LENGTHS)
SHORT = list(SHARED)


def expected(name: str, block: int = 32) -> int:
    """Tokens that need not be computed: full blocks, and all but one of a prompt that is full blocks alone."""
    tokens = sum(int(piece.split(":")[0]) for piece in name.split("+"))
    return min(tokens - tokens % block, tokens - 1)


def said(answers: dict[str, Any], names: list[str]) -> dict[str, Any]:
    return {name: answers[name]["tokens"] for name in names}


def cached(answers: dict[str, Any], names: list[str]) -> dict[str, int]:
    return {name: answers[name]["cached"] for name in names}


def test_d7_every_length_comes_back_with_one_token_to_compute(runner: Runner, plain: Plain) -> None:
    found = runner.run("scenarios.lengths", names=NAMES)
    want = {name: plain.said(NAMES)[name] for name in NAMES}
    assert said(found["cold"], NAMES) == want
    assert said(found["warm"], NAMES) == want
    assert said(found["both"], NAMES) == want
    assert cached(found["cold"], NAMES) == dict.fromkeys(NAMES, 0)
    assert cached(found["warm"], NAMES) == {name: expected(name) for name in NAMES}
    assert cached(found["both"], NAMES) == {name: expected(name) for name in NAMES}
    assert not found["counts"].get("hook_errors")
    assert not found["counts"].get("failed_loads")


def test_three_processes(runner: Runner, tmp_path: Path, plain: Plain) -> None:
    """And a second engine, in a new process, finds on the disk what the first one has left there."""
    wanted = {name: plain.said(SHORT)[name] for name in SHORT}
    disk = {"nvme_path": str(tmp_path / "disk"), "nvme_capacity": "1 GiB", "nvme_min_free": "1 MiB"}
    found = runner.run("scenarios.lengths", names=SHORT, connector=disk, processes=3)
    assert said(found["warm"], SHORT) == said(found["cold"], SHORT) == wanted
    assert cached(found["warm"], SHORT) == {name: expected(name) for name in SHORT}
    later = runner.run("scenarios.with_store", names=SHORT, connector=disk, processes=3)
    assert said(later, SHORT) == wanted
    assert cached(later, SHORT) == {name: expected(name) for name in SHORT}


def test_d3_salts_and_wishes(runner: Runner, plain: Plain) -> None:
    found = runner.run("scenarios.wishes", name="160:1")
    reference = plain.said(WISHED)
    counts = {
        title: answer["cached"]
        for title, answer in found.items()
        if isinstance(answer, dict) and "cached" in answer
    }
    assert counts == {
        "salt a": 0,
        "salt b": 0,
        "no salt": 0,
        "salt a again": 159,
        "not stored": 0,
        "was not stored": 0,
        "not loaded": 0,
        "loaded": 159,
        "nonsense": 159,
        "after reset_cache": 0,
        "stored again": 159,
    }
    for title in counts:
        name = "160:1" if "salt" in title else "160:2"
        assert found[title]["tokens"] == reference[name], title
    assert not found["counts"].get("hook_errors")


def test_d28_events(runner: Runner) -> None:
    found = runner.run("scenarios.events", name="160:1")
    assert sum(found["stored"]) == 5
    assert found["tokens"] == words("160:1")
    assert not found["first has a parent"]
    assert found["counts"]["saved_blocks"] == 5
    assert found["counts"]["loads"] == 1
    assert not found["counts"].get("hook_errors")
