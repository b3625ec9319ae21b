"""The tenant of a session: its salt, and what it wants to be kept to. Said once, when a connection is made."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from tierkv.daemon.wire import WireError
from tierkv.daemon.words import Words, take
from tierkv.errors import ConfigError, IdentityError
from tierkv.ids import TENANT_TAG_BYTES
from tierkv.keys import NamespaceSpec, tenant_prefix
from tierkv.store import TieredStore
from tierkv.units import parse_bytes

WITH_QUOTAS = ("host", "nvme")
"""The tiers that the store itself evicts from. One that a daemon does not have is passed over there."""


@dataclass(frozen=True)
class Tenant:
    """As an engine names it. Without a salt it is one with all others that have none."""

    salt: str | None = field(default=None, repr=False)
    quotas: Mapping[str, int] = field(default_factory=dict)
    """Bytes by tier that all blocks of the tenant may take, where the operator's share is not less. Kept to for as long
    as the session is there."""

    def words(self) -> dict[str, Any]:
        """What a hello says of it."""
        return {"tenant": {"salt": self.salt, "quotas": dict(self.quotas)}} if self.quotas else {}

    def spec(self, spec: NamespaceSpec) -> NamespaceSpec:
        """With the session's salt. Raises ``IdentityError`` for another one."""
        if self.salt is None or spec.salt == self.salt:
            return spec
        if spec.salt is not None:
            raise IdentityError("this client was connected with one salt and the namespace has another")
        return replace(spec, salt=self.salt)


def tenant_of(salt: str | None, quotas: Mapping[str, str | int] | None) -> Tenant:
    """From what ``connect`` was given. Raises ``ConfigError``."""
    if salt is not None and not isinstance(salt, str):
        raise ConfigError("connect salt", "***", "a text is expected")
    if quotas is not None and not isinstance(quotas, Mapping):
        raise ConfigError("connect quotas", quotas, "sizes by tier are expected, like {'host': '4 GiB'}")
    if quotas and salt is None:
        raise ConfigError(
            "connect quotas", quotas, "give a salt too: all engines without one are the same tenant"
        )
    sizes: dict[str, int] = {}
    for tier, size in (quotas or {}).items():
        if tier == "valkey":
            raise ConfigError(
                "connect quotas['valkey']", size, "Valkey evicts by its own rules; leave it out"
            )
        if tier not in WITH_QUOTAS:
            raise ConfigError(
                f"connect quotas[{tier!r}]", size, f"a quota is for one of the tiers {', '.join(WITH_QUOTAS)}"
            )
        try:
            sizes[str(tier)] = parse_bytes(size)
        except (TypeError, ValueError):
            raise ConfigError(
                f"connect quotas[{tier!r}]", size, "a size such as '512 MiB' or '4 GiB' is expected"
            ) from None
    return Tenant(salt, sizes)


def hear_tenant(words: Words, store: TieredStore) -> tuple[int, dict[int, int]] | None:
    """The tag of the tenant that a hello names, and its quotas by number of tier. A tier that this daemon does not have
    is passed over: nothing is stored there. Raises ``WireError``."""
    if words.get("tenant") is None:
        return None
    said = take(words, "tenant", dict)
    salt = take(said, "salt", str)
    limits: dict[int, int] = {}
    columns = {column.name: column for column in store.catalog.tiers}
    for name in take(said, "quotas", dict):
        size, column = take(said["quotas"], name, int), columns.get(name)
        if size < 0:
            raise WireError(f"a quota of {size} bytes of {name}")
        if column is None:
            continue
        if column.policy is None:
            raise WireError(f"{name} evicts by its own rules: no tenant has a quota there")
        limits[column.number] = size
    return int.from_bytes(tenant_prefix(salt)[:TENANT_TAG_BYTES], "big"), limits
