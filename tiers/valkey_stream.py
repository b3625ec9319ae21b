"""Bytes to and from one server, each wait bounded: plain sockets and TLS behind the same four methods.

A plain socket stays in blocking mode and lets the kernel keep the time (SO_RCVTIMEO, SO_SNDTIMEO), so that one system
call moves a MiB straight into or out of the caller's buffers. TLS has no such calls and goes piece by piece.

Times here are the machine's, also where a tier runs on an injected clock: the kernel knows no other, and a peer that
trickles must not hold a worker because a test's clock stands still.
"""

from __future__ import annotations

import select
import socket
import ssl
import struct
from collections.abc import Sequence
from time import monotonic
from typing import Protocol

from tierkv.clock import Deadline
from tierkv.tier import Outcome

_SLICE_S = 0.1
"""The longest that one system call waits; a cancel is seen at least that often."""
_UNIX_SLICE_S = 0.01
_UNIX_BUFFER_BYTES = 32 * 1024
"""At least so much goes into one buffer of a unix socket."""
_TIMEVAL = struct.Struct("@ll")
_TLS_PIECE_BYTES = 256 * 1024
_EOF = "the server closed the connection"


class LinkError(Exception):
    """The connection is of no more use. ``outcome`` is what that means for a block that was waiting for it."""

    outcome = Outcome.UNAVAILABLE


class LinkLost(LinkError):
    """Closed, reset, refused: a fresh connection may do better."""


class LinkRefused(LinkError):
    """The server is there but will not serve us: wrong password, wrong certificate, a cluster."""


class LinkGarbled(LinkError):
    """What came is not the protocol."""

    outcome = Outcome.CORRUPT


class LinkTimeout(LinkError):
    outcome = Outcome.TIMEOUT


class LinkCancelled(LinkError):
    outcome = Outcome.CANCELLED


class Patience:
    """A ``Deadline`` in the machine's time, for one operation of one thread."""

    __slots__ = ("deadline", "end_s")

    def __init__(self, deadline: Deadline, limit_s: float = float("inf")) -> None:
        self.deadline = deadline
        self.end_s = monotonic() + min(deadline.remaining_s(), limit_s)
        """On the scale of ``time.monotonic``."""

    def at_most(self, limit_s: float) -> Patience:
        """The same, but for no longer than ``limit_s`` from now."""
        return Patience(self.deadline, min(limit_s, self.end_s - monotonic()))

    def left_s(self) -> float:
        """Seconds that are left, more than 0. Raises ``LinkTimeout`` or ``LinkCancelled`` when there are none."""
        left_s = self.end_s - monotonic()
        if left_s <= 0 or self.deadline.over():
            if self.deadline.cancelled:
                raise LinkCancelled("cancelled")
            raise LinkTimeout("no answer in time")
        return left_s


class Stream(Protocol):
    """One connected socket. Not thread-safe. Every method raises ``LinkError``."""

    def send_all(self, pieces: Sequence[memoryview | bytes], patience: Patience) -> None:
        """Sends all of them, in order."""
        ...

    def receive_some(self, into: memoryview, patience: Patience) -> int:
        """At least one byte, at most all of ``into``."""
        ...

    def receive_all(self, into: Sequence[memoryview], total_bytes: int, patience: Patience) -> None:
        """Fills every buffer, in order; together they take ``total_bytes``."""
        ...

    def quiet(self) -> bool:
        """True while the peer has neither closed nor sent what nobody asked for. Does not wait."""
        ...

    def close(self) -> None: ...


def _rest(pieces: Sequence[memoryview | bytes], done_bytes: int) -> list[memoryview]:
    """``pieces`` without their first ``done_bytes``, and without empty ones."""
    rest = []
    for piece in pieces:
        if done_bytes < len(piece):
            rest.append(memoryview(piece)[done_bytes:])
        done_bytes = max(0, done_bytes - len(piece))
    return rest


def _lost(error: OSError) -> LinkLost:
    return LinkLost(error.strerror or type(error).__name__)


