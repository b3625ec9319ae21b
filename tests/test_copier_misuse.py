"""What a call should not ask for, what memory should not be and what a device should not do: each copier says so
through ``done``, in one way, and the next call works."""

from __future__ import annotations

import queue
from collections.abc import Iterator, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from tierkv.clock import SystemClock
from tierkv.copier import Copier, CopyPart, HostCopier, LayerPages, PagedKV
from tierkv.executor import ThreadExecutor
from tierkv.routes import RouteTable
from tierkv.stream_copier import StreamCopier
from tierkv.stream_jobs import CANCELLED
from tierkv.streams import Lane, Route
from tierkv.testing.manual import ManualCopier, ManualDevice, ManualEvent

if TYPE_CHECKING:
    from tierkv.page_runs import Longs

PATIENCE_S = 20.0
LAYERS, PAGES, PAGE_BYTES, POISON = 2, 6, 8, 0xAA


@pytest.fixture(params=["host", "streams"])
def copier(request: pytest.FixtureRequest, caplog: pytest.LogCaptureFixture) -> Iterator[Copier]:
    if request.param == "host":
        executor = ThreadExecutor(SystemClock())
        yield HostCopier(executor)
        ended = [each for each in caplog.get_records("call") if "ended with" in each.getMessage()]
        assert not ended, "a thread was ended"
        assert executor.close(PATIENCE_S) == []
    else:
        copier = ManualCopier(1, staging_bytes=64, buffers=2)
        yield copier
        assert copier.close()


def memory(*page_bytes: int) -> PagedKV:
    """One group with a layer for each size; every byte says where it is."""
    sizes = page_bytes or (PAGE_BYTES,) * LAYERS
    layers = [
        LayerPages((np.arange(PAGES * size, dtype=np.uint8).reshape(PAGES, size) + np.uint8(100 * number),))
        for number, size in enumerate(sizes)
    ]
    return PagedKV((tuple(layers),))


def pages_of(kv: PagedKV) -> Any:
    return np.stack([layer.arrays[0] for layer in kv.groups[0]])


def slot(size: int = LAYERS * 2 * PAGE_BYTES) -> memoryview:
    return memoryview(bytearray([POISON]) * size)


def offload(copier: Copier, kv: PagedKV, *parts: CopyPart) -> str | None:
    ended: queue.SimpleQueue[str | None] = queue.SimpleQueue()
    copier.offload(kv, parts, None, ended.put)
    return ended.get(timeout=PATIENCE_S)


def onboard(copier: Copier, kv: PagedKV, *parts: CopyPart) -> str | None:
    ended: queue.SimpleQueue[str | None] = queue.SimpleQueue()
    copier.onboard(kv, parts, ended.put)
    return ended.get(timeout=PATIENCE_S)


# ---- what is asked for


@pytest.mark.parametrize("kind", [np.uint8, np.uint16, np.uint32, np.uint64, np.int8, np.int64])
@pytest.mark.parametrize("numbers", [(1, 0), (3, 1), (5, 4), (0, 5)])
def test_page_numbers_of_a_block_table_are_numbers(
    copier: Copier, kind: type[Any], numbers: tuple[int, int]
) -> None:
    """The difference of two numbers without a sign is no distance when the second is the smaller one."""
    table = tuple(np.array(numbers, kind))
    kv, room = memory(), slot()
    assert offload(copier, kv, CopyPart(0, room, table)) is None
    assert bytes(room) == pages_of(kv)[:, list(numbers)].tobytes()
    other = memory()
    pages_of_other = pages_of(other)
    for layer in other.groups[0]:
        layer.arrays[0][...] = 0
    assert onboard(copier, other, CopyPart(0, room, table)) is None
    assert (pages_of(other)[:, list(numbers)] == pages_of_other[:, list(numbers)]).all()


