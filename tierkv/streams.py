"""What a copier asks of a device: streams that run in order, events between them, copies. A GPU, or what stands for
one.

A *stream* does what it is given in order; streams run beside each other in any order, unless one waits for another's
event. Nothing here blocks the caller. ``tierkv.cuda`` is the GPU; ``tierkv.testing.manual`` is a device on the CPU
whose streams and events move only when a test says so, and as badly as CUDA may.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Protocol

from tierkv.copier import PagedKV, ReadyEvent

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from tierkv.page_runs import Longs

Fired = Callable[[str | None], None]
"""Called with ``None``, or with what went wrong on the device."""


class Lane(enum.Enum):
    """The streams of one device: two for each direction, so that one piece is gathered while another is on the
    bus."""

    PACK = "pack"
    """Kernels that gather pages for an offload."""
    DOWN = "down"
    """Copies from the device to the host."""
    UP = "up"
    """Copies from the host to the device."""
    UNPACK = "unpack"
    """Kernels that scatter into pages for an onboard."""


class Route(enum.Enum):
    """How bytes get between scattered pages and a slot."""

    DMA = "dma"
    """The copy engines take each run: nothing for the SMs to do. For runs that are long enough."""
    STAGED = "staged"
    """A kernel between the pages and a staging buffer on the device, the copy engines between that and the slot."""
    KERNEL = "kernel"
    """One kernel between the pages and the slot, over the bus: fewest steps, but the SMs wait for the bus."""


class Event(Protocol):
    """A point in a stream. Fires when everything that was given to the stream before it is over."""

    def synchronize(self) -> None:
        """Blocks until it has fired."""
        ...


class Device(Protocol):
    """Thread-safe. Addresses are plain numbers; ``dst``, ``src`` and ``size`` are int64 arrays of equal length.

    Calls only hand work in, in the order of the calls; they raise ``RuntimeError`` when the device is lost.
    """

    def check_memory(self, kv: PagedKV) -> None:
        """Raises ``LayoutError`` for arrays that are not on this device."""
        ...

    def staging(self, size_bytes: int, *, on_host: bool) -> int:
        """The address of fresh memory on the device, or of pinned memory on the host that the device reaches. It
        lives as long as this object."""
        ...

    def reaches(self, address: Longs, size: Longs) -> NDArray[np.bool_]:
        """For each stretch: whether the host's memory there is pinned, or on the device, so that copies run by
        themselves."""
        ...

    def record(self, lane: Lane) -> Event:
        """An event behind everything that the lane was given so far."""
        ...

    def wait(self, lane: Lane, event: Event) -> None:
        """What the lane is given from now on begins after ``event``."""
        ...

    def knows(self, ready: ReadyEvent) -> bool:
        """True for an event of this device, for which a lane can wait; for any other a thread has to."""
        ...

    def wait_for_engine(self, lane: Lane, ready: ReadyEvent) -> None:
        """The same as ``wait`` for an engine's own event that the device knows."""
        ...

    def engine_waits(self, stream: Any, event: Event) -> None:
        """What the engine gives to its ``stream`` from now on begins after ``event``."""
        ...

    def dma(self, lane: Lane, dst: Longs, src: Longs, size: Longs) -> None:
        """Copies by the copy engines."""
        ...

    def kernel(self, lane: Lane, dst: Longs, src: Longs, size: Longs) -> None:
        """Copies by a kernel. Both sides are on the device or pinned."""
        ...

    def call_when(self, event: Event, fired: Fired) -> None:
        """Calls ``fired`` on a thread of the device's choice some time after ``event`` has."""
        ...

    def call_when_ready(self, ready: ReadyEvent, fired: Fired) -> None:
        """The same for an event that has no more than ``synchronize``: a thread of the device's waits for it."""
        ...

    def drained(self, lanes: Sequence[Lane]) -> ReadyEvent:
        """Something whose ``synchronize`` blocks until these lanes are through with all that they were given, and
        raises when the device is lost: for when no event can be recorded, so it must not need one."""
        ...

    def copy_on_host(self, dst: Longs, src: Longs, size: Longs, copied: Fired) -> None:
        """Copies within the host's memory on a thread of the device's, then calls ``copied``."""
        ...
