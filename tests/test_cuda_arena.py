"""The arena that a process copies to and from is pinned for its GPU: anew when its daemon is another one, never while a
copy needs the one before, and never at the price of a copy when locked memory has a limit."""

from __future__ import annotations

import gc
import os
import threading
import weakref
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.client_support import chain_of, full_group, layout_of, spec_of
from tests.daemon_load import mappings_of
from tests.daemon_process import PATIENCE_S, running_daemon
from tests.stand_in_cuda import Machine, Tensor, installed
from tests.valkey_server import eventually
from tierkv.any_copier import AnyCopier
from tierkv.arena import Arena
from tierkv.clock import SystemClock
from tierkv.copier import CopyPart, LayerPages, PagedKV
from tierkv.cuda.copier import CudaCopier
from tierkv.cuda.pinning import CallsUnderWay
from tierkv.daemon.remote import RemoteClient
from tierkv.errors import Away, ClosedError
from tierkv.executor import ThreadExecutor
from tierkv.testing.copier import Done, Gate
from tierkv.units import KIB, MIB

PAGE_BYTES = 4 * KIB
LAYERS = 2


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Machine:
    return installed(monkeypatch)


@pytest.fixture
def executor() -> Iterator[ThreadExecutor]:
    made = ThreadExecutor(SystemClock())
    yield made
    assert made.close(PATIENCE_S) == []


class Memory:
    """Host memory that is its own, so that it can be seen to go."""

    def __init__(self) -> None:
        self.arena = Arena(64 * KIB, 16 * KIB)
        self.region_bytes = 16 * KIB

    def memory(self) -> memoryview:
        return self.arena.memory()

    @property
    def first(self) -> int:
        return int(np.frombuffer(self.arena.memory(), np.uint8).ctypes.data)

    def stretches(self) -> set[int]:
        return set(range(self.first, self.first + 64 * KIB, self.region_bytes))


def pages_on(machine: Machine, seed: int, pages: int = 8) -> tuple[PagedKV, list[np.ndarray[Any, Any]]]:
    """An engine's memory on the "GPU", and the same bytes."""
    dice = np.random.default_rng(seed)
    arrays = [dice.integers(0, 256, (pages, PAGE_BYTES), dtype=np.uint8) for _ in range(LAYERS)]
    layers = tuple(LayerPages((machine.note(Tensor(each)),)) for each in arrays)
    return PagedKV((layers,)), arrays


# ---- copies under way


def test_what_comes_after_waits_for_all_that_had_begun_and_for_nothing_else() -> None:
    under_way, told = CallsUnderWay(), list[str | None]()
    under_way.after(lambda: told.append("nothing had begun"))
    first, second = (under_way.around(told.append) for _ in range(2))
    under_way.after(lambda: told.append("after two"))
    third = under_way.around(told.append)
    second("second")
    assert told == ["nothing had begun", "second"]
    under_way.after(lambda: told.append("after three"))
    first("first")
    assert told[2:] == ["first", "after two"]
    third(None)
    assert told[4:] == [None, "after three"]


def test_a_callback_that_raises_is_over_too() -> None:
    under_way, told = CallsUnderWay(), list[str]()

    def fails(error: str | None) -> None:
        raise ValueError(error)

    over = under_way.around(fails)
    under_way.after(lambda: told.append("after"))
    with pytest.raises(ValueError, match="what"):
        over("what")
    assert told == ["after"]


# ---- another arena


