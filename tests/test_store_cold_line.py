"""A chain's head cannot leave host RAM before its tail, so blocks that are clean make room only when what hangs from
them is clean too."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import tierkv
from tierkv.client import Client
from tierkv.jobs import BATCH_BLOCKS
from tierkv.units import MIB

BLOCK_BYTES = 16 * 1024
SLOTS = 12 * BATCH_BLOCKS
"""More than one demotion writes."""
PATIENCE_S = 20.0


@pytest.fixture
def client(tmp_path: Path) -> Iterator[Client]:
    with tierkv.open(
        host_capacity=SLOTS * BLOCK_BYTES, host_region=MIB, nvme_path=tmp_path / "nvme", nvme_capacity="64 MiB",
        nvme_min_free=0,
    ) as opened:  # fmt: skip
        yield opened


class Chains:
    """Chains of one namespace, each of its own tokens."""

    def __init__(self, client: Client) -> None:
        group = tierkv.LayerGroup("all", tierkv.GroupKind.FULL, 1, BLOCK_BYTES, engine_block_tokens=16)
        layout = tierkv.Layout("pages", "float16", hash_tokens=16, groups=(group,))
        self._space = client.open_namespace(
            tierkv.NamespaceSpec(weights=tierkv.Weights("revision", "1"), layout=layout, engine="test")
        )
        self._client = client

    def put(self, number: int, blocks: int, first: int = 0) -> Any:
        chain = self._space.chain(np.arange(blocks * 16) + 100_000 * number)
        payloads = [np.full(BLOCK_BYTES, number, np.uint8)] * (blocks - first)
        return self._client.put(chain, payloads, first=first)


def wait_until_on_disk(client: Client, blocks: int) -> None:
    """And until nobody holds them any more."""
    store = client.store

    def there() -> bool:
        return store.counters.get("written_blocks_total", "nvme", "done") >= blocks and store.reaper.idle()

    assert store.executor.wait_until(there, PATIENCE_S), "cleaning has stopped before the end of the chain"


def test_d16_a_chain_that_fills_host_ram_is_cleaned_to_its_end(client: Client) -> None:
    chains = Chains(client)
    assert chains.put(0, SLOTS).stored == SLOTS
    wait_until_on_disk(client, SLOTS)
    assert [chains.put(number, 10).stored for number in range(1, 5)] == [10] * 4


def test_d16_a_clean_chain_that_grows_is_cleaned_before_anybody_asks_for_room(client: Client) -> None:
    chains = Chains(client)
    grow(client, chains)
    wait_until_on_disk(client, SLOTS)
    assert chains.put(1, 10).stored == 10


def test_d16_who_finds_nothing_clean_has_the_coldest_chain_cleaned(client: Client) -> None:
    store = client.store
    store.reaper._evictable_bytes = lambda enough: enough  # as if nobody looked ahead
    chains = Chains(client)
    grow(client, chains)
    assert chains.put(1, 10).stored == 10  # enough is clean, but all of it hangs above what is not
    dropped = store.counters.get("dropped_blocks_total", "host", "dropped_dirty")
    assert dropped == 10, "the end of the coldest chain has made way"
    wait_until_on_disk(client, SLOTS - 10)
    assert chains.put(2, 10).stored == 10
    assert store.counters.get("dropped_blocks_total", "host", "dropped_dirty") == dropped


@pytest.mark.parametrize("round_", range(3))
def test_d30_batches_that_are_written_side_by_side_leave_the_disk_from_the_tail(
    client: Client, round_: int
) -> None:
    """They end in any order; the policy hears of them in the order of the chain."""
    chains = Chains(client)
    chains.put(0, SLOTS)
    assert client.flush("nvme").result().failed == 0
    catalog = client.store.catalog
    policy = catalog.tiers[client.store.tier_number("nvme")].policy
    assert policy is not None
    with catalog.lock:
        cold_first = [catalog.index.depth[family] for family in policy.victims(SLOTS, lambda _: True)]
    assert cold_first == list(reversed(range(SLOTS)))
    assert not catalog._followers
    assert not catalog._following


def grow(client: Client, chains: Chains) -> None:
    """A chain that is clean up to its middle and fills host RAM."""
    chains.put(0, SLOTS * 2 // 3)
    assert client.flush("nvme").result().failed == 0
    assert chains.put(0, SLOTS, first=SLOTS * 2 // 3).stored == SLOTS - SLOTS * 2 // 3
