"""A device on the CPU whose streams and events move only when somebody says so: as badly as CUDA may behave.

``ManualDevice`` is given the same work as a GPU. Each ``step`` does one small thing that CUDA might do next: a few
bytes of the copy at the head of some stream, in any order within the copy; an event reached; a host's callback made,
as late as can be. Which one, the seed says. So whatever order a GPU may bring about can happen here, again and again.

    device = ManualDevice(seed=7)
    copier = StreamCopier(device, staging_bytes=64, buffers=2)     # or ManualCopier(seed=7, ...)
    copier.offload(kv, parts, device.engine_event("compute"), done)
    while device.step(): ...                                       # one interleaving of many

``ManualCopier`` has a thread that takes the steps, for tests that wait; ``tierkv.testing.manual_life`` has none.
"""

from __future__ import annotations

import ctypes
import mmap
import random
import threading
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from tierkv.copier import PagedKV, ReadyEvent
from tierkv.errors import LayoutError
from tierkv.stream_copier import StreamCopier
from tierkv.streams import Fired, Lane
from tierkv.supervision import Caught

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from tierkv.page_runs import Longs

Move = tuple[int, int, int]
"""Address to, address from, bytes."""


class ManualEvent:
    """A point in a stream of a ``ManualDevice``."""

    def __init__(self, device: ManualDevice) -> None:
        self.device = device
        self.reached = False
        self._wake: threading.Event | None = None

    def reach(self) -> None:
        self.reached = True
        if self._wake is not None:
            self._wake.set()

    def synchronize(self) -> None:
        wake = self._wake = self._wake or threading.Event()
        if not self.reached and not wake.wait(60):
            raise RuntimeError("the event did not fire within a minute")


class _Copy:
    """Copies on their way: so many bytes of one of them at a time, the copies in any order."""

    def __init__(self, moves: list[Move]) -> None:
        self.moves = moves

    def some(self, dice: random.Random) -> None:
        at = int(dice.random() * len(self.moves))
        to, source, size = self.moves.pop(at)
        now = size if size < 2 or dice.random() < 0.6 else dice.randint(1, size - 1)
        ctypes.memmove(to, source, now)
        if now < size:
            self.moves.append((to + now, source + now, size - now))


Work = _Copy | ManualEvent | Callable[[], None]


