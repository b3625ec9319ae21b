"""offload and onboard through the client, from and into the memory of engines of every shape."""

from __future__ import annotations

import asyncio
import importlib
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

from tests.client_support import (
    BLOCK_TOKENS,
    PATIENCE_S,
    Live,
    audit,
    chain_of,
    check_lease,
    live,
    loaded,
    payloads_of,
    put_all,
)
from tests.valkey_server import eventually
from tierkv.copier import LayerPages, PagedKV
from tierkv.errors import HandleError
from tierkv.keys import Chain
from tierkv.layout import GroupKind, LayerGroup, Layout
from tierkv.namespaces import OpenNamespace
from tierkv.testing.payloads import POISON
from tierkv.units import KIB

BS = BLOCK_TOKENS
PAGES = 24
LAYERS = 3
Array = Any


def bytes_of(array: Array) -> np.ndarray[Any, Any]:
    """The same memory as bytes, numpy or torch."""
    if isinstance(array, np.ndarray):
        return array.view(np.uint8)
    return array.view(importlib.import_module("torch").uint8).numpy()  # type: ignore[no-any-return]


def torch_of(dtype: str) -> Callable[[Sequence[int]], Array]:
    def make(shape: Sequence[int]) -> Array:
        torch = pytest.importorskip("torch")
        return torch.zeros(tuple(shape), dtype=getattr(torch, dtype))

    return make


def numpy_of(dtype: str) -> Callable[[Sequence[int]], Array]:
    return lambda shape: np.zeros(shape, dtype=dtype)


def inside(make: Callable[[Sequence[int]], Array]) -> Callable[[Sequence[int]], Array]:
    """A strided view: every second page, and part of the heads, of something larger."""

    def larger(shape: Sequence[int]) -> Array:
        whole = make([2 * shape[0], shape[1] + 2, *shape[2:]])
        return whole[::2, 1:-1]

    return larger


