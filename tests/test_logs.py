"""Logs that cannot flood (``tierkv.logs``), and the places that can log at the rate of I/O."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import replace

import pytest

from tierkv.clock import FakeClock
from tierkv.guard import Breaker, GuardedTier
from tierkv.logs import MAX_KINDS, PERIOD_S, ChangeLog, RareLog
from tierkv.testing.memory import MemoryBlobTier
from tierkv.tier import Usage
from tierkv.units import MIB


@pytest.fixture
def lines(caplog: pytest.LogCaptureFixture) -> Sequence[str]:
    caplog.set_level(logging.DEBUG, "tierkv")

    class Lines(Sequence[str]):
        def __getitem__(self, i):  # type: ignore[no-untyped-def]
            return caplog.messages[i]

        def __len__(self) -> int:
            return len(caplog.messages)

    return Lines()


def test_a_kind_is_written_once_in_its_period(lines: Sequence[str]) -> None:
    clock = FakeClock()
    rare = RareLog(clock)
    for number in range(1000):
        rare.warning("copy", "copy %d failed", number)
        clock.advance(PERIOD_S / 1000 * 0.9)
    assert list(lines) == ["copy 0 failed"]
    clock.advance(PERIOD_S)
    rare.warning("copy", "copy %d failed", 1000)
    rare.warning("copy", "copy %d failed", 1001)
    assert list(lines)[1:] == ["copy 1000 failed (999 more like this)"]
    clock.advance(PERIOD_S)
    rare.warning("copy", "copy %d failed", 1002)
    assert list(lines)[2:] == ["copy 1002 failed (1 more like this)"]
    clock.advance(PERIOD_S)
    rare.warning("copy", "copy %d failed", 1003)
    assert list(lines)[3:] == ["copy 1003 failed"]


def test_kinds_do_not_silence_each_other(lines: Sequence[str]) -> None:
    rare = RareLog(FakeClock())
    rare.warning("a", "100%% of %s", "a")
    rare.error("b", "b")
    rare.warning("a", "again")
    assert list(lines) == ["100% of a", "b"]


def test_kinds_are_bounded_and_the_busy_ones_are_kept(lines: Sequence[str]) -> None:
    rare = RareLog(FakeClock())
    for number in range(3 * MAX_KINDS):
        rare.warning(f"kind {number}", "a new one")
        rare.warning("busy", "the busy one")
    assert len(rare._last) == MAX_KINDS
    assert list(lines).count("the busy one") == 1


def test_an_error_brings_the_traceback_of_its_cause(caplog: pytest.LogCaptureFixture) -> None:
    rare = RareLog(FakeClock())
    try:
        raise ValueError("in the plug-in")
    except ValueError as error:
        rare.error("plug-in", "it failed", cause=error)
    assert "in the plug-in" in caplog.text
    assert "Traceback" in caplog.text


def test_a_tier_that_comes_and_goes_does_not_flood_the_log(lines: Sequence[str]) -> None:
    clock = FakeClock()
    tier = GuardedTier(MemoryBlobTier(MIB), Breaker(clock, 1, 0.0))
    for _ in range(500):
        tier._leave(False)
        tier._leave(True)
        clock.advance(0.001)
    assert len(lines) == 2, list(lines)[:5]
    clock.advance(PERIOD_S)
    tier._leave(False)
    assert "499 more like this" in lines[2]


def test_a_state_is_told_when_it_changes_and_the_last_line_is_true() -> None:
    clock = FakeClock()
    told = ChangeLog(clock)
    assert not told.due(False), "before it has begun there is no change"
    told.begin(True)
    assert not told.due(True)
    assert told.due(False)
    assert not told.due(False)
    for _ in range(100):  # it comes and goes
        assert not told.due(True)
        assert not told.due(False)
    clock.advance(PERIOD_S)
    assert not told.due(False), "that is what the log says already"
    assert told.due(True)
    assert not told.due(False)
    clock.advance(PERIOD_S)
    assert told.due(False)


class _Full(MemoryBlobTier):
    """Takes nothing while it has a trouble."""

    trouble = ""

    def usage(self) -> Usage:
        return replace(super().usage(), writable=not self.trouble)

    def status(self) -> dict[str, object]:
        return {"address": "shelf 7", "trouble": self.trouble}


def test_the_log_says_why_a_tier_takes_nothing_and_when_it_does_again(lines: Sequence[str]) -> None:
    clock = FakeClock()
    full = _Full(MIB)
    tier = GuardedTier(full, Breaker(clock, 1, 0.0))
    tier.start()
    full.trouble = "no space left"
    for _ in range(3):
        tier.refresh_usage()
    assert list(lines) == ["tier memory takes nothing: shelf 7: no space left"]
    full.trouble = ""
    clock.advance(PERIOD_S)
    tier.refresh_usage()
    assert list(lines)[1:] == ["tier memory takes blocks again"]


def test_the_log_says_why_a_tier_is_left_alone(lines: Sequence[str]) -> None:
    full = _Full(MIB)
    full.trouble = "connection refused"
    GuardedTier(full, Breaker(FakeClock(), 1, 5.0))._leave(False)
    why = "shelf 7: connection refused"
    assert list(lines) == [f"tier memory does not answer ({why}); it is tried again every 5 s"]
