"""A future that is due at a deadline: who waits for it ends the wait himself.

Were it left to a thread of timers, a caller whose time is over would wait until that thread has its turn at the
interpreter, has ended the waits of all others whose time came before, and hands the turn back.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from typing import TypeVar

from tierkv.clock import Deadline

T = TypeVar("T")


class Due(Future[T]):
    """Completed by whoever has the result, or has ``expire`` called when the deadline is over."""

    def __init__(self, deadline: Deadline) -> None:
        super().__init__()
        self.deadline = deadline
        self._expire: Callable[[], None] | None = None

    def ends_by(self, expire: Callable[[], None]) -> None:
        """Who waits calls this at the deadline; others may do so too, at the same time."""
        self._expire = expire

    def result(self, timeout: float | None = None) -> T:
        """As any future's."""
        left_s = self.deadline.remaining_s()
        if not self.done() and (timeout is None or left_s < timeout):
            with suppress(TimeoutError):
                return super().result(min(left_s, threading.TIMEOUT_MAX))
            self.end_if_over()
            timeout = None if timeout is None else timeout - left_s
        return super().result(timeout)

    def end_if_over(self) -> None:
        """What who waits does when he has waited long enough."""
        expire = self._expire
        if expire is not None and self.deadline.over():
            expire()

    def set_result(self, result: T) -> None:
        self._expire = None  # it holds what the future has waited for
        super().set_result(result)

    def cancel(self) -> bool:
        cancelled = super().cancel()
        if cancelled:
            self._expire = None
        return cancelled
