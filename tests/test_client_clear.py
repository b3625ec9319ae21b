"""clear: gone in every tier and for good, whatever is going on at the same time."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.client_support import (
    PATIENCE_S,
    Gate,
    Live,
    audit,
    chain_of,
    check_lease,
    held,
    live,
    loaded,
    poison_free_slots,
    put,
    put_all,
)
from tests.valkey_server import ValkeyServer, eventually, running_server
from tierkv.clearing import Clearing
from tierkv.clock import Deadline
from tierkv.errors import IdentityError
from tierkv.ids import FamilyId, KeyPrefix
from tierkv.keys import Chain
from tierkv.tier import ClearResult

pytestmark = pytest.mark.usefixtures("face")

NOWHERE: dict[str, list[int]] = {"host": [], "nvme": [], "valkey": []}


@pytest.fixture(scope="module")
def server() -> Iterator[ValkeyServer]:
    with running_server() as server:
        yield server


@pytest.fixture(autouse=True)
def _empty_server(server: ValkeyServer) -> None:
    server.do("FLUSHALL")


def everywhere(rig: Live, chain: Chain) -> None:
    """Puts a chain into all three tiers."""
    put_all(rig.client, chain)
    rig.flush("nvme")
    rig.flush("valkey")


def assert_gone(rig: Live, *chains: Chain) -> None:
    for chain in chains:
        assert rig.client.match(chain).blocks == 0
        assert loaded(rig.client, chain) == 0
        assert held(rig.store, chain) == {tier.name: [] for tier in rig.store.catalog.tiers}


def test_d27_clear_covers_every_tier_and_tells_what_each_did(tmp_path: Path, server: ValkeyServer) -> None:
    with live(nvme=tmp_path, valkey=server.address) as rig:
        space = rig.namespace()
        first, second = chain_of(space, 3), chain_of(space, 2, seed=1)
        everywhere(rig, first)
        put_all(rig.client, second)
        future = rig.client.clear()
        assert rig.client.match(first).blocks == 0, "nothing can be matched as soon as the call returns"
        report = future.result(PATIENCE_S)
        assert report.complete
        assert {name: (result.removed, result.complete) for name, result in report.tiers.items()} == {
            "host": (5, True),
            "nvme": (3, True),
            "valkey": (3, True),
        }
        assert_gone(rig, first, second)
        assert rig.store.host.usage().used_bytes == 0
        assert rig.tiers["nvme"].usage().blocks == 0
        assert server.do("DBSIZE") == 0
        assert rig.store.catalog.index.size == 0
        put_all(rig.client, first)
        assert loaded(rig.client, first) == 3


def test_d27_clear_survives_a_restart(tmp_path: Path, server: ValkeyServer) -> None:
    with live(nvme=tmp_path, valkey=server.address) as rig:
        chain = chain_of(rig.namespace(), 3)
        everywhere(rig, chain)
        assert rig.client.clear().result(PATIENCE_S).complete
    with live(nvme=tmp_path, valkey=server.address) as rig:
        assert_gone(rig, chain_of(rig.namespace(), 3))


def test_d3_d27_a_namespace_or_a_tenant_alone(tmp_path: Path, server: ValkeyServer) -> None:
    with live(32, nvme=tmp_path, valkey=server.address) as rig:
        plain = chain_of(rig.namespace(), 2)
        mine = chain_of(rig.namespace(salt="mine"), 2)
        mine_too = chain_of(rig.namespace(salt="mine", engine="other"), 2)
        theirs = chain_of(rig.namespace(salt="theirs"), 2)
        for chain in (plain, mine, mine_too, theirs):
            everywhere(rig, chain)
        report = rig.client.clear(namespace=mine.namespace).result(PATIENCE_S)
        assert {name: result.removed for name, result in report.tiers.items()} == dict.fromkeys(NOWHERE, 2)
        assert_gone(rig, mine)
        for chain in (plain, mine_too, theirs):
            assert held(rig.store, chain) == {name: [0, 1] for name in NOWHERE}
        put_all(rig.client, mine)
        assert rig.client.clear(tenant_salt="mine").result(PATIENCE_S).complete
        assert_gone(rig, mine, mine_too)
        for chain in (plain, theirs):
            assert loaded(rig.client, chain) == 2


def test_a_namespace_and_a_tenant_at_once_is_refused() -> None:
    with live() as rig:
        space = rig.namespace(salt="x")
        with pytest.raises(IdentityError, match="not both"):
            rig.client.clear(namespace=space.namespace, tenant_salt="x")


def test_clear_of_nothing_is_complete(tmp_path: Path, server: ValkeyServer) -> None:
    with live(nvme=tmp_path, valkey=server.address) as rig:
        report = rig.client.clear().result(PATIENCE_S)
        assert report.complete
        assert {name: result.removed for name, result in report.tiers.items()} == dict.fromkeys(NOWHERE, 0)


def test_d27_leased_bytes_are_listed_and_go_when_they_are_released(tmp_path: Path) -> None:
    with live(nvme=tmp_path) as rig:
        chain = chain_of(rig.namespace(), 3)
        put_all(rig.client, chain)
        rig.flush("nvme")
        lease = rig.client.load(chain_of(rig.namespace(), 2), owner="request 7")
        report = rig.client.clear().result(PATIENCE_S)
        [kept] = report.tiers["host"].kept
        assert kept.startswith("2 blocks leased by request 7")
        assert rig.client.match(chain).blocks == 0
        assert rig.store.host.usage().used_bytes == 2 * 4096
        poison_free_slots(rig.store)
        check_lease(rig.store, lease)
        put_all(rig.client, chain)
        assert loaded(rig.client, chain) == 3
        assert rig.store.host.usage().used_bytes == 5 * 4096, "the new blocks are beside the leased old ones"
        check_lease(rig.store, lease)
        lease.release()
        assert rig.store.host.usage().used_bytes == 3 * 4096
        assert loaded(rig.client, chain) == 3


def test_d27_clear_ends_pins(tmp_path: Path) -> None:
    with live(nvme=tmp_path) as rig:
        mine, other = chain_of(rig.namespace(), 2), chain_of(rig.namespace(salt="x"), 2)
        for chain in (mine, other):
            put_all(rig.client, chain)
            rig.client.pin(chain)
        report = rig.client.clear(namespace=mine.namespace).result(PATIENCE_S)
        assert report.tiers["host"].kept == ()
        assert rig.store.host.usage().used_bytes == 2 * 4096
        assert rig.client.unpin(mine) == 0
        assert rig.client.unpin(other) == 2


@pytest.mark.parametrize("tier", ["nvme", "valkey"])
def test_d27_clear_during_a_demotion_brings_nothing_back(
    tmp_path: Path, server: ValkeyServer, tier: str
) -> None:
    with live(nvme=tmp_path, valkey=server.address) as rig:
        chain = chain_of(rig.namespace(), 3)
        put_all(rig.client, chain)
        gate = rig.tiers[tier].before = Gate("put_from")
        flushed = rig.client.flush(tier)
        gate.reached()
        cleared = rig.client.clear()
        assert rig.client.match(chain).blocks == 0
        assert not cleared.done()
        gate.open()
        report = cleared.result(PATIENCE_S)
        assert report.complete
        flushed.result(PATIENCE_S)
        rig.settle()
        assert_gone(rig, chain)
        assert rig.tiers["nvme"].usage().blocks == 0
        assert server.do("DBSIZE") == 0
        assert rig.store.host.usage().used_bytes == 0
    with live(nvme=tmp_path, valkey=server.address) as rig:
        assert_gone(rig, chain_of(rig.namespace(), 3))


@pytest.mark.parametrize("tier", ["nvme", "valkey"])
@pytest.mark.parametrize("moment", ["before", "after"])
def test_d27_clear_during_a_load_brings_nothing_back(
    tmp_path: Path, server: ValkeyServer, tier: str, moment: str
) -> None:
    """The tier is about to read the blocks, or has read them and not returned yet."""
    with live(nvme=tmp_path, valkey=server.address) as rig:
        chain = chain_of(rig.namespace(), 3)
        put_all(rig.client, chain)
        rig.flush(tier)
        rig.client.evict("host")
        gate = Gate("get_into")
        setattr(rig.tiers[tier], moment, gate)
        loading = rig.client.load_async(chain)
        gate.reached()
        cleared = rig.client.clear()
        gate.open()
        with loading.result(PATIENCE_S) as lease:
            check_lease(rig.store, lease)
        assert cleared.result(PATIENCE_S).complete
        rig.settle()
        assert_gone(rig, chain)
        assert rig.store.host.usage().used_bytes == 0
        audit(rig.store)


@pytest.mark.parametrize("call", ["probe", "get_into"])
@pytest.mark.parametrize("moment", ["before", "after"])
def test_d27_clear_during_a_probe_brings_nothing_back(server: ValkeyServer, call: str, moment: str) -> None:
    """The server has the blocks of an earlier process, this one is just asking for them."""
    with live(valkey=server.address) as rig:
        chain = chain_of(rig.namespace(), 3)
        put_all(rig.client, chain)
        rig.flush("valkey")
    with live(valkey=server.address, valkey_options={"workers": 6}) as rig:
        chain = chain_of(rig.namespace(), 3)
        gate, at_clear = Gate(call), Gate("clear")
        setattr(rig.tiers["valkey"], moment, gate)
        if moment == "after":
            rig.tiers["valkey"].before = at_clear
        loading = rig.client.load_async(chain)
        gate.reached()
        cleared = rig.client.clear()
        if moment == "after":
            at_clear.reached()
        gate.open()
        with loading.result(PATIENCE_S) as lease:
            check_lease(rig.store, lease)
        at_clear.open()
        assert cleared.result(PATIENCE_S).complete
        rig.settle()
        assert_gone(rig, chain)
        assert rig.store.host.usage().used_bytes == 0


def test_d27_a_load_during_a_clear_brings_nothing_back(server: ValkeyServer) -> None:
    """Somebody asks for the blocks after the call of clear, when the server still has them."""
    with live(valkey=server.address) as rig:
        chain = chain_of(rig.namespace(), 3)
        put_all(rig.client, chain)
        rig.flush("valkey")
        gate = rig.tiers["valkey"].before = Gate("clear")
        cleared = rig.client.clear()
        gate.reached()
        loaded(rig.client, chain)
        gate.open()
        assert cleared.result(PATIENCE_S).complete
        rig.settle()
        assert_gone(rig, chain)


def test_d27_what_is_stored_after_a_clear_stays(tmp_path: Path) -> None:
    """The tier is still busy with the clear when the same blocks are stored and written again."""
    with live(nvme=tmp_path) as rig:
        chain = chain_of(rig.namespace(), 3)
        put_all(rig.client, chain)
        rig.flush("nvme")
        gate = rig.tiers["nvme"].before = Gate("clear")
        cleared = rig.client.clear()
        gate.reached()
        put_all(rig.client, chain)
        flushed = rig.client.flush("nvme")
        gate.open()
        assert cleared.result(PATIENCE_S).complete
        assert flushed.result(PATIENCE_S).failed == 0
        rig.flush("nvme")
        rig.client.evict("host")
        assert loaded(rig.client, chain) == 3


def test_d27_a_draft_from_before_the_clear_hangs_from_nothing() -> None:
    with live() as rig:
        chain = chain_of(rig.namespace(), 4)
        put(rig.client, chain, count=2)
        draft = rig.client.reserve(chain, first=2)
        assert draft is not None
        rig.client.clear().result(PATIENCE_S)
        stored = rig.client.commit(draft.seal(), chain)
        assert stored.dropped == {"no_parent": 2}
        assert_gone(rig, chain)
        assert rig.store.host.usage().used_bytes == 0


@pytest.mark.parametrize("fault", ["kill", "hang"])
def test_d27_a_tier_that_cannot_be_reached_makes_the_clear_incomplete(tmp_path: Path, fault: str) -> None:
    with running_server() as server, live(nvme=tmp_path, valkey=server.address) as rig:
        chain = chain_of(rig.namespace(), 3)
        everywhere(rig, chain)
        getattr(server, fault)()
        report = rig.client.clear(timeout_s=0.5).result(PATIENCE_S)
        assert not report.complete
        assert report.tiers["host"].complete
        assert report.tiers["nvme"].complete
        assert not report.tiers["valkey"].complete
        assert report.tiers["valkey"].detail
        assert rig.client.match(chain).blocks == 0
        if fault == "hang":
            server.go_on()
            eventually(lambda: rig.client.clear().result(PATIENCE_S).complete, "the server is cleared")
            assert server.do("DBSIZE") == 0
            assert_gone(rig, chain)


def test_d27_d28_clear_takes_each_block_out_with_one_event(tmp_path: Path) -> None:
    with live(nvme=tmp_path) as rig:
        chain = chain_of(rig.namespace(), 2)
        put_all(rig.client, chain)
        rig.flush("nvme")
        last = rig.client.events()[-1].seq
        rig.client.clear().result(PATIENCE_S)
        events = [(event.kind, event.tier, event.reason) for event in rig.client.events(last)]
        assert events.count(("removed", None, "cleared")) == 2
        assert events.count(("left", "host", "cleared")) == 2
        assert events.count(("left", "nvme", "cleared")) == 2
        assert len(events) == 6


def test_d27_a_clear_gives_its_tiers_less_time_than_it_has_itself(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So that what a tier did by its deadline is in a report that is there by the caller's."""
    with live(nvme=tmp_path) as rig:
        given_s = []
        real = rig.tiers["nvme"].clear

        def clear(prefix: KeyPrefix, deadline: Deadline) -> ClearResult:
            given_s.append(deadline.remaining_s())
            return real(prefix, deadline)

        monkeypatch.setattr(rig.tiers["nvme"], "clear", clear)
        for timeout_s in (30.0, 0.1):
            assert rig.client.clear(timeout_s=timeout_s).result(PATIENCE_S)
        assert given_s[0] <= 29.9
        assert all(left_s <= 0.05 for left_s in given_s[1:])


def test_d27_what_is_stored_while_a_clear_begins_is_not_taken_out_behind_its_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The old blocks are off the catalog, the disk is not cleared yet, and the same prompt is stored anew."""
    doom = Clearing._doom_all
    with live(nvme=tmp_path, nvme_spec={"write": "through"}) as rig:
        chain = chain_of(rig.namespace(), 3)

        def then_store(self: Clearing, prefix: KeyPrefix) -> tuple[int, list[FamilyId]]:
            found = doom(self, prefix)
            put_all(rig.client, chain)
            rig.settle()
            return found

        monkeypatch.setattr(Clearing, "_doom_all", then_store)
        assert rig.client.clear().result(PATIENCE_S).complete
        rig.flush("nvme")
        assert rig.client.evict("host").evicted == 3
        assert loaded(rig.client, chain) == 3
