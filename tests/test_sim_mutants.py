"""The checks of the simulation can fail: each of these broken stores is caught by one of a few seeds."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.client_support import (
    PATIENCE_S,
    audit,
    chain_of,
    full_group,
    layout_of,
    live,
    loaded,
    put_all,
)
from tests.store_support import simulate
from tierkv import frame
from tierkv.catalog import Catalog
from tierkv.demotion import Demotion
from tierkv.errors import FrameError, HandleError
from tierkv.flights import Flight, FlightTable
from tierkv.frame import FrameHeader
from tierkv.ids import BlockKey, FamilyId
from tierkv.index import IN_HOST, USABLE
from tierkv.intake import Intake
from tierkv.jobs import Job, TierQueue
from tierkv.loading import Loader
from tierkv.policies.lru import LruPolicy
from tierkv.prefetching import Prefetch
from tierkv.probing import Probe
from tierkv.room import Room, _Chosen
from tierkv.testing.sim import SimExecutor, SimTimer
from tierkv.testing.sim_tier import Faults, Mood
from tierkv.turns import Turns
from tierkv.upkeep import Upkeep

SEEDS = 250
CAUGHT = (AssertionError, HandleError)

Patch = Callable[[pytest.MonkeyPatch], None]


def caught_by(mutate: Patch, *words: str, **life: Any) -> str:
    """What a seed says that notices, in one of these words where they are given: a broken store may fail in many ways.
    The honest store passes the same seeds elsewhere."""
    heard = set()
    for seed in range(SEEDS):
        with pytest.MonkeyPatch.context() as patch:
            mutate(patch)
            try:
                simulate(seed, **life)
            except CAUGHT as error:
                if not words or any(word in str(error) for word in words):
                    return str(error)
                heard.add(str(error)[:100])
    pytest.fail(f"{SEEDS} seeds say nothing of {words}, but {sorted(heard)}")


def trusts_any_bytes(patch: pytest.MonkeyPatch) -> None:
    def verify(header: FrameHeader, key: BlockKey, stored: memoryview) -> None:
        pass

    patch.setattr(frame, "verify", verify)


def trusts_any_key(patch: pytest.MonkeyPatch) -> None:
    def verify(header: FrameHeader, key: BlockKey, stored: memoryview) -> None:
        if frame.checksum(stored) != header.stored_checksum:
            raise FrameError("checksum", "damaged")

    patch.setattr(frame, "verify", verify)


@pytest.mark.parametrize("mutate", [trusts_any_bytes, trusts_any_key])
def test_d9_wrong_bytes(mutate: Patch) -> None:
    assert caught_by(mutate, "wrong bytes", faults=Faults(damaged=0.5))


def evicts_what_is_pinned(patch: pytest.MonkeyPatch) -> None:
    def may_leave_host(self: Room, chosen: _Chosen) -> Callable[[FamilyId], bool]:
        state, dirty = self._catalog.index.state, self._catalog.index.dirty
        return lambda f: bool(state[f] & IN_HOST and not dirty[f] and f not in chosen.picked)

    patch.setattr(Room, "_may_leave_host", may_leave_host)
    patch.setattr(Room, "_all_may_leave", lambda self, need, stride, chosen: ())


def test_d11_eviction_of_leased_blocks() -> None:
    caught_by(evicts_what_is_pinned)


def evicts_heads_first(patch: pytest.MonkeyPatch) -> None:
    def may_leave_host(self: Room, chosen: _Chosen) -> Callable[[FamilyId], bool]:
        index = self._catalog.index
        state, dirty, pins = index.state, index.dirty, index.pins
        return lambda f: bool(state[f] & IN_HOST and not dirty[f] and not pins[f] and f not in chosen.picked)

    patch.setattr(Room, "_may_leave_host", may_leave_host)
    patch.setattr(Room, "_all_may_leave", lambda self, need, stride, chosen: ())
    patch.setattr(_Chosen, "children_left", lambda self, family, resident: 0)


def test_d30_heads_that_leave_first() -> None:
    assert caught_by(evicts_heads_first, "left")


def frees_leases_at_their_deadline(patch: pytest.MonkeyPatch) -> None:
    honest = Upkeep.make_rounds

    def make_rounds(self: Upkeep) -> None:
        for lease in self._leases.all():
            if lease.at_s <= self._clock.now_s() and len(lease):
                lease.release()
        honest(self)

    patch.setattr(Upkeep, "make_rounds", make_rounds)


def test_d15_leases_that_end_at_their_deadline() -> None:
    caught_by(frees_leases_at_their_deadline)


def gives_slots_of_a_cancelled_flight_back_at_once(patch: pytest.MonkeyPatch) -> None:
    honest = Prefetch._abandon

    def abandon(self: Prefetch) -> None:
        table = self._store.loader.flights._flights
        flights = [table[family] for run in self._runs for family in run.waiting if family in table]
        honest(self)
        for flight in flights:
            if flight.batch is not None and flight.batch.deadline.cancelled:
                self._store.host.release(flight.slots)

    patch.setattr(Prefetch, "_abandon", abandon)


def test_d11_slots_that_a_cancelled_read_still_writes() -> None:
    caught_by(gives_slots_of_a_cancelled_flight_back_at_once, nest_chance=0.3)


def unpins_while_a_load_is_being_started(patch: pytest.MonkeyPatch) -> None:
    def expire(self: Prefetch) -> None:
        with self._lock:
            if self._over:
                return
            self._over = True
        self._abandon()

    patch.setattr(Prefetch, "expire", expire)


def expired_and_cleared_in_the_middle_of_a_start(folder: Path, patch: pytest.MonkeyPatch) -> None:
    """A load has found its blocks on the disk and is about to plan their way. Now its time is over, all is cleared, and
    others come: of another size, and to the same rows if those are free."""
    with live(8, nvme=folder) as rig:
        chain = chain_of(rig.namespace(), 3)
        put_all(rig.client, chain)
        rig.flush("nvme")
        rig.client.evict("host")
        other = chain_of(rig.namespace(layout_of(full_group(8192))), 3)
        begun: list[Prefetch] = []
        begin, plan = Prefetch.begin, Loader._plan

        def note_and_begin(self: Prefetch) -> None:
            begun.append(self)
            begin(self)

        def too_late(self: Loader, *arguments: Any) -> list[Flight]:
            patch.setattr(Loader, "_plan", plan)
            begun[0].expire()
            rig.client.clear().result(PATIENCE_S)
            put_all(rig.client, other)
            rig.flush("nvme")
            rig.client.evict("host")
            return plan(self, *arguments)

        patch.setattr(Prefetch, "begin", note_and_begin)
        patch.setattr(Loader, "_plan", too_late)
        assert len(rig.client.load_async(chain, timeout_s=PATIENCE_S).result(PATIENCE_S)) == 0
        rig.settle()
        assert loaded(rig.client, other) == 3
        audit(rig.store)


def test_d13_a_deadline_in_the_middle_of_a_start(tmp_path: Path) -> None:
    with pytest.MonkeyPatch.context() as patch:
        expired_and_cleared_in_the_middle_of_a_start(tmp_path / "honest", patch)
    with pytest.MonkeyPatch.context() as patch:
        unpins_while_a_load_is_being_started(patch)
        with pytest.raises(AssertionError):
            expired_and_cleared_in_the_middle_of_a_start(tmp_path / "mutant", patch)


def believes_every_hint(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Catalog, "_takes_hints", lambda self, space, clears: True)


def test_d27_hints_from_before_a_clear() -> None:
    remote: dict[str, Any] = {"nvme_bytes": None, "valkey_bytes": 200_000, "writes": ("never", "through")}
    life = {"layouts": ("plain",), "nest_chance": 0.3, "lock_chance": 0.0, "calls": 200}
    assert caught_by(believes_every_hint, "can be there", **remote, **life)


def holds_the_lock_while_it_writes(patch: pytest.MonkeyPatch) -> None:
    honest = Demotion._put

    def put(self: Demotion, *arguments: Any) -> None:
        with self._catalog.lock:
            honest(self, *arguments)

    patch.setattr(Demotion, "_put", put)


def test_a_lock_across_io() -> None:
    assert caught_by(holds_the_lock_while_it_writes, "under a lock")


def leaves_parts_of_failed_families(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Demotion, "_undo", lambda self, edge, outgoing, done: None)


def test_d16_parts_that_nobody_takes_out() -> None:
    faults = Faults(timeout=0.3)
    assert caught_by(leaves_parts_of_failed_families, "unknown", layouts=("window",), faults=faults)


def tells_no_policy_who_left(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(LruPolicy, "on_remove", lambda self, ids, *, evicted: None)


def test_policies_that_are_not_told() -> None:
    assert caught_by(tells_no_policy_who_left, "still knows")


def keeps_slots_of_dropped_drafts(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Intake, "discard", lambda self, blocks: None)


def test_d15_slots_that_never_come_back() -> None:
    assert caught_by(keeps_slots_of_dropped_drafts, "handed out")


def never_counts_clean_bytes(patch: pytest.MonkeyPatch) -> None:
    def now_clean_in(self: Catalog, family: FamilyId, tier: int) -> None:
        self.index.dirty[family] &= ~(1 << tier)

    patch.setattr(Catalog, "_now_clean_in", now_clean_in)


def test_d28_bytes_that_do_not_add_up() -> None:
    assert caught_by(never_counts_clean_bytes, "clean_bytes")


def lets_half_families_be_matched(patch: pytest.MonkeyPatch) -> None:
    honest = Catalog._gain

    def gain(self: Catalog, family: FamilyId, tier: int, parts: int) -> None:
        honest(self, family, tier, parts)
        self.index.state[family] |= USABLE

    patch.setattr(Catalog, "_gain", gain)


def test_d8_half_families() -> None:
    assert caught_by(lets_half_families_be_matched, "usable", layouts=("window",))


# Somebody forgets to say that something is over.


def lands_without_a_word(patch: pytest.MonkeyPatch) -> None:
    def land(self: FlightTable, flights: Any) -> list[Any]:
        for flight in flights:
            self._flights.pop(flight.family, None)
            for run in (*flight.runs, *flight.heirs):
                run.waiting.discard(flight.family)
        return []

    patch.setattr(FlightTable, "land", land)


def asks_and_does_not_tell(patch: pytest.MonkeyPatch) -> None:
    honest = Probe.__init__

    def init(self: Probe, *arguments: Any) -> None:
        honest(self, *arguments)
        self._done = lambda: None

    patch.setattr(Probe, "__init__", init)


@pytest.mark.parametrize("mutate", [lands_without_a_word, asks_and_does_not_tell])
def test_lost_wake_ups(mutate: Patch) -> None:
    assert caught_by(mutate, "still wait", patient=True)


def forgets_who_waits_when_it_closes(patch: pytest.MonkeyPatch) -> None:
    def close(self: TierQueue) -> list[Job]:
        self._closed = True
        self._waiting = [Turns() for _ in self._waiting]
        return []

    patch.setattr(TierQueue, "close", close)
    patch.setattr(SimExecutor, "call_later", _never)


def _never(self: SimExecutor, delay_s: float, call: Callable[[], None]) -> SimTimer:
    return SimTimer(self.clock.now_s() + delay_s, call)


def test_d17_waits_that_outlive_the_store() -> None:
    life = {"ends": ("stop",), "calls": 100, "moods": (Mood.HUNG,), "nest_chance": 0.0, "lock_chance": 0.0}
    assert caught_by(forgets_who_waits_when_it_closes, "still wait", **life)


def lets_deadlines_pass(patch: pytest.MonkeyPatch) -> None:
    honest = Prefetch.expire

    def expire(self: Prefetch) -> None:
        self._store.executor.call_later(0.5, lambda: honest(self))

    patch.setattr(Prefetch, "expire", expire)


def test_d17_deadlines_that_are_not_kept() -> None:
    life = {"moods": (Mood.HUNG,), "nest_chance": 0.0, "lock_chance": 0.0}
    assert caught_by(lets_deadlines_pass, "after its deadline", **life)
