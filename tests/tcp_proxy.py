"""A small TCP proxy in threads that stands before a server and misbehaves as it is told, with or without TLS."""

from __future__ import annotations

import contextlib
import socket
import ssl
import threading
from collections.abc import Iterator


class TcpProxy:
    """Listens on a port of its own and passes bytes to and from ``upstream``, a TCP address or a unix path.

    The faults may be changed at any time; they concern what goes from the server to the client, except ``black_hole``,
    which concerns both.
    """

    def __init__(self, upstream: tuple[str, int] | str, tls: ssl.SSLContext | None = None) -> None:
        self._upstream = upstream
        self._tls = tls
        self.delay_s = 0.0
        """Before each piece."""
        self.bytes_per_s: float | None = None
        self.cut_after_bytes: int | None = None
        """Both sides are closed after so many bytes, counted from the call of ``arm_cut``."""
        self.black_hole = False
        """Takes everything, gives nothing."""
        self.accepted = 0
        self._passed_bytes = 0
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._lock = threading.Lock()
        self._sockets: set[socket.socket] = set()
        self._threads: list[threading.Thread] = []
        self._ended = threading.Event()
        self._spawn(self._accept)

    @property
    def port(self) -> int:
        port: int = self._listener.getsockname()[1]
        return port

    def arm_cut(self, after_bytes: int | None) -> None:
        """From now on each connection ends when the server has sent ``after_bytes`` more in total."""
        with self._lock:
            self._passed_bytes = 0
            self.cut_after_bytes = after_bytes

    def drop_all(self) -> None:
        """Ends all connections that there are."""
        with self._lock:
            sockets, self._sockets = self._sockets, set()
        for each in sockets:
            _hang_up(each)

    def close(self) -> None:
        self._ended.set()
        _hang_up(self._listener)
        self.drop_all()
        for thread in self._threads:
            thread.join(10)
            assert not thread.is_alive(), "a thread of the proxy hangs"
        self._listener.close()

    def _spawn(self, target: object, *arguments: object) -> None:
        thread = threading.Thread(target=target, args=arguments, daemon=True)  # type: ignore[arg-type]
        self._threads.append(thread)
        thread.start()

    def _accept(self) -> None:
        while not self._ended.is_set():
            try:
                client, _ = self._listener.accept()
            except OSError:
                return
            self.accepted += 1
            self._spawn(self._serve, client)

    def _serve(self, client: socket.socket) -> None:
        try:
            if self._tls is not None:
                client.settimeout(5)
                client = self._tls.wrap_socket(client, server_side=True)
                client.settimeout(None)
            if isinstance(self._upstream, str):
                server = socket.socket(socket.AF_UNIX)
                server.connect(self._upstream)
            else:
                server = socket.create_connection(self._upstream)
        except OSError:
            client.close()
            return
        with self._lock:
            self._sockets |= {client, server}
        back = threading.Thread(target=self._pump, args=(server, client, True), daemon=True)
        back.start()
        self._pump(client, server, False)
        back.join(10)
        with self._lock:
            self._sockets -= {client, server}
        client.close()
        server.close()

    def _pump(self, source: socket.socket, target: socket.socket, faulty: bool) -> None:
        try:
            while data := source.recv(1 << 16):
                if self.black_hole:
                    continue
                if faulty:
                    self._pass(target, data)
                else:
                    target.sendall(data)
        except OSError:
            pass
        _hang_up(source)
        _hang_up(target)

    def _pass(self, target: socket.socket, data: bytes) -> None:
        self._ended.wait(self.delay_s)
        with self._lock:
            left = len(data) if self.cut_after_bytes is None else self.cut_after_bytes - self._passed_bytes
            allowed = max(0, min(left, len(data)))
            self._passed_bytes += allowed
        self._trickle(target, data[:allowed])
        if left < len(data) or (self.cut_after_bytes is not None and left == len(data)):
            raise OSError("cut")

    def _trickle(self, target: socket.socket, data: bytes) -> None:
        while data:
            if self.bytes_per_s is None:
                target.sendall(data)
                return
            piece, data = data[:64], data[64:]
            target.sendall(piece)
            if self._ended.wait(len(piece) / self.bytes_per_s):
                raise OSError("closed")


def _hang_up(each: socket.socket) -> None:
    """Wakes whoever waits on it."""
    with contextlib.suppress(OSError, ValueError):
        each.shutdown(socket.SHUT_RDWR)


@contextlib.contextmanager
def proxy_before(upstream: tuple[str, int] | str, tls: ssl.SSLContext | None = None) -> Iterator[TcpProxy]:
    proxy = TcpProxy(upstream, tls)
    try:
        yield proxy
    finally:
        proxy.close()
