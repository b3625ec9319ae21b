"""A real store with its three real tiers, driven at random, beside a dict that forgets nothing.

Every byte of a hit equals the dict; a miss is always allowed. The store is closed and opened over the same directory,
the server forgets, values on the server and bytes on the disk are damaged.
"""

from __future__ import annotations

import random
import shutil
import tempfile
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    precondition,
    rule,
    run_state_machine_as_test,
)

import tierkv
from tests.client_support import PATIENCE_S, held
from tests.valkey_server import ValkeyServer, running_server
from tierkv.client import Client
from tierkv.handles import Lease
from tierkv.ids import EVERYTHING, BlockKey, KeyPrefix
from tierkv.keys import Chain
from tierkv.namespaces import OpenNamespace
from tierkv.testing.faults.leftovers import check_at_rest
from tierkv.testing.sim_world import LAYOUTS, bytes_of
from tierkv.units import KIB, MIB

SHAPES = ("plain", "window")
"""One part of 4 KiB; and two layer groups, one of them a window, on two ranks with n = 4."""

PROMPTS = 2
MAX_BLOCKS = 6
TIERS = st.sampled_from(("nvme", "valkey"))
RANKS = st.sampled_from(((0, 1), (1, 0), (0, 1), (0,)))
SEEDS = st.integers(0, 1 << 32)
CHAINS = st.tuples(
    st.integers(0, len(SHAPES) - 1),
    st.integers(0, PROMPTS - 1),
    st.integers(1, MAX_BLOCKS),
    st.integers(0, 3),
)


