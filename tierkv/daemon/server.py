"""The daemon's socket: who connects, what is answered, and what happens when somebody is gone.

One thread for each connection, which reads a request, does it and replies: a blocking thread answers in less time than
an event loop. A peer that sends no message, half a message or a wrong one loses its connection, and nobody else
notices.
"""

from __future__ import annotations

import logging
import os
import socket
import struct
import threading
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tierkv import __version__
from tierkv.daemon.listening import listen_unix, lock_name, unlock_name
from tierkv.daemon.session import Session, UnknownHandle, UnknownNamespace
from tierkv.daemon.sessions import SessionBook, shut
from tierkv.daemon.tenant import hear_tenant
from tierkv.daemon.verbs import ONE_WAY, VERBS, Verb
from tierkv.daemon.wire import MAX_BODY_BYTES, VERSION, Channel, Large, WireError
from tierkv.daemon.words import ints, name_of, take
from tierkv.errors import ConfigError, TierKVError
from tierkv.logs import RareLog
from tierkv.store import TieredStore

log = logging.getLogger("tierkv")

MOST_CONNECTIONS = 512
MOST_OF_ONE = 256
"""Connections of one process: it may lose the count of its clients without locking all others out."""
MOST_LARGE_BYTES = 4 * MAX_BODY_BYTES
"""For long messages of all connections together, while they are received."""
MOST_TEXT = 2000
"""Characters of an error: words of the peer's, of whatever length, stand in it."""
HELLO_S = 5.0
"""So long a new connection may take to say who it is."""
REST_S = 5.0
"""So long the rest of a message may take, once it has begun, and a reply to be taken."""
_CREDENTIALS = struct.Struct("3i")
TOKEN_BYTES = 16


