"""What every test is held to: it leaves no thread, no descriptor and no child process behind."""

from __future__ import annotations

import importlib.util
import signal
from collections.abc import Iterator

import pytest

from tests.client_support import DAEMON, EMBEDDED, FACE
from tierkv.testing.faults.leftovers import nothing_left

collect_ignore = [] if importlib.util.find_spec("vllm") else ["vllm"]
"""Those need vLLM, which has an environment of its own (``make test-vllm``)."""


if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    # A shell lets what it starts in the background ignore the interrupt, and that is inherited. Some tests send it.
    signal.signal(signal.SIGINT, signal.default_int_handler)


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


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """A test that uses ``face`` runs with a store in its process and with a daemon's, or as it is marked."""
    if "face" in metafunc.fixturenames:
        only = metafunc.definition.get_closest_marker("embedded_only") is not None
        metafunc.parametrize("face", [EMBEDDED] if only else [EMBEDDED, DAEMON], indirect=True)


@pytest.fixture
def face(request: pytest.FixtureRequest) -> Iterator[str]:
    """What ``tests.client_support.live`` gives a client of."""
    token = FACE.set(request.param)
    yield request.param
    FACE.reset(token)
