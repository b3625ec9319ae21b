"""``tierkv replay`` as a user runs it: small traces whose hits were counted by hand, and a piece of a recorded one."""

import fcntl
import gzip
import io
import json
import os
import struct
import subprocess
import sys
import termios
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from naive_policies import naive_lru, naive_optimum
from replay_support import capacity, piece

from tierkv import cli
from tierkv.replay.progress import Progress

# In turns of three and two full blocks; the third name of the second prompt is a block that is not full.
TURNS = ([10, 11, 12], 1536), ([20, 21, 22], 1100), ([10, 11, 12], 1536), ([20, 21, 22], 1100)


def mooncake(path: Path, prompts: Sequence[tuple[list[int], int]] = TURNS) -> Path:
    lines = [
        {"timestamp": 1000 * number, "input_length": tokens, "output_length": 1, "hash_ids": ids}
        for number, (ids, tokens) in enumerate(prompts)
    ]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def figures(path: Path) -> dict[tuple[str, str], dict[str, Any]]:
    return {(cell["capacity"], cell["policy"]): cell for cell in json.loads(path.read_text())["cells"]}


def test_hits_that_were_counted_by_hand(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trace = mooncake(tmp_path / "turns.jsonl")
    out = tmp_path / "out.json"
    words = ["replay", str(trace), "--policy", "lru,sieve", "--capacity", "3,100%", "--json", str(out)]
    assert cli.main(words) == 0
    cells = figures(out)
    assert list(cells) == [(at, who) for at in ("3", "100%") for who in ("optimum", "lru", "sieve")]
    # Three places: the optimum keeps the first prompt whole; LRU keeps one block of it over the second.
    assert cells["3", "optimum"]["hit_blocks"] == 3
    assert cells["3", "lru"]["hit_blocks"] == 1
    assert cells["3", "lru"]["evicted_blocks"] == 2 + 2 + 2
    assert cells["3", "lru"]["percent_of_optimum"] == pytest.approx(100 / 3)
    for policy in ("optimum", "lru", "sieve"):
        cell = cells["100%", policy]
        assert (cell["blocks"], cell["hit_blocks"], cell["hit_tokens"], cell["evicted_blocks"]) == (
            5,
            5,
            2560,
            0,
        )
        assert cell["hit_percent"] == pytest.approx(50)
    about = json.loads(out.read_text())["trace"]
    assert (about["references"], about["different_blocks"], about["block_tokens"]) == (10, 5, 512)
    shown = capsys.readouterr()
    row = next(line for line in shown.out.splitlines() if line.startswith("3 ") and " lru " in line)
    assert row.split() == ["3", "3", "lru", "1", "512", "10.00%", "33.3%", "6", "0"]
    assert "[3/8] lru at 3" in shown.err


def test_a_recorded_piece_in_mooncakes_format_agrees_with_the_references(tmp_path: Path) -> None:
    recorded = piece("conv_a", 250)
    trace = mooncake(
        tmp_path / "conv.jsonl", [(request.ids, request.tokens) for request in recorded.requests]
    )
    packed = tmp_path / "conv.jsonl.gz"
    packed.write_bytes(gzip.compress(trace.read_bytes()))
    out = tmp_path / "out.json"
    assert cli.main(["replay", str(packed), "--policy", "lru", "--capacity", "10%", "--json", str(out)]) == 0
    places = capacity(recorded, 10)
    cells = figures(out)
    assert cells["10%", "lru"]["blocks"] == places
    assert cells["10%", "lru"]["hit_blocks"] == naive_lru(recorded, places)
    assert cells["10%", "optimum"]["hit_blocks"] == naive_optimum(recorded, places)
    at_most = [point["hit_percent"] for point in json.loads(out.read_text())["lru_curve"]]
    assert at_most == sorted(at_most)
    assert at_most[-1] > cells["10%", "lru"]["hit_percent"]


def test_smaller_blocks_when_the_trace_does_not_say(tmp_path: Path) -> None:
    trace, out = mooncake(tmp_path / "turns.jsonl"), tmp_path / "out.json"
    assert cli.main(["replay", str(trace), "--block-tokens", "256", "--json", str(out)]) == 0
    assert (
        json.loads(out.read_text())["trace"]["references"] == 12
    )  # the third name of the second is full now


MRU = """
class Mru:
    name = "mru"
    def __init__(self): self.order = {}
    def on_insert(self, infos): self.order |= {info.id: None for info in infos}
    def on_hit(self, ids): pass
    def on_remove(self, ids, *, evicted):
        for ident in ids: self.order.pop(ident, None)
    def victims(self, need, evictable):
        yield from (ident for ident in list(reversed(self.order)) if evictable(ident))
    def counters(self): return {}
class Nothing: name = "nothing"
class Greedy(Mru):
    def __init__(self, size): pass
number = 3
"""


@pytest.fixture
def own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """The name of a module with policies that are no plug-ins."""
    (tmp_path / "own_policies.py").write_text(MRU)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "own_policies", raising=False)
    return "own_policies"


