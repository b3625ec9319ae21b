"""Scenarios with a real vLLM engine: ``make test-vllm``. They are not part of ``make test``, whose environment has
none."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.vllm.running import Plain, Runner


@pytest.fixture
def runner(tmp_path: Path) -> Runner:
    return Runner(tmp_path)


@pytest.fixture(scope="session")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Plain:
    return Plain(Runner(tmp_path_factory.mktemp("plain")))
