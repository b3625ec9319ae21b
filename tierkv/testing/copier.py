"""The contract of a copier. Subclass ``CopierContract`` in your tests; see ``docs/testing.md``.

    class TestMyCopier(CopierContract):
        def make_copier(self): return MyCopier()
        def close_copier(self, copier): copier.close()
        def to_engine(self, array): return torch.from_numpy(array).cuda()      # where pages live elsewhere
        def from_engine(self, array): return array.cpu().numpy()

Pages and slots are filled by keys, everything that must not be touched is poisoned.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from tierkv.copier import Copier, CopyPart, LayerPages, PagedKV, ReadyEvent
from tierkv.errors import LayoutError
from tierkv.ids import BlockKey
from tierkv.layout import GroupKind, LayerGroup, Layout
from tierkv.testing.payloads import POISON, Guarded, is_poisoned, key_of, payload_of
from tierkv.testing.payloads import pages as whole_pages
from tierkv.testing.threads import returns, run_together

Array = NDArray[Any]
PAGES = 40


@dataclass(frozen=True)
class Shape:
    """How one layer of one group lies in the engine's memory."""

    arrays: tuple[tuple[int, ...], ...]
    """Shapes; the dimension that counts pages is written as -1."""
    dtype: str = "uint8"

    @property
    def axis(self) -> int:
        return self.arrays[0].index(-1)

    @property
    def page_bytes(self) -> int:
        return sum(abs(int(np.prod(shape))) for shape in self.arrays) * np.dtype(self.dtype).itemsize


@dataclass(frozen=True)
class Engine:
    """An engine's memory of one or two layer groups: layers, pages of each part, and the shape of a layer."""

    groups: tuple[tuple[int, int, Shape], ...]


ENGINES = {
    "one array": Engine(((3, 2, Shape(((-1, 2, 16, 8),), "float16")),)),
    "pages second": Engine(((3, 2, Shape(((2, -1, 16, 8),), "float16")),)),
    "keys and values apart": Engine(((2, 4, Shape(((-1, 16, 8), (-1, 16, 8)), "float32")),)),
    "apart and unequal": Engine(((2, 3, Shape(((-1, 16, 12), (-1, 16, 4)))),)),
    "one latent": Engine(((4, 1, Shape(((-1, 16, 36),), "float16")),)),
    "odd bytes": Engine(((3, 5, Shape(((-1, 101),))),)),
    "two groups": Engine(
        ((2, 4, Shape(((-1, 2, 16, 8),), "float16")), (3, 1, Shape(((2, -1, 7, 5),)))),
    ),
}


class Done:
    """A ``done`` that can be waited for, and knows how often it was called."""

    def __init__(self, look: Callable[[], None] = lambda: None) -> None:
        self._event = threading.Event()
        self._look = look
        self.calls: list[str | None] = []

    def __call__(self, error: str | None) -> None:
        self._look()
        self.calls.append(error)
        self._event.set()

    def wait(self, patience_s: float) -> str | None:
        assert self._event.wait(patience_s), f"done was not called within {patience_s} s"
        return self.calls[0]


class Gate:
    """A ``ReadyEvent`` that the test fires; a copier that waits for it in the call outlasts the test's patience."""

    def __init__(self, patience_s: float) -> None:
        self._event = threading.Event()
        self._patience_s = patience_s

    def synchronize(self) -> None:
        self._event.wait(10 * self._patience_s)

    def fire(self) -> None:
        self._event.set()


