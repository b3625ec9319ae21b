"""A store in this process over real tiers, so small that a handful of blocks fills it.

Payloads are derived from their keys, free slots are poisoned before a load, and when a store is done with, its books
are checked: slots, pins, bytes and children must add up.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager, nullcontext
from contextvars import ContextVar
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np

from tests.valkey_server import eventually
from tierkv import registry
from tierkv.arena import Arena
from tierkv.catalog import HOST
from tierkv.client import Client
from tierkv.clock import Deadline, SystemClock
from tierkv.codec import codec_named
from tierkv.copier import Copier
from tierkv.daemon.link import Line
from tierkv.daemon.remote import RemoteClient
from tierkv.daemon.server import Server
from tierkv.executor import ThreadExecutor
from tierkv.frame import FrameHeader
from tierkv.handles import Lease
from tierkv.ids import BlockKey, FamilyId, KeyPrefix, Slot
from tierkv.index import IN_HOST, NO_SLOT
from tierkv.intake import Stored
from tierkv.keys import Chain, NamespaceSpec, Weights
from tierkv.layout import GroupKind, LayerGroup, Layout
from tierkv.metrics import METRICS
from tierkv.namespaces import OpenNamespace
from tierkv.policies.lru import LruPolicy
from tierkv.policies.on_hit import OnHitPolicy
from tierkv.policy import AdmissionPolicy
from tierkv.retention import Retention
from tierkv.store import BlobSpec, Limits, TieredStore
from tierkv.testing.faults.disk import ShimDisk
from tierkv.testing.payloads import check, payload_of, poison
from tierkv.testing.totals import check_totals
from tierkv.tier import BlobTier, ClearResult, DoneCallback, Item, Presence, TierCaps, Usage, Want
from tierkv.tiers.host import HostTier
from tierkv.tiers.nvme import NvmeTier
from tierkv.tiers.valkey import ValkeyTier
from tierkv.units import KIB, MIB

BLOCK_TOKENS = 16
PATIENCE_S = 20.0
"""Bounds every wait of a test; nothing is expected to take anywhere near as long."""


class MovableClock(SystemClock):
    """The machine's clock, which a test can push forward."""

    def __init__(self) -> None:
        self._ahead_s = 0.0

    def now_s(self) -> float:
        return super().now_s() + self._ahead_s

    def unix_s(self) -> float:
        return super().unix_s() + self._ahead_s

    def advance(self, seconds: float) -> None:
        self._ahead_s += seconds


# ---- faces: the same tests with a store in this process, and with a daemon's

EMBEDDED, DAEMON = "embedded", "daemon"
FACE: ContextVar[str] = ContextVar("face", default=EMBEDDED)
"""What ``live`` gives a client of."""


# ---- names and payloads


def full_group(block_bytes: int = 4 * KIB, name: str = "full", **changes: Any) -> LayerGroup:
    return LayerGroup(name, GroupKind.FULL, 1, block_bytes, BLOCK_TOKENS, **changes)


def window_group(
    window_tokens: int, block_bytes: int = 4 * KIB, name: str = "window", **changes: Any
) -> LayerGroup:
    return LayerGroup(
        name, GroupKind.WINDOW, 1, block_bytes, BLOCK_TOKENS, window_tokens=window_tokens, **changes
    )


def layout_of(*groups: LayerGroup, **changes: Any) -> Layout:
    """One full-attention group of 4 KiB a block, unless told otherwise."""
    return Layout("test", "uint8", BLOCK_TOKENS, groups or (full_group(),), **changes)


def spec_of(layout: Layout | None = None, **changes: Any) -> NamespaceSpec:
    return NamespaceSpec(
        **{"weights": Weights("revision", "r1"), "layout": layout or layout_of(), "engine": "test", **changes}
    )


def prompt(count: int, seed: int = 0) -> np.ndarray[Any, Any]:
    """``count`` tokens that differ from those of any other seed from the first one on."""
    return np.arange(count, dtype=np.int32) + np.int32(1_000_000 * seed)


def chain_of(space: OpenNamespace, blocks: int, seed: int = 0, *, extra_tokens: int = 1) -> Chain:
    """A prompt of that many full blocks and a little more."""
    return space.chain(prompt(blocks * space.namespace.layout.block_tokens + extra_tokens, seed))


def payloads_of(
    chain: Chain, positions: Iterable[int] | None = None, *, rank: int = 0, absent: Sequence[int] = ()
) -> list[list[bytes]]:
    """The right bytes of each block: one buffer for each layer group that the rank holds."""
    layout = chain.namespace.layout
    chosen = range(len(chain)) if positions is None else positions
    return [
        [
            payload_of(
                chain.namespace.block_key(chain.hashes[position], layout.part_index(group, rank)),
                layout.payload_bytes(group),
            )
            for group in range(len(layout.groups))
            if group not in absent
        ]
        for position in chosen
    ]


