"""The server's protocol (RESP 2) on a ``Stream``: commands out, replies in, and block values straight into buffers.

Strict: whatever is not exactly the protocol raises ``LinkGarbled``, and then nobody may use the connection again. At
most ``_PEEK_BYTES`` of a block pass through the connection's own buffer; all others go from the kernel into the
caller's memory.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from tierkv.frame import HEADER_BYTES
from tierkv.tiers.valkey_stream import LinkGarbled, LinkLost, Patience, Stream

CRLF = b"\r\n"
_OK = b"+OK\r\n"

_BUFFER_BYTES = 16 * 1024
_LINES_BYTES = 512
"""Read ahead where short replies are expected."""
_PEEK_BYTES = 32
"""Read ahead where a block's length is expected: enough for the line, little to copy when the block follows."""
_MAX_LINE_BYTES = 8 * 1024
_MAX_BULK_BYTES = 4 * 1024 * 1024
_MAX_ELEMENTS = 65_536
_MAX_DEPTH = 6
MOST_DIGITS = 19
"""Of a number. Python refuses to read one of thousands, which a server may well send."""
_DRAIN_BYTES = 1024 * 1024
"""A value that does not fit is read to its end up to this length; beyond, a new connection is cheaper."""

_DOLLAR, _ZERO = b"$0"
_NO_END = "a string does not end where its length says"


@dataclass(frozen=True, slots=True)
class ServerError:
    """An error that the server answered with. The connection is in step."""

    code: str
    text: str

    def __str__(self) -> str:
        # The text of a coded error may hold a user's name (NOPERM does).
        return f"ERR {self.text[:120]}" if self.code == "ERR" else self.code


Reply = int | bytes | str | None | ServerError | list["Reply"]
"""``str`` is a status ("OK"), ``bytes`` a string, ``None`` the null string."""


@dataclass(frozen=True, slots=True)
class Misfit:
    """A value that is no block: shorter than a header or longer than the buffer. The connection is in step."""

    value_bytes: int


def command(*words: bytes) -> bytes:
    """One command as the server reads it."""
    return b"*%d\r\n" % len(words) + b"".join(b"$%d\r\n%b\r\n" % (len(word), word) for word in words)


