"""Messages on the daemon's socket: a length, then msgpack, and perhaps file descriptors beside it.

    4 bytes   length of the body, little-endian, at most ``MAX_BODY_BYTES``
    n bytes   msgpack: a request is [verb, {argument: value}], a reply ["ok", {...}] or ["error", kind, words...]

Hashes, slots and checksums of a call stand in one blob each, not one object each. Nothing is trusted: every length has
a limit, and what is not a message ends the connection.
"""

from __future__ import annotations

import os
import socket
import struct
import time
from collections.abc import Sequence
from typing import Any

import msgpack

from tierkv.errors import TierKVError

VERSION = 1
"""Of the protocol. Another one is refused: client and daemon are updated together, or the client says so."""

MAX_BODY_BYTES = 16 * 2**20
MAX_ITEMS = 65_536
"""Entries of one list or map."""
HEAD = struct.Struct("<I")
_MOST_FDS = 4
_BUFFER_BYTES = 128 * 1024


class WireError(TierKVError):
    """What came is no message, or not in time."""


class Channel:
    """One connected stream socket. Used by one thread at a time."""

    def __init__(self, sock: socket.socket) -> None:
        self.sock = sock
        self._buffer = bytearray(_BUFFER_BYTES)
        self._begin = self._end = 0
        """Between them lies what was received and not yet looked at."""
        self._fds: list[int] = []

    def send(self, message: Any, fds: Sequence[int] = (), *, by_s: float | None = None) -> None:
        """``by_s``: until when, on ``time.monotonic``; else as long as the socket's timeout says. Raises ``OSError``
        (``TimeoutError`` among them)."""
        body = msgpack.packb(message)
        frame = HEAD.pack(len(body)) + body
        if by_s is not None:
            self.sock.settimeout(_left_s(by_s))
        if fds:
            socket.send_fds(self.sock, [frame[: HEAD.size]], list(fds))
            frame = frame[HEAD.size :]
        self.sock.sendall(frame)  # its timeout is one for all of the frame

    def receive(self, *, by_s: float, with_fds: bool = False) -> Any:
        """The next message, all of which must be here by then. ``with_fds``: keeps descriptors that come with it for
        ``take_fds``. Raises ``EOFError`` at an orderly end, ``WireError`` for what is no message, ``OSError``
        (``TimeoutError`` among them)."""
        self._have(1, by_s, with_fds)
        return self._rest(by_s, with_fds)

    def receive_whenever(self, *, within_s: float) -> Any:
        """Waits as the socket's timeout says until a message begins; then its rest must be here in that time."""
        if self._begin == self._end:
            self._have(1, None, False)
        before_s = self.sock.gettimeout()
        try:
            return self._rest(time.monotonic() + within_s, False)
        finally:
            if self.sock.gettimeout() != before_s:
                self.sock.settimeout(before_s)

    def take_fds(self) -> list[int]:
        """Descriptors that came with the messages so far; the caller's to close."""
        fds, self._fds = self._fds, []
        return fds

    def _rest(self, by_s: float, with_fds: bool) -> Any:
        """The message that has begun."""
        try:
            self._have(HEAD.size, by_s, with_fds)
            (size,) = HEAD.unpack_from(self._buffer, self._begin)
            if size > MAX_BODY_BYTES:
                raise WireError(f"a message of {size} bytes: the limit is {MAX_BODY_BYTES}")
            self._have(HEAD.size + size, by_s, with_fds)
        except EOFError as error:
            raise WireError(f"{error}, in the middle of a message") from error
        begin = self._begin + HEAD.size
        self._begin = begin + size
        message = decode(memoryview(self._buffer)[begin : begin + size])
        if self._begin == self._end and len(self._buffer) > _BUFFER_BYTES:
            self._buffer = bytearray(_BUFFER_BYTES)  # one large message is no reason to keep so much
            self._begin = self._end = 0
        return message

    def _have(self, count: int, by_s: float | None, with_fds: bool) -> None:
        """Receives until so many bytes lie in the buffer."""
        while self._end - self._begin < count:
            self._make_room(count)
            if by_s is not None:
                self.sock.settimeout(_left_s(by_s))
            target = memoryview(self._buffer)[self._end :]
            if with_fds:
                data, fds, _, _ = socket.recv_fds(self.sock, len(target), _MOST_FDS)
                self._fds += fds
                target[: len(data)] = data
                got = len(data)
            else:
                got = self.sock.recv_into(target)
            if not got:
                raise EOFError("the other side has closed the connection")
            self._end += got

    def _make_room(self, count: int) -> None:
        """For at least one byte more. The buffer grows with what has come, not with what was announced."""
        if self._begin == self._end:
            self._begin = self._end = 0
        if self._end < len(self._buffer):
            return
        there = self._end - self._begin
        enough = there <= len(self._buffer) // 2
        grown = bytearray(len(self._buffer) if enough else max(len(self._buffer), min(2 * there, count)))
        grown[:there] = memoryview(self._buffer)[self._begin : self._end]
        self._buffer = grown
        self._begin, self._end = 0, there

    def close(self) -> None:
        for fd in self.take_fds():
            os.close(fd)
        self.sock.close()


def _left_s(by_s: float) -> float:
    left_s = by_s - time.monotonic()
    if left_s <= 0:
        raise TimeoutError("its time is over")
    return left_s


def decode(body: memoryview | bytes) -> Any:
    """Raises ``WireError``."""
    try:
        return msgpack.unpackb(
            body,
            raw=False,
            use_list=True,
            max_array_len=MAX_ITEMS,
            max_map_len=MAX_ITEMS,
            max_ext_len=0,
        )
    except (ValueError, msgpack.UnpackException) as error:
        raise WireError(f"this is no msgpack: {error}") from error
