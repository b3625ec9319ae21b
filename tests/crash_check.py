"""What must be true after a crash: the books of what was acknowledged, and the checks of what a restart finds."""

from __future__ import annotations

import gc
import os
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

from tests.client_support import check_lease, idle
from tests.crash_life import CAPACITY_BYTES, Line, Rig, keys_of, opened
from tests.nvme_support import check_names, disk_bytes, found, get, logs, running, segments
from tests.valkey_server import ValkeyServer, eventually, name_of
from tierkv import frame
from tierkv.client import Client
from tierkv.ids import BlockKey
from tierkv.index import NO_FAMILY, USABLE
from tierkv.keys import Chain
from tierkv.testing.invariants import check_idle, families
from tierkv.testing.payloads import check
from tierkv.tier import Outcome
from tierkv.units import KIB

MAX_LOGS = 4
"""What two lives leave that both died in a checkpoint; a start that finds more than two finishes one first."""


@dataclass
class _Fate:
    """Of one key in one tier: there, gone, or (``None``) nobody knows."""

    there: bool | None = False
    under_way: int = 0
    contested: bool = False


@dataclass
class Ledger:
    """What a tier has acknowledged, by key. Calls that overlap on a key leave its fate open."""

    fates: dict[tuple[str, str], _Fate] = field(default_factory=dict)
    persistent: set[str] = field(default_factory=set)
    """Keys that some flush has reported, and nobody has deleted since."""

    def take(self, said: Iterable[Line]) -> None:
        """Takes up all that one process said until it died; what was under way then may or may not have happened."""
        for verb, tier, names in said:
            match verb:
                case "storing" | "deleting":
                    self._begin(tier, names)
                case "stored":
                    self._end(tier, names, True)
                case "gone":
                    self._end(tier, names, False)
                case "clearing":
                    self._begin(tier, self._under(tier, names[0]))
                case "cleared":
                    self._end(tier, self._under(tier, names[0]), False)
                case "persistent":
                    self._check_flush(tier, names)
            if verb in ("deleting", "gone", "clearing") and tier == "nvme":
                self.persistent -= set(names if verb != "clearing" else self._under(tier, names[0]))
        for fate in self.fates.values():
            if fate.under_way:
                fate.there, fate.under_way, fate.contested = None, 0, False

    def _under(self, tier: str, prefix: str) -> list[str]:
        return [key for its, key in self.fates if its == tier and key.startswith(prefix)]

    def _check_flush(self, tier: str, names: Iterable[str]) -> None:
        for key in names:
            fate = self.fates.get((tier, key))
            assert fate is not None, f"{key} was never written, and a flush says that it is there"
            if not fate.under_way:
                assert fate.there is not False, f"{key} was deleted, and a flush says that it is there"
                self.persistent.add(key)

    def _begin(self, tier: str, names: Iterable[str]) -> None:
        for key in names:
            fate = self.fates.setdefault((tier, key), _Fate())
            fate.contested |= fate.under_way > 0
            fate.under_way += 1

    def _end(self, tier: str, names: Iterable[str], there: bool) -> None:
        for key in names:
            fate = self.fates.setdefault((tier, key), _Fate())
            fate.there = None if fate.contested or fate.under_way != 1 else there
            fate.under_way = max(0, fate.under_way - 1)
            fate.contested &= fate.under_way > 0

    def must(self, tier: str) -> set[BlockKey]:
        return {_key(key) for (its, key), fate in self.fates.items() if its == tier and fate.there}

    def must_not(self, tier: str) -> set[BlockKey]:
        return {_key(key) for (its, key), fate in self.fates.items() if its == tier and fate.there is False}

    def forget(self, tier: str) -> None:
        """The tier is empty and new."""
        self.fates = {name: fate for name, fate in self.fates.items() if name[0] != tier}
        self.persistent.clear()

    def settle(self, tier: str, there: set[BlockKey]) -> None:
        """A look at the tier has told what is there."""
        for (its, key), fate in self.fates.items():
            if its == tier:
                fate.there = _key(key) in there
        self.persistent &= {key.hex() for key in there}


def _key(name: str) -> BlockKey:
    return BlockKey(bytes.fromhex(name))


@dataclass
class Seen:
    """What a restart found, for the progress line and for who wonders whether the test tests anything."""

    on_disk: int = 0
    on_server: int = 0
    loaded: int = 0
    kept_by_flush: int = 0
    open_fates: int = 0


def check_after_crash(path: Path, server: ValkeyServer, ledger: Ledger, recovery: str) -> Seen:
    """Opens what the dead process left, several times, and checks all of it."""
    descriptors = len(os.listdir("/proc/self/fd"))
    seen = Seen(open_fates=sum(fate.there is None for fate in ledger.fates.values()))
    sizes = _sizes()
    _check_disk(path, ledger, recovery, sizes, seen)
    _check_server(server, ledger, sizes, seen)
    with opened(path, server.address, host_bytes=2048 * KIB, recovery="strict") as rig:
        _check_store(rig, ledger, seen)
    with opened(None, server.address, host_bytes=2048 * KIB) as rig:  # what only the server has
        for chain in rig.chains():
            _loaded(rig.client, chain)
    ledger.settle("nvme", _on_disk(path))
    gc.collect()
    eventually(
        lambda: len(os.listdir("/proc/self/fd")) <= descriptors, "all descriptors of the check are closed"
    )
    return seen


