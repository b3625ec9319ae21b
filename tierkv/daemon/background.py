"""Calls that wait, on threads of their own, with a future for whoever asked."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, TypeVar

from tierkv.errors import Away, ClosedError, TierKVError
from tierkv.executor import deliver

T = TypeVar("T")
MOST_WAITING = 256
"""Calls of one client that may wait at the same time; one more is answered at once, as if its time were over."""


class Background:
    """Thread-safe. Threads end with their calls, and hold nobody up who wants to leave the process."""

    def __init__(self) -> None:
        self._places = threading.BoundedSemaphore(MOST_WAITING)

    def run(
        self,
        call: Callable[[], T],
        otherwise: Callable[[], T] | None = None,
        undo: Callable[[T], Any] = lambda result: None,
    ) -> Future[T]:
        """``otherwise``: the result when the client is closed meanwhile, or there is no room; without it the future
        raises then. ``undo``: what to do with a result that nobody wants any more."""
        future: Future[T] = Future()

        def work() -> None:
            try:
                _answer(future, call, otherwise, undo)
            finally:
                self._places.release()
                _end(future)

        if not self._places.acquire(blocking=False):
            _answer(future, _full, otherwise, undo)
            return future
        started = False
        try:
            threading.Thread(target=work, name="tierkv-remote-call", daemon=True).start()
            started = True
        except RuntimeError:  # the system gives no more threads
            _answer(future, _full, otherwise, undo)
        finally:
            if not started:
                self._places.release()
        return future


def _end(future: Future[Any]) -> None:
    """Nobody shall wait for what is not coming: the call raised what nobody thought of, as its thread will say."""
    if not future.done() and (future.running() or future.set_running_or_notify_cancel()):
        future.set_exception(Away("the call failed in a way that nobody thought of; see the log"))


def _full() -> Any:
    raise Away(f"{MOST_WAITING} calls of this client wait already")


def _answer(
    future: Future[T], call: Callable[[], T], otherwise: Callable[[], T] | None, undo: Callable[[T], Any]
) -> None:
    try:
        try:
            result = call()
        except (Away, ClosedError):
            if otherwise is None:
                raise
            result = otherwise()
    except TierKVError as error:
        if future.set_running_or_notify_cancel():
            future.set_exception(error)
        return
    if not deliver(future, result):
        undo(result)