@dataclass(frozen=True)
class Kind:
    """How the layers of an engine look: the arrays of one layer, with PAGES where pages are counted."""

    make: Callable[[Sequence[int]], Array]
    shapes: tuple[tuple[int, ...], ...]
    item_bytes: int

    @property
    def axis(self) -> int:
        return self.shapes[0].index(PAGES)

    @property
    def page_bytes(self) -> int:
        return sum(int(np.prod(shape)) // PAGES * self.item_bytes for shape in self.shapes)

    def layer(self) -> LayerPages:
        return LayerPages(tuple(self.make(shape) for shape in self.shapes), self.axis)


ONE = ((PAGES, 2, BS, 8),)
SECOND = ((2, PAGES, BS, 8),)
APART = ((PAGES, BS, 8), (PAGES, BS, 8))
UNEQUAL = ((PAGES, BS, 12), (PAGES, BS, 4))
KINDS = {
    "numpy one array": Kind(numpy_of("float16"), ONE, 2),
    "numpy pages second": Kind(numpy_of("float32"), SECOND, 4),
    "numpy K and V apart": Kind(numpy_of("float64"), APART, 8),
    "numpy K and V unequal": Kind(numpy_of("uint8"), UNEQUAL, 1),
    "numpy strided": Kind(inside(numpy_of("float16")), ONE, 2),
    "numpy strided apart": Kind(inside(numpy_of("float32")), APART, 4),
    "torch bf16": Kind(torch_of("bfloat16"), ONE, 2),
    "torch bf16 pages second": Kind(torch_of("bfloat16"), SECOND, 2),
    "torch fp16 apart": Kind(torch_of("float16"), APART, 2),
    "torch fp32 strided": Kind(inside(torch_of("float32")), ONE, 4),
    "torch fp8": Kind(torch_of("float8_e4m3fn"), SECOND, 1),
}


class Engine:
    """Paged memory for the groups of a layout, on one rank, with pages handed out in no order."""

    def __init__(self, layout: Layout, kinds: Sequence[Kind]) -> None:
        self.layout = layout
        self.kv = PagedKV(
            tuple(
                tuple(kind.layer() for _ in range(group.layers))
                for group, kind in zip(layout.groups, kinds, strict=True)
            )
        )
        self.poison()

    def poison(self) -> None:
        for layers in self.kv.groups:
            for layer in layers:
                for array in layer.arrays:
                    bytes_of(array)[...] = POISON

    def pages(self, blocks: int, start: int = 0) -> list[list[list[int]]]:
        """Pages for so many blocks: far apart, backwards."""
        found = []
        for block in range(start, start + blocks):
            found.append(
                [
                    [
                        (PAGES - 1 - 5 * (block * self.layout.pages_of(group) + i)) % PAGES
                        for i in range(self.layout.pages_of(group))
                    ]
                    for group in range(len(self.layout.groups))
                ]
            )
        return found

    def write(self, chain: Chain, pages: list[list[list[int]]]) -> None:
        """As if the engine had computed these blocks."""
        for position, of_block in enumerate(pages):
            [payload] = payloads_of(chain, [position])
            for group, numbers in enumerate(of_block):
                for place, chunk in self._chunks(group, numbers, payload[group]):
                    place[...] = chunk

    def assert_holds(self, chain: Chain, pages: list[list[list[int]]], *, skip: int = 0) -> None:
        """The pages hold the blocks' bytes, those of the first ``skip`` engine blocks and all others are untouched."""
        for position, of_block in enumerate(pages):
            [payload] = payloads_of(chain, [position])
            for group, numbers in enumerate(of_block):
                each = self.layout.groups[group].engine_block_tokens // self.layout.hash_tokens
                first = max(0, skip - position * self.layout.engine_blocks) // each
                for number, (place, chunk) in enumerate(self._chunks(group, numbers, payload[group])):
                    if number % (len(numbers) * len(self._layer(group).arrays)) < first * len(
                        self._layer(group).arrays
                    ):
                        assert (place == POISON).all(), f"block {position}: a page to be skipped was written"
                    else:
                        assert (place == chunk).all(), f"block {position}, group {group}: other bytes"
                    place[...] = POISON
        for layers in self.kv.groups:
            for layer in layers:
                for array in layer.arrays:
                    assert (bytes_of(array) == POISON).all(), "bytes beside the pages were written"

    def _layer(self, group: int) -> LayerPages:
        return self.kv.groups[group][0]

    def _chunks(self, group: int, numbers: Sequence[int], payload: bytes) -> list[tuple[Any, Any]]:
        """(place in the engine's memory, its bytes) for each array of each page of each layer: the layout of a part
        written down a second time."""
        found = []
        at = 0
        for layer in self.kv.groups[group]:
            for page in numbers:
                for array in layer.arrays:
                    raw = bytes_of(array)
                    place = raw[page] if layer.axis == 0 else raw[:, page]
                    chunk = np.frombuffer(payload, np.uint8, place.size, at).reshape(place.shape)
                    found.append((place, chunk))
                    at += place.size
        assert at == len(payload)
        return found


def layout_for(kinds: Sequence[Kind], *, engine_blocks: int = 1, pages_a_hash: Sequence[int] = ()) -> Layout:
    groups = tuple(
        LayerGroup(
            f"g{i}", GroupKind.FULL, LAYERS, kind.page_bytes, BS * (pages_a_hash[i] if pages_a_hash else 1)
        )
        for i, kind in enumerate(kinds)
    )
    return Layout("test", "opaque", BS, groups, engine_blocks=engine_blocks)


def space_of(rig: Live, layout: Layout) -> OpenNamespace:
    return rig.namespace(layout)


@pytest.mark.parametrize("kind", KINDS.values(), ids=list(KINDS))
def test_offload_then_onboard_elsewhere(kind: Kind) -> None:
    layout = layout_for([kind])
    with live(8, block_bytes=16 * KIB) as rig:
        engine = Engine(layout, [kind])
        chain = chain_of(space_of(rig, layout), 3)
        pages = engine.pages(3)
        engine.write(chain, pages)
        stored = rig.client.offload(engine.kv, pages, chain).result(PATIENCE_S)
        assert stored.stored == 3
        assert loaded(rig.client, chain) == 3
        engine.poison()
        with rig.client.load(chain) as lease:
            elsewhere = engine.pages(3, start=7)
            assert rig.client.onboard(lease, engine.kv, elsewhere).result(PATIENCE_S)
        engine.assert_holds(chain, elsewhere)


@pytest.mark.parametrize("skip", range(10))
def test_skip_leaves_the_first_engine_blocks_alone(skip: int) -> None:
    """Two groups, one with pages of two engine blocks, blocks of four."""
    kinds = [KINDS["numpy K and V apart"], KINDS["numpy pages second"]]
    layout = layout_for(kinds, engine_blocks=4, pages_a_hash=(1, 2))
    with live(8, block_bytes=64 * KIB, region_blocks=2) as rig:
        engine = Engine(layout, kinds)
        chain = chain_of(space_of(rig, layout), 2)
        put_all(rig.client, chain)
        with rig.client.load(chain) as lease:
            pages = engine.pages(2)
            assert rig.client.onboard(lease, engine.kv, pages, skip=skip).result(PATIENCE_S)
        engine.assert_holds(chain, pages, skip=skip)


def test_layers_arrive_in_their_order_and_are_told() -> None:
    kinds = [KINDS["numpy one array"], KINDS["numpy K and V apart"]]
    layout = layout_for(kinds)
    with live(8, block_bytes=32 * KIB, region_blocks=2) as rig:
        engine = Engine(layout, kinds)
        chain = chain_of(space_of(rig, layout), 2)
        put_all(rig.client, chain)
        pages = engine.pages(2)
        [expected] = payloads_of(chain, [1])
        told: list[tuple[int, int]] = []
        there: list[bool] = []

        def on_layer(group: int, layer: int) -> None:
            told.append((group, layer))
            each = len(expected[group]) // LAYERS
            [*_, (place, _)] = [
                one
                for number, one in enumerate(engine._chunks(group, pages[1][group], expected[group]))
                if number // len(kinds[group].shapes) == layer
            ]
            wanted = np.frombuffer(expected[group], np.uint8)[layer * each : (layer + 1) * each]
            there.append(bool((place.reshape(-1) == wanted[-place.size :]).all()))

        with rig.client.load(chain) as lease:
            done = rig.client.onboard(lease, engine.kv, pages, on_layer=on_layer)
            assert done.result(PATIENCE_S)
        assert told == [(group, layer) for group in range(2) for layer in range(LAYERS)]
        assert there == [True] * 6


def test_a_group_without_pages_is_passed_over() -> None:
    kinds = [KINDS["numpy one array"], KINDS["numpy K and V apart"]]
    layout = layout_for(kinds)
    with live(8, block_bytes=32 * KIB, region_blocks=2) as rig:
        engine = Engine(layout, kinds)
        chain = chain_of(space_of(rig, layout), 1)
        put_all(rig.client, chain)
        [[first, _]] = engine.pages(1)
        with rig.client.load(chain) as lease:
            assert rig.client.onboard(lease, engine.kv, [[first, []]]).result(PATIENCE_S)
        [payload] = payloads_of(chain)
        for place, chunk in engine._chunks(0, first, payload[0]):
            assert (place == chunk).all()
        assert all(
            (bytes_of(array) == POISON).all() for layer in engine.kv.groups[1] for array in layer.arrays
        )


def test_each_rank_offloads_and_onboards_its_own_part() -> None:
    kind = KINDS["numpy pages second"]
    group = LayerGroup("full", GroupKind.FULL, LAYERS, kind.page_bytes, BS)
    layout = Layout("test", "float32", BS, (group,), tp_size=2)
    with live(8, block_bytes=16 * KIB) as rig:
        chain = chain_of(space_of(rig, layout), 2)
        engines = [Engine(layout, [kind]) for _ in range(2)]
        pages = engines[0].pages(2)
        for rank, engine in enumerate(engines):
            for position, [numbers] in enumerate(pages):
                [[payload]] = payloads_of(chain, [position], rank=rank)
                for place, chunk in engine._chunks(0, numbers, payload):
                    place[...] = chunk
            assert rig.client.match(chain).blocks == 0
            rig.client.offload(engine.kv, pages, chain, rank=rank).result(PATIENCE_S)
        assert loaded(rig.client, chain) == 2
        with rig.client.load(chain) as lease:
            for rank, engine in enumerate(engines):
                engine.poison()
                assert rig.client.onboard(lease, engine.kv, pages, rank=rank).result(PATIENCE_S)
                for position, [numbers] in enumerate(pages):
                    [[payload]] = payloads_of(chain, [position], rank=rank)
                    assert all((place == chunk).all() for place, chunk in engine._chunks(0, numbers, payload))


# ---- order and failure


class ReadyWhenTold:
    """An engine's event. The engine sets it when it has computed the pages."""

    def __init__(self, error: str | None = None) -> None:
        self._event = threading.Event()
        self._error = error
        self.waited = threading.Event()

    def synchronize(self) -> None:
        self.waited.set()
        assert self._event.wait(PATIENCE_S)
        if self._error is not None:
            raise RuntimeError(self._error)

    def set(self) -> None:
        self._event.set()


def simple(rig: Live, blocks: int = 2) -> tuple[Engine, Chain, list[list[list[int]]]]:
    kind = KINDS["numpy one array"]
    layout = layout_for([kind])
    engine = Engine(layout, [kind])
    return engine, chain_of(space_of(rig, layout), blocks), engine.pages(blocks)


def test_d12_offload_reads_the_pages_after_the_engine_has_written_them() -> None:
    with live(4, block_bytes=16 * KIB) as rig:
        engine, chain, pages = simple(rig)
        ready = ReadyWhenTold()
        future = rig.client.offload(engine.kv, pages, chain, ready=ready)
        assert ready.waited.wait(PATIENCE_S)
        assert not future.done()
        assert rig.client.match(chain).blocks == 0
        engine.write(chain, pages)
        ready.set()
        assert future.result(PATIENCE_S).stored == 2
        assert loaded(rig.client, chain) == 2


def test_d10_an_event_that_fails_stores_nothing_and_the_next_offload_works() -> None:
    """An engine's event raises, for instance a CUDA error."""
    with live(2, block_bytes=16 * KIB) as rig:
        engine, chain, pages = simple(rig)
        ready = ReadyWhenTold("device lost")
        ready.set()
        stored = rig.client.offload(engine.kv, pages, chain, ready=ready).result(PATIENCE_S)
        assert (stored.stored, stored.dropped) == (0, {"copy_failed": 2})
        assert rig.count("dropped_blocks_total", "host", "copy_failed") == 2
        assert rig.client.match(chain).blocks == 0
        audit(rig.store)
        engine.write(chain, pages)
        assert rig.client.offload(engine.kv, pages, chain).result(PATIENCE_S).stored == 2
        assert loaded(rig.client, chain) == 2


def test_d10_pages_that_do_not_exist_store_nothing() -> None:
    with live(2, block_bytes=16 * KIB) as rig:
        engine, chain, pages = simple(rig)
        wrong = [pages[0], [[PAGES]]]
        stored = rig.client.offload(engine.kv, wrong, chain).result(PATIENCE_S)
        assert (stored.stored, stored.dropped) == (0, {"copy_failed": 2})
        audit(rig.store)
        put_all(rig.client, chain)
        with rig.client.load(chain) as lease:
            assert not rig.client.onboard(lease, engine.kv, wrong).result(PATIENCE_S)
            assert rig.client.onboard(lease, engine.kv, pages).result(PATIENCE_S)
        engine.assert_holds(chain, pages)


def test_memory_that_is_not_what_was_declared_harms_nobody() -> None:
    """Too few layers, pages of another size: an error at the call or a drop, and the next engine is served."""
    with live(4, block_bytes=16 * KIB) as rig:
        engine, chain, pages = simple(rig)
        [layers] = engine.kv.groups
        smaller = LayerPages((np.zeros((PAGES, 8), np.uint8),))
        larger = LayerPages((np.zeros((PAGES, 64 * KIB), np.uint8),))
        for strange in ((), layers[:-1], (*layers[:-1], smaller), (larger, *layers[1:])):
            kv = PagedKV((tuple(strange),))
            with pytest.raises(ValueError, match="layer group 'g0'"):  # a LayoutError
                rig.client.offload(kv, pages, chain)
        audit(rig.store)
        engine.write(chain, pages)
        assert rig.client.offload(engine.kv, pages, chain).result(PATIENCE_S).stored == 2
        assert loaded(rig.client, chain) == 2


def test_a_wrong_number_of_pages_is_an_error_and_stores_nothing() -> None:
    with live(4, block_bytes=16 * KIB) as rig:
        engine, chain, pages = simple(rig)
        with pytest.raises(HandleError, match="block 1, layer group 'g0': 2 pages given"):
            rig.client.offload(engine.kv, [pages[0], [[1, 2]]], chain)
        audit(rig.store)
        assert rig.store.host.free_bytes() == 4 * 16 * KIB


def test_offload_without_room_or_need_is_done_at_once() -> None:
    with live(2) as rig:
        engine, chain, pages = simple(rig, 3)
        engine.write(chain, pages)
        stored = rig.client.offload(engine.kv, pages, chain).result(PATIENCE_S)
        assert (stored.stored, stored.dropped) == (2, {"no_room": 1})
        again = rig.client.offload(engine.kv, pages[:2], chain).result(0)
        assert (again.stored, again.resident) == (0, 2)


def test_onboard_of_an_empty_lease() -> None:
    with live(2, block_bytes=16 * KIB) as rig:
        engine, chain, pages = simple(rig)
        with rig.client.load(chain) as lease:
            assert rig.client.onboard(lease, engine.kv, pages).result(PATIENCE_S)
        engine.assert_holds(chain, [])


def test_d13_a_lease_that_was_released_under_the_copy_is_told() -> None:
    """The engine aborts a request while its blocks are on their way: the future says not to trust them."""
    with live(4, block_bytes=16 * KIB) as rig:
        engine, chain, pages = simple(rig)
        put_all(rig.client, chain)
        blocker = ReadyWhenTold()
        other, other_chain, other_pages = simple(rig, 1)
        first = rig.client.offload(
            other.kv, other_pages, chain_of(rig.namespace(other.layout), 1, 5), ready=blocker
        )
        assert blocker.waited.wait(PATIENCE_S)
        lease = rig.client.load(chain)
        future = rig.client.onboard(lease, engine.kv, pages)
        lease.release()
        blocker.set()
        assert not future.result(PATIENCE_S)
        first.result(PATIENCE_S)
        assert other_chain


def test_an_error_in_on_layer_does_not_end_the_copies_of_others() -> None:
    with live(4, block_bytes=16 * KIB) as rig:
        engine, chain, pages = simple(rig)
        put_all(rig.client, chain)

        def on_layer(group: int, layer: int) -> None:
            raise RuntimeError("the engine's own")

        with rig.client.load(chain) as lease:
            assert not rig.client.onboard(lease, engine.kv, pages, on_layer=on_layer).result(PATIENCE_S)
            engine.poison()
            assert rig.client.onboard(lease, engine.kv, pages).result(PATIENCE_S)
            check_lease(rig.store, lease)
        engine.assert_holds(chain, pages)


def test_offload_and_onboard_as_coroutines() -> None:
    async def session(rig: Live) -> None:
        engine, chain, pages = simple(rig)
        engine.write(chain, pages)
        aio = rig.client.aio
        assert (await aio.offload(engine.kv, pages, chain)).stored == 2
        engine.poison()
        with await aio.load(chain) as lease:
            assert await aio.onboard(lease, engine.kv, pages, skip=1)
        engine.assert_holds(chain, pages, skip=1)

    with live(4, block_bytes=16 * KIB) as rig:
        asyncio.run(session(rig))


def test_many_threads_offload_and_onboard() -> None:
    with live(16, block_bytes=16 * KIB) as rig:
        failures: list[BaseException] = []

        def work(seed: int) -> None:
            try:
                for turn in range(6):
                    engine, _, pages = simple(rig, 3)
                    chain = chain_of(rig.namespace(engine.layout), 3, seed=seed * 10 + turn)
                    engine.write(chain, pages)
                    rig.client.offload(engine.kv, pages, chain).result(PATIENCE_S)
                    engine.poison()
                    with rig.client.load(chain) as lease:
                        assert rig.client.onboard(lease, engine.kv, pages).result(PATIENCE_S)
                        engine.assert_holds(chain, pages[: len(lease)])
            except BaseException as error:
                failures.append(error)
                raise

        threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(PATIENCE_S)
        assert failures == []
        eventually(lambda: rig.client.stats()["leases"] == 0, "no lease is left")