def test_d25_the_arena_before_stays_pinned_while_a_copy_needs_it_and_no_longer(
    machine: Machine, executor: ThreadExecutor
) -> None:
    before, then = Memory(), Memory()
    slots: list[Memory] = [before]
    copier = AnyCopier(executor, lambda: slots[0])
    kv, arrays = pages_on(machine, 1)
    copier.prepare(kv)
    old = before.stretches()
    eventually(lambda: old <= machine.pinned.keys(), "all of the first is pinned")
    gate, late, soon = Gate(PATIENCE_S), Done(), Done()
    slot = before.memory()[: LAYERS * PAGE_BYTES]
    copier.offload(kv, [CopyPart(0, slot, (3,))], gate, late)
    slots[0] = then
    copier.renew()
    copier.renew()
    other = then.memory()[: LAYERS * PAGE_BYTES]
    copier.offload(kv, [CopyPart(0, other, (5,))], None, soon)
    assert soon.wait(PATIENCE_S) is None, "a slot that is not pinned yet is copied all the same"
    assert bytes(other) == b"".join(each[5].tobytes() for each in arrays)
    assert old <= machine.pinned.keys(), "unpinned under a copy"
    assert not then.stretches() & machine.pinned.keys(), "both at once may be more than can be locked"
    gate.fire()
    assert late.wait(PATIENCE_S) is None
    assert bytes(slot) == b"".join(each[3].tobytes() for each in arrays)
    eventually(lambda: then.stretches() <= machine.pinned.keys(), "the second is pinned")
    assert not old & machine.pinned.keys()
    gone = weakref.ref(before.memory().obj)
    del before, slot
    gc.collect()
    assert gone() is None, "memory that nobody uses is kept"
    copier.close(PATIENCE_S)
    assert not then.stretches() & machine.pinned.keys()


def test_the_last_of_several_arenas_is_pinned(machine: Machine, executor: ThreadExecutor) -> None:
    """Two daemons come and go while a copy of the first is under way."""
    first, second, third = (Memory() for _ in range(3))
    copier = CudaCopier(executor, arena=first.memory(), region_bytes=first.region_bytes)
    kv, _ = pages_on(machine, 2)
    copier.prepare(kv)
    gate, done = Gate(PATIENCE_S), Done()
    copier.offload(kv, [CopyPart(0, first.memory()[: LAYERS * PAGE_BYTES], (0,))], gate, done)
    for its in (second, third):
        copier.pin(its.memory(), its.region_bytes)
    gate.fire()
    assert done.wait(PATIENCE_S) is None
    eventually(lambda: third.stretches() <= machine.pinned.keys(), "the third is pinned")
    assert not (first.stretches() | second.stretches()) & machine.pinned.keys()
    copier.close()
    assert not third.stretches() & machine.pinned.keys()


def test_nothing_is_pinned_after_the_end(machine: Machine, executor: ThreadExecutor) -> None:
    slots: list[Memory] = [Memory()]
    copier = AnyCopier(executor, lambda: slots[0])
    kv, _ = pages_on(machine, 3)
    copier.prepare(kv)
    copier.close(PATIENCE_S)
    slots[0] = Memory()
    copier.renew()
    done = Done()
    copier.offload(kv, [CopyPart(0, slots[0].memory()[: LAYERS * PAGE_BYTES], (0,))], None, done)
    assert done.wait(PATIENCE_S) == "the copier is closed"
    assert not slots[0].stretches() & machine.pinned.keys()


def test_no_gpu_is_opened_after_the_end(machine: Machine, executor: ThreadExecutor) -> None:
    copier = AnyCopier(executor)
    copier.close(PATIENCE_S)
    with pytest.raises(ClosedError):
        copier.prepare(pages_on(machine, 3)[0])


def test_memory_that_comes_later_is_pinned_when_it_does(machine: Machine, executor: ThreadExecutor) -> None:
    """A client whose daemon is not there yet when its engine starts."""
    slots: list[Memory] = []
    copier = AnyCopier(executor, lambda: slots[0] if slots else None)
    kv, _ = pages_on(machine, 4)
    copier.prepare(kv)
    slots.append(Memory())
    copier.renew()
    eventually(lambda: slots[0].stretches() <= machine.pinned.keys(), "it is pinned")
    copier.close(PATIENCE_S)


# ---- a daemon that is started anew