class StoreMachine(RuleBasedStateMachine):
    """``server`` is given by a subclass: one server serves all examples."""

    server: ValkeyServer
    seen: Counter[str]

    def __init__(self) -> None:
        super().__init__()
        self.model: dict[BlockKey, bytes] = {}
        self.leases: list[Lease] = []
        self.path = Path(tempfile.mkdtemp(prefix="tkv-machine-"))
        self.server.do("FLUSHALL")
        self.client: Client | None = None

    @initialize(host_regions=st.integers(4, 20), write=st.sampled_from(("through", "on_evict")))
    def begin(self, host_regions: int, write: str) -> None:
        self.host_bytes = host_regions * 8 * KIB
        self.write = write
        self._open()

    def _open(self) -> None:
        self.client = tierkv.open(
            host_capacity=self.host_bytes,
            host_region=8 * KIB,
            host_populate=False,
            host_low_watermark=0.3,
            nvme_path=self.path,
            nvme_capacity=16 * MIB,
            nvme_min_free=0,
            nvme_workers=2,
            nvme_write=self.write,
            valkey_url=self.server.unix_address,
            valkey_connections=2,
            valkey_timeout=PATIENCE_S,
            valkey_write=self.write,
            limits_load_deadline=PATIENCE_S,
        )
        self.spaces = [
            self.client.open_namespace(
                tierkv.NamespaceSpec(
                    tierkv.Weights("revision", name), LAYOUTS[name], "machine", salt=f"s {name}"
                )
            )
            for name in SHAPES
        ]

    def _chain(self, which: tuple[int, int, int, int]) -> tuple[OpenNamespace, Chain]:
        """Prompts share their first two blocks."""
        shape, prompt, blocks, extra = which
        space = self.spaces[shape]
        block_tokens = space.namespace.layout.block_tokens
        tokens = np.arange(MAX_BLOCKS * block_tokens + 4, dtype=np.int32)
        tokens[2 * block_tokens :] += 10_000 * prompt
        return space, space.chain(tokens[: blocks * block_tokens + extra])

    def _keys(self, chain: Chain, position: int) -> list[BlockKey]:
        parts = chain.namespace.layout.parts
        return [chain.namespace.block_key(chain.hashes[position], part.index) for part in parts]

    def _known(self, chain: Chain) -> int:
        """How many leading blocks the model has, with all of their parts."""
        for position in range(len(chain)):
            if not all(key in self.model for key in self._keys(chain, position)):
                return position
        return len(chain)

    # ---- storing

    @rule(which=CHAINS, first=st.sampled_from((0, 0, 0, 2)), ranks=RANKS)
    def put(self, which: tuple[int, int, int, int], first: int, ranks: tuple[int, ...]) -> None:
        space, chain = self._chain(which)
        layout = chain.namespace.layout
        first = min(first, len(chain))
        for rank in sorted({rank % layout.ranks for rank in ranks}, key=ranks.index):
            parts = space.parts_of(rank)
            payloads = []
            for position in range(first, len(chain)):
                keys = self._keys(chain, position)
                mine = [bytes_of(keys[part], layout.parts[part].payload_bytes) for part in parts]
                self.model.update(zip((keys[part] for part in parts), mine, strict=True))
                payloads.append(mine)
            stored = self.client.put(chain, payloads, first=first, rank=rank)
            assert stored.stored + stored.resident + sum(stored.dropped.values()) == len(payloads)

    # ---- finding

    @rule(which=CHAINS, computed=st.sampled_from((0, 16, 10_000)))
    def match(self, which: tuple[int, int, int, int], computed: int) -> None:
        _, chain = self._chain(which)
        match = self.client.match(chain, local_computed=computed)
        assert 0 <= match.tokens <= chain.num_tokens - 1
        assert match.tokens == 0 or match.tokens > computed
        assert match.blocks <= self._known(chain)

    @rule(which=CHAINS, keep=st.booleans())
    def load(self, which: tuple[int, int, int, int], keep: bool) -> None:
        _, chain = self._chain(which)
        lease = self.client.load(chain)
        assert len(lease) <= self._known(chain)
        assert 0 <= lease.tokens <= chain.num_tokens - 1
        self._check(lease)
        self.seen["blocks leased"] += len(lease)
        if keep and len(self.leases) < 2:
            self.leases.append(lease)
        else:
            lease.release()

    @rule(which=CHAINS, by=st.sampled_from((None, "nvme", "valkey")), damage=st.none() | SEEDS)
    def round_trip(self, which: tuple[int, int, int, int], by: str | None, damage: int | None) -> None:
        """There and back again, perhaps with losses."""
        self.put(which, 0, (0, 1))
        if by is not None:
            self.move_down(by)
        if damage is not None:
            self.server_damages(damage)
        self.load(which, False)

    def _check(self, lease: Lease) -> None:
        for i in range(len(lease)):
            for part, key in enumerate(self._keys(lease.chain, i)):
                # Also blocks that were cleared while they were leased stay as they are.
                wanted = self.model.get(key) or bytes_of(key, len(lease.view(i, part)))
                assert lease.view(i, part) == wanted, f"block {i}, part {part} has wrong bytes"

    @rule(which=CHAINS)
    def prefetch(self, which: tuple[int, int, int, int]) -> None:
        _, chain = self._chain(which)
        match = self.client.prefetch(chain).result(PATIENCE_S)
        assert match.blocks <= self._known(chain)

    @precondition(lambda self: self.leases)
    @rule()
    def release(self) -> None:
        lease = self.leases.pop(0)
        self._check(lease)
        lease.release()

    # ---- moving and taking out

    @rule(tier=TIERS)
    def flush(self, tier: str) -> None:
        report = self.client.flush(tier).result(PATIENCE_S)
        assert report.wanted == report.written + report.failed
        assert report.failed == 0, (
            f"both tiers are well and have room: {self.client.store.counters.snapshot()}"
        )

    @rule(tier=st.sampled_from(("host", "nvme", "valkey")))
    def evict(self, tier: str) -> None:
        self.client.evict(tier)

    @rule(tier=TIERS)
    def move_down(self, tier: str) -> None:
        self.flush(tier)
        self.client.evict("host")
        if tier == "valkey":
            self.client.evict("nvme")

    @rule(shape=st.sampled_from((None, *range(len(SHAPES)))))
    def clear(self, shape: int | None) -> None:
        namespace = None if shape is None else self.spaces[shape].namespace
        prefix = EVERYTHING if namespace is None else namespace.prefix
        future = self.client.clear(namespace=namespace)
        self._forget(prefix)
        for space in self.spaces:
            for prompt in range(PROMPTS):
                _, chain = self._chain((self.spaces.index(space), prompt, MAX_BLOCKS, 1))
                assert self.client.match(chain).blocks <= self._known(chain)
        report = future.result(PATIENCE_S)
        assert report.complete, report

    def _forget(self, prefix: KeyPrefix) -> None:
        self.model = {key: payload for key, payload in self.model.items() if not key.startswith(prefix)}

    @rule(keep=st.booleans())
    def sleep_and_wake(self, keep: bool) -> None:
        self.client.sleep(keep=keep).result(PATIENCE_S)
        self.client.wake()

    # ---- misfortune

    @rule()
    def server_forgets(self) -> None:
        self.server.do("FLUSHALL")

    @rule(seed=SEEDS)
    def server_damages(self, seed: int) -> None:
        """About a third of the values: a bit flips, they are cut, longer, or another block's."""
        dice = random.Random(seed)
        keys: Any = self.server.do("KEYS", "*")
        values: dict[bytes, Any] = {key: self.server.do("GET", key) for key in keys}
        for key, value in sorted(values.items()):
            if not value or dice.random() > 0.3:
                continue
            at = dice.randrange(len(value))
            flipped = value[:at] + bytes([value[at] ^ 1 << dice.randrange(8)]) + value[at + 1 :]
            other = dice.choice(sorted(values.values()))
            self.server.do("SET", key, dice.choice((flipped, value[:at], value + b"x", other, b"")))

    def _close(self) -> None:
        for lease in self.leases:
            self._check(lease)
            lease.release()
        self.leases.clear()
        client, self.client = self.client, None
        if client is not None:
            self._count(client)
            client.close()

    def _count(self, client: Client) -> None:
        for (name, *labels), count in client.store.counters.snapshot().items():
            if name in ("read_blocks_total", "corrupt_blocks_total", "dropped_blocks_total"):
                self.seen[" ".join([name, *labels])] += count

    @rule()
    def restart(self) -> None:
        """What lies on the disk in whole chains is found again."""
        before = [
            self._on_disk(self._chain((shape, prompt, MAX_BLOCKS, 1))[1]) for shape, prompt in self._all()
        ]
        self._close()
        self._open()
        for (shape, prompt), there in zip(self._all(), before, strict=True):
            _, chain = self._chain((shape, prompt, MAX_BLOCKS, 1))
            assert self._on_disk(chain) >= there
            assert self.client.match(chain).blocks <= self._known(chain)

    def _all(self) -> Iterator[tuple[int, int]]:
        return ((shape, prompt) for shape in range(len(SHAPES)) for prompt in range(PROMPTS))

    def _on_disk(self, chain: Chain) -> int:
        there = held(self.client.store, chain)["nvme"]
        return next((i for i in range(len(chain)) if i not in there), len(chain))

    @rule(seed=SEEDS)
    def restart_over_a_damaged_disk(self, seed: int) -> None:
        dice = random.Random(seed)
        self._close()
        segments = sorted(
            path for path in self.path.rglob("*") if path.is_file() and path.stat().st_size > 64 * KIB
        )
        for path in segments:
            with path.open("r+b") as file:
                for _ in range(4):
                    file.seek(dice.randrange(256 * KIB) % path.stat().st_size)
                    file.write(bytes([dice.randrange(256)]))
        self._open()

    def teardown(self) -> None:
        for lease in self.leases:
            lease.release()
        self.leases.clear()
        client, self.client = self.client, None
        if client is not None:
            client.store.upkeep.close()
            check_at_rest(client.store, PATIENCE_S)
            self._count(client)
            client.close()
        shutil.rmtree(self.path)


