"""``explain``: for each way to miss a block the cause that it names is the one that was brought about."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.client_support import (
    BLOCK_TOKENS,
    PATIENCE_S,
    chain_of,
    full_group,
    layout_of,
    live,
    loaded,
    prompt,
    put,
    put_all,
    window_group,
)
from tests.nvme_support import peek, poke
from tests.test_copier_engines import ReadyWhenTold, simple
from tests.valkey_server import ValkeyServer, eventually, free_port, running_server
from tierkv.errors import IdentityError
from tierkv.explanation import WORDS, Cause
from tierkv.keys import Adapter, Extras, Weights
from tierkv.units import KIB


def test_what_is_there_is_no_miss(tmp_path: Path) -> None:
    with live(8, nvme=tmp_path) as rig:
        chain = chain_of(rig.namespace(), 4)
        put_all(rig.client, chain)
        rig.flush("nvme")
        rig.client.evict("host")
        assert loaded(rig.client, chain_of(rig.namespace(), 2)) == 2
        told = rig.client.explain(chain)
        assert (told.blocks, told.usable, told.tokens, told.first_missing) == (4, 4, 64, None)
        assert told.causes == {Cause.IN_HOST: 2, Cause.COLDER: 2}
        assert (
            str(told) == "4 of 4 blocks can be had (64 tokens)\nall blocks: 2 in host RAM, 2 in a colder tier"
        )


def test_never_stored_and_where_a_prompt_goes_another_way() -> None:
    with live(8) as rig:
        space = rig.namespace()
        told = rig.client.explain(chain_of(space, 2, seed=7))
        assert told.causes == {Cause.NEVER_STORED: 2}
        assert told.twins == ()
        put_all(rig.client, chain_of(space, 3))
        other = space.chain([*prompt(32), *range(900_000, 900_017)])
        told = rig.client.explain(other)
        assert told.usable == 2
        assert told.first_missing is not None
        assert told.first_missing.cause is Cause.NEVER_STORED
        assert "1 other ways on" in str(told)


def test_evicted_from_each_tier_and_when(tmp_path: Path) -> None:
    with live(2, nvme=tmp_path, nvme_bytes=2 << 20, nvme_spec={"write": "through"}) as rig:
        space = rig.namespace()
        chain = chain_of(space, 2)
        put_all(rig.client, chain)
        rig.settle()
        rig.client.evict("host")
        rig.clock.advance(100.0)
        rig.store.leaving.delete(rig.store.room.evict_from(rig.store.edges[1], 2))
        rig.clock.advance(5.0)
        told = rig.client.explain(chain)
        assert told.causes == {Cause.EVICTED: 2}
        assert told.first_missing is not None
        assert told.first_missing.position == 0
        nvme, host = told.first_missing.left
        assert (nvme.tier, nvme.reason, host.tier, host.reason) == ("nvme", "capacity", "host", "asked")
        assert 5.0 <= nvme.age_s < 5.0 + PATIENCE_S
        assert 105.0 <= host.age_s < 105.0 + PATIENCE_S
        assert f"left nvme 5.{str(told).partition('left nvme 5.')[2][0]} s ago: room was needed" in str(told)


def test_dropped_for_want_of_room_and_offered_in_vain() -> None:
    with live(2) as rig:
        space = rig.namespace()
        first, second = chain_of(space, 1, seed=1), chain_of(space, 3, seed=2)
        put_all(rig.client, first)
        assert put(rig.client, second).stored == 2
        told = rig.client.explain(first)
        assert told.causes == {Cause.EVICTED: 1}
        assert "no colder tier wanted it" in str(told)
        told = rig.client.explain(second)
        assert told.causes == {Cause.IN_HOST: 2, Cause.NOT_TAKEN: 1}
        assert "was not stored" in str(told)
        assert WORDS["no_room"] in str(told)


def test_expired_before_and_after_it_was_taken_out(tmp_path: Path) -> None:
    with live(8, nvme=tmp_path) as rig:
        chain = chain_of(rig.namespace(), 2)
        put_all(rig.client, chain, ttl_s=30.0)
        rig.flush("nvme")
        rig.clock.advance(31.0)
        told = rig.client.explain(chain)
        assert told.causes == {Cause.EXPIRED: 2}
        assert told.usable == 0
        for _ in range(4):
            rig.store.upkeep.make_rounds()
        assert loaded(rig.client, chain) == 0
        assert rig.client.explain(chain).causes == {Cause.EXPIRED: 2}


def test_cleared(tmp_path: Path) -> None:
    with live(8, nvme=tmp_path) as rig:
        chain = chain_of(rig.namespace(), 3)
        put_all(rig.client, chain)
        rig.client.clear().result(PATIENCE_S)
        assert rig.client.explain(chain).causes == {Cause.CLEARED: 3}


def test_failed_verification(tmp_path: Path) -> None:
    with live(8, nvme=tmp_path) as rig:
        chain = chain_of(rig.namespace(), 3)
        put_all(rig.client, chain)
        rig.flush("nvme")
        rig.client.evict("host")
        key = chain.namespace.block_key(chain.hashes[1], 0)
        raw = peek(tmp_path, key)
        assert raw is not None
        poke(tmp_path, key, raw[:-1] + bytes([raw[-1] ^ 1]))
        assert loaded(rig.client, chain) == 1
        told = rig.client.explain(chain)
        assert told.usable == 1
        assert told.first_missing is not None
        assert (told.first_missing.position, told.first_missing.cause) == (1, Cause.CORRUPT)
        assert told.causes[Cause.BEHIND] == 1
        assert told.first_missing.left[0].tier == "nvme"


def test_incomplete_family_names_ranks_and_groups() -> None:
    layout = layout_of(full_group(), full_group(name="small"), tp_size=2)
    with live(16, region_blocks=4) as rig:
        chain = chain_of(rig.namespace(layout), 2)
        put(rig.client, chain, rank=0)
        told = rig.client.explain(chain)
        assert told.causes == {Cause.INCOMPLETE: 2}
        assert "missing: layer group 'full' of rank 1, layer group 'small' of rank 1" in str(told)
        rig.clock.advance(31.0)
        rig.store.upkeep.make_rounds()
        told = rig.client.explain(chain)
        assert told.causes == {Cause.INCOMPLETE: 2}
        assert told.first_missing is not None
        (left,) = told.first_missing.left
        assert left.missing == ("layer group 'full' of rank 1", "layer group 'small' of rank 1")


def test_a_tier_that_lost_it_and_one_that_does_not_answer() -> None:
    with running_server() as server, live(8, valkey=server.address, breaker_cooldown_s=600.0) as rig:
        chain = chain_of(rig.namespace(), 2)
        put_all(rig.client, chain)
        rig.flush("valkey")
        rig.client.evict("host")
        server.do("FLUSHALL")
        assert loaded(rig.client, chain) == 0
        told = rig.client.explain(chain)
        assert told.first_missing is not None
        assert told.first_missing.cause is Cause.LOST
        assert told.causes.keys() <= {Cause.LOST, Cause.BEHIND}, "what lies behind a hole need not be read"
        rig.settle()  # nor has it come to its end yet, and its pin would outstay the eviction
        put_all(rig.client, chain)
        rig.flush("valkey")
        rig.client.evict("host")
        _take_away(server, rig)
        told = rig.client.explain(chain)
        assert told.causes == {Cause.UNAVAILABLE: 2}
        assert "in valkey" in str(told)
        assert "valkey does not answer" in str(told)
        assert "valkey://" in str(told), "which server, and what is wrong with it"
        told = rig.client.explain(chain_of(rig.namespace(), 2, seed=3))
        assert told.causes == {Cause.UNAVAILABLE: 2}
        assert "cannot be asked" in str(told)


def test_a_server_that_is_away_is_named_before_its_breaker_opens() -> None:
    """The block may be there: it is not absent, and the way to the server is what somebody has to look at."""
    with live(8, valkey=f"valkey://127.0.0.1:{free_port()}", breaker_cooldown_s=600.0) as rig:
        chain = chain_of(rig.namespace(), 2)
        assert loaded(rig.client, chain) == 0
        assert not rig.store.edges[1].tier.breaker.is_open
        counters = rig.client.stats()["counters"]
        assert isinstance(counters, dict)
        assert counters["missed_blocks_total/unavailable"] == 2
        assert "missed_blocks_total/absent" not in counters
        assert "Connection refused" in str(rig.client.explain(chain))


def _take_away(server: ValkeyServer, rig: object) -> None:
    server.kill()
    edge = rig.store.edges[1]  # type: ignore[attr-defined]

    def tried() -> bool:
        rig.client.prefetch(chain_of(rig.namespace(), 1, seed=5)).result(PATIENCE_S)  # type: ignore[attr-defined]
        return bool(edge.tier.breaker.is_open)

    eventually(tried, "the breaker opens", PATIENCE_S)


def test_a_window_that_was_not_stored() -> None:
    layout = layout_of(full_group(), window_group(2 * BLOCK_TOKENS))
    with live(16) as rig:
        chain = chain_of(rig.namespace(layout), 4)
        put(rig.client, chain, count=3, absent=(1,))
        put(rig.client, chain, first=3, count=1)
        told = rig.client.explain(chain)
        assert told.usable == rig.client.match(chain).blocks == 0
        assert told.first_missing is not None
        assert told.first_missing.cause is Cause.NOT_ENOUGH
        assert "'window'" in str(told)


@pytest.mark.parametrize("error", ["", "device lost"])
def test_still_being_copied_out_of_the_engine_and_a_copy_that_failed(error: str) -> None:
    with live(4, block_bytes=16 * KIB) as rig:
        engine, chain, pages = simple(rig)
        ready = ReadyWhenTold(error or None)
        future = rig.client.offload(engine.kv, pages, chain, ready=ready)
        assert rig.client.explain(chain).causes == {Cause.PENDING: 2}
        ready.set()
        future.result(PATIENCE_S)
        told = rig.client.explain(chain)
        assert told.causes == {Cause.NOT_TAKEN if error else Cause.IN_HOST: 2}
        assert ("the copy out of the engine failed" in str(told)) == bool(error)


NAMESPACES: dict[str, dict[str, Any]] = {
    "weights.value": {"weights": Weights("revision", "r2")},
    "weights.kind": {"weights": Weights("digest", "r1")},
    "weights_epoch": {"weights_epoch": 1},
    "engine": {"engine": "other"},
    "lossy_codec": {"lossy_codec": "int8"},
    "salt": {"salt": "a secret of somebody"},
    "layout.dtype": {"layout": replace(layout_of(), dtype="float8_e4m3")},
    "layout.layout_id": {"layout": replace(layout_of(), layout_id="HND")},
    "layout.engine_blocks": {"layout": layout_of(engine_blocks=2)},
    "layout.tp_size": {"layout": layout_of(tp_size=2)},
    "layout.groups.full.page_bytes": {"layout": layout_of(full_group(8 * KIB))},
    "layout.groups.other": {"layout": layout_of(full_group(), full_group(name="other"))},
}


@pytest.mark.parametrize("field", NAMESPACES)
def test_a_namespace_that_differs_is_named_by_the_field(field: str) -> None:
    with live(8, block_bytes=16 * KIB) as rig:
        layout = NAMESPACES[field].get("layout")
        chosen = dict(NAMESPACES[field])
        there = rig.namespace(chosen.pop("layout", None), **chosen)
        stored = chain_of(there, 2)
        for rank in range(there.namespace.layout.ranks):
            put(rig.client, stored, rank=rank)
        told = rig.client.explain(chain_of(rig.namespace(), 4))
        assert told.causes == {Cause.NEVER_STORED: 4}, layout
        (twin,) = told.twins
        assert [one.field for one in twin.differs] == [field]
        assert twin.usable
        assert twin.namespace == there.namespace.digest
        assert f"the same beginning is stored under another name: {field}" in str(told)
        assert "secret" not in str(told)
        assert "secret" not in repr(told)
        rig.client.clear(namespace=there).result(PATIENCE_S)
        (twin,) = rig.client.explain(chain_of(rig.namespace(), 4)).twins
        assert not twin.usable
        assert twin.left is not None
        assert twin.left.reason == "cleared"


A = Adapter("a", "1")
EXTRAS = {
    "adapter.revision": (Extras(A), Extras(Adapter("a", "2"))),
    "adapter.name": (Extras(A), Extras(Adapter("b", "1"))),
    "adapter": (Extras(A), Extras()),
    "no adapter": (Extras(), Extras(A)),
    "cache_salt": (Extras(), Extras(cache_salt="a secret")),
    "prompt_embeds_hash": (Extras(), Extras(prompt_embeds_hash="e")),
}


@pytest.mark.parametrize("name", EXTRAS)
def test_d1_d2_the_same_tokens_with_other_extras(name: str) -> None:
    stored, asked = EXTRAS[name]
    with live(8) as rig:
        space = rig.namespace()
        tokens = prompt(40)
        put_all(rig.client, space.chain(tokens, extras=stored))
        told = rig.client.explain(space.chain(tokens, extras=asked))
        (twin,) = told.twins
        assert [one.field for one in twin.differs] == [name.removeprefix("no ")]
        assert "secret" not in str(told)
        assert "secret" not in repr(told)


def test_hashes_of_an_engine_differ_by_namespace_too() -> None:
    with live(8) as rig:
        hashes = [bytes([i]) * 32 for i in range(1, 4)]
        there = rig.namespace(hash_scheme="vllm", weights=Weights("revision", "r2"))
        put_all(rig.client, there.chain(engine_hashes=hashes))
        told = rig.client.explain(rig.namespace(hash_scheme="vllm").chain(engine_hashes=hashes))
        (twin,) = told.twins
        assert [str(one) for one in twin.differs] == ["weights.value: 'r1' here, 'r2' there"]


def test_block_hashes_from_a_log() -> None:
    with live(8) as rig:
        space = rig.namespace()
        chain = chain_of(space, 3)
        put_all(rig.client, chain)
        rig.client.clear().result(PATIENCE_S)
        told = rig.client.explain(namespace=space, hashes=[chain.hashes[2].hex(), chain.hashes[0]])
        assert told.causes == {Cause.CLEARED: 2}
        assert str(told.first_missing).startswith(
            f"block 0 ({chain.hashes[2].hex()[:12]}): cleared; left host"
        )
        for wrong in ("xyz", "ab", b"short", 32, 2**70):
            with pytest.raises(IdentityError, match="block hash"):
                rig.client.explain(namespace=space, hashes=[wrong])
        with pytest.raises(IdentityError, match="needs a chain"):
            rig.client.explain()


def test_prompts_that_cannot_be_cached() -> None:
    with live(8) as rig:
        space = rig.namespace()
        told = rig.client.explain(space.chain(prompt(40), extras=Extras(Adapter("a"))))
        assert told.blocks == 0
        assert "adapter 'a' has no revision" in str(told)
        assert "15 tokens, a block has 16" in str(rig.client.explain(space.chain(prompt(15))))


def test_blocks_that_nobody_opened_after_a_restart(tmp_path: Path) -> None:
    with live(8, nvme=tmp_path) as rig:
        put_all(rig.client, chain_of(rig.namespace(), 2))
        rig.flush("nvme")
    with live(8, nvme=tmp_path) as rig:
        told = rig.client.explain(chain_of(rig.namespace(engine="newer"), 2))
        assert "1 namespaces from before the last start" in str(told)
        assert rig.client.explain(chain_of(rig.namespace(), 2)).causes == {Cause.COLDER: 2}


def test_a_row_that_only_holds_its_children_knows_how_it_went(tmp_path: Path) -> None:
    """A corrupt parent leaves; its child stays, and so does the parent's row in the index."""
    with live(8, nvme=tmp_path) as rig:
        chain = chain_of(rig.namespace(), 3)
        put_all(rig.client, chain)
        with rig.store.catalog.lock:
            family = rig.store.catalog.index.spaces[0].get(chain.hashes[0])
            assert family is not None
            rig.store.catalog._lose(family, 0, evicted=False, reason="corrupt")
        told = rig.client.explain(chain)
        assert told.causes == {Cause.CORRUPT: 1, Cause.BEHIND: 2}
        assert told.usable == 0


def test_every_reason_to_leave_has_its_words() -> None:
    root = Path(__file__).parent.parent / "tierkv"
    found = set()
    for path in root.glob("*.py"):
        found |= set(re.findall(r'reason="(\w+)"', path.read_text()))
    assert "cleared" in found
    assert "asked" in found
    assert found <= WORDS.keys(), found - WORDS.keys()
