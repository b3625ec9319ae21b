"""put, reserve and commit: only whole, written, committed blocks are stored, and what fails leaves nothing."""

from __future__ import annotations

import gc
import threading

import numpy as np
import pytest

from tests.client_support import (
    BLOCK_TOKENS,
    PATIENCE_S,
    audit,
    chain_of,
    check_lease,
    full_group,
    held,
    layout_of,
    live,
    loaded,
    payloads_of,
    prompt,
    put,
    put_all,
    window_group,
)
from tests.valkey_server import eventually, running_server
from tierkv.errors import HandleError, IdentityError, LayoutError
from tierkv.intake import Stored
from tierkv.keys import Adapter, Extras, MultimodalItem
from tierkv.testing.payloads import fill
from tierkv.testing.threads import run_together

pytestmark = pytest.mark.usefixtures("face")

BS = BLOCK_TOKENS


# ---- D6: what is stored


def test_d6_two_and_a_half_blocks_in_three_chunks_are_two_blocks() -> None:
    """Chunks of 20, 15 and 5 tokens: after each, all blocks that are whole by then are put."""
    with live() as rig:
        space = rig.namespace()
        visible = []
        for computed in (20, 35, 40):
            chain = space.chain(prompt(computed))
            put_all(rig.client, chain)
            visible.append(rig.client.match(space.chain(prompt(40))).blocks)
        assert visible == [1, 2, 2]
        assert rig.count("stored_blocks_total", "host") == 2
        assert loaded(rig.client, space.chain(prompt(40))) == 2


def test_d6_a_block_that_decoding_fills_is_stored_once() -> None:
    with live() as rig:
        space = rig.namespace()
        for computed in range(2 * BS, 4 * BS):
            put_all(rig.client, space.chain(prompt(computed)))
        assert rig.count("stored_blocks_total", "host") == 3
        assert [event.kind for event in rig.client.events()].count("stored") == 3


def test_d6_put_and_match_at_once_agree() -> None:
    with live() as rig:
        chain = chain_of(rig.namespace(), 5)
        stored = put(rig.client, chain)
        assert (stored.stored, stored.resident, stored.dropped) == (5, 0, {})
        assert rig.client.match(chain).blocks == 5
        again = put(rig.client, chain)
        assert (again.stored, again.resident, again.dropped) == (0, 5, {})
        assert loaded(rig.client, chain) == 5


def test_d6_what_is_not_committed_cannot_be_seen() -> None:
    with live() as rig:
        chain = chain_of(rig.namespace(), 2)
        draft = rig.client.reserve(chain)
        assert draft is not None
        assert rig.client.match(chain).blocks == 0
        for i, position in enumerate(draft.blocks.positions):
            fill(draft.view(i, 0), chain.namespace.block_key(chain.hashes[position], 0))
        sealed = draft.seal()
        assert rig.client.match(chain).blocks == 0
        assert loaded(rig.client, chain) == 0
        assert rig.client.commit(sealed, chain).stored == 2
        assert rig.client.match(chain).blocks == 2
        assert loaded(rig.client, chain) == 2


@pytest.mark.parametrize("state", ["draft", "sealed"])
@pytest.mark.parametrize("how", ["drop", "forget"])
def test_d6_d10_an_abort_before_the_commit_stores_nothing(state: str, how: str) -> None:
    with live(4) as rig:
        chain = chain_of(rig.namespace(), 3)
        draft = rig.client.reserve(chain)
        assert draft is not None
        handle = draft if state == "draft" else draft.seal()
        del draft
        if how == "drop":
            handle.drop()
        del handle
        gc.collect()
        assert rig.client.match(chain).blocks == 0
        assert rig.client.events() == []
        audit(rig.store)
        assert rig.store.host.free_bytes() == 4 * 4096
        put_all(rig.client, chain)
        assert loaded(rig.client, chain) == 3


