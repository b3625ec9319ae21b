"""From a configuration to a running store: ``tierkv.open``."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from tierkv import registry
from tierkv.arena import Arena
from tierkv.client import Client
from tierkv.clock import Clock, SystemClock
from tierkv.config import Config, NvmeConfig, ValkeyConfig, load_config
from tierkv.errors import ConfigError
from tierkv.executor import ThreadExecutor
from tierkv.policies.by_priority import with_priorities
from tierkv.store import BlobSpec, Limits, TieredStore
from tierkv.tier import BlobTier
from tierkv.tiers.host import HostTier

BREAKER_FAILURES = 5
"""Failures in a row after which a tier is left alone."""
BREAKER_COOLDOWN_S = 5.0
"""So long, then it is tried with one call."""
IN_FLIGHT_SHARE = 4
"""This part of what may wait on an edge may be on its way over it at once."""


def open_store(
    file: str | Path | None = None, *, owner: str = "client", tiers: Sequence[str] = (), **settings: Any
) -> Client:
    """Opens a store in this process: ``tierkv.open("tierkv.toml", host_capacity="4 GiB", nvme_path="/mnt/kv")``.

    Settings come from keywords, ``TIERKV_*`` environment variables and the file, in this order (see
    ``docs/configuration.md``). Raises ``ConfigError`` for what is wrong in them and ``TierError`` for a tier that can
    never work. A Valkey server that is absent is no error.

    ``tiers`` names blob tiers of third parties (entry points ``tierkv.tiers``), which stand between NVMe and Valkey;
    their classes are called without arguments, and ``start`` and ``close`` are theirs as for any tier.
    """
    return Client(store_from(load_config(file, **settings), tiers), owner=owner)


def store_from(config: Config, tiers: Sequence[str] = (), *, shared: bool = False) -> TieredStore:
    """Builds and starts a store. ``shared``: its RAM is made of sealed memfds, which other processes can map."""
    clock = SystemClock()
    blobs = []
    if config.nvme is not None:
        blobs.append(_nvme(config.nvme, clock))
    blobs += [_third_party(name) for name in _checked(tiers)]
    if config.valkey is not None:
        blobs.append(_valkey(config.valkey, clock))
    host = config.host
    eviction = with_priorities(registry.load("eviction", host.eviction, "host.eviction"))
    promotion = registry.load("promotion", host.promotion, "host.promotion")()
    with ExitStack() as undo:  # whatever is raised before there is a store, which then closes what it has
        ram = HostTier(Arena(host.capacity_bytes, host.region_bytes, memfd=shared))
        undo.callback(ram.close)
        executor = ThreadExecutor(clock)
        undo.callback(executor.close, 1.0)
        store = TieredStore(ram, eviction, blobs, promotion, _limits(config), clock, executor)
        undo.pop_all()
    store.start(populate=host.populate)
    return store


def _limits(config: Config) -> Limits:
    limits = config.limits
    return Limits(
        max_families=limits.max_blocks,
        queue_bytes=limits.queue_bytes,
        in_flight_bytes=limits.queue_bytes // IN_FLIGHT_SHARE,
        tenant_share=1.0 if limits.tenant_share is None else limits.tenant_share,
        low_watermark=config.host.low_watermark,
        high_watermark=min(1.0, 2 * config.host.low_watermark),
        pin_budget_bytes=config.host.pin_budget_bytes,
        load_deadline_s=limits.load_deadline_s,
        lease_deadline_s=limits.lease_deadline_s,
        shutdown_deadline_s=limits.shutdown_deadline_s,
        breaker_failures=BREAKER_FAILURES,
        breaker_cooldown_s=BREAKER_COOLDOWN_S,
    )


def _nvme(config: NvmeConfig, clock: Clock) -> BlobSpec:
    tier = registry.load("tier", "nvme", "nvme.path")(
        config.path,
        config.capacity_bytes,
        clock=clock,
        min_free_bytes=config.min_free_bytes,
        recovery=config.recovery,
        workers=config.workers,
    )
    return BlobSpec(
        tier,
        with_priorities(registry.load("eviction", config.eviction, "nvme.eviction")),
        registry.load("admission", config.admission, "nvme.admission")(),
        config.write,
        registry.codec(config.codec, "nvme.codec"),
    )


def _third_party(name: str) -> BlobSpec:
    tier = _made(name)
    eviction = None if tier.caps.evicts_itself else with_priorities(registry.load("eviction", "lru", "tiers"))
    return BlobSpec(tier, eviction, registry.load("admission", "always", "tiers")())


def _checked(tiers: Sequence[str]) -> Sequence[str]:
    """Names of third parties' tiers, each of them once."""
    if isinstance(tiers, str) or not all(isinstance(name, str) for name in tiers):
        raise ConfigError("tiers", tiers, "it takes a list of names, like tiers=['shelf']")
    for name in tiers:
        if name in _SWITCHES:
            raise ConfigError("tiers", name, f"this tier is built in; {_SWITCHES[name]}")
        if tiers.count(name) > 1:
            raise ConfigError("tiers", name, "it is named twice; a store has each tier once")
    return tiers


_SWITCHES = {
    "host": "every store has it: size it with host_capacity",
    "nvme": "switch it on with nvme_path",
    "valkey": "switch it on with valkey_url",
}


def _made(name: str) -> BlobTier:
    """A third party's tier, by a call without arguments."""
    plugin = registry.find("tier", name, "tiers")
    make = plugin.load("tiers")
    try:
        inspect.signature(make).bind()
    except TypeError as error:
        hint = (
            f"{plugin.target} of the package {plugin.package!r} cannot be called without arguments: {error}"
        )
        raise ConfigError("tiers", name, hint) from None
    except ValueError:
        pass  # it does not say what it takes
    tier: BlobTier = make()
    return tier


def _valkey(config: ValkeyConfig, clock: Clock) -> BlobSpec:
    from tierkv.tiers.valkey_url import TlsFiles

    tier = registry.load("tier", "valkey", "valkey.url")(
        config.url,
        workers=config.connections,
        ttl_s=config.ttl_s,
        connect_timeout_s=min(1.0, config.timeout_s),
        tls_files=TlsFiles(
            *("" if path is None else str(path) for path in (config.ca, config.cert, config.key))
        ),
        embedded_bytes=config.embedded_memory_bytes,
        clock=clock,
    )
    return BlobSpec(
        tier,
        None,
        registry.load("admission", config.admission, "valkey.admission")(),
        config.write,
        registry.codec(config.codec, "valkey.codec"),
        config.timeout_s,
    )
