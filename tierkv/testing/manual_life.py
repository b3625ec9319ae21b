"""Copies under a seeded adversary: an engine computes, offloads, onboards, aborts and preempts while a
``ManualDevice`` lets everything happen in the worst order that CUDA allows.

    python -m tierkv.testing.manual_life --seed 17
    python -m tierkv.testing.manual_life --seeds 0:100000

One seed is one life: one interleaving. In each, every byte is compared: a slot when its offload is done, a layer
when the engine is told of it, pages when an engine's stream has passed a layer's event, and in the end all that
nobody owned.
"""

from __future__ import annotations

import argparse
import random
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tierkv.copier import CopyPart, LayerPages, PagedKV
from tierkv.routes import RouteTable
from tierkv.stream_copier import StreamCopier
from tierkv.stream_jobs import CANCELLED, CopyJob
from tierkv.streams import Route
from tierkv.testing.manual import ManualDevice, ManualEvent
from tierkv.testing.payloads import POISON

Bytes = NDArray[np.uint8]
MakeCopier = Callable[..., StreamCopier]

PAGES = 10
GUARD_BYTES = 8
STREAMS = ("prefill", "decode")
SHAPES: tuple[tuple[tuple[tuple[int, ...], ...], int], ...] = (
    (((PAGES, 12),), 0),
    (((2, PAGES, 7),), 1),
    (((PAGES, 2, 9), (PAGES, 5)), 0),
    (((3, PAGES, 2, 4),), 1),
)
"""Arrays of a layer, and the dimension that counts pages."""


@dataclass(eq=False)
class Move:
    """An offload or onboard of one part, and what its bytes should be."""

    down: bool
    group: int
    slot: int
    pages: tuple[int, ...]
    payload: Bytes
    skip: int
    calls: list[str | None] = field(default_factory=list)
    job: CopyJob | None = None
    settled: bool = False
    """The engine has its pages back."""


