"""The limit of a round trip: `python -m bench.limit_echo PATH`, a blocking server on a unix socket that does nothing.

A request is 8 bytes (how many more there are, how many are to come back) and those; the answer is the bytes asked for.
"""

from __future__ import annotations

import socket
import struct
import sys
import threading

HEAD = struct.Struct("<II")


def exactly(sock: socket.socket, view: memoryview) -> bool:
    while view:
        count = sock.recv_into(view)
        if not count:
            return False
        view = view[count:]
    return True


def ask(sock: socket.socket, sent: bytes, buffer: bytearray, answer_bytes: int) -> None:
    """One round trip."""
    sock.sendall(HEAD.pack(len(sent), answer_bytes) + sent)
    if not exactly(sock, memoryview(buffer)[:answer_bytes]):
        raise RuntimeError("the echo has ended")


def _serve(sock: socket.socket) -> None:
    buffer = bytearray(1 << 20)
    answer = bytes(1 << 20)
    head = bytearray(HEAD.size)
    while exactly(sock, memoryview(head)):
        size, answer_bytes = HEAD.unpack(head)
        if not exactly(sock, memoryview(buffer)[:size]):
            return
        sock.sendall(answer[:answer_bytes])


def main(path: str) -> None:
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    listener.bind(path)
    listener.listen()
    while True:
        sock, _ = listener.accept()
        threading.Thread(target=_serve, args=(sock,), daemon=True).start()


if __name__ == "__main__":
    main(sys.argv[1])
