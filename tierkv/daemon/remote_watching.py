"""``announce`` and ``watch`` of a store in another process.

All watches that wait share one connection and one thread, which is there as long as any of them waits. When the daemon
dies they have ended: who announced something there is forgotten with it.
"""

from __future__ import annotations

import itertools
import threading
import time
from concurrent.futures import Future
from typing import Any, Final, NamedTuple

from tierkv.daemon.remote_calls import GRACE_S, RemoteCalls
from tierkv.daemon.replies import heard
from tierkv.daemon.words import say_chain, say_seconds, take
from tierkv.errors import Away, TierKVError
from tierkv.executor import Executor, Timer, deliver
from tierkv.keys import Chain
from tierkv.reading import Match
from tierkv.watching import Announcement, Watched, check_range

POLL_S: Final = 20.0
"""So long one question for what has ended waits. A daemon that hangs is noticed after it."""
_LATE: Final[list[Any]] = ["late", 0, 0, {}]
_ABANDONED: Final[list[Any]] = ["abandoned", 0, 0, {}]
_UNANNOUNCED: Final[list[Any]] = ["unannounced", 0, 0, {}]


class _Watch(NamedTuple):
    future: Future[Watched]
    chain: Chain
    timer: Timer


class RemoteWatching:
    """Of one client. Thread-safe."""

    def __init__(self, calls: RemoteCalls, executor: Executor) -> None:
        self._calls = calls
        self._executor = executor
        self._numbers = itertools.count(1)
        self._lock = threading.Lock()
        self._pending: dict[int, _Watch] = {}
        self._asking: set[int] = set()
        self._early: dict[int, list[Any]] = {}
        """Ends that were told before the answer to the question."""
        self._asker: threading.Thread | None = None

    def announce(self, chain: Chain, blocks: range, timeout_s: float) -> Announcement:
        check_range(chain, blocks)
        number = next(self._numbers)
        words = {
            **say_chain(chain),
            "first": blocks.start,
            "count": len(blocks),
            "timeout_s": say_seconds(timeout_s),
            "number": number,
        }
        link = self._calls.link

        def cancel() -> None:
            if link.is_here():
                link.tell("unannounce", {"number": number})

        try:
            accepted = heard(lambda its: take(its, "accepted", bool), self._ask("announce", chain, words))
        except Away as error:
            accepted = False
            if error.asked:
                link.tell_later("unannounce", {"number": number})
        return Announcement(blocks, cancel, accepted=accepted)

    def watch(self, chain: Chain, count: int, grace_s: float, timeout_s: float) -> Future[Watched]:
        check_range(chain, range(count))
        number, future = next(self._numbers), Future[Watched]()
        grace_s, timeout_s = say_seconds(grace_s), say_seconds(timeout_s)
        words = {
            **say_chain(chain),
            "count": count,
            "grace_s": grace_s,
            "timeout_s": timeout_s,
            "number": number,
        }
        self._asking.add(number)
        try:
            ended = heard(_end_of, self._ask("watch", chain, words))
            if ended is None:
                timer = self._executor.call_later(timeout_s + GRACE_S, lambda: self._end(number, _LATE))
                self._await(number, _Watch(future, chain, timer))
        except Away as error:
            if error.asked:
                self._calls.link.tell_later("unwatch", {"number": number})
            ended = _UNANNOUNCED
        finally:
            self._asking.discard(number)
            self._early.pop(number, None)
        if ended is not None:
            deliver(future, _hear(chain, ended))
        else:
            future.add_done_callback(lambda its: self._cancelled(number) if its.cancelled() else None)
        return future

    def _ask(self, verb: str, chain: Chain, words: dict[str, Any]) -> dict[str, Any]:
        return self._calls._ask(verb, chain.namespace, words, self._calls._soon_s())

    def _await(self, number: int, watch: _Watch) -> None:
        with self._lock:
            told = self._early.pop(number, None)
            self._pending[number] = watch
            if told is None and self._asker is None:
                told = self._send_asker()
        if told is not None:
            self._end(number, told)

    def _send_asker(self) -> list[Any] | None:
        """Under the lock. How a watch ends that nobody can listen for."""
        asker = threading.Thread(target=self._listen, name="tierkv-watched", daemon=True)
        try:
            asker.start()
        except RuntimeError:  # the system gives no more threads
            return _LATE
        self._asker = asker
        return None

    def _end(self, number: int, told: list[Any]) -> None:
        with self._lock:
            watch = self._pending.pop(number, None)
        if watch is not None:
            watch.timer.cancel()
            deliver(watch.future, _hear(watch.chain, told))

    def _cancelled(self, number: int) -> None:
        with self._lock:
            watch = self._pending.pop(number, None)
        if watch is not None:
            watch.timer.cancel()
            if self._calls.link.is_here():
                self._calls.link.tell("unwatch", {"number": number})

    # -- the thread that listens ----------------------------------------------------------------------------------

    def _listen(self) -> None:
        """As long as anything is waited for."""
        while True:
            with self._lock:
                waiting = list(self._pending)
                if not waiting:
                    self._asker = None
                    return
            try:
                by_s = time.monotonic() + POLL_S + GRACE_S
                reply = self._calls.link.call("watched", {"timeout_s": POLL_S}, by_s)
                ended, pending = heard(_ends_of, reply)
            except TierKVError:  # it is away, and forgets what was announced there
                ended, pending = [], 0
            for number, *told in ended:
                self._take(number, told)
            if not pending:  # those that waited before the question, and are not in the answer, are lost
                for number in waiting:
                    self._end(number, _ABANDONED)

    def _take(self, number: int, told: list[Any]) -> None:
        with self._lock:
            if number not in self._pending:
                if number in self._asking:  # else it was cancelled
                    self._early[number] = told
                return
        self._end(number, told)


def _end_of(reply: dict[str, Any]) -> list[Any] | None:
    found = reply.get("ended")
    if found is None:
        return None
    end, blocks, tokens, tiers = found
    return [end, blocks, tokens, tiers]


def _ends_of(reply: dict[str, Any]) -> tuple[list[tuple[Any, ...]], int]:
    ended = [(number, end, blocks, tokens, tiers) for number, end, blocks, tokens, tiers in reply["ended"]]
    return ended, take(reply, "pending", int)


def _hear(chain: Chain, told: list[Any]) -> Watched:
    end, blocks, tokens, tiers = told
    return Watched(end, Match(chain, blocks, tokens, tiers))