class PlainStream:
    """TCP or unix, in blocking mode with the kernel's timeouts.

    The timeouts stand at one slice all the time, and are set anew only when less time than that is left, so that the
    ordinary case costs one system call and one look at the clock.
    """

    def __init__(self, sock: socket.socket) -> None:
        """Takes over a connected socket."""
        sock.settimeout(None)
        self._sock = sock
        self._unix = sock.family == socket.AF_UNIX
        self._receive_wait_s = self._set_timeout(socket.SO_RCVTIMEO, _SLICE_S)
        self._send_wait_s = self._set_timeout(socket.SO_SNDTIMEO, _UNIX_SLICE_S if self._unix else _SLICE_S)
        self._writable = select.poll()
        self._writable.register(sock, select.POLLOUT)
        self._readable = select.poll()
        self._readable.register(sock, select.POLLIN | select.POLLRDHUP)

    def send_all(self, pieces: Sequence[memoryview | bytes], patience: Patience) -> None:
        left_bytes = sum(map(len, pieces))
        while left_bytes:
            flags, left_s = socket.MSG_NOSIGNAL, patience.end_s - monotonic()
            if self._unix:
                # The kernel counts a unix socket's timeout anew for each buffer that it fills. With less time than
                # all of those may take, it only takes what fits at once, and the wait is ours.
                if left_s < (left_bytes / _UNIX_BUFFER_BYTES + 2) * _UNIX_SLICE_S * 1.5:
                    flags |= socket.MSG_DONTWAIT
            elif left_s < _SLICE_S or self._send_wait_s < _SLICE_S:
                self._fit_send(patience)
            try:
                sent = self._sock.sendmsg(pieces, (), flags)
            except BlockingIOError:
                wait_s = min(_SLICE_S, patience.left_s())
                if flags & socket.MSG_DONTWAIT:
                    self._writable.poll(1000 * wait_s)
                continue
            except OSError as error:
                raise _lost(error) from error
            left_bytes -= sent
            if left_bytes:
                patience.left_s()
                pieces = _rest(pieces, sent)

    def receive_some(self, into: memoryview, patience: Patience) -> int:
        while True:
            if patience.end_s - monotonic() < _SLICE_S or self._receive_wait_s < _SLICE_S:
                self._fit_receive(patience)
            try:
                count = self._sock.recv_into(into)
            except BlockingIOError:
                patience.left_s()
                continue
            except OSError as error:
                raise _lost(error) from error
            if count == 0:
                raise LinkLost(_EOF)
            return count

    def receive_all(self, into: Sequence[memoryview], total_bytes: int, patience: Patience) -> None:
        while total_bytes:
            if patience.end_s - monotonic() < _SLICE_S or self._receive_wait_s < _SLICE_S:
                self._fit_receive(patience)
            try:
                count = self._sock.recvmsg_into(into, 0, socket.MSG_WAITALL)[0]
            except BlockingIOError:
                patience.left_s()
                continue
            except OSError as error:
                raise _lost(error) from error
            if count == 0:
                raise LinkLost(_EOF)
            total_bytes -= count
            if total_bytes:
                patience.left_s()
                into = _rest(into, count)

    def quiet(self) -> bool:
        return not self._readable.poll(0)

    def close(self) -> None:
        self._sock.close()

    # ---- the kernel's timeouts

    def _fit_receive(self, patience: Patience) -> None:
        """Sets the timeout to what time there is left, or back to a whole slice."""
        self._receive_wait_s = self._set_timeout(socket.SO_RCVTIMEO, min(_SLICE_S, patience.left_s()))

    def _fit_send(self, patience: Patience) -> None:
        self._send_wait_s = self._set_timeout(socket.SO_SNDTIMEO, min(_SLICE_S, patience.left_s()))

    def _set_timeout(self, option: int, wait_s: float) -> float:
        micros = max(1000, int(wait_s * 1e6))  # 0 would mean for ever
        self._sock.setsockopt(socket.SOL_SOCKET, option, _TIMEVAL.pack(0, micros))
        return wait_s


class TlsStream:
    """TLS over TCP. No gathering and no waiting for a whole buffer here: it goes piece by piece."""

    def __init__(self, sock: ssl.SSLSocket) -> None:
        """Takes over a socket after its handshake."""
        self._sock = sock
        self._set_s = -1.0
        self._hung_up = select.poll()
        self._hung_up.register(sock, select.POLLRDHUP)

    def _arm(self, patience: Patience) -> None:
        wait_s = min(_SLICE_S, patience.left_s())
        if wait_s != self._set_s:
            self._sock.settimeout(wait_s)
            self._set_s = wait_s

    def send_all(self, pieces: Sequence[memoryview | bytes], patience: Patience) -> None:
        for piece in pieces:
            rest = memoryview(piece)
            while len(rest):
                self._arm(patience)
                try:
                    sent = self._sock.send(rest[:_TLS_PIECE_BYTES])
                except (TimeoutError, ssl.SSLWantReadError, ssl.SSLWantWriteError):
                    continue
                except OSError as error:
                    raise _lost(error) from error
                rest = rest[sent:]

    def receive_some(self, into: memoryview, patience: Patience) -> int:
        while True:
            self._arm(patience)
            try:
                count = self._sock.recv_into(into)
            except (TimeoutError, ssl.SSLWantReadError, ssl.SSLWantWriteError):
                continue
            except OSError as error:
                raise _lost(error) from error
            if count == 0:
                raise LinkLost(_EOF)
            return count

    def receive_all(self, into: Sequence[memoryview], total_bytes: int, patience: Patience) -> None:
        for buffer in into:
            while len(buffer):
                buffer = buffer[self.receive_some(buffer, patience) :]

    def quiet(self) -> bool:
        # Bytes may well lie there: session tickets, which OpenSSL takes in with the next read.
        return self._sock.pending() == 0 and not self._hung_up.poll(0)

    def close(self) -> None:
        self._sock.close()
