"""The sessions of a daemon: who is there, who may come back, and who is gone for good.

Each session has a descriptor of its process (pidfd), which tells when that has ended, whatever happened to it and
whoever inherited its connections. Only then, or when it has said goodbye, is taken back what it may read or write.
"""

from __future__ import annotations

import logging
import os
import select
import socket
import struct
import threading
from collections.abc import Callable, Mapping

from tierkv.daemon.session import Session
from tierkv.daemon.wire import Channel, WireError
from tierkv.handles import Lease
from tierkv.store import TieredStore

log = logging.getLogger("tierkv")

MOST_SESSIONS = 1024
_SO_PEERPIDFD = 77
"""Linux 6.5: the process at the other end, also from another pid namespace, and never one that came after it."""


class SessionBook:
    """Thread-safe. A thread of its own waits for processes to end."""

    def __init__(self, store: TieredStore) -> None:
        self._store = store
        self._lock = threading.Lock()
        self._sessions: dict[bytes, Session] = {}
        self._channels: dict[Channel, Session] = {}
        self._pidfds: dict[int, Session] = {}
        self.on_empty: Callable[[bool], None] = lambda for_good: None
        """Told, under the lock, that there is no session any more; ``for_good``: the last one will not come back."""
        self._ends = select.epoll()
        self._wake = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._ends.register(self._wake, select.EPOLLIN)
        self._watcher = threading.Thread(target=self._watch, name="tierkv-daemon-ends", daemon=True)
        self._watcher.start()

    def join(self, channel: Channel, token: bytes, pid: int, owner: str) -> Session:
        """The session of that name, perhaps a new one, has one connection more. Raises ``WireError``."""
        with self._lock:
            session = self._sessions.get(token)
            if session is None:
                session = self._open(channel.sock, token, pid, owner)
            elif session.pid != pid:
                raise WireError(f"process {pid} names the session of process {session.pid}")
            session.connections += 1
            self._channels[channel] = session
            return session

    def _open(self, sock: socket.socket, token: bytes, pid: int, owner: str) -> Session:
        if len(self._sessions) >= MOST_SESSIONS:
            raise WireError(f"there are {MOST_SESSIONS} sessions already")
        pidfd = process_of(sock, pid)
        session = self._sessions[token] = Session(self._store, token, pid, owner)
        self._pidfds[pidfd] = session
        self._ends.register(pidfd, select.EPOLLIN)
        return session

    def keep_to(self, session: Session, tag: int, limits: Mapping[int, int]) -> None:
        """As long as the session is there, its tenant holds no more than so many bytes, by tier."""
        self._store.quotas.declare(session.token, tag, limits)
        with self._lock:
            gone = self._sessions.get(session.token) is not session
        if gone:  # in this moment
            self._store.quotas.withdraw(session.token)

    def leave(self, channel: Channel, session: Session) -> None:
        """One of its connections has ended. With the last one ends a session that holds nothing; any other may come
        back."""
        with self._lock:
            del self._channels[channel]
            session.connections -= 1
            gone = not session.connections and not session.held
            if gone:
                self._forget(session, for_good=session.over)
        if gone:
            session.end()

    def throw_out(self, lease: Lease) -> None:
        """A lease is past its deadline: its session loses its connections. What it holds stays until it is given back
        or the process is gone, for it may still read."""
        with self._lock:
            session = next((one for one in self._sessions.values() if one.holds(lease)), None)
            channels = [channel for channel, its in self._channels.items() if its is session]
        if session is None:
            return
        log.warning("%s (pid %d) is disconnected: a lease is past its deadline", session.owner, session.pid)
        for channel in channels:
            shut(channel)

    def all(self) -> list[Session]:
        with self._lock:
            return list(self._sessions.values())

    def close(self) -> None:
        """Ends all sessions."""
        os.eventfd_write(self._wake, 1)
        self._watcher.join()
        with self._lock:
            sessions, self._sessions = list(self._sessions.values()), {}
            for pidfd in self._pidfds:
                os.close(pidfd)
            self._pidfds.clear()
        for session in sessions:
            session.end()
        self._ends.close()
        os.close(self._wake)

    def _watch(self) -> None:
        while True:
            for fd, _ in self._ends.poll():
                if fd == self._wake:
                    return
                self._gone(fd)

    def _gone(self, pidfd: int) -> None:
        """A process has ended: its children may have inherited its connections, but nothing of its memory that counts
        here."""
        with self._lock:
            session = self._pidfds.get(pidfd)
            # It may have left in this moment, and the number be that of a process by now which came since and lives.
            if session is None or not _has_ended(pidfd):
                return
            self._forget(session, for_good=True)
            channels = [channel for channel, its in self._channels.items() if its is session]
        for channel in channels:
            shut(channel)
        session.end()

    def _forget(self, session: Session, *, for_good: bool) -> None:
        """Under the lock."""
        if self._sessions.get(session.token) is not session:
            return
        del self._sessions[session.token]
        self._store.quotas.withdraw(session.token)
        pidfd = next(fd for fd, its in self._pidfds.items() if its is session)
        del self._pidfds[pidfd]
        self._ends.unregister(pidfd)
        os.close(pidfd)
        if not self._sessions:
            self.on_empty(for_good)


def process_of(sock: socket.socket, pid: int) -> int:
    """A descriptor of the process at the other end that becomes readable when it has ended. Raises ``WireError``."""
    try:
        (pidfd,) = struct.unpack("i", sock.getsockopt(socket.SOL_SOCKET, _SO_PEERPIDFD, 4))
    except OSError:
        pass
    else:
        return int(pidfd)
    if not pid:
        raise WireError(
            "its process is in another pid namespace, so nobody here could tell when it ends: share the "
            "namespace (docker: --pid), or use Linux 6.5 or newer"
        )
    try:
        return os.pidfd_open(pid)
    except OSError as error:
        raise WireError(f"process {pid} cannot be watched: {error.strerror}") from error


def _has_ended(pidfd: int) -> bool:
    poll = select.poll()
    poll.register(pidfd, select.POLLIN)
    return bool(poll.poll(0))


def shut(channel: Channel) -> None:
    """Ends a connection whose thread may be waiting in it."""
    try:
        channel.sock.shutdown(socket.SHUT_RDWR)
    except OSError:  # it is closed already
        pass
