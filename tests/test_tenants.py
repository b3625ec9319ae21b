"""Quotas: no tenant can push the others out, in host RAM or on the disk, and what is refused can be seen."""

from __future__ import annotations

import random
import subprocess
import sys
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import tierkv
from tests import daemon_process
from tests.client_support import (
    PATIENCE_S,
    Live,
    chain_of,
    full_group,
    held,
    layout_of,
    live,
    loaded,
    put,
    put_all,
    window_group,
)
from tests.daemon_process import Daemon, run_tierkv, running_daemon
from tests.valkey_server import eventually
from tierkv.catalog import HOST
from tierkv.daemon.tenant import hear_tenant
from tierkv.daemon.wire import WireError
from tierkv.errors import ConfigError, IdentityError
from tierkv.ids import FamilyId
from tierkv.intake import Stored
from tierkv.keys import Chain, Namespace
from tierkv.namespaces import OpenNamespace
from tierkv.policies.by_tenant import ByTenant
from tierkv.policies.lru import LruPolicy
from tierkv.policy import BlockInfo
from tierkv.tenancy import TenantBooks
from tierkv.testing import sim_world
from tierkv.testing.sim_life import simulate
from tierkv.units import KIB, MIB

BLOCK = 4 * KIB


def tenants(rig: Live) -> tuple[OpenNamespace, OpenNamespace]:
    return rig.namespace(salt="a"), rig.namespace(salt="b")


def books_of(rig: Live, space: OpenNamespace) -> TenantBooks:
    known = rig.store.catalog.index.space(space.namespace.digest)
    assert known is not None
    return known.books


def singles(space: OpenNamespace, count: int, first: int = 0) -> list[Chain]:
    """Prompts of one block each."""
    return [chain_of(space, 1, seed) for seed in range(first, first + count)]


def resident(rig: Live, chains: list[Chain], tier: str = "host") -> int:
    return sum(len(held(rig.store, chain)[tier]) for chain in chains)


# ---- host RAM


def test_a_tenant_that_stores_without_end_leaves_the_other_its_blocks() -> None:
    with live(16, tenant_share=0.5) as rig:
        a, b = tenants(rig)
        quiet = singles(b, 8)
        for chain in quiet:
            put_all(rig.client, chain)
        loud = singles(a, 100)
        for chain in loud:
            assert put(rig.client, chain) == Stored(stored=1)
            assert books_of(rig, a).held[HOST] <= 8 * BLOCK
        assert resident(rig, quiet) == 8
        assert [len(held(rig.store, chain)["host"]) for chain in loud] == [0] * 92 + [1] * 8
        assert all(loaded(rig.client, chain) == 1 for chain in [*quiet, *loud[-8:]])


def test_without_a_quota_the_coldest_leave_whosever_they_are() -> None:
    with live(16) as rig:
        a, b = tenants(rig)
        quiet = singles(b, 8)
        for chain in quiet:
            put_all(rig.client, chain)
        for chain in singles(a, 100):
            put_all(rig.client, chain)
        assert resident(rig, quiet) == 0
        assert not rig.store.quotas.on
        assert books_of(rig, a).held[HOST] == 16 * BLOCK


def test_its_own_coldest_make_way_though_all_others_are_colder() -> None:
    """A policy looks at 4 x need + 64 families at its cold end; there lie another tenant's alone."""
    with live(400, tenant_share=0.5) as rig:
        a, b = tenants(rig)
        quiet = singles(b, 200)
        for chain in quiet:
            put_all(rig.client, chain)
        loud = singles(a, 230)
        for chain in loud:
            assert put(rig.client, chain).stored == 1
        assert resident(rig, quiet) == 200
        assert resident(rig, loud[30:]) == 200