@pytest.mark.parametrize(
    "extras",
    [
        Extras(adapter=Adapter("a")),
        Extras(multimodal=(MultimodalItem(None, 3),)),
        Extras(multimodal=(MultimodalItem(b"content", None),)),
        Extras(prompt_embeds_hash=""),
    ],
)
def test_d4_what_cannot_be_named_is_not_stored(extras: Extras) -> None:
    with live() as rig:
        chain = rig.namespace().chain(prompt(4 * BS), extras=extras)
        assert chain.uncacheable
        assert put(rig.client, chain) == Stored()
        assert rig.store.catalog.index.size == 0


def test_a_block_without_its_parent_is_dropped_and_counted() -> None:
    with live() as rig:
        chain = chain_of(rig.namespace(), 4)
        stored = put(rig.client, chain, first=2, count=2)
        assert stored.stored == 0
        assert stored.dropped == {"no_parent": 2}
        assert rig.count("dropped_blocks_total", "host", "no_parent") == 2
        assert rig.store.host.free_bytes() == 8 * 4096
        put_all(rig.client, chain)


def test_blocks_of_a_chunk_that_are_there_already_are_not_copied_again() -> None:
    with live() as rig:
        chain = chain_of(rig.namespace(), 4)
        put(rig.client, chain, count=2)
        draft = rig.client.reserve(chain)
        assert draft is not None
        assert list(draft.blocks.positions) == [2, 3]
        draft.drop()
        assert rig.client.reserve(chain, first=0, count=2) is None


# ---- input of the wrong shape


@pytest.mark.parametrize(("first", "count"), [(-1, 1), (0, 4), (3, 1), (4, 1)])
def test_blocks_beyond_the_chain_are_an_error(first: int, count: int) -> None:
    with live() as rig:
        chain = chain_of(rig.namespace(), 3)
        with pytest.raises(HandleError, match="the chain has 3 full blocks"):
            rig.client.put(chain, [b""] * count, first=first)


@pytest.mark.parametrize("size", [0, 1, 4095, 4097])
def test_a_payload_of_the_wrong_length_is_an_error_and_stores_nothing(size: int) -> None:
    with live() as rig:
        chain = chain_of(rig.namespace(), 2)
        with pytest.raises(HandleError, match=f"block 1: {size} bytes given, its part has 4096"):
            rig.client.put(chain, [bytes(4096), bytes(size)])
        assert rig.client.match(chain).blocks == 0
        put_all(rig.client, chain)


def test_a_wrong_number_of_buffers_is_an_error_and_stores_nothing() -> None:
    with live() as rig:
        space = rig.namespace(layout_of(full_group(), window_group(BS)))
        chain = chain_of(space, 1)
        with pytest.raises(HandleError, match="1 buffers for 2 layer groups"):
            rig.client.put(chain, [bytes(4096)])
        put_all(rig.client, chain)


def test_a_rank_that_does_not_exist_is_an_error() -> None:
    with live() as rig:
        with pytest.raises(LayoutError, match="ranks 0 to 0"):
            put(rig.client, chain_of(rig.namespace(), 1), rank=1)


def test_a_chain_of_another_client_is_refused() -> None:
    with live() as rig, live() as other:
        other.namespace()
        with pytest.raises(IdentityError, match="open_namespace"):
            put(rig.client, chain_of(other.namespace(), 1))


@pytest.mark.parametrize("kind", [bytes, bytearray, memoryview, np.uint8, np.float16, np.float32])
def test_payloads_of_every_kind_of_buffer(kind: type) -> None:
    with live() as rig:
        chain = chain_of(rig.namespace(), 1)
        [[raw]] = payloads_of(chain)
        payload = np.frombuffer(raw, kind) if issubclass(kind, np.generic) else kind(raw)
        assert rig.client.put(chain, [payload]).stored == 1
        assert loaded(rig.client, chain) == 1


