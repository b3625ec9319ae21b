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
import time
from collections.abc import Sequence
from typing import Protocol

from tierkv.clock import Deadline
from tierkv.tier import Outcome

_SLICE_S = 0.1
"""The longest that one system call waits; a cancel is seen at least that often."""
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

    __slots__ = ("_deadline", "_end_s")

    def __init__(self, deadline: Deadline, limit_s: float = float("inf")) -> None:
        self._deadline = deadline
        self._end_s = time.monotonic() + min(deadline.remaining_s(), limit_s)

    def at_most(self, limit_s: float) -> Patience:
        """The same, but for no longer than ``limit_s`` from now."""
        return Patience(self._deadline, min(limit_s, self._end_s - time.monotonic()))

    def left_s(self) -> float:
        """Seconds that are left, more than 0. Raises ``LinkTimeout`` or ``LinkCancelled`` when there are none."""
        left_s = self._end_s - time.monotonic()
        if left_s <= 0 or self._deadline.over():
            if self._deadline.cancelled:
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

    def receive_all(self, into: Sequence[memoryview], patience: Patience) -> None:
        """Fills every buffer, in order."""
        ...

    def quiet(self) -> bool:
        """True while the peer has neither closed nor sent what nobody asked for. Does not wait."""
        ...

    def close(self) -> None: ...


def _front_cut(pieces: list[memoryview], count_bytes: int) -> list[memoryview]:
    """``pieces`` without their first ``count_bytes``."""
    for i, piece in enumerate(pieces):
        if count_bytes < len(piece):
            return [piece[count_bytes:], *pieces[i + 1 :]]
        count_bytes -= len(piece)
    return []


def _lost(error: OSError) -> LinkLost:
    return LinkLost(error.strerror or type(error).__name__)


class PlainStream:
    """TCP or unix, in blocking mode with the kernel's timeouts."""

    def __init__(self, sock: socket.socket) -> None:
        """Takes over a connected socket."""
        sock.settimeout(None)
        self._sock = sock
        self._set = {socket.SO_RCVTIMEO: 0.0, socket.SO_SNDTIMEO: 0.0}
        # A unix socket counts the time anew for each piece that it takes, so there a write only ever takes what fits.
        self._send_flags = socket.MSG_NOSIGNAL
        self._waits_itself = sock.family != socket.AF_UNIX
        if not self._waits_itself:
            self._send_flags |= socket.MSG_DONTWAIT
        self._writable = select.poll()
        self._writable.register(sock, select.POLLOUT)
        self._readable = select.poll()
        self._readable.register(sock, select.POLLIN | select.POLLRDHUP)

    def _arm(self, option: int, patience: Patience) -> float:
        wait_s = min(_SLICE_S, patience.left_s())
        if self._set[option] != wait_s:
            micros = max(1000, int(wait_s * 1e6))  # 0 would mean for ever
            self._sock.setsockopt(socket.SOL_SOCKET, option, _TIMEVAL.pack(0, micros))
            self._set[option] = wait_s
        return wait_s

    def send_all(self, pieces: Sequence[memoryview | bytes], patience: Patience) -> None:
        rest: list[memoryview] = [memoryview(piece) for piece in pieces]
        while rest:
            wait_s = self._arm(socket.SO_SNDTIMEO, patience) if self._waits_itself else patience.left_s()
            try:
                sent = self._sock.sendmsg(rest, (), self._send_flags)
            except BlockingIOError:
                if not self._waits_itself:
                    self._writable.poll(min(_SLICE_S, wait_s) * 1000)
                continue
            except OSError as error:
                raise _lost(error) from error
            rest = _front_cut(rest, sent)

    def receive_some(self, into: memoryview, patience: Patience) -> int:
        while True:
            self._arm(socket.SO_RCVTIMEO, patience)
            try:
                count = self._sock.recv_into(into)
            except BlockingIOError:
                continue
            except OSError as error:
                raise _lost(error) from error
            if count == 0:
                raise LinkLost(_EOF)
            return count

    def receive_all(self, into: Sequence[memoryview], patience: Patience) -> None:
        rest = [buffer for buffer in into if len(buffer)]
        while rest:
            self._arm(socket.SO_RCVTIMEO, patience)
            try:
                count = self._sock.recvmsg_into(rest, 0, socket.MSG_WAITALL)[0]
            except BlockingIOError:
                continue
            except OSError as error:
                raise _lost(error) from error
            if count == 0:
                raise LinkLost(_EOF)
            rest = _front_cut(rest, count)

    def quiet(self) -> bool:
        return not self._readable.poll(0)

    def close(self) -> None:
        self._sock.close()


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

    def receive_all(self, into: Sequence[memoryview], patience: Patience) -> None:
        for buffer in into:
            while len(buffer):
                buffer = buffer[self.receive_some(buffer, patience) :]

    def quiet(self) -> bool:
        # Bytes may well lie there: session tickets, which OpenSSL takes in with the next read.
        return self._sock.pending() == 0 and not self._hung_up.poll(0)

    def close(self) -> None:
        self._sock.close()
