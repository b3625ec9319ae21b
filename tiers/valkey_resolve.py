"""Host names to socket addresses, in bounded time.

``getaddrinfo`` knows no deadline: with a name server that does not answer it holds its caller for half a minute. So a
name is looked up in a thread of its own, one at a time, and the last good answer serves for a while.
"""

from __future__ import annotations

import socket
import threading
import time
from typing import Any

from tierkv.tiers.valkey_stream import LinkLost, Patience

SocketAddress = tuple[socket.AddressFamily, Any]

_FRESH_S = 30.0
_SLICE_S = 0.1


class Resolver:
    """Addresses of one host. Thread-safe. A host that is a number needs no thread."""

    def __init__(self, host: str, port: int) -> None:
        self._host, self._port = host, port
        self._lock = threading.Lock()
        self._known: list[SocketAddress] = []
        self._known_at_s = 0.0
        self._error = ""
        self._running: threading.Event | None = None
        try:
            self._number = _look_up(host, port, socket.AI_NUMERICHOST)
        except (OSError, UnicodeError):  # a label that is too long is a UnicodeError
            self._number = []

    def addresses(self, patience: Patience) -> list[SocketAddress]:
        """All of them, best first. Raises ``LinkLost`` when the name means nothing, else ``LinkTimeout``."""
        if self._number:
            return self._number
        with self._lock:
            if self._known and time.monotonic() - self._known_at_s < _FRESH_S:
                return self._known
            finished = self._running or self._begin()
        while not finished.wait(min(_SLICE_S, patience.left_s())):
            pass
        with self._lock:
            if not self._known:
                raise LinkLost(f"the host name does not resolve: {self._error}")
            return self._known

    def forget(self) -> None:
        """The addresses did not answer: ask again next time."""
        with self._lock:
            self._known_at_s = 0.0

    def _begin(self) -> threading.Event:
        """Starts a look-up. Raises ``LinkLost`` where no thread can be had. Under the lock."""
        finished = threading.Event()
        thread = threading.Thread(
            target=self._run, args=(finished,), name="tierkv-valkey-resolve", daemon=True
        )
        try:
            thread.start()
        except RuntimeError as error:  # the system's limit of threads
            raise LinkLost(f"the host name cannot be looked up: {error}") from error
        self._running = finished
        return finished

    def _run(self, finished: threading.Event) -> None:
        found: list[SocketAddress] = []
        error = "the look-up was broken off"
        try:
            found = _look_up(self._host, self._port, 0)
        except (OSError, UnicodeError) as failure:
            error = str(failure)
        finally:  # whatever it was, the next one who asks shall start anew
            with self._lock:
                self._running = None
                self._error = error
                if found:
                    self._known, self._known_at_s = found, time.monotonic()
            finished.set()


def _look_up(host: str, port: int, flags: int) -> list[SocketAddress]:
    return [
        (family, address)
        for family, _, _, _, address in socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=flags)
    ]
