"""The client's side of the socket: connections that are made when they are needed and made anew when they break.

A call takes an idle connection or makes one, so that calls of several threads do not wait for each other; at most
``MOST_CONNECTIONS`` are open, the next call waits for one within its deadline. A call that gets no answer in time ends
its connection, so that a late answer is never taken for another's. From then on the daemon is *away*: every call says
so at once, while a thread of its own tries to reach it, and ends when it has.
"""

from __future__ import annotations

import logging
import os
import secrets
import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any, Final

from tierkv.daemon.mapped import MappedArena
from tierkv.daemon.replies import result_of
from tierkv.daemon.wire import VERSION, Channel, WireError
from tierkv.errors import Away, ClosedError, ForkError, TierKVError

log = logging.getLogger("tierkv")

MOST_CONNECTIONS: Final = 16
RETRY_S: Final = 0.2
CONNECT_S: Final = 2.0
TELL_S: Final = 0.25
"""A message without a reply has gone by then, or goes later."""
TOKEN_BYTES: Final = 16

Meanwhile = Callable[[Callable[[], bool]], None]
"""What is done while a call waits, until it is told that this is over. Raises nothing."""


def nothing(is_over: Callable[[], bool]) -> None:
    """The usual ``Meanwhile``."""


class NotLetIn(Away):
    """Somebody listens on the socket, and does not take this client."""


class Line(Channel):
    """A connection, with the memory of the daemon at its other end."""

    def __init__(self, sock: socket.socket) -> None:
        super().__init__(sock)
        self.arena: MappedArena | None = None
        self.told: list[tuple[str, dict[str, Any]]] = []
        """What was said without a reply since the last reply: nobody knows yet that it was heard."""


