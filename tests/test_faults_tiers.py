"""The whole store with a tier that fails at its n-th call, in every way, for every n."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.client_support import PATIENCE_S
from tests.faults_support import PLAIN, FaultyTiers, Life
from tests.nvme_support import quick_folder
from tests.valkey_server import ValkeyServer, running_server
from tierkv.layout import Layout
from tierkv.testing.faults import WAYS, Way, each_call

CASES = [(call, way) for call, ways in WAYS.items() for way in ways]

pytestmark = pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")


@pytest.fixture(scope="module")
def server() -> Iterator[ValkeyServer]:
    with running_server() as server:
        yield server


BUSY_TURNS = 5
"""On a busy machine a call of 60 ms may be given up before the one that would be struck."""


def lives(
    tier: str, call: str, way: Way, layout: Layout, path: Path, server: ValkeyServer, *, times: int | None = 1
) -> int:
    """Runs the life for n = 1, 2, 3 ... until no call is struck; how many lives there were."""
    count = 0
    with quick_folder(path) as folder:
        for strike in each_call(call, times=times):
            count += 1
            server.do("FLUSHALL")
            tiers = FaultyTiers(tier, strike, way)
            life = Life(folder / str(count), server.address, layout, mend=tiers.mend, wrap=tiers.wrap)
            life.run()
    return count


def test_an_undisturbed_life_misses_nothing(tmp_path: Path, server: ValkeyServer) -> None:
    server.do("FLUSHALL")
    patient = {"nvme_s": PATIENCE_S, "valkey_s": PATIENCE_S, "load_s": PATIENCE_S}
    life = Life(tmp_path / "nvme", server.address, **patient)
    life.run()
    assert life.loads[:3] == [3, 3, 3]
    assert life.cleared
    assert life.loads[3:6] == [0, 2, 0], "cleared; stored again and found after a restart; still cleared"


@pytest.mark.parametrize("tier", ["nvme", "valkey"])
@pytest.mark.parametrize(("call", "way"), CASES, ids=[f"{call}-{way.value}" for call, way in CASES])
def test_d9_d10_d17_the_nth_call_of_a_tier_fails(
    tier: str, call: str, way: Way, tmp_path: Path, server: ValkeyServer
) -> None:
    may_be_missing = (tier, call) in (("nvme", "probe"), ("valkey", "delete"))
    for turn in range(BUSY_TURNS):
        if lives(tier, call, way, PLAIN, tmp_path / str(turn), server) > 1 or may_be_missing:
            return
    raise AssertionError("nothing was ever struck")
