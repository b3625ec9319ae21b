"""Where the bytes of pages lie: an engine's pages and the slots, as runs of contiguous bytes by address.

A page need not be contiguous (heads outside of the pages, keys and values in arrays of their own), and neighbours
may be (block-contiguous memory). A *run* is a stretch that is contiguous on both sides. All of it is arithmetic on
strides that the arrays declare, vectorised, and the same for a GPU's memory and for the host's.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from tierkv.copier import parts_by_group
from tierkv.errors import LayoutError

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from tierkv.copier import CopyPart, LayerPages, PagedKV
    from tierkv.layout import Layout

    Longs = NDArray[np.int64]


@dataclass(frozen=True)
class Runs:
    """Copies of ``size[i]`` bytes between the engine's ``page[i]`` and the slot's ``slot[i]``: addresses, int64
    each."""

    page: Longs
    slot: Longs
    size: Longs

    def __len__(self) -> int:
        return len(self.size)

    @property
    def bytes(self) -> int:
        return int(self.size.sum())

    @property
    def offsets(self) -> Longs:
        """Where each run lies in a staging buffer that holds them one behind the other."""
        return np.cumsum(self.size) - self.size

    def merged(self) -> Runs:
        """Neighbours that go on where the one before ends, on both sides, become one run."""
        if len(self) < 2:
            return self
        ends = (self.page[1:] != self.page[:-1] + self.size[:-1]) | (
            self.slot[1:] != self.slot[:-1] + self.size[:-1]
        )
        starts = np.concatenate(([0], np.flatnonzero(ends) + 1))
        return Runs(self.page[starts], self.slot[starts], np.add.reduceat(self.size, starts))

    def pieces(self, most_bytes: int) -> Iterator[Runs]:
        """In order, cut into pieces of at most that many bytes."""
        runs = self._halved(most_bytes)
        ends = np.cumsum(runs.size)
        first, before = 0, 0
        while first < len(runs):
            last = int(np.searchsorted(ends, before + most_bytes, side="right"))
            yield Runs(runs.page[first:last], runs.slot[first:last], runs.size[first:last])
            first, before = last, int(ends[last - 1])

    def _halved(self, most_bytes: int) -> Runs:
        """Runs longer than a piece are cut up."""
        if not len(self) or int(self.size.max()) <= most_bytes:
            return self
        parts = -(-self.size // most_bytes)
        which = np.repeat(np.arange(len(self)), parts)
        number = np.arange(len(which)) - np.repeat(np.cumsum(parts) - parts, parts)
        at = number * most_bytes
        size = np.minimum(self.size[which] - at, most_bytes)
        return Runs(self.page[which] + at, self.slot[which] + at, size)


@dataclass(frozen=True)
class _Array:
    """One array of a layer: where page p begins, and where in a page its runs lie."""

    base: int
    page_stride: int
    offsets: Longs
    run_bytes: int
    before: int
    """Bytes of the page in the arrays before this one."""


@dataclass(frozen=True)
class LayerRuns:
    """Where the pages of one layer lie."""

    arrays: tuple[_Array, ...]
    pages: int
    page_bytes: int

    def of(self, pages: Longs, slot: Longs) -> Runs:
        """The runs of these pages, ``slot[i]`` being where page i lies in its slot."""
        page_sides, slot_sides, sizes = [], [], []
        for array in self.arrays:
            page_sides.append((array.base + pages[:, None] * array.page_stride + array.offsets).ravel())
            inside = array.before + np.arange(len(array.offsets)) * array.run_bytes
            slot_sides.append((slot[:, None] + inside).ravel())
            sizes.append(np.full(len(page_sides[-1]), array.run_bytes, np.int64))
        return Runs(np.concatenate(page_sides), np.concatenate(slot_sides), np.concatenate(sizes))


def layer_runs(layer: LayerPages) -> LayerRuns:
    """Reads the strides of a layer's arrays. Raises ``LayoutError`` for pages that are not made of whole elements."""
    arrays: list[_Array] = []
    before, counts = 0, []
    for array in layer.arrays:
        base, shape, strides, item_bytes = _memory_of(array)
        inner = [pair for dim, pair in enumerate(zip(shape, strides, strict=True)) if dim != layer.axis]
        run_bytes = item_bytes
        while inner and (inner[-1][1] == run_bytes or inner[-1][0] == 1):
            run_bytes *= inner.pop()[0]
        if run_bytes == item_bytes and inner:
            raise LayoutError(f"strides {strides}: the last dimension of a page must be contiguous")
        offsets = np.zeros(1, np.int64)
        for size, stride in inner:
            offsets = (offsets[:, None] + np.arange(size, dtype=np.int64) * stride).ravel()
        arrays.append(_Array(base, strides[layer.axis], offsets, run_bytes, before))
        before += len(offsets) * run_bytes
        counts.append(shape[layer.axis])
    return LayerRuns(tuple(arrays), min(counts), before)


def _memory_of(array: Any) -> tuple[int, tuple[int, ...], tuple[int, ...], int]:
    """(address, shape, strides in bytes, bytes of an element) of a numpy array or a torch tensor on any device."""
    if isinstance(array, np.ndarray):
        return array.ctypes.data, array.shape, array.strides, array.itemsize
    item = int(array.element_size())
    return int(array.data_ptr()), tuple(array.shape), tuple(s * item for s in array.stride()), item