class Server:
    """Serves a store. ``start`` returns at once; ``close`` ends all connections and waits for their threads."""

    def __init__(
        self, store: TieredStore, path: Path, *, mode: int = 0o600, group: int | None = None
    ) -> None:
        self.store = store
        self.path = path
        self.instance = store.host.instance
        self._mode = mode
        self._group = group
        self._rare = RareLog(store.clock)
        self._lock = threading.Lock()
        self._threads: dict[threading.Thread, Channel] = {}
        self._large = Large(MOST_LARGE_BYTES)
        self._by_pid: Counter[int] = Counter()
        """Connections by process; 0 is all those of other pid namespaces."""
        self._closed = threading.Event()
        self._listener: socket.socket | None = None
        self.verbs: dict[str, Verb] = dict(VERBS)
        """What sessions can ask; others may add to it before ``start``."""
        self.on_empty: Callable[[bool], None] = lambda for_good: None
        """See ``SessionBook``; to be set before ``start``."""

    # -- life -----------------------------------------------------------------------------------------------------

    def start(self) -> None:
        """Raises ``ConfigError`` when the socket cannot be made, or another daemon answers on it."""
        self._lock_fd = lock_name(self.path, "sidecar.socket")
        try:
            self._listener = listen_unix(self.path, "sidecar.socket", self._mode, self._group)
        except ConfigError:
            unlock_name(self.path, self._lock_fd)
            raise
        self._book = SessionBook(self.store)
        self._book.on_empty = self.on_empty
        self.store.upkeep.on_overdue = self._book.throw_out
        self._accepting = threading.Thread(target=self._accept, name="tierkv-daemon-accept", daemon=True)
        self._accepting.start()

    def stop(self) -> None:
        """Ends all connections; no new ones are taken. What sessions hold is still theirs."""
        if self._listener is None or self._closed.is_set():
            return
        self._closed.set()
        self._listener.shutdown(socket.SHUT_RDWR)  # wakes the thread that accepts
        self._accepting.join()
        self._listener.close()
        self.path.unlink(missing_ok=True)
        with self._lock:
            channels = list(self._threads.values())
        for channel in channels:
            shut(channel)

    def close(self, timeout_s: float = 5.0) -> None:
        """Ends all sessions and waits for the connections' threads. Does not close the store; where that comes first,
        whoever waits for it is answered sooner."""
        if self._listener is None:
            return
        self.stop()
        self._listener = None
        until_s = time.monotonic() + timeout_s
        with self._lock:
            threads = list(self._threads)
        for thread in threads:
            thread.join(max(0.0, until_s - time.monotonic()))
        self.store.upkeep.on_overdue = lambda lease: None
        self._book.close()
        unlock_name(self.path, self._lock_fd)

    def sessions(self) -> list[dict[str, object]]:
        """Facts for people."""
        return [session.facts() for session in self._book.all()]

    # -- connections ----------------------------------------------------------------------------------------------

    def _accept(self) -> None:
        assert self._listener is not None
        while not self._closed.is_set():
            try:
                sock, _ = self._listener.accept()
            except OSError as error:
                if self._closed.is_set():
                    return
                self._rare.warning("accept", "no connection can be taken: %s", str(error))
                self._closed.wait(0.1)
                continue
            self._admit(Channel(sock, self._large))

    def _admit(self, channel: Channel) -> None:
        pid, uid, _ = _CREDENTIALS.unpack(
            channel.sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
        )
        name = f"tierkv-connection-{channel.sock.fileno()}"
        thread = threading.Thread(target=self._serve, args=(channel, pid, uid), name=name, daemon=True)
        with self._lock:
            crowded = len(self._threads) >= MOST_CONNECTIONS or (pid and self._by_pid[pid] >= MOST_OF_ONE)
            if not crowded:
                self._threads[thread] = channel
                self._by_pid[pid] += 1
        try:
            if not crowded:
                thread.start()
                return
        except RuntimeError:  # the system gives no more threads
            self._leave(thread, pid)
        self._rare.warning(
            "crowded",
            "a connection of process %d is refused: there are %d already, %d of them its own",
            *(pid, len(self._threads), self._by_pid[pid]),
        )
        channel.close()

    def _leave(self, thread: threading.Thread, pid: int) -> None:
        with self._lock:
            if self._threads.pop(thread, None) is not None:
                self._by_pid[pid] -= 1
                if not self._by_pid[pid]:
                    del self._by_pid[pid]

    def _serve(self, channel: Channel, pid: int, uid: int) -> None:
        session: Session | None = None
        try:
            session = self._greet(channel, pid, uid)
            channel.sock.settimeout(None)
            _send_within(channel.sock, REST_S)
            self._introduce(channel)
            while not self._closed.is_set():
                self._answer(channel, session)
        except EOFError:
            pass
        except (WireError, OSError) as error:
            if session is None and isinstance(error, WireError):
                _refuse(channel, "WireError", error)
            who = "a peer that has not said who it is" if session is None else session.owner
            self._rare.warning("peer", "the connection of %s ends: %s", who, _words_of(error))
        finally:
            channel.close()
            if session is not None:
                self._book.leave(channel, session)
            self._leave(threading.current_thread(), pid)

    def _greet(self, channel: Channel, pid: int, uid: int) -> Session:
        if self._group is None and uid not in (0, os.getuid()):
            raise WireError(
                f"user {uid} is not the daemon's user {os.getuid()}; set sidecar.group to let it in"
            )
        verb, words = _request(channel.receive(by_s=time.monotonic() + HELLO_S))
        if verb != "hello":
            raise WireError(f"the first message is {verb!r} instead of hello")
        version = words.get("version")
        if version != VERSION:
            error = WireError(f"this daemon speaks version {VERSION} of the protocol, not {version!r}")
            _refuse(channel, "VersionError", error)
            raise error
        token = take(words, "session", bytes)
        if len(token) != TOKEN_BYTES:
            raise WireError(f"a session's name of {len(token)} bytes; it has {TOKEN_BYTES}")
        tenant = hear_tenant(words, self.store)
        session = self._book.join(channel, token, pid, name_of(take(words, "owner", str)))
        session.uid = uid
        if tenant is not None:
            self._book.keep_to(session, *tenant)
        if words.get("leaves") is not None:  # it could not wait for an answer
            session.end(ints(words, "leaves"))
        return session

    def _introduce(self, channel: Channel) -> None:
        """The answer to a hello, with the arena."""
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

    def _answer(self, channel: Channel, session: Session) -> None:
        verb, words = _request(channel.receive_whenever(within_s=REST_S))
        act = self.verbs.get(verb)
        session.calls += 1
        if act is None:
            channel.send(["error", "WireError", f"there is no verb {verb[:100]!r}"])
            return
        try:
            reply: list[Any] = ["ok", act(session, words)]
        except (UnknownNamespace, UnknownHandle) as error:
            reply = ["error", type(error).__name__, _words_of(error)]
        except ConfigError as error:
            value = error.value if isinstance(error.value, int | float) else str(error.value)[:MOST_TEXT]
            reply = ["error", "ConfigError", error.key[:MOST_TEXT], value, error.hint]
        except (TierKVError, TimeoutError) as error:
            reply = ["error", type(error).__name__, _words_of(error)]
        if verb not in ONE_WAY:
            channel.send(reply)


def _refuse(channel: Channel, kind: str, error: WireError) -> None:
    """Tells a peer why it is not let in, if it listens."""
    try:
        channel.send(["error", kind, _words_of(error)], by_s=time.monotonic() + 1.0)
    except OSError:
        pass


def _words_of(error: BaseException) -> str:
    text = str(error)
    return text if len(text) <= MOST_TEXT else f"{text[:MOST_TEXT]} ... ({len(text)} characters)"


def _request(message: Any) -> tuple[str, dict[str, Any]]:
    if not (
        isinstance(message, list)
        and len(message) == 2
        and isinstance(message[0], str)
        and isinstance(message[1], dict)
    ):
        raise WireError("this is no request: [verb, {argument: value}] expected")
    return message[0], message[1]


def _send_within(sock: socket.socket, seconds: float) -> None:
    """A peer that does not take its reply must not keep a thread for ever."""
    whole = int(seconds)
    sock.setsockopt(
        socket.SOL_SOCKET, socket.SO_SNDTIMEO, struct.pack("ll", whole, int((seconds - whole) * 1e6))
    )