def _sizes() -> dict[BlockKey, int]:
    """The payload of every key that the writer may ever have written."""
    sizes = {}
    with opened(None, None) as rig:
        for chain in rig.chains():
            for position in range(len(chain)):
                for part, key in zip(chain.namespace.layout.parts, keys_of(chain, position), strict=True):
                    sizes[key] = part.payload_bytes
    return sizes


def _check_disk(path: Path, ledger: Ledger, recovery: str, sizes: dict[BlockKey, int], seen: Seen) -> None:
    """The tier alone: acknowledged blocks are there and right, forgotten ones are not, and nothing else is."""
    with running(path, CAPACITY_BYTES, recovery=recovery, segment_bytes=64 * KIB) as tier:
        outcomes = {key: get(tier, key, size) for key, size in sizes.items()}
        wrong = [
            key.hex() for key, outcome in outcomes.items() if outcome not in (Outcome.DONE, Outcome.MISS)
        ]
        assert not wrong, f"published blocks that do not verify: {wrong}"
        there = {key for key, outcome in outcomes.items() if outcome is Outcome.DONE}
        lost, back = ledger.must("nvme") - there, ledger.must_not("nvme") & there
        assert not lost, f"acknowledged blocks are gone: {sorted(key.hex() for key in lost)}"
        assert not back, f"forgotten blocks are back: {sorted(key.hex() for key in back)}"
        gone = ledger.persistent - {key.hex() for key in there}
        assert not gone, f"a flush reported these as persistent: {sorted(gone)}"
        assert tier.usage().blocks == len(there) == sum(1 for _ in tier.scan())
        status = tier.status()
        assert status["corrupt_reads"] == 0
    seen.on_disk, seen.kept_by_flush = len(there), len(ledger.persistent)
    check_names(path)
    assert disk_bytes(path) <= CAPACITY_BYTES, f"the directory has grown to {disk_bytes(path)} bytes"
    assert len(segments(path)) <= CAPACITY_BYTES // (64 * KIB) + 1
    assert len(logs(path)) <= MAX_LOGS, f"{len(logs(path))} files of the log"


def _on_disk(path: Path) -> set[BlockKey]:
    sizes = _sizes()
    with running(path, CAPACITY_BYTES, segment_bytes=64 * KIB) as tier:
        return {key for key, size in sizes.items() if found(tier, [key], size)}


def _check_server(server: ValkeyServer, ledger: Ledger, sizes: dict[BlockKey, int], seen: Seen) -> None:
    """The server alone, with a client that shares nothing with ours."""
    with server.client as client:
        names = {name_of(key): key for key in sizes}
        there = set()
        for raw in client.keys("*"):
            key = names[raw.decode()]  # a name that no block has would be a KeyError
            value = client.get(raw)
            header = frame.unpack(memoryview(value))
            payload = memoryview(value)[frame.HEADER_BYTES :]
            frame.verify(header, key, payload)
            check(payload, key)
            there.add(key)
        ours = [one for one in client.client_list() if int(one["age"]) > 5]
        assert len(ours) <= 1, f"connections of the dead are still open: {ours}"
    lost, back = ledger.must("valkey") - there, ledger.must_not("valkey") & there
    assert not lost, f"the server said OK to these and lacks them: {sorted(key.hex() for key in lost)}"
    assert not back, f"the server has blocks that were cleared: {sorted(key.hex() for key in back)}"
    seen.on_server = len(there)
    ledger.settle("valkey", there)


def _check_store(rig: Rig, ledger: Ledger, seen: Seen) -> None:
    """The whole store: chains without holes, right bytes, books that add up."""
    store, index = rig.store, rig.store.catalog.index
    for family in families(store.catalog):
        parent = index.parent[family]
        assert parent == NO_FAMILY or index.state[parent] & USABLE, "a block is there without its parent"
    must = ledger.must("nvme")
    for chain in rig.chains():
        whole = [set(keys_of(chain, position)) <= must for position in range(len(chain))]
        front = whole.index(False) if False in whole else len(whole)
        matched = rig.client.match(chain).blocks
        assert matched >= front, f"{front} blocks of a chain are on disk, {matched} are matched"
        loaded = _loaded(rig.client, chain)
        assert loaded >= matched, f"{matched} blocks were matched and {loaded} loaded"
        seen.loaded += loaded
    eventually(lambda: idle(store), "the store is idle")
    check_idle(store)
    assert store.counters.sum("corrupt_blocks_total") == 0
    status = store.edges[1].tier.status()
    assert status["dropped_records"] == 0, status


def _loaded(client: Client, chain: Chain) -> int:
    with client.load(chain) as lease:
        check_lease(client.store, lease)
        return len(lease)
