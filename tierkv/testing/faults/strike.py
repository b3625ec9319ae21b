"""When a fault happens: at the n-th call of a kind, for every n, until a scenario passes untouched."""

from __future__ import annotations

import threading
from collections.abc import Iterator

_MOST_CALLS = 2000


class Strike:
    """Counts calls and says which one fails. Thread-safe.

    ``calls`` names those that count (none: all of them). From the ``nth`` on, ``times`` calls fail; ``times=None``: all
    that follow, as on a disk that is broken for good.
    """

    def __init__(self, nth: int, *calls: str, times: int | None = 1) -> None:
        self.nth = nth
        self._calls = frozenset(calls)
        self._times = times
        self._lock = threading.Lock()
        self._over = False
        self.seen = 0
        """Calls that counted so far."""
        self.struck: list[str] = []
        """The calls that were told to fail, in their order."""

    def hits(self, call: str) -> bool:
        """Asked once for each call: True when this one is to fail."""
        if self._over or (self._calls and call not in self._calls):
            return False
        with self._lock:
            self.seen += 1
            past = self.seen - self.nth
            hit = past >= 0 and (self._times is None or past < self._times)
            if hit:
                self.struck.append(call)
            return hit

    def heal(self) -> None:
        """No call fails any more, and none counts."""
        self._over = True

    def __repr__(self) -> str:
        which = "/".join(sorted(self._calls)) or "any call"
        return f"<{which} number {self.nth} fails, struck: {self.struck}>"


NEVER = Strike(0, times=0)
"""For a part that shall not fail."""


def each_call(*calls: str, times: int | None = 1, first: int = 1, step: int = 1) -> Iterator[Strike]:
    """A ``Strike`` for n = 1, 2, 3 ...; ends after the first scenario in which nothing was struck.

    ``first`` and ``step`` leave some out, where a scenario is dear. A scenario that has no end of calls is an
    ``AssertionError``.
    """
    for nth in range(first, _MOST_CALLS, step):
        strike = Strike(nth, *calls, times=times)
        yield strike
        if not strike.struck:
            return
    raise AssertionError(f"after {_MOST_CALLS} calls there is still no end to them: {calls}")
