"""The whole demo with a tiny model: real processes, one of them killed, a real Valkey server, files, exit status."""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")
pytest.importorskip("matplotlib")

from tests.demo_support import BLOCK, SIZES, options
from tierkv.demo import acts, chart
from tierkv.demo.command import play
from tierkv.demo.process import RemoteEngine

ROOT = Path(__file__).parent.parent
PATIENCE_S = 60.0
SOURCES = [acts.EMPTY, "host RAM", "NVMe", "Valkey (embedded)", acts.AFTER_KILL]


@pytest.fixture(scope="module", autouse=True)
def _fonts(tmp_path_factory: pytest.TempPathFactory) -> None:
    """matplotlib opens its fonts at the first picture and keeps them open."""
    folder = tmp_path_factory.mktemp("fonts")
    chart.draw(folder / "empty.png", acts.Stage(folder), acts.Result())


class Played(NamedTuple):
    status: int
    folder: Path
    facts: dict[str, Any]
    printed: str


def played(folder: Path, capsys: pytest.CaptureFixture[str], model: str = "tiny", **changes: Any) -> Played:
    chosen = options(folder, changes.pop("valkey", acts.EMBEDDED))
    status = play(chosen, f"tests.demo_support:{model}", **{**SIZES, **changes})
    return Played(status, folder, json.loads(chosen.json.read_text()), capsys.readouterr().out)


def rows(facts: dict[str, Any]) -> dict[str, dict[str, Any]]:
    return {row["source"]: row for row in facts["act_1"]["rows"]}


def left_in(folder: Path) -> list[str]:
    return sorted(path.name for path in (folder / "disk").iterdir())