def test_what_its_leases_hold_is_refused_and_can_be_seen() -> None:
    with live(16, tenant_share=0.25) as rig:
        a, b = tenants(rig)
        first = chain_of(a, 4)
        put_all(rig.client, first)
        other = chain_of(b, 2)
        put_all(rig.client, other)
        health = rig.client.health()
        with rig.client.load(first) as lease:
            assert len(lease) == 4
            more = chain_of(a, 3, seed=9)
            assert put(rig.client, more) == Stored(dropped={"quota": 3})
        assert rig.count("dropped_blocks_total", "host", "quota") == 3
        assert rig.client.health() == health
        told = rig.client.stats()["tenants"]
        mine = told["tenants"][books_of(rig, a).name]  # type: ignore[index]
        assert mine["refused_blocks"] == 3
        assert mine["held_bytes"]["host"] == mine["quota_bytes"]["host"] == 4 * BLOCK
        assert mine["coming_bytes"]["host"] == 0
        assert "its tenant holds as much as it may" in str(rig.client.explain(more))
        assert put(rig.client, more).stored == 3, "the lease has ended: its own make way"
        assert resident(rig, [other]) == 2


def test_a_prompt_longer_than_the_quota_keeps_its_head() -> None:
    with live(16, tenant_share=0.25) as rig:
        a, _ = tenants(rig)
        chain = chain_of(a, 10)
        assert put(rig.client, chain) == Stored(stored=4, dropped={"quota": 6})
        assert put(rig.client, chain) == Stored(stored=0, resident=4, dropped={"quota": 6})
        assert held(rig.store, chain)["host"] == [0, 1, 2, 3]


def test_blocks_that_are_being_written_count() -> None:
    with live(16, tenant_share=0.25) as rig:
        a, _ = tenants(rig)
        draft = rig.client.reserve(chain_of(a, 3))
        assert draft is not None
        assert put(rig.client, chain_of(a, 3, seed=1)) == Stored(stored=1, dropped={"quota": 2})
        draft.drop()
        result = Stored()
        whole = rig.client.reserve(chain_of(a, 4, seed=2), result=result)
        assert whole is not None
        assert len(whole) == 4, "the draft gave back what it was granted, and its own block made way"
        whole.drop()