LAYOUT = layout_of(replace(full_group(PAGE_BYTES), layers=LAYERS))


def arena_of(client: RemoteClient) -> range:
    memory = client.link.memory
    assert memory is not None
    first = int(np.frombuffer(memory.memory(), np.uint8).ctypes.data)
    return range(first, first + len(memory.memory()))


def is_pinned(machine: Machine, client: RemoteClient) -> bool:
    place = arena_of(client)
    return sum(size for at, size in list(machine.pinned.items()) if at in place) == len(place)


def is_there(client: RemoteClient) -> bool:
    try:
        client.stats()
    except Away:
        return False
    return True


def there_and_back(machine: Machine, client: RemoteClient, seed: int) -> None:
    """Blocks go from the "GPU" into the daemon's arena and back into other pages."""
    space = client.open_namespace(spec_of(LAYOUT))
    chain = chain_of(space, 3, seed=seed)
    kv, arrays = pages_on(machine, seed)
    stored = client.offload(kv, [[[page]] for page in (6, 1, 4)], chain).result(PATIENCE_S)
    assert stored.stored == 3, stored
    target, found = pages_on(machine, seed + 100)
    with client.load(chain) as lease:
        assert len(lease) == 3
        assert client.onboard(lease, target, [[[page]] for page in (0, 2, 7)]).result(PATIENCE_S)
    for layer in range(LAYERS):
        assert (found[layer][[0, 2, 7]] == arrays[layer][[6, 1, 4]]).all()


def test_d25_the_arena_of_a_daemon_that_was_started_anew_is_pinned_in_its_turn(
    machine: Machine, tmp_path: Path
) -> None:
    settings = {"host_capacity": "8 MiB", "host_region": "1 MiB"}
    with running_daemon(tmp_path, **settings) as daemon:
        client = daemon.client()
        kv, _ = pages_on(machine, 9)
        client.copier.prepare(kv)
        eventually(partial(is_there, client), "it answers", PATIENCE_S)
        eventually(lambda: is_pinned(machine, client), "its arena is pinned", PATIENCE_S)
        there_and_back(machine, client, 10)
        before, mapped = arena_of(client), mappings_of(os.getpid())
        daemon.process.kill()
        daemon.process.wait()
    with client, running_daemon(tmp_path, **settings):
        eventually(partial(is_there, client), "it answers again", PATIENCE_S)
        eventually(lambda: client.link.reconnects == 1, "the client has found it", PATIENCE_S)
        eventually(lambda: is_pinned(machine, client), "the new arena is pinned", PATIENCE_S)
        assert all(at not in before or at in arena_of(client) for at in machine.pinned), (
            "the old one still is"
        )
        there_and_back(machine, client, 20)
        gc.collect()
        assert mappings_of(os.getpid()) <= mapped, "the old arena is still mapped"


def test_a_limit_on_locked_memory_is_one_line_and_no_wrong_byte(
    machine: Machine, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    machine.most_pinned_bytes = 3 * MIB
    settings = {"host_capacity": "8 MiB", "host_region": "1 MiB"}
    with running_daemon(tmp_path, **settings) as daemon, daemon.client() as client:
        kv, _ = pages_on(machine, 9)
        client.copier.prepare(kv)
        eventually(partial(is_there, client), "it answers", PATIENCE_S)
        device = client.copier.cuda().device(0)
        eventually(lambda: device.pinning.trouble is not None, "the limit is met", PATIENCE_S)
        work = [threading.Thread(target=there_and_back, args=(machine, client, 10 * i)) for i in range(1, 4)]
        for thread in work:
            thread.start()
        for thread in work:
            thread.join(PATIENCE_S)
        there_and_back(machine, client, 50)
        assert 0 < device.pinning.pinned_bytes < 8 * MIB
    said = [
        record.getMessage() for record in caplog.records if "are pinned for the GPU" in record.getMessage()
    ]
    assert len(said) == 1
    assert "of 8 MiB" in said[0]
