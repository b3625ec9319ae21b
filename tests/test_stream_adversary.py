"""The copier over streams lives under a seeded adversary, and broken ones do not survive it."""

import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from tierkv.copier import CopyPart, LayerPages, PagedKV
from tierkv.routes import RouteTable
from tierkv.stream_copier import StreamCopier
from tierkv.stream_jobs import CANCELLED, CopyJob, Piece, Ring
from tierkv.streams import Event, Lane, Route
from tierkv.testing.manual import ManualDevice, ManualEvent
from tierkv.testing.manual_life import live, live_all, main

LIVES = 2000


def test_d11_d12_d14_lives_under_the_adversary() -> None:
    happened = live_all(range(LIVES))
    assert happened["lives"] == LIVES
    assert all(happened.values()), f"the adversary never tried something: {happened}"


def test_the_command_says_what_it_did(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--seeds", "5:8"]) == 0
    assert capsys.readouterr().out.startswith("3 lives, ")


# ---- broken ones


class DoesNotWaitForTheEngine(StreamCopier):
    def _wait_ready(self, job: CopyJob, lane: Lane) -> None:
        pass


class WritesWhileTheEngineMay(StreamCopier):
    def _wait_ready(self, job: CopyJob, lane: Lane) -> None:
        if lane not in (Lane.UP, Lane.UNPACK):
            super()._wait_ready(job, lane)


class UsesStagingAgainAtOnce(StreamCopier):
    def _take_staging(self, ring: Ring, lane: Lane) -> int:
        return ring.take()[0]


class SaysDoneWhenHandedIn(StreamCopier):
    """The slot is given back while the copy engines still write to it."""

    def __init__(self, device: ManualDevice, **options: Any) -> None:
        super().__init__(device, **options)
        tell = device.call_when

        def too_soon(event: ManualEvent, fired: Callable[[str | None], None]) -> None:
            past = ManualEvent(device)
            past.reach()
            tell(past, fired)

        device.call_when = too_soon  # type: ignore[method-assign]


class ForgetsWhatFliesWhenCancelled(StreamCopier):
    def _cancelled(self, job: CopyJob) -> None:
        if not job.over:
            job.over = True
            job.done(CANCELLED)


class PacksAndSendsAtOnce(StreamCopier):
    """The copy engines do not wait until the pages have been gathered."""

    def _send_down(self, job: CopyJob, piece: Piece) -> tuple[Event, Event]:
        wait = self._device.wait
        self._device.wait = lambda lane, event: lane is Lane.DOWN or wait(lane, event)  # type: ignore[method-assign]
        try:
            return super()._send_down(job, piece)
        finally:
            self._device.wait = wait  # type: ignore[method-assign]


class PreemptsWithoutWaiting(StreamCopier):
    def _send(self, job: CopyJob, piece: Piece, down: bool) -> None:
        super()._send(job, piece, down)
        job.held_pages.clear()


class GivesPinnedBuffersBackTooSoon(StreamCopier):
    def _take_bounce(self, job: CopyJob, piece: Piece) -> bool:
        if not super()._take_bounce(job, piece):
            return False
        self._bounces.give_back(piece.bounce)  # type: ignore[union-attr, arg-type]
        return True


BROKEN = [
    DoesNotWaitForTheEngine,
    WritesWhileTheEngineMay,
    UsesStagingAgainAtOnce,
    SaysDoneWhenHandedIn,
    ForgetsWhatFliesWhenCancelled,
    PacksAndSendsAtOnce,
    PreemptsWithoutWaiting,
    GivesPinnedBuffersBackTooSoon,
]


@pytest.mark.parametrize("broken", BROKEN, ids=[each.__name__ for each in BROKEN])
def test_the_adversary_catches(broken: type[StreamCopier]) -> None:
    for seed in range(400):
        try:
            live(seed, broken)
        except AssertionError:
            return
    pytest.fail(f"{broken.__name__} lived 400 lives")


# ---- one thing at a time


class Rig:
    """Two buffers of one page each, and pages that say who they are."""

    def __init__(self, route: Route = Route.STAGED, *, share: float = 0.5, page_bytes: int = 16) -> None:
        self.pages = np.arange(8 * page_bytes, dtype=np.uint8).reshape(8, page_bytes)
        self.kv = PagedKV(((LayerPages((self.pages,)),),))
        self.device = ManualDevice(3)
        self.copier = StreamCopier(
            self.device,
            routes=RouteTable(((0, route),), ((0, route),)),
            staging_bytes=page_bytes,
            buffers=2,
            offload_share=share,
        )
        self.slots = np.full((8, page_bytes), 0xAA, np.uint8)

    def part(self, number: int) -> CopyPart:
        return CopyPart(0, memoryview(self.slots[number]), (number,))

    def run(self) -> None:
        while self.device.step():
            pass


def test_d12_a_ring_of_two_with_three_users() -> None:
    """The third waits for the event of the first; nothing is lost when each comes as late as can be."""
    rig = Rig()
    ended: list[tuple[int, str | None]] = []
    waits: list[Lane] = []
    wait = rig.device.wait
    rig.device.wait = lambda lane, event: (waits.append(lane), wait(lane, event))  # type: ignore[method-assign]
    for user in range(3):
        rig.copier.offload(
            rig.kv, [rig.part(user)], None, lambda error, user=user: ended.append((user, error))
        )
    rig.run()
    assert sorted(ended) == [(0, None), (1, None), (2, None)]
    assert (rig.slots[:3] == rig.pages[:3]).all()
    assert waits.count(Lane.PACK) == 1, "the third user did not wait for the first one's event"


def test_an_onboard_does_not_stand_behind_a_long_offload() -> None:
    """While the onboard moves, the offload gets its share and no more."""
    rig = Rig(share=0.01)
    ended: list[str] = []
    rig.copier.offload(rig.kv, [rig.part(n) for n in range(6)], None, lambda error: ended.append("offload"))
    target = PagedKV(((LayerPages((np.zeros_like(rig.pages),)),),))
    rig.copier.onboard(target, [rig.part(n) for n in (6, 7, 6, 7)], lambda error: ended.append("onboard"))
    rig.run()
    assert ended == ["onboard", "offload"]
    assert (rig.slots[:6] == rig.pages[:6]).all()


def test_a_device_that_is_lost_fails_what_is_under_way_and_nothing_hangs() -> None:
    rig = Rig()
    ended: list[str | None] = []
    rig.copier.offload(rig.kv, [rig.part(0)], None, ended.append)

    def lost(*_: object) -> None:
        raise RuntimeError("device lost")

    rig.device.kernel = rig.device.record = lost  # type: ignore[method-assign, assignment]
    rig.copier.offload(rig.kv, [rig.part(1), rig.part(2)], None, ended.append)
    rig.device.join(10.0)
    rig.run()
    rig.device.join(10.0)
    rig.run()
    assert len(ended) == 2
    assert ended.count(None) == 1, "what had been handed in before went well"
    assert any("device lost" in str(error) for error in ended)


def test_d14_a_job_that_waits_for_the_engine_is_over_when_it_is_cancelled() -> None:
    rig = Rig()
    ended: list[str | None] = []

    class Never:
        def synchronize(self) -> None:
            raise RuntimeError("the engine is gone")

    job = rig.copier.start_offload(rig.kv, [rig.part(0)], Never(), ended.append)
    assert job is not None
    job.cancel()
    assert ended == [CANCELLED]
    rig.device.join(10.0)
    rig.run()
    assert ended == [CANCELLED]
    assert (rig.slots == 0xAA).all()


def test_before_layer_says_when_a_layer_will_not_come() -> None:
    rig = Rig()
    job = rig.copier.start_onboard(rig.kv, [rig.part(0)], lambda error: None)
    assert job is not None
    assert job.before_layer("compute", 0, 0, 0.0)
    job.cancel()
    assert not job.before_layer("compute", 0, 0, 0.0)
    rig.run()


class Layers(Rig):
    """Six layers of one page each in a slot."""

    def __init__(self) -> None:
        super().__init__(Route.DMA)
        self.layers = [self.pages + 10 * number for number in range(6)]
        self.kv = PagedKV((tuple(LayerPages((each,)) for each in self.layers),))
        self.slot = np.arange(6 * 16, dtype=np.uint8)
        self.seen: list[str] = []
        plan, dma = self.copier._pieces, self.device.dma
        self.copier._pieces = lambda *given, **named: (self.note("plan"), plan(*given, **named))[1]  # type: ignore[method-assign]
        self.device.dma = lambda *given: (self.note("copy"), dma(*given))[1]  # type: ignore[method-assign]

    def note(self, what: str) -> None:
        self.seen.append(what)

    def onboard(self, done: Callable[[str | None], None], told: list[int]) -> CopyJob | None:
        part = CopyPart(0, memoryview(self.slot), (5,))
        return self.copier.start_onboard(self.kv, [part], done, lambda group, layer: told.append(layer))


def test_the_first_layer_does_not_wait_until_all_others_are_worked_out() -> None:
    rig, ended, told = Layers(), [], []
    assert rig.onboard(ended.append, told) is not None
    assert rig.seen[:2] == ["plan", "copy"]
    assert rig.seen.count("copy") == 4, "as many as may be with the device"
    assert rig.seen.count("plan") == 5
    rig.run()
    assert (ended, told) == ([None], [0, 1, 2, 3, 4, 5])
    for number, layer in enumerate(rig.layers):
        assert (layer[5] == rig.slot[16 * number : 16 * (number + 1)]).all()


def test_a_layer_that_cannot_be_worked_out_ends_the_onboard_once() -> None:
    rig, ended, told = Layers(), [], []
    plan = rig.copier._pieces

    def fails(*given: Any, **named: Any) -> Any:
        if rig.seen.count("plan") == 4:
            raise MemoryError("none left")
        return plan(*given, **named)

    rig.copier._pieces = fails  # type: ignore[method-assign]
    job = rig.onboard(ended.append, told)
    assert job is not None
    assert not job.before_layer("compute", 0, 5, 0.0)
    assert not ended, "four layers are with the device"
    rig.run()
    assert len(ended) == 1
    assert "none left" in str(ended[0])
    assert rig.device.idle()
    assert (rig.layers[5] == rig.pages + 50).all()


def test_close_waits_for_what_flies_and_fails_the_rest() -> None:
    """Copies that are with the device end; the others are told at once, and nothing more is taken."""
    rig = Rig()
    ended: list[str | None] = []
    for number in range(8):
        rig.copier.offload(rig.kv, [rig.part(number)], None, ended.append)
    assert not rig.copier.close(0.0), "nothing that flies can be over yet"
    assert ended == ["the copier is closed"] * 4
    rig.run()
    assert rig.copier.close(0.0)
    assert ended[4:] == [None] * 4
    rig.copier.offload(rig.kv, [rig.part(0)], None, ended.append)
    assert ended[8:] == ["the copier is closed"]
    assert (rig.slots[:4] == rig.pages[:4]).all()
    assert (rig.slots[4:] == 0xAA).all()


def test_memory_is_kept_until_the_end_and_no_longer() -> None:
    """Pieces hold addresses; an engine that drops its arrays meanwhile must not pull them from under the device."""
    rig = Rig()
    kept: list[bool] = []
    pages = weakref.ref(rig.kv)
    view = memoryview(bytearray(16))
    rig.copier.offload(
        rig.kv, [CopyPart(0, view, (3,))], None, lambda error: kept.append(pages() is not None)
    )
    del rig.kv
    assert pages() is not None, "the engine's memory was let go of while the copy was under way"
    rig.run()
    assert view == rig.pages[3].tobytes()
    assert kept == [False], "the engine's memory is held beyond the end"
    view.release()
