"""The breaker: it opens after failures in a row, lets one call try, and every other call is a quick miss."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest

from tests.client_support import PATIENCE_S
from tierkv.clock import Deadline, FakeClock
from tierkv.guard import Breaker, Change, GuardedTier
from tierkv.ids import EVERYTHING, BlockKey
from tierkv.testing.memory import MemoryBlobTier
from tierkv.testing.payloads import Destination, key_of, make_item
from tierkv.tier import ClearResult, DoneCallback, Item, Outcome, Presence, TierCaps, Usage, Want

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


# ---- what is no answer


class Odd(Moody):
    """A tier that answers one question with whatever a test says; what can be called is called."""

    def __init__(self, call: str, answer: Any) -> None:
        super().__init__()
        original = getattr(self, call, None)
        self.sane = False

        def answered(*arguments: Any) -> Any:
            if self.sane:
                return original(*arguments)  # type: ignore[misc]
            return answer() if callable(answer) else answer

        setattr(self, call, answered)


def odd(call: str, answer: Any) -> tuple[Odd, GuardedTier]:
    tier = Odd(call, answer)
    return tier, GuardedTier(tier, Breaker(FakeClock(), 1, COOLDOWN_S))


def deadline() -> Deadline:
    return Deadline(FakeClock(), 60.0)


@pytest.mark.parametrize("answer", ["done", None, True, 0, Presence.PRESENT])
def test_an_outcome_that_is_none_is_unavailable_and_counted(answer: Any) -> None:
    rig = Rig(failures=1)
    assert rig.get([answer]) == [Outcome.UNAVAILABLE]
    assert rig.breaker.is_open
    assert rig.tier.status()["wrong_answers"] == 1


@pytest.mark.parametrize(
    "answer", [None, [], [Presence.PRESENT], [Presence.PRESENT] * 3, ["present"] * 2, [True] * 2, 7]
)
def test_a_probe_that_answers_something_else_knows_nothing(answer: Any) -> None:
    _, tier = odd("probe", answer)
    assert tier.probe([key_of(1), key_of(2)], deadline()) == [Presence.UNKNOWN] * 2
    assert tier.breaker.is_open
    assert tier.status()["wrong_answers"] == 1


USAGE = Usage(100, 10, 1, 90)


@pytest.mark.parametrize(
    "answer",
    [
        None,
        {"capacity_bytes": 1},
        replace(USAGE, capacity_bytes=-1),
        replace(USAGE, used_bytes="10"),  # type: ignore[arg-type]
        replace(USAGE, blocks=None),  # type: ignore[arg-type]
        replace(USAGE, largest_free_bytes=float("nan")),  # type: ignore[arg-type]
    ],
)
def test_a_usage_that_is_none_leaves_the_last_one(answer: Any) -> None:
    odd_tier, tier = odd("usage", answer)
    odd_tier.sane = True
    known = tier.refresh_usage()
    odd_tier.sane = False
    assert tier.refresh_usage() == tier.usage() == known
    assert tier.breaker.is_open


def boom() -> Any:
    raise ZeroDivisionError("boom")


def itself() -> Any:
    facts: dict[str, object] = {}
    facts["again"] = facts
    return facts


@pytest.mark.parametrize(
    ("answer", "trouble"), [(None, "None"), ("fine", "'fine'"), (boom, "boom"), (itself, "Recursion")]
)
def test_a_status_that_cannot_be_told_is_a_trouble(answer: Any, trouble: str) -> None:
    _, tier = odd("status", answer)
    facts = tier.status()
    assert trouble in str(facts["trouble"])
    assert facts["breaker"] == "closed", "who looks changes nothing"


def test_a_status_is_told_in_plain_values() -> None:
    _, tier = odd("status", {"path": object(), 3: {1}, "nested": [{"x": key_of(1)}, (None, 1.5)]})
    facts = json.loads(json.dumps(tier.status()))
    assert list(facts)[:3] == ["path", "3", "nested"]
    assert facts["nested"][1] == [None, 1.5]


@pytest.mark.parametrize("answer", [None, "ok", True, ClearResult(1, "yes")])  # type: ignore[arg-type]
def test_a_clear_that_does_not_say_what_it_did_is_not_complete(answer: Any) -> None:
    _, tier = odd("clear", answer)
    result = tier.clear(EVERYTHING, deadline())
    assert (result.removed, result.complete) == (0, False)
    assert "did not say" in result.detail


@pytest.mark.parametrize("answer", [boom, lambda: None, lambda: 4])
def test_caps_that_cannot_be_told_are_those_that_were(answer: Callable[[], Any]) -> None:
    class Changing(MemoryBlobTier):
        sane = True

        @property
        def caps(self) -> TierCaps:
            return known if self.sane else answer()

        @caps.setter
        def caps(self, value: TierCaps) -> None:
            pass

    known = MemoryBlobTier().caps
    changing = Changing()
    tier = GuardedTier(changing, Breaker(FakeClock(), 1, COOLDOWN_S))
    changing.sane = False
    assert tier.caps == known
