"""``tierkv plan``: reckoned hits beside a replay, times and money by hand, and the command as a user runs it."""

import json
import subprocess
import sys
from argparse import ArgumentParser
from pathlib import Path
from typing import Any

import pytest
from naive_policies import naive_lru
from replay_support import made_up, piece

from tierkv import cli
from tierkv.policies.lru import LruPolicy
from tierkv.replay.asked import OFF, Capacity
from tierkv.replay.cost_options import add_options, costs_of
from tierkv.replay.costs import Costs
from tierkv.replay.distances import Reach
from tierkv.replay.one_tier import OneTier
from tierkv.replay.plan_outcome import Planner
from tierkv.replay.several import Sizes
from tierkv.replay.traces import Request, Trace
from tierkv.units import format_seconds

MIB = 1 << 20


def costs(*words: str) -> Costs:
    parser = ArgumentParser()
    add_options(parser)
    return costs_of(parser.parse_args(list(words)))


@pytest.mark.parametrize("seed", range(4))
def test_every_request_hits_what_a_tier_of_that_size_gives_it(seed: int) -> None:
    trace = made_up(seed, requests=150)
    reach = Reach(trace)
    for places in (1, 7, 40, trace.blocks, 10 * trace.blocks):
        tier = OneTier(trace, places, LruPolicy())
        assert reach.hits(places).tolist() == [tier.request(request.ids) for request in trace.requests]
        assert reach.hits(places).sum() == naive_lru(trace, places)


# Ten blocks of 100 tokens, then others, then the ten again and 50 tokens more.
AGAIN = Trace(
    "again",
    100,
    [
        Request(0.0, list(range(10)), 1000),
        Request(10.0, list(range(10, 16)), 600),
        Request(20.0, list(range(10)), 1050),
    ],
)
SPEEDS = ("--block-bytes", "1MiB", "--prefill-tokens-per-s", "100", "--link-bytes-per-s", "10MiB",
          "--nvme-bytes-per-s", "2MiB", "--nvme-latency-s", "0.5")  # fmt: skip


def sizes(host: int, nvme: int = 0) -> tuple[Sizes, dict[str, int]]:
    there = {"host": host, **({"nvme": nvme} if nvme else {})}
    asked = [Capacity(str(count), None, count) if count else OFF for count in (host, nvme, 0)]
    return Sizes(*asked), there


def test_times_by_hand() -> None:
    planner = Planner(AGAIN, Reach(AGAIN), costs(*SPEEDS))
    nothing = planner.nothing()
    assert nothing.gpu_s == pytest.approx((1000 + 600 + 1050) / 100)
    assert nothing.ttft_mean_s == pytest.approx(nothing.gpu_s / 3)
    # Six others came in between, so of ten blocks a host of eight has the first two left. NVMe has the others, but a
    # prompt goes through host RAM, and the last two of ten never fitted.
    one = planner.bought(*sizes(8))
    assert one.hit_blocks == {"host": 2}
    assert one.gpu_s == pytest.approx(nothing.gpu_s - 2)
    both = planner.bought(*sizes(8, 20))
    assert both.hit_blocks == {"host": 2, "nvme": 6}
    assert both.gpu_s == pytest.approx(nothing.gpu_s - 8)
    waited = 0.5 + 6 / 2 + 8 / 10  # from NVMe, then to the engine
    assert both.ttft_mean_s == pytest.approx((10 + 6 + 2.5 + waited) / 3)
    assert both.promotion == "on_hit"


def test_what_is_quicker_to_compute_is_not_loaded() -> None:
    slow = (*SPEEDS[:-3], "100KiB", *SPEEDS[-2:])
    planner = Planner(AGAIN, Reach(AGAIN), costs(*slow))
    found = planner.bought(*sizes(8, 20))
    assert (found.promotion, found.hit_blocks) == ("break_even", {"host": 2, "nvme": 0})
    assert found.ttft_mean_s == planner.bought(*sizes(8)).ttft_mean_s


