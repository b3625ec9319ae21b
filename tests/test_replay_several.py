"""``tierkv replay`` with colder tiers, as a user runs it: what was counted by hand, and the sums that must agree."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from replay_support import TRACES, made_up

from tierkv import cli
from tierkv.policies.lru import LruPolicy
from tierkv.replay.one_tier import replay

MIB = 1 << 20
# Three prompts of two blocks, the first of them again: host RAM holds two, so only what went to a colder tier is hit.
TURNS = ([1, 2], [3, 4], [5, 6], [1, 2])
DAY_S = 86_400


def trace_of(path: Path, prompts: Any = TURNS, *, step_ms: int = 1000) -> Path:
    lines = [
        {"timestamp": number * step_ms, "input_length": 512 * len(ids), "hash_ids": ids}
        for number, ids in enumerate(prompts)
    ]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def cells(tmp_path: Path, *words: str) -> list[dict[str, Any]]:
    out = tmp_path / "out.json"
    trace = tmp_path / "turns.jsonl"
    if not trace.exists():
        trace_of(trace)
    assert cli.main(["replay", str(trace), *words, "--json", str(out)]) == 0
    found: list[dict[str, Any]] = json.loads(out.read_text())["cells"]
    return found


LRU = ("--policy", "lru", "--capacity", "2", "--block-bytes", "1MiB", "--admission", "always")


def test_two_tiers_counted_by_hand(tmp_path: Path) -> None:
    (cell,) = cells(tmp_path, *LRU, "--nvme", "4", "--prefill-tokens-per-s", "1000", "--nvme-tbw", "1")
    host, nvme = cell["tiers"]["host"], cell["tiers"]["nvme"]
    assert (host["hit_blocks"], nvme["hit_blocks"], nvme["hit_tokens"]) == (0, 2, 1024)
    # Each of the four prompts makes the one before it leave host RAM; of those six blocks four fit behind it, and the
    # first prompt is read again before it would leave.
    assert (host["evicted_blocks"], nvme["evicted_blocks"]) == (6, 2)
    assert cell["moved_bytes"] == {
        "engine>host": 6 * MIB,
        "host>engine": 2 * MIB,
        "host>nvme": 6 * MIB,
        "nvme>host": 2 * MIB,
    }
    assert cell["prefill_saved_s"] == pytest.approx(1.023)  # one token of the prompt is computed all the same
    assert cell["nvme_written_bytes_a_day"] == pytest.approx(6 * MIB * DAY_S / 3)
    assert cell["nvme_life_years"] == pytest.approx(1e12 / (6 * MIB * DAY_S / 3) / 365.25)
    assert cell["optimum_hit_percent"] == pytest.approx(25)


def test_none_behind_it_is_the_tier_alone(tmp_path: Path) -> None:
    made = made_up(3)
    trace_of(tmp_path / "turns.jsonl", [request.ids for request in made.requests])
    (alone,) = cells(tmp_path, *LRU, "--capacity", "60", "--nvme", "0")
    assert alone["hit_blocks"] == replay(made, 60, LruPolicy()).hit_blocks
    assert list(alone["tiers"]) == ["host"]
    assert alone["nvme_life_years"] is None


def test_every_combination_and_what_must_agree(tmp_path: Path) -> None:
    made = made_up(5)
    trace_of(tmp_path / "turns.jsonl", [request.ids for request in made.requests])
    words = [
        "--policy",
        "lru,arc",
        "--capacity",
        "30",
        "--nvme",
        "0,60MiB",
        "--valkey",
        "0,10%",
        "--block-bytes",
        "1MiB",
    ]
    found = cells(tmp_path, *words, "--admission", "always,seen_twice")
    assert len(found) == 2 * (1 + 3 * 2)
    for cell in found:
        tiers, moved = cell["tiers"], cell["moved_bytes"]
        assert sum(tier["hit_blocks"] for tier in tiers.values()) == cell["hit_blocks"]
        assert cell["hit_percent"] <= cell["optimum_hit_percent"] + 1e-9
        for name in tiers:
            if name != "host":
                assert moved[f"{name}>host"] == tiers[name]["hit_blocks"] * MIB
                here = moved[f"host>{name}"] // MIB - tiers[name]["evicted_blocks"]
                assert 0 <= here <= tiers[name]["blocks"]
    by_name = {(len(c["tiers"]), "nvme" in c["tiers"], c["policy"], c["admission"]): c for c in found}
    always, twice = (by_name[3, True, "lru", name]["moved_bytes"] for name in ("always", "seen_twice"))
    assert twice["host>nvme"] < always["host>nvme"]


def test_a_promotion_that_computes_again(tmp_path: Path) -> None:
    slow = ("--nvme", "4", "--nvme-bytes-per-s", "1KiB", "--promotion", "break_even")
    (cell,) = cells(tmp_path, *LRU, *slow)
    assert (cell["hit_blocks"], cell["recomputed_blocks"]) == (0, 2)


def test_write_rate_lives_in_the_traces_time(tmp_path: Path) -> None:
    trace_of(tmp_path / "turns.jsonl", [[2 * n, 2 * n + 1] for n in range(40)], step_ms=DAY_S * 1000)
    rated = ("--nvme", "2", "--admission", "write_rate")
    (cell,) = cells(tmp_path, *LRU, *rated)
    # One write of the tier's two blocks a day and, by the bucket, one block at a time: each day the first of two.
    assert cell["moved_bytes"]["host>nvme"] == 39 * MIB
    assert cell["tiers"]["nvme"]["refused_blocks"] == 39


def test_through_writes_what_is_stored(tmp_path: Path) -> None:
    (cell,) = cells(tmp_path, *LRU, "--nvme", "10", "--write", "through")
    assert cell["moved_bytes"]["host>nvme"] == 6 * MIB
    assert cell["tiers"]["nvme"]["hit_blocks"] == 2


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["--admission", "always"], ["--admission = 'always'", "give --nvme"]),
        (["--gpu", "h100"], ["--gpu = 'h100'", "give --nvme"]),
        (["--nvme", "big"], ["--nvme = 'big'", "64GiB"]),
        (["--nvme", "10%", "--admission", "maybe"], ["--admission = 'maybe'", "there are always"]),
        (["--nvme", "10%", "--promotion", "maybe"], ["--promotion = 'maybe'", "break_even"]),
        (["--nvme", "10%", "--nvme-tbw", "-1"], ["--nvme-tbw = -1.0", "data sheet"]),
        (["--nvme", "10%", "--gpu", "abacus"], ["--gpu = 'abacus'", "h100", "--prefill-tokens-per-s"]),
        (["--nvme", "10%", "--gpu", "0xh100"], ["--gpu = '0xh100'"]),
        (["--nvme", "10%", "--model", "gpt-17"], ["--model = 'gpt-17'", "llama-3.1-8b", "config.json"]),
        (["--nvme", "10%", "--utilisation", "2"], ["--utilisation = '2'", "up to 1"]),
        (["--nvme", "10%", "--nvme-bytes-per-s", "fast"], ["--nvme-bytes-per-s = 'fast'", "6GB"]),
        (["--nvme", "10%", "--block-bytes", "0"], ["--block-bytes = '0'", "64MiB"]),
        (["--nvme", "10%", "--nvme-tbw", "1e300"], ["--nvme-tbw = 1e+300", "data sheet"]),
        (
            ["--nvme", "10%", "--valkey-latency-s", "1ms"],
            ["--valkey-latency-s = '1ms'", "give --valkey as well"],
        ),
        (["--valkey", "10%", "--nvme-tbw", "500"], ["--nvme-tbw = 500.0", "give --nvme as well"]),
        (["--nvme", "64KiB"], ["--nvme = '64KiB'", "a block of 512 tokens takes 64 MiB"]),
        (["--nvme", "4MiB", "--capacity", "4MiB"], ["--capacity = '4MiB'", "it holds nothing"]),
        (["--nvme", "999999999999999999"], ["--nvme = '999999999999999999'", "64GiB"]),
        (["--capacity", "64GiB"], ["--capacity = '64GiB'", "--model or --block-bytes"]),
    ],
)
def test_what_cannot_be_done_is_said(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], words: list[str], told: list[str]
) -> None:
    assert cli.main(["replay", str(trace_of(tmp_path / "turns.jsonl")), *words]) == cli.USAGE
    line = capsys.readouterr().err.splitlines()[-1]
    for part in told:
        assert part in line


@pytest.mark.parametrize("none", ["0", "0B", "0 GiB"])
def test_no_tier_by_any_unit(tmp_path: Path, none: str) -> None:
    (cell,) = cells(tmp_path, "--policy", "lru", "--capacity", "2", "--nvme", none)
    assert list(cell["tiers"]) == ["host"]


def test_bytes_are_said_in_the_unit_that_says_something(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["--policy", "lru", "--capacity", "1", "--nvme", "2", "--block-bytes", "1MiB"]
    assert cli.main(["replay", str(trace_of(tmp_path / "turns.jsonl")), *words]) == 0
    row = next(line for line in capsys.readouterr().out.splitlines() if "MiB" in line and " lru " in line)
    assert "0.00 TiB" not in row
    assert "hours" in row  # of a drive of 2 MiB


def test_sizes_in_bytes_for_one_tier(tmp_path: Path) -> None:
    found = cells(tmp_path, "--policy", "lru", "--capacity", "2MiB", "--block-bytes", "1MiB")
    assert {cell["blocks"] for cell in found} == {2}


BAD = """
class Fails:
    name = "fails"
    def admit(self, info, block_hash, usage): raise RuntimeError("disk on fire")
    def counters(self): return {}
