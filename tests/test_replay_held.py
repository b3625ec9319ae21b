"""A third party's policy that breaks its protocol in a replay ends in one line that names it, not in a traceback."""

import json
import sys
from pathlib import Path

import pytest

from tierkv import cli

# Five requests of two blocks each: full after the second, so that somebody has to leave in the third.
PROMPTS = [[2 * number, 2 * number + 1] for number in range(5)]

BAD = """
from tierkv.policies.lru import LruPolicy

class Raises(LruPolicy):
    def on_remove(self, ids, *, evicted):
        raise KeyError("gone\\nalready")
class RaisesInVictims(LruPolicy):
    def victims(self, need, evictable):
        yield from ()
        self.no_such_thing
class NamesAnybody(LruPolicy):
    def victims(self, need, evictable):
        yield 0
class NamesNobody(LruPolicy):
    def victims(self, need, evictable):
        yield "block"
class NeverEnds(LruPolicy):
    def victims(self, need, evictable):
        while True:
            evictable(-1)
            if False: yield
class WillNot:
    def __init__(self): raise ZeroDivisionError("no luck")
"""


@pytest.fixture
def trace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "bad_policies.py").write_text(BAD)
    (tmp_path / "bad_module.py").write_text("1 / 0\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    for name in ("bad_policies", "bad_module"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    path = tmp_path / "trace.jsonl"
    lines = [
        {"timestamp": number, "input_length": 1024, "hash_ids": ids} for number, ids in enumerate(PROMPTS)
    ]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


WHERE = "in request 3 (block references 5 to 6): "


@pytest.mark.parametrize(
    ("policy", "told"),
    [
        ("bad_policies:Raises", WHERE + "on_remove raised KeyError: 'gone\\nalready'"),
        ("bad_policies:RaisesInVictims", WHERE + "victims raised AttributeError: "),
        (
            "bad_policies:NamesAnybody",
            WHERE + "victims names block 0, for which evictable(...) was not asked",
        ),
        ("bad_policies:NamesNobody", WHERE + "victims raised TypeError: "),
        ("bad_policies:NeverEnds", WHERE + "victims(2, ...) looks at more than 144 blocks"),
        ("bad_policies:WillNot", "it cannot be made: ZeroDivisionError: no luck"),
        ("bad_module:Any", "ZeroDivisionError: division by zero"),
    ],
)
def test_it_is_named_with_the_place_and_the_reason(
    trace: Path, capsys: pytest.CaptureFixture[str], policy: str, told: str
) -> None:
    assert cli.main(["replay", str(trace), "--policy", f"lru,{policy}", "--capacity", "4"]) == cli.USAGE
    shown = capsys.readouterr()
    assert shown.out == ""
    line = shown.err.splitlines()[-1]
    assert line.startswith(f"tierkv replay: --policy = '{policy}': ")
    assert told in line
    assert "Traceback" not in shown.err


def test_one_that_keeps_to_it_hits_the_same_held_or_not(trace: Path, tmp_path: Path) -> None:
    out = tmp_path / "out.json"
    held = "tierkv.policies.lru:LruPolicy"
    words = ["replay", str(trace), "--policy", f"lru,{held}", "--capacity", "4", "--json", str(out)]
    assert cli.main(words) == 0
    cells = {cell["policy"]: cell for cell in json.loads(out.read_text())["cells"]}
    assert cells[held] | {"policy": "lru"} == cells["lru"]
    assert cells["lru"]["evicted_blocks"] == 6
