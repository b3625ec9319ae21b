"""A disk that holds less than host RAM: what is written there can be found after a restart, all of it."""

from pathlib import Path

import numpy as np
import pytest

import tierkv
from tierkv.testing.threads import switching_every

GROUP = tierkv.LayerGroup("all", tierkv.GroupKind.FULL, layers=4, page_bytes=16384, engine_block_tokens=16)
LAYOUT = tierkv.Layout("pages", "float16", hash_tokens=16, groups=(GROUP,))
SPEC = tierkv.NamespaceSpec(weights=tierkv.Weights("revision", "v1"), layout=LAYOUT, engine="tests")
PROMPTS, BLOCKS = 40, 6


def opened(path: Path) -> tierkv.Client:
    return tierkv.open(
        host_capacity="32 MiB",
        host_region="8 MiB",
        nvme_path=str(path),
        nvme_capacity="8 MiB",
        nvme_min_free=0,
    )


@pytest.mark.parametrize("life", range(16))
def test_d23_d30_a_flush_to_a_disk_that_is_too_small_leaves_no_block_without_its_ancestors(
    tmp_path: Path, life: int
) -> None:
    """However the threads that write take turns: one may fail to write a parent while another writes its child."""
    with switching_every((5e-3, 1e-3, 1e-4, 1e-5)[life % 4]):
        _flush_and_look(tmp_path)


def _flush_and_look(tmp_path: Path) -> None:
    payloads = [np.full(4 * 16384, number, np.uint8) for number in range(BLOCKS)]
    with opened(tmp_path / "tier") as client:
        space = client.open_namespace(SPEC)
        chains = [space.chain(np.arange(1000 * n, 1000 * n + 16 * BLOCKS + 1)) for n in range(PROMPTS)]
        for chain in chains:
            assert client.put(chain, payloads).stored == BLOCKS
        report = client.flush("nvme", timeout_s=60).result(90)
        assert report.failed > 0, "not all of it can have found room"
    with opened(tmp_path / "tier") as client:
        client.open_namespace(SPEC)
        usable = sum(client.match(chain).tiers.get("nvme", 0) for chain in chains)
        on_disk = client.store.edges[client.store.tier_number("nvme")].tier.usage().blocks
        assert usable > 0
        assert usable == on_disk, "some of what is on the disk can never be found"
