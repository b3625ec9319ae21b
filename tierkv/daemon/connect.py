"""``tierkv.connect``: the client of a daemon."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from tierkv.config_sidecar import DEFAULT_SOCKET, SOCKET_PATH_BYTES
from tierkv.daemon.remote import RemoteClient
from tierkv.daemon.tenant import tenant_of
from tierkv.errors import ConfigError

SCHEME = "unix://"


def connect(
    url: str | None = None,
    *,
    private: str | None = None,
    owner: str = "client",
    salt: str | None = None,
    quotas: Mapping[str, str | int] | None = None,
    **settings: Any,
) -> RemoteClient:
    """Connects to a daemon: ``tierkv.connect("unix:///run/tierkv/tierkv.sock")``, which is the default. A daemon that
    is not there (yet) is no error: until it comes every load is a miss, and every store is dropped.

    ``tierkv.connect(private="engine-7", host_capacity="8 GiB")`` is for an engine of several processes without a
    daemon: ``private`` is text that they have in common, and no other engine has. The first of them starts a daemon of
    their own with these settings (see ``docs/configuration.md``), which ends with that process; the others find it.
    They give the same settings, or none. Blocks until it is ready; raises ``SidecarError`` when it cannot be started.

    ``salt``: of the tenant that this engine belongs to; every namespace is opened with it. ``quotas``: what all blocks
    of this tenant may take of each tier at most, like ``{"host": "4 GiB", "nvme": "100 GiB"}``, where the operator's
    ``limits.tenant_share`` is not less; for as long as this client is connected.

    Raises ``ConfigError`` for another kind of address, and for what is wrong in the settings.
    """
    if not isinstance(owner, str):
        raise ConfigError("connect owner", owner, "a text is expected: it names this engine to people")
    tenant = tenant_of(salt, quotas)
    if private is not None:
        if quotas:
            raise ConfigError("connect quotas", dict(quotas), "a private sidecar has no other engines")
        if url is not None:
            raise ConfigError("connect", url, "give the address of a daemon or private=..., not both")
        from tierkv.daemon.private import connect_private

        return connect_private(private, owner, settings, tenant)
    if settings:
        name, value = next(iter(settings.items()))
        raise ConfigError(
            name, value, "a daemon has its own configuration; settings go with private=... only"
        )
    url = SCHEME + DEFAULT_SOCKET if url is None else url
    if not url.startswith(SCHEME) or not url.removeprefix(SCHEME).startswith("/"):
        raise ConfigError(
            "connect", url, "a daemon is named by its socket, such as unix:///run/tierkv/tierkv.sock"
        )
    path = url.removeprefix(SCHEME)
    if len(os.fsencode(path)) > SOCKET_PATH_BYTES:
        raise ConfigError(
            "connect",
            url,
            f"the path of a socket has at most {SOCKET_PATH_BYTES} bytes; choose a shorter one",
        )
    return RemoteClient(path, owner=owner, tenant=tenant)
