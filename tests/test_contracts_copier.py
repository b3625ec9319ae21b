"""HostCopier passes the copier contract with numpy arrays, and broken copiers do not."""

import threading
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
from contracts_support import Meeting, assert_catches

from tierkv.clock import SystemClock
from tierkv.copier import Copier, CopyPart, HostCopier, PagedKV, ReadyEvent
from tierkv.executor import ThreadExecutor
from tierkv.layout import Layout
from tierkv.testing.copier import CopierContract

DoneCall = Callable[[str | None], None]
LayerCall = Callable[[int, int], None]


class OnThreads(CopierContract):
    """Each copier with an executor of its own."""

    copier_class: type[HostCopier] = HostCopier

    def make_copier(self) -> Copier:
        executor = ThreadExecutor(SystemClock())
        copier = self.copier_class(executor)
        self.executors = [*getattr(self, "executors", []), executor]
        return copier

    def close_copier(self, copier: Copier) -> None:
        assert self.executors.pop().close(10.0) == []


class TestHostCopier(OnThreads):
    pass


class TestHostCopierWithTensors(OnThreads):
    def to_engine(self, array: object) -> object:
        return pytest.importorskip("torch").from_numpy(array)

    def from_engine(self, array: object) -> object:
        return array.numpy().copy()


# ---- broken ones


class Now:
    """An executor that runs everything at once, so that a broken copier is broken every time."""

    def open_lane(self, lane: str, workers: int) -> None:
        pass

    def run(self, lane: str, work: Callable[[], str | None], done: DoneCall) -> None:
        done(work())


class Broken(HostCopier):
    def __init__(self, executor: ThreadExecutor) -> None:
        super().__init__(executor)
        self.now = HostCopier(Now())  # type: ignore[arg-type]


class PageByPage(Broken):
    """All layers of a page together: the order of an engine, not of a slot."""

    def offload(
        self, kv: PagedKV, parts: Sequence[CopyPart], ready: ReadyEvent | None, done: DoneCall
    ) -> None:
        swapped = [CopyPart(part.group, part.slot, part.pages[::-1]) for part in parts]
        super().offload(kv, swapped, ready, done)


class WritesBackWhatItRead(Broken):
    def offload(
        self, kv: PagedKV, parts: Sequence[CopyPart], ready: ReadyEvent | None, done: DoneCall
    ) -> None:
        super().offload(kv, parts, ready, done)
        kv.groups[0][0].arrays[0].reshape(-1)[-1] = 0


class IgnoresSkip(Broken):
    def onboard(
        self,
        kv: PagedKV,
        parts: Sequence[CopyPart],
        done: DoneCall,
        on_layer: LayerCall | None = None,
        ready: ReadyEvent | None = None,
    ) -> None:
        whole = [CopyPart(part.group, part.slot, part.pages) for part in parts]
        super().onboard(kv, whole, done, on_layer, ready)


class ForgetsAnEmptyBatch(Broken):
    def offload(
        self, kv: PagedKV, parts: Sequence[CopyPart], ready: ReadyEvent | None, done: DoneCall
    ) -> None:
        if parts:
            super().offload(kv, parts, ready, done)


class HasRoomForThirtyTwo(Broken):
    def offload(
        self, kv: PagedKV, parts: Sequence[CopyPart], ready: ReadyEvent | None, done: DoneCall
    ) -> None:
        super().offload(kv, parts[:32], ready, done)


class DoesNotWait(Broken):
    def offload(
        self, kv: PagedKV, parts: Sequence[CopyPart], ready: ReadyEvent | None, done: DoneCall
    ) -> None:
        self.now.offload(kv, parts, None, done)


class OnboardsAtOnce(Broken):
    def onboard(
        self,
        kv: PagedKV,
        parts: Sequence[CopyPart],
        done: DoneCall,
        on_layer: LayerCall | None = None,
        ready: ReadyEvent | None = None,
    ) -> None:
        self.now.onboard(kv, parts, done, on_layer)


class WaitsInTheCall(Broken):
    def offload(
        self, kv: PagedKV, parts: Sequence[CopyPart], ready: ReadyEvent | None, done: DoneCall
    ) -> None:
        if ready is not None:
            ready.synchronize()
        super().offload(kv, parts, ready, done)


class SaysDoneTooSoon(Broken):
    def offload(
        self, kv: PagedKV, parts: Sequence[CopyPart], ready: ReadyEvent | None, done: DoneCall
    ) -> None:
        done(None)
        super().offload(kv, parts, ready, lambda error: None)


class TellsLayersTooSoon(Broken):
    def onboard(
        self,
        kv: PagedKV,
        parts: Sequence[CopyPart],
        done: DoneCall,
        on_layer: LayerCall | None = None,
        ready: ReadyEvent | None = None,
    ) -> None:
        if on_layer is not None:
            for group, layers in enumerate(kv.groups):
                for layer in range(len(layers)):
                    on_layer(group, layer)
        super().onboard(kv, parts, done, None, ready)


