"""Blocks that somebody is about to store, and those who wait for them.

A process that computes a prompt announces its blocks; another, which wants them, watches the chain and learns at once
that they are usable, or that nobody is going to store them. Nobody polls: whoever waits stands at the first block that
is missing, and is looked at again when that block comes or its last announcement ends. While nobody waits, a store
asks one empty dict for each block.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Literal

from tierkv.catalog import LOCK_BATCH, Catalog
from tierkv.clock import Clock
from tierkv.errors import ClosedError
from tierkv.events import BlockName
from tierkv.executor import Executor, Timer
from tierkv.ids import BlockHash
from tierkv.index import USABLE, Space
from tierkv.metrics import Counters

LANE = "watch"
MOST_S = 3600.0
"""No announcement and no watch lasts longer, whatever is asked for."""

End = Literal["there", "abandoned", "unannounced", "late"]
"""How a wait for blocks ends: all are usable; they were announced, and then their producer gave up, ran out of time or
died; nobody has announced them; its time is over."""


class Follower:
    """Goes along a run of blocks as they become usable. ``done`` is called exactly once with how that ended, on any
    thread. All else is the board's: its looks at one follower never overlap."""

    def __init__(
        self, space: Space, hashes: Sequence[BlockHash], grace_s: float | None, done: Callable[[End], None]
    ) -> None:
        """``grace_s``: so long it waits for the announcement of a block; ``None``: it is an announcement itself."""
        self.space = space
        self.hashes = hashes
        self.grace_s = grace_s
        self.done = done
        self.at = 0
        """The block that it waits for; all before it were usable when it passed them."""
        self.name: BlockName | None = None
        self.since_s = 0.0
        self.ends_s = 0.0
        self.announced = False
        self.left_by: Follower | None = None
        """The announcement that ended last while it stood at one of its blocks, and no other announced that."""
        self.due = self.over = False
        self.timers: list[Timer] = []


