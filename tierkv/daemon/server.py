"""The daemon's socket: who connects, what is answered, and what happens when somebody is gone.

One thread for each connection, which reads a request, does it and replies: a blocking thread answers in less time than
an event loop. A peer that sends no message, half a message or a wrong one loses its connection, and nobody else
notices.
"""

from __future__ import annotations

import fcntl
import logging
import os
import secrets
import select
import socket
import struct
import threading
import time
from pathlib import Path
from typing import Any

from tierkv import __version__
from tierkv.daemon.session import Session, UnknownNamespace
from tierkv.daemon.verbs import ONE_WAY, VERBS
from tierkv.daemon.wire import VERSION, Channel, WireError
from tierkv.daemon.words import take
from tierkv.errors import ConfigError, TierKVError
from tierkv.handles import Lease
from tierkv.logs import RareLog
from tierkv.store import TieredStore

log = logging.getLogger("tierkv")

MOST_CONNECTIONS = 512
HELLO_S = 5.0
"""So long a new connection may take to say who it is."""
REST_S = 5.0
"""So long the rest of a message may take, once it has begun, and a reply to be taken."""
WATCH_S = 0.5
_CREDENTIALS = struct.Struct("3i")
TOKEN_BYTES = 16


class Server:
    """Serves a store. ``start`` returns at once; ``close`` ends all connections and waits for their threads."""

    def __init__(
        self, store: TieredStore, path: Path, *, mode: int = 0o600, group: int | None = None
    ) -> None:
        self.store = store
        self.path = path
        self.instance = secrets.token_bytes(TOKEN_BYTES)
        self._mode = mode
        self._group = group
        self._rare = RareLog(store.clock)
        self._lock = threading.Lock()
        self._sessions: dict[bytes, Session] = {}
        self._leaving: list[tuple[Session, int]] = []
        """Sessions without a connection whose process may still touch slots, with its pidfd."""
        self._threads: dict[threading.Thread, tuple[Channel, Session | None]] = {}
        self._closed = threading.Event()
        self._listener: socket.socket | None = None

    # -- life -----------------------------------------------------------------------------------------------------

    def start(self) -> None:
        """Raises ``ConfigError`` when the socket cannot be made, or another daemon answers on it."""
        self._lock_fd = _lock(self.path)
        try:
            self._listener = _listen(self.path, self._mode, self._group)
        except ConfigError:
            os.close(self._lock_fd)
            raise
        self.store.upkeep.on_overdue = self.throw_out
        for work in (self._accept, self._watch):
            threading.Thread(target=work, name=f"tierkv-daemon{work.__name__}", daemon=True).start()

    def close(self, timeout_s: float = 5.0) -> None:
        """Ends all sessions. Does not close the store."""
        self._closed.set()
        if self._listener is None:
            return
        self._listener.shutdown(socket.SHUT_RDWR)  # wakes the thread that accepts
        self._listener.close()
        self.path.unlink(missing_ok=True)
        with self._lock:
            channels = [channel for channel, _ in self._threads.values()]
            threads = list(self._threads)
        for channel in channels:
            _shut(channel)
        until_s = time.monotonic() + timeout_s
        for thread in threads:
            if thread is not threading.current_thread():
                thread.join(max(0.0, until_s - time.monotonic()))
        for session, pidfd in self._leaving:
            os.close(pidfd)
            session.end_drafts()
            session.end_leases()
        os.close(self._lock_fd)

    def sessions(self) -> list[dict[str, object]]:
        """Facts for people."""
        with self._lock:
            known = [*self._sessions.values(), *(session for session, _ in self._leaving)]
        return [session.facts() for session in known]

    # -- connections ----------------------------------------------------------------------------------------------

    def _accept(self) -> None:
        assert self._listener is not None
        while not self._closed.is_set():
            try:
                sock, _ = self._listener.accept()
            except OSError as error:
                if self._closed.is_set():
                    return
                self._rare.warning("accept", "no connection can be taken: %s", error)
                self._closed.wait(0.1)
                continue
            channel = Channel(sock)
            with self._lock:
                crowded = len(self._threads) >= MOST_CONNECTIONS
                if not crowded:
                    thread = threading.Thread(
                        target=self._serve,
                        args=(channel,),
                        name=f"tierkv-connection-{sock.fileno()}",
                        daemon=True,
                    )
                    self._threads[thread] = (channel, None)
            if crowded:
                self._rare.warning("crowded", "more than %d connections; one is refused", MOST_CONNECTIONS)
                channel.close()
                continue
            thread.start()

    def _serve(self, channel: Channel) -> None:
        session: Session | None = None
        try:
            channel.sock.settimeout(HELLO_S)
            session = self._greet(channel)
            channel.sock.settimeout(None)
            _send_within(channel.sock, REST_S)
            while not self._closed.is_set():
                self._answer(channel, session)
        except EOFError:
            pass
        except (WireError, OSError) as error:
            who = "a peer that has not said who it is" if session is None else session.owner
            self._rare.warning("peer", "the connection of %s ends: %s", who, error)
        finally:
            channel.close()
            with self._lock:
                self._threads.pop(threading.current_thread(), None)
            if session is not None:
                self._leave(session)

    def _greet(self, channel: Channel) -> Session:
        pid, uid, _ = _CREDENTIALS.unpack(
            channel.sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
        )
        if self._group is None and uid not in (0, os.getuid()):
            raise WireError(
                f"user {uid} is not the daemon's user {os.getuid()}; set sidecar.group to let it in"
            )
        verb, words = _request(channel.receive(within_s=HELLO_S))
        if verb != "hello":
            raise WireError(f"the first message is {verb!r} instead of hello")
        version = words.get("version")
        if version != VERSION:
            channel.send(
                [
                    "error",
                    "VersionError",
                    f"this daemon speaks version {VERSION} of the protocol, not {version}",
                ]
            )
            raise WireError(f"it speaks version {version!r} of the protocol, this daemon {VERSION}")
        token = take(words, "session", bytes)
        if len(token) != TOKEN_BYTES:
            raise WireError(f"a session's name of {len(token)} bytes; it has {TOKEN_BYTES}")
        session = self._join(token, pid, take(words, "owner", str)[:100], channel)
        arena = self.store.host.arena
        assert arena.fd is not None, "a daemon's arena is a memory file"
        assert arena.table.fd is not None, "and so is its table"
        channel.send(
            [
                "ok",
                {
                    "version": VERSION,
                    "release": __version__,
                    "instance": self.instance,
                    "regions": arena.regions,
                    "region_bytes": arena.region_bytes,
                    "slots_per_region": arena.slots_per_region,
                    "load_s": self.store.limits.load_deadline_s,
                    "lease_s": self.store.limits.lease_deadline_s,
                },
            ],
            (arena.fd, arena.table.fd),
        )
        return session

    def _join(self, token: bytes, pid: int, owner: str, channel: Channel) -> Session:
        with self._lock:
            session = self._sessions.get(token)
            if session is None:
                session = self._sessions[token] = Session(self.store, token, pid, owner)
            elif session.pid != pid:
                raise WireError(f"process {pid} names the session of process {session.pid}")
            session.connections += 1
            self._threads[threading.current_thread()] = (channel, session)
        return session

    def _answer(self, channel: Channel, session: Session) -> None:
        verb, words = _request(channel.receive(within_s=REST_S))
        act = VERBS.get(verb)
        session.calls += 1
        if act is None:
            channel.send(["error", "WireError", f"there is no verb {verb!r}"])
            return
        try:
            reply: list[Any] = ["ok", act(session, words)]
        except UnknownNamespace as error:
            reply = ["error", "UnknownNamespace", str(error)]
        except ConfigError as error:
            reply = ["error", "ConfigError", error.key, repr(error.value), error.hint]
        except (TierKVError, TimeoutError) as error:
            reply = ["error", type(error).__name__, str(error)]
        if verb not in ONE_WAY:
            channel.send(reply)

    # -- the end of a session -------------------------------------------------------------------------------------

    def _leave(self, session: Session) -> None:
        """One of its connections has ended."""
        with self._lock:
            session.connections -= 1
            if session.connections or self._sessions.get(session.token) is not session:
                return
            del self._sessions[session.token]
            if session.writes:
                self._keep_until_gone(session)
        session.end_leases()

    def throw_out(self, lease: Lease) -> None:
        """A lease is past its deadline: its session loses its connections, but what it holds stays until its process
        is gone, for it may still read."""
        with self._lock:
            session = next((one for one in self._sessions.values() if one.holds(lease)), None)
            if session is None:
                return
            del self._sessions[session.token]
            self._keep_until_gone(session)
            channels = [channel for channel, its in self._threads.values() if its is session]
        log.warning("%s (pid %d) is disconnected: a lease is past its deadline", session.owner, session.pid)
        for channel in channels:
            _shut(channel)

    def _keep_until_gone(self, session: Session) -> None:
        """Under the lock."""
        try:
            pidfd = os.pidfd_open(session.pid)
        except ProcessLookupError:
            pidfd = os.open(
                os.devnull, os.O_RDONLY | os.O_CLOEXEC
            )  # readable, like the pidfd of a process that has gone
        self._leaving.append((session, pidfd))

    def _watch(self) -> None:
        """Ends what sessions have left behind once their processes are gone."""
        while not self._closed.wait(WATCH_S):
            with self._lock:
                leaving = list(self._leaving)
            if not leaving:
                continue
            gone, _, _ = select.select([pidfd for _, pidfd in leaving], [], [], 0)
            for session, pidfd in leaving:
                if pidfd in gone:
                    with self._lock:
                        self._leaving.remove((session, pidfd))
                    os.close(pidfd)
                    session.end_drafts()
                    session.end_leases()


