"""Demotions that run side by side into a tier that is full: each counts on room of its own."""

from pathlib import Path

import numpy as np

import tierkv
from tests.valkey_server import eventually
from tierkv.layout import GroupKind, LayerGroup, Layout

BLOCK = 64 * 1024
LAYOUT = Layout("t", "u8", 16, (LayerGroup("all", GroupKind.FULL, 1, BLOCK, 16),))
SPEC = tierkv.NamespaceSpec(weights=tierkv.Weights("revision", "1"), layout=LAYOUT, engine="t")
BLOCKS = 200


def test_d22_batches_side_by_side_do_not_count_on_the_same_room(tmp_path: Path) -> None:
    """A full NVMe tier takes what is written through, evicting as much, and refuses nothing."""
    with tierkv.open(
        host_capacity="64 MiB",
        nvme_path=tmp_path / "kv",
        nvme_capacity="32 MiB",
        nvme_min_free=0,
        nvme_write="through",
        limits_queue="128 MiB",
    ) as client:
        space = client.open_namespace(SPEC)
        catalog = client.store.catalog
        for number in range(4):
            chain = space.chain(np.arange(16 * BLOCKS, dtype=np.int32) + 100_000 * number)
            client.put(chain, [np.full(BLOCK, number, dtype=np.uint8)] * BLOCKS)
            eventually(lambda: not catalog.index.array("dirty").any(), "all is written", 30)
        counters = client.store.counters
        assert counters.get("written_blocks_total", "nvme", "done") == 4 * BLOCKS
        assert counters.get("evicted_blocks_total", "nvme", "capacity") >= BLOCKS
