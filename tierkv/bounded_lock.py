"""Work under a lock that is not waited for longer than there is time."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any, Final, TypeVar

T = TypeVar("T")

_BLOCKING: Final = (True,)


def within(lock: threading.Lock, patience_s: float, work: Callable[..., T], *words: Any) -> T | None:
    """Does ``work(*words)`` under the lock and returns what it returns; ``None`` when the lock was not to be had in
    that time (0: at once).

    The lock is free afterwards, whatever a signal's handler raises: it is acquired and noted in one step, in which no
    handler runs.
    """
    got: list[bool] = []
    try:
        got.extend(map(lock.acquire, _BLOCKING, (patience_s,)))
        return work(*words) if got[0] else None
    finally:
        if got and got[0]:
            lock.release()
