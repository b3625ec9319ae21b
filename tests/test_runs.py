"""What is done for runs of blocks at once leaves behind exactly what is done for each of them alone."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from tests.client_support import Live, chain_of, live, prompt, put, spec_of
from tierkv import entering, parting
from tierkv.catalog import HOST
from tierkv.events import EventLog, Kind
from tierkv.ids import BlockHash, FamilyId, NamespaceDigest
from tierkv.keys import Weights
from tierkv.policies.by_priority import ByPriority
from tierkv.policies.lru import CELL_IDS, LruPolicy
from tierkv.policy import BlockInfo, EvictionPolicy, InfoRun
from tierkv.testing.invariants import check_idle

SPACE = NamespaceDigest(bytes(32))
BOTH: tuple[Kind, ...] = ("arrived", "stored")


def hash_of(number: int) -> BlockHash:
    return BlockHash(number.to_bytes(32, "big"))


# ---- the whole way, beside the way of single blocks


def one_by_one(patch: pytest.MonkeyPatch) -> None:
    """No block goes the way of runs."""
    patch.setattr("tierkv.intake.enter_new", lambda *_: [])
    patch.setattr(parting, "exit_host", lambda *_, **__: False)


def counted(patch: pytest.MonkeyPatch, ways: Counter[str]) -> None:
    """Counts the blocks that do."""
    enter, leave = entering.enter_new, parting.exit_host

    def enter_new(*given: Any) -> list[FamilyId]:
        added = enter(*given)
        ways["in"] += len(added)
        return added

    def exit_host(residency: Any, families: Any, **more: Any) -> bool:
        gone = leave(residency, families, **more)
        ways["out"] += len(families) if gone else 0
        return gone

    patch.setattr("tierkv.intake.enter_new", enter_new)
    patch.setattr(parting, "exit_host", exit_host)


def script(rig: Live, seed: int) -> dict[str, Any]:
    """Stores, continues and loads prompts in an arena that is too small, then says what all of that came to."""
    dice, space = random.Random(seed), rig.namespace()
    for turn in range(60):
        chain = chain_of(space, dice.randint(1, 24), dice.randrange(6))
        first = dice.randrange(len(chain))
        if dice.random() < 0.7:
            first = 0
        put(rig.client, chain, first, dice.randint(1, len(chain) - first))
        if dice.random() < 0.5:
            rig.client.load(chain, timeout_s=0).release()
        if turn % 10 == 9:
            rig.settle()
    rig.settle()
    check_idle(rig.store)
    return what_is(rig)


def what_is(rig: Live) -> dict[str, Any]:
    """Rows by their hashes, since the ids may be others."""
    catalog = rig.store.catalog
    index = catalog.index
    names = index.hashes
    rows = {
        names[row]: (
            names[index.parent[row]],
            index.depth[row],
            index.state[row],
            index.dirty[row],
            [held[row] for held in index.residency],
            [children[row] for children in index.children],
            catalog.host.checksum(catalog.slot_of(FamilyId(row), 0)) if index.residency[HOST][row] else None,
        )
        for row in range(1, index.max_families + 1)
        if names[row] is not None
    }
    order = [names[row] for row in catalog.host_policy.victims(len(rows), lambda _: True)]
    events = Counter((e.kind, e.block_hash, e.parent_hash, e.tier, e.reason) for e in rig.client.events())
    departed = catalog.departures.find((0, name) for name in {e.block_hash for e in rig.client.events()})
    left = {name: [(one.tier, one.reason, one.parts) for one in its] for (_, name), its in departed.items()}
    return {"rows": rows, "order": order, "events": events, "left": left, "counters": counters_of(rig)}


def counters_of(rig: Live) -> Any:
    counters = rig.client.stats()["counters"]
    assert isinstance(counters, dict)
    return {name: value for name, value in counters.items() if not name.startswith("scrubbed")}


@pytest.mark.parametrize("seed", range(6))
def test_d28_runs_and_single_blocks_come_to_the_same(seed: int) -> None:
    ways: Counter[str] = Counter()
    with pytest.MonkeyPatch.context() as patch, live(32) as rig:
        counted(patch, ways)
        as_runs = script(rig, seed)
    assert ways["in"] > 100
    assert ways["out"] > 100
    with pytest.MonkeyPatch.context() as patch:
        one_by_one(patch)
        with live(32) as rig:
            alone = script(rig, seed)
    for what, found in as_runs.items():
        assert found == alone[what], what


def test_blocks_that_a_disk_has_leave_host_ram_in_runs(tmp_path: Path) -> None:
    """They stay usable, and each says that it left; what nobody else has is gone."""
    with live(32, nvme=tmp_path) as rig:
        space = rig.namespace()
        kept, lost = chain_of(space, 16, 1), chain_of(space, 16, 2)
        put(rig.client, kept)
        rig.flush("nvme")
        last = rig.store.events.last
        put(rig.client, chain_of(space, 24, 3))
        said = Counter((e.kind, e.tier, e.reason) for e in rig.client.events(after=last))
        assert said["left", "host", "room"] >= 8
        assert not any(kind == "removed" for kind, _, _ in said)
        assert rig.client.match(kept).blocks == 16
        assert rig.client.match(lost).blocks == 0


def test_a_run_is_not_found_under_the_same_hashes_of_another_namespace() -> None:
    """Rows side by side with the right hashes, of which all but the first are another namespace's."""
    with live(64) as rig:
        one = rig.client.open_namespace(spec_of())
        other = rig.client.open_namespace(spec_of(weights=Weights("revision", "r2")))
        mine = chain_of(one, 32)
        theirs = replace(chain_of(other, 32), hashes=mine.hashes)
        put(rig.client, mine, 0, 1)
        put(rig.client, theirs, 0, 1)
        put(rig.client, mine, 1)
        index = rig.store.catalog.index
        assert index.hashes[2:34] == [theirs.hashes[0], *mine.hashes[1:]], "the trap is not set"
        assert rig.client.match(theirs).blocks == 1
        assert rig.client.match(mine).blocks == 32
        with rig.client.load(theirs, timeout_s=0) as lease:
            assert len(lease) == 1


