"""The client's side of the socket: connections that are made when they are needed and made anew when they break.

A call takes an idle connection or makes one, so that calls of several threads do not wait for each other; at most
``MOST_CONNECTIONS`` are open, the next call waits for one within its deadline. When the daemon is away every call says
so at once, and the next attempt to reach it is made after ``RETRY_S``.
"""

from __future__ import annotations

import os
import secrets
import socket
import threading
import time
from typing import Any, Final

from tierkv.daemon.mapped import MappedArena
from tierkv.daemon.wire import VERSION, Channel, WireError
from tierkv.errors import (
    ClosedError,
    ConfigError,
    ForkError,
    HandleError,
    IdentityError,
    LayoutError,
    TierError,
    TierKVError,
)

MOST_CONNECTIONS: Final = 16
RETRY_S: Final = 0.25
CONNECT_S: Final = 2.0
TOKEN_BYTES: Final = 16

_ERRORS: dict[str, type[TierKVError]] = {
    "HandleError": HandleError,
    "IdentityError": IdentityError,
    "LayoutError": LayoutError,
    "TierError": TierError,
    "ClosedError": ClosedError,
    "WireError": WireError,
}


class Away(TierKVError):
    """The daemon does not answer; for a call that stores or loads that is a miss."""


class NotOpened(TierKVError):
    """The daemon does not know a namespace (any more)."""


class VersionError(TierKVError):
    """Client and daemon speak different versions of the protocol."""


class Link:
    """Any thread. ``memory`` is the arena of the daemon that answered last."""

    def __init__(self, path: str, owner: str) -> None:
        self.path = path
        self._owner = owner
        self._pid = os.getpid()
        self._token = secrets.token_bytes(TOKEN_BYTES)
        self._lock = threading.Lock()
        self._freed = threading.Condition(self._lock)
        self._idle: list[Channel] = []
        self._open = 0
        self._away_until_s = 0.0
        self._closed = False
        self.memory: MappedArena | None = None
        self.load_s = 1.0
        self.lease_s = 60.0
        self.reconnects = 0

    def call(self, verb: str, words: dict[str, Any], timeout_s: float) -> dict[str, Any]:
        """Asks and waits for the reply. Raises ``Away`` when none comes in time, ``NotOpened``, and what the daemon
        says that the caller did wrong."""
        channel = self._take(timeout_s)
        fine = False
        try:
            channel.sock.settimeout(timeout_s)
            channel.send([verb, words])
            reply = channel.receive()
            fine = True
        except (OSError, EOFError, WireError) as error:
            raise Away(f"the daemon at {self.path} does not answer: {error}") from error
        finally:
            self._give(channel, fine)
        return _result(reply)

    def tell(self, verb: str, words: dict[str, Any]) -> None:
        """Says something that has no reply. Nothing happens when the daemon is away: it has forgotten all of it."""
        try:
            channel = self._take(CONNECT_S)
        except (Away, ClosedError):
            return
        fine = False
        try:
            channel.sock.settimeout(CONNECT_S)
            channel.send([verb, words])
            fine = True
        except OSError:
            pass
        finally:
            self._give(channel, fine)

    def close(self) -> None:
        """Ends the session: the daemon takes back what it held."""
        with self._lock:
            self._closed = True
            idle, self._idle = self._idle, []
            self._freed.notify_all()
        for channel in idle:
            channel.close()

    def check(self) -> None:
        if self._pid != os.getpid():
            raise ForkError(
                f"this client was made in process {self._pid} and is used in its child {os.getpid()}; "
                "connect after the fork"
            )
        if self._closed:
            raise ClosedError("this client was closed")

    # -- connections ----------------------------------------------------------------------------------------------

    def _take(self, timeout_s: float) -> Channel:
        self.check()
        with self._freed:
            if not self._freed.wait_for(
                lambda: self._idle or self._open < MOST_CONNECTIONS or self._closed, timeout_s
            ):
                raise Away(f"all {MOST_CONNECTIONS} connections to {self.path} are in use")
            if self._idle:
                return self._idle.pop()
            if time.monotonic() < self._away_until_s:
                raise Away(f"the daemon at {self.path} is away")
            self._open += 1
        connected = False
        try:
            channel = self._connect(min(timeout_s, CONNECT_S))
            connected = True
            return channel
        finally:
            if not connected:
                with self._freed:
                    self._open -= 1
                    self._away_until_s = time.monotonic() + RETRY_S
                    self._freed.notify()

    def _give(self, channel: Channel, fine: bool) -> None:
        with self._freed:
            if fine and not self._closed:
                self._idle.append(channel)
            else:
                self._open -= 1
            if not fine:  # the others lead to the same daemon
                stale, self._idle = self._idle, []
                self._open -= len(stale)
            else:
                stale = []
            self._freed.notify()
        if not fine or self._closed:
            channel.close()
        for other in stale:
            other.close()

    def _connect(self, timeout_s: float) -> Channel:
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        channel = Channel(sock)
        done = False
        try:
            sock.settimeout(timeout_s)
            sock.connect(self.path)
            channel.send(["hello", {"version": VERSION, "session": self._token, "owner": self._owner}])
            facts = _result(channel.receive(with_fds=True))
            self._meet(facts, channel.take_fds())
            done = True
            return channel
        except (OSError, EOFError, WireError) as error:
            raise Away(f"no daemon answers at {self.path}: {error}") from error
        finally:
            if not done:
                channel.close()

    def _meet(self, facts: dict[str, Any], fds: list[int]) -> None:
        """Maps the arena of a daemon that was not met before."""
        with self._lock:
            if self.memory is not None and self.memory.instance == facts["instance"]:
                for fd in fds:
                    os.close(fd)
                return
            if self.memory is not None:
                self.reconnects += 1
            self.memory = MappedArena(fds, facts)
            self.load_s, self.lease_s = facts["load_s"], facts["lease_s"]


def _result(reply: Any) -> dict[str, Any]:
    match reply:
        case ["ok", dict(words)]:
            return words
        case ["error", "UnknownNamespace", str(text)]:
            raise NotOpened(text)
        case ["error", "VersionError", str(text)]:
            raise VersionError(f"{text}; use the same release of tierkv on both sides")
        case ["error", "ConfigError", str(key), value, str(hint)]:
            raise ConfigError(key, value, hint)
        case ["error", str(kind), str(text)]:
            raise _ERRORS.get(kind, TierKVError)(text)
    raise WireError("this is no reply")
