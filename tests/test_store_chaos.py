"""Every verb at once from many threads over all three tiers: right bytes or a miss, and books that add up after."""

from __future__ import annotations

import random
import threading
from pathlib import Path

import pytest

from tests.client_support import (
    PATIENCE_S,
    Live,
    audit,
    chain_of,
    check_lease,
    full_group,
    layout_of,
    live,
    loaded,
    poison_free_slots,
    put,
    window_group,
)
from tests.test_copier_engines import simple
from tests.valkey_server import running_server
from tierkv.namespaces import OpenNamespace
from tierkv.testing.threads import run_together
from tierkv.units import KIB


def one_verb(rig: Live, spaces: list[OpenNamespace], dice: random.Random) -> None:
    client = rig.client
    space = dice.choice(spaces)
    chain = chain_of(space, dice.randint(1, 5), seed=dice.randrange(8))
    match dice.randrange(24):
        case 0:
            client.evict(dice.choice(["host", "nvme", "valkey"]))
        case 1:
            future = client.clear(namespace=space.namespace)
            if dice.random() < 0.5:
                future.result(PATIENCE_S)
        case 2:
            client.flush(dice.choice(["nvme", "valkey"]), timeout_s=PATIENCE_S)
        case 3:
            client.pin(chain, timeout_s=PATIENCE_S)
            client.unpin(chain)
        case 4:
            future = client.load_async(chain, timeout_s=0.001)
            if not future.cancel():
                future.result(PATIENCE_S).release()
        case 5:
            client.prefetch(chain, timeout_s=0.01)
        case 6:
            draft = client.reserve(chain)
            if draft is not None and dice.random() < 0.5:
                draft.drop()
        case 7:
            assert client.match(chain).blocks <= len(chain)
            client.stats()
        case 8:
            engine, own, pages = simple(rig)
            engine.write(own, pages)
            client.offload(engine.kv, pages, own).result(PATIENCE_S)
        case number if number < 15:
            put(client, chain, priority=dice.choice([0, 0, 1]), ttl_s=dice.choice([None, None, 0.01]))
        case _:
            poison_free_slots(rig.store)
            with client.load(chain, timeout_s=PATIENCE_S) as lease:
                check_lease(rig.store, lease)
                threading.Event().wait(0)
                check_lease(rig.store, lease)


@pytest.mark.parametrize("write", ["through", "on_evict"])
def test_all_verbs_at_once(tmp_path: Path, write: str) -> None:
    spec = {"write": write}
    options = {"segment_bytes": 64 * KIB}
    with (
        running_server() as server,
        live(
            16,
            region_blocks=4,
            nvme=tmp_path,
            nvme_bytes=512 * KIB,
            nvme_options=options,
            nvme_spec=spec,
            valkey=server.address,
            valkey_spec=spec,
            max_families=64,
        ) as rig,
    ):
        spaces = [
            rig.namespace(),
            rig.namespace(salt="x"),
            rig.namespace(layout_of(full_group(8 * KIB), window_group(32, 4 * KIB))),
        ]

        def work(seed: int) -> None:
            dice = random.Random(seed)
            for _ in range(120):
                one_verb(rig, spaces, dice)

        run_together([lambda seed=seed: work(seed) for seed in range(6)], 3 * PATIENCE_S)  # type: ignore[misc]
        rig.settle()
        audit(rig.store)
        assert rig.client.stats()["leases"] == 0
        assert rig.store.counters.sum("corrupt_blocks_total") == 0
        for space in spaces:
            for seed in range(8):
                loaded(rig.client, chain_of(space, 5, seed))
        report = rig.client.clear().result(PATIENCE_S)
        assert report.complete
        rig.settle()
        assert rig.store.catalog.index.size == 0
        assert rig.store.host.usage().used_bytes == 0
        assert rig.tiers["nvme"].usage().blocks == 0
        assert server.do("DBSIZE") == 0