def test_what_the_engine_has_itself_is_not_the_stores() -> None:
    planner = Planner(
        AGAIN, Reach(AGAIN), costs(*SPEEDS), engine_blocks=9
    )  # of the first ten it has three left
    nothing = planner.nothing()
    assert (nothing.own_blocks, nothing.gpu_s) == (3, pytest.approx(26.5 - 3))
    assert planner.bought(*sizes(8)).ttft_mean_s == nothing.ttft_mean_s  # a host that is smaller adds nothing
    both = planner.bought(*sizes(12, 20))
    assert both.hit_blocks == {"host": 3, "nvme": 4}
    waited = 0.5 + 4 / 2 + 7 / 10
    assert both.ttft_mean_s == pytest.approx((10 + 6 + 0.5 + waited) / 3)


def test_all_gpus_that_serve_the_model_are_paid() -> None:
    one, eight = (Planner(AGAIN, Reach(AGAIN), costs("--gpu", word)).nothing() for word in ("h100", "8xh100"))
    assert eight.gpu_s == pytest.approx(one.gpu_s)
    assert eight.ttft_mean_s == pytest.approx(one.ttft_mean_s / 8)


def write(path: Path, trace: Trace) -> Path:
    lines = [
        {"timestamp": 1000 * request.at_s, "input_length": request.tokens, "hash_ids": request.ids}
        for request in trace.requests
    ]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def plan(tmp_path: Path, *words: str, trace: Trace = AGAIN) -> dict[str, Any]:
    out = tmp_path / "plan.json"
    path = write(tmp_path / "trace.jsonl", trace)
    whole = [
        "plan",
        str(path),
        "--block-tokens",
        str(trace.block_tokens),
        *SPEEDS,
        *words,
        "--json",
        str(out),
    ]
    assert cli.main(whole) == 0
    found: dict[str, Any] = json.loads(out.read_text())
    return found


SIZES = ("--host", "10,16", "--nvme", "0,20")
PRICES = ("--host-price", "1024", "--nvme-price", "102.4")


def test_money_by_hand(tmp_path: Path) -> None:
    found = plan(tmp_path, *SIZES, *PRICES, "--gpu-price", "1", "--no-replay")
    by_size = {tuple(one["tiers"][tier]["blocks"] for tier in one["tiers"]): one for one in found["sizes"]}
    assert {size: one["tiers_cost_a_month"] for size, one in by_size.items()} == {
        (10,): 10, (10, 20): 12, (16,): 16, (16, 20): 18,
    }  # fmt: skip
    # Ten of 26.5 GPU-seconds are saved in each 20 s: half a GPU for a month of 730.5 hours.
    assert by_size[10, 20]["net_a_month"] == pytest.approx(730.5 / 2 - 12)
    assert found["recommended"]["tiers"]["nvme"]["blocks"] == 20
    assert found["nothing_kept"]["busy_gpus"] == pytest.approx(26.5 / 20)
    assert [one["best_for_its_cost"] for one in found["sizes"]] == [True, True, False, False]