@pytest.mark.parametrize(
    "wrong", [1.0, 1.5, float("nan"), "1", b"1", None, (1,), -1, 6, 2**63, 2**70, -(2**70)]
)
def test_what_is_no_page_is_refused_and_nothing_is_moved(copier: Copier, wrong: Any) -> None:
    kv, room = memory(), slot()
    before = pages_of(kv)
    assert offload(copier, kv, CopyPart(0, room, (0, wrong))) is not None
    assert onboard(copier, kv, CopyPart(0, room, (wrong, 2))) is not None
    assert set(room) == {POISON}
    assert (pages_of(kv) == before).all()
    assert offload(copier, kv, CopyPart(0, room, (0, 1))) is None


@pytest.mark.parametrize("skip", [2, 3, 100])
def test_a_block_that_the_engine_has_already_is_left_alone(copier: Copier, skip: int) -> None:
    """``skip`` counts over all blocks of a call: the first of them may be shorter than that."""
    kv, room = memory(), slot()
    before = pages_of(kv)
    parts = [CopyPart(0, room, (0, 1), skip), CopyPart(0, room, (2, 3), skip - 2 if skip < 4 else 1)]
    assert onboard(copier, kv, *parts) is None
    after = pages_of(kv)
    assert (after[:, :2] == before[:, :2]).all()
    assert (after[:, 3] == POISON).all()


@pytest.mark.parametrize("skip", [-1, -2, -5])
def test_a_negative_skip_is_refused(copier: Copier, skip: int) -> None:
    kv = memory()
    before = pages_of(kv)
    error = onboard(copier, kv, CopyPart(0, slot(), (1, 2), skip))
    assert error is not None
    assert "skip" in error
    assert (pages_of(kv) == before).all()


@pytest.mark.parametrize("group", [-1, 1, 7])
def test_a_layer_group_that_there_is_not_is_told(copier: Copier, group: int) -> None:
    for copy in (offload, onboard):
        error = copy(copier, memory(), CopyPart(group, slot(), (1, 2)))
        assert error is not None
        assert "layer group" in error


# ---- what memory is


@pytest.mark.parametrize("sizes", [(8, 4), (4, 8), (4, 200)])
def test_layers_of_one_group_with_unequal_pages_are_told(copier: Copier, sizes: tuple[int, int]) -> None:
    """Where a layer begins in a slot follows from its pages' size."""
    room = np.full(256, POISON, np.uint8)
    for copy in (offload, onboard):
        error = copy(copier, memory(*sizes), CopyPart(0, memoryview(room)[:32], (1, 2)))
        assert error is not None
        assert "bytes" in error
    assert (room[32:] == POISON).all(), "bytes behind the slot were written"


def test_a_slot_that_may_only_be_read_is_not_written(copier: Copier) -> None:
    room = bytes(slot())
    assert offload(copier, memory(), CopyPart(0, memoryview(room), (1, 2))) is not None
    assert set(room) == {POISON}
    assert onboard(copier, memory(), CopyPart(0, memoryview(room), (1, 2))) is None


@pytest.mark.parametrize(
    "array",
    [
        object(),
        None,
        np.zeros((PAGES, 8, 2), np.float32)[:, :, ::2],
        np.zeros((0, 8), np.uint8),
        np.zeros(()),
    ],
)
def test_memory_that_cannot_be_read_is_told_and_ends_no_thread(copier: Copier, array: Any) -> None:
    wrong = PagedKV(((LayerPages((array,)),),))
    for copy in (offload, onboard):
        assert copy(copier, wrong, CopyPart(0, slot(400), (1, 2))) is not None
    assert onboard(copier, PagedKV(((LayerPages(()),),)), CopyPart(0, slot(), (1, 2))) is not None


# ---- what an engine's own code raises


class Odd(Exception):
    """Nothing that anybody has heard of."""


class RaisesOdd:
    def synchronize(self) -> None:
        raise Odd("an engine's own")


@pytest.mark.parametrize(
    "error", [Odd("own"), StopIteration("own"), AssertionError("own"), SystemExit("own")]
)
def test_whatever_on_layer_raises_fails_its_call_and_no_other(copier: Copier, error: BaseException) -> None:
    ended: queue.SimpleQueue[str | None] = queue.SimpleQueue()

    def broken(group: int, layer: int) -> None:
        raise error

    copier.onboard(memory(), [CopyPart(0, slot(), (0, 1))], ended.put, broken)
    assert "own" in str(ended.get(timeout=PATIENCE_S))
    assert onboard(copier, memory(), CopyPart(0, slot(), (0, 1))) is None


