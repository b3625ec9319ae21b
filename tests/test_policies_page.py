"""The policy of ``docs/policies.md``, exactly as it stands there: right by the contract, judged by the replayer."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from replay_support import recorded

from tierkv import registry
from tierkv.policies.density import DensityPolicy
from tierkv.replay.one_tier import replay
from tierkv.replay.optimum import replay_optimum

ROOT = Path(__file__).parent.parent
PAGE = (ROOT / "docs" / "policies.md").read_text()
POLICY, CONTRACT = re.findall(r"```python\n(.*?)```\n", PAGE, re.DOTALL)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "once_first.py").write_text(POLICY)
    (tmp_path / "test_once_first.py").write_text(CONTRACT)
    return tmp_path


def run(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    paths = os.pathsep.join([str(folder), str(ROOT)])
    return subprocess.run(
        [sys.executable, *words],
        cwd=folder,
        env=os.environ | {"PYTHONPATH": paths},
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )


def test_it_is_thirty_lines() -> None:
    assert len([line for line in POLICY.splitlines() if line.strip()]) <= 30


def test_it_keeps_the_contract(folder: Path) -> None:
    done = run(folder, "-m", "pytest", "-q", "-p", "no:cacheprovider", "test_once_first.py")
    assert done.returncode == 0, done.stdout
    assert re.search(r"^\d{2} passed", done.stdout, re.MULTILINE), done.stdout


def test_replay_judges_it_by_the_command_of_the_page(folder: Path) -> None:
    # One prompt comes back, at once and then between new ones: it is worth keeping, and LRU does not know.
    prompts, new = [], 100
    for number in range(60):
        again = number < 2 or number % 3 == 0
        prompts.append([0, 1, 2, 3] if again else list(range(new, new + 4)))
        new += 0 if again else 4
    lines = [
        {"timestamp": number, "input_length": 4 * 512, "hash_ids": ids} for number, ids in enumerate(prompts)
    ]
    (folder / "traffic.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    (command,) = re.findall(r"^\$ PYTHONPATH=\. tierkv (replay .+)$", PAGE, re.MULTILINE)
    words = command.replace("1%,5%,10%", "8").replace("--png traffic.png", "--json out.json").split()
    done = run(folder, "-m", "tierkv.cli", *words)
    assert done.returncode == 0, done.stderr
    cells = json.loads((folder / "out.json").read_text())["cells"]
    hits = {cell["policy"]: cell["hit_blocks"] for cell in cells}
    assert hits["once_first:OnceFirst"] == hits["optimum"] == 20 * 4
    assert hits["lru"] < hits["once_first:OnceFirst"]


@pytest.mark.parametrize("kind", ["eviction", "admission", "promotion"])
def test_every_built_in_policy_is_on_the_page(kind: registry.Kind) -> None:
    built_in = [plugin.name for plugin in registry.plugins(kind) if plugin.package == registry.BUILT_IN]
    rows = PAGE.split("## Admission and promotion")
    text = rows[0] if kind == "eviction" else rows[1]
    marked = "" if kind == "eviction" else f"{kind} |"
    for name in built_in:
        assert re.search(rf"^\| `{name}` \| {re.escape(marked)}", text, re.MULTILINE), name


def test_the_figures_of_the_page_are_those_of_the_replayer() -> None:
    """One row of each kind; whoever changes a policy or the replayer runs the page's command again."""
    trace = recorded("conv_a")
    rows = {tuple(line.split()[:3]): line.split() for line in PAGE.splitlines() if re.match(r"\d+% ", line)}
    assert len(rows) == 15
    for policy, outcome in (
        ("optimum", replay_optimum(trace, 908)),
        ("density", replay(trace, 908, DensityPolicy())),
    ):
        row = rows["1%", "908", policy]
        assert row[3] == f"{outcome.hit_blocks:,}"
        assert row[5] == f"{outcome.hit_percent:.2f}%"
        assert row[7] == f"{outcome.evicted_blocks:,}"
