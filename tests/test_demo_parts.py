"""The demo's verdicts and what it shows, without a model."""

from __future__ import annotations

import io
import re
from dataclasses import replace
from pathlib import Path

import pytest

from tierkv.demo.acts import Result, Stage
from tierkv.demo.answers import Answer
from tierkv.demo.report import as_json, blocks_from, kv_bytes, tables
from tierkv.demo.screen import Screen
from tierkv.demo.verdicts import Row, computed_all, differs, served_by, served_by_any, under_pressure

COMPUTED = Answer("How long?", "7 km", (5, 6), 100, first_token_s=8.0, whole_s=9.0)
HELD = {"host": 0, "nvme": 6, "valkey": 6}
FROM_NVME = replace(
    COMPUTED, first_token_s=0.5, reused_tokens=96, reused_bytes=960, known_tokens=96, known_blocks=6, known=HELD,
    read={"nvme": 6},
)  # fmt: skip
FROM_HOST = replace(FROM_NVME, known={"host": 6, "nvme": 6, "valkey": 0}, read={})


def test_an_answer_from_the_tier_that_should_serve() -> None:
    assert served_by("nvme", FROM_NVME, 96) == []
    assert served_by("host", FROM_HOST, 96) == []
    sent_again = replace(FROM_NVME, reused_tokens=112, read={"nvme": 6, "valkey": 1})
    assert served_by("nvme", sent_again, 96) == [], "the question's own block, which the server still had"
    assert computed_all(COMPUTED) == []
    assert served_by_any(FROM_NVME) == []
    assert differs(FROM_NVME, COMPUTED) == []


@pytest.mark.parametrize(
    ("tier", "answer", "what"),
    [
        ("nvme", FROM_HOST, "host RAM still held 6 blocks"),
        ("nvme", replace(FROM_NVME, known={**HELD, "nvme": 5}), "NVMe held 5 of 6 blocks"),
        ("nvme", replace(FROM_NVME, known={}, known_blocks=0, read={}), "NVMe held 0 of 0 blocks"),
        ("nvme", replace(FROM_NVME, reused_tokens=80), "80 tokens were reused of the 96"),
        ("nvme", replace(FROM_NVME, read={"nvme": 5, "valkey": 1}), r"read from NVMe \(5\), Valkey \(1\)"),
        ("nvme", replace(FROM_NVME, read={"nvme": 6, "valkey": 1}), r"read from NVMe \(6\), Valkey \(1\)"),
        ("valkey", replace(FROM_NVME, read={"nvme": 1, "valkey": 6}), r"read from NVMe \(1\), Valkey \(6\)"),
        (
            "nvme",
            replace(FROM_NVME, read={}),
            r"read from no colder tier, and should have been from NVMe \(6\)",
        ),
        ("valkey", FROM_NVME, "NVMe still held 6 blocks"),
        ("host", FROM_NVME, "host RAM held 0 of 6 blocks"),
        ("host", replace(FROM_HOST, read={"nvme": 6}), "should have been from no colder tier"),
    ],
)
def test_a_tier_that_did_not_serve(tier: str, answer: Answer, what: str) -> None:
    assert any(re.search(what, problem) for problem in served_by(tier, answer, 96))


def test_other_things_that_go_wrong() -> None:
    assert "differs" in differs(replace(FROM_NVME, tokens=(5, 7)), COMPUTED)[0]
    assert "should have been empty" in computed_all(FROM_NVME)[0]
    assert "training" in computed_all(replace(COMPUTED, uncacheable="the model is in training"))[0]
    assert served_by_any(COMPUTED) == ["no tier had any of it, though it was asked about before"]
    assert served_by_any(replace(FROM_NVME, reused_tokens=80)) == [
        "80 tokens were reused of 96 that were in the tiers"
    ]
    assert served_by_any(replace(FROM_NVME, reused_tokens=80, no_room_blocks=1)) == []
    assert served_by_any(replace(FROM_NVME, reused_tokens=0, no_room_blocks=6)) == ["nothing was reused"]