@pytest.mark.parametrize("block_bytes", [1, 4095, 4096, 4097, 12_288])
def test_payloads_of_every_length(block_bytes: int) -> None:
    with live(8, block_bytes=16_384) as rig:
        chain = chain_of(rig.namespace(layout_of(full_group(block_bytes))), 3)
        put_all(rig.client, chain)
        assert loaded(rig.client, chain) == 3


# ---- room


def test_d16_a_pool_of_three_and_a_prompt_of_ten() -> None:
    with live(3) as rig:
        chain = chain_of(rig.namespace(), 10)
        stored = put(rig.client, chain)
        assert stored.stored == 3
        assert stored.dropped == {"no_room": 7}
        assert rig.client.match(chain).blocks == 3
        assert loaded(rig.client, chain) == 3
        assert rig.count("dropped_blocks_total", "host", "no_room") == 7


def test_d10_d16_an_arena_full_of_leased_blocks_drops_what_is_new() -> None:
    with live(4) as rig:
        space = rig.namespace()
        mine = chain_of(space, 4)
        put_all(rig.client, mine)
        other = chain_of(space, 2, seed=1)
        with rig.client.load(mine) as lease:
            stored = put(rig.client, other)
            assert stored.dropped == {"no_room": 2}
            assert rig.client.match(other).blocks == 0
            check_lease(rig.store, lease)
        put_all(rig.client, other)
        assert loaded(rig.client, other) == 2


def test_d10_drafts_that_are_still_being_written_are_not_taken_away() -> None:
    with live(4) as rig:
        space = rig.namespace()
        mine, other = chain_of(space, 4), chain_of(space, 3, seed=1)
        draft = rig.client.reserve(mine)
        assert draft is not None
        assert put(rig.client, other).dropped == {"no_room": 3}
        for i in range(4):
            fill(draft.view(i, 0), mine.namespace.block_key(mine.hashes[i], 0))
        rig.client.commit(draft.seal(), mine)
        assert loaded(rig.client, mine) == 4


def test_two_who_write_the_same_block_at_once_store_it_once() -> None:
    with live() as rig:
        chain = chain_of(rig.namespace(), 2)
        drafts = [rig.client.reserve(chain) for _ in range(2)]
        stored = 0
        for draft in drafts:
            assert draft is not None
            for i in range(2):
                fill(draft.view(i, 0), chain.namespace.block_key(chain.hashes[i], 0))
            stored += rig.client.commit(draft.seal(), chain).stored
        assert stored == 2
        assert rig.store.host.usage().used_bytes == 2 * 4096
        assert loaded(rig.client, chain) == 2


def test_d30_storing_the_next_block_does_not_evict_the_one_it_hangs_from() -> None:
    """Host RAM holds three blocks and is full of this very prompt when its fourth block is computed."""
    with live(3) as rig:
        chain = chain_of(rig.namespace(), 4)
        put(rig.client, chain, count=3)
        stored = put(rig.client, chain, first=3, count=1)
        assert stored.dropped == {"no_room": 1}
        assert rig.client.match(chain).blocks == 3
        assert loaded(rig.client, chain) == 3


def test_d10_an_index_that_is_full_drops_what_is_new_and_counts_it() -> None:
    with live(8, max_families=3) as rig:
        space = rig.namespace()
        stored = put(rig.client, chain_of(space, 5))
        assert (stored.stored, stored.dropped) == (3, {"index_full": 1, "no_parent": 1})
        assert rig.store.host.usage().used_bytes == 3 * 4096
        assert loaded(rig.client, chain_of(space, 5)) == 3
        rig.client.clear().result(PATIENCE_S)
        put_all(rig.client, chain_of(space, 3, seed=1))


def test_hints_make_room_in_a_full_index() -> None:
    """What is only known of a server is forgotten before a block is dropped."""
    with running_server() as server, live(8, valkey=server.address, max_families=6) as rig:
        space = rig.namespace()
        for seed in range(3):
            put_all(rig.client, chain_of(space, 2, seed))
            rig.flush("valkey")
            rig.client.evict("host")
        put_all(rig.client, chain_of(space, 3, seed=9))
        assert loaded(rig.client, chain_of(space, 3, seed=9)) == 3
        rig.client.evict("host")
        assert loaded(rig.client, chain_of(space, 2)) == 2, "the server still has it, and is asked"


