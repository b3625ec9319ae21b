"""``tierkv.connect``: the client of a daemon."""

from __future__ import annotations

from tierkv.daemon.remote import RemoteClient
from tierkv.errors import ConfigError

SCHEME = "unix://"


def connect(url: str = "unix:///run/tierkv/tierkv.sock", *, owner: str = "client") -> RemoteClient:
    """Connects to a daemon: ``tierkv.connect("unix:///run/tierkv/tierkv.sock")``. Raises ``ConfigError`` for another
    kind of address. A daemon that is not there (yet) is no error: until it comes every load is a miss, and every store
    is dropped."""
    if not url.startswith(SCHEME) or not url.removeprefix(SCHEME).startswith("/"):
        raise ConfigError(
            "connect", url, "a daemon is named by its socket, such as unix:///run/tierkv/tierkv.sock"
        )
    return RemoteClient(url.removeprefix(SCHEME), owner=owner)
