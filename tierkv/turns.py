"""Whose turn it is: several parties have things waiting, and each gets its fair share of what is served, in bytes.

Start-time fair queueing (Goyal, Vin and Cheng, 1996): every party has a virtual time that grows by the cost of what it
was served; the one that is behind goes next. Who comes late begins at the present, not at zero, and who has been served
ahead and comes back at once goes on where it was, so that nobody gains by asking in small pieces.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator
from typing import Final, Generic, TypeVar

T = TypeVar("T")

LEAST_COST: Final = 64 * 1024
"""What costs no bytes takes its time all the same."""
_REMEMBERED: Final = 64
"""Parties that may be remembered before those are forgotten that were not served ahead."""


class Turns(Generic[T]):
    """Lines of things, one for each party, each in its order. Not thread-safe. A step looks at all parties that wait,
    which are few."""

    def __init__(self) -> None:
        self._lines: dict[int, deque[tuple[T, int]]] = {}
        self._at: dict[int, int] = {}
        """Virtual time of each party."""
        self._now = 0
        self._most = _REMEMBERED

    def __len__(self) -> int:
        return sum(map(len, self._lines.values()))

    def __bool__(self) -> bool:
        return bool(self._lines)

    def __iter__(self) -> Iterator[T]:
        return (thing for line in self._lines.values() for thing, _ in line)

    def add(self, party: int, thing: T, cost: int) -> None:
        """To the end of the party's line."""
        self._line(party).append((thing, max(cost, LEAST_COST)))

    def put_back(self, party: int, thing: T, cost: int) -> None:
        """To the front of the party's line, as if it had not been served."""
        cost = max(cost, LEAST_COST)
        self._line(party).appendleft((thing, cost))
        self._at[party] -= cost

    def _line(self, party: int) -> deque[tuple[T, int]]:
        line = self._lines.get(party)
        if line is None:
            line = self._lines[party] = deque()
            self._at[party] = max(self._now, self._at.get(party, 0))
        return line

    def first(self) -> T | None:
        """What is to be served next."""
        return self._lines[self._next()][0][0] if self._lines else None

    def take(self) -> T:
        """Takes ``first`` out."""
        party = self._next()
        line = self._lines[party]
        thing, cost = line.popleft()
        self._now = max(self._now, self._at[party])
        self._at[party] += cost
        if not line:
            self._gone(party)
        return thing

    def _next(self) -> int:
        at, lines = self._at, self._lines
        return next(iter(lines)) if len(lines) == 1 else min(lines, key=at.__getitem__)

    def newest(self, party: int) -> Iterator[T]:
        """What waits for a party, from the end of its line."""
        return (thing for thing, _ in reversed(self._lines.get(party, ())))

    def remove(self, party: int, thing: T) -> None:
        """Takes out what was not served."""
        line = self._lines[party]
        line.remove(next(pair for pair in line if pair[0] is thing))
        if not line:
            self._gone(party)

    def clear(self) -> None:
        for party in list(self._lines):
            self._gone(party)

    def _gone(self, party: int) -> None:
        del self._lines[party]
        if not self._lines:  # nobody waits, so nobody has anything to make good
            self._now = 0
            self._at.clear()
        elif len(self._at) > self._most:
            self._at = {who: at for who, at in self._at.items() if at > self._now or who in self._lines}
            self._most = 2 * len(self._at) + _REMEMBERED


def waiting(lines: Iterable[Turns[T]]) -> list[T]:
    """All that waits, line by line."""
    return [thing for line in lines for thing in line]
