"""``announce`` and ``watch`` as a client has them: what it announced, what it waits for, and an end to both."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from types import TracebackType
from typing import TYPE_CHECKING

from tierkv.announcing import End, Follower
from tierkv.errors import HandleError
from tierkv.executor import deliver
from tierkv.index import Space
from tierkv.keys import Chain
from tierkv.logs import RareLog
from tierkv.reading import Match, Reader

if TYPE_CHECKING:
    from tierkv.store import TieredStore

MOST_ANNOUNCEMENTS = 4096
MOST_WATCHES = 4096
"""Of one client."""
DEFAULT_S = 30.0


@dataclass(frozen=True)
class Watched:
    """How a wait for blocks has ended."""

    end: End
    match: Match
    """What is usable now: not all that was waited for, unless ``end`` is ``there``."""


class Announcement:
    """Blocks that somebody is about to store. It ends when all of them are there, with ``cancel``, at its deadline,
    and with its client. As a context manager it is cancelled at the end: what was not stored by then will not be.

    Any thread.
    """

    def __init__(self, blocks: range, cancel: Callable[[], None], *, accepted: bool) -> None:
        self.blocks = blocks
        self.accepted = accepted
        """False when nobody will hear of it: a bound is reached, or the daemon is away. Nothing else is wrong."""
        self._cancel = cancel

    def cancel(self) -> None:
        """Those who wait for a block that is not there yet, and that nobody else has announced, learn it at once.
        Harmless when it is over."""
        self._cancel()

    def __enter__(self) -> Announcement:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None
    ) -> None:
        self.cancel()


class Watching:
    """Of one client. Thread-safe."""

    def __init__(self, store: TieredStore, reader: Reader) -> None:
        self._board = store.board
        self._counters = store.counters
        self._reader = reader
        self._log = RareLog(store.clock)
        self._lock = threading.Lock()
        self._announced: set[Follower] = set()
        self._watching: set[Follower] = set()
        self._closed = False

    def announce(
        self,
        space: Space,
        chain: Chain,
        blocks: range,
        timeout_s: float,
        on_end: Callable[[], None] = lambda: None,
    ) -> Announcement:
        """``on_end`` is called when it is over, by any thread. Raises ``HandleError`` for blocks that the chain has
        not."""
        check_range(chain, blocks)
        promise = Follower(space, chain.hashes[blocks.start : blocks.stop], None, lambda _: leave())

        def leave() -> None:
            self._leave(self._announced, promise)
            on_end()

        if self._join(self._announced, promise, MOST_ANNOUNCEMENTS):
            if self._board.announce(promise, max(0.0, timeout_s)):
                return Announcement(blocks, lambda: self._board.end(promise), accepted=True)
            leave()
        self._counters.add(1, "announcements_total", "refused")
        self._log.warning(
            "announce", "an announcement of %d blocks is refused: there are too many", len(blocks)
        )
        return Announcement(blocks, lambda: None, accepted=False)

    def watch(
        self, space: Space, chain: Chain, count: int, grace_s: float, timeout_s: float
    ) -> Future[Watched]:
        """Raises ``HandleError`` for blocks that the chain has not."""
        check_range(chain, range(count))
        future: Future[Watched] = Future()

        def done(how: End) -> None:
            self._leave(self._watching, follower)
            deliver(future, Watched(how, self._reader.peek(space, chain)))

        follower = Follower(space, chain.hashes[:count], max(0.0, grace_s), done)
        if self._join(self._watching, follower, MOST_WATCHES):
            self._board.watch(follower, max(0.0, timeout_s))
            future.add_done_callback(lambda its: self._board.end(follower) if its.cancelled() else None)
        else:
            self._log.warning("watch", "a watch is answered at once: there are %d already", MOST_WATCHES)
            self._board.end(follower, "late")
        return future

    def close(self) -> None:
        """Ends all of them, for good: what this client announced is abandoned, and nothing of it is taken any more."""
        with self._lock:
            self._closed = True
            both = [*self._announced, *self._watching]
        for follower in both:
            self._board.end(follower)

    def facts(self) -> dict[str, int]:
        """For people."""
        return {"announcements": len(self._announced), "watches": len(self._watching)}

    def _join(self, those: set[Follower], follower: Follower, most: int) -> bool:
        with self._lock:
            if self._closed or len(those) >= most:
                return False
            those.add(follower)
            return True

    def _leave(self, those: set[Follower], follower: Follower) -> None:
        with self._lock:
            those.discard(follower)


def check_range(chain: Chain, blocks: range) -> None:
    """Raises ``HandleError``."""
    if not 0 <= blocks.start <= blocks.stop <= len(chain):
        raise HandleError(f"blocks {blocks.start} to {blocks.stop}: the chain has {len(chain)} full blocks")