def test_nothing_is_recommended_when_gpus_are_cheap(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    found = plan(tmp_path, *SIZES, *PRICES, "--gpu-price", "0.001")
    assert (found["recommended"], found["policies"], found["settings"]) == (None, [], "")
    assert "recommended: none of these sizes" in capsys.readouterr().out


def test_what_was_recorded_of_the_engine_is_its_own(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    lines = [
        {"timestamp": 1000 * at, "input_length": 1050, "block_tokens": 100, "own_blocks": own,
         "hash_ranges": [[0, 10]]}
        for at, own in enumerate((0, 4, 4))
    ]  # fmt: skip
    path, out = tmp_path / "recorded.jsonl", tmp_path / "out.json"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    words = ["plan", str(path), *SPEEDS, "--host", "20", "--nvme", "0,20", "--json", str(out)]
    for more, own, told in (
        ([], 8, "--engine-cache: as recorded (own_blocks of the trace)"),
        (["--engine-cache", "0"], 0, "--engine-cache: none (all hits are the store's)"),
        (["--engine-cache", "3"], 6, "--engine-cache: 3 (given; LRU)"),
    ):
        assert cli.main([*words, *more]) == 0
        found = json.loads(out.read_text())
        assert found["nothing_kept"]["engine_hit_blocks"] == own
        assert found["recommended"]["saved_gpu_s"] == pytest.approx(20 - own)
        assert found["policies"][0]["saved_gpu_s"] == pytest.approx(20 - own)
        assert told in capsys.readouterr().out


def test_a_replay_leaves_the_engine_what_it_has_itself(tmp_path: Path) -> None:
    """The lines below the recommendation are of the same kind as the table above it."""
    cache = ("--engine-cache", "25%", "--host", "20%", "--nvme", "60%")
    found = plan(tmp_path, *cache, trace=piece("agentic_a", 200))
    assert found["nothing_kept"]["engine_hit_blocks"] > 0
    for tried in found["policies"]:
        assert tried["saved_gpu_s"] <= found["nothing_kept"]["gpu_s"]
        assert tried["hit_percent"] >= found["nothing_kept"]["hit_percent"]
    replayed = next(
        one for one in found["policies"] if one["policy"] == "lru" and one["admission"] == "always"
    )
    assert replayed["hit_percent"] == pytest.approx(found["recommended"]["hit_percent"], rel=0.05)
    assert replayed["saved_gpu_s"] == pytest.approx(found["recommended"]["saved_gpu_s"], rel=0.05)


@pytest.mark.parametrize(
    ("trace", "words", "told"),
    [
        (AGAIN, ("--gpu-price", "0.001"), "what they save is less than what they cost"),
        (AGAIN, ("--engine-cache", "100%", "--gpu-price", "1"), "they save nothing"),
        (Trace("once", 100, AGAIN.requests[:2]), (), "they save nothing"),
        (
            Trace("at once", 100, [request._replace(at_s=0.0) for request in AGAIN.requests]),
            ("--gpu-price", "1"),
            "the trace takes no time",
        ),
    ],
)
def test_why_nothing_is_recommended(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], trace: Trace, words: tuple[str, ...], told: str
) -> None:
    assert plan(tmp_path, *SIZES, *PRICES, *words, trace=trace)["recommended"] is None
    assert f"none of these sizes; {told}" in capsys.readouterr().out


def test_what_is_small_is_not_shown_as_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = (
        "--host-price",
        "0.5",
        "--nvme-price",
        "0.01",
        "--nvme-latency-s",
        "0",
        "--prefill-tokens-per-s",
        "1e5",
    )
    found = plan(tmp_path, *SIZES, *words, "--no-replay")
    shown = capsys.readouterr().out
    row = next(line.split() for line in shown.splitlines() if line.endswith("*"))
    assert float(row[-2]) == pytest.approx(found["recommended"]["tiers_cost_a_month"], rel=0.01)
    assert float(row[-4]) == pytest.approx(found["recommended"]["gpu_s"], rel=0.01)


def test_minutes_are_said_without_an_exponent() -> None:
    assert [format_seconds(time_s) for time_s in (1010.4, 123456.0, 99.9, 2.0)] == [
        "1,010 s", "123,456 s", "99.9 s", "2 s",
    ]  # fmt: skip


def test_no_size_by_the_trace_is_below_a_block(tmp_path: Path) -> None:
    small = Trace("small", 100, [Request(float(at), [0, 1, 2], 300) for at in range(3)])
    sizes = plan(tmp_path, "--no-replay", trace=small)["sizes"]
    alone = [one["tiers"]["host"]["blocks"] for one in sizes if "nvme" not in one["tiers"]]
    assert sorted(alone) == [1, 2, 4]


def test_without_a_price_the_cheapest_that_does(tmp_path: Path) -> None:
    found = plan(tmp_path, *SIZES)
    assert found["recommended"]["tiers"] == {
        "host": {"blocks": 10, "bytes": 10 * MIB, "hit_blocks": 4},
        "nvme": {"blocks": 20, "bytes": 20 * MIB, "hit_blocks": 6},
    }
    assert found["recommended"]["net_a_month"] is None
    run = [one for one in found["policies"] if one["recommended"]]
    assert len(run) == 1
    assert run[0]["saved_gpu_s"] == pytest.approx(10)
    assert 'capacity = "10 MiB"' in found["settings"]
    assert f'admission = "{run[0]["admission"]}"' in found["settings"]
    assert {one["option"] for one in found["assumptions"]} >= {
        "--model",
        "--nvme-bytes-per-s",
        "--host-price",
    }


def test_sizes_by_the_trace(tmp_path: Path) -> None:
    found = plan(tmp_path, "--no-replay", trace=made_up(2))
    bytes_of = {one["tiers"]["host"]["bytes"] for one in found["sizes"]}
    whole = found["trace"]["different_blocks"] * MIB
    assert max(bytes_of) >= whole > max(bytes_of) / 2
    hits = [one["hit_percent"] for one in found["sizes"] if "nvme" not in one["tiers"]]
    assert hits == sorted(hits)


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["--host", "0"], ["--host = '0'", "64GiB"]),
        (["--engine-cache", "1GiB,2GiB"], ["--engine-cache = '1GiB,2GiB'", "one size"]),
        (["--host-price", "-1"], ["--host-price = -1.0", "0 or more"]),
        (["--host-price", "1"], ["--nvme-price = None", "this one too"]),
        (["--gpu-price", "1"], ["--gpu-price = 1.0", "--host-price"]),
        (["--host-price", "nan"], ["--host-price = nan", "0 or more"]),
        (["--host-price", "1e308", "--nvme-price", "1"], ["--host-price = 1e+308", "up to"]),
        (
            ["--host", "64KiB", "--block-bytes", "1MiB"],
            ["--host = '64KiB'", "a block of 100 tokens takes 1 MiB"],
        ),
        (["--engine-cache", "1KiB"], ["--engine-cache = '1KiB'", "a block of 100 tokens"]),
        (["--host", "9999999TiB"], ["--host = '9999999TiB'", "64GiB"]),
        (["--valkey-latency-s", "1ms"], ["--valkey-latency-s = '1ms'", "give --valkey as well"]),
        (["--nvme", "0", "--nvme-bytes-per-s", "1GB"], ["--nvme-bytes-per-s = '1GB'", "give --nvme as well"]),
        (["--nvme-latency-s", "2h"], ["--nvme-latency-s = '2h'", "up to an hour"]),
        (["--prefill-tokens-per-s", "1e-300"], ["--prefill-tokens-per-s = '1e-300'", "above 0"]),
        (["--link-bytes-per-s", "9999999999TiB"], ["--link-bytes-per-s = '9999999999TiB'"]),
        (["--model", "none"], ["--model = 'none'", "config.json"]),
        (["--json", "/no/such/folder/x"], ["--json = '/no/such/folder/x'"]),
    ],
)
def test_what_cannot_be_done_is_said(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], words: list[str], told: list[str]
) -> None:
    path = write(tmp_path / "trace.jsonl", AGAIN)
    assert cli.main(["plan", str(path), "--block-tokens", "100", *words]) == cli.USAGE
    line = capsys.readouterr().err.splitlines()[-1]
    for part in told:
        assert part in line