def put(client: Client, chain: Chain, first: int = 0, count: int | None = None, **options: Any) -> Stored:
    """Stores the right bytes of blocks ``first .. first + count``; the words of a retention may be given as such."""
    last = len(chain) if count is None else first + count
    rank, absent = options.get("rank", 0), options.get("absent", ())
    wishes = {
        name: options.pop(name) for name in ("priority", "ttl_s", "coldest", "no_store") if name in options
    }
    if wishes:
        options["retention"] = Retention(**wishes)
    payloads = payloads_of(chain, range(first, last), rank=rank, absent=absent)
    return client.put(chain, payloads, first=first, **options)


def put_all(client: Client, chain: Chain, **options: Any) -> None:
    """Stores a chain, which must find room."""
    stored = put(client, chain, **options)
    assert stored.stored + stored.resident == len(chain), stored


def check_lease(store: TieredStore, lease: Lease) -> None:
    """Every byte under the lease must be the one that belongs there."""
    chain = lease.chain
    for i in range(len(lease)):
        for part in chain.namespace.layout.parts:
            assert lease.lessor is not None
            if lease.lessor.slot_of(lease.families[i], part.index) != NO_SLOT:
                key = chain.namespace.block_key(chain.hashes[i], part.index)
                check(lease.view(i, part.index), key)


def loaded(client: Client, chain: Chain, **options: Any) -> int:
    """Loads into poison, checks every byte, gives the lease back; how many blocks there were."""
    poison_free_slots(client.store)
    with client.load(chain, **options) as lease:
        check_lease(client.store, lease)
        return len(lease)


def poison_free_slots(store: TieredStore) -> None:
    """Fills all of host RAM that is not handed out with 0xAA."""
    host, arena = store.host, store.host.arena
    with host._lock:
        for region in range(arena.regions):
            for slot in arena.slots_of_region(region):
                if not host._taken[slot]:
                    poison(arena.view(Slot(slot)))


# ---- faults


class Hooked:
    """A tier behind a hook: ``before(call)`` may block, for instance on a ``Gate``. All calls go to the real tier."""

    def __init__(self, tier: BlobTier) -> None:
        self.tier = tier
        self.name = tier.name
        self.before: Callable[[str], None] = lambda call: None
        self.after: Callable[[str], None] = lambda call: None

    @property
    def caps(self) -> TierCaps:
        return self.tier.caps

    def start(self) -> None:
        self.tier.start()

    def close(self, deadline: Deadline) -> None:
        self.tier.close(deadline)

    def probe(self, keys: Sequence[BlockKey], deadline: Deadline) -> list[Presence]:
        self.before("probe")
        found = self.tier.probe(keys, deadline)
        self.after("probe")
        return found

    def get_into(self, wants: Sequence[Want], deadline: Deadline, on_done: DoneCallback) -> None:
        self.before("get_into")
        self.tier.get_into(wants, deadline, on_done)
        self.after("get_into")

    def put_from(self, items: Sequence[Item], deadline: Deadline, on_done: DoneCallback) -> None:
        self.before("put_from")
        self.tier.put_from(items, deadline, on_done)
        self.after("put_from")

    def delete(self, keys: Sequence[BlockKey]) -> None:
        self.before("delete")
        self.tier.delete(keys)

    def clear(self, prefix: KeyPrefix, deadline: Deadline) -> ClearResult:
        self.before("clear")
        return self.tier.clear(prefix, deadline)

    def scan(self) -> Iterator[FrameHeader]:
        return self.tier.scan()

    def usage(self) -> Usage:
        return self.tier.usage()

    def status(self) -> dict[str, object]:
        return self.tier.status()


class Gate:
    """Holds the calls of one kind until it is opened."""

    def __init__(self, call: str) -> None:
        self._call = call
        self._open = threading.Event()
        self._lock = threading.Lock()
        self.waiting = 0

    def __call__(self, call: str) -> None:
        if call != self._call or self._open.is_set():
            return
        with self._lock:
            self.waiting += 1
        assert self._open.wait(PATIENCE_S), f"nobody opened the gate before {call}"

    def reached(self, count: int = 1) -> None:
        """Returns when that many calls stand before the gate."""
        eventually(lambda: self.waiting >= count, f"{count} calls of {self._call} stand before the gate")

    def open(self) -> None:
        self._open.set()

    def outlasts(self, load: Callable[[float], Future[Lease]]) -> Lease:
        """Begins a load whose deadline passes while a call stands here, and returns how it ended. On a machine so busy
        that the deadline passes before the call, the load is begun again with more time."""
        timeout_s = 0.02
        lease = load(timeout_s).result(PATIENCE_S)
        while not self.waiting:
            lease.release()
            timeout_s *= 2
            assert timeout_s < PATIENCE_S, f"no call of {self._call} came to the gate"
            lease = load(timeout_s).result(PATIENCE_S)
        return lease


