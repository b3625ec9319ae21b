"""Where a Valkey server is, and how to prove who we are, read from one address.

    valkey://[user:password@]host[:port][/db]     TCP
    valkeys://[user:password@]host[:port][/db]    TCP with TLS
    unix://[user:password@]/path                  a unix socket
    embedded                                      a private server that this process starts

User and password may contain anything when percent-encoded. They are never shown: not in ``str``, not in ``repr``,
not in the errors of this module.
"""

from __future__ import annotations

import os
import ssl
from dataclasses import dataclass, field
from urllib.parse import unquote

from tierkv.errors import ConfigError

EMBEDDED = "embedded"
DEFAULT_PORT = 6379
UNIX_PATH_BYTES = 107
"""What fits into ``sockaddr_un`` beside the closing zero."""

_FORMS = "use valkey://[user:password@]host:port[/db], valkeys://..., unix:///path or 'embedded'"
_KEY = "valkey.url"


@dataclass(frozen=True, slots=True)
class Address:
    """One server. ``str()`` of it is safe to show."""

    host: str = ""
    port: int = DEFAULT_PORT
    path: str = ""
    """A unix socket; then there is no host."""
    tls: bool = False
    database: int = 0
    user: str = field(default="", repr=False)
    password: str = field(default="", repr=False)

    def __str__(self) -> str:
        if self.path:
            return f"unix://{self.path}"
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{'valkeys' if self.tls else 'valkey'}://{host}:{self.port}/{self.database}"


@dataclass(frozen=True, slots=True)
class TlsFiles:
    """Files in PEM form for ``valkeys://``. An empty path: the system's CAs, no client certificate."""

    ca_file: str = ""
    client_cert_file: str = ""
    client_key_file: str = ""
    server_name: str = ""
    """The name that the server's certificate must carry; empty: the host of the address."""


def parse_address(text: str) -> Address:
    """The address that ``text`` spells. Raises ``ConfigError``, which never shows user or password."""
    scheme, mark, rest = text.partition("://")
    if not mark:
        raise ConfigError(_KEY, redacted(text), _FORMS)
    if "cluster" in scheme or "sentinel" in scheme or "," in rest.rpartition("@")[2]:
        raise ConfigError(_KEY, redacted(text), "clusters are not supported yet; name one server")
    if scheme not in ("valkey", "valkeys", "unix"):
        raise ConfigError(_KEY, redacted(text), _FORMS)
    credentials, _, place = rest.rpartition("@")
    user, _, password = credentials.partition(":")
    user, password = unquote(user), unquote(password)
    if user and not password:
        raise ConfigError(_KEY, redacted(text), "a user needs a password: user:password@")
    if "?" in place or "#" in place:
        raise ConfigError(
            _KEY, redacted(text), "an address takes no ?query or #fragment; options have their own keys"
        )
    if scheme == "unix":
        return Address(path=_socket_path(place, text), user=user, password=password)
    host, port, database = _host_port_database(place, text)
    return Address(
        host=host, port=port, tls=scheme == "valkeys", database=database, user=user, password=password
    )


def redacted(text: str) -> str:
    """``text`` without what may be a user and a password."""
    scheme, mark, rest = text.partition("://")
    if not mark:
        return "***" if "@" in text else text
    _, at, place = rest.rpartition("@")
    return f"{scheme}://***@{place}" if at else f"{scheme}://{place}"


def tls_context(files: TlsFiles) -> ssl.SSLContext:
    """Checks the certificate and the host name, always. Raises ``ConfigError`` for a file that cannot be used."""
    try:
        context = ssl.create_default_context(cafile=files.ca_file or None)
    except OSError as error:  # SSLError is one
        raise ConfigError(
            "valkey.ca", files.ca_file, f"no usable CA certificates ({_reason(error)})"
        ) from error
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    if files.client_cert_file:
        try:
            context.load_cert_chain(files.client_cert_file, files.client_key_file or None)
        except OSError as error:
            hint = f"no usable client certificate and key ({_reason(error)})"
            raise ConfigError("valkey.cert", files.client_cert_file, hint) from error
    elif files.client_key_file:
        hint = "a client key needs its certificate: set valkey.cert"
        raise ConfigError("valkey.key", files.client_key_file, hint)
    return context


def _reason(error: OSError) -> str:
    return error.strerror or str(error) or type(error).__name__


def _socket_path(place: str, text: str) -> str:
    path = unquote(place)
    if not path.startswith("/"):
        raise ConfigError(
            _KEY, redacted(text), "a unix socket needs an absolute path: unix:///run/valkey.sock"
        )
    if len(os.fsencode(path)) > UNIX_PATH_BYTES or "\0" in path:
        raise ConfigError(
            _KEY, redacted(text), f"the path of a unix socket has at most {UNIX_PATH_BYTES} bytes"
        )
    return path


def _host_port_database(place: str, text: str) -> tuple[str, int, int]:
    authority, _, database = place.partition("/")
    if authority.startswith("["):
        host, bracket, tail = authority[1:].partition("]")
        if not bracket or tail[:1] not in ("", ":"):
            raise ConfigError(_KEY, redacted(text), "an IPv6 host stands in brackets: valkey://[::1]:6379")
        port = tail[1:]
    else:
        host, _, port = authority.partition(":")
        if ":" in port:
            raise ConfigError(_KEY, redacted(text), "an IPv6 host stands in brackets: valkey://[::1]:6379")
    if not host:
        raise ConfigError(_KEY, redacted(text), f"no host in it; {_FORMS}")
    return (
        host,
        _number(port, DEFAULT_PORT, 1, 65535, "port", text),
        _number(database, 0, 0, 2**31 - 1, "database", text),
    )


def _number(digits: str, default: int, low: int, high: int, what: str, text: str) -> int:
    if not digits:
        return default
    if not (digits.isascii() and digits.isdigit() and low <= int(digits) <= high):
        raise ConfigError(_KEY, redacted(text), f"the {what} is a number from {low} to {high}")
    return int(digits)