def test_whatever_an_event_raises_fails_its_call_and_no_other(copier: Copier) -> None:
    ended: queue.SimpleQueue[str | None] = queue.SimpleQueue()
    copier.offload(memory(), [CopyPart(0, slot(), (0, 1))], RaisesOdd(), ended.put)
    copier.onboard(memory(), [CopyPart(0, slot(), (0, 1))], ended.put, ready=RaisesOdd())
    for _ in range(2):
        assert "Odd" in str(ended.get(timeout=PATIENCE_S))
    assert offload(copier, memory(), CopyPart(0, slot(), (0, 1))) is None


# ---- what a device does


class Rig:
    """Four pages of 16 bytes, copied run by run."""

    def __init__(self, *, pinned: bool = True) -> None:
        self.pages = np.full((4, 2, 8), POISON, np.uint8)[:, :1]  # no page goes on where the one before ends
        self.kv = PagedKV(((LayerPages((self.pages,)),),))
        self.slot = np.full(32, 7, np.uint8)
        self.device = ManualDevice(5, pinned=lambda address: pinned)
        self.copier = StreamCopier(
            self.device,
            routes=RouteTable(((0, Route.DMA),), ((0, Route.DMA),)),
            staging_bytes=32,
            buffers=2,
        )
        self.ended: list[str | None] = []

    @property
    def part(self) -> CopyPart:
        return CopyPart(0, memoryview(self.slot), (0, 1, 2, 3))

    def run(self) -> None:
        while self.device.step():
            pass


def test_d14_a_piece_that_was_handed_in_by_half_is_waited_for_when_its_pages_are_taken_away() -> None:
    """The copy of the second run fails as it is handed in; the first is on its way into a page."""
    for seed in range(20):
        rig = Rig()
        rig.device.dice.seed(seed)
        dma = rig.device.dma

        def by_half(lane: Lane, dst: Longs, src: Longs, size: Longs, dma: Any = dma) -> None:
            dma(lane, dst[:1], src[:1], size[:1])
            raise RuntimeError("no more")

        rig.device.dma = by_half  # type: ignore[method-assign]
        job = rig.copier.start_onboard(rig.kv, [rig.part], rig.ended.append)
        assert job is not None
        job.preempt("engine")
        pages = rig.pages
        rig.device.engine_does("engine", lambda pages=pages: pages.fill(1))  # type: ignore[misc]
        rig.run()
        assert (rig.pages == 1).all(), "a page was written after the engine had it back"
        assert len(rig.ended) == 1
        assert "no more" in str(rig.ended[0])
        assert rig.device.idle()


class StepsWhenWaitedFor(ManualEvent):
    """An engine's thread that waits lets the device go on."""

    def synchronize(self) -> None:
        while not self.reached:
            assert self.device.step()