# ---- stores


@dataclass
class Live:
    """A running store with its parts."""

    client: Client
    clock: MovableClock
    tiers: dict[str, Hooked]
    disk: ShimDisk | None

    @property
    def store(self) -> TieredStore:
        return self.client.store

    def count(self, *labels: str) -> int:
        known = next(metric for metric in METRICS if metric.name == labels[0])
        assert len(labels) - 1 == len(known.labels), f"{labels[0]} has the labels {known.labels}"
        return self.store.counters.get(*labels)

    def namespace(self, layout: Layout | None = None, **changes: Any) -> OpenNamespace:
        return self.client.open_namespace(spec_of(layout, **changes))

    def settle(self) -> None:
        """Returns when nothing is on its way any more."""
        eventually(lambda: idle(self.store), "the store is idle", PATIENCE_S)

    def flush(self, tier: str) -> None:
        """Everything in host RAM is in the tier afterwards."""
        report = self.client.flush(tier).result(PATIENCE_S)
        assert report.failed == 0, report


def idle(store: TieredStore) -> bool:
    busy = any(edge.queue.busy() for edge in store.edges.values())
    return not busy and store.reaper.idle() and not store.loader.flights


@contextmanager
def live(
    host_blocks: int = 8,
    *,
    block_bytes: int = 4 * KIB,
    region_blocks: int | None = None,
    nvme: Path | None = None,
    nvme_bytes: int = 2 * MIB,
    nvme_options: dict[str, Any] | None = None,
    nvme_spec: dict[str, Any] | None = None,
    valkey: str | None = None,
    valkey_options: dict[str, Any] | None = None,
    valkey_spec: dict[str, Any] | None = None,
    promotion: Any = None,
    copier: Callable[[ThreadExecutor], Copier] | None = None,
    clock: MovableClock | None = None,
    wrap: Callable[[BlobTier], BlobTier] = lambda tier: tier,
    close: bool = True,
    **limits: Any,
) -> Iterator[Live]:
    """A store whose host RAM holds ``host_blocks`` blocks of ``block_bytes``; its books are checked at the end.

    Blob tiers are written to when asked (``write="never"``), unless their ``_spec`` says otherwise.
    """
    clock = clock or MovableClock()
    specs = []
    disk = None
    if nvme is not None:
        disk = ShimDisk()
        options = {"clock": clock, "min_free_bytes": 0, "workers": 3, "disk": disk, **(nvme_options or {})}
        specs.append(_blob(wrap(NvmeTier(nvme, nvme_bytes, **options)), LruPolicy(), nvme_spec))
    if valkey is not None:
        options = {"clock": clock, "workers": 3, **(valkey_options or {})}
        specs.append(_blob(wrap(ValkeyTier(valkey, **options)), None, valkey_spec))
    shared = FACE.get() == DAEMON
    arena = Arena(host_blocks * block_bytes, (region_blocks or host_blocks) * block_bytes, memfd=shared)
    executor = ThreadExecutor(clock)
    chosen = {"load_deadline_s": PATIENCE_S, "shutdown_deadline_s": 5.0, "breaker_cooldown_s": 0.2, **limits}
    store = TieredStore(
        HostTier(arena),
        LruPolicy(),
        specs,
        promotion or OnHitPolicy(),
        Limits(**chosen),
        clock,
        executor,
        copier(executor) if copier is not None else None,
    )
    store.start(populate=False)
    tiers = {spec.tier.name: spec.tier for spec in specs}
    try:
        with _served(store) if shared else nullcontext(Client(store, owner="test")) as client:
            rig = Live(client, clock, tiers, disk)  # type: ignore[arg-type]
            yield rig
            if close and not store.closed:
                if isinstance(client, Peeking):
                    client.close()
                    eventually(lambda: not client.server.sessions(), "the session has ended")
                rig.settle()
                audit(store)
    finally:
        if close or shared:
            stuck = store.close()
            assert stuck == [], stuck


@contextmanager
def _served(store: TieredStore) -> Iterator[Client]:
    """A client of a daemon in this process that serves the store."""
    with TemporaryDirectory(prefix="tierkv-") as folder:
        server = Server(store, Path(folder, "socket"))
        server.start()
        try:
            with Peeking(str(server.path)) as client:
                client.server = server
                yield client  # type: ignore[misc]
        finally:
            server.stop()
            server.close(PATIENCE_S)


