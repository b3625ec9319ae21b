"""A small TCP proxy in threads that stands before a server and misbehaves as it is told, with or without TLS."""

from __future__ import annotations

import contextlib
import socket
import ssl
import threading
from collections.abc import Iterator

_PIECE_BYTES = 1 << 16


class TcpProxy:
    """Listens on a port of its own and passes bytes to and from ``upstream``, a TCP address or a unix path.

    With ``tls`` it speaks TLS to its clients and plain TCP to the server. The faults may be changed at any time, from
    any thread.
    """

    def __init__(self, upstream: tuple[str, int] | str, tls: ssl.SSLContext | None = None) -> None:
        self._upstream = upstream
        self._tls = tls
        self.delay_s = 0.0
        """Before each piece from the server."""
        self.bytes_per_s: float | None = None
        """How fast bytes come from the server."""
        self.upload_bytes_per_s: float | None = None
        """How fast bytes go to the server."""
        self.cut_after_bytes: int | None = None
        """Both sides are closed after so many bytes from the server, counted from the call of ``arm_cut``."""
        self.upload_cut_after_bytes: int | None = None
        """The same for bytes to the server, counted from the call of ``arm_upload_cut``."""
        self.black_hole = False
        """Takes everything, gives nothing, in both directions."""
        self.refuse = False
        """New connections are accepted and closed at once, those that there are go on."""
        self.accepted = 0
        self._passed_bytes = 0
        self._uploaded_bytes = 0
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

    def arm_upload_cut(self, after_bytes: int | None) -> None:
        """From now on each connection ends when the client has sent ``after_bytes`` more in total; these still
        arrive."""
        with self._lock:
            self._uploaded_bytes = 0
            self.upload_cut_after_bytes = after_bytes

    def heal(self) -> None:
        """A good link again; connections that were spoiled end."""
        self.delay_s, self.bytes_per_s, self.upload_bytes_per_s = 0.0, None, None
        self.black_hole = self.refuse = False
        self.arm_cut(None)
        self.arm_upload_cut(None)
        self.drop_all()

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
        thread = threading.Thread(target=target, args=arguments, name="proxy", daemon=True)  # type: ignore[arg-type]
        self._threads.append(thread)
        thread.start()

    def _accept(self) -> None:
        while not self._ended.is_set():
            try:
                client, _ = self._listener.accept()
            except OSError:
                return
            self.accepted += 1
            if self.refuse:
                client.close()
                continue
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
        back = threading.Thread(
            target=self._pump, args=(server, client, self._pass), name="proxy", daemon=True
        )
        back.start()
        self._pump(client, server, self._upload)
        back.join(10)
        with self._lock:
            self._sockets -= {client, server}
        client.close()
        server.close()

    def _pump(self, source: socket.socket, target: socket.socket, pass_on: object) -> None:
        try:
            while data := source.recv(_PIECE_BYTES):
                if not self.black_hole:
                    pass_on(target, data)  # type: ignore[operator]
        except OSError:
            pass
        _hang_up(source)
        _hang_up(target)

    def _pass(self, target: socket.socket, data: bytes) -> None:
        self._ended.wait(self.delay_s)
        with self._lock:
            allowed, cut = _share(self.cut_after_bytes, self._passed_bytes, len(data))
            self._passed_bytes += allowed
        self._trickle(target, data[:allowed], self.bytes_per_s)
        if cut:
            raise OSError("cut")

    def _upload(self, target: socket.socket, data: bytes) -> None:
        with self._lock:
            allowed, cut = _share(self.upload_cut_after_bytes, self._uploaded_bytes, len(data))
            self._uploaded_bytes += allowed
        self._trickle(target, data[:allowed], self.upload_bytes_per_s)
        if cut:
            raise OSError("cut")

    def _trickle(self, target: socket.socket, data: bytes, bytes_per_s: float | None) -> None:
        while data:
            if bytes_per_s is None:
                target.sendall(data)
                return
            piece, data = data[:64], data[64:]
            target.sendall(piece)
            if self._ended.wait(len(piece) / bytes_per_s):
                raise OSError("closed")


def _share(limit_bytes: int | None, passed_bytes: int, size_bytes: int) -> tuple[int, bool]:
    """How many bytes may still pass, and whether the connection ends behind them."""
    if limit_bytes is None:
        return size_bytes, False
    left = limit_bytes - passed_bytes
    return max(0, min(left, size_bytes)), left <= size_bytes


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