class Link:
    """Any thread. ``memory`` is the arena of the daemon that answered last."""

    def __init__(self, path: str, owner: str, facts: Mapping[str, Any] | None = None) -> None:
        """``facts``: words for the daemon when a connection is made."""
        self._facts = dict(facts or {})
        self.path = path
        self._owner = owner
        self._pid = os.getpid()
        self._token = secrets.token_bytes(TOKEN_BYTES)
        self._freed = threading.Condition()
        self._idle: list[Line] = []
        self._waiting = 0
        self._open: set[Line] = set()
        self._away = False
        self._closed = self._ended = False
        self._stop = threading.Event()
        self._seeker: threading.Thread | None = None
        self._untold: deque[tuple[str, dict[str, Any]]] = deque()
        self.revive: Callable[[], None] = lambda: None
        """Called by the thread that looks for the daemon, as long as it is not there."""
        self.met: Callable[[], None] = lambda: None
        """Called by the thread that has met a daemon for the first time, when ``memory`` is its."""
        self.told_away: Callable[[Away | None], None] = lambda why: None
        """Called by the thread that looks for the daemon with each reason why it is away, and then with none."""
        self._why: Away | None = None
        self.memory: MappedArena | None = None
        self.load_s = 1.0
        self.lease_s = 60.0
        self.reconnects = 0

    def call(
        self, verb: str, words: dict[str, Any], by_s: float, meanwhile: Meanwhile = nothing
    ) -> dict[str, Any]:
        """Asks and waits for the reply until then, on ``time.monotonic``; ``arena`` in it is the memory that it speaks
        of. Raises ``Away`` when no reply comes, ``NotKnown``, and what the daemon says that the caller did wrong."""
        if time.monotonic() >= by_s:
            raise Away("the time for the call is over")
        channel = self._take(by_s)
        fine = False
        try:
            if self._untold:
                self._tell_all(channel, by_s)
            channel.send([verb, words], by_s=by_s)
            if meanwhile is not nothing:
                meanwhile(channel.something_came)
            reply = channel.receive(by_s=by_s)
            if channel.told:
                channel.told.clear()
            fine = True
        except (OSError, EOFError, WireError) as error:
            raise Away(f"the daemon at {self.path} does not answer: {error}", asked=True) from error
        finally:
            self._give(channel, fine)
        found = result_of(reply)
        found["arena"] = channel.arena
        return found

    def is_here(self) -> bool:
        """Not closed, and in the process that made it."""
        return self._pid == os.getpid() and not self._closed

    def tell(self, verb: str, words: dict[str, Any]) -> None:
        """Says something that has no reply: now, or when the daemon can be reached. Harmless after a fork."""
        self._untold.append((verb, words))
        self.tell_now()

    def tell_later(self, verb: str, words: dict[str, Any]) -> None:
        """The same before the next call. May be called from a finaliser: it does not lock."""
        self._untold.append((verb, words))

    def tell_now(self) -> None:
        """Says what is left to be said, if a connection is free."""
        if self._pid != os.getpid():
            return
        while self._untold and not self._closed:
            try:
                channel = self._idle.pop()
            except IndexError:
                return
            fine = False
            try:
                self._tell_all(channel, time.monotonic() + TELL_S)
                fine = True
            except OSError:
                pass
            finally:
                self._give(channel, fine)

    def _tell_all(self, channel: Line, by_s: float) -> None:
        """Raises ``OSError``; what could not be said is said later."""
        while self._untold:
            try:
                told = self._untold.popleft()
            except IndexError:  # another thread was faster
                return
            sent = False
            try:
                channel.send(told, by_s=by_s)
                channel.told.append(told)
                sent = True
            finally:
                if not sent:
                    self._untold.appendleft(told)

    def check(self) -> None:
        """Raises ``ForkError`` or ``ClosedError``."""
        if self._pid != os.getpid():
            raise ForkError(
                f"this client was made in process {self._pid} and is used in its child {os.getpid()}; "
                "connect after the fork"
            )
        if self._closed:
            raise ClosedError("this client was closed")

    # -- the end --------------------------------------------------------------------------------------------------

    def refuse(self) -> None:
        """No call is taken any more, and those that wait are over at once."""
        with self._freed:
            self._closed = True
            busy = [channel for channel in self._open if channel not in self._idle]
            self._freed.notify_all()
        self._stop.set()
        for channel in busy:
            _shut(channel)

    def close(self, writing: Sequence[int] = ()) -> None:
        """Ends the session: the daemon takes back what it held, but for the drafts that are still being ``writing``.
        Harmless the second time, and in a forked child."""
        if self._pid != os.getpid():
            for channel in list(self._open):
                channel.close()
            return
        self.refuse()
        with self._freed:
            if self._ended:
                return
            self._ended = True
            idle, self._idle = self._idle, []
        if self.memory is not None:
            self._say_bye(idle, list(writing))
            self.memory.close()
        for channel in idle:
            self._end(channel)
        if self._seeker is not None:
            self._seeker.join(CONNECT_S)

    def _say_bye(self, idle: list[Line], writing: list[int]) -> None:
        by_s = time.monotonic() + TELL_S
        try:
            if idle:
                idle[0].send(["bye", {"writing": writing}], by_s=by_s)
                idle[0].receive(by_s=by_s)
                return
        except (OSError, EOFError, WireError):
            pass
        # It does not answer now, but may later: then it finds this.
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as sock:
            try:
                sock.settimeout(TELL_S)
                sock.connect(self.path)
                Channel(sock).send(["hello", {**self._hello(), "leaves": writing}])
            except OSError:  # it is gone, and what it held with it
                pass

    # -- connections ----------------------------------------------------------------------------------------------

    def _take(self, by_s: float) -> Line:
        """An idle connection, else a new one. The list of idle ones is taken from and added to without the lock: both
        are one step of the interpreter."""
        self.check()
        try:
            channel = self._idle.pop()
        except IndexError:
            return self._wait_for_one(by_s)
        if self._closed:  # while it was taken, so that nobody shuts it
            self._give(channel, fine=True)
            raise ClosedError("this client was closed")
        return channel

    def _wait_for_one(self, by_s: float) -> Line:
        with self._freed:
            self._waiting += 1
            self._freed.wait_for(self._may_take, max(0.0, by_s - time.monotonic()))
            self._waiting -= 1
            if self._closed:
                raise ClosedError("this client was closed")
            with suppress(IndexError):  # another one may have taken it meanwhile
                return self._idle.pop()
            if self._away:
                self._lose()  # for the case that nobody could be sent to seek it when it was lost
                raise self._as_away()
            if len(self._open) >= MOST_CONNECTIONS:
                raise Away(f"all {MOST_CONNECTIONS} connections to {self.path} are in use")
            channel = self._new_channel()
        connected = False
        try:
            self._connect(channel, min(by_s, time.monotonic() + CONNECT_S))
            connected = True
            return channel
        except TierKVError as error:
            self._why = _without_frames(error)
            raise
        finally:
            if not connected:
                self._give(channel, fine=False)

    def _may_take(self) -> bool:
        return bool(self._idle) or self._away or self._closed or len(self._open) < MOST_CONNECTIONS

    def _new_channel(self) -> Line:
        """Under the lock. Raises ``Away`` when this process has no descriptor left."""
        try:
            channel = Line(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM))
        except OSError as error:
            raise Away(f"no connection to {self.path} can be made: {error}") from error
        self._open.add(channel)
        return channel

    def _give(self, channel: Line, fine: bool) -> None:
        if not fine or self._ended:
            if not fine:
                with self._freed:
                    self._lose()
            self._end(channel)
            return
        idle = self._idle
        idle.append(channel)
        if self._waiting or self._idle is not idle:
            with self._freed:
                self._freed.notify()
                late = self._idle is not idle and channel in idle
                if late:  # the daemon was lost or the client closed: nobody looks into that list any more
                    idle.remove(channel)
            if late:
                self._end(channel)
        if self._untold:
            self.tell_now()

    def _end(self, channel: Line) -> None:
        with self._freed:
            self._open.discard(channel)
            if channel.told and channel.arena is self.memory:
                self._untold.extend(channel.told)  # to be said again, which does no harm
            self._freed.notify()
        channel.close()

    def _lose(self) -> None:
        """Under the lock: the daemon is away, until the seeker has found it."""
        self._away = True
        self._freed.notify_all()
        if self._seeker is None and not self._closed:
            seeker = threading.Thread(target=self._seek, name="tierkv-seeker", daemon=True)
            try:
                seeker.start()
            except RuntimeError as error:  # no more threads: the next call tries again
                log.warning("nobody can seek the daemon at %s: %s", self.path, error)
                return
            self._seeker = seeker

    def _seek(self) -> None:
        try:
            self._seek_until_found()
        finally:  # whatever happened: the next call sends another one
            with self._freed:
                if self._seeker is threading.current_thread():
                    self._seeker = None

    def _seek_until_found(self) -> None:
        with (
            self._freed
        ):  # the idle connections are as bad as the one that failed: they lead to the same daemon
            idle, self._idle = self._idle, []
        for channel in idle:
            self._end(channel)
        told: set[str] = set()
        while not self._closed:
            line: Line | None = None
            try:
                with self._freed:
                    line = self._new_channel()
                self._connect(line, time.monotonic() + CONNECT_S)
            except TierKVError as error:
                self._why = _without_frames(error)
                if str(error) not in told:
                    told.add(str(error))
                    self.told_away(self._why)
                if isinstance(error, Away):
                    self.revive()
            else:
                if told:
                    self.told_away(None)
                self._found(line)
                return
            if line is not None:
                self._end(line)
            self._stop.wait(RETRY_S)

    def _found(self, channel: Line) -> None:
        with self._freed:
            self._away, self._seeker, self._why = False, None, None
            self._freed.notify_all()
        self._give(channel, fine=True)

    def _as_away(self) -> Away:
        """With the reason, as far as it is known."""
        return Away(f"the daemon at {self.path} is away") if self._why is None else _without_frames(self._why)

    def _hello(self) -> dict[str, Any]:
        return {"version": VERSION, "session": self._token, "owner": self._owner, **self._facts}

    def _connect(self, channel: Line, by_s: float) -> None:
        """Raises ``Away``, and ``VersionError`` when the daemon speaks another version."""
        try:
            channel.sock.settimeout(max(0.001, by_s - time.monotonic()))
            channel.sock.connect(self.path)
            channel.sock.settimeout(None)
            channel.send(["hello", self._hello()], by_s=by_s)
            reply = channel.receive(by_s=by_s, with_fds=True)
            if type(reply) is list and reply[:2] == ["error", "WireError"]:
                raise NotLetIn(
                    f"the daemon at {self.path} refuses this client: {' '.join(map(str, reply[2:]))}"
                )
            facts = result_of(reply)
            channel.arena = self._meet(facts, channel.take_fds())
        except PermissionError as error:
            raise NotLetIn(
                f"this user ({os.geteuid()}) may not connect to {self.path}: be the daemon's user or root, or have "
                "sidecar.group let it in"
            ) from error
        except (OSError, EOFError, WireError) as error:
            raise Away(f"no daemon answers at {self.path}: {error}") from error

    def _meet(self, facts: dict[str, Any], fds: list[int]) -> MappedArena:
        """Maps the arena of a daemon that was not met before. Raises ``WireError`` and ``OSError``."""
        with self._freed:
            if self.memory is not None and self.memory.instance == facts.get("instance"):
                for fd in fds:
                    os.close(fd)
                return self.memory
            memory = MappedArena(fds, facts)
            self.load_s, self.lease_s = memory.load_s, memory.lease_s
            if self.memory is not None:
                self.reconnects += 1
                self._untold.clear()  # what was to be said concerns a daemon that is gone
            self.memory = memory
        self.met()
        return memory


def _without_frames(error: TierKVError) -> Away:
    """The same to be kept: the traceback of the first holds frames, and they the memory of a daemon that is gone."""
    nobody = isinstance(error, Away) and not isinstance(error, NotLetIn)
    return Away(str(error)) if nobody else NotLetIn(str(error))


def _shut(channel: Line) -> None:
    try:
        channel.sock.shutdown(socket.SHUT_RDWR)
    except OSError:  # it is not connected (yet)
        pass