@pytest.fixture(scope="module")
def server() -> Iterator[ValkeyServer]:
    with running_server() as running:
        yield running


def machine_over(server: ValkeyServer) -> type[StoreMachine]:
    return type("Machine", (StoreMachine,), {"server": server, "seen": Counter()})


@pytest.mark.timeout(600)
def test_three_real_tiers_beside_a_dict_that_forgets_nothing(server: ValkeyServer) -> None:
    machine: Any = machine_over(server)
    run_state_machine_as_test(
        machine,
        settings=settings(
            max_examples=25,
            stateful_step_count=30,
            deadline=None,
            derandomize=True,
            suppress_health_check=list(HealthCheck),
            print_blob=True,
        ),
    )
    assert machine.seen["blocks leased"] > 20


def test_the_machine_meets_hits_and_damage_in_every_tier(server: ValkeyServer) -> None:
    """Or the test above would say less than it seems to."""
    machine = machine_over(server)()
    machine.begin(20, "on_evict")
    for shape in range(len(SHAPES)):
        for by in (None, "nvme", "valkey"):
            machine.round_trip((shape, 0, MAX_BLOCKS, 1), by, None)
    for seed in range(4):
        machine.round_trip((0, 1, MAX_BLOCKS, 1), "valkey", seed)
    machine.restart()
    machine.load((0, 0, MAX_BLOCKS, 1), keep=True)
    machine.clear(0)
    machine.teardown()
    assert machine.seen["blocks leased"] > 4 * MAX_BLOCKS
    for tier in ("nvme", "valkey"):
        assert machine.seen[f"read_blocks_total {tier} done"] >= MAX_BLOCKS, tier
    assert machine.seen["read_blocks_total valkey corrupt"] > 0