class TellsTheLastLayerFirst(Broken):
    def onboard(
        self,
        kv: PagedKV,
        parts: Sequence[CopyPart],
        done: DoneCall,
        on_layer: LayerCall | None = None,
        ready: ReadyEvent | None = None,
    ) -> None:
        told: list[tuple[int, int]] = []

        def over(error: str | None) -> None:
            for group, layer in reversed(told):
                if on_layer is not None:
                    on_layer(group, layer)
            done(error)

        super().onboard(kv, parts, over, lambda group, layer: told.append((group, layer)), ready)


class DoneTwice(Broken):
    def offload(
        self, kv: PagedKV, parts: Sequence[CopyPart], ready: ReadyEvent | None, done: DoneCall
    ) -> None:
        self.now.offload(kv, parts, ready, done)
        done(None)


class CopiesOnceMore(Broken):
    """Does the work a second time with the next call."""

    again: Callable[[], None] | None = None

    def offload(
        self, kv: PagedKV, parts: Sequence[CopyPart], ready: ReadyEvent | None, done: DoneCall
    ) -> None:
        if self.again is not None:
            self.again()
        self.now.offload(kv, parts, ready, done)
        self.again = lambda: self.now.offload(kv, parts, None, lambda error: None)


class WrapsPageNumbers(Broken):
    def offload(
        self, kv: PagedKV, parts: Sequence[CopyPart], ready: ReadyEvent | None, done: DoneCall
    ) -> None:
        wrapped = [CopyPart(part.group, part.slot, tuple(page % 40 for page in part.pages)) for part in parts]
        super().offload(kv, wrapped, ready, done)


class ChecksNothing(Broken):
    def check(self, kv: PagedKV, layout: Layout) -> None:
        pass


class MixesUpThreads(Broken):
    """The parts of two calls at once are taken for each other's."""

    def __init__(self, executor: ThreadExecutor) -> None:
        super().__init__(executor)
        self._meeting = Meeting()
        self._parts: Sequence[CopyPart] = ()

    def offload(
        self, kv: PagedKV, parts: Sequence[CopyPart], ready: ReadyEvent | None, done: DoneCall
    ) -> None:
        self._parts = parts
        self._meeting.wait()
        super().offload(kv, self._parts, ready, done)


class LeavesAThread(Broken):
    def __init__(self, executor: ThreadExecutor) -> None:
        super().__init__(executor)
        threading.Thread(target=threading.Event().wait, args=(30.0,), daemon=True).start()


CAUGHT_BY = [
    (PageByPage, "test_offload_gathers_layer_by_layer"),
    (WritesBackWhatItRead, "test_offload_gathers_layer_by_layer"),
    (IgnoresSkip, "test_onboard_writes_its_pages_and_no_others"),
    (ForgetsAnEmptyBatch, "test_a_batch_of_nothing"),
    (HasRoomForThirtyTwo, "test_d12_more_parts_than_any_staging_holds"),
    (DoesNotWait, "test_d12_offload_waits_for_the_engine"),
    (WaitsInTheCall, "test_d12_offload_waits_for_the_engine"),
    (OnboardsAtOnce, "test_d12_onboard_waits_for_the_engine"),
    (SaysDoneTooSoon, "test_bytes_are_there_when_done_is_called"),
    (TellsLayersTooSoon, "test_layers_arrive_in_order_and_are_told"),
    (TellsTheLastLayerFirst, "test_layers_arrive_in_order_and_are_told"),
    (DoneTwice, "test_d11_d13_done_once_and_hands_off_afterwards"),
    (CopiesOnceMore, "test_d11_d13_done_once_and_hands_off_afterwards"),
    (WrapsPageNumbers, "test_d13_a_page_that_does_not_exist_is_an_error_and_no_more"),
    (ChecksNothing, "test_check_knows_what_was_declared"),
    (MixesUpThreads, "test_d11_many_threads"),
    (LeavesAThread, "test_close_leaves_no_thread"),
]


@pytest.mark.usefixtures("leaks_on_purpose")
@pytest.mark.parametrize(("mutant", "test"), CAUGHT_BY, ids=[each.__name__ for each, _ in CAUGHT_BY])
def test_the_contract_catches(mutant: type[HostCopier], test: str, tmp_path: Path) -> None:
    contract = type("Contract", (OnThreads,), {"copier_class": mutant, "patience_s": 1.0})
    assert_catches(contract, test, tmp_path, "copier")


def test_every_test_of_the_contract_has_a_mutant() -> None:
    tests = {name for name in dir(CopierContract) if name.startswith("test_")}
    assert tests == {test for _, test in CAUGHT_BY}
