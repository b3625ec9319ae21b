"""The scheduler's questions to the store. A thread of the engine only leaves a question and looks later whether it
was answered; threads of our own name the blocks, ask, and wait.

A question has a deadline. One that is given up gives back whatever comes for it afterwards.
"""

from __future__ import annotations

import enum
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from functools import partial
from typing import Final, Protocol

from tierkv.client import Client
from tierkv.daemon.remote import RemoteClient
from tierkv.engines.vllm_adapters import AdapterUse
from tierkv.errors import ClosedError
from tierkv.executor import Executor
from tierkv.handles import Lease
from tierkv.keys import Chain, Extras, NamespaceSpec
from tierkv.retention import KEEP, Retention
from tierkv.watching import Announcement, Watched

LANE: Final = "vllm-ask"
WORKERS: Final = 8
MOST_ASKED: Final = 512
"""Questions that wait for a thread or an answer; one more is a miss at once."""
IDLE_BUDGET_S: Final = 0.005
MOST_IDLE_S: Final = 0.02
"""While the engine computes nothing a step for nothing costs more than the wait: a step waits for an answer as long as
it was waited for already, within these. A request that comes meanwhile waits so long too."""
AGAIN_S: Final = 0.05
"""Between two looks for blocks that another host writes."""


class Namer(Protocol):
    """Names a prompt's blocks; may read an adapter's files. ``None``: it cannot be cached (now)."""

    def __call__(self, question: Question) -> Chain | None: ...


class Purpose(enum.Enum):
    """What a question is for."""

    HOLD = "hold"
    """Bring the blocks to host RAM and lease them."""
    BRING = "bring"
    """Only bring them."""
    NAME = "name"
    """Only find their names."""


class Question:
    """About one request. Made by the scheduler's thread; what is answered is written under the lock of ``Asking``."""

    __slots__ = (
        "announce_s", "announcement", "answered", "asked_s", "by_s", "chain", "extras", "given_up", "hashes", "lease",
        "leased_s", "looked", "num_tokens", "purpose", "request_id", "retention", "spec", "tainted", "timeout_s", "use",
        "watch_until_s",
    )  # fmt: skip

    def __init__(
        self,
        request_id: str,
        hashes: list[bytes],
        num_tokens: int,
        use: AdapterUse | None,
        timeout_s: float,
        *,
        retention: Retention = KEEP,
        purpose: Purpose = Purpose.HOLD,
        watch_s: float | None = None,
        announce_s: float | None = None,
    ) -> None:
        """``watch_s``: wait so long for the blocks that another engine computes, before the load. ``announce_s``: tell
        other engines that the blocks will be stored within so long."""
        self.request_id = request_id
        self.hashes = hashes
        self.num_tokens = num_tokens
        self.extras: Extras | None = Extras() if use is None else None
        """What the engine's hashes leave out; ``None`` until it is known, or when nothing may be stored."""
        self.use = use
        self.timeout_s = timeout_s
        """For the load."""
        self.retention = retention
        self.purpose = purpose
        self.announce_s = announce_s
        self.announcement: Announcement | None = None
        now_s = self.asked_s = time.monotonic()
        """When the question was made, like the lines that follow."""
        self.watch_until_s = None if watch_s is None else now_s + watch_s
        self.by_s = (self.watch_until_s or now_s) + timeout_s
        """On ``time.monotonic``, like the line before."""
        self.spec: NamespaceSpec | None = None
        """Of the namespace that the blocks were named in."""
        self.chain: Chain | None = None
        self.tainted = False
        """The engine's own cache may hold blocks under these names that are not of these weights."""
        self.lease: Lease | None = None
        self.leased_s = 0.0
        """When it came, on ``time.monotonic``."""
        self.answered = False
        self.looked = False
        """Somebody has looked whether it was answered."""
        self.given_up = False

    def idle_budget_s(self) -> float:
        """So long a step may wait for its answer while the engine computes nothing."""
        return max(IDLE_BUDGET_S, min(time.monotonic() - self.asked_s, MOST_IDLE_S))

    def held_s(self) -> float:
        """For how long it has held blocks."""
        return 0.0 if self.lease is None else time.monotonic() - self.leased_s


