"""One offload or onboard on its way through a device's streams, in pieces; and the staging buffers that pieces
use."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from tierkv.copier import ENGINE_ERRORS, ReadyEvent
from tierkv.streams import Device, Event, Route
from tierkv.supervision import Caught

if TYPE_CHECKING:
    from tierkv.page_runs import Runs

LayerCall = Callable[[int, int], None]
Done = Callable[[str | None], None]

CANCELLED = "cancelled"
"""What ``done`` is told of a job that was cancelled."""


@dataclass(eq=False)
class Piece:
    """What is handed to the device at once: at most a staging buffer full."""

    runs: Runs
    bytes: int
    route: Route
    bounces: bool
    """The slot is not pinned: the bytes pass through a pinned buffer, and a thread copies between that and the
    slot."""
    layer: int = 0
    """An onboard's: the number of its layer among those of the job."""
    bounce: int | None = None
    """The pinned buffer while the piece has one."""


@dataclass(eq=False)
class Layer:
    """One layer of an onboard."""

    group: int
    number: int
    left: int = 1
    """Pieces that have not arrived; one while nobody knows how many there will be."""
    unsent: int = 1
    """Pieces that were not handed to the device yet, likewise."""
    events: list[Event] = field(default_factory=list)


class CopyJob:
    """A call that is under way. Its state belongs to the copier's lock; the verbs here are for the engine."""

    def __init__(
        self,
        copier_lock: threading.RLock,
        device: Device,
        planned: Iterator[list[Piece]],
        done: Done,
        on_cancel: Callable[[CopyJob], None],
        memory: tuple[object, ...],
        *,
        ready: ReadyEvent | None = None,
        layers: list[Layer] | None = None,
        on_layer: LayerCall | None = None,
    ) -> None:
        self._sent = threading.Condition(copier_lock)
        self._device = device
        self.pieces: deque[Piece] = deque()
        self._planned = planned
        """What comes after them, planned when it is asked for: the first piece need not wait for all the others."""
        self.done = done
        self._on_cancel = on_cancel
        self.memory = memory
        """Keeps the engine's arrays and the slots' views alive until ``done``: pieces know no more than addresses."""
        self.ready = ready
        self.layers = layers or []
        self.on_layer = on_layer
        self.waited_for: set[Any] = set()
        """Lanes that wait for the engine's event already."""
        self.in_flight = 0
        self.told = 0
        """Layers that the engine was told of."""
        self.error: str | None = None
        self.held_pages: list[Event] = []
        """Events after which the device no longer touches the engine's pages for what was handed in."""
        self.unmarked: list[ReadyEvent] = []
        """The same for what was handed in when no event could be recorded behind it: it has to be waited for."""
        self.over = False
        self.telling = threading.Lock()
        """Held while the engine is told of layers, so that they come in their order. Taken before the copier's
        lock."""

    def cancel(self) -> None:
        """What was not handed to the device yet stays undone; ``done`` comes when the rest is over. Any thread."""
        with self._sent:
            self.stop(CANCELLED)
        self._on_cancel(self)

    def preempt(self, stream: Any) -> None:
        """Cancels, and makes what the engine gives to ``stream`` from now on wait until nothing of this job touches
        its pages any more: then they may be written at once, without waiting for ``done``. Blocks only where the device
        could not record an event behind what it was given."""
        with self._sent:
            self.stop(CANCELLED)
            for event in self.held_pages:
                self._device.engine_waits(stream, event)
            unmarked = [*self.unmarked]
        caught = Caught(in_generator=False)
        for ready in unmarked:
            with caught:  # a device that is lost does nothing any more
                ready.synchronize()
        self._on_cancel(self)

    def before_layer(self, stream: Any, group: int, number: int, timeout_s: float) -> bool:
        """Makes what the engine gives to ``stream`` from now on wait for one layer, and returns: the device waits,
        not the caller. False when the layer will not come, or was not handed to the device within ``timeout_s``."""
        [layer] = [one for one in self.layers if (one.group, one.number) == (group, number)]
        with self._sent:
            self._sent.wait_for(lambda: not layer.unsent or self.error is not None or self.over, timeout_s)
            if layer.unsent or self.error is not None:
                return False
            for event in layer.events:
                self._device.engine_waits(stream, event)
            return True

    # -- for the copier, under its lock

    def waits(self) -> bool:
        """Whether a piece is to be handed in yet: then it is in ``pieces``."""
        while not self.pieces:
            try:
                self.pieces += next(self._planned)
            except StopIteration:
                return False
            except ENGINE_ERRORS as error:
                self.stop(f"what to copy could not be worked out: {error!r}")
                return False
            self._sent.notify_all()  # of a layer that has no pieces all are handed in
        return True

    def stop(self, error: str) -> None:
        """The first thing that goes wrong ends the job."""
        self.error = self.error or error
        self.pieces.clear()
        self._planned = iter(())
        self._sent.notify_all()

    def sent(self, piece: Piece, page_event: Event, event: Event) -> None:
        """A piece was handed to the device."""
        self.held_pages.append(page_event)
        if self.layers:
            layer = self.layers[piece.layer]
            layer.unsent -= 1
            layer.events.append(event)
            if not layer.unsent:
                self._sent.notify_all()

    def arrived(self, piece: Piece) -> None:
        """A piece's bytes are where they should be."""
        if self.layers:
            self.layers[piece.layer].left -= 1

    def news(self) -> list[tuple[int, int]]:
        """Layers that have arrived whole since the last call, in their order; nothing of a job that went wrong."""
        first = self.told
        if self.error is None:
            while self.told < len(self.layers) and not self.layers[self.told].left:
                self.told += 1
        return [(layer.group, layer.number) for layer in self.layers[first : self.told]]

    def finished(self) -> bool:
        """True once, when nothing is left to do and nothing of it runs any more."""
        if self.over or self.in_flight or self.waits():
            return False
        self.over = True
        self._sent.notify_all()
        return True


def call_all(calls: Sequence[Callable[[], None]]) -> None:
    """In their order, and all of them: what one raises is raised when the others have been called."""
    with ExitStack() as stack:
        for call in reversed(calls):
            stack.callback(call)


class Ring:
    """Staging buffers on the device, used in turn; each with the event after which it is free."""

    def __init__(self, buffers: list[int]) -> None:
        self._buffers = buffers
        self._free_after: list[Event | None] = [None] * len(buffers)
        self._next = 0

    def take(self) -> tuple[int, Event | None]:
        """(the address of the next buffer, the event that its new user must wait for)."""
        return self._buffers[self._next], self._free_after[self._next]

    def used(self, free_after: Event) -> None:
        """The buffer that was taken last is in use until then."""
        self._free_after[self._next] = free_after
        self._next = (self._next + 1) % len(self._buffers)


class Bounces:
    """Pinned buffers on the host for slots that are not pinned, made when they are first needed, ``most`` of them. A
    buffer belongs to a piece until that gives it back."""

    def __init__(self, make: Callable[[], int], most: int) -> None:
        self._make = make
        self._most = most
        self._made = 0
        self._free: list[int] = []

    def take(self) -> int | None:
        """``None`` while all are in use. Raises one of ``ENGINE_ERRORS`` where there is no memory even for one; a few
        are enough to go on with."""
        if not self._free and self._made < self._most:
            try:
                self._free.append(self._make())
            except ENGINE_ERRORS:
                if not self._made:
                    raise
                self._most = self._made
            else:
                self._made += 1
        return self._free.pop() if self._free else None

    def give_back(self, buffer: int) -> None:
        self._free.append(buffer)
