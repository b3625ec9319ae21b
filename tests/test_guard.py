"""The breaker: it opens after failures in a row, lets one call try, and every other call is a quick miss."""

from __future__ import annotations

import threading
from collections.abc import Sequence

import pytest

from tests.client_support import PATIENCE_S
from tierkv.clock import Deadline, FakeClock
from tierkv.guard import Breaker, Change, GuardedTier
from tierkv.ids import BlockKey
from tierkv.testing.memory import MemoryBlobTier
from tierkv.testing.payloads import Destination, key_of, make_item
from tierkv.tier import DoneCallback, Item, Outcome, Presence, Want

COOLDOWN_S = 5.0
ILL = (Outcome.TIMEOUT, Outcome.UNAVAILABLE)


class Moody(MemoryBlobTier):
    """A tier in memory whose answers a test chooses."""

    def __init__(self) -> None:
        super().__init__()
        self.answers: list[Outcome] | None = None
        self.presence: Presence | None = None
        self.calls = 0

    def get_into(self, wants: Sequence[Want], deadline: Deadline, on_done: DoneCallback) -> None:
        self.calls += 1
        if self.answers is None:
            super().get_into(wants, deadline, on_done)
            return
        for i, outcome in enumerate(self.answers):
            on_done(i, outcome)

    def put_from(self, items: Sequence[Item], deadline: Deadline, on_done: DoneCallback) -> None:
        self.calls += 1
        if self.answers is None:
            super().put_from(items, deadline, on_done)
            return
        for i, outcome in enumerate(self.answers):
            on_done(i, outcome)

    def probe(self, keys: Sequence[BlockKey], deadline: Deadline) -> list[Presence]:
        self.calls += 1
        return super().probe(keys, deadline) if self.presence is None else [self.presence] * len(keys)


class Rig:
    def __init__(self, failures: int = 3) -> None:
        self.clock = FakeClock()
        self.moody = Moody()
        self.changes: list[Change] = []
        self.breaker = Breaker(self.clock, failures, COOLDOWN_S)
        self.tier = GuardedTier(self.moody, self.breaker, self.changes.append)
        self.key = key_of(1)
        self.deadline = Deadline(self.clock, 60.0)

    def put(self) -> list[Outcome]:
        seen: dict[int, Outcome] = {}
        self.tier.put_from([make_item(self.key, 100)], self.deadline, seen.__setitem__)
        return [seen[i] for i in range(len(seen))]

    def get(self, answers: list[Outcome] | None = None) -> list[Outcome]:
        self.moody.answers = answers
        wants = [Destination(self.key, 100).want for _ in answers or [None]]
        seen: dict[int, Outcome] = {}
        self.tier.get_into(wants, self.deadline, seen.__setitem__)
        return [seen[i] for i in range(len(wants))]

    def fail(self, times: int) -> None:
        for _ in range(times):
            self.get([Outcome.TIMEOUT])


@pytest.fixture
def rig() -> Rig:
    return Rig()


def test_calls_pass_while_all_is_well(rig: Rig) -> None:
    assert rig.put() == [Outcome.DONE]
    assert rig.get() == [Outcome.DONE]
    assert rig.tier.probe([rig.key], rig.deadline) == [Presence.PRESENT]
    assert rig.changes == []
    assert rig.tier.status()["breaker"] == "closed"


def test_d17_opens_after_failures_in_a_row_and_then_nobody_waits(rig: Rig) -> None:
    rig.fail(3)
    assert rig.changes == ["opened"]
    assert rig.breaker.is_open
    assert not rig.breaker.ready()
    calls = rig.moody.calls
    assert rig.get() == [Outcome.UNAVAILABLE]
    assert rig.put() == [Outcome.UNAVAILABLE]
    assert rig.tier.probe([rig.key, rig.key], rig.deadline) == [Presence.UNKNOWN] * 2
    assert rig.moody.calls == calls, "a call went to a tier that is ill"
    assert rig.tier.status()["breaker"] == "open"
    assert rig.breaker.opened_total == 1


def test_a_success_in_between_starts_the_count_anew(rig: Rig) -> None:
    rig.fail(2)
    rig.get([Outcome.MISS])
    rig.fail(2)
    assert rig.changes == []
    rig.fail(1)
    assert rig.changes == ["opened"]