def test_the_demo(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    status, folder, facts, printed = played(tmp_path, capsys)
    assert (status, facts["ok"], facts["problems"]) == (0, True, [])

    first = rows(facts)
    assert list(first) == SOURCES
    assert [row["reused_tokens"] > 2800 for row in first.values()] == [False, True, True, True, True]
    assert all(row["output_equal"] for row in first.values())
    assert (
        len({row["question"] for row in first.values()}) == len(SOURCES) - 1
    )  # the first is asked again at the end
    assert first[acts.AFTER_KILL]["answer"] == first[acts.EMPTY]["answer"]
    blocks = first["host RAM"]["reused_tokens"] // BLOCK
    assert [row["blocks_read"] for row in first.values()] == [
        {}, {}, {"nvme": blocks}, {"valkey": blocks}, {"nvme": blocks}
    ]  # fmt: skip
    assert first["Valkey (embedded)"]["blocks_known_before"] == {"host": 0, "nvme": 0, "valkey": blocks}
    assert "it ended with status -9" in printed

    second = facts["act_2"]
    assert all(row["output_equal"] for row in second["rows"])
    assert any(row["blocks_read"].get("nvme") for row in second["rows"])
    assert second["counters"]["evicted_blocks_total/host/room"] > 0
    assert second["counters"]["written_blocks_total/nvme/done"] > 0

    for source in SOURCES:
        assert any(line.startswith(source) and line.endswith("yes") for line in printed.splitlines())
    assert str(folder / "chart.png") in printed
    assert (folder / "chart.png").read_bytes().startswith(b"\x89PNG")
    assert left_in(folder) == []


def test_a_tier_that_cannot_serve(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """No server is there, so the blocks stay in NVMe, and Valkey's turn is not Valkey's."""
    nobody = f"unix://{tmp_path}/nobody"
    status, folder, facts, printed = played(tmp_path, capsys, valkey=nobody, flush_s=0.5)
    assert (status, facts["ok"]) == (1, False)
    assert {source for source, row in rows(facts).items() if row["problems"]} == {"Valkey"}
    assert any("NVMe still held" in problem for problem in rows(facts)["Valkey"]["problems"])
    assert "flush to Valkey: 45 blocks could not be written" in facts["problems"]
    assert all(row["output_equal"] for row in rows(facts).values())  # a cache may miss, but not lie
    assert "WRONG: handbook, Valkey: " in printed
    assert left_in(folder) == []


def test_an_output_that_differs_and_a_tier_that_was_emptied_behind_the_demos_back(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    honest = RemoteEngine.flush

    def flush(self: RemoteEngine, tier: str, timeout_s: float) -> Any:
        flushed = honest(self, tier, timeout_s)
        if tier == "valkey":
            self.evict("nvme")
        return flushed

    monkeypatch.setattr(RemoteEngine, "flush", flush)
    status, _, facts, printed = played(tmp_path, capsys, model="mistaken")
    assert (status, facts["ok"]) == (1, False)

    assert [row["output_equal"] for row in rows(facts).values()] == [True, False, False, False, False]
    assert any("the output differs" in problem for problem in rows(facts)["host RAM"]["problems"])
    assert any(line.startswith("host RAM") and line.endswith("NO") for line in printed.splitlines())

    wrong = rows(facts)["NVMe"]["problems"]
    assert any("NVMe held 0 of 45 blocks" in problem for problem in wrong)
    assert any("blocks were read from Valkey (45)" in problem for problem in wrong)


def test_a_model_that_cannot_be_loaded(tmp_path: Path) -> None:
    from tierkv.demo.process import EngineFailed

    with pytest.raises(EngineFailed, match="no attribute 'nothing'"):
        play(options(tmp_path), "tests.demo_support:nothing", **SIZES)
    assert left_in(tmp_path) == []


# -- ends before the end ----------------------------------------------------------------------------------------------


@contextmanager
def running(folder: Path) -> Iterator[tuple[subprocess.Popen[str], int]]:
    """A demo whose engine has begun to work, and the engine's pid."""
    folder.mkdir(exist_ok=True)
    demo = subprocess.Popen(
        [sys.executable, "-m", "tests.demo_support", str(folder)],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONUNBUFFERED": "1"},
    )
    try:
        assert demo.stdout is not None
        for line in demo.stdout:
            word, _, number = line.strip().rpartition(" ")
            if word.endswith("process"):
                yield demo, int(number)
                break
        else:
            pytest.fail("the demo has started no engine")
    finally:
        demo.kill()
        demo.communicate()


def wait_for_the_end_of(pid: int) -> None:
    try:
        handle = os.pidfd_open(pid)
    except ProcessLookupError:
        return
    try:
        assert select.select([handle], [], [], PATIENCE_S)[0], f"process {pid} lives on"
    finally:
        os.close(handle)


@pytest.mark.parametrize("name", [signal.SIGINT, signal.SIGTERM])
def test_interrupted_and_nothing_is_left(tmp_path: Path, name: signal.Signals) -> None:
    with running(tmp_path) as (demo, engine):
        demo.send_signal(name)
        _, errors = demo.communicate(timeout=PATIENCE_S)
        assert demo.returncode != 0
        assert "KeyboardInterrupt" in errors
        wait_for_the_end_of(engine)
    assert left_in(tmp_path) == []


def test_d26_the_engine_dies_with_the_demo(tmp_path: Path) -> None:
    with running(tmp_path) as (demo, engine):
        demo.kill()
        demo.wait(PATIENCE_S)
        wait_for_the_end_of(engine)


# -- wrong usage ------------------------------------------------------------------------------------------------------


def tierkv(*words: str, code: str = "") -> subprocess.CompletedProcess[str]:
    script = f"import sys\n{code}\nfrom tierkv.cli import main\nsys.exit(main())"
    return subprocess.run(
        [sys.executable, "-c", script, "demo", *words], cwd=ROOT, capture_output=True, text=True, check=False
    )


PRETEND = "import tierkv.demo.command as c; c.find_gguf = lambda: None"
"""So that it is not the weights that are missing."""


@pytest.mark.parametrize(
    ("words", "code", "said"),
    [
        (("--chart", "/nowhere/x.png"), PRETEND, "cannot be written"),
        (("--json", "/"), PRETEND, "cannot be written"),
        (("--dir", "/nowhere"), PRETEND, "no directory can be made there"),
        (("--valkey", "http://x"), PRETEND, "valkey.url"),
        (("--unheard-of",), "", "unrecognized arguments"),
        (
            (),
            f"{PRETEND}; sys.modules['matplotlib'] = None",
            "--chart = 'tierkv-demo.png': the package 'matplotlib'",
        ),
        ((), "sys.modules['gguf'] = None", "demo's model = 'SmolLM2-135M': the package 'gguf'"),
    ],
)
def test_wrong_usage_is_told_before_anything_starts(words: tuple[str, ...], code: str, said: str) -> None:
    done = tierkv(*words, code=code)
    assert done.returncode == 2
    assert said in done.stderr
    assert "Traceback" not in done.stderr


def test_help() -> None:
    done = tierkv("--help")
    assert done.returncode == 0
    assert all(option in done.stdout for option in ("--valkey", "--dir", "--chart", "--json"))