def test_a_policy_of_ones_own(tmp_path: Path, own: str) -> None:
    trace, out = mooncake(tmp_path / "turns.jsonl"), tmp_path / "out.json"
    words = ["replay", str(trace), "--policy", f"lru,{own}:Mru", "--capacity", "3", "--json", str(out)]
    assert cli.main(words) == 0
    # Of the first prompt it gives up two blocks, then the second prompt's two: the same as LRU here.
    assert figures(out)["3", f"{own}:Mru"]["hit_blocks"] == 1


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["--policy", "lru,best"], ["--policy = 'best'", "there are arc,", "sieve"]),
        (["--policy", "lru,,arc"], ["--policy = 'lru,,arc'", "a word is empty"]),
        (["--policy", "no_such_module:P"], ["'no_such_module:P'", "PYTHONPATH=."]),
        (["--policy", "own_policies:P"], ["'own_policies:P'", "module:Class"]),
        (["--policy", "own_policies:number"], ["'own_policies:number'", "no class"]),
        (["--policy", "own_policies:Nothing"], ["it has no on_insert,", "docs/policies.md"]),
        (["--policy", "own_policies:Greedy"], ["'own_policies:Greedy'", "without arguments"]),
        (["--capacity", "0%"], ["--capacity = '0%'", "such as 5%"]),
        (["--capacity", "101%"], ["--capacity = '101%'", "up to 100%"]),
        (["--capacity", "nan%"], ["--capacity = 'nan%'", "such as 5%"]),
        (["--capacity", "1%,-4"], ["--capacity = '-4'", "such as 20000"]),
        (["--capacity", "4 GiB"], ["--capacity = '4 GiB'", "such as 20000"]),
        (["--block-tokens", "0"], ["--block-tokens = 0", "give 1 or more"]),
        (["--json", "/no/such/folder/x.json"], ["--json = '/no/such/folder/x.json'", "folder"]),
        (["--png", "/no/such/folder/x.png"], ["--png = '/no/such/folder/x.png'", "folder"]),
    ],
)
def test_what_cannot_be_done_is_said(
    tmp_path: Path, own: str, capsys: pytest.CaptureFixture[str], words: list[str], told: list[str]
) -> None:
    assert cli.main(["replay", str(mooncake(tmp_path / "turns.jsonl")), *words]) == cli.USAGE
    shown = capsys.readouterr()
    assert shown.out == ""
    line = shown.err.splitlines()[-1]
    assert line.startswith("tierkv replay: ")
    for part in told:
        assert part in line


TWO_PASTS = (
    '{"timestamp": 0, "input_length": 1024, "hash_ids": [1, 2]}\n'
    '{"timestamp": 1, "input_length": 1024, "hash_ids": [3, 2]}\n'
)


@pytest.mark.parametrize(
    ("text", "status", "told"),
    [
        (None, cli.USAGE, "there is no such file; name a recorded trace"),
        ("", cli.FAILED, "it is empty"),
        ("{\n", cli.FAILED, "line 1 is no JSON"),
        ('{"a": 1}\n', cli.FAILED, "no known format"),
        ('{"timestamp": 0, "input_length": 5, "hash_ids": [1]}\n', cli.FAILED, "--block-tokens"),
        (TWO_PASTS, cli.FAILED, "does not stand for the prompt before it"),
    ],
)
def test_a_bad_trace_is_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], text: str | None, status: int, told: str
) -> None:
    trace = tmp_path / "bad.jsonl"
    if text is not None:
        trace.write_text(text)
    assert cli.main(["replay", str(trace)]) == status
    shown = capsys.readouterr()
    assert shown.out == ""
    assert told in shown.err.splitlines()[-1]


