"""A breaker before each blob tier: after a few failures in a row nobody asks for a while; a call is a quick miss.

States: closed (all calls pass), open (none do, until the cool-down is over), half-open (one call tries; its outcome
closes or opens again). Only what says that the tier is ill counts as a failure: time-outs and unavailability. The idea
is Nygard's circuit breaker ("Release It!", 2007).
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from numbers import Real
from typing import Any, Final, Literal, NamedTuple, TypeVar

from tierkv.clock import Clock, Deadline
from tierkv.frame import FrameHeader
from tierkv.ids import BlockKey, KeyPrefix
from tierkv.logs import ChangeLog, RareLog
from tierkv.supervision import Caught
from tierkv.tier import (
    BlobTier,
    ClearResult,
    DoneCallback,
    Item,
    Outcome,
    Presence,
    TierCaps,
    Usage,
    Want,
)

T = TypeVar("T")

_ILL = (Outcome.TIMEOUT, Outcome.UNAVAILABLE)
_SAYS_NOTHING = (Outcome.CANCELLED,)

_SHORT_CALL_S: Final = 10.0
"""What a call that has no deadline may take."""

OVERSTAY_S: Final = 5.0
"""A call that is so far beyond its deadline is stuck: a disk that does not return, mostly."""

Change = Literal["opened", "still_open", "closed"]


class Breaker:
    """Opens after ``failures`` failed calls in a row, for ``cooldown_s``. Thread-safe."""

    def __init__(self, clock: Clock, failures: int, cooldown_s: float) -> None:
        self.clock = clock
        self._limit = failures
        self.cooldown_s = cooldown_s
        self._lock = threading.Lock()
        self._failed = 0
        self._open_until_s: float | None = None
        self.open_since_s: float | None = None
        """On the clock; ``None`` while it is closed."""
        self._trying = False
        self.opened_total = 0

    @property
    def is_open(self) -> bool:
        """True from opening until a trial has succeeded."""
        return self._open_until_s is not None

    def ready(self) -> bool:
        """True when a call would pass now."""
        with self._lock:
            return self._passes()

    def enter(self) -> bool:
        """Asks to make a call; a True must be followed by ``leave``."""
        with self._lock:
            if not self._passes():
                return False
            self._trying = self._open_until_s is not None
            return True

    def leave(self, healthy: bool | None) -> Change | None:
        """Tells how the call went (``None``: it says nothing). Returns what that did to the breaker."""
        with self._lock:
            trial, self._trying = self._trying, False
            was_open = self._open_until_s is not None
            if healthy is None:
                return None
            if healthy:
                self._failed = 0
                self._open_until_s = self.open_since_s = None
                return "closed" if was_open else None
            self._failed += 1
            if not trial and self._failed < self._limit:
                return None
            return self._open()

    def trip(self) -> Change:
        """Opens it, or keeps it open: the tier is known to be ill although no call says so."""
        with self._lock:
            return self._open()

    def _open(self) -> Change:
        now_s = self.clock.now_s()
        was_open = self._open_until_s is not None
        self._open_until_s = now_s + self.cooldown_s
        if was_open:
            return "still_open"
        self.open_since_s = now_s
        self.opened_total += 1
        return "opened"

    def _passes(self) -> bool:
        if self._open_until_s is None:
            return True
        return not self._trying and self.clock.now_s() >= self._open_until_s


class StuckCall(NamedTuple):
    """A call that should have been over long ago."""

    name: str
    beyond_s: float
    """How long it has been beyond its deadline."""


class _UnderWay:
    """One call inside the tier."""

    __slots__ = ("deadline", "name")

    def __init__(self, name: str, deadline: Deadline) -> None:
        self.name = name
        self.deadline = deadline


class NoAnswer(TypeError):
    """A tier said what its protocol does not allow."""


class GuardedTier:
    """A ``BlobTier`` behind a breaker. Calls that do not pass answer ``UNAVAILABLE`` (or ``UNKNOWN``) at once.

    A tier may be somebody else's, so what it answers is looked at: what is no answer goes no further, and counts as
    illness."""

    def __init__(
        self, tier: BlobTier, breaker: Breaker, on_change: Callable[[Change], None] | None = None
    ) -> None:
        self.tier = tier
        self.name = tier.name
        self.breaker = breaker
        self._caps = tier.caps
        self._log = RareLog(breaker.clock)
        self._takes = ChangeLog(breaker.clock)
        """Whether it takes blocks, as the log tells it."""
        self._usage = Usage(0, 0, 0, 0, writable=False)
        self._under_way: set[_UnderWay] = set()
        self._raised = 0
        self._wrong = 0
        """Answers that were none."""
        self._ending = False
        self.strays = 0
        """Completions that came twice, for no block, or too late."""
        self._stray_lock = threading.Lock()
        self.on_change = on_change

    @property
    def caps(self) -> TierCaps:
        """As the tier says now: a server tells its limits only when it is reached."""
        caught = Caught(in_generator=False)
        with caught:
            caps: Any = self.tier.caps
            if isinstance(caps, TierCaps):
                self._caps = caps
        return self._caps

    def start(self) -> None:
        self.tier.start()
        self._takes.begin(self.refresh_usage().writable)

    def close(self, deadline: Deadline) -> None:
        self.tier.close(deadline)

    def cancel(self) -> None:
        """Ends the time of all calls, those under way and those to come."""
        self._ending = True
        for call in self._under_way.copy():
            call.deadline.cancel()

    def stuck(self) -> list[StuckCall]:
        """Calls that have not returned long after their deadline; the longest first."""
        now_s = self.breaker.clock.now_s()
        calls = [StuckCall(call.name, now_s - call.deadline.at_s) for call in self._under_way.copy()]
        return sorted((call for call in calls if call.beyond_s > OVERSTAY_S), key=lambda call: -call.beyond_s)

    def look_after(self) -> None:
        """Now and then: when every worker is stuck inside the tier, nobody is left to find out that it is ill."""
        if len(self.stuck()) >= self.caps.workers:
            self._changed(self.breaker.trip(), " (all of its workers are stuck)")

    @contextmanager
    def _call_until(self, name: str, deadline: Deadline) -> Iterator[None]:
        call = _UnderWay(name, deadline)
        self._under_way.add(call)
        if self._ending:  # looked at after the entry, so that one of the two sees the other
            deadline.cancel()
        try:
            yield
        finally:
            self._under_way.discard(call)

    @contextmanager
    def _short_call(self, name: str) -> Iterator[None]:
        """A call without a deadline, and without an outcome that could say that it failed: what the tier raises counts
        as illness and goes no further, for who makes the call has slots and pins to give back."""
        caught = Caught(in_generator=False)
        with self._call_until(name, Deadline(self.breaker.clock, _SHORT_CALL_S)), caught:
            yield
        if caught.error is not None:
            self._raised += 1
            self._log.error(name, "tier %s: %s raised %r", self.name, name, caught.error, cause=caught.error)
            self._leave(False)

    def _note_wrong(self, name: str, answer: object) -> None:
        self._wrong += 1
        self._log.error(name, "tier %s: %s answers %.80r, which is no answer", self.name, name, answer)

    def probe(self, keys: Sequence[BlockKey], deadline: Deadline) -> list[Presence]:
        if not self.breaker.enter():
            return [Presence.UNKNOWN] * len(keys)
        found = [Presence.UNKNOWN] * len(keys)
        try:
            with self._call_until("probe", deadline):
                answer: Any = self.tier.probe(keys, deadline)
            if _is_presence(answer, len(keys)):
                found = answer
            else:
                self._note_wrong("probe", answer)
        finally:
            unknown = bool(found) and all(one is Presence.UNKNOWN for one in found)
            self._leave(None if unknown and deadline.cancelled else not unknown)
        return found

    def get_into(self, wants: Sequence[Want], deadline: Deadline, on_done: DoneCallback) -> None:
        self._call("get_into", self.tier.get_into, wants, deadline, on_done)

    def put_from(self, items: Sequence[Item], deadline: Deadline, on_done: DoneCallback) -> None:
        self._call("put_from", self.tier.put_from, items, deadline, on_done)

    def _call(
        self,
        name: str,
        call: Callable[[Sequence[T], Deadline, DoneCallback], None],
        batch: Sequence[T],
        deadline: Deadline,
        on_done: DoneCallback,
    ) -> None:
        if not self.breaker.enter():
            for i in range(len(batch)):
                on_done(i, Outcome.UNAVAILABLE)
            return
        answers = _Answers(
            len(batch), on_done, self._note_stray, lambda answer: self._note_wrong(name, answer)
        )
        whole = False
        try:
            with self._call_until(name, deadline):
                call(batch, deadline, answers.take)
            whole = True
        finally:
            if not whole:  # a tier that raises is ill: else it would be asked again at once, for ever
                answers.give_up()
            answers.over = True
            self._leave(_verdict(answers.outcomes))

    def _note_stray(self) -> None:
        with self._stray_lock:
            self.strays += 1

    def _leave(self, healthy: bool | None) -> None:
        self._changed(self.breaker.leave(healthy))

    def _changed(self, change: Change | None, why: str | None = None) -> None:
        """``why``: what the log says of it, where the tier itself must not be asked: it may hold its locks for ever."""
        if change == "closed":
            self._log.warning("closed", "tier %s answers again", self.name)
        elif change == "opened":
            self._log.warning(
                "opened",
                "tier %s does not answer%s; it is tried again every %g s",
                self.name,
                _in_brackets(trouble_of(self.status())) if why is None else why,
                self.breaker.cooldown_s,
            )
        if change is not None and self.on_change is not None:
            self.on_change(change)

    def delete(self, keys: Sequence[BlockKey]) -> None:
        with self._short_call("delete"):
            self.tier.delete(keys)

    def clear(self, prefix: KeyPrefix, deadline: Deadline) -> ClearResult:
        with self._call_until("clear", deadline):
            result: Any = self.tier.clear(prefix, deadline)
        if isinstance(result, ClearResult) and isinstance(result.complete, bool):
            return result
        self._note_wrong("clear", result)
        return ClearResult(0, complete=False, detail="the tier did not say what it has cleared")

    def scan(self) -> Iterator[FrameHeader]:
        return self.tier.scan()

    def usage(self) -> Usage:
        """The last reading; never asks, so it may be called under any lock."""
        return self._usage

    def refresh_usage(self) -> Usage:
        """Asks the tier, which may take a round trip: for the tier's own workers."""
        with self._short_call("usage"):
            self._usage = _checked(self.tier.usage())
        self._tell_whether_it_takes(self._usage.writable)
        return self._usage

    def _tell_whether_it_takes(self, writable: bool) -> None:
        if self.breaker.is_open or not self._takes.due(writable):
            return
        log = logging.getLogger("tierkv")
        if writable:
            log.warning("tier %s takes blocks again", self.name)
        else:
            trouble = trouble_of(self.status()) or "it is not writable"
            log.warning("tier %s takes nothing: %s", self.name, trouble)

    def status(self) -> dict[str, object]:
        """What the tier says of itself, in plain values, and what is known of it here."""
        facts: Any = None
        caught = Caught(in_generator=False)
        with caught:
            facts = _plain(self.tier.status())
        if not isinstance(facts, dict):
            why = f"it answers {facts!r:.80}" if caught.error is None else repr(caught.error)
            facts = {"trouble": f"its status cannot be told: {why}"}
        return {
            **facts,
            "breaker": "open" if self.breaker.is_open else "closed",
            "stray_completions": self.strays,
            "calls_that_raised": self._raised,
            "wrong_answers": self._wrong,
            "stuck_calls": len(self.stuck()),
        }


