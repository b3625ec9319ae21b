"""What goes wrong while an engine loads and saves: no request sees an error, waits too long, or says anything
else."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.vllm.running import Plain, Runner

PROMPT = "320:21"
ALL_BUT_ONE = 319


@pytest.fixture(scope="session")
def reference(plain: Plain) -> list[int]:
    return plain.said([PROMPT])[PROMPT]


def test_d13_d14_aborts_at_every_stage(runner: Runner, reference: list[int]) -> None:
    found = runner.run("trouble.aborts", name=PROMPT)
    held = found["held"]
    assert found["first"]["tokens"] == reference
    for stage in ("queued", "asked", "loading", "prefill", "decode", "saving", "stray"):
        assert held[stage]["tokens"] == reference, stage
        assert held[stage]["cached"] == ALL_BUT_ONE, stage
    assert held["while it loads"] == "FINISHED_ABORTED"  # vLLM keeps its pages until we say that it is over
    assert held["pages while it is saved"] >= 6
    assert found["counts"]["stray"] >= 4
    assert not found["counts"].get("hook_errors")


def test_d14_preemption(runner: Runner, plain: Plain) -> None:
    names, words = ["256:31", "256:32", "256:33", "256:34", "256:35"], 96
    found = runner.run("trouble.preemption", names=names, max_tokens=words)
    want = plain.said(names, max_tokens=words)
    assert found["preemptions"] > 0
    for turn in found["answers"]:
        assert [answer["tokens"] for answer in turn] == [want[name] for name in names]
    assert not found["counts"].get("hook_errors")


def _check_damage(found: Any, want: Any, names: list[str]) -> None:
    for turn in ("cold", "warm", "again"):
        for name in names:
            assert found[turn][name]["tokens"] == want[name], (turn, name)


def test_d9_bits_flipped_on_the_disk(runner: Runner, plain: Plain, tmp_path: Path) -> None:
    names = [PROMPT, "200:22"]
    found = runner.run("trouble.damaged", names=names, folder=str(tmp_path / "disk"), where="disk")
    _check_damage(found, plain.said(names), names)
    assert all(found["warm"][name]["cached"] < 32 for name in names), "nothing of it may be used"
    assert found["again"][PROMPT]["cached"] == ALL_BUT_ONE, "what was computed again is stored again"
    assert not found["counts"].get("hook_errors")


def test_negative_control_bytes_that_nobody_verifies_change_the_answer(
    runner: Runner, plain: Plain, tmp_path: Path
) -> None:
    """The other tests would notice wrong bytes."""
    found = runner.run("trouble.damaged", names=[PROMPT], folder=str(tmp_path / "disk"), where="ram")
    want = plain.said([PROMPT])
    assert found["warm"][PROMPT]["cached"] == ALL_BUT_ONE
    assert found["warm"][PROMPT]["tokens"] != want[PROMPT]


@pytest.mark.parametrize("freeze_first", [True, False], ids=["before the answer", "between match and load"])
def test_d25_the_sidecar_is_killed(runner: Runner, reference: list[int], freeze_first: bool) -> None:
    found = runner.run("trouble.killed", name=PROMPT, freeze_first=freeze_first)
    for title in ("cold", "killed", "after", "stored again"):
        assert found[title]["tokens"] == reference, title
        assert found[title]["reason"] == "length"
    assert found["stored again"]["cached"] == ALL_BUT_ONE
    assert not found["counts"].get("hook_errors")
    if freeze_first:
        assert found["killed"]["cached"] == 0
    else:
        assert found["counts"]["failed_loads"] == 1


def test_d8_the_load_of_a_model_with_two_block_tables_fails(runner: Runner, plain: Plain) -> None:
    found = runner.run("trouble.killed", name=PROMPT, freeze_first=False, model="hybrid")
    want = plain.said([PROMPT], name="hybrid")[PROMPT]
    for title in ("cold", "killed", "after", "stored again"):
        assert found[title]["tokens"] == want, title
    assert found["stored again"]["cached"] == ALL_BUT_ONE
    assert found["counts"]["failed_loads"] == 1


def test_d17_valkey_freezes_in_the_middle_of_a_load(runner: Runner, reference: list[int]) -> None:
    found = runner.run("trouble.frozen", name=PROMPT)
    for title in ("cold", "frozen", "thawed"):
        assert found[title]["tokens"] == reference, title
    assert found["frozen"]["cached"] == 0
    assert found["frozen"]["queued_s"] < 3 + 2, "the deadline is 3 s"
    assert found["thawed"]["cached"] == ALL_BUT_ONE
    assert not found["counts"].get("hook_errors")


def test_d13_an_answer_that_comes_too_late(runner: Runner, reference: list[int]) -> None:
    found = runner.run("trouble.slow", name=PROMPT)
    for title in ("cold", "stopped", "going on"):
        assert found[title]["tokens"] == reference, title
    assert found["stopped"]["cached"] == 0
    assert found["stopped"]["queued_s"] < 1 + 2, "the deadline is 1 s"
    assert found["going on"]["cached"] == ALL_BUT_ONE
    assert found["counts"]["late"] >= 1
