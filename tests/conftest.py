"""What every test is held to: it leaves no thread, no descriptor and no child process behind."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tierkv.testing.faults.leftovers import nothing_left


@pytest.fixture
def leaks_on_purpose() -> None:
    """For tests that show how something is caught that leaves things behind."""


@pytest.fixture(autouse=True)
def _leaves_nothing_behind(request: pytest.FixtureRequest) -> Iterator[None]:
    if "leaks_on_purpose" in request.fixturenames:
        yield
        return
    with nothing_left():
        yield