class _Answers:
    """Passes on one outcome for each block of a call. What comes twice, for no block, or when the call is over, is
    counted and has no effect."""

    def __init__(
        self,
        count: int,
        on_done: DoneCallback,
        on_stray: Callable[[], None],
        on_wrong: Callable[[object], None],
    ) -> None:
        self._missing = set(range(count))
        self._on_done = on_done
        self._on_stray = on_stray
        self._on_wrong = on_wrong
        self.outcomes: list[Outcome] = []
        self.over = False

    def take(self, i: int, outcome: Any) -> None:
        if self.over or i not in self._missing:
            self._on_stray()
            return
        if not isinstance(outcome, Outcome):
            self._on_wrong(outcome)
            outcome = Outcome.UNAVAILABLE
        self._missing.discard(i)
        self.outcomes.append(outcome)
        self._on_done(i, outcome)

    def give_up(self) -> None:
        """The call has ended without the answers that are missing."""
        for i in sorted(self._missing):
            self.take(i, Outcome.UNAVAILABLE)


def _verdict(outcomes: Sequence[Outcome]) -> bool | None:
    """Ill when any block met illness and none was answered; nothing is said by an empty or cancelled batch."""
    said = [outcome for outcome in outcomes if outcome not in _SAYS_NOTHING]
    if not said:
        return None
    return not all(outcome in _ILL for outcome in said)


