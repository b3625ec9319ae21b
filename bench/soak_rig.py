"""What a soak runs on: a store over host RAM, real files and a real server, all so small that they are always full."""

from __future__ import annotations

import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from bench.soak_proxy import Link, link_to
from tierkv.arena import Arena
from tierkv.client import Client
from tierkv.clock import SystemClock
from tierkv.executor import ThreadExecutor
from tierkv.keys import NamespaceSpec, Weights
from tierkv.layout import GroupKind, LayerGroup, Layout
from tierkv.namespaces import OpenNamespace
from tierkv.policies.always import AlwaysPolicy
from tierkv.policies.lru import LruPolicy
from tierkv.policies.on_hit import OnHitPolicy
from tierkv.store import BlobSpec, Limits, TieredStore
from tierkv.testing.faults.disk import ShimDisk
from tierkv.testing.faults.leftovers import assert_only_our_files
from tierkv.testing.faults.server import ValkeyServer, running_server
from tierkv.tiers.host import HostTier
from tierkv.tiers.nvme import NvmeTier
from tierkv.tiers.valkey import ValkeyTier
from tierkv.units import KIB, MIB

BLOCK_TOKENS = 16
HOST_BYTES = 4 * MIB
NVME_BYTES = 12 * MIB
DISK_BYTES = 16 * MIB
"""Of the small file system that is filled on purpose, where one can be mounted."""
SERVER_BYTES = 16 * MIB
CALL_TIMEOUT_S = 0.25
"""Of one call to a blob tier: a hung server must cost little, since it is hung most of the time here."""


@dataclass
class Rig:
    """The store and what it stands on."""

    client: Client
    store: TieredStore
    spaces: list[OpenNamespace]
    cleared: OpenNamespace
    """The namespace that is cleared now and then."""
    server: ValkeyServer
    link: Link
    disk: ShimDisk
    nvme: Path
    small_disk: bool
    """``nvme`` is on a file system of its own, small enough to be filled."""


@contextmanager
def soak_rig(folder: Path) -> Iterator[Rig]:
    """Starts it all; ``folder`` is where the files go when nothing can be mounted."""
    with (
        running_server("--maxmemory", str(SERVER_BYTES), "--maxmemory-policy", "allkeys-lru") as server,
        link_to(server.port) as link,
        _disk_in(folder) as (path, small),
    ):
        clock, disk = SystemClock(), ShimDisk()
        store = _store(path / "nvme", disk, f"valkey://127.0.0.1:{link.port}", clock)
        store.start(populate=True)
        client = Client(store, owner="soak")
        spaces = [client.open_namespace(spec) for spec in specs()]
        cleared = client.open_namespace(_spec(_group(4 * KIB), salt="cleared"))
        try:
            yield Rig(client, store, [*spaces, cleared], cleared, server, link, disk, path / "nvme", small)
        finally:
            stuck = client.store.close(30.0)
        if stuck:
            raise RuntimeError(f"threads that did not end: {stuck}")
        assert_only_our_files(path / "nvme")


def _store(path: Path, disk: ShimDisk, address: str, clock: SystemClock) -> TieredStore:
    nvme = NvmeTier(path, NVME_BYTES, clock=clock, min_free_bytes=0, segment_bytes=MIB, disk=disk)
    valkey = ValkeyTier(address, clock=clock, connect_timeout_s=0.1)
    specs = [
        BlobSpec(nvme, LruPolicy(), AlwaysPolicy(), "through", timeout_s=CALL_TIMEOUT_S),
        BlobSpec(valkey, None, AlwaysPolicy(), "on_evict", timeout_s=CALL_TIMEOUT_S),
    ]
    limits = Limits(max_families=16_384, breaker_cooldown_s=0.2, shutdown_deadline_s=10.0)
    host = HostTier(Arena(HOST_BYTES, 256 * KIB))
    return TieredStore(host, LruPolicy(), specs, OnHitPolicy(), limits, clock, ThreadExecutor(clock))


def _group(block_bytes: int, name: str = "full") -> LayerGroup:
    return LayerGroup(name, GroupKind.FULL, 1, block_bytes, BLOCK_TOKENS)


def specs() -> list[NamespaceSpec]:
    """Blocks of 4 to 64 KiB, of one part and of two."""
    window = LayerGroup("window", GroupKind.WINDOW, 1, 4 * KIB, BLOCK_TOKENS, window_tokens=2 * BLOCK_TOKENS)
    return [
        _spec(_group(4 * KIB)),
        _spec(_group(16 * KIB)),
        _spec(_group(64 * KIB)),
        _spec(_group(8 * KIB), window),
    ]


def _spec(*groups: LayerGroup, salt: str | None = None) -> NamespaceSpec:
    layout = Layout("soak", "uint8", BLOCK_TOKENS, groups)
    return NamespaceSpec(weights=Weights("revision", "soak"), layout=layout, engine="soak", salt=salt)


@contextmanager
def _disk_in(folder: Path) -> Iterator[tuple[Path, bool]]:
    """A small file system in memory where one may be mounted, else a folder of the given one."""
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder, prefix="soak-") as name:
        mounted = _run("mount", "-t", "tmpfs", "-o", f"size={DISK_BYTES}", "tierkv-soak", name)
        try:
            yield Path(name), mounted
        finally:
            if mounted and not _run("umount", name):
                raise RuntimeError(f"{name} could not be unmounted")


def _run(*command: str) -> bool:
    try:
        return subprocess.run(command, capture_output=True, timeout=10, check=False).returncode == 0
    except FileNotFoundError:
        return False
