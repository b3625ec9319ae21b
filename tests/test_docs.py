"""What README.md and docs/*.md say is so: their Python runs as pasted and prints what they show, their links lead
somewhere, and the files, names, settings and counters that they mention exist.

A block of Python that cannot run alone has ``<!-- not run: why -->`` on the line before it; one that is a test has
``<!-- runs with pytest -->``. A block of ``text`` right behind one of ``python`` is what it prints. Blocks of ``sh``
with ``<!-- run -->`` before them run too, those of a page in one shell.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from importlib import import_module
from pathlib import Path
from typing import NamedTuple

import pytest

from tierkv.cli import COMMANDS
from tierkv.client import Client
from tierkv.config_table import BY_KEY, SECTIONS

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
SUFFIXES = ("md", "py", "svg", "toml", "yml")
HANDLE_OR_STORE = {"store"}
"""Attributes of a client that are no verbs."""

_PYTHON = re.compile(
    r"(?P<before>[^\n]*)\n+```python\n(?P<code>.*?)^```\n(?:\n*```text\n(?P<prints>.*?)^```\n)?",
    re.DOTALL | re.MULTILINE,
)
_SHELL = re.compile(
    r"^<!-- run -->\n```sh\n(?P<code>.*?)^```\n(?:\n*```text\n(?P<prints>.*?)^```\n)?",
    re.DOTALL | re.MULTILINE,
)
_FENCED = re.compile(r"^```.*?^```$", re.DOTALL | re.MULTILINE)
_LINK = re.compile(r"!?\[[^\]]*\]\(([^)\s]+)\)")
_QUOTED = re.compile(r"`([^`\n]+)`")


class Snippet(NamedTuple):
    """One block of Python, with what is said to be printed and why it does not run."""

    where: str
    code: str
    prints: str | None
    not_run: str | None
    is_test: bool = False


def snippets(page: Path, text: str) -> list[Snippet]:
    found = []
    for match in _PYTHON.finditer("\n\n" + text):
        line = text.count("\n", 0, match.start("code") - 2) + 1
        mark = re.fullmatch(r"<!-- not run: (.+) -->", match["before"].strip())
        is_test = match["before"].strip() == "<!-- runs with pytest -->"
        found.append(
            Snippet(f"{page.name}:{line}", match["code"], match["prints"], mark and mark[1], is_test)
        )
    return found


def prose(page: Path) -> str:
    """The text without its blocks of code."""
    return _FENCED.sub("", page.read_text())


def quoted(page: Path) -> set[str]:
    return set(_QUOTED.findall(prose(page)))


ALL = [snippet for page in PAGES for snippet in snippets(page, page.read_text())]


@pytest.mark.parametrize(
    "snippet", [one for one in ALL if not one.not_run], ids=lambda snippet: snippet.where
)
def test_python_runs_as_pasted_and_prints_what_is_shown(snippet: Snippet, tmp_path: Path) -> None:
    script = tmp_path / ("test_pasted.py" if snippet.is_test else "pasted.py")
    script.write_text(snippet.code)
    how = ["-m", "pytest", "-q", "-p", "no:cacheprovider"] if snippet.is_test else []
    ran = run_in(tmp_path, sys.executable, *how, script)
    assert (ran.returncode, ran.stderr) == (0, ""), ran.stdout
    if snippet.prints is not None:
        assert ran.stdout == snippet.prints


def run_in(folder: Path, *command: str | Path) -> subprocess.CompletedProcess[str]:
    clean = {name: value for name, value in os.environ.items() if not name.startswith("TIERKV_")}
    path = f"{Path(sys.executable).parent}:{clean['PATH']}"
    return subprocess.run(
        command,
        cwd=folder,
        env={**clean, "PATH": path, "PYTHONPATH": str(ROOT), "TMPDIR": str(folder), "HOME": str(folder)},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


@pytest.mark.parametrize(
    "page", [one for one in PAGES if _SHELL.search(one.read_text())], ids=lambda page: page.name
)
def test_shell_runs_as_pasted_and_prints_what_is_shown(page: Path, tmp_path: Path) -> None:
    blocks = list(_SHELL.finditer(page.read_text()))
    end = "trap 'kill $(jobs -p) 2>/dev/null || true; wait' EXIT\n"  # whatever fails, nothing is left behind
    code = "echo %%%%\n".join(one["code"] for one in blocks)
    ran = run_in(tmp_path, "bash", "-euo", "pipefail", "-c", end + code)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    for block, printed in zip(blocks, ran.stdout.split("%%%%\n"), strict=True):
        if block["prints"] is not None:
            assert printed == block["prints"]


@pytest.mark.parametrize("snippet", [one for one in ALL if one.not_run], ids=lambda snippet: snippet.where)
def test_python_that_cannot_run_alone_compiles(snippet: Snippet) -> None:
    compile(snippet.code, snippet.where, "exec")


def test_the_readme_has_something_to_paste() -> None:
    first = snippets(ROOT / "README.md", (ROOT / "README.md").read_text())[0]
    statements = [line for line in first.code.splitlines() if line.strip() and "import " not in line]
    assert first.not_run is None
    assert first.prints
    assert len(statements) <= 12


def test_every_block_of_python_is_found() -> None:
    assert len(ALL) == sum(page.read_text().count("```python\n") for page in PAGES)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page: Path) -> None:
    for link in _LINK.findall(prose(page)):
        if re.match(r"[a-z]+:", link):
            continue
        name, _, anchor = link.partition("#")
        target = page.parent / name if name else page
        assert target.is_file(), link
        if anchor:
            assert anchor in anchors(target), link


def anchors(page: Path) -> set[str]:
    """As mkdocs and GitHub make them of headings, for headings in plain words."""
    headings = re.findall(r"^#+ (.+)$", prose(page), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).strip().replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_files_that_are_named_exist(page: Path) -> None:
    for name in quoted(page):
        if re.fullmatch(rf"[A-Za-z_][\w*./-]*/[\w*.-]+\.({'|'.join(SUFFIXES)})", name):
            assert any(ROOT.glob(name)), name


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_names_in_tierkv_that_are_mentioned_exist(page: Path) -> None:
    for name in quoted(page):
        dotted = re.fullmatch(r"(tierkv(?:\.\w+)+)(?:\(.*\))?", name)
        if dotted and not dotted[1].endswith(SUFFIXES):
            assert resolve(dotted[1]) is not None, name


def resolve(dotted: str) -> object | None:
    """The module, or the attribute of one, that is called so."""
    module, _, attribute = dotted.rpartition(".")
    for name, rest in ((dotted, ""), (module, attribute)):
        try:
            found: object = import_module(name)
        except ModuleNotFoundError as error:
            if error.name is None or not dotted.startswith(error.name):
                raise
            continue
        return getattr(found, rest, None) if rest else found
    return None


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_settings_verbs_and_counters_that_are_mentioned_exist(page: Path) -> None:
    files = [*(ROOT / "tierkv").glob("*.py"), ROOT / "tierkv" / "daemon" / "exposition.py"]
    sources = "".join(path.read_text() for path in files)
    for name in quoted(page):
        if re.fullmatch(rf"({'|'.join(SECTIONS)})\.[a-z_]+", name) and not name.endswith(SUFFIXES):
            assert name in BY_KEY, f"no setting is called {name}"
        for verb in re.findall(r"\bclient\.(\w+)", name):
            assert verb in HANDLE_OR_STORE or hasattr(Client, verb), f"a client has no {verb}"
        if re.fullmatch(r"[a-z_]+_total", name):
            assert f'"{name}"' in sources, f"no counter is called {name}"


def test_the_navigation_has_every_page_once() -> None:
    config = (ROOT / "mkdocs.yml").read_text()
    listed = re.findall(r"^ +- .+: (\S+\.md)$", config[config.index("\nnav:") :], re.MULTILINE)
    docs = ROOT / "docs"
    assert sorted(listed) == sorted(
        page.relative_to(docs).as_posix() for page in PAGES if page.is_relative_to(docs)
    )


def test_marks_and_outputs_are_read() -> None:
    text = (
        "<!-- not run: yours -->\n```python\na\n```\n\nSo:\n\n```python\nprint(1)\n```\n\n```text\n1\n```\n\n"
        "```python\nb\n```\nProse.\n```text\nnot its output\n```\n"
    )
    assert snippets(Path("x.md"), text) == [
        Snippet("x.md:3", "a\n", None, "yours"),
        Snippet("x.md:9", "print(1)\n", "1\n", None),
        Snippet("x.md:17", "b\n", None, None),
    ]


def test_what_does_not_exist_is_not_resolved() -> None:
    assert resolve("tierkv.testing.blob_tier.BlobTierContract") is not None
    assert resolve("tierkv.nothing") is None
    assert resolve("tierkv.client.Nothing") is None
    assert resolve("tierkv.nothing.at_all") is None


def test_the_rows_of_benchmarks_that_are_named_exist() -> None:
    text = (ROOT / "docs" / "performance.md").read_text()
    named = re.findall(r"\| `python -m (bench\.\w+) --only (\w+)` \| (.+) \|", text)
    assert len(named) >= 8
    for module, only, rows in named:
        experiments = import_module(module).BENCH.experiments
        names = {row.name for one in experiments for row in one.rows} | {one.name for one in experiments}
        assert any(only in name for name in names), only
        assert set(_QUOTED.findall(rows)) <= names, rows


def test_every_command_stands_in_the_table_of_commands() -> None:
    text = (ROOT / "docs" / "operating.md").read_text().partition("## Commands\n")[2].partition("\n## ")[0]
    assert set(re.findall(r"^\| `tierkv (\w+)` \|", text, re.MULTILINE)) == {one.name for one in COMMANDS}