@pytest.mark.parametrize("outcome", [outcome for outcome in Outcome if outcome not in ILL])
def test_what_is_no_illness_never_opens_it(rig: Rig, outcome: Outcome) -> None:
    for _ in range(10):
        assert rig.get([outcome]) == [outcome]
    assert rig.changes == []


def test_one_answer_in_a_batch_shows_health(rig: Rig) -> None:
    for _ in range(10):
        rig.get([Outcome.TIMEOUT, Outcome.DONE, Outcome.UNAVAILABLE])
    assert rig.changes == []


def test_a_cancelled_batch_says_nothing(rig: Rig) -> None:
    rig.fail(2)
    rig.get([Outcome.CANCELLED, Outcome.CANCELLED])
    rig.fail(1)
    assert rig.changes == ["opened"]


def test_an_empty_batch_says_nothing(rig: Rig) -> None:
    rig.fail(2)
    rig.tier.get_into([], rig.deadline, lambda i, outcome: None)
    rig.fail(1)
    assert rig.changes == ["opened"]


def test_d17_a_trial_after_the_cooldown_closes_it_again(rig: Rig) -> None:
    rig.put()
    rig.fail(3)
    rig.clock.advance(COOLDOWN_S - 0.01)
    assert not rig.breaker.ready()
    rig.clock.advance(0.01)
    assert rig.breaker.ready()
    assert rig.breaker.is_open, "open until a trial has succeeded"
    assert rig.get() == [Outcome.DONE]
    assert rig.changes == ["opened", "closed"]
    assert not rig.breaker.is_open


def test_a_trial_that_fails_opens_it_for_another_cooldown(rig: Rig) -> None:
    rig.fail(3)
    rig.clock.advance(COOLDOWN_S)
    rig.fail(1)
    assert rig.changes == ["opened", "still_open"]
    assert not rig.breaker.ready()
    rig.clock.advance(COOLDOWN_S)
    assert rig.breaker.ready()
    assert rig.breaker.opened_total == 1


def test_a_trial_that_is_cancelled_lets_another_one_try(rig: Rig) -> None:
    rig.fail(3)
    rig.clock.advance(COOLDOWN_S)
    rig.get([Outcome.CANCELLED])
    assert rig.breaker.ready()


def test_a_probe_that_is_not_answered_counts_as_a_failure(rig: Rig) -> None:
    rig.moody.presence = Presence.UNKNOWN
    for _ in range(3):
        rig.tier.probe([rig.key], rig.deadline)
    assert rig.changes == ["opened"]


def test_a_probe_of_nothing_does_not_break_it(rig: Rig) -> None:
    rig.fail(2)
    assert rig.tier.probe([], rig.deadline) == []
    assert not rig.breaker.is_open


def test_a_cancelled_probe_says_nothing(rig: Rig) -> None:
    rig.moody.presence = Presence.UNKNOWN
    rig.deadline.cancel()
    for _ in range(5):
        rig.tier.probe([rig.key], rig.deadline)
    assert rig.changes == []


def test_an_error_inside_the_tier_does_not_leave_the_trial_open_for_ever(rig: Rig) -> None:
    rig.fail(3)
    rig.clock.advance(COOLDOWN_S)

    def explode(*_: object) -> None:
        raise MemoryError("no more")

    rig.moody.get_into = explode  # type: ignore[method-assign]
    with pytest.raises(MemoryError):
        rig.get()
    rig.clock.advance(COOLDOWN_S)  # it counts as a failed trial
    assert rig.breaker.ready(), "nobody would ever try again"


def test_only_one_call_tries(rig: Rig) -> None:
    rig.fail(3)
    rig.clock.advance(COOLDOWN_S)
    inside, go_on = threading.Event(), threading.Event()

    def slow(wants: Sequence[Want], deadline: Deadline, on_done: DoneCallback) -> None:
        inside.set()
        assert go_on.wait(PATIENCE_S)
        on_done(0, Outcome.DONE)

    rig.moody.get_into = slow  # type: ignore[method-assign]
    first: list[list[Outcome]] = []
    thread = threading.Thread(target=lambda: first.append(rig.get()))
    thread.start()
    assert inside.wait(PATIENCE_S)
    assert rig.get() == [Outcome.UNAVAILABLE]
    go_on.set()
    thread.join(PATIENCE_S)
    assert first == [[Outcome.DONE]]
    assert rig.changes == ["opened", "closed"]