class Asking:
    """``ask``, ``look`` and ``give_up`` return at once and are for the scheduler's thread."""

    def __init__(
        self, client: Client | RemoteClient, executor: Executor, name: Namer, grace_s: float
    ) -> None:
        self._client = client
        self._executor = executor
        self._name = name
        self._grace_s = grace_s
        self._changed = threading.Condition()
        self._open = 0
        executor.open_lane(LANE, WORKERS)
        self.late = 0
        """Answers that came for nobody."""

    def ask(self, question: Question) -> None:
        with self._changed:
            if self._open >= MOST_ASKED:
                question.answered = True
                return
            self._open += 1
        self._run(question, lambda: self._work(question))

    def look(self, question: Question, wait_s: float) -> bool:
        """Whether it was answered; waits for it that long at most."""
        if question.answered or not wait_s:
            return question.answered
        with self._changed:
            return self._changed.wait_for(lambda: question.answered, wait_s)

    def give_up(self, question: Question) -> None:
        """Gives back what has come, and what may still come."""
        with self._changed:
            question.given_up = True
            lease, question.lease = question.lease, None
        if lease is not None:
            self.release(lease)

    def release(self, lease: Lease) -> None:
        """Of a lease that was taken out of a question; another thread tells the store."""
        self._executor.run(LANE, lease.release, lambda _: None)

    def cancel(self, announcement: Announcement) -> None:
        """Those who still wait for its blocks learn that they will not come."""
        self._executor.run(LANE, announcement.cancel, lambda _: None)

    def report_prefill(self, tokens: int, seconds: float) -> None:
        """Tells the store how long the engine took to compute so many tokens."""
        self._executor.run(LANE, partial(self._report_prefill, tokens, seconds), lambda _: None)

    def _report_prefill(self, tokens: int, seconds: float) -> None:
        with suppress(ClosedError):  # the engine ends
            self._client.report_prefill(tokens, seconds)

    # -- the threads that wait ------------------------------------------------------------------------------------

    def _work(self, question: Question) -> None:
        done = False
        try:
            done = self._answer(question)
        finally:
            if not done:
                self._answered(question, None)

    def _answer(self, question: Question) -> bool:
        """True when the answer comes later."""
        if question.given_up:
            return False
        question.chain = self._name(question)
        if question.chain is None or not len(question.chain):
            return False
        if question.announce_s is not None:
            self._announce(question, question.chain, question.announce_s)
        if question.watch_until_s is not None:
            self._watch(question, question.chain)
            return True
        self._load(question, question.chain)
        return True

    def _announce(self, question: Question, chain: Chain, timeout_s: float) -> None:
        announcement = self._client.announce(chain, timeout_s=timeout_s)
        with self._changed:
            gone = question.given_up
            question.announcement = announcement
        if gone:
            announcement.cancel()

    def _get(self, question: Question, chain: Chain) -> Lease | None:
        timeout_s = min(question.timeout_s, question.by_s - time.monotonic())
        if timeout_s <= 0 or question.given_up:
            return None
        wish = None if question.retention == KEEP else question.retention
        if question.purpose is Purpose.NAME:
            return None
        if question.purpose is Purpose.BRING:
            self._client.prefetch(chain, timeout_s=timeout_s, retention=wish).result(timeout_s + 1.0)
            return None
        owner = f"vllm request {question.request_id}"
        return self._client.load(chain, timeout_s=timeout_s, owner=owner, retention=wish)

    def _answered(self, question: Question, lease: Lease | None) -> None:
        if lease is not None and not len(lease):
            lease.release()
            lease = None
        with self._changed:
            wanted = not question.given_up and not question.answered
            if wanted:
                question.lease, question.leased_s = lease, time.monotonic()
            if not question.answered:
                self._open -= 1
            question.answered = True
            self._changed.notify_all()
        if not wanted and lease is not None:
            self.late += 1
            lease.release()

    # -- blocks that another engine computes ----------------------------------------------------------------------

    def _watch(self, question: Question, chain: Chain) -> None:
        """Waits without a thread until they are there, or nobody will bring them."""
        left_s = _left_s(question)
        watched = self._client.watch(chain, grace_s=min(self._grace_s, left_s), timeout_s=left_s)

        def ended(future: Future[Watched]) -> None:
            told = not future.cancelled() and future.exception() is None and future.result().end
            again = told == "unannounced"  # nobody on this host, but another host may be writing them
            self._run(
                question, lambda: self._look_again(question, chain) if again else self._load(question, chain)
            )

        watched.add_done_callback(ended)

    def _look_again(self, question: Question, chain: Chain) -> None:
        """Asks the tiers until the blocks are there or the time is over."""
        done = False
        try:
            if not question.given_up and _left_s(question) > AGAIN_S and self._client.health().ready:
                timeout_s = min(question.timeout_s, _left_s(question))
                found = self._client.prefetch(chain, timeout_s=timeout_s).result(timeout_s + 1.0)
                if found.blocks < len(chain):
                    later = partial(self._run, question, partial(self._look_again, question, chain))
                    self._executor.call_later(AGAIN_S, later)
                    done = True
                    return
            self._load(question, chain)
            done = True
        finally:
            if not done:
                self._answered(question, None)

    def _load(self, question: Question, chain: Chain) -> None:
        lease = None
        try:
            lease = self._get(question, chain)
        finally:
            self._answered(question, lease)

    def _run(self, question: Question, work: Callable[[], None]) -> None:
        started = False
        try:
            self._executor.run(LANE, work, lambda _: None)
            started = True
        finally:
            if not started:  # the engine ends
                self._answered(question, None)


def _left_s(question: Question) -> float:
    assert question.watch_until_s is not None
    return max(0.0, question.watch_until_s - time.monotonic())
