"""As many seeds of the adversary as there is time for, from a place that nobody has looked at before."""

from __future__ import annotations

import os
import time

import pytest

from tierkv.intake import Intake
from tierkv.testing.adversary import main, try_seeds, until

SHARE = 0.5
"""Of the time that ``make torture`` has; the rest is for crashes and load."""


@pytest.mark.torture
@pytest.mark.timeout(0)
def test_as_many_seeds_as_time_allows() -> None:
    minutes = float(os.environ.get("TORTURE_MINUTES", "20"))
    first = int(time.time()) % 10**8 * 10
    print(f"\nseeds from {first} on")
    assert not try_seeds(until(minutes * 60 * SHARE, first))


def test_the_command_replays_a_seed(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--seed", "7"]) == 0
    assert "seed 7 passed" in capsys.readouterr().out


def test_the_command_names_the_seeds_that_fail(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        Intake, "discard", lambda self, blocks: None
    )  # slots of dropped drafts never come back
    assert main(["--seeds", "0:8"]) == 1
    told = capsys.readouterr().out
    assert "FAILED seed " in told
    assert "python -m tierkv.testing.adversary --seed " in told
    assert "8 seeds lived" in told
