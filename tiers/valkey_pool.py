"""A few connections to one server, made when they are needed and used by one thread at a time."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from tierkv.errors import ForkError
from tierkv.tiers.valkey_dial import Greeting
from tierkv.tiers.valkey_resp import Connection
from tierkv.tiers.valkey_stream import LinkLost, LinkRefused, LinkTimeout, Patience

_SLICE_S = 0.1


class Loan:
    """A connection in the hands of one thread."""

    __slots__ = ("complaint", "connection", "greeting", "worn")

    def __init__(self, connection: Connection, greeting: Greeting) -> None:
        self.connection = connection
        self.greeting = greeting
        self.worn = False
        """Set by the borrower: close it instead of keeping it."""
        self.complaint = ""
        """Set by the borrower: the error that the server answered with."""


class Pool:
    """At most ``size`` connections to one server. Thread-safe."""

    def __init__(
        self, dial: Callable[[Patience], tuple[Connection, Greeting]], size: int, connect_timeout_s: float
    ) -> None:
        self._dial = dial
        self._size = size
        self._connect_timeout_s = connect_timeout_s
        self._lock = threading.Lock()
        self._changed = threading.Condition(self._lock)
        self._waiting = 0
        self._idle: list[Loan] = []
        self._open = 0
        self._closed = False
        self._pid = os.getpid()
        self.greeting: Greeting | None = None
        """Of the connection that was made last."""
        self.dialled = 0
        """Connections made so far."""

    @contextmanager
    def lend(self, patience: Patience, *, fresh: bool = False) -> Iterator[Loan]:
        """A connection for the time of a ``with``; ``fresh`` asks for one that was never used.

        It comes back to the pool only when the ``with`` ends without an exception and nothing is owed on it; in all
        other cases it is closed. Raises ``LinkError``, and ``ForkError`` in a child of the process that made the pool.
        """
        loan = self._borrow(patience, fresh)
        whole = False
        try:
            yield loan
            whole = True
        finally:
            self._give_back(loan, keep=whole and not loan.worn)

    def counts(self) -> tuple[int, int]:
        """Connections that are open, and how many of them are idle."""
        with self._lock:
            return self._open, len(self._idle)

    def close(self) -> None:
        """Closes what is idle now and what is in use when it comes back."""
        with self._lock:
            self._closed = True
            idle, self._idle = self._idle, []
            self._open -= len(idle)
            self._changed.notify_all()
        for loan in idle:
            loan.connection.close()

    # ---- in and out

    def _borrow(self, patience: Patience, fresh: bool) -> Loan:
        loan = self._reserve(patience)
        if loan is not None:
            if not fresh and loan.connection.in_step():
                return loan
            loan.connection.close()
        made = None
        try:
            made = self._connect(patience)
            return made
        finally:
            if made is None:
                self._vacate()

    def _reserve(self, patience: Patience) -> Loan | None:
        """An idle connection, or the right to make one."""
        if os.getpid() != self._pid:
            raise ForkError(
                "a valkey tier cannot be used in a child of the process that made it; make a new one"
            )
        with self._lock:
            while not self._closed:
                patience.left_s()
                if self._idle:
                    return self._idle.pop()  # the one used last: it is the least likely to have gone stale
                if self._open < self._size:
                    self._open += 1
                    return None
                wait_s = min(_SLICE_S, patience.left_s())
                self._waiting += 1
                try:
                    self._changed.wait(wait_s)
                finally:
                    self._waiting -= 1
        raise LinkRefused("the tier is closed")

    def _connect(self, patience: Patience) -> Loan:
        try:
            connection, greeting = self._dial(patience.at_most(self._connect_timeout_s))
        except LinkTimeout as error:
            patience.left_s()  # raises when it is the caller's own time that is over
            raise LinkLost(f"{error} ({self._connect_timeout_s:g} s)") from error
        with self._lock:
            self.greeting = greeting
            self.dialled += 1
        return Loan(connection, greeting)

    def _give_back(self, loan: Loan, keep: bool) -> None:
        with self._lock:
            keep = keep and not self._closed
            if keep:
                self._idle.append(loan)
            else:
                self._open -= 1
            if self._waiting:
                self._changed.notify()
        if not keep:
            loan.connection.close()

    def _vacate(self) -> None:
        with self._lock:
            self._open -= 1
            if self._waiting:
                self._changed.notify()