class Connection:
    """Replies of one stream. Not thread-safe; every method may raise ``LinkError``, and then the stream is done."""

    def __init__(self, stream: Stream) -> None:
        self.stream = stream
        self._bytes = bytearray(_BUFFER_BYTES)
        self._buffer = memoryview(self._bytes)
        self._peek = self._buffer[:_PEEK_BYTES]
        self._at = 0
        self._end = 0
        """What was read ahead lies between these two."""
        self._crlf = memoryview(bytearray(2))

    def in_step(self) -> bool:
        """True while nothing is owed and nothing has come unasked."""
        return self._at == self._end and self.stream.quiet()

    def ask(self, patience: Patience, *words: bytes) -> Reply:
        """One command, one reply."""
        self.stream.send_all([command(*words)], patience)
        return self.reply(patience)

    def reply(self, patience: Patience) -> Reply:
        """The next reply, of any type."""
        return self._value(patience, _BUFFER_BYTES, _MAX_DEPTH)

    def ok(self, patience: Patience) -> ServerError | None:
        """The next reply, which must be OK or an error."""
        if self._at == self._end:
            self._at = 0
            self._end = self.stream.receive_some(self._buffer[:_LINES_BYTES], patience)
        if self._bytes.startswith(_OK, self._at, self._end):
            self._at += len(_OK)
            return None
        reply = self.reply(patience)
        if reply == "OK":  # cut in two by the network
            return None
        if isinstance(reply, ServerError):
            return reply
        raise LinkGarbled("OK was expected")

    def block(
        self, header: memoryview, payload: memoryview, patience: Patience
    ) -> int | Misfit | ServerError | None:
        """The next reply, which must be a string: its first 512 bytes go to ``header``, the others to ``payload``.

        Gives the length of the payload, ``None`` for the null string, ``Misfit`` when it cannot be a block.
        """
        # The ordinary case in one piece: this is where the CPU of a read is spent. Whatever is in any way unusual
        # goes through ``_any_block``.
        if self._at != self._end:
            return self._any_block(header, payload, patience)
        peek, raw = self._peek, self._bytes
        self._at, self._end = 0, self.stream.receive_some(peek, patience)
        cut = raw.find(CRLF, 0, self._end)
        digits = raw[1:cut]
        if cut < 0 or raw[0] != _DOLLAR or raw[1] == _ZERO or not digits.isdigit():
            return self._any_block(header, payload, patience)
        value_bytes, ready_bytes = int(digits), self._end - cut - 2
        if not HEADER_BYTES <= value_bytes <= HEADER_BYTES + len(payload):
            return self._any_block(header, payload, patience)
        header[:ready_bytes] = peek[cut + 2 : self._end]
        self._at = self._end
        self.stream.receive_all(
            (header[ready_bytes:HEADER_BYTES], payload[: value_bytes - HEADER_BYTES], self._crlf),
            value_bytes - ready_bytes + 2,
            patience,
        )
        if self._crlf != CRLF:
            raise LinkGarbled(_NO_END)
        return value_bytes - HEADER_BYTES

    def close(self) -> None:
        self.stream.close()

    # ---- the pieces of a reply

    def _any_block(
        self, header: memoryview, payload: memoryview, patience: Patience
    ) -> int | Misfit | ServerError | None:
        line = self._line(patience, _PEEK_BYTES)
        if line[:1] == b"-":
            return _server_error(line)
        if line[:1] != b"$":
            raise LinkGarbled("a string was expected")
        value_bytes = _integer(line[1:])
        if value_bytes == -1:
            return None
        payload_bytes = value_bytes - HEADER_BYTES
        if not 0 <= payload_bytes <= len(payload):
            self._skip(value_bytes, patience)
            return Misfit(value_bytes)
        self._string_into([header[:HEADER_BYTES], payload[:payload_bytes]], patience)
        return payload_bytes

    def _value(self, patience: Patience, ahead_bytes: int, depth: int) -> Reply:
        line = self._line(patience, ahead_bytes)
        kind, rest = line[:1], line[1:]
        if kind == b"+":
            return rest.decode("utf-8", "replace")
        if kind == b"-":
            return _server_error(line)
        if kind == b":":
            return _integer(rest)
        count = _integer(rest)
        if kind == b"$":
            if count == -1:
                return None
            if not 0 <= count <= _MAX_BULK_BYTES:
                raise LinkGarbled(f"a string of {count} bytes")
            string = bytearray(count)
            self._string_into([memoryview(string)], patience)
            return bytes(string)
        if kind == b"*":
            if count == -1:
                return None
            if not 0 <= count <= _MAX_ELEMENTS or depth == 0:
                raise LinkGarbled(f"an array of {count} elements")
            return [self._value(patience, ahead_bytes, depth - 1) for _ in range(count)]
        raise LinkGarbled("an unknown type of reply")

    def _line(self, patience: Patience, ahead_bytes: int) -> bytes:
        """Up to the next CRLF, without it. Reads at most ``ahead_bytes`` at a time."""
        if self._at == self._end:
            self._at = 0
            self._end = self.stream.receive_some(self._buffer[:ahead_bytes], patience)
        while True:
            cut = self._bytes.find(CRLF, self._at, self._end)
            if cut >= 0:
                line = bytes(self._buffer[self._at : cut])
                self._at = cut + 2
                return line
            have_bytes = self._end - self._at
            if have_bytes > _MAX_LINE_BYTES:
                raise LinkGarbled("a line without an end")
            patience.left_s()
            self._buffer[:have_bytes] = bytes(self._buffer[self._at : self._end])
            self._at, self._end = 0, have_bytes
            room = self._buffer[have_bytes : have_bytes + ahead_bytes]
            self._end += self.stream.receive_some(room, patience)

    def _string_into(self, into: Sequence[memoryview], patience: Patience) -> None:
        """Fills ``into`` with the string that follows, and checks that it ends there."""
        rest = [left for view in [*into, self._crlf] if (left := view[self._take(view) :])]
        self.stream.receive_all(rest, sum(map(len, rest)), patience)
        if self._crlf != CRLF:
            raise LinkGarbled(_NO_END)

    def _take(self, view: memoryview) -> int:
        """Fills the front of ``view`` with what was read ahead; gives how much that is."""
        count = min(self._end - self._at, len(view))
        view[:count] = self._buffer[self._at : self._at + count]
        self._at += count
        return count

    def _skip(self, value_bytes: int, patience: Patience) -> None:
        """Reads a string that is no block to its end, unless that is far."""
        if not 0 <= value_bytes <= _DRAIN_BYTES:
            raise LinkGarbled(f"a value of {value_bytes} bytes")
        sink, left = memoryview(bytearray(_BUFFER_BYTES)), value_bytes
        while left > 0:
            chunk = sink[:left]
            rest = chunk[self._take(chunk) :]
            self.stream.receive_all([rest], len(rest), patience)
            left -= len(chunk)
        self._string_into([], patience)


def _integer(digits: bytes) -> int:
    """The protocol's integers only: no blanks, underscores, plus signs or leading zeros."""
    magnitude = digits[1:] if digits[:1] == b"-" else digits
    if not magnitude.isdigit() or len(magnitude) > MOST_DIGITS or (magnitude[:1] == b"0" and digits != b"0"):
        raise LinkGarbled("a number was expected")
    return int(digits)


def _server_error(line: bytes) -> ServerError:
    code, _, text = line[1:].decode("utf-8", "replace").partition(" ")
    if not (code.isascii() and code.isupper() and len(code) <= 32):
        return ServerError("ERR", f"{code} {text}")
    if code == "ERR" and text.startswith("Protocol error"):
        # It is about to close. One cause that is no fault of ours: its limit for strings was lowered since we asked.
        raise LinkLost(text[:80])
    return ServerError(code, text)
