"""The table of counters says what the code counts, and the page says what the table says."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

from tierkv.metrics import METRICS, Counters, table

ROOT = Path(__file__).parent.parent
PAGE = ROOT / "docs" / "metrics.md"


def counted(source: str) -> Iterator[tuple[str, int]]:
    """Name and number of labels of each increment in the code, and of each entry that ``totals`` makes."""
    for node in ast.walk(ast.parse(source)):
        match node:
            case ast.Call(func=ast.Attribute(attr="add"), args=[_, ast.Constant(value=str(name)), *labels]):
                yield name, len(labels)
            case ast.Tuple(elts=[ast.Constant(value=str(name)), *labels]) if name.endswith("_total"):
                yield name, len(labels)


def all_counted() -> set[tuple[str, int]]:
    found = set()
    for folder in ("tierkv", "tiers", "policies"):
        for path in (ROOT / folder).glob("*.py"):
            if path.name != "metrics.py":
                found |= {one for one in counted(path.read_text()) if one[0].endswith("_total")}
    return found


def test_d28_the_table_lists_what_the_code_counts() -> None:
    listed = {(metric.name, len(metric.labels)) for metric in METRICS}
    found = all_counted()
    assert found - listed == set(), "these are counted and not in tierkv.metrics.METRICS"
    assert listed - found == set(), "these are in tierkv.metrics.METRICS and nobody counts them"
    assert len({metric.name for metric in METRICS}) == len(METRICS)


def test_d28_the_page_has_the_table() -> None:
    lines = PAGE.read_text().splitlines()
    start = lines.index("| counter | labels | unit | what it counts |")
    shown = lines[start : start + 2 + len(METRICS)]
    assert shown == list(table()), "renew the table in docs/metrics.md: " + "\n".join(["", *table()])


def test_the_page_names_every_reason() -> None:
    """Whatever a reason label may say is explained."""
    page = PAGE.read_text()
    reasons = set()
    for path in (ROOT / "tierkv").glob("*.py"):
        text = path.read_text()
        reasons |= set(re.findall(r'reason="(\w+)"', text))
        reasons |= set(re.findall(r'FrameError\("(\w+)"', text))
        reasons |= set(re.findall(r'(?:dropped_blocks|load_cut)_total", (?:"host", )?"(\w+)"', text))
        reasons |= set(re.findall(r'\b_?(?:drop|cut|note_refused)\([^")]*"(\w+)"', text))
    assert {"cleared", "magic", "no_room", "queue_full", "copy_failed", "recompute"} <= reasons - {"host"}
    missing = {reason for reason in reasons if f"`{reason}`" not in page}
    assert not missing, missing


def test_the_search_has_teeth() -> None:
    code = 'counters.add(1, "a_total", tier)\nfound["b_total",] = 1\nx = ("c_total", y, z)'
    assert set(counted(code)) == {("a_total", 1), ("b_total", 0), ("c_total", 2)}


def test_counters() -> None:
    counters = Counters()
    counters.add(2, "a_total", "x")
    counters.add(3, "a_total", "y")
    assert (counters.get("a_total", "x"), counters.get("a_total"), counters.sum("a_total")) == (2, 0, 5)
    seen = counters.snapshot()
    counters.add(1, "a_total", "x")
    assert seen == {("a_total", "x"): 2, ("a_total", "y"): 3}
