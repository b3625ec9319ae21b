"""The limit of a Valkey client: send the command, receive straight into the block, checksum it.

No deadlines, no error handling, no parsing: the length of every reply is known beforehand. Values look like the
store's: a frame header of 512 bytes, then the block. Commands go out in batches, so that both sides pipeline alike.
"""

from __future__ import annotations

import socket
from collections.abc import Sequence

import xxhash

HEADER_BYTES = 512
END = b"\r\n"
OK = b"+OK\r\n"


class BareClient:
    """One connection to the server. Not thread-safe."""

    def __init__(self, connection: socket.socket, block_bytes: int) -> None:
        self._socket = connection
        self._length = b"$%d\r\n" % (HEADER_BYTES + block_bytes)
        self._front = bytearray(len(self._length) + HEADER_BYTES)
        self._end = bytearray(len(END))

    def get(self, keys: Sequence[bytes], payloads: Sequence[memoryview]) -> None:
        """One pipelined batch of GETs, each received into its buffer and checksummed."""
        self._socket.sendall(b"".join(b"*2\r\n$3\r\nGET\r\n$%d\r\n%b\r\n" % (len(key), key) for key in keys))
        receive, checksum, all_of_it = self._socket.recv_into, xxhash.xxh3_64_intdigest, socket.MSG_WAITALL
        front, end = self._front, self._end
        for payload in payloads:
            received = (
                receive(front, 0, all_of_it) + receive(payload, 0, all_of_it) + receive(end, 0, all_of_it)
            )
            if received != len(front) + len(payload) + len(END) or not front.startswith(self._length):
                raise RuntimeError(f"the bare client got {bytes(front[:32])!r} and {received} bytes")
            checksum(payload)

    def set(
        self, keys: Sequence[bytes], headers: Sequence[memoryview], payloads: Sequence[memoryview]
    ) -> None:
        """One pipelined batch of SETs, each checksummed and sent from where it lies."""
        send, checksum, length = self._socket.sendmsg, xxhash.xxh3_64_intdigest, self._length
        for key, header, payload in zip(keys, headers, payloads, strict=True):
            checksum(payload)
            command = b"*3\r\n$3\r\nSET\r\n$%d\r\n%b\r\n%b" % (len(key), key, length)
            parts: list[bytes | memoryview] = [command, header[:HEADER_BYTES], payload, END]
            if send(parts) != sum(map(len, parts)):
                raise RuntimeError("the bare client could not send a whole command at once")
        replies = bytearray(len(OK) * len(keys))
        self._socket.recv_into(replies, 0, socket.MSG_WAITALL)
        if replies != OK * len(keys):
            raise RuntimeError(f"the bare client got {bytes(replies[:64])!r} as reply to its SETs")
