"""What a session has announced and waits for.

A watch that cannot be answered at once costs no thread and no connection here: its client asks, over one connection for
all of them, what has ended since (``watched``), and is answered when something has.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future

from tierkv.client import Client
from tierkv.errors import HandleError
from tierkv.watching import MOST_WATCHES, Announcement, Watched

MOST_TOLD = 1024
"""Watches in one answer."""


class SessionWatches:
    """By the numbers that the client chose. Thread-safe."""

    def __init__(self, client: Client) -> None:
        self._client = client
        self._changed = threading.Condition()
        self._announced: dict[int, Announcement | None] = {}
        """``None``: it is just being made."""
        self._pending: dict[int, Future[Watched]] = {}
        self._ended: deque[tuple[int, Watched]] = deque(maxlen=MOST_WATCHES)
        """Those that the client has not been told of yet."""

    @property
    def held(self) -> int:
        return len(self._announced) + len(self._pending)

    def announce(self, number: int, make: Callable[[Callable[[], None]], Announcement]) -> bool:
        """``make`` is given what is to be called when the announcement has ended. Raises ``HandleError``."""
        with self._changed:
            self._check_new(number)
            self._announced[number] = None
        announcement: Announcement | None = None
        try:
            announcement = make(lambda: self._forget(number))
            return announcement.accepted
        finally:
            with self._changed:
                if announcement is None or not announcement.accepted:
                    self._announced.pop(number, None)
                elif number in self._announced:  # else it has ended already
                    self._announced[number] = announcement

    def _forget(self, number: int) -> None:
        with self._changed:
            self._announced.pop(number, None)

    def unannounce(self, number: int) -> None:
        with self._changed:
            announcement = self._announced.get(number)
        if announcement is not None:
            announcement.cancel()

    def watch(self, number: int, future: Future[Watched]) -> Watched | None:
        """How it has ended, if it has; else ``ended`` will tell. Raises ``HandleError``, and the watch is over then."""
        if future.done():
            return future.result()
        new = False
        try:
            with self._changed:
                self._check_new(number)
                self._pending[number] = future
            new = True
        finally:
            if not new:
                future.cancel()
        future.add_done_callback(lambda its: self._done(number, its))
        return None

    def _check_new(self, number: int) -> None:
        """Under the lock. What one of two with the same number came to would be taken for the other's."""
        if number in self._announced or number in self._pending:
            raise HandleError(f"number {number} is in use: each announcement and each watch has its own")

    def _done(self, number: int, future: Future[Watched]) -> None:
        with self._changed:
            if self._pending.pop(number, None) is not None and not future.cancelled():
                self._ended.append((number, future.result()))
            self._changed.notify_all()

    def unwatch(self, number: int) -> None:
        with self._changed:
            future = self._pending.get(number)
        if future is not None:
            future.cancel()

    def ended(self, timeout_s: float) -> tuple[list[tuple[int, Watched]], int]:
        """Watches that have ended since it was asked last, and how many have not. Waits for the first one, as long as
        there are any."""
        with self._changed:
            self._changed.wait_for(lambda: self._ended or not self._pending, timeout_s)
            told = [self._ended.popleft() for _ in range(min(len(self._ended), MOST_TOLD))]
            return told, len(self._pending) + len(self._ended)

    def close(self) -> None:
        """All that was announced is abandoned, and nobody waits any more."""
        self._client.watching.close()