class Peeking(RemoteClient):
    """A client of a daemon whose store can be looked into, once the daemon has heard all that this client said."""

    server: Server

    def __init__(self, path: str) -> None:
        super().__init__(path, owner="test", call_s=PATIENCE_S)

    @property
    def store(self) -> TieredStore:
        if self.link.is_here():
            eventually(self._has_heard, "the daemon has heard all", PATIENCE_S)
        return self.server.store

    def _has_heard(self) -> bool:
        link = self.link
        link.tell_now()
        with link._freed:
            lines, link._idle = link._idle, []
        heard = [self._answers(line) for line in lines]
        return all(heard) and not link._away and not link._untold

    def _answers(self, line: Line) -> bool:
        by_s, fine = time.monotonic() + PATIENCE_S, False
        try:
            line.send(["health", {}], by_s=by_s)
            line.receive(by_s=by_s)
            fine = True
        except (OSError, EOFError):  # it was disconnected, and comes back
            pass
        finally:
            self.link._give(line, fine)
        return fine


@cache
def _admission_class(name: str) -> Callable[[], AdmissionPolicy]:
    """Looked up once: reading the entry points of an environment takes longer than a small store's life."""
    return registry.load("admission", name, "admission")


def _blob(tier: BlobTier, eviction: Any, changes: dict[str, Any] | None) -> BlobSpec:
    chosen = {"write": "never", "admission": "always", "codec": "raw", "timeout_s": PATIENCE_S} | (
        changes or {}
    )
    admission = chosen.pop("admission")
    if isinstance(admission, str):
        admission = _admission_class(admission)()
    return BlobSpec(
        Hooked(tier), eviction, admission=admission, codec=codec_named(chosen.pop("codec")), **chosen
    )


def held(store: TieredStore, chain: Chain) -> dict[str, list[int]]:
    """Positions of the chain that each tier holds whole, by the catalog."""
    index = store.catalog.index
    space = index.space(chain.namespace.digest)
    families = [space.get(block_hash) if space is not None else None for block_hash in chain.hashes]
    return {
        tier.name: [
            position
            for position, family in enumerate(families)
            if family is not None
            and index.expected[family]
            and index.residency[tier.number][family] & index.expected[family] == index.expected[family]
        ]
        for tier in store.catalog.tiers
    }


def audit(store: TieredStore, *, leased: bool = False) -> None:
    """The books of an idle store must add up."""
    store.intake.collect_orphans()
    catalog, index, host = store.catalog, store.catalog.index, store.catalog.host
    if not leased:  # a job that has reported all its blocks lets go of them a moment later
        eventually(lambda: not any(index.pins[i] for i in range(1, index._next)), "no block is pinned")
    with catalog.lock:
        families = [FamilyId(i) for i in range(1, index._next) if index.hashes[i] is not None]
        assert len(families) == index.size
        _audit_slots(store, families)
        clean = total = 0
        for family in families:
            assert leased or not index.pins[family], f"family {family} is pinned {index.pins[family]} times"
            whole = index.residency[HOST][family] & index.expected[family] == index.expected[family]
            assert bool(index.state[family] & IN_HOST) == bool(whole and index.residency[HOST][family])
            if index.state[family] & IN_HOST:
                size = catalog._bytes(family)
                total += size
                clean += 0 if index.dirty[family] else size
            assert not index.queued[family], f"family {family} waits for a demotion that is over"
        assert (catalog.host_bytes, catalog.clean_bytes) == (total, clean)
        for tier, column in enumerate(index.residency):
            for family in families:
                children = sum(1 for child in families if index.parent[child] == family and column[child])
                assert index.children[tier][family] == children
        assert len(catalog.host_policy) == sum(  # type: ignore[arg-type]
            1 for family in families if index.state[family] & IN_HOST
        )
    assert host.free_bytes() == host.arena.capacity_bytes - host.arena.used_bytes
    check_totals(store)


def _audit_slots(store: TieredStore, families: Sequence[FamilyId]) -> None:
    """A slot belongs to exactly one family, and all that are handed out belong to one."""
    catalog, index, host = store.catalog, store.catalog.index, store.catalog.host
    owned: dict[int, int] = {}
    for family in families:
        for slot in index.slots[family].tolist():
            if slot != NO_SLOT:
                assert slot not in owned, f"slot {slot} is under families {owned[slot]} and {family}"
                owned[slot] = family
                assert catalog.owner[slot] == family
    taken = {slot for slot in range(len(host._taken)) if host._taken[slot]}
    assert taken == set(owned), (
        f"slots without an owner: {taken - set(owned)}, not handed out: {set(owned) - taken}"
    )
    used = sum(host.arena.stride_of(Slot(slot)) for slot in taken)
    assert used == host.arena.used_bytes