class ManualDevice:
    """A ``Device`` of the CPU's memory. One thread takes the steps; any may hand in work.

    ``pinned`` says of an address whether the host's memory there counts as pinned (default: all of it).
    """

    def __init__(self, seed: int = 0, *, pinned: Callable[[int], bool] = lambda address: True) -> None:
        self.dice = random.Random(seed)
        self._pinned = pinned
        self._lock = threading.RLock()
        self._streams: dict[Any, deque[tuple[str, Any]]] = {lane: deque() for lane in Lane}
        self._watched: list[tuple[ManualEvent, Fired]] = []
        self._host_work: list[Callable[[], None]] = []
        self._memory: list[mmap.mmap] = []
        self._waiters: list[threading.Thread] = []
        self.handed_in = threading.Event()
        """Set whenever there may be something to do."""

    # -- Device ---------------------------------------------------------------------------------------------------

    def check_memory(self, kv: PagedKV) -> None:
        for array in (array for group in kv.groups for layer in group for array in layer.arrays):
            if not isinstance(array, np.ndarray):
                raise LayoutError(f"{type(array).__name__}: a ManualDevice takes numpy arrays")

    def staging(self, size_bytes: int, *, on_host: bool) -> int:
        memory = mmap.mmap(-1, size_bytes)
        self._memory.append(memory)
        return int(np.frombuffer(memory, np.uint8).ctypes.data)

    def reaches(self, address: Longs, size: Longs) -> NDArray[np.bool_]:
        return np.fromiter(map(self._pinned, address.tolist()), np.bool_, len(address))

    def record(self, lane: Lane) -> ManualEvent:
        return self.engine_event(lane)

    def wait(self, lane: Lane, event: Any) -> None:
        self._put(lane, ("wait", event))

    def knows(self, ready: ReadyEvent) -> bool:
        return isinstance(ready, ManualEvent) and ready.device is self

    def wait_for_engine(self, lane: Lane, ready: ReadyEvent) -> None:
        self._put(lane, ("wait", ready))

    def engine_waits(self, stream: Any, event: Any) -> None:
        self._put(stream, ("wait", event))

    def dma(self, lane: Lane, dst: Longs, src: Longs, size: Longs) -> None:
        self._copy(lane, dst, src, size)

    def kernel(self, lane: Lane, dst: Longs, src: Longs, size: Longs) -> None:
        self._copy(lane, dst, src, size)

    def call_when(self, event: Any, fired: Fired) -> None:
        with self._lock:
            self._watched.append((event, fired))
        self._tell()

    def call_when_ready(self, ready: ReadyEvent, fired: Fired) -> None:
        """An event that can only be waited for gets a thread that waits."""
        if isinstance(ready, ManualEvent) and ready.device is self:
            self.call_when(ready, fired)
            return

        def wait() -> None:
            caught = Caught(in_generator=False)
            with caught:
                ready.synchronize()
            self._later(partial(fired, None if caught.error is None else repr(caught.error)))

        thread = threading.Thread(target=wait, name="tierkv-manual-ready", daemon=True)
        self._waiters.append(thread)
        thread.start()

    def drained(self, lanes: Sequence[Lane]) -> ManualEvent:
        *others, last = lanes
        for lane in others:
            self._put(last, ("wait", self.engine_event(lane)))
        return self.engine_event(last)

    def copy_on_host(self, dst: Longs, src: Longs, size: Longs, copied: Fired) -> None:
        work = _Copy(list(zip(dst.tolist(), src.tolist(), size.tolist(), strict=True)))
        self._put(("host", id(work)), ("copy", work))
        self._put(("host", id(work)), ("call", partial(copied, None)))

    # -- the engine's own streams ---------------------------------------------------------------------------------

    def engine_event(self, stream: Any) -> ManualEvent:
        """An event behind all that a stream was given so far."""
        event = ManualEvent(self)
        self._put(stream, ("event", event))
        return event

    def engine_does(self, stream: Any, work: Callable[[], None]) -> None:
        """The engine's own work on one of its streams; done at one step."""
        self._put(stream, ("call", work))

    # -- what happens ---------------------------------------------------------------------------------------------

    def step(self) -> bool:
        """Does one thing that may happen now. False when there is none."""
        with self._lock:
            action = self._choose()
        if action is None:
            return False
        action()
        return True

    def idle(self) -> bool:
        """Nothing is under way."""
        with self._lock:
            return not self._watched and not self._host_work and not any(self._streams.values())

    def _choose(self) -> Callable[[], None] | None:
        heads = [stream for stream, work in self._streams.items() if work and _may_go(work[0])]
        calls = [at for at, (event, _) in enumerate(self._watched) if event.reached]
        total = len(heads) + len(calls) + len(self._host_work)
        if not total:
            return None
        pick = int(self.dice.random() * total)
        if pick < len(heads):
            return self._advance(heads[pick])
        pick -= len(heads)
        if pick < len(calls):
            _, fired = self._watched.pop(calls[pick])
            return partial(fired, None)
        return self._host_work.pop(pick - len(calls))

    def _advance(self, stream: Any) -> Callable[[], None]:
        work = self._streams[stream]
        kind, what = work[0]
        if kind == "copy" and what.moves:
            what.some(self.dice)
            if what.moves:
                return _nothing
        work.popleft()
        if not work and not isinstance(stream, Lane):
            del self._streams[stream]
        if kind == "event":
            what.reach()
        return what if kind == "call" else _nothing

    def _copy(self, lane: Lane, dst: Longs, src: Longs, size: Longs) -> None:
        moves = list(zip(dst.tolist(), src.tolist(), size.tolist(), strict=True))
        if moves:
            self._put(lane, ("copy", _Copy(moves)))

    def _put(self, stream: Any, work: tuple[str, Any]) -> None:
        with self._lock:
            self._streams.setdefault(stream, deque()).append(work)
        self._tell()

    def _later(self, call: Callable[[], None]) -> None:
        with self._lock:
            self._host_work.append(call)
        self._tell()

    def _tell(self) -> None:
        if not self.handed_in.is_set():
            self.handed_in.set()

    def join(self, timeout_s: float) -> None:
        """Waits for the threads that wait for engines."""
        for thread in self._waiters:
            thread.join(timeout_s)


def _may_go(work: tuple[str, Any]) -> bool:
    return work[0] != "wait" or work[1].reached


def _nothing() -> None:
    pass


class ManualCopier(StreamCopier):
    """A ``StreamCopier`` over a ``ManualDevice`` that a thread of its own moves, in an order that the seed
    chooses."""

    def __init__(self, seed: int = 0, *, device: ManualDevice | None = None, **options: Any) -> None:
        self.device = device or ManualDevice(seed)
        super().__init__(self.device, **options)
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._move, name="tierkv-manual", daemon=True)
        self._thread.start()

    def _move(self) -> None:
        while not self._closing.is_set():
            self.device.handed_in.clear()
            while self.device.step():
                pass
            self.device.handed_in.wait(1.0)

    def close(self, timeout_s: float = 10.0) -> bool:
        """Ends its threads; True when they have ended."""
        self._closing.set()
        self.device.handed_in.set()
        self._thread.join(timeout_s)
        self.device.join(timeout_s)
        return not self._thread.is_alive()