@pytest.mark.parametrize("stored", [(0, 40), (0, 20, 40), (0, 1, 39, 40), tuple(range(0, 41, 5))])
def test_runs_are_found_however_they_were_stored(stored: tuple[int, ...]) -> None:
    """With other prompts between the pieces, so that the rows of one do not lie side by side."""
    with live(128) as rig:
        space = rig.namespace()
        chain = chain_of(space, 40)
        for number, (first, stop) in enumerate(pairwise(stored)):
            put(rig.client, chain, first, stop - first)
            put(rig.client, chain_of(space, 3, 1 + number))
        for blocks in (1, 15, 16, 39, 40):
            head = space.chain(prompt(blocks * 16 + 1))
            assert rig.client.match(head).blocks == blocks
            with rig.client.load(head) as lease:
                assert [rig.store.catalog.index.hashes[family] for family in lease.families] == list(
                    head.hashes
                )
        longer = chain_of(space, 60)
        assert rig.client.match(longer).blocks == 40
        assert not rig.store.catalog.leased_families()


# ---- events


def test_the_events_of_a_run_are_those_of_its_blocks() -> None:
    runs, single = EventLog(), EventLog()
    names = [hash_of(i) for i in range(5)]
    parents = [None, *names[:-1]]
    runs.append_run(1.0, BOTH, SPACE, names, parents, "host")
    for name, parent in zip(names, parents, strict=True):
        single.append(1.0, BOTH, SPACE, name, parent, "host")
    assert runs.since(0) == single.since(0)
    assert runs.counts() == single.counts()
    assert [event.seq for event in runs.since(0)] == list(range(1, 11))
    assert runs.since(7) == single.since(7), "from the middle of a run on"
    assert runs.since(2, limit=3) == single.since(2, limit=3)


def test_the_log_keeps_as_many_blocks_as_it_was_given_room_for() -> None:
    log = EventLog(capacity=10)
    for start in range(0, 300, 3):
        log.append_run(
            0.0, ("left",), SPACE, [hash_of(start + i) for i in range(3)], [None] * 3, "host", "room"
        )
    kept = [event.seq for event in log.since(0)]
    assert kept == list(range(300 - len(kept) + 1, 301))
    assert 10 <= len(kept) < 13


def test_whoever_waits_for_a_block_hears_of_it_in_a_run() -> None:
    log = EventLog()
    told: list[Any] = []
    log.awaited = {(SPACE, hash_of(3)): None}
    log.on_awaited = told.append
    log.append_run(0.0, BOTH, SPACE, [hash_of(i) for i in range(5)], [None] * 5, "host")
    assert told == [(SPACE, hash_of(3))]


# ---- policies


def infos_of(run: InfoRun) -> list[BlockInfo]:
    return [run[i] for i in range(len(run))]


def test_a_run_of_infos_is_a_sequence_of_infos() -> None:
    run = InfoRun([FamilyId(7), FamilyId(9), FamilyId(8)], FamilyId(3), 5, 4096, 11)
    assert list(run) == infos_of(run) == run[:]
    assert [(one.id, one.parent, one.depth) for one in run] == [(7, 3, 5), (9, 7, 6), (8, 9, 7)]
    assert run[-1] == BlockInfo(FamilyId(8), FamilyId(9), 7, 4096, 11)
    assert [one.id for one in run[1:]] == [9, 8]


@pytest.mark.parametrize("make", [LruPolicy, lambda: ByPriority(LruPolicy)])
def test_d30_policies_order_runs_like_their_infos(make: Callable[[], EvictionPolicy]) -> None:
    dice = random.Random(5)
    runs, single = make(), make()
    resident: list[FamilyId] = []
    for number in range(200):
        ids = [FamilyId(1000 + 200 * number + i) for i in range(dice.randint(1, 2 * CELL_IDS))]
        run = InfoRun(ids, dice.choice([None, *resident]), 0, 4096, 0)
        runs.on_insert(run)
        single.on_insert(infos_of(run))
        resident += ids
        going = list(single.victims(dice.randint(1, 40), lambda _: True))[: dice.randint(0, 40)]
        for policy in (runs, single):
            policy.on_remove(going, evicted=True)
        resident = [family for family in resident if family not in set(going)]
        hit = range(ids[0], ids[-1] + 1)
        runs.on_hit(hit)  # type: ignore[arg-type]
        single.on_hit(list(ids))
    orders = [list(policy.victims(len(resident), lambda _: True)) for policy in (runs, single)]
    assert orders[0] == orders[1]
    assert sorted(orders[0]) == sorted(resident)
