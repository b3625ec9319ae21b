"""Threads that are watched: what they died of, who keeps dying, and who has been inside one call for too long.

A thread that an error ends is replaced at once, with one line in the log and one more on a counter. When the threads
of a lane die again and again, each successor rests first, so that a fault which comes back with every piece of work
does not spin, and the store says that it is unhealthy. The intensity limit (so many restarts within so many seconds)
is that of Erlang's supervisors.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from types import TracebackType
from typing import Final, Literal, NamedTuple

from tierkv.clock import Clock
from tierkv.logs import RareLog

DEATHS: Final = 5
WITHIN_S: Final = 60.0
"""So many deaths within this time, and a lane counts as one that keeps dying."""

REST_S: Final = 1.0
"""A thread of a lane that keeps dying takes no work for this long."""

PATIENCE_S: Final = 60.0
"""A piece of work that takes longer than this is stuck, unless its lane is known to take longer."""


class Caught:
    """``with caught:`` keeps what foreign code raises, whatever it is, for ``caught.error``; a user's Ctrl-C passes,
    and, unless said otherwise, the end of a generator. The one place where every error is caught: for plug-ins, for
    callbacks, and at the end of a thread."""

    __slots__ = ("_in_generator", "error")

    def __init__(self, *, in_generator: bool = True) -> None:
        self.error: BaseException | None = None
        self._in_generator = in_generator

    def __enter__(self) -> None:
        self.error = None

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None
    ) -> bool:
        if error is None or (self._in_generator and isinstance(error, GeneratorExit)):
            return False
        if isinstance(error, KeyboardInterrupt) and threading.current_thread() is threading.main_thread():
            return False  # elsewhere nobody has pressed a key: the code inside has raised it
        self.error = error
        return True


class ThreadTrouble(NamedTuple):
    """Something that is wrong with a lane's threads."""

    lane: str
    kind: Literal["keeps dying", "gone", "stuck"]
    sentence: str


class ThreadBook:
    """All threads of an executor. Thread-safe; nothing blocks."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._log = RareLog(clock)
        self._lock = threading.Lock()
        self._threads: dict[str, tuple[str, threading.Thread]] = {}
        self._deaths: dict[str, deque[float]] = {}
        self._errors: dict[str, str] = {}
        self._inside: dict[str, tuple[str, float]] = {}
        self._patience_s: dict[str, float] = {}
        self._expected = True
        self.restarts: dict[str, int] = {}
        """How often a thread was replaced, by lane."""
        self.on_restart: Callable[[str], None] = lambda lane: None
        """Told the lane of each thread that was replaced; a counter."""

    def be_patient(self, lane: str, patience_s: float) -> None:
        """A piece of work of this lane may take that long (for ever, where others watch it)."""
        self._patience_s[lane] = patience_s

    def hired(self, lane: str, thread: threading.Thread) -> None:
        """A thread is about to start; it takes the place of the one with its name."""
        with self._lock:
            self._threads[thread.name] = lane, thread

    def dismiss(self) -> None:
        """All threads are about to end, as they should."""
        self._expected = False

    def begins(self, lane: str, name: str) -> None:
        """The thread takes up a piece of work."""
        self._inside[name] = lane, self._clock.now_s()

    def ends(self, name: str) -> None:
        self._inside.pop(name, None)

    def died(self, lane: str, name: str, error: BaseException | None) -> float:
        """The thread has ended by an error and is being replaced. Returns how long its successor should rest first."""
        self.ends(name)
        now_s = self._clock.now_s()
        with self._lock:
            deaths = self._deaths.setdefault(lane, deque(maxlen=DEATHS))
            deaths.append(now_s)
            self._errors[lane] = repr(error)
            self.restarts[lane] = self.restarts.get(lane, 0) + 1
        self.on_restart(lane)
        dying = self.keeps_dying(lane)
        self._log.error(
            lane,
            "thread %s ended with %r and was replaced%s",
            name,
            error,
            f"; its lane keeps dying, each thread rests for {REST_S:g} s first" if dying else "",
            cause=error,
        )
        if error is not None:
            error.__traceback__ = None  # its frames hold the buffers of the work, and the error itself
        return REST_S if dying else 0.0

    def keeps_dying(self, lane: str) -> bool:
        with self._lock:
            deaths = self._deaths.get(lane)
            return (
                deaths is not None and len(deaths) == DEATHS and self._clock.now_s() - deaths[0] <= WITHIN_S
            )

    def stuck_s(self) -> dict[str, float]:
        """By thread: how long it has been inside one piece of work, where that is longer than its lane should take."""
        now_s = self._clock.now_s()
        return {
            name: now_s - since_s
            for name, (lane, since_s) in self._inside.copy().items()
            if now_s - since_s > self._patience_s.get(lane, PATIENCE_S)
        }

    def troubles(self) -> list[ThreadTrouble]:
        """What is wrong now, in sentences for people."""
        found = []
        for lane in sorted(self._deaths):
            if self.keeps_dying(lane):
                sentence = (
                    f"threads of lane {lane} keep dying ({DEATHS} within {WITHIN_S:g} s), "
                    f"last of {self._errors[lane]}"
                )
                found.append(ThreadTrouble(lane, "keeps dying", sentence))
        with self._lock:
            threads = list(self._threads.items()) if self._expected else []
        for name, (lane, thread) in threads:
            if thread.ident is not None and not thread.is_alive():
                found.append(ThreadTrouble(lane, "gone", f"thread {name} is gone"))
        for name, seconds in self.stuck_s().items():
            lane = self._inside.get(name, ("", 0.0))[0]
            found.append(
                ThreadTrouble(lane, "stuck", f"thread {name} has been inside one call for {seconds:.0f} s")
            )
        return found