class WithoutEvents(Rig):
    """The copies of the first piece are handed in, then no event can be recorded for a while."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        self.device.dice.seed(seed)
        self.left = 2
        self.record, self.drained = self.device.record, self.device.drained
        self.device.record = self.none_left  # type: ignore[method-assign]
        self.device.drained = self.waited_for  # type: ignore[method-assign]

    def none_left(self, lane: Lane) -> ManualEvent:
        self.left -= 1
        if self.left >= 0:
            raise RuntimeError("no event")
        return self.record(lane)

    def waited_for(self, lanes: Sequence[Lane]) -> ManualEvent:
        event = self.drained(lanes)
        event.__class__ = StepsWhenWaitedFor
        return event


@pytest.mark.parametrize("down", [True, False])
def test_d11_a_slot_is_in_use_as_long_as_a_copy_runs_that_no_event_stands_behind(down: bool) -> None:
    for seed in range(20):
        rig = WithoutEvents(seed)
        slot, pages = rig.slot, rig.pages

        def done(error: str | None, rig: Rig = rig, slot: Any = slot, pages: Any = pages) -> None:
            rig.ended.append(error)
            slot[:], pages[:] = 1, 2  # both are somebody else's now

        if down:
            rig.copier.offload(rig.kv, [rig.part], None, done)
        else:
            rig.copier.onboard(rig.kv, [rig.part], done)
        rig.device.join(PATIENCE_S)  # whoever waits on a thread of its own
        rig.run()
        assert len(rig.ended) == 1
        assert "no event" in str(rig.ended[0])
        assert (slot == 1).all(), "a slot was written after its job"
        assert (pages == 2).all(), "a page was written after its job"
        assert rig.device.idle()


def test_d14_a_preemption_waits_itself_for_a_copy_that_no_event_stands_behind() -> None:
    for seed in range(20):
        rig = WithoutEvents(seed)
        job = rig.copier.start_onboard(rig.kv, [rig.part], rig.ended.append)
        assert job is not None
        job.preempt("engine")
        rig.pages[:] = 1
        rig.run()
        assert (rig.pages == 1).all(), "a page was written after the engine had it back"
        assert len(rig.ended) == 1


@pytest.mark.parametrize(
    "error", [MemoryError("none"), OSError("none"), ValueError("none"), RuntimeError("none")]
)
def test_whatever_a_device_raises_fails_the_copy_and_nothing_hangs(error: Exception) -> None:
    rig = Rig()
    dma = rig.device.dma

    def broken(*_: object) -> None:
        raise error

    rig.device.dma = broken  # type: ignore[method-assign, assignment]
    rig.copier.offload(rig.kv, [rig.part], None, rig.ended.append)
    rig.copier.onboard(rig.kv, [rig.part], rig.ended.append)
    rig.run()
    assert ["none" in str(each) for each in rig.ended] == [True, True]
    rig.device.dma = dma  # type: ignore[method-assign]
    rig.copier.onboard(rig.kv, [rig.part], rig.ended.append)
    rig.run()
    assert rig.ended[2] is None
    assert rig.copier.close(0.0)


@pytest.mark.parametrize("buffers", [0, 1])
@pytest.mark.parametrize("error", [RuntimeError("no memory"), MemoryError("no memory")])
def test_pinned_memory_that_is_not_to_be_had_fails_the_copy_and_nothing_hangs(
    buffers: int, error: Exception
) -> None:
    rig = Rig(pinned=False)
    staging, left = rig.device.staging, [buffers]

    def few(size_bytes: int, *, on_host: bool) -> int:
        if not left[0]:
            raise error
        left[0] -= 1
        return staging(size_bytes, on_host=on_host)

    rig.device.staging = few  # type: ignore[method-assign]
    for _ in range(3):
        rig.copier.offload(rig.kv, [rig.part], None, rig.ended.append)
        rig.copier.onboard(rig.kv, [rig.part], rig.ended.append)
    rig.run()
    if buffers:
        assert rig.ended == [None] * 6, "one buffer is enough to go on with"
    else:
        assert ["no memory" in str(each) for each in rig.ended] == [True] * 6
        left[0] = 1
        rig.copier.onboard(rig.kv, [rig.part], rig.ended.append)
        rig.run()
        assert rig.ended[6:] == [None]
    assert rig.device.idle()


def test_a_job_that_waits_for_pinned_memory_can_be_cancelled() -> None:
    rig = Rig(pinned=False)
    jobs = [rig.copier.start_onboard(rig.kv, [rig.part], rig.ended.append) for _ in range(4)]
    for job in jobs:
        assert job is not None
        job.cancel()
    rig.run()
    assert rig.ended == [CANCELLED] * 4
    assert rig.device.idle()


def test_what_one_done_raises_keeps_no_other_job_waiting() -> None:
    """The store's own code runs there, and plug-ins in it."""
    rig = Rig()

    def broken(_: str | None) -> None:
        raise Odd("done")

    for number in range(12):
        rig.copier.offload(rig.kv, [rig.part], None, broken if number % 2 else rig.ended.append)
    with pytest.raises(Odd):
        rig.copier.close(0.0)
    for _ in range(1000):
        with suppress(Odd):
            rig.device.step()
    assert rig.device.idle()
    assert len(rig.ended) == 6