def test_the_chart_is_a_png(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    trace, picture = mooncake(tmp_path / "turns.jsonl"), tmp_path / "out.png"
    words = ["replay", str(trace), "--capacity", "3,5", "--png", str(picture)]
    # A process of its own, since matplotlib opens its fonts at the first picture and keeps them open.
    done = subprocess.run(
        [sys.executable, "-m", "tierkv.cli", *words], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    bits = picture.read_bytes()
    assert bits.startswith(b"\x89PNG\r\n\x1a\n")
    assert len(bits) > 10_000


def test_a_name_with_any_sign_in_it_has_a_chart(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    trace, png = mooncake(tmp_path / r"a$\frac{b$.jsonl"), tmp_path / "out.png"
    for words in (["replay", "--capacity", "3"], ["replay", "--nvme", "2"], ["plan", "--no-replay"]):
        done = subprocess.run(
            [sys.executable, "-m", "tierkv.cli", words[0], str(trace), *words[1:], "--png", str(png)],
            capture_output=True, text=True, check=False,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        png.unlink()


def test_between_what_was_replayed_the_chart_says_nothing(tmp_path: Path) -> None:
    """LRU's curve is the only line, since it is the only one that is known at every capacity."""
    pytest.importorskip("matplotlib")
    code = (
        "import sys\nfrom pathlib import Path\nfrom tierkv.replay import chart\n"
        "found = []\npicture = chart.picture\n"
        "chart.picture = lambda *given: found.append(picture(*given)) or found[0]\n"
        "from tierkv.cli import main\nmain(sys.argv[1:])\n"
        "for one in found[0].axes[0].lines: print('line:', one.get_linestyle(), one.get_label())\n"
    )
    words = [
        "replay",
        str(mooncake(tmp_path / "turns.jsonl")),
        "--capacity",
        "1,3",
        "--png",
        str(tmp_path / "x"),
    ]
    done = subprocess.run([sys.executable, "-c", code, *words], capture_output=True, text=True, check=True)
    assert [line for line in done.stdout.splitlines() if line.startswith("line: ")] == [
        "line: - LRU, every capacity",
        "line: None optimum (knows the future)",
        "line: None lru",
        "line: None density",
    ]


def test_without_matplotlib_the_extra_is_named_before_any_work(tmp_path: Path) -> None:
    code = (
        "import sys, importlib.util as u; find = u.find_spec\n"
        "u.find_spec = lambda name, *rest: None if name == 'matplotlib' else find(name, *rest)\n"
        "from tierkv.cli import main; sys.exit(main(sys.argv[1:]))"
    )
    words = ["replay", str(mooncake(tmp_path / "turns.jsonl")), "--png", str(tmp_path / "x.png")]
    done = subprocess.run([sys.executable, "-c", code, *words], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (2, "")
    assert f"--png = '{tmp_path / 'x.png'}': the package 'matplotlib'" in done.stderr
    assert "pip install 'tierkv-store[charts]'" in done.stderr
    assert not (tmp_path / "x.png").exists()


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


class Narrow(Terminal):
    """Of an old encoding, and so many columns wide as the test's pseudo-terminal."""

    encoding = "ascii"

    def __init__(self, descriptor: int) -> None:
        super().__init__()
        self._descriptor = descriptor

    def fileno(self) -> int:
        return self._descriptor


def test_the_bar_keeps_to_its_line() -> None:
    ours, theirs = os.openpty()
    try:
        for columns in (40, 60):
            fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 24, columns, 0, 0))
            terminal = Narrow(theirs)
            progress = Progress(terminal, 1)
            progress.part("a label that is much longer than the line has room for")(0.5)
            shown = terminal.getvalue().split("\r\x1b[K")[-1]
            assert len(shown) == columns - 1
            assert shown.startswith("#" * 15 + "." * 15 + "  50% ")
    finally:
        os.close(ours)
        os.close(theirs)


@pytest.mark.parametrize("errors", ["2>&-", "2>/dev/full"])
def test_figures_do_not_need_the_bar(tmp_path: Path, errors: str) -> None:
    trace = mooncake(tmp_path / "turns.jsonl")
    done = subprocess.run(
        ["sh", "-c", f'"{sys.executable}" -m tierkv.cli replay "{trace}" --capacity 3 {errors}'],
        capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    assert done.returncode == 0
    assert "optimum" in done.stdout


def test_the_bar_grows_and_is_wiped() -> None:
    terminal = Terminal()
    progress = Progress(terminal, 2)
    told = progress.part("first")
    told(0.5)
    told(0.501)  # no percent more: nothing is written
    progress.part("second")(1.0)
    progress.end()
    shown = [line.partition(" ")[2].strip() for line in terminal.getvalue().split("\r\x1b[K")[1:]]
    assert shown == ["0% first", "25% first", "50% second", "100% second", ""]
