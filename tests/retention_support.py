"""The ways into a store, and a look at what its tiers hold, for the tests of retention."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from tests.client_support import PATIENCE_S, Live, payloads_of
from tierkv.copier import LayerPages, PagedKV
from tierkv.frame import FrameHeader
from tierkv.ids import FamilyId
from tierkv.intake import Stored
from tierkv.keys import Chain
from tierkv.retention import Retention

THROUGH = {"write": "through"}


def by_put(rig: Live, chain: Chain, retention: Retention) -> Stored:
    return rig.client.put(chain, payloads_of(chain), retention=retention)


def by_offload(rig: Live, chain: Chain, retention: Retention) -> Stored:
    pages = np.stack([np.frombuffer(payload, np.uint8) for [payload] in payloads_of(chain)])
    kv = PagedKV(((LayerPages((pages,)),),))
    where = [[[block]] for block in range(len(chain))]
    return rig.client.offload(kv, where, chain, retention=retention).result(PATIENCE_S)


def by_commit(rig: Live, chain: Chain, retention: Retention) -> Stored:
    result = Stored()
    draft = rig.client.reserve(chain, retention=retention, result=result)
    if draft is not None:
        payloads = payloads_of(chain)
        for i, position in enumerate(draft.blocks.positions):
            draft.view(i, 0)[:] = payloads[position][0]
        rig.client.commit(draft.seal(), chain, retention=retention, result=result)
    return result


WAYS: list[Callable[[Live, Chain, Retention], Stored]] = [by_put, by_offload, by_commit]


def frames_on_disk(rig: Live) -> list[FrameHeader]:
    return sorted(rig.tiers["nvme"].scan(), key=lambda header: header.depth)


def on_disk(rig: Live) -> int:
    """Blocks that the disk holds, whoever knows of them."""
    return rig.tiers["nvme"].usage().blocks


def families_of(rig: Live, chain: Chain) -> list[FamilyId]:
    space = rig.store.catalog.index.space(chain.namespace.digest)
    assert space is not None
    found = [space.get(block_hash) for block_hash in chain.hashes]
    return [family for family in found if family is not None]


def priorities(rig: Live, chain: Chain) -> list[int]:
    return [rig.store.catalog.index.priority[family] for family in families_of(rig, chain)]


def ends_in_s(rig: Live, chain: Chain) -> list[float]:
    """Seconds until each block's end, rounded; 0 where it has none."""
    index, now_s = rig.store.catalog.index, rig.clock.now_s()
    ends = [index.expires_s[family] for family in families_of(rig, chain)]
    return [round(end_s - now_s, 1) if end_s else 0.0 for end_s in ends]


class Always:
    """A promotion policy with one answer."""

    name = "always"

    def __init__(self, answer: Any) -> None:
        self.answer = answer

    def decide(self, quote: object, usage: object) -> Any:
        return self.answer

    def counters(self) -> dict[str, int]:
        return {}