class Unsure(Fails):
    def admit(self, info, block_hash, usage): return "perhaps"
"""


@pytest.mark.parametrize(
    ("name", "told"),
    [("Fails", "admit raised RuntimeError: disk on fire"), ("Unsure", "admit answered 'perhaps'")],
)
def test_an_admission_policy_that_fails_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], name: str, told: str
) -> None:
    (tmp_path / "bad_admission.py").write_text(BAD)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "bad_admission", raising=False)
    trace = trace_of(tmp_path / "turns.jsonl")
    words = ["replay", str(trace), *LRU, "--nvme", "4", "--admission", f"bad_admission:{name}"]
    assert cli.main(words) == cli.USAGE
    line = capsys.readouterr().err.splitlines()[-1]
    assert f"--admission = 'bad_admission:{name}'" in line
    assert f"in request 2 (block references 3 to 4): {told}" in line


def test_tables_and_the_chart(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    picture = tmp_path / "out.png"
    trace = trace_of(tmp_path / "turns.jsonl")
    words = ["replay", str(trace), *LRU, "--nvme", "0,4", "--valkey", "2", "--png", str(picture)]
    # A process of its own, since matplotlib opens its fonts at the first picture and keeps them open.
    done = subprocess.run(
        [sys.executable, "-m", "tierkv.cli", *words], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert picture.read_bytes().startswith(b"\x89PNG\r\n\x1a\n")
    lines = done.stdout.splitlines()
    heads = next(line for line in lines if "from valkey" in line).split()
    assert heads[:4] == ["host", "nvme", "valkey", "policy"]
    row = next(line.split() for line in lines if line.startswith("2     4 "))
    assert row[:7] == ["2", "4", "2", "lru", "always", "25.00%", "100.0%"]
    for option in (
        "--model: llama-3.1-8b",
        "--block-bytes: 1 MiB (given)",
        "--utilisation: 0.4",
        "--nvme-tbw: ",
    ):
        assert any(option in line for line in lines), option


def test_the_figures_of_the_page_are_those_of_the_replayer(tmp_path: Path) -> None:
    """The first row of docs/policies.md for several tiers; whoever changes a rule runs the page's command again."""
    words = ["--policy", "lru", "--capacity", "64GiB", "--nvme", "1TiB", "--admission", "always"]
    words += ["--json", str(tmp_path / "out.json")]
    assert cli.main(["replay", str(TRACES / "conv_a.jsonl.gz"), *words]) == 0
    (cell,) = json.loads((tmp_path / "out.json").read_text())["cells"]
    page = (TRACES.parent.parent / "docs" / "policies.md").read_text()
    hits, moved = [
        line.split() for line in page.splitlines() if line.startswith("64GiB  1TiB  lru     always")
    ]
    assert hits[4:8] == [
        f"{cell['hit_percent']:.2f}%",
        f"{cell['percent_of_optimum']:.1f}%",
        *(f"{tier['hit_blocks']:,}" for tier in cell["tiers"].values()),
    ]
    assert moved[-2:] == [f"{tier['evicted_blocks']:,}" for tier in cell["tiers"].values()]