class Board:
    """All announcements and all who wait, of one store. Thread-safe; its lock is a leaf under the catalog's."""

    def __init__(self, catalog: Catalog, executor: Executor, clock: Clock, counters: Counters) -> None:
        self._catalog = catalog
        self._executor = executor
        self._clock = clock
        self._counters = counters
        self._lock = threading.Lock()
        self._announced: dict[BlockName, int] = {}
        """By how many announcements."""
        self._awaited: dict[BlockName, list[Follower]] = {}
        self._live: set[Follower] = set()
        self._lane_is_open = False
        self._closed = False
        catalog.events.awaited = self._awaited
        catalog.events.on_awaited = self._came

    # -- announcements --------------------------------------------------------------------------------------------

    def announce(self, promise: Follower, timeout_s: float) -> bool:
        """From now on its blocks are announced, until all of them are there, or ``end``, or the time is over. False,
        and it is told nothing, when more are announced than the store could know of, and after ``close``."""
        space, hashes = promise.space, promise.hashes
        with self._lock:
            if self._closed or len(self._announced) + len(hashes) > self._catalog.index.max_families:
                return False
        for batch in _batches(space, hashes):
            with self._lock:
                for name in batch:
                    self._announced[name] = self._announced.get(name, 0) + 1
                    for follower in self._awaited.get(name, ()):
                        follower.announced = True
        if not self._enter(promise, timeout_s):
            self._take_back(promise)
            return False
        return True

    def _take_back(self, promise: Follower) -> None:
        """An announcement has ended: who waits for a block that no other announces is told."""
        for batch in _batches(promise.space, promise.hashes):
            told: list[Follower] = []
            with self._lock:
                for name in batch:
                    left = self._announced[name] - 1
                    if left:
                        self._announced[name] = left
                        continue
                    del self._announced[name]
                    for follower in self._awaited.get(name, ()):
                        if follower.grace_s is not None:
                            follower.announced, follower.left_by = False, promise
                            told.append(follower)
            for follower in told:
                self._poke(follower)

    # -- watches --------------------------------------------------------------------------------------------------

    def watch(self, follower: Follower, timeout_s: float) -> None:
        """Waits until its blocks are usable. What can be told at once is, before this returns."""
        space, hashes = follower.space, follower.hashes
        follower.at = len(self._catalog.find_run(space, hashes, USABLE))
        if follower.at == len(hashes):
            self.end(follower, "there")
            return
        name = (space.digest, hashes[follower.at])
        with self._lock:
            self._stand(follower, name)
        if not follower.announced and not follower.grace_s:
            self.end(follower, "unannounced")
        elif not self._enter(follower, timeout_s):
            self.end(follower, "abandoned")
        elif not follower.announced:
            self._later(follower, follower.grace_s or 0.0)

    # -- both -----------------------------------------------------------------------------------------------------

    def end(self, follower: Follower, how: End = "abandoned") -> None:
        """Harmless when it is over already."""
        with self._lock:
            if follower.over:
                return
            follower.over = True
            self._live.discard(follower)
            self._leave(follower)
            timers, follower.timers = follower.timers, []
        for timer in timers:
            timer.cancel()
        self._tell(follower, how)

    def close(self) -> None:
        """Nobody waits any more, and nothing is announced."""
        with self._lock:
            self._closed = True
            live = list(self._live)
        for follower in live:
            self.end(follower)

    def stats(self) -> dict[str, int]:
        """Plain values."""
        with self._lock:
            kinds = Counter(follower.grace_s is None for follower in self._live)
            return {
                "announcements": kinds[True],
                "announced_blocks": len(self._announced),
                "watches": kinds[False],
            }

    def _tell(self, follower: Follower, how: End) -> None:
        if follower.grace_s is None:
            self._counters.add(1, "announcements_total", how)
            self._take_back(follower)
        else:
            self._counters.add(1, "watches_total", how)
        follower.done(how)

    def _enter(self, follower: Follower, timeout_s: float) -> bool:
        """False after ``close``."""
        timeout_s = min(timeout_s, MOST_S)
        with self._lock:
            if self._closed:
                return False
            follower.ends_s = self._clock.now_s() + timeout_s
            self._live.add(follower)
            if not self._lane_is_open:
                self._executor.open_lane(LANE, 1)
                self._lane_is_open = True
        self._later(follower, timeout_s)
        self._poke(follower)
        return True

    def _later(self, follower: Follower, delay_s: float) -> None:
        timer = self._executor.call_later(delay_s, lambda: self._poke(follower))
        with self._lock:
            if not follower.over:
                follower.timers.append(timer)
                return
        timer.cancel()

    def _came(self, name: BlockName) -> None:
        """A block has become usable; under the catalog's lock."""
        with self._lock:
            followers = tuple(self._awaited.get(name, ()))
        for follower in followers:
            self._poke(follower)

    def _poke(self, follower: Follower) -> None:
        """It is looked at soon. May be called under the catalog's lock."""
        if follower.due or follower.over:
            return
        follower.due = True
        try:
            self._executor.run(LANE, lambda: self._look(follower), lambda _: None)
        except ClosedError:  # then ``close`` has ended it, or is about to
            pass

    # -- on the lane ----------------------------------------------------------------------------------------------

    def _look(self, follower: Follower) -> None:
        """Where a follower is now, and whether it need wait on. It stands at its block before it looks whether that is
        there, so that none comes unnoticed."""
        follower.due = False
        while not follower.over:
            self._go_along(follower)
            if follower.at == len(follower.hashes):
                self.end(follower, "there")
                return
            if not self._stands(follower):
                continue
            how = self._verdict(follower)
            if how is not None:
                self.end(follower, how)
            return

    def _go_along(self, follower: Follower) -> None:
        find, space, hashes = self._catalog.find_run, follower.space, follower.hashes
        size, going = 4, True  # blocks come a few at a time, and a look at all the rest costs a millisecond
        while going:
            batch = hashes[follower.at : follower.at + size]
            found = len(find(space, batch, USABLE))
            follower.at += found
            size, going = min(2 * size, LOCK_BATCH), bool(batch) and found == len(batch)
        if follower.at == len(hashes) and follower.grace_s is not None:
            follower.at = len(find(space, hashes, USABLE))  # one that came may have left meanwhile

    def _stands(self, follower: Follower) -> bool:
        """False when it stood elsewhere so far, and has to look once more from where it stands now."""
        name = (follower.space.digest, follower.hashes[follower.at])
        with self._lock:
            if follower.name == name or follower.over:
                return True
            self._leave(follower)
            self._stand(follower, name)
        if follower.grace_s is not None and not follower.announced:
            self._later(follower, follower.grace_s)
        return False

    def _stand(self, follower: Follower, name: BlockName) -> None:
        """Under the lock."""
        follower.name = name
        follower.since_s = self._clock.now_s()
        follower.announced = name in self._announced
        self._awaited.setdefault(name, []).append(follower)

    def _leave(self, follower: Follower) -> None:
        """Under the lock."""
        if follower.name is None:
            return
        standing = self._awaited[follower.name]
        standing.remove(follower)
        if not standing:
            del self._awaited[follower.name]
        follower.name = None

    def _verdict(self, follower: Follower) -> End | None:
        """Of one whose block is not there."""
        now_s = self._clock.now_s()
        with self._lock:
            if now_s >= follower.ends_s:
                return "late"
            if follower.grace_s is None or follower.announced:
                return None
            if follower.left_by is not None and follower.hashes[follower.at] in follower.left_by.hashes:
                return "abandoned"
            return "unannounced" if now_s >= follower.since_s + follower.grace_s else None


def _batches(space: Space, hashes: Sequence[BlockHash]) -> list[list[BlockName]]:
    digest = space.digest
    return [
        [(digest, block_hash) for block_hash in hashes[start : start + LOCK_BATCH]]
        for start in range(0, len(hashes), LOCK_BATCH)
    ]