def _is_presence(answer: Any, count: int) -> bool:
    """Whether this is what a probe of so many keys may answer."""
    if not isinstance(answer, list | tuple) or len(answer) != count:
        return False
    return all(isinstance(one, Presence) for one in answer)


def _checked(usage: Any) -> Usage:
    """Raises ``NoAnswer`` unless it says how full a tier is: others reckon with it under locks."""
    if isinstance(usage, Usage):
        sizes: list[Any] = [usage.capacity_bytes, usage.used_bytes, usage.blocks, usage.largest_free_bytes]
        if all(isinstance(size, Real) and float(size) >= 0 for size in sizes):
            return usage
    raise NoAnswer(f"{usage!r:.120} does not say how full a tier is")


def trouble_of(status: Mapping[str, object]) -> str:
    """What a tier's ``status`` says of its trouble, with the place that it concerns; empty when there is none."""
    trouble, address = str(status.get("trouble") or ""), str(status.get("address") or "")
    return f"{address}: {trouble}" if trouble and address and address not in trouble else trouble


def _in_brackets(text: str) -> str:
    return f" ({text})" if text else ""


def _plain(value: Any) -> Any:
    """``value`` as what JSON knows; what else there is in it, in words."""
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, Mapping):
        return {str(name): _plain(one) for name, one in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(one) for one in value]
    return str(value)