# ---- families


def test_d8_parts_that_never_become_a_family_are_dropped_after_a_while() -> None:
    with live(8) as rig:
        space = rig.namespace(layout_of(tp_size=2))
        chain = chain_of(space, 2)
        put(rig.client, chain, rank=0)
        assert rig.store.host.usage().used_bytes == 2 * 4096
        rig.store.upkeep.make_rounds()
        assert rig.store.host.usage().used_bytes == 2 * 4096
        rig.clock.advance(3600)
        rig.store.upkeep.make_rounds()
        assert rig.store.host.usage().used_bytes == 0
        assert rig.count("dropped_blocks_total", "host", "incomplete") == 2
        assert rig.store.catalog.index.size == 0
        assert rig.client.events() == []


def test_d8_ranks_in_threads_of_their_own_make_whole_families() -> None:
    with live(64) as rig:
        space = rig.namespace(layout_of(full_group(), full_group(name="latent", replicated=True), tp_size=4))
        chain = chain_of(space, 8)
        run_together([lambda rank=rank: put(rig.client, chain, rank=rank) for rank in range(4)], PATIENCE_S)  # type: ignore[misc]
        assert rig.client.match(chain).blocks == 8
        assert loaded(rig.client, chain) == 8
        assert rig.store.host.usage().used_bytes == 8 * 5 * 4096


def test_a_window_that_has_moved_on_is_stored_without_its_part() -> None:
    with live(8) as rig:
        space = rig.namespace(layout_of(full_group(), window_group(BS)))
        chain = chain_of(space, 3)
        put(rig.client, chain, count=2, absent=[1])
        put(rig.client, chain, first=2, count=1)
        assert rig.store.host.usage().used_bytes == 4 * 4096
        assert rig.client.match(chain).blocks == 3
        with rig.client.load(chain) as lease:
            check_lease(rig.store, lease)
            with pytest.raises(HandleError, match="block 0 was stored without part 1"):
                lease.view(0, 1)


# ---- threads


def test_many_threads_store_one_chain_and_each_block_is_stored_once() -> None:
    with live(16) as rig:
        chain = chain_of(rig.namespace(), 12)
        totals: list[Stored] = []
        lock = threading.Lock()

        def work(step: int) -> None:
            for last in range(step, 13, step):
                stored = put(rig.client, chain, count=last)
                with lock:
                    totals.append(stored)

        run_together([lambda step=step: work(step) for step in (1, 2, 3, 4)], PATIENCE_S)  # type: ignore[misc]
        assert sum(stored.stored for stored in totals) == 12
        assert rig.count("stored_blocks_total", "host") == 12
        assert rig.client.match(chain).blocks == 12
        assert loaded(rig.client, chain) == 12


def test_offers_of_room_race_and_nothing_is_lost() -> None:
    """Threads store more than fits; afterwards every slot belongs to one block and every block is right."""
    with live(6) as rig:
        space = rig.namespace()

        def work(seed: int) -> None:
            for turn in range(30):
                put(rig.client, chain_of(space, 1 + turn % 4, seed=seed * 100 + turn))

        run_together([lambda seed=seed: work(seed) for seed in range(4)], PATIENCE_S)  # type: ignore[misc]
        rig.settle()
        audit(rig.store)
        found = 0
        for seed in range(4):
            for turn in range(30):
                chain = chain_of(space, 1 + turn % 4, seed=seed * 100 + turn)
                found += len(held(rig.store, chain)["host"])
                assert loaded(rig.client, chain) == len(held(rig.store, chain)["host"])
        assert found == 6
        eventually(lambda: rig.client.stats()["leases"] == 0, "no lease is left")
