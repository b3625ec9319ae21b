"""Command lines of tierkv, settings and data in the pages' other blocks: nobody runs those, so they are read by what
would read them."""

from __future__ import annotations

import json
import re
import shlex
import tomllib
from pathlib import Path

import pytest
import yaml

from tests.test_deploying import understand
from tests.test_docs import PAGES
from tierkv.cli import COMMANDS
from tierkv.config_table import BY_KEY

_BLOCK = re.compile(r"^```(\w+)\n(.*?)^```$", re.DOTALL | re.MULTILINE)
_COMMAND = re.compile(
    rf"(?:^|[ /(])tierkv ((?:{'|'.join(one.name for one in COMMANDS)})\b[^|;&>)]*?)(?= *\d?>|[|;&)]|$)"
)
NOT_PARSED = ("--help", "doctor vllm")
"""What ends before its options are looked at, and what asks vLLM to look at them."""
LEAST = 20


def blocks(page: Path, *kinds: str) -> list[str]:
    return [text for kind, text in _BLOCK.findall(page.read_text()) if kind in kinds]


def shell_lines(page: Path) -> list[str]:
    """What is typed: lines of ``sh``, and of ``console`` those with a prompt."""
    typed = "".join(blocks(page, "sh"))
    shown = "".join(blocks(page, "console"))
    prompted = "\n".join(re.findall(r"^\$ (.*)$", shown, re.MULTILINE))
    return (typed + prompted).replace("\\\n", " ").splitlines()


def command_lines() -> list[str]:
    found = []
    for page in PAGES:
        for line in shell_lines(page):
            found += [
                words for words in _COMMAND.findall(line) if not any(one in words for one in NOT_PARSED)
            ]
    return found


@pytest.mark.parametrize("line", sorted(set(command_lines())))
def test_every_command_line_on_every_page_is_understood(line: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert understand(shlex.split(line, comments=True), monkeypatch)


def test_command_lines_are_found() -> None:
    assert len(set(command_lines())) >= LEAST
    assert any(line.startswith("replay ") for line in command_lines())


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_data_that_is_shown_can_be_read_and_settings_exist(page: Path) -> None:
    for text in blocks(page, "json"):
        json.loads(text)
    for text in blocks(page, "yaml"):
        assert list(yaml.safe_load_all(text))
    for text in blocks(page, "toml"):
        for section, values in tomllib.loads(text).items():
            if section != "project":  # of a package that brings a tier or a policy
                assert {f"{section}.{name}" for name in values} <= BY_KEY.keys()