class CopierContract:
    """What the store relies on."""

    patience_s = 60.0

    # ---- what a subclass gives

    def make_copier(self) -> Copier:
        raise NotImplementedError("give the contract a copier: override make_copier")

    def close_copier(self, copier: Any) -> None:
        """Gives back what ``make_copier`` took, threads above all."""

    def to_engine(self, array: Array) -> Any:
        """The engine's own array with these bytes."""
        return array

    def from_engine(self, array: Any) -> Array:
        """What the engine's array holds now."""
        return np.array(array)

    def overwrite(self, array: Any, content: Array) -> None:
        """Writes ``content`` over the engine's array in place."""
        array[...] = self.to_engine(content)

    def make_gate(self) -> tuple[ReadyEvent, Callable[[], None]]:
        """An event that is not ready, and what makes it so."""
        gate = Gate(self.patience_s)
        return gate, gate.fire

    # ---- tools

    @contextmanager
    def running(self, copier: Copier) -> Iterator[Copier]:
        try:
            yield copier
        finally:
            self.close_copier(copier)

    @pytest.fixture
    def copier(self) -> Iterator[Copier]:
        with self.running(self.make_copier()) as copier:
            yield copier

    def memory(self, engine: Engine, *, poisoned: bool = False) -> PagedKV:
        """The engine's memory; every page of every layer has bytes of its own."""
        groups = []
        for group, (layers, _, shape) in enumerate(engine.groups):
            made = []
            for layer in range(layers):
                arrays = [
                    self._array(shape, i, None if poisoned else key_of(i, tenant=group, namespace=layer))
                    for i in range(len(shape.arrays))
                ]
                made.append(LayerPages(arrays=tuple(map(self.to_engine, arrays)), axis=shape.axis))
            groups.append(tuple(made))
        return PagedKV(groups=tuple(groups))

    def _array(self, shape: Shape, number: int, key: BlockKey | None) -> Array:
        real = tuple(PAGES if size == -1 else size for size in shape.arrays[number])
        size_bytes = int(np.prod(real)) * np.dtype(shape.dtype).itemsize
        raw = bytes([POISON]) * size_bytes if key is None else payload_of(key, size_bytes)
        return np.frombuffer(bytearray(raw), dtype=shape.dtype).reshape(real)

    def page_bytes_of(self, kv: PagedKV, group: int, layer: int, page: int) -> bytes:
        """What one page holds now, told independently of the copier."""
        pages = kv.groups[group][layer]
        return b"".join(
            np.take(self.from_engine(each), page, axis=pages.axis).tobytes() for each in pages.arrays
        )

    def part_bytes(self, kv: PagedKV, group: int, pages: Sequence[int]) -> bytes:
        """What a slot holds after these pages were offloaded."""
        layers = range(len(kv.groups[group]))
        return b"".join(self.page_bytes_of(kv, group, layer, page) for layer in layers for page in pages)

    def slot_for(self, engine: Engine, group: int) -> Guarded:
        layers, count, shape = engine.groups[group]
        return Guarded(whole_pages(layers * count * shape.page_bytes))

    def parts_of(self, engine: Engine, first_page: int = 0) -> tuple[list[CopyPart], list[Guarded]]:
        """Two blocks of every group, their pages scattered from ``first_page`` on."""
        parts, slots = [], []
        for group, (_, count, _) in enumerate(engine.groups):
            scattered = [(first_page + 7 * i) % PAGES for i in range(2 * count)]
            for block in range(2):
                slot = self.slot_for(engine, group)
                mine = tuple(scattered[block * count : (block + 1) * count])
                parts.append(CopyPart(group=group, slot=slot.view, pages=mine))
                slots.append(slot)
        return parts, slots

    def offload(self, copier: Copier, kv: PagedKV, parts: Sequence[CopyPart]) -> str | None:
        done = Done()
        copier.offload(kv, parts, None, done)
        return done.wait(self.patience_s)

    def onboard(self, copier: Copier, kv: PagedKV, parts: Sequence[CopyPart]) -> str | None:
        done = Done()
        copier.onboard(kv, parts, done)
        return done.wait(self.patience_s)

    def check_slots(self, kv: PagedKV, parts: Sequence[CopyPart], slots: Sequence[Guarded]) -> None:
        for part, slot in zip(parts, slots, strict=True):
            wanted = self.part_bytes(kv, part.group, part.pages)
            assert slot.view[: len(wanted)] == wanted, (
                f"pages {part.pages} of group {part.group} lie wrong in the slot"
            )
            assert is_poisoned(slot.view[len(wanted) :]), "bytes were written behind the payload"
            assert slot.guards_intact(), "bytes were written beside the slot"

    # ---- there and back

    @pytest.mark.parametrize("name", ENGINES)
    def test_offload_gathers_layer_by_layer(self, copier: Copier, name: str) -> None:
        engine = ENGINES[name]
        kv, untouched = self.memory(engine), self.memory(engine)
        parts, slots = self.parts_of(engine)
        assert self.offload(copier, kv, parts) is None
        self.check_slots(untouched, parts, slots)
        everything = range(PAGES)
        for group in range(len(engine.groups)):
            before = self.part_bytes(untouched, group, everything)
            assert self.part_bytes(kv, group, everything) == before, "offload changed the engine's memory"

    @pytest.mark.parametrize("name", ENGINES)
    @pytest.mark.parametrize("skip", [0, 1])
    def test_onboard_writes_its_pages_and_no_others(self, copier: Copier, name: str, skip: int) -> None:
        engine = ENGINES[name]
        source, target = self.memory(engine), self.memory(engine, poisoned=True)
        parts, slots = self.parts_of(engine)
        assert self.offload(copier, source, parts) is None
        moved = [
            replace(
                part, pages=tuple((page + 3) % PAGES for page in part.pages), skip=min(skip, len(part.pages))
            )
            for part in parts
        ]
        assert self.onboard(copier, target, moved) is None
        for group, (layers, _, shape) in enumerate(engine.groups):
            written = {
                to: origin
                for part, there in zip(parts, moved, strict=True)
                if part.group == group
                for origin, to in list(zip(part.pages, there.pages, strict=True))[there.skip :]
            }
            for layer in range(layers):
                for page in range(PAGES):
                    found = self.page_bytes_of(target, group, layer, page)
                    if page in written:
                        assert found == self.page_bytes_of(source, group, layer, written[page])
                    else:
                        assert found == bytes([POISON]) * shape.page_bytes, f"page {page} was written"
        self.check_slots(source, parts, slots)

    def test_a_batch_of_nothing(self, copier: Copier) -> None:
        kv = self.memory(ENGINES["one array"])
        assert self.offload(copier, kv, []) is None
        assert self.onboard(copier, kv, []) is None

    def test_d12_more_parts_than_any_staging_holds(self, copier: Copier) -> None:
        engine = ENGINES["one array"]
        kv = self.memory(engine)
        slots = [self.slot_for(engine, 0) for _ in range(64)]
        parts = [
            CopyPart(group=0, slot=slot.view, pages=(i % PAGES, (i + 11) % PAGES))
            for i, slot in enumerate(slots)
        ]
        assert self.offload(copier, kv, parts) is None
        self.check_slots(kv, parts, slots)

    # ---- when

    def test_d12_offload_waits_for_the_engine(self, copier: Copier) -> None:
        """The pages get their final bytes after the call and before the event."""
        engine = ENGINES["one array"]
        kv, final = self.memory(engine, poisoned=True), self.memory(engine)
        parts, slots = self.parts_of(engine)
        done = Done()
        ready, fire = self.make_gate()
        returns(partial(copier.offload, kv, parts, ready, done), self.patience_s)
        assert not done.calls, "done was called before the engine was ready"
        assert all(is_poisoned(slot.view) for slot in slots), "a slot was written before the engine was ready"
        for layer, wanted in zip(kv.groups[0], final.groups[0], strict=True):
            self.overwrite(layer.arrays[0], self.from_engine(wanted.arrays[0]))
        fire()
        assert done.wait(self.patience_s) is None
        self.check_slots(final, parts, slots)

    def test_d12_onboard_waits_for_the_engine(self, copier: Copier) -> None:
        """The engine still writes to the pages after the call and before the event: its bytes must not win."""
        engine = ENGINES["one array"]
        source, target = self.memory(engine), self.memory(engine, poisoned=True)
        parts, _ = self.parts_of(engine)
        assert self.offload(copier, source, parts) is None
        done = Done()
        ready, fire = self.make_gate()
        returns(lambda: copier.onboard(target, parts, done, ready=ready), self.patience_s)
        assert not done.calls, "done was called before the engine was ready"
        for layer in target.groups[0]:
            found = self.from_engine(layer.arrays[0])
            assert (found.view(np.uint8) == POISON).all(), "a page was written before the engine was ready"
            self.overwrite(layer.arrays[0], np.zeros_like(found))
        fire()
        assert done.wait(self.patience_s) is None
        for part in parts:
            wanted = self.part_bytes(source, part.group, part.pages)
            assert self.part_bytes(target, part.group, part.pages) == wanted

    def test_bytes_are_there_when_done_is_called(self, copier: Copier) -> None:
        engine = ENGINES["two groups"]
        kv = self.memory(engine)
        parts, slots = self.parts_of(engine)
        seen: list[list[bytes]] = []
        done = Done(lambda: seen.append([bytes(slot.view) for slot in slots]))
        copier.offload(kv, parts, None, done)
        assert done.wait(self.patience_s) is None
        for part, raw in zip(parts, seen[0], strict=True):
            wanted = self.part_bytes(kv, part.group, part.pages)
            assert raw[: len(wanted)] == wanted, "done was called before the bytes were there"

    def test_layers_arrive_in_order_and_are_told(self, copier: Copier) -> None:
        engine = ENGINES["two groups"]
        source, target = self.memory(engine), self.memory(engine, poisoned=True)
        parts, _ = self.parts_of(engine)
        assert self.offload(copier, source, parts) is None
        told: list[tuple[int, int, bool]] = []

        def on_layer(group: int, layer: int) -> None:
            pages = [page for part in parts if part.group == group for page in part.pages]
            here = all(
                self.page_bytes_of(target, group, layer, page)
                == self.page_bytes_of(source, group, layer, page)
                for page in pages
            )
            told.append((group, layer, here))

        told_before: list[int] = []
        done = Done(lambda: told_before.append(len(told)))
        copier.onboard(target, parts, done, on_layer)
        assert done.wait(self.patience_s) is None
        for group, (layers, _, _) in enumerate(engine.groups):
            order = [layer for told_group, layer, _ in told if told_group == group]
            assert order == list(range(layers)), f"layers of group {group} were told in the order {order}"
        assert all(here for _, _, here in told), "a layer was told before it had arrived"
        assert told_before == [len(told)], "a layer was told after done"

    def test_d11_d13_done_once_and_hands_off_afterwards(self) -> None:
        engine = ENGINES["two groups"]
        calls: list[Done] = []
        with self.running(self.make_copier()) as copier:
            kv = self.memory(engine)
            parts, slots = self.parts_of(engine)
            for _ in range(3):
                calls.append(Done())
                copier.offload(kv, parts, None, calls[-1])
                assert calls[-1].wait(self.patience_s) is None
            poisoned = self.memory(engine, poisoned=True)
            calls.append(Done())
            copier.onboard(poisoned, parts, calls[-1])
            assert calls[-1].wait(self.patience_s) is None
            for slot in slots:
                np.frombuffer(slot.view, dtype=np.uint8)[:] = POISON
            for layer in [layer for group in poisoned.groups for layer in group]:
                for array in layer.arrays:
                    self.overwrite(array, np.zeros_like(self.from_engine(array)))
            others, _ = self.parts_of(engine, first_page=2)
            assert self.offload(copier, kv, others) is None
        assert all(is_poisoned(slot.view) for slot in slots), "a slot was written after done"
        for layer in [layer for group in poisoned.groups for layer in group]:
            assert not any(self.from_engine(array).any() for array in layer.arrays), (
                "a page was written after done"
            )
        assert [len(done.calls) for done in calls] == [1] * len(calls), "done was called more than once"

    # ---- what goes wrong

    @pytest.mark.parametrize("page", [-1, PAGES, 10**9])
    def test_d13_a_page_that_does_not_exist_is_an_error_and_no_more(self, copier: Copier, page: int) -> None:
        engine = ENGINES["one array"]
        kv = self.memory(engine)
        parts, slots = self.parts_of(engine)
        wrong = [parts[0], replace(parts[1], pages=(0, page))]
        assert self.offload(copier, kv, wrong), "offload from a page that does not exist went well"
        assert self.onboard(copier, kv, wrong), "onboard to a page that does not exist went well"
        assert all(slot.guards_intact() for slot in slots)
        parts, slots = self.parts_of(engine)
        assert self.offload(copier, kv, parts) is None
        self.check_slots(kv, parts, slots)

    @pytest.mark.parametrize("name", ENGINES)
    def test_check_knows_what_was_declared(self, copier: Copier, name: str) -> None:
        engine = ENGINES[name]
        kv = self.memory(engine)
        groups = tuple(
            LayerGroup(
                f"group {number}",
                GroupKind.FULL,
                layers=layers,
                page_bytes=shape.page_bytes,
                engine_block_tokens=16,
            )
            for number, (layers, _, shape) in enumerate(engine.groups)
        )
        layout = Layout(layout_id="test", dtype="uint8", hash_tokens=16, groups=groups)
        copier.check(kv, layout)
        first, rest = groups[0], groups[1:]
        for wrong in (
            (replace(first, layers=first.layers + 1), *rest),
            (replace(first, page_bytes=first.page_bytes + 1), *rest),
            (*groups, replace(first, name="another")),
        ):
            with pytest.raises(LayoutError):
                copier.check(kv, replace(layout, groups=wrong))

    # ---- many threads

    def test_d11_many_threads(self, copier: Copier) -> None:
        engine = ENGINES["two groups"]
        kv = self.memory(engine)

        def work(first_page: int) -> None:
            for _ in range(5):
                target = self.memory(engine, poisoned=True)
                parts, slots = self.parts_of(engine, first_page)
                assert self.offload(copier, kv, parts) is None
                self.check_slots(kv, parts, slots)
                assert self.onboard(copier, target, parts) is None
                for part in parts:
                    there = self.part_bytes(target, part.group, part.pages)
                    assert there == self.part_bytes(kv, part.group, part.pages)

        run_together([partial(work, first_page) for first_page in range(8)], self.patience_s)

    def test_close_leaves_no_thread(self) -> None:
        def one_life() -> set[threading.Thread]:
            with self.running(self.make_copier()) as copier:
                engine = ENGINES["one array"]
                assert self.offload(copier, self.memory(engine), self.parts_of(engine)[0]) is None
            return set(threading.enumerate())

        before = one_life()  # what is started on first use for good is not a leak
        after = one_life()
        assert not after - before, f"still running: {after - before}"
