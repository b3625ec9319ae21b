"""``tierkv.connect``: the client of a daemon."""

from __future__ import annotations

from collections.abc import Mapping

from tierkv.daemon.remote import RemoteClient
from tierkv.daemon.tenant import tenant_of
from tierkv.errors import ConfigError

SCHEME = "unix://"


def connect(
    url: str = "unix:///run/tierkv/tierkv.sock",
    *,
    owner: str = "client",
    salt: str | None = None,
    quotas: Mapping[str, str | int] | None = None,
) -> RemoteClient:
    """Connects to a daemon: ``tierkv.connect("unix:///run/tierkv/tierkv.sock")``. Raises ``ConfigError`` for another
    kind of address. A daemon that is not there (yet) is no error: until it comes every load is a miss, and every store
    is dropped.

    ``salt``: of the tenant that this engine belongs to; every namespace is opened with it. ``quotas``: what all blocks
    of this tenant may take of each tier at most, like ``{"host": "4 GiB", "nvme": "100 GiB"}``, where the operator's
    ``limits.tenant_share`` is not less; for as long as this client is connected."""
    if not url.startswith(SCHEME) or not url.removeprefix(SCHEME).startswith("/"):
        raise ConfigError(
            "connect", url, "a daemon is named by its socket, such as unix:///run/tierkv/tierkv.sock"
        )
    return RemoteClient(url.removeprefix(SCHEME), owner=owner, tenant=tenant_of(salt, quotas))
