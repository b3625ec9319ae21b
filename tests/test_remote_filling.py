"""The bytes of a remote put: who copies them, who takes their checksums, and what happens when they are wrong."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import pytest
import xxhash

from tests.client_support import DAEMON, FACE, chain_of, full_group, layout_of, live
from tierkv.arena import Arena
from tierkv.clock import SystemClock
from tierkv.daemon.remote_filling import AHEAD_BYTES, LANE, SHARED_BYTES, Ahead, Filler
from tierkv.errors import ArgumentError, HandleError
from tierkv.executor import ThreadExecutor
from tierkv.handles import DraftBlocks
from tierkv.ids import Slot
from tierkv.testing.threads import run_together
from tierkv.units import KIB, MIB

BLOCK_BYTES = 512 * KIB
BLOCKS = 2 * SHARED_BYTES // BLOCK_BYTES
PATIENCE_S = 20.0


class Memory:
    """Slots whose ``view`` first calls ``meet``."""

    instance = b"test"

    def __init__(self) -> None:
        self._arena = Arena(BLOCKS * BLOCK_BYTES, BLOCKS * BLOCK_BYTES)
        self.slots = self._arena.reserve(BLOCKS, BLOCK_BYTES) or []
        self.meet: Callable[[], object] = lambda: None

    def view(self, slot: Slot) -> memoryview:
        self.meet()
        return self._arena.view(slot)

    def generation(self, slot: Slot) -> int:
        return 0

    def holds(self, payloads: Sequence[Any]) -> bool:
        return all(
            self._arena.view(slot) == memoryview(its) for slot, its in zip(self.slots, payloads, strict=True)
        )


@pytest.fixture
def executor() -> Iterator[ThreadExecutor]:
    executor = ThreadExecutor(SystemClock())
    yield executor
    assert executor.close(PATIENCE_S) == []


def payloads() -> list[Any]:
    return list(np.random.default_rng(3).integers(0, 256, (BLOCKS, BLOCK_BYTES), dtype=np.uint8))


def draft_of(memory: Memory) -> DraftBlocks:
    chain: Any = None  # nobody looks at it
    return DraftBlocks(chain, range(BLOCKS), (0,), (BLOCK_BYTES,), [(slot,) for slot in memory.slots])


def two_threads(executor: ThreadExecutor) -> Filler:
    filler = Filler(executor)
    filler.alone = False  # also where the test has one core
    return filler


def no_sums(given: Sequence[Any]) -> Ahead:
    return Ahead(given, 0, (BLOCK_BYTES,))


def sums_of(given: Sequence[Any]) -> list[tuple[int, ...]]:
    return [(xxhash.xxh3_64_intdigest(one),) for one in given]


def test_two_threads_copy_a_large_put_and_all_of_it_is_there(executor: ThreadExecutor) -> None:
    """Neither goes on until both have come."""
    memory, given, both, seen = Memory(), payloads(), threading.Barrier(2), set()

    def meet() -> None:
        if threading.get_ident() not in seen:
            both.wait(PATIENCE_S)
            seen.add(threading.get_ident())

    memory.meet = meet
    sums = two_threads(executor).fill(memory, draft_of(memory), given, no_sums(given), 0)
    assert len(seen) == 2
    assert sums == sums_of(given)
    assert memory.holds(given)


def test_a_thread_that_comes_too_late_touches_nothing(executor: ThreadExecutor) -> None:
    memory, given, go = Memory(), payloads(), threading.Event()
    filler = two_threads(executor)
    filler.fill(memory, draft_of(memory), given, no_sums(given), 0)  # the lane is open
    executor.run(LANE, lambda: go.wait(PATIENCE_S), lambda _: None)
    assert filler.fill(memory, draft_of(memory), given, no_sums(given), 0) == sums_of(given)
    touched: list[str] = []
    memory.meet = lambda: touched.append(threading.current_thread().name)
    go.set()
    over = threading.Event()
    executor.run(LANE, over.set, lambda _: None)
    assert over.wait(PATIENCE_S)
    assert touched == []


class WrongForOne(list[Any]):
    """Payloads that are none for the thread that made them, which finds that out when another one is copying."""

    def __init__(self, given: Sequence[Any]) -> None:
        super().__init__(given)
        self._thread = threading.get_ident()
        self.other_copies, self.met = threading.Event(), threading.Event()

    def __getitem__(self, index: Any) -> Any:
        if threading.get_ident() != self._thread:
            return super().__getitem__(index)
        assert self.other_copies.wait(PATIENCE_S)
        self.met.set()
        return object()


def test_a_put_that_fails_is_over_when_the_other_thread_no_longer_writes(executor: ThreadExecutor) -> None:
    memory, made, go = Memory(), threading.Event(), threading.Event()
    wrong: list[WrongForOne] = []
    order: list[str] = []

    def meet() -> None:
        wrong[0].other_copies.set()
        assert go.wait(PATIENCE_S)
        order.append("written")

    def fill() -> None:
        wrong.append(WrongForOne(payloads()))
        made.set()
        memory.meet = meet
        with pytest.raises(ArgumentError, match="block"):
            two_threads(executor).fill(memory, draft_of(memory), wrong[0], no_sums(()), 0)
        order.append("over")

    def let_go() -> None:
        assert made.wait(PATIENCE_S)
        assert wrong[0].met.wait(PATIENCE_S)
        go.set()

    run_together([fill, let_go], PATIENCE_S)
    assert order == ["written", "over"]


@pytest.mark.parametrize("where", [0, 1, BLOCKS - 1])
def test_a_payload_of_another_length_is_named(executor: ThreadExecutor, where: int) -> None:
    memory, given = Memory(), payloads()
    given[where] = given[where][:-1]
    with pytest.raises(HandleError, match=f"block {where}: {BLOCK_BYTES - 1} bytes given"):
        two_threads(executor).fill(memory, draft_of(memory), given, no_sums(given), 0)


def test_checksums_are_taken_until_the_answer_is_there() -> None:
    given, answers = payloads(), iter([False, False, True])
    ahead = no_sums(given)
    ahead.take(lambda: next(answers))
    assert ahead.sums == dict(enumerate(sums_of(given)[:2]))


def test_what_is_no_payload_is_left_for_the_copy(executor: ThreadExecutor) -> None:
    given = payloads()
    given[1] = "text"
    ahead = no_sums(given)
    ahead.take(lambda: False)
    assert set(ahead.sums) == {0}
    with pytest.raises(ArgumentError, match="block 1"):
        two_threads(executor).fill(memory := Memory(), draft_of(memory), given, ahead, 0)


def test_a_block_that_takes_long_is_not_begun() -> None:
    ahead = Ahead([bytes(AHEAD_BYTES + 1)], 0, (AHEAD_BYTES + 1,))
    ahead.take(lambda: False)
    assert ahead.sums == {}


def test_the_daemon_gets_the_checksums_of_what_was_put() -> None:
    """A large put, and one more from the middle of the chain on; some of its blocks are there already."""
    token = FACE.set(DAEMON)
    try:
        with live(16, block_bytes=MIB) as rig:
            chain = chain_of(rig.namespace(layout_of(full_group(MIB))), 12)
            given = list(np.random.default_rng(4).integers(0, 256, (12, MIB), dtype=np.uint8))
            assert rig.client.put(chain, given[:9]).stored == 9
            stored = rig.client.put(chain, given[6:], first=6)
            assert (stored.stored, stored.resident) == (3, 3)
            with rig.client.load(chain) as lease:
                for i, wanted in enumerate(given):
                    assert lease.view(i) == memoryview(wanted)
            catalog = rig.store.catalog
            space = catalog.index.space(chain.namespace.digest)
            assert space is not None
            families = [space.get(block_hash) for block_hash in chain.hashes]
            slots = [catalog.slot_of(family, 0) for family in families if family is not None]
            assert [(rig.store.host.checksum(slot),) for slot in slots] == sums_of(given)
    finally:
        FACE.reset(token)