def _request(message: Any) -> tuple[str, dict[str, Any]]:
    if not (
        isinstance(message, list)
        and len(message) == 2
        and isinstance(message[0], str)
        and isinstance(message[1], dict)
    ):
        raise WireError("this is no request: [verb, {argument: value}] expected")
    return message[0], message[1]


def _listen(path: Path, mode: int, group: int | None) -> socket.socket:
    path.unlink(missing_ok=True)  # a dead daemon's: the lock is ours
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    before = os.umask(0o777 & ~mode)
    try:
        listener.bind(str(path))
    except OSError as error:
        listener.close()
        raise ConfigError(
            "sidecar.socket", str(path), f"no socket can be made there: {error.strerror or error}"
        ) from error
    finally:
        os.umask(before)
    if group is not None:
        os.chown(path, -1, group)
    listener.listen(128)
    return listener


def _lock(path: Path) -> int:
    """Holds the socket's name for this process, so that of daemons that start at the same time one gets it. The file
    stays: one that is removed can be locked by two."""
    try:
        fd = os.open(path.with_name(path.name + ".lock"), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except OSError as error:
        raise ConfigError(
            "sidecar.socket", str(path), f"it cannot be used: {error.strerror or error}"
        ) from error
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        owner = os.pread(fd, 32, 0).decode(errors="replace").strip() or "unknown"
        os.close(fd)
        raise ConfigError(
            "sidecar.socket",
            str(path),
            f"another daemon (pid {owner}) listens on it; stop that, or choose another path",
        ) from error
    os.ftruncate(fd, 0)
    os.pwrite(fd, f"{os.getpid()}\n".encode(), 0)
    return fd


def _send_within(sock: socket.socket, seconds: float) -> None:
    """A peer that does not take its reply must not keep a thread for ever."""
    whole = int(seconds)
    sock.setsockopt(
        socket.SOL_SOCKET, socket.SO_SNDTIMEO, struct.pack("ll", whole, int((seconds - whole) * 1e6))
    )


def _shut(channel: Channel) -> None:
    try:
        channel.sock.shutdown(socket.SHUT_RDWR)
    except OSError:  # it is closed already
        pass
