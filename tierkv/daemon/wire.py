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
import threading
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
MAX_ENTRIES = 8 * MAX_ITEMS
"""Of all lists and maps of a large message together. What is long in a message is one blob: a body full of small values
would take sixty times its size in memory."""
HEAD = struct.Struct("<I")
_MOST_FDS = 4
_TIMEVAL = struct.Struct("ll")
_STEP_S = 0.005
"""Deadlines are kept as exactly as this."""
_SMALL_BYTES = 64 * 1024
"""A frame that a socket takes at once."""
_BUFFER_BYTES = 128 * 1024


class WireError(TierKVError):
    """What came is no message, or not in time."""


class Large:
    """Memory for messages that do not fit into the usual buffers, of all channels together: many that are begun and not
    ended would else take any amount. Thread-safe."""

    def __init__(self, most_bytes: int) -> None:
        self._most_bytes = self._left_bytes = most_bytes
        self._lock = threading.Lock()

    def take(self, size_bytes: int) -> None:
        """Gives back where it is negative. Raises ``WireError``."""
        with self._lock:
            if size_bytes > self._left_bytes:
                raise WireError(f"long messages of all together take more than {self._most_bytes} bytes")
            self._left_bytes -= size_bytes


class Channel:
    """One connected stream socket, in blocking mode: the kernel keeps the deadlines, which saves a system call for each
    wait. Used by one thread at a time."""

    def __init__(self, sock: socket.socket, large: Large | None = None) -> None:
        """``large``: what large messages may take, where several channels share that."""
        self.sock = sock
        self._large = large
        self._buffer = bytearray(_BUFFER_BYTES)
        self._view = memoryview(self._buffer)
        self._begin = self._end = 0
        """Between them lies what was received and not yet looked at."""
        self._pack = msgpack.Packer().pack
        self._fds: list[int] = []
        self._steps = {socket.SO_RCVTIMEO: 0, socket.SO_SNDTIMEO: 0}
        """How long the kernel waits at most, as far as it was told here; 0: for ever."""

    def send(self, message: Any, fds: Sequence[int] = (), *, by_s: float | None = None) -> None:
        """``by_s``: until when, on ``time.monotonic``; else as long as the socket waits by itself. Raises ``OSError``
        (``TimeoutError`` among them)."""
        body = self._pack(message)
        frame = HEAD.pack(len(body)) + body
        if fds:
            socket.send_fds(self.sock, [frame[: HEAD.size]], list(fds))
            frame = frame[HEAD.size :]
        if by_s is not None:
            if len(frame) > _SMALL_BYTES:
                self._send_in_pieces(frame, by_s)
                return
            self._wait_until(socket.SO_SNDTIMEO, by_s)
        try:
            self.sock.sendall(frame)
        except BlockingIOError:
            raise TimeoutError("the other side takes nothing") from None

    def _send_in_pieces(self, frame: bytes, by_s: float) -> None:
        """One deadline for all of a long frame, also where the other side takes it drop by drop."""
        self.sock.settimeout(_left_s(by_s))
        try:
            self.sock.sendall(frame)
        finally:
            self.sock.settimeout(None)

    def receive(self, *, by_s: float, with_fds: bool = False) -> Any:
        """The next message, all of which must be here by then. ``with_fds``: keeps descriptors that come with it for
        ``take_fds``. Raises ``EOFError`` at an orderly end, ``WireError`` for what is no message, ``OSError``
        (``TimeoutError`` among them)."""
        if with_fds:
            if self._begin == self._end:
                self._more(1, by_s, with_fds)
        elif self._begin == self._end and (size := self._all_at_once(by_s)):
            return decode(self._view[HEAD.size : size])
        if not self._is_whole():
            self._complete(by_s, with_fds)
        return self._next()

    def receive_whenever(self, *, within_s: float) -> Any:
        """Waits for ever until a message begins; then its rest must be here in that time."""
        if self._begin == self._end and (size := self._all_at_once(None)):
            return decode(self._view[HEAD.size : size])
        if not self._is_whole():
            self._complete(time.monotonic() + within_s, False)
        return self._next()

    def _all_at_once(self, by_s: float | None) -> int:
        """Receives into the empty buffer. How long the frame is when it is a whole one and nothing else, as nearly all
        are: it needs no book-keeping. Else 0."""
        self._wait_until(socket.SO_RCVTIMEO, by_s)
        try:
            got = self.sock.recv_into(self._buffer)
        except BlockingIOError:
            raise TimeoutError("nothing comes") from None
        if not got:
            raise EOFError("the other side has closed the connection")
        if got > HEAD.size and HEAD.unpack_from(self._buffer)[0] == got - HEAD.size:
            return got
        self._end = got
        return 0

    def something_came(self) -> bool:
        """True when a ``receive`` would not wait for a message to begin. Does not wait."""
        if self._begin != self._end:
            return True
        try:
            self.sock.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT)
        except BlockingIOError:
            return False
        except OSError:  # which the next receive will tell
            pass
        return True

    def take_fds(self) -> list[int]:
        """Descriptors that came with the messages so far; the caller's to close."""
        fds, self._fds = self._fds, []
        return fds

    def _is_whole(self) -> bool:
        """True when a message lies in the buffer."""
        there = self._end - self._begin
        if there < HEAD.size:
            return False
        (size,) = HEAD.unpack_from(self._buffer, self._begin)
        if size > MAX_BODY_BYTES:
            raise WireError(f"a message of {size} bytes: the limit is {MAX_BODY_BYTES}")
        return there >= HEAD.size + int(size)

    def _next(self) -> Any:
        """The message that lies in the buffer."""
        (size,) = HEAD.unpack_from(self._buffer, self._begin)
        begin = self._begin + HEAD.size
        self._begin = begin + size
        message = decode(self._view[begin : begin + size])
        if self._begin == self._end:
            self._begin = self._end = 0
            if len(self._buffer) > _BUFFER_BYTES:  # one large message is no reason to keep so much
                self._use(bytearray(_BUFFER_BYTES))
        return message

    def _use(self, buffer: bytearray) -> None:
        if self._large is not None:
            self._large.take(len(buffer) - len(self._buffer))
        self._buffer, self._view = buffer, memoryview(buffer)

    def _complete(self, by_s: float, with_fds: bool) -> None:
        """The rest of a message that has begun."""
        try:
            while self._end - self._begin < HEAD.size:
                self._more(HEAD.size, by_s, with_fds)
            while not self._is_whole():
                (size,) = HEAD.unpack_from(self._buffer, self._begin)
                self._more(HEAD.size + size, by_s, with_fds)
        except EOFError as error:
            raise WireError(f"{error}, in the middle of a message") from error

    def _more(self, count: int, by_s: float | None, with_fds: bool) -> None:
        """Receives something, on the way to so many bytes in the buffer."""
        self._wait_until(socket.SO_RCVTIMEO, by_s)
        target: bytearray | memoryview = self._buffer
        if self._end:
            self._make_room(count)
            target = self._view[self._end :]
        try:
            if with_fds:
                data, fds, _, _ = socket.recv_fds(self.sock, len(target), _MOST_FDS, socket.MSG_CMSG_CLOEXEC)
                self._fds += fds
                target[: len(data)] = data
                got = len(data)
            else:
                got = self.sock.recv_into(target)
        except BlockingIOError:
            raise TimeoutError("nothing comes") from None
        if not got:
            raise EOFError("the other side has closed the connection")
        self._end += got

    def _wait_until(self, option: int, by_s: float | None) -> None:
        """Tells the kernel how long the next wait may be, unless it knows: calls with the same patience ask nothing."""
        steps = 0
        if by_s is not None:
            steps = int((by_s - time.monotonic()) / _STEP_S) + 1
            if steps <= 0:
                raise TimeoutError("its time is over")
        if steps != self._steps[option]:
            wait_s = steps * _STEP_S
            whole_s = int(wait_s)
            self.sock.setsockopt(
                socket.SOL_SOCKET, option, _TIMEVAL.pack(whole_s, int((wait_s - whole_s) * 1e6))
            )
            self._steps[option] = steps

    def _make_room(self, count: int) -> None:
        """For at least one byte more. The buffer grows with what has come, not with what was announced."""
        if self._end < len(self._buffer):
            return
        there = self._end - self._begin
        enough = there <= len(self._buffer) // 2
        grown = bytearray(len(self._buffer) if enough else max(len(self._buffer), min(2 * there, count)))
        grown[:there] = self._view[self._begin : self._end]
        self._use(grown)
        self._begin, self._end = 0, there

    def close(self) -> None:
        for fd in self.take_fds():
            os.close(fd)
        self._use(bytearray(_BUFFER_BYTES))
        self.sock.close()


def _left_s(by_s: float) -> float:
    left_s = by_s - time.monotonic()
    if left_s <= 0:
        raise TimeoutError("its time is over")
    return left_s


class _Entries:
    """Of one message while it is decoded."""

    def __init__(self) -> None:
        self._left = MAX_ENTRIES

    def count(self, entries: Any) -> Any:
        """Takes a list or a map as it is. Raises ``ValueError`` when there is too much in all of them together."""
        self._left -= 1 + len(entries)
        if self._left < 0:
            raise ValueError(f"more than {MAX_ENTRIES} entries")
        return entries


def decode(body: memoryview | bytes) -> Any:
    """Raises ``WireError``."""
    count = _Entries().count if len(body) > _BUFFER_BYTES else None
    try:
        return msgpack.unpackb(
            body,
            raw=False,
            use_list=True,
            max_array_len=MAX_ITEMS,
            max_map_len=MAX_ITEMS,
            max_ext_len=0,
            list_hook=count,
            object_hook=count,
        )
    except (ValueError, msgpack.UnpackException) as error:
        raise WireError(f"this is no msgpack: {error}") from error