def test_many_threads_of_one_tenant_never_go_beyond() -> None:
    with live(32, tenant_share=0.25) as rig:
        a, b = tenants(rig)
        quiet = singles(b, 8)
        for chain in quiet:
            put_all(rig.client, chain)
        books, most = books_of(rig, rig.namespace(salt="a")), 0

        def work(number: int) -> None:
            nonlocal most
            dice = random.Random(number)
            for turn in range(60):
                chain = chain_of(a, dice.randint(1, 4), seed=100 * number + turn)
                put(rig.client, chain)
                most = max(most, books.held[HOST])
                with rig.client.load(chain):
                    pass

        threads = [threading.Thread(target=work, args=(n,)) for n in range(1, 5)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(PATIENCE_S)
        assert 0 < most <= 8 * BLOCK
        assert books.coming[HOST] == 0
        assert resident(rig, quiet) == 8


def test_parts_of_several_sizes_count_as_the_slots_they_take() -> None:
    layout = layout_of(full_group(5000), window_group(32, 3000))
    with live(16, region_blocks=4, tenant_share=0.5) as rig:
        space = rig.client.open_namespace(rig.namespace(layout, salt="a").namespace.spec)
        chain = chain_of(space, 1)
        put_all(rig.client, chain)
        assert books_of(rig, space).held[HOST] == 8 * KIB + 4 * KIB
        assert put(rig.client, chain_of(space, 3, seed=1)) == Stored(stored=2, dropped={"quota": 1})
        assert books_of(rig, space).held[HOST] == 24 * KIB


# ---- loading is not limited, and who is over its share is the first to lose


def test_who_only_reads_is_not_limited_and_loses_first(tmp_path: Path) -> None:
    with live(16, nvme=tmp_path / "kv", tenant_share=0.5) as rig:
        a, b = tenants(rig)
        there = [chain_of(a, 4, seed) for seed in range(3)]
        for chain in there:
            put(rig.client, chain)
            rig.flush("nvme")
            rig.client.evict("host")
        mine = singles(b, 4)
        for chain in mine:
            put_all(rig.client, chain)
        rig.flush("nvme")
        assert [loaded(rig.client, chain) for chain in there] == [4, 4, 4], "no load is refused"
        assert books_of(rig, a).held[HOST] == 12 * BLOCK
        assert resident(rig, mine) == 4
        more = singles(b, 4, first=50)
        for chain in more:
            put_all(rig.client, chain)
        assert resident(rig, [*mine, *more]) == 8, "its blocks are the coldest, and it is not over its share"
        assert books_of(rig, a).held[HOST] == 8 * BLOCK


# ---- ahead of need


def test_blocks_that_will_make_way_for_the_quota_are_written_to_the_disk_before(tmp_path: Path) -> None:
    """Host RAM is not short of room, so nothing but the quota makes the reaper write."""
    with live(64, nvme=tmp_path / "kv", nvme_spec={"write": "on_evict"}, tenant_share=0.25) as rig:
        a, _ = tenants(rig)
        chains = singles(a, 40)
        for chain in chains:
            put_all(rig.client, chain)
            rig.settle()
        assert rig.store.host.free_bytes() >= 48 * BLOCK
        assert rig.store.totals().get(("dropped_blocks_total", "host", "dropped_dirty"), 0) == 0
        assert [loaded(rig.client, chain) for chain in chains] == [1] * 40


# ---- the disk


def test_the_disk_has_quotas_too(tmp_path: Path) -> None:
    frame = 2 * BLOCK
    with live(
        64,
        nvme=tmp_path / "kv",
        nvme_bytes=MIB,
        nvme_options={"segment_bytes": 128 * KIB},
        nvme_spec={"write": "through"},
        tenant_share=0.25,
    ) as rig:
        a, b = tenants(rig)
        quiet = singles(b, 10)
        for chain in quiet:
            put_all(rig.client, chain)
        loud = singles(a, 120)
        for chain in loud:
            put_all(rig.client, chain)
            rig.settle()
            assert books_of(rig, a).held[1] <= MIB // 4
        assert resident(rig, quiet, "nvme") == 10
        assert resident(rig, loud, "nvme") == MIB // 4 // frame
        assert resident(rig, loud[-(MIB // 4 // frame) :], "nvme") == MIB // 4 // frame, "the newest stay"


def test_a_restart_knows_who_holds_what(tmp_path: Path) -> None:
    with live(16, nvme=tmp_path / "kv") as rig:
        a, b = tenants(rig)
        put_all(rig.client, chain_of(a, 5))
        put_all(rig.client, chain_of(b, 3))
        rig.flush("nvme")
        before = {space.namespace.digest: books_of(rig, space).held[1] for space in (a, b)}
    with live(16, nvme=tmp_path / "kv", tenant_share=0.5) as rig:
        a, b = tenants(rig)
        assert {space.namespace.digest: books_of(rig, space).held[1] for space in (a, b)} == before
        assert before[a.namespace.digest] == 5 * 2 * BLOCK


# ---- all at once, under the seeded adversary


@pytest.mark.parametrize("seed", range(16))
def test_the_books_of_tenants_add_up_whatever_happens(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Simulated lives with quotas: after each event all that is held, clean and coming is counted again."""
    share = (0.2, 0.4, 0.6)[seed % 3]
    free = sim_world.Shape.of

    def with_quotas(seed: int, layouts: tuple[str, ...] | None = None) -> sim_world.Shape:
        shape = free(seed, layouts)
        return replace(shape, limits=replace(shape.limits, tenant_share=share))

    monkeypatch.setattr(sim_world.Shape, "of", staticmethod(with_quotas))
    simulate(seed)


# ---- sessions


def test_a_session_can_ask_for_less_as_long_as_it_is_there() -> None:
    with live(16, tenant_share=0.5) as rig:
        a, _ = tenants(rig)
        quotas, tag = rig.store.quotas, books_of(rig, a).tag
        for chain in singles(a, 8):
            put_all(rig.client, chain)
        quotas.declare(b"one", tag, {HOST: 4 * BLOCK})
        quotas.declare(b"two", tag, {HOST: 100 * BLOCK})
        put_all(rig.client, chain_of(a, 2, seed=100))
        assert books_of(rig, a).held[HOST] == 4 * BLOCK, "down to what it asked for"
        quotas.withdraw(b"one")
        for chain in singles(a, 20, first=200):
            put_all(rig.client, chain)
        assert books_of(rig, a).held[HOST] == 8 * BLOCK, "the operator's share holds on"
        quotas.withdraw(b"two")
        assert not books_of(rig, a).own_limits


def test_a_quota_that_comes_late_learns_what_is_there() -> None:
    with live(64) as rig:
        a, b = tenants(rig)
        old = singles(a, 40)
        for chain in [*old, *singles(b, 10)]:
            put_all(rig.client, chain)
        loaded(rig.client, old[0])
        rig.store.quotas.declare(b"one", books_of(rig, a).tag, {HOST: 16 * BLOCK})
        assert put(rig.client, chain_of(a, 2, seed=999)).stored == 2
        assert books_of(rig, a).held[HOST] == 16 * BLOCK
        assert books_of(rig, b).held[HOST] == 10 * BLOCK


# ---- the order of tenants


def test_the_order_of_a_tenant_is_that_of_lru_alone() -> None:
    """Whatever happens to several tenants in one ``ByTenant`` happens to each of them as in an ``LruPolicy``."""
    for seed in range(30):
        dice = random.Random(seed)
        together, alone = ByTenant(), {tenant: LruPolicy() for tenant in range(4)}
        owner: dict[int, int] = {}
        last: dict[int, int] = {}
        for _ in range(400):
            what = dice.random()
            if what < 0.5 or not owner:
                family = FamilyId(dice.randrange(1, 300))
                if family in owner:
                    continue
                tenant = dice.randrange(4)
                parent = last.get(tenant) if dice.random() < 0.5 else None
                parent = FamilyId(parent) if parent in owner else None
                info = BlockInfo(family, parent, 0, 1, tenant, dice.choice((-200, -1, 0, 0, 0, 5, 200)))
                owner[family] = last[tenant] = tenant
                last[tenant] = family
                together.on_insert([info])
                alone[tenant].on_insert([info])
                continue
            tenant = dice.randrange(4)
            its = [FamilyId(family) for family, whose in owner.items() if whose == tenant]
            chosen = dice.sample(its, min(len(its), dice.choice((1, 3, 40))))
            if not chosen:
                continue
            if what < 0.8:
                together.on_hit(chosen)
                alone[tenant].on_hit(chosen)
            else:
                together.on_remove(chosen, evicted=True)
                alone[tenant].on_remove(chosen, evicted=True)
                for family in chosen:
                    del owner[family]
        for tenant, policy in alone.items():
            assert list(together.victims_of(tenant, 300, lambda f: True)) == list(
                policy.victims(300, lambda f: True)
            ), f"seed {seed}"
        assert not list(together.victims_of(77, 300, lambda f: True))


# ---- a daemon and its sessions


def of_daemon(stats: dict[str, object]) -> dict[str, dict[str, Any]]:
    tenants: Any = stats["tenants"]
    return tenants["tenants"]  # type: ignore[no-any-return]


def test_a_session_carries_a_salt_and_quotas(tmp_path: Path) -> None:
    with running_daemon(tmp_path, host_capacity="4 MiB", limits_tenant_share=0.5) as daemon:
        url, size = f"unix://{daemon.socket}", daemon_process.BLOCK_BYTES
        with (
            daemon.client() as plain,
            tierkv.connect(url, owner="a", salt="a", quotas={"host": 4 * size, "nvme": "1 GiB"}) as mine,
        ):
            space = mine.open_namespace(daemon_process.spec_of())
            assert space.namespace.spec.salt == "a"
            assert space.namespace.digest == Namespace(daemon_process.spec_of("a")).digest
            with pytest.raises(IdentityError, match="another"):
                mine.open_namespace(daemon_process.spec_of("b"))
            chain = space.chain(daemon_process.tokens_of(6))
            assert mine.put(chain, daemon_process.payloads_of(6)) == Stored(stored=4, dropped={"quota": 2})
            theirs = plain.open_namespace(daemon_process.spec_of())
            assert plain.put(
                theirs.chain(daemon_process.tokens_of(40)), daemon_process.payloads_of(40)
            ) == Stored(stored=32, dropped={"quota": 8})
            assert plain.match(theirs.chain(daemon_process.tokens_of(6))).blocks == 6
            told = of_daemon(plain.stats())
            by_held = {its["held_bytes"]["host"]: its for its in told.values()}
            assert by_held[4 * size]["quota_bytes"]["host"] == 4 * size
            assert by_held[4 * size]["refused_blocks"] == 2
            assert by_held[32 * size]["quota_bytes"]["host"] == 32 * size
        eventually(lambda: asked_for(daemon, 4 * size) == 32 * size, "its quota went with the session")
        status = run_tierkv("status", "--config", daemon.config)
        assert "tenants: 2" in status.stdout, status.stdout + status.stderr
        assert "2 blocks refused" in status.stdout


def asked_for(daemon: Daemon, held_bytes: int) -> int | None:
    """The quota of host RAM of the tenant that holds so much of it."""
    with daemon.client() as client:
        told = of_daemon(client.stats()).values()
    quota: int | None = next(
        its["quota_bytes"]["host"] for its in told if its["held_bytes"]["host"] == held_bytes
    )
    return quota


def test_a_killed_session_takes_its_quota_with_it(tmp_path: Path) -> None:
    script = """
import sys, tierkv
from tests.daemon_process import payloads_of, spec_of, tokens_of
client = tierkv.connect(sys.argv[1], salt="a", quotas={"host": int(sys.argv[2])})
space = client.open_namespace(spec_of())
print(client.put(space.chain(tokens_of(3)), payloads_of(3)).stored, flush=True)
sys.stdin.read()
"""
    size = daemon_process.BLOCK_BYTES
    with running_daemon(tmp_path, host_capacity="4 MiB") as daemon:
        child = subprocess.Popen(
            [sys.executable, "-c", script, f"unix://{daemon.socket}", str(2 * size)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd=daemon_process.ROOT,
        )
        try:
            assert child.stdout is not None
            assert child.stdout.readline() == "2\n"
            assert asked_for(daemon, 2 * size) == 2 * size
        finally:
            child.kill()
            child.communicate(timeout=daemon_process.PATIENCE_S)
        eventually(lambda: asked_for(daemon, 2 * size) is None, "its quota went with the process")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ({"quotas": {"host": "1 GiB"}}, "give a salt too"),
        ({"salt": "a", "quotas": {"host": "much"}}, "'512 MiB'"),
        ({"salt": "a", "quotas": {"host": None}}, "'512 MiB'"),
        ({"salt": "a", "quotas": "1 GiB"}, "sizes by tier"),
        ({"salt": "a", "quotas": {"ram": "1 GiB"}}, "host, nvme"),
        ({"salt": "a", "quotas": {"valkey": "1 GiB"}}, "its own rules"),
        ({"salt": 7}, "a text is expected"),
    ],
)
def test_wrong_words_about_a_tenant_are_named(words: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        tierkv.connect("unix:///tmp/nobody.sock", **words)


@pytest.mark.parametrize(
    "said",
    [
        "all of it",
        {"salt": "a"},
        {"quotas": {}},
        {"salt": "a", "quotas": {"host": -1}},
        {"salt": "a", "quotas": {"host": "1 GiB"}},
        {"salt": None, "quotas": {"host": 1}},
    ],
)
def test_a_hello_that_says_nonsense_of_its_tenant_is_refused(said: object) -> None:
    with live(4) as rig, pytest.raises(WireError):
        hear_tenant({"tenant": said}, rig.store)