def test_pressure_that_was_none() -> None:
    busy = {
        "written_blocks_total/nvme/done": 1,
        "evicted_blocks_total/host/room": 1,
        "read_blocks_total/nvme/done": 1,
    }
    assert under_pressure(busy) == []
    for name in busy:
        assert len(under_pressure({**busy, name: 0})) == 1


def result_of(*problems: str) -> Result:
    first = Row("the first time", "bees", COMPUTED, COMPUTED)
    second = Row("the second time", "bees", FROM_NVME, COMPUTED)
    return Result(
        rows=[Row("NVMe", "handbook", FROM_NVME, COMPUTED, problems)],
        pressed=[first, second],
        counters={"written_blocks_total/nvme/done": 12, "dropped_blocks_total/host/no_room": 3},
        block_tokens=16,
        token_bytes=10,
        text_tokens=96,
    )


def test_the_tables(tmp_path: Path) -> None:
    lines = tables(Stage(tmp_path), result_of()).splitlines()
    assert lines[2].split("  ")[0] == "source"
    assert lines[4].split() == ["NVMe", "96", "of", "100", "960", "B", "0.50", "s", "8.00", "s", "16x", "yes"]
    assert any(line.startswith("bees") and "NVMe 6" in line and line.endswith("yes") for line in lines)
    assert "cleaned ahead of need  12 blocks to NVMe, 0 blocks to Valkey" in lines
    assert any("3 blocks dropped" in line for line in lines)


def test_an_output_that_differs_is_seen_in_the_table(tmp_path: Path) -> None:
    result = result_of()
    result.rows[0] = replace(result.rows[0], answer=replace(FROM_NVME, tokens=(1,)))
    assert tables(Stage(tmp_path), result).splitlines()[4].endswith("NO")


def test_the_facts_as_json(tmp_path: Path) -> None:
    facts = as_json(Stage(tmp_path), result_of("it did not"), 12.0)
    assert (facts["ok"], facts["problems"]) == (False, ["handbook, NVMe: it did not"])
    assert facts["act_1"]["rows"][0]["speed_up"] == 16
    assert facts["act_2"]["kv_bytes"] == kv_bytes(result_of()) == 1000
    assert as_json(Stage(tmp_path), result_of(), 12.0)["ok"] is True


def test_where_blocks_came_from() -> None:
    answer = replace(FROM_NVME, read={"nvme": 2, "valkey": 1})
    assert blocks_from(result_of(), Row("", "", answer, COMPUTED)) == {"host": 3, "nvme": 2, "valkey": 1}
    assert blocks_from(result_of(), Row("", "", COMPUTED, COMPUTED)) == {}


def test_dots_where_nothing_can_be_drawn_anew() -> None:
    out = io.StringIO()
    screen = Screen(out, redraw=False)
    with screen.step("computing") as step:
        for done in range(1, 31):
            screen.layers(done, 30)
            screen.tick()
        step.done("8 s")
    line = out.getvalue()
    assert line.count("\n") == 1
    assert line.split("computing")[1].split() == ["..........", "8", "s"]


def test_a_line_that_is_drawn_anew_on_a_terminal() -> None:
    out = io.StringIO()
    screen = Screen(out, redraw=True)
    with screen.step("computing") as step:
        screen.layers(15, 30)
        screen.say("half of it")
        step.done("8 s")
    drawn = out.getvalue().split("\r\x1b[K")
    assert any("[##########----------]" in line for line in drawn)
    assert [line for line in drawn if line.endswith("\n")] == [" " * 10 + "half of it\n", drawn[-1]]
    assert drawn[-1].split()[2:] == ["computing", "8", "s"]


def test_a_step_that_is_interrupted_ends_its_line() -> None:
    out = io.StringIO()
    with pytest.raises(KeyboardInterrupt), Screen(out, redraw=False).step("computing"):
        raise KeyboardInterrupt
    assert out.getvalue().endswith("not done\n")
