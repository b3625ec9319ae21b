"""Makes one connection: connect, TLS, and the first words with the server."""

from __future__ import annotations

import socket
import ssl
from dataclasses import dataclass

from tierkv.tiers.valkey_resolve import Resolver, SocketAddress
from tierkv.tiers.valkey_resp import MOST_DIGITS, Connection, Reply, ServerError, command
from tierkv.tiers.valkey_stream import (
    LinkError,
    LinkGarbled,
    LinkLost,
    LinkRefused,
    LinkTimeout,
    Patience,
    PlainStream,
    Stream,
    TlsStream,
)
from tierkv.tiers.valkey_url import Address, TlsFiles, tls_context

DEFAULT_LIMIT_BYTES = 512 * 1024 * 1024
"""The server's own default of ``proto-max-bulk-len``, for servers that do not let us ask."""

_REFUSALS = frozenset({"NOAUTH", "WRONGPASS", "NOPERM", "DENIED", "NOPROTO"})


@dataclass(frozen=True, slots=True)
class Greeting:
    """What a server said of itself when a connection was made."""

    version: str
    read_only: bool
    limit_bytes: int
    """The longest string that it takes."""


class Dialer:
    """Connects to one server. Thread-safe. Raises ``ConfigError`` when a TLS file cannot be used."""

    def __init__(self, address: Address, tls_files: TlsFiles) -> None:
        self._address = address
        self._tls = tls_context(tls_files) if address.tls else None
        self._server_name = tls_files.server_name or address.host
        self._resolver = None if address.path else Resolver(address.host, address.port)
        self._first_words = _first_words(address)

    def dial(self, patience: Patience) -> tuple[Connection, Greeting]:
        """A connection that may be used at once. Raises ``LinkError``."""
        connection = Connection(self._connect(patience))
        greeted = False
        try:
            greeting = self._greet(connection, patience)
            greeted = True
        except LinkGarbled as error:
            raise LinkRefused("what answers there is no Valkey server") from error
        finally:
            if not greeted:
                connection.close()
        return connection, greeting

    # ---- connect

    def _connect(self, patience: Patience) -> Stream:
        if self._resolver is None:
            return PlainStream(_connected((socket.AF_UNIX, self._address.path), patience))
        last: LinkError = LinkLost("the host has no address")
        places = self._resolver.addresses(patience)
        for i, where in enumerate(places):
            share = patience.at_most(patience.left_s() / (len(places) - i))
            try:
                return self._secured(_connected(where, share), share)
            except (LinkLost, LinkTimeout) as error:
                last = error
        self._resolver.forget()
        raise last

    def _secured(self, sock: socket.socket, patience: Patience) -> Stream:
        if self._tls is None:
            return PlainStream(sock)
        try:
            secured = self._tls.wrap_socket(
                sock, server_hostname=self._server_name, do_handshake_on_connect=False
            )
        except (OSError, ValueError) as error:
            sock.close()
            raise LinkRefused(f"TLS cannot start: {error}") from error
        try:
            secured.settimeout(patience.left_s())
            secured.do_handshake()
        except ssl.SSLCertVerificationError as error:
            secured.close()
            raise LinkRefused(
                f"TLS: the server's certificate is not accepted: {error.verify_message}"
            ) from error
        except TimeoutError as error:
            secured.close()
            raise LinkTimeout("no TLS handshake in time") from error
        except OSError as error:
            secured.close()
            raise LinkLost(f"TLS: {error.strerror or error}") from error
        except LinkError:
            secured.close()
            raise
        return TlsStream(secured)

    # ---- the first words

    def _greet(self, connection: Connection, patience: Patience) -> Greeting:
        connection.stream.send_all([self._first_words], patience)
        hello = connection.reply(patience)
        if isinstance(hello, ServerError):
            raise self._refusal(hello)
        facts = _pairs(hello)
        mode = facts.get(b"mode")
        if not isinstance(mode, bytes):
            raise LinkGarbled("HELLO was not answered")
        if mode == b"sentinel":
            raise LinkRefused("this is a sentinel; name the server itself")
        if mode != b"standalone":
            raise LinkRefused(
                "the server is part of a cluster; clusters are not supported yet: name a single server"
            )
        if self._address.database:
            selected = connection.reply(patience)
            if isinstance(selected, ServerError):
                raise LinkRefused(f"database {self._address.database} cannot be used: {selected.code}")
        limit = _pairs(connection.reply(patience)).get(b"proto-max-bulk-len")
        return Greeting(
            version=_shown(facts.get(b"version")),
            read_only=facts.get(b"role") in (b"replica", b"slave"),
            limit_bytes=_size(limit),
        )

    @staticmethod
    def _refusal(error: ServerError) -> LinkError:
        """Only the code is told: the text may repeat a user name."""
        if error.code == "ERR":
            # Too many clients, or a server from before HELLO. Neither text repeats what we sent.
            if "max number of clients" in error.text:
                return LinkLost("the server has too many clients")
            return LinkRefused("the server does not know HELLO; it must be Valkey 7.2 or Redis 6 at least")
        if error.code in _REFUSALS:
            return LinkRefused(f"the server does not let us in: {error.code}; check user and password")
        return LinkLost(f"the server answers {error.code}")


def _first_words(address: Address) -> bytes:
    hello = [b"HELLO", b"2"]
    if address.password:
        hello += [b"AUTH", (address.user or "default").encode(), address.password.encode()]
    words = command(*hello, b"SETNAME", b"tierkv")
    if address.database:
        words += command(b"SELECT", b"%d" % address.database)
    return words + command(b"CONFIG", b"GET", b"proto-max-bulk-len")


def _pairs(reply: Reply) -> dict[bytes, Reply]:
    if not isinstance(reply, list):
        return {}
    return {
        name: value for name, value in zip(reply[::2], reply[1::2], strict=False) if isinstance(name, bytes)
    }


def _size(value: Reply) -> int:
    """What a server says, where it is a size that there can be."""
    if isinstance(value, bytes) and value.isdigit() and len(value) <= MOST_DIGITS:
        return int(value)
    return DEFAULT_LIMIT_BYTES


def _shown(value: Reply) -> str:
    return value.decode("utf-8", "replace")[:32] if isinstance(value, bytes) else ""


def _connected(where: SocketAddress, patience: Patience) -> socket.socket:
    family, address = where
    sock = socket.socket(family, socket.SOCK_STREAM)
    try:
        sock.settimeout(patience.left_s())
        sock.connect(address)
        if family != socket.AF_UNIX:
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    except TimeoutError as error:
        sock.close()
        raise LinkTimeout("no connection in time") from error
    except OSError as error:
        sock.close()
        raise LinkLost(error.strerror or type(error).__name__) from error
    except LinkError:
        sock.close()
        raise
    return sock