def test_tables_and_the_chart(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    picture = tmp_path / "out.png"
    path = write(tmp_path / "trace.jsonl", AGAIN)
    words = ["plan", str(path), "--block-tokens", "100", *SPEEDS, *SIZES, *PRICES, "--gpu-price", "1"]
    # A process of its own, since matplotlib opens its fonts at the first picture and keeps them open.
    done = subprocess.run(
        [sys.executable, "-m", "tierkv.cli", *words, "--png", str(picture)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert picture.read_bytes().startswith(b"\x89PNG\r\n\x1a\n")
    (row,) = [line.split() for line in done.stdout.splitlines() if line.endswith(" *") and "on_hit" in line]
    assert row[:4] == ["10", "20", "on_hit", "38.46%"]
    assert "recommended (*): host 10 + nvme 20: saves most" in done.stdout
    assert "--prefill-tokens-per-s: 100 (given)" in done.stdout


def test_a_chart_of_what_costs_nothing(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    path = write(tmp_path / "trace.jsonl", AGAIN)
    words = [
        "plan",
        str(path),
        "--block-tokens",
        "100",
        "--host-price",
        "0",
        "--nvme-price",
        "0",
        "--no-replay",
    ]
    done = subprocess.run(
        [sys.executable, "-W", "error", "-m", "tierkv.cli", *words, "--png", str(tmp_path / "x.png")],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr


def test_reckoned_and_replayed_agree_on_recorded_traffic(tmp_path: Path) -> None:
    found = plan(tmp_path, "--host", "3%", "--nvme", "20%", trace=piece("conv_a", 1200))
    replayed = next(
        one for one in found["policies"] if (one["policy"], one["admission"]) == ("lru", "always")
    )
    assert found["recommended"]["hit_percent"] == pytest.approx(replayed["hit_percent"], rel=0.05)
    assert found["recommended"]["saved_gpu_s"] == pytest.approx(replayed["saved_gpu_s"], rel=0.05)
    assert found["recommended"]["saved_gpu_s"] > 0