class Plan:
    """The runs of one call, group by group and layer by layer. ``into_slots``: for an offload, which writes to them.
    Raises ``LookupError`` for pages and groups that do not exist and for a slot that is too small, ``BufferError`` for
    one that must not be written, ``LayoutError``, ``TypeError`` and ``ValueError`` for what is no copy at all."""

    def __init__(self, kv: PagedKV, parts: Sequence[CopyPart], *, into_slots: bool = False) -> None:
        self._groups: list[tuple[int, list[LayerRuns], Longs, Longs, Longs]] = []
        by_group = parts_by_group(parts, len(kv.groups))
        if into_slots and any(getattr(part.slot, "readonly", False) for part in parts):
            raise BufferError("a slot that may only be read")
        for group, (layers, mine) in enumerate(zip(kv.groups, by_group, strict=True)):
            if mine and layers:
                self._groups.append((group, *_placed([layer_runs(layer) for layer in layers], mine)))

    def names(self) -> list[tuple[int, int]]:
        """(group, layer) of all layers, in their order."""
        return [(group, number) for group, layers, *_ in self._groups for number in range(len(layers))]

    def layers(self) -> Iterator[tuple[int, int, Runs]]:
        """(group, layer, its runs in the order of the slots) for an onboard."""
        for group, layers, pages, slot, layer_bytes in self._groups:
            for number, layer in enumerate(layers):
                yield group, number, _by_slot([layer.of(pages, slot + number * layer_bytes)])

    def whole(self) -> Runs:
        """All runs in the order of the slots, for an offload: a block's slot is filled from its front to its end."""
        return _by_slot([runs for _, _, runs in self._unordered()])

    def _unordered(self) -> Iterator[tuple[int, int, Runs]]:
        for group, layers, pages, slot, layer_bytes in self._groups:
            for number, layer in enumerate(layers):
                yield group, number, layer.of(pages, slot + number * layer_bytes)


def _placed(
    layers: list[LayerRuns], parts: Sequence[CopyPart]
) -> tuple[list[LayerRuns], Longs, Longs, Longs]:
    """(layers; the page ids of all parts; where each lies in its slot in the first layer; bytes from layer to
    layer)."""
    pages, slots, steps = [], [], []
    size = layers[0].page_bytes
    if unequal := {layer.page_bytes for layer in layers} - {size}:
        raise LayoutError(f"layers with pages of {size} and of {min(unequal)} bytes in one group")
    for part in parts:
        total = len(part.pages)
        needed = total * size * len(layers)
        address, length = slot_memory(part.slot)
        if needed > length:
            raise LookupError(
                f"{total} pages of {len(layers)} layers take {needed} bytes of a slot of {length}"
            )
        pages.append(np.asarray(part.pages[part.skip :], np.int64).reshape(-1))
        slots.append(address + np.arange(part.skip, total, dtype=np.int64) * size)
        steps.append(np.full(total - part.skip, total * size, np.int64))
    found = np.concatenate(pages)
    for number, layer in enumerate(layers):
        if len(found) and not (int(found.min()) >= 0 and int(found.max()) < layer.pages):
            wrong = sorted({page for page in found.tolist() if not 0 <= page < layer.pages})
            raise LookupError(f"pages {wrong[:4]} of layer {number}: there are pages 0 to {layer.pages - 1}")
    return layers, found, np.concatenate(slots), np.concatenate(steps)


def _by_slot(found: Sequence[Runs]) -> Runs:
    if not found:
        nothing = np.zeros(0, np.int64)
        return Runs(nothing, nothing, nothing)
    page = np.concatenate([runs.page for runs in found])
    slot = np.concatenate([runs.slot for runs in found])
    size = np.concatenate([runs.size for runs in found])
    order = np.argsort(slot, kind="stable")
    return Runs(page[order], slot[order], size[order]).merged()


def slot_memory(slot: Any) -> tuple[int, int]:
    """(address, bytes) of a slot: a memoryview of host memory, or a contiguous tensor of a device."""
    if isinstance(slot, memoryview):
        return int(np.frombuffer(slot, np.uint8).ctypes.data), slot.nbytes
    return int(slot.data_ptr()), int(slot.numel() * slot.element_size())


def check_declared(kv: PagedKV, layout: Layout) -> None:
    """Raises ``LayoutError`` when the engine's memory is not what the layout declares."""
    if len(kv.groups) != len(layout.groups):
        raise LayoutError(f"{len(kv.groups)} groups of arrays for {len(layout.groups)} layer groups")
    for group, layers in zip(layout.groups, kv.groups, strict=True):
        if len(layers) != group.layers:
            raise LayoutError(
                f"layer group {group.name!r}: {len(layers)} layers of arrays, declared {group.layers}"
            )
        for layer in layers:
            found = layer_runs(layer).page_bytes
            if found != group.page_bytes:
                raise LayoutError(
                    f"layer group {group.name!r}: a page has {found} bytes, declared {group.page_bytes}"
                )
