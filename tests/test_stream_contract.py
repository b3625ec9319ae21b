"""The copier over streams passes the copier contract on a device that misbehaves as CUDA may, each route of it."""

from collections.abc import Callable
from typing import Any

import pytest

from tierkv.copier import Copier, ReadyEvent
from tierkv.routes import RouteTable
from tierkv.streams import Route
from tierkv.testing.copier import CopierContract
from tierkv.testing.manual import ManualCopier, ManualDevice, ManualEvent


def table(route: Route) -> RouteTable:
    return RouteTable(((0, route),), ((0, route),))


class OverStreams(CopierContract):
    route = Route.STAGED
    pinned: Callable[[int], bool] = staticmethod(lambda address: True)
    staging_bytes = 1024
    seed = 1

    def make_copier(self) -> Copier:
        return ManualCopier(
            device=ManualDevice(self.seed, pinned=self.pinned),
            routes=table(self.route),
            staging_bytes=self.staging_bytes,
            buffers=2,
        )

    def close_copier(self, copier: Any) -> None:
        assert copier.close()


class TestStaged(OverStreams):
    """Blocks larger than both staging buffers together."""


class TestByCopyEngines(OverStreams):
    route = Route.DMA


class TestByKernel(OverStreams):
    route = Route.KERNEL


class TestSlotsThatAreNotPinned(OverStreams):
    pinned = staticmethod(lambda address: False)


class TestSlotsOfBothKinds(OverStreams):
    route = Route.DMA
    pinned = staticmethod(lambda address: bool(address >> 12 & 1))
    seed = 2


class TestWithTheDevicesOwnEvent(OverStreams):
    """The engine's event is one that a stream can wait for, so no thread does."""

    def make_copier(self) -> Copier:
        self.made = super().make_copier()
        return self.made

    def make_gate(self) -> tuple[ReadyEvent, Callable[[], None]]:
        device = self.made.device
        event = ManualEvent(device)

        def fire() -> None:
            event.reach()
            device.handed_in.set()

        return event, fire


@pytest.mark.parametrize(("wrong"), [{"buffers": 0}, {"staging_bytes": 0}, {"offload_share": 1.0}])
def test_impossible_options_are_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=next(iter(wrong))):
        ManualCopier(**wrong)
