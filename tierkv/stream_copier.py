"""A copier over a device's streams: everything that must be in order, and nothing that knows what the device is.

An offload waits for the engine's event on the device, packs scattered pages into a staging buffer and has the copy
engines carry that into the slot; an onboard goes the other way, layer by layer with an event each. Both directions
run at the same time. Work is handed in by pieces of bounded size, a bounded number at a time, so that an onboard
that comes while a long offload is under way does not stand behind it; while onboards move, offloads get at most
their share.

What a piece must not do, and what keeps it from it:

| never | because |
|---|---|
| read pages before they are computed, write them while the engine may | the lanes wait for the engine's event |
| use a staging buffer before its last user is through | ``Ring``: the new user's lane waits for that one's event |
| touch a slot after ``done`` | ``done`` comes after the event of the job's last piece, also for a cancelled job |
| let the device write to memory that is not pinned | ``Bounces``: such slots get their bytes from a thread |
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from functools import partial

from tierkv.copier import ENGINE_ERRORS, CopyPart, PagedKV, ReadyEvent
from tierkv.layout import Layout
from tierkv.page_runs import Plan, Runs, check_declared
from tierkv.routes import DEFAULT_ROUTES, RouteTable
from tierkv.stream_jobs import Bounces, CopyJob, Done, Layer, LayerCall, Piece, Ring, call_all
from tierkv.streams import Device, Event, Lane, Route
from tierkv.supervision import Caught
from tierkv.units import MIB

STAGING_BYTES = 8 * MIB
BUFFERS = 4
"""Staging buffers of each direction."""

_CLOSED = "the copier is closed"

Calls = list[Callable[[], None]]
PlanUp = Callable[[PagedKV, Sequence[CopyPart]], tuple[list[Layer], Iterator[list[Piece]]]]


class StreamCopier:
    """A ``Copier`` for one device. Thread-safe; calls return at once.

    ``offload_share``: while onboards are on their way, offloads move at most this share of all bytes. Memory: twice
    ``buffers`` staging buffers on the device, and ``buffers`` of pinned host memory once a slot is met that is not
    pinned.
    """

    def __init__(
        self,
        device: Device,
        *,
        routes: RouteTable = DEFAULT_ROUTES,
        staging_bytes: int = STAGING_BYTES,
        buffers: int = BUFFERS,
        offload_share: float = 0.5,
    ) -> None:
        if buffers < 1 or staging_bytes < 1 or not 0 < offload_share < 1:
            raise ValueError(
                f"buffers = {buffers}, staging_bytes = {staging_bytes}, offload_share = {offload_share}: give at "
                "least one buffer of at least one byte, and a share between 0 and 1"
            )
        self._device = device
        self._routes = routes
        self._piece_bytes = staging_bytes
        self._buffers = buffers
        self._share = offload_share
        self._lock = threading.RLock()
        self._rings = {down: Ring(self._staging()) for down in (True, False)}
        self._bounces: Bounces | None = None
        self._queues: dict[bool, deque[CopyJob]] = {True: deque(), False: deque()}
        self._flying = {True: 0, False: 0}
        """Pieces with the device, by direction (True: offloads). Twice as many as there are buffers may be, so that the
        device need not wait for a thread of the host between them."""
        self._credit = 0.0
        """Bytes that offloads may still move beside the onboards."""
        self._still = threading.Condition(self._lock)
        self._closed = False

    # -- the protocol ---------------------------------------------------------------------------------------------

    def check(self, kv: PagedKV, layout: Layout) -> None:
        self._device.check_memory(kv)
        check_declared(kv, layout)

    def offload(self, kv: PagedKV, parts: Sequence[CopyPart], ready: ReadyEvent | None, done: Done) -> None:
        self.start_offload(kv, parts, ready, done)

    def onboard(
        self,
        kv: PagedKV,
        parts: Sequence[CopyPart],
        done: Done,
        on_layer: LayerCall | None = None,
        ready: ReadyEvent | None = None,
    ) -> None:
        plan = self._by_layers if on_layer is not None else self._all_layers
        self._start_up(plan, kv, parts, done, on_layer, ready)

    def start_offload(
        self, kv: PagedKV, parts: Sequence[CopyPart], ready: ReadyEvent | None, done: Done
    ) -> CopyJob | None:
        """``offload`` with a handle on what is under way; ``None`` when it could not begin, which ``done`` was
        told."""
        try:
            planned = iter([self._pieces(Plan(kv, parts, into_slots=True).whole(), down=True)])
        except ENGINE_ERRORS as error:
            done(f"offload: {error!r}")
            return None
        job = CopyJob(self._lock, self._device, planned, done, self._cancelled, (kv, *parts), ready=ready)
        self._enter_when_ready(job, down=True)
        return job

    def start_onboard(
        self,
        kv: PagedKV,
        parts: Sequence[CopyPart],
        done: Done,
        on_layer: LayerCall | None = None,
        ready: ReadyEvent | None = None,
    ) -> CopyJob | None:
        """``onboard`` with a handle, as ``start_offload``. ``CopyJob.before_layer`` lets a stream of the engine wait
        for a layer without a host's thread between."""
        return self._start_up(self._by_layers, kv, parts, done, on_layer, ready)

    def _start_up(
        self,
        plan: PlanUp,
        kv: PagedKV,
        parts: Sequence[CopyPart],
        done: Done,
        on_layer: LayerCall | None,
        ready: ReadyEvent | None,
    ) -> CopyJob | None:
        try:
            layers, planned = plan(kv, parts)
        except ENGINE_ERRORS as error:
            done(f"onboard: {error!r}")
            return None
        job = CopyJob(
            self._lock,
            self._device,
            planned,
            done,
            self._cancelled,
            (kv, *parts),
            ready=ready,
            layers=layers,
            on_layer=on_layer,
        )
        self._enter_when_ready(job, down=False)
        return job

    def close(self, timeout_s: float) -> bool:
        """Nothing more is handed in: what waits fails, what the device has is over when this returns True."""
        with self._lock:
            self._closed = True
            for job in (job for queue in self._queues.values() for job in queue):
                job.stop(_CLOSED)
        self._go_on()
        with self._still:
            return self._still.wait_for(lambda: not any(self._flying.values()), timeout_s)

    # -- plans ----------------------------------------------------------------------------------------------------

    def _by_layers(self, kv: PagedKV, parts: Sequence[CopyPart]) -> tuple[list[Layer], Iterator[list[Piece]]]:
        plan = Plan(kv, parts)
        layers = [Layer(group, number) for group, number in plan.names()]

        def planned() -> Iterator[list[Piece]]:
            for at, (_, _, runs) in enumerate(plan.layers()):
                mine = self._pieces(runs, down=False)
                for piece in mine:
                    piece.layer = at
                layers[at].left = layers[at].unsent = len(mine)
                yield mine

        return layers, planned()

    def _all_layers(
        self, kv: PagedKV, parts: Sequence[CopyPart]
    ) -> tuple[list[Layer], Iterator[list[Piece]]]:
        """For those who wait for the whole: fewer and fuller pieces than layer by layer."""
        return [], iter([self._pieces(Plan(kv, parts).whole(), down=False)])

    def _pieces(self, runs: Runs, *, down: bool) -> list[Piece]:
        """Pinned slots and others apart, each cut to the size of a staging buffer."""
        if not len(runs):
            return []
        reached = self._device.reaches(runs.slot, runs.size)
        found = []
        for bounces, chosen in ((False, reached), (True, ~reached)):
            if not chosen.any():
                continue
            mine = Runs(runs.page[chosen], runs.slot[chosen], runs.size[chosen])
            route = self._routes.route(down=down, run_bytes=mine.bytes // len(mine))
            found += [Piece(each, each.bytes, route, bounces) for each in mine.pieces(self._piece_bytes)]
        return found

    def _staging(self) -> list[int]:
        return [self._device.staging(self._piece_bytes, on_host=False) for _ in range(self._buffers)]

    # -- handing in -----------------------------------------------------------------------------------------------

    def _enter_when_ready(self, job: CopyJob, *, down: bool) -> None:
        if job.ready is None or self._device.knows(job.ready):
            self._enter(job, down=down)
        else:
            self._device.call_when_ready(job.ready, partial(self._engine_is_ready, job, down))

    def _engine_is_ready(self, job: CopyJob, down: bool, error: str | None) -> None:
        job.ready = None
        if error is not None:
            with self._lock:
                job.stop(f"the engine's event: {error}")
        self._enter(job, down=down)

    def _enter(self, job: CopyJob, *, down: bool) -> None:
        with self._lock:
            if self._closed:
                job.stop(_CLOSED)
            self._queues[down].append(job)
        self._go_on()

    def _go_on(self, calls: Sequence[Callable[[], None]] = ()) -> None:
        """Hands in what may go now, then tells whoever has to know, without the lock."""
        found: Calls = [*calls]
        with self._lock:
            for down in (False, True):
                self._hand_in(down, found)
        call_all(found)

    def _hand_in(self, down: bool, calls: Calls) -> None:
        queue = self._queues[down]
        while queue:
            job = queue[0]
            if not job.waits():
                queue.popleft()
                self._end_if_over(job, calls)
                continue
            piece = job.pieces[0]
            if self._flying[down] >= 2 * self._buffers or (down and not self._within_share(piece)):
                return
            if piece.bounces and not self._take_bounce(job, piece):
                if job.error is None:
                    return
                continue
            job.pieces.popleft()
            job.in_flight += 1
            self._flying[down] += 1
            self._count(piece, down)
            self._begin(job, piece, down)

    def _within_share(self, piece: Piece) -> bool:
        """Onboards go first: beside them offloads have what credit those have left."""
        return self._credit >= piece.bytes or not (self._flying[False] or self._queues[False])

    def _count(self, piece: Piece, down: bool) -> None:
        if down:
            self._credit = max(0.0, self._credit - piece.bytes)
        else:
            earned = piece.bytes * self._share / (1 - self._share)
            self._credit = min(self._credit + earned, 2.0 * self._piece_bytes)

    def _take_bounce(self, job: CopyJob, piece: Piece) -> bool:
        if self._bounces is None:
            make = partial(self._device.staging, self._piece_bytes, on_host=True)
            self._bounces = Bounces(make, self._buffers)
        try:
            piece.bounce = self._bounces.take()
        except ENGINE_ERRORS as error:
            job.stop(f"pinned memory: {error!r}")
        return piece.bounce is not None

    def _begin(self, job: CopyJob, piece: Piece, down: bool) -> None:
        if down or piece.bounce is None:
            self._send(job, piece, down)
        else:
            dst, runs = piece.bounce + piece.runs.offsets, piece.runs
            self._device.copy_on_host(dst, runs.slot, runs.size, partial(self._bounced_up, job, piece))

    def _bounced_up(self, job: CopyJob, piece: Piece, error: str | None) -> None:
        """The bytes of an onboard are in pinned memory."""
        with self._lock:
            if error is not None:
                job.stop(error)
            stopped = job.error is not None
            if not stopped:
                self._send(job, piece, down=False)
        if stopped:
            self._piece_over(job, piece, False, None)

    def _send(self, job: CopyJob, piece: Piece, down: bool) -> None:
        """Hands one piece to the device. An error there ends the job; what was handed in before it may still run, so
        the piece is over after an event behind that."""
        lanes = (Lane.PACK, Lane.DOWN) if down else (Lane.UP, Lane.UNPACK)
        try:
            page_event, event = (self._send_down if down else self._send_up)(job, piece)
        except ENGINE_ERRORS as error:
            job.stop(f"the device: {error!r}")
            behind = self._behind_all(lanes)
            if behind is None:
                job.unmarked.append(self._device.drained(lanes))
                self._device.call_when_ready(job.unmarked[-1], partial(self._piece_over, job, piece, down))
                return
            event = behind
            self._rings[down].used(event)
            job.held_pages.append(event)  # some of it may have been handed in
        else:
            job.sent(piece, page_event, event)
        self._device.call_when(event, partial(self._fired, job, piece, down))

    def _behind_all(self, lanes: tuple[Lane, Lane]) -> Event | None:
        try:
            self._device.wait(lanes[1], self._device.record(lanes[0]))
            return self._device.record(lanes[1])
        except ENGINE_ERRORS:
            return None

    def _send_down(self, job: CopyJob, piece: Piece) -> tuple[Event, Event]:
        """Returns the event after which the pages are free, and that after which the bytes are on the host."""
        runs, device = piece.runs, self._device
        slot = runs.slot if piece.bounce is None else piece.bounce + runs.offsets
        if piece.route is not Route.STAGED:
            lane = Lane.DOWN if piece.route is Route.DMA else Lane.PACK
            self._wait_ready(job, lane)
            copy = device.dma if piece.route is Route.DMA else device.kernel
            copy(lane, slot, runs.page, runs.size)
            event = device.record(lane)
            return event, event
        self._wait_ready(job, Lane.PACK)
        staged = self._take_staging(self._rings[True], Lane.PACK) + runs.offsets
        device.kernel(Lane.PACK, staged, runs.page, runs.size)
        packed = device.record(Lane.PACK)
        device.wait(Lane.DOWN, packed)
        long = Runs(staged, slot, runs.size).merged()
        device.dma(Lane.DOWN, long.slot, long.page, long.size)
        event = device.record(Lane.DOWN)
        self._rings[True].used(event)
        return packed, event

    def _send_up(self, job: CopyJob, piece: Piece) -> tuple[Event, Event]:
        runs, device = piece.runs, self._device
        slot = runs.slot if piece.bounce is None else piece.bounce + runs.offsets
        if piece.route is not Route.STAGED:
            lane = Lane.UP if piece.route is Route.DMA else Lane.UNPACK
            self._wait_ready(job, lane)
            copy = device.dma if piece.route is Route.DMA else device.kernel
            copy(lane, runs.page, slot, runs.size)
            event = device.record(lane)
            return event, event
        staged = self._take_staging(self._rings[False], Lane.UP) + runs.offsets
        long = Runs(staged, slot, runs.size).merged()
        device.dma(Lane.UP, long.page, long.slot, long.size)
        device.wait(Lane.UNPACK, device.record(Lane.UP))
        self._wait_ready(job, Lane.UNPACK)
        device.kernel(Lane.UNPACK, runs.page, staged, runs.size)
        event = device.record(Lane.UNPACK)
        self._rings[False].used(event)
        return event, event

    def _take_staging(self, ring: Ring, lane: Lane) -> int:
        """The next staging buffer; what the lane does from now on begins when its last user is through."""
        buffer, free_after = ring.take()
        if free_after is not None:
            self._device.wait(lane, free_after)
        return buffer

    def _wait_ready(self, job: CopyJob, lane: Lane) -> None:
        if job.ready is not None and lane not in job.waited_for:
            job.waited_for.add(lane)
            self._device.wait_for_engine(lane, job.ready)

    # -- what comes back ------------------------------------------------------------------------------------------

    def _fired(self, job: CopyJob, piece: Piece, down: bool, error: str | None) -> None:
        """The device is through with a piece."""
        if down and piece.bounce is not None and error is None:
            src, runs = piece.bounce + piece.runs.offsets, piece.runs
            over = partial(self._piece_over, job, piece, True)
            self._device.copy_on_host(runs.slot, src, runs.size, over)
        else:
            self._piece_over(job, piece, down, error)

    def _piece_over(self, job: CopyJob, piece: Piece, down: bool, error: str | None) -> None:
        """Nothing of the piece is read or written any more."""
        with self._lock:
            if piece.bounce is not None:
                assert self._bounces is not None
                self._bounces.give_back(piece.bounce)
                piece.bounce = None
            self._flying[down] -= 1
            self._still.notify_all()
            if error is not None:
                job.stop(error)
            job.arrived(piece)
        self._tell_layers(job)
        calls: Calls = []
        with self._lock:
            job.in_flight -= 1
            if job not in self._queues[down]:
                self._end_if_over(job, calls)
        self._go_on(calls)

    def _tell_layers(self, job: CopyJob) -> None:
        """``on_layer`` for what has arrived whole, by one thread at a time and before ``done``."""
        if job.on_layer is None:
            return
        with job.telling:
            with self._lock:
                news = job.news()
            caught = Caught(in_generator=False)
            for group, number in news:
                with caught:
                    job.on_layer(group, number)
                if caught.error is not None:
                    with self._lock:
                        job.stop(f"on_layer({group}, {number}): {caught.error!r}")
                    return

    def _cancelled(self, job: CopyJob) -> None:
        """A job that waits, for its turn or for the engine, is over at once."""
        calls: Calls = []
        with self._lock:
            for queue in self._queues.values():
                if job in queue:
                    queue.remove(job)
            self._end_if_over(job, calls)
        call_all(calls)

    def _end_if_over(self, job: CopyJob, calls: Calls) -> None:
        if job.finished():
            calls.append(partial(self._conclude, job))

    def _conclude(self, job: CopyJob) -> None:
        self._tell_layers(job)
        job.memory = ()
        job.done(job.error)
