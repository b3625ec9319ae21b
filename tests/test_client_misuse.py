"""What users get wrong, and disks that hang: it may fail a call, never others, and nobody waits past a deadline."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.client_support import (
    PATIENCE_S,
    Gate,
    chain_of,
    full_group,
    layout_of,
    live,
    loaded,
    payloads_of,
    put,
    put_all,
    spec_of,
    window_group,
)
from tierkv.catalog import Catalog
from tierkv.copier import LayerPages, PagedKV
from tierkv.errors import ConfigError, HandleError, LayoutError
from tierkv.ids import FamilyId
from tierkv.index import FamilyIndex
from tierkv.layout import GroupKind, LayerGroup, Layout
from tierkv.retention import Retention

pytestmark = pytest.mark.usefixtures("face")

PAGE_BYTES = 2048
TWO_PAGES = Layout("test", "uint8", 16, (LayerGroup("full", GroupKind.FULL, 2, PAGE_BYTES, 16),), 2)


def memory(*, writeable: bool = True) -> tuple[list[np.ndarray[Any, Any]], PagedKV]:
    layers = [np.arange(8 * PAGE_BYTES).reshape(8, PAGE_BYTES).astype(np.uint8) for _ in range(2)]
    for layer in layers:
        layer.flags.writeable = writeable
    return layers, PagedKV(groups=(tuple(LayerPages((layer,)) for layer in layers),))


class Watched(FamilyIndex):
    """Calls ``look`` whenever one of its attributes has been given a new value."""

    look: Callable[[], None] | None = None

    def __setattr__(self, name: str, value: Any) -> None:
        super().__setattr__(name, value)
        if self.look is not None and name != "look":
            self.look()


@pytest.mark.embedded_only
def test_d11_a_slot_is_found_while_a_namespace_with_more_parts_is_opened() -> None:
    index = Watched(1000, 1)
    index.slots[:, 0] = range(1001)
    catalog = Catalog.__new__(Catalog)
    catalog.index = index
    seen: list[int] = []
    index.look = lambda: seen.append(catalog.slot_of(FamilyId(300), 0))
    for parts in (2, 3, 7):
        index.widen(parts)
    assert len(seen) >= 9
    assert set(seen) == {300}


@pytest.mark.parametrize("pages", [[3], [3, 4, 5]])
def test_d9_onboard_refuses_another_number_of_pages_than_a_block_has(pages: list[int]) -> None:
    with live(8, block_bytes=8192) as rig:
        chain = chain_of(rig.namespace(TWO_PAGES), 1)
        put_all(rig.client, chain)
        with (
            rig.client.load(chain) as lease,
            pytest.raises(HandleError, match=f"{len(pages)} pages given, a block has 2"),
        ):
            rig.client.onboard(lease, memory()[1], [[pages]])


def test_an_offload_of_wrong_pages_keeps_no_slot() -> None:
    with live(1, block_bytes=8192) as rig:
        chain = chain_of(rig.namespace(TWO_PAGES), 1)
        with pytest.raises(HandleError, match="3 pages given, a block has 2") as caught:
            rig.client.offload(memory()[1], [[[3, 4, 5]]], chain)
        # The error, which is still held, holds the draft: no garbage collector has dropped it.
        assert put(rig.client, chain).stored == 1, caught


def _callback(group: int, layer: int) -> None:
    raise KeyError("the engine's own")


class _Event:
    def synchronize(self) -> None:
        raise OSError("the engine's own")


def test_d13_what_an_engine_raises_fails_its_call_and_no_other() -> None:
    with live(8, block_bytes=8192) as rig:
        space = rig.namespace(TWO_PAGES)
        chain, other = chain_of(space, 1, 1), chain_of(space, 1, 2)
        put_all(rig.client, chain)
        layers, kv = memory()
        with rig.client.load(chain) as lease:
            calls = [
                rig.client.onboard(lease, memory(writeable=False)[1], [[[3, 4]]]),
                rig.client.onboard(lease, kv, [[[3, 4]]], on_layer=_callback),
                rig.client.onboard(lease, kv, [[[None, 4]]]),  # type: ignore[list-item]
                rig.client.onboard(lease, kv, [[[3.0, 4.0]]]),  # type: ignore[list-item]
            ]
            assert [call.result(PATIENCE_S) for call in calls] == [False] * 4
            failed = rig.client.offload(kv, [[[0, 1]]], other, ready=_Event()).result(PATIENCE_S)
            assert failed.dropped == {"copy_failed": 1}
            assert rig.client.onboard(lease, kv, [[[3, 4]]]).result(PATIENCE_S)
            payload = bytes(lease.view(0))
        found = b"".join(layer[page].tobytes() for layer in layers for page in (3, 4))
        assert found == payload
        assert rig.client.offload(kv, [[[0, 1]]], other).result(PATIENCE_S).stored == 1


@pytest.mark.parametrize("ttl_s", [-math.inf, math.nan, 1e17, 0.0, -1.0])
def test_d29_an_expiry_that_no_frame_can_hold_is_refused(ttl_s: float, tmp_path: Path) -> None:
    with live(nvme=tmp_path) as rig:
        chain = chain_of(rig.namespace(), 2)
        with pytest.raises(ConfigError, match="ttl_s"):
            put(rig.client, chain, ttl_s=ttl_s)
        assert put(rig.client, chain, ttl_s=1e9).stored == 2
        rig.flush("nvme")


@pytest.mark.embedded_only
def test_d29_a_priority_that_is_no_number_is_refused_before_anything_is_stored() -> None:
    with pytest.raises(ConfigError, match=r"priority = 1\.5"):
        Retention(priority=1.5)  # type: ignore[arg-type]
    assert Retention(priority=np.int64(3)).priority == 3  # type: ignore[arg-type]


@pytest.mark.embedded_only
def test_d17_clear_tells_by_its_deadline_what_a_hung_disk_has_not_done(tmp_path: Path) -> None:
    with live(nvme=tmp_path, close=False) as rig:
        put_all(rig.client, chain_of(rig.namespace(), 3))
        gate = Gate("put_from")
        rig.tiers["nvme"].before = gate
        rig.client.flush("nvme")
        gate.reached()
        report = rig.client.clear(timeout_s=0.05).result(PATIENCE_S)
        assert report.tiers["host"].complete
        assert not report.tiers["nvme"].complete
        late = rig.client.clear(timeout_s=1000.0)
        assert rig.store.close(0.1)
        assert not late.result(PATIENCE_S).complete
        gate.open()


def test_d17_a_load_from_a_hung_disk_ends_with_the_store(tmp_path: Path) -> None:
    with live(nvme=tmp_path, close=False) as rig:
        chain = chain_of(rig.namespace(), 3)
        put_all(rig.client, chain)
        rig.flush("nvme")
        rig.client.evict("host")
        gate = Gate("get_into")
        rig.tiers["nvme"].before = gate
        coming = rig.client.load_async(chain, timeout_s=1000.0)
        gate.reached()
        assert rig.store.close(0.1)
        assert len(coming.result(PATIENCE_S)) == 0
        gate.open()


def test_close_takes_any_time() -> None:
    with live(close=False) as rig:
        rig.client.close(math.inf)


TWO_RANKS = layout_of(full_group(), window_group(16), tp_size=2)


def test_d8_blocks_of_other_ranks_are_no_hits_after_a_restart(tmp_path: Path) -> None:
    with live(16, nvme=tmp_path) as rig:
        chain = chain_of(rig.client.open_namespace(spec_of(TWO_RANKS), ranks=[0]), 2)
        put_all(rig.client, chain, rank=0)
        rig.flush("nvme")
    with live(16, nvme=tmp_path) as rig:
        chain = chain_of(rig.client.open_namespace(spec_of(TWO_RANKS)), 2)
        assert rig.client.match(chain).blocks == 0
        for rank in (0, 1):
            put(rig.client, chain, rank=rank)
        rig.flush("nvme")
        rig.client.evict("host")
        assert loaded(rig.client, chain) == 2
    with live(16, nvme=tmp_path) as rig:
        chain = chain_of(rig.client.open_namespace(spec_of(TWO_RANKS), ranks=[1]), 2)
        assert loaded(rig.client, chain) == 2


def test_d8_a_rank_that_is_not_on_this_host_is_refused() -> None:
    with live(16) as rig:
        chain = chain_of(rig.client.open_namespace(spec_of(TWO_RANKS), ranks=[0]), 2)
        with pytest.raises(LayoutError, match=r"opened for the ranks \[0\]"):
            put(rig.client, chain, rank=1)


def test_d8_onboard_says_no_when_a_block_lacks_this_ranks_part() -> None:
    """Blocks that were leased before the namespace was opened for more ranks."""
    layout = layout_of(full_group(), tp_size=2)
    with live(16) as rig:
        chain = chain_of(rig.client.open_namespace(spec_of(layout), ranks=[0]), 2)
        put_all(rig.client, chain, rank=0)
        pages = np.full((4, 4096), 0xAA, np.uint8)
        kv = PagedKV(groups=((LayerPages((pages,)),),))
        with rig.client.load(chain) as lease:
            rig.client.open_namespace(spec_of(layout), ranks=[0, 1])
            assert rig.client.match(chain).blocks == 0
            assert not rig.client.onboard(lease, kv, [[[0]], [[1]]], rank=1).result(PATIENCE_S)
            assert rig.client.onboard(lease, kv, [[[2]], [[3]]], rank=0).result(PATIENCE_S)
        assert pages[2:].tobytes() == b"".join(block[0] for block in payloads_of(chain, rank=0))
        assert (pages[:2] == 0xAA).all()


def test_d4_sealed_blocks_are_not_registered_under_another_namespace() -> None:
    with live(8) as rig:
        spaces = [rig.namespace(engine=name, hash_scheme="engine's") for name in ("one", "other")]
        mine, other = (
            space.chain(engine_hashes=[bytes([7]) * 32, bytes([8]) * 32], num_tokens=40) for space in spaces
        )
        draft = rig.client.reserve(mine)
        assert draft is not None
        sealed = draft.seal()
        with pytest.raises(HandleError, match="another namespace"):
            rig.client.commit(sealed, other)
        assert rig.client.match(other).blocks == 0
        assert rig.client.commit(sealed, mine).stored == 2


class _Bug(Exception):
    """What a plug-in raises that should raise nothing."""


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
@pytest.mark.parametrize("call", ["get_into", "put_from", "clear"])
@pytest.mark.embedded_only
def test_d17_a_tier_that_raises_is_ill_and_its_workers_go_on(call: str, tmp_path: Path) -> None:
    with live(8, nvme=tmp_path, breaker_failures=2, breaker_cooldown_s=0.01) as rig:
        chain = chain_of(rig.namespace(), 3)
        put_all(rig.client, chain)
        if call == "get_into":
            rig.flush("nvme")
            rig.client.evict("host")

        def bug(called: str) -> None:
            if called == call:
                raise _Bug

        rig.tiers["nvme"].before = bug
        for _ in range(5):  # more often than there are workers
            if call == "get_into":
                assert len(rig.client.load(chain)) == 0
            elif call == "put_from":
                assert rig.client.flush("nvme").result(PATIENCE_S).written == 0
            else:
                assert not rig.client.clear().result(PATIENCE_S).complete
        rig.tiers["nvme"].before = lambda called: None
        rig.settle()
        rig.clock.advance(1.0)
        if call == "get_into":
            loaded(rig.client, chain)  # an open breaker is tried with one call
            rig.settle()
            assert loaded(rig.client, chain) == 3
        elif call == "put_from":
            rig.flush("nvme")
        assert rig.client.clear().result(PATIENCE_S).complete


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
@pytest.mark.embedded_only
def test_d13_a_callback_that_exits_ends_no_lane_and_no_deadline(tmp_path: Path) -> None:
    def leave(_: object) -> None:
        raise SystemExit(3)

    with live(8, nvme=tmp_path, close=False) as rig:
        chain = chain_of(rig.namespace(), 3)
        put_all(rig.client, chain)
        rig.flush("nvme")
        rig.client.evict("host")
        gate = Gate("get_into")
        rig.tiers["nvme"].before = gate
        rig.client.load_async(chain, timeout_s=0.01).add_done_callback(
            leave
        )  # told by the thread of the timers
        assert len(rig.client.load(chain, timeout_s=0.05)) == 0
        gate.open()
        rig.settle()
        rig.client.prefetch(chain).add_done_callback(leave)  # told by a worker
        for _ in range(5):
            rig.client.evict("host")
            assert loaded(rig.client, chain) == 3
        assert rig.store.close() == []


@pytest.mark.parametrize("timeout_s", [-math.inf, -1.0, 1e-300, 1e9, 1e18, 1e308, math.inf])
def test_any_time_is_a_time(tmp_path: Path, timeout_s: float) -> None:
    """Less than none is none, and more than anybody lives is as long as it takes."""
    with live(8, nvme=tmp_path) as rig:
        space = rig.namespace()
        chain, client = chain_of(space, 2), rig.client
        put_all(client, chain)
        assert loaded(client, chain, timeout_s=timeout_s) == 2
        client.load_async(chain, timeout_s=timeout_s).result(PATIENCE_S).release()
        assert client.prefetch(chain, timeout_s=timeout_s).result(PATIENCE_S).blocks == 2
        assert client.pin(chain, timeout_s=timeout_s) == 2
        assert client.unpin(chain) == 2
        client.announce(chain_of(space, 1, seed=1), timeout_s=timeout_s).cancel()
        assert client.watch(chain, grace_s=0.0, timeout_s=timeout_s).result(PATIENCE_S).match.blocks == 2
        client.flush("nvme", timeout_s=timeout_s).result(PATIENCE_S)
        client.evict("host", timeout_s=timeout_s)
        assert client.clear(namespace=space, timeout_s=timeout_s).result(PATIENCE_S)