class Life:
    """One engine with one copier. ``live`` lives it; ``AssertionError`` says what went wrong."""

    def __init__(self, seed: int, make: MakeCopier = StreamCopier) -> None:
        self.dice = dice = random.Random(seed)
        self.layers, self.shapes, self.count = [], [], []
        for _ in range(dice.choice((1, 1, 2))):
            self.layers.append(dice.randint(1, 3))
            self.shapes.append(dice.choice(SHAPES))
            self.count.append(dice.randint(1, 3))
        self.kv = PagedKV(tuple(map(self._memory, self.layers, self.shapes)))
        self._by_page = [
            [[np.moveaxis(array, layer.axis, 0) for array in layer.arrays] for layer in group]
            for group in self.kv.groups
        ]
        self.page_bytes = [sum(_page_bytes(array, axis) for array in arrays) for arrays, axis in self.shapes]
        self.slot_bytes = max(map(self._payload_bytes, range(len(self.layers))))
        self._room = np.full((5, self.slot_bytes + GUARD_BYTES), POISON, np.uint8)
        self._arena = memoryview(self._room).cast("B")
        first = int(self._room.ctypes.data)
        pinned = [dice.random() < 0.7 for _ in self._room]
        stride = self._room.strides[0]
        self.device = ManualDevice(seed, pinned=lambda address: pinned[(address - first) // stride])
        self.copier = make(
            self.device,
            routes=RouteTable(((0, dice.choice([*Route])),), ((0, dice.choice([*Route])),)),
            staging_bytes=dice.choice((16, 40, 150)),
            buffers=dice.randint(1, 3),
            offload_share=dice.choice((0.1, 0.5, 0.9)),
        )
        self.free_slots = list(range(len(self._room)))
        self.free_pages = [set(range(PAGES)) for _ in self.layers]
        self.expected: dict[tuple[int, int, int], Bytes | None] = {}
        """(group, layer, page) → what the engine's page must hold; ``None``: anything."""
        self.moves: list[Move] = []
        self.wrong: list[str] = []
        self.seen = dict.fromkeys(
            ("offloads", "onboards", "whole", "cancelled", "preempted", "layers", "passed"), 0
        )

    # -- what happens ---------------------------------------------------------------------------------------------

    def live(self) -> dict[str, int]:
        for _ in range(self.dice.randint(2, 6)):
            self._act()
            for _ in range(self.dice.choice((0, 3, 12, 40))):
                self.device.step()
                self._check()
        while self.device.step():
            self._check()
        self._finish()
        return self.seen

    def _act(self) -> None:
        running = [
            move for move in self.moves if not move.calls and not move.settled and move.job is not None
        ]
        what = self.dice.random()
        if running and what < 0.15:
            self._cancel(self.dice.choice(running))
        elif running and what < 0.3:
            self._preempt(self.dice.choice(running))
        elif what < 0.65:
            self._offload()
        else:
            self._onboard()

    def _offload(self) -> None:
        move = self._begin(down=True)
        if move is None:
            return
        stream = self.dice.choice(STREAMS)
        self._write_pages(move, POISON)
        self.device.engine_does(stream, partial(self._write_pages, move, None))
        ready = self.device.engine_event(stream)
        move.job = self.copier.start_offload(self.kv, [self._part(move)], ready, partial(self._done, move))
        self.seen["offloads"] += 1

    def _onboard(self) -> None:
        move = self._begin(down=False)
        if move is None:
            return
        self._slot(move)[: len(move.payload)] = move.payload
        self._write_pages(move, POISON)
        ready = self._engine_still_writes(move) if self.dice.random() < 0.5 else None
        done = partial(self._done, move)
        if self.dice.random() < 0.3:  # nobody asks for layers
            self.copier.onboard(self.kv, [self._part(move)], done, ready=ready)
            self.seen["whole"] += 1
            return
        told = partial(self._layer_came, move)
        move.job = self.copier.start_onboard(self.kv, [self._part(move)], done, told, ready)
        self.seen["onboards"] += 1
        for layer in range(self.layers[move.group]):
            stream = self.dice.choice(STREAMS)
            if move.job is not None and move.job.before_layer(stream, move.group, layer, 0.0):
                self.device.engine_does(stream, partial(self._layer_passed, move, layer))

    def _engine_still_writes(self, move: Move) -> ManualEvent:
        """A forward pass that was under way when its request ended writes to the pages once more."""
        stream = self.dice.choice(STREAMS)
        self.device.engine_does(stream, partial(self._write_pages, move, POISON ^ 0xFF))
        return self.device.engine_event(stream)

    def _begin(self, *, down: bool) -> Move | None:
        group = self.dice.randrange(len(self.layers))
        count = self.count[group]
        if not self.free_slots or len(self.free_pages[group]) < count:
            return None
        slot = self.free_slots.pop(self.dice.randrange(len(self.free_slots)))
        pages = tuple(self.dice.sample(sorted(self.free_pages[group]), count))
        self.free_pages[group] -= set(pages)
        payload = np.frombuffer(self.dice.randbytes(self._payload_bytes(group)), np.uint8)
        skip = 0 if down else self.dice.choice((0, 0, min(1, count - 1)))
        move = Move(down, group, slot, pages, payload, skip)
        self.moves.append(move)
        return move

    def _cancel(self, move: Move) -> None:
        assert move.job is not None
        self.seen["cancelled"] += 1
        move.job.cancel()

    def _preempt(self, move: Move) -> None:
        """The engine takes the pages for something else, in its own stream, while the job is under way."""
        assert move.job is not None
        self.seen["preempted"] += 1
        stream = self.dice.choice(STREAMS)
        move.settled = True
        move.job.preempt(stream)
        other = np.frombuffer(self.dice.randbytes(len(move.payload)), np.uint8)
        self.device.engine_does(stream, partial(self._taken_over, move, other))

    # -- what is checked ------------------------------------------------------------------------------------------

    def _done(self, move: Move, error: str | None) -> None:
        move.calls.append(error)
        slot = self._slot(move)
        size = len(move.payload)
        if error is None and not (slot[:size] == move.payload).all():
            self.wrong.append(f"done, and slot {move.slot} is not what the engine computed")
        if error is None and not move.down and not move.settled and not self._pages_hold(move):
            self.wrong.append("done, and the pages are not what the slot held")
        if error not in (None, CANCELLED):
            self.wrong.append(f"failed: {error}")
        slot[:] = POISON  # somebody else's from now on
        self.free_slots.append(move.slot)
        if not move.settled:
            move.settled = True
            self._give_pages_back(move, move.payload if error is None else None)

    def _layer_came(self, move: Move, group: int, layer: int) -> None:
        self.seen["layers"] += 1
        if move.calls:
            self.wrong.append(f"layer {layer} was told after done")
        if not move.settled and not self._pages_hold(move, [layer]):
            self.wrong.append(f"layer {layer} of group {group} was told before it had arrived")

    def _layer_passed(self, move: Move, layer: int) -> None:
        """An engine's stream is behind the layer's event."""
        self.seen["passed"] += 1
        if not move.settled and not move.calls and not self._pages_hold(move, [layer]):
            self.wrong.append(f"a stream went on before layer {layer} had arrived")

    def _taken_over(self, move: Move, content: Bytes) -> None:
        self._write_bytes(move, content)
        self._give_pages_back(move, content)

    def _check(self) -> None:
        assert not self.wrong, "; ".join(self.wrong)

    def _finish(self) -> None:
        self._check()
        assert self.device.idle(), "work is left that can never go on"
        for move in self.moves:
            assert len(move.calls) == 1, f"done was called {len(move.calls)} times"
        assert (self._room == POISON).all(), "bytes were written to a slot after its job, or beside it"
        for (group, layer, page), content in self.expected.items():
            found = b"".join(place.tobytes() for place in self._places(group, layer, page))
            assert content is None or found == content.tobytes(), (
                f"page {page} of layer {layer} was written later"
            )

    # -- bytes ----------------------------------------------------------------------------------------------------

    def _memory(self, layers: int, shape: tuple[tuple[tuple[int, ...], ...], int]) -> tuple[LayerPages, ...]:
        arrays, axis = shape
        return tuple(
            LayerPages(tuple(np.full(each, POISON, np.uint8) for each in arrays), axis) for _ in range(layers)
        )

    def _payload_bytes(self, group: int) -> int:
        return self.layers[group] * self.count[group] * self.page_bytes[group]

    def _slot(self, move: Move) -> Bytes:
        return self._room[move.slot, : self.slot_bytes]

    def _part(self, move: Move) -> CopyPart:
        first = move.slot * self._room.strides[0]
        return CopyPart(move.group, self._arena[first : first + self.slot_bytes], move.pages, move.skip)

    def _places(self, group: int, layer: int, page: int) -> list[Bytes]:
        """The page's memory, told independently of the copier."""
        return [array[page] for array in self._by_page[group][layer]]

    def _chunks(self, move: Move, content: Bytes, layers: Sequence[int] | None = None) -> Iterable[Any]:
        """(layer, page, its place in memory, its bytes in ``content``) of all pages that the job moves."""
        size, count = self.page_bytes[move.group], self.count[move.group]
        for layer in range(self.layers[move.group]) if layers is None else layers:
            for number in range(move.skip, count):
                at = (layer * count + number) * size
                for place in self._places(move.group, layer, move.pages[number]):
                    yield layer, number, place, content[at : at + place.size].reshape(place.shape)
                    at += place.size

    def _pages_hold(self, move: Move, layers: Sequence[int] | None = None) -> bool:
        return all(
            (place == content).all() for _, _, place, content in self._chunks(move, move.payload, layers)
        )

    def _write_pages(self, move: Move, value: int | None) -> None:
        if move.settled:
            return  # the engine gave the request up before it came to compute it
        for _, _, place, content in self._chunks(move, move.payload):
            place[...] = content if value is None else value

    def _write_bytes(self, move: Move, content: Bytes) -> None:
        for _, _, place, chunk in self._chunks(move, content):
            place[...] = chunk

    def _give_pages_back(self, move: Move, content: Bytes | None) -> None:
        size, count = self.page_bytes[move.group], self.count[move.group]
        for layer in range(self.layers[move.group]):
            for number in range(move.skip, count):
                at = (layer * count + number) * size
                held = content[at : at + size] if content is not None else None
                self.expected[move.group, layer, move.pages[number]] = held
        self.free_pages[move.group] |= set(move.pages)


def _page_bytes(shape: tuple[int, ...], axis: int) -> int:
    return int(np.prod(shape)) // shape[axis]


def live(seed: int, make: MakeCopier = StreamCopier) -> dict[str, int]:
    """One life; what happened in it, by name. Raises ``AssertionError``."""
    return Life(seed, make).live()


def live_all(seeds: Iterable[int], *, every_s: float = 20.0) -> dict[str, int]:
    """All of them, with progress; the sums of what happened. Raises ``AssertionError`` with the seed."""
    total: dict[str, int] = {"lives": 0}
    begun_s = told_s = time.monotonic()
    for seed in seeds:
        try:
            happened = live(seed)
        except AssertionError as error:
            raise AssertionError(f"python -m tierkv.testing.manual_life --seed {seed}: {error}") from error
        for name, number in {"lives": 1, **happened}.items():
            total[name] = total.get(name, 0) + number
        now_s = time.monotonic()
        if now_s - told_s >= every_s:
            told_s = now_s
            print(f"{total['lives']} lives in {now_s - begun_s:.0f} s, the last one {seed}", flush=True)
    return total


def main(arguments: list[str] | None = None) -> int:
    """The command line. Returns its exit status."""
    parser = argparse.ArgumentParser(prog="python -m tierkv.testing.manual_life")
    which = parser.add_mutually_exclusive_group(required=True)
    which.add_argument("--seed", type=int, metavar="N")
    which.add_argument("--seeds", metavar="FIRST:END", help="those from FIRST to END - 1")
    given = parser.parse_args(arguments)
    first, _, end = (given.seeds or f"{given.seed}:{(given.seed or 0) + 1}").partition(":")
    try:
        total = live_all(range(int(first), int(end)))
    except AssertionError as error:
        print(f"FAILED {error}")
        return 1
    print(", ".join(f"{number} {name}" for name, number in total.items()))
    return 0


if __name__ == "__main__":
    sys.exit(main())
