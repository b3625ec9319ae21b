"""Copies between an engine's paged KV memory and host slots.

An engine keeps the KV cache of each layer in *pages*, one for each engine block, scattered over its memory. A block's
part in a host slot is the same bytes, layer by layer (see ``tierkv.layout``). ``offload`` gathers pages into slots,
``onboard`` scatters slots into pages. Both are asynchronous: they are told when they are over through ``done``, and
``onboard`` also when each layer is, so that an engine can compute on the first while the rest arrives.
"""

from __future__ import annotations

import itertools
import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Protocol
from weakref import WeakValueDictionary

from tierkv.errors import LayoutError
from tierkv.executor import Executor
from tierkv.ids import NamespaceDigest
from tierkv.keys import Namespace
from tierkv.layout import Layout
from tierkv.stretch_copies import StretchCopies
from tierkv.supervision import Caught

if TYPE_CHECKING:
    from numpy.typing import NDArray

LANE = "copy"

ENGINE_ERRORS = (
    ArithmeticError,
    AssertionError,
    AttributeError,
    BufferError,
    LookupError,
    MemoryError,
    OSError,
    RuntimeError,
    TypeError,
    ValueError,
)
"""What an engine's memory (read-only pages, page numbers that are none) or a device may raise: it fails the call, and
must not end the thread that all copies share. What its events and callbacks raise may be anything."""


@dataclass(frozen=True)
class LayerPages:
    """One layer's pages: one or more arrays (keys and values apart, or one for both), numpy or torch on the CPU.

    ``axis`` is the dimension that counts pages: 0 for ``[pages, ...]``, 1 for ``[2, pages, ...]``. A page is what is
    left when that index is fixed, in C order; the page of a layer with several arrays is theirs one after the other.
    """

    arrays: tuple[Any, ...]
    axis: int = 0


@dataclass(frozen=True)
class PagedKV:
    """An engine's KV memory on one rank: for each layer group of the layout, its layers in order."""

    groups: tuple[tuple[LayerPages, ...], ...]


@dataclass(frozen=True)
class CopyPart:
    """One part of one block: its slot and the engine's pages, in the order of their tokens.

    ``skip`` leading pages are left alone: the engine has them already.
    """

    group: int
    slot: Any
    """A memoryview of host memory; for a ``CudaCopier`` also a contiguous uint8 tensor of the same GPU."""
    pages: tuple[int, ...]
    skip: int = 0


class ReadyEvent(Protocol):
    """What the engine records behind its own work on the pages; a CUDA event has this too."""

    def synchronize(self) -> None: ...


class Copier(Protocol):
    """Moves bytes between pages and slots. Thread-safe; calls return at once.

    What ``on_layer`` or ``ready.synchronize`` raise fails the call, and nothing else.
    ``done(error)`` is called exactly once for each call, on a thread of the copier's choice, when no byte of the batch
    is read or written any more; ``error`` is ``None`` when all bytes are where they should be.
    """

    def check(self, kv: PagedKV, layout: Layout) -> None:
        """Raises ``LayoutError`` when the arrays are not what the layout declares."""
        ...

    def offload(
        self,
        kv: PagedKV,
        parts: Sequence[CopyPart],
        ready: ReadyEvent | None,
        done: Callable[[str | None], None],
    ) -> None:
        """Pages to slots, after ``ready``."""
        ...

    def onboard(
        self,
        kv: PagedKV,
        parts: Sequence[CopyPart],
        done: Callable[[str | None], None],
        on_layer: Callable[[int, int], None] | None = None,
        ready: ReadyEvent | None = None,
    ) -> None:
        """Slots to pages, layer by layer, after ``ready``: what the engine did with these pages before is over then.
        ``on_layer(group, layer)`` when a layer of all parts has arrived."""
        ...


def told_once(
    done: Callable[[str | None], None], on_stray: Callable[[], None]
) -> Callable[[str | None], None]:
    """``done`` for a copier that may say it again: from the second time on it is ``on_stray`` that is called."""
    calls = itertools.count()

    def tell(error: str | None) -> None:
        if next(calls):
            on_stray()
        else:
            done(error)

    return tell


class KnownMemory:
    """Checks an engine's memory against a layout the first time that it is used, not at every copy."""

    def __init__(self, copier: Copier) -> None:
        self._copier = copier
        self._known: WeakValueDictionary[tuple[int, NamespaceDigest], PagedKV] = WeakValueDictionary()

    def check(self, kv: PagedKV, namespace: Namespace) -> None:
        """Raises ``LayoutError`` when the memory is not what the namespace's layout declares."""
        name = (id(kv), namespace.digest)
        if self._known.get(name) is not kv:
            self._copier.check(kv, namespace.layout)
            self._known[name] = kv


class HostCopier:
    """Copies for engines whose KV memory is in host RAM (CPU tensors, numpy), on one lane of the executor."""

    def __init__(self, executor: Executor) -> None:
        self._executor = executor
        executor.open_lane(LANE, 1)

    def check(self, kv: PagedKV, layout: Layout) -> None:
        if len(kv.groups) != len(layout.groups):
            raise LayoutError(f"{len(kv.groups)} groups of arrays for {len(layout.groups)} layer groups")
        for group, layers in zip(layout.groups, kv.groups, strict=True):
            if len(layers) != group.layers:
                raise LayoutError(
                    f"layer group {group.name!r}: {len(layers)} layers of arrays, declared {group.layers}"
                )
            for layer in layers:
                size = sum(pages[0].nbytes for pages in _page_arrays(layer))
                if size != group.page_bytes:
                    raise LayoutError(
                        f"layer group {group.name!r}: a page has {size} bytes, declared {group.page_bytes}"
                    )

    def offload(
        self,
        kv: PagedKV,
        parts: Sequence[CopyPart],
        ready: ReadyEvent | None,
        done: Callable[[str | None], None],
    ) -> None:
        self._run(lambda: _wait_for(ready) or _layer_by_layer(kv, parts, _gather, None), done)

    def onboard(
        self,
        kv: PagedKV,
        parts: Sequence[CopyPart],
        done: Callable[[str | None], None],
        on_layer: Callable[[int, int], None] | None = None,
        ready: ReadyEvent | None = None,
    ) -> None:
        self._run(lambda: _wait_for(ready) or _layer_by_layer(kv, parts, _scatter, on_layer), done)

    def _run(self, copy: Callable[[], str | None], done: Callable[[str | None], None]) -> None:
        def work() -> str | None:
            whole = False
            try:
                error = copy()
                whole = True
            finally:
                if not whole:  # this thread ends, but whoever waits for the copy must not wait for ever
                    done("the copy was broken off by an error, see the log")
            return error

        self._executor.run(LANE, work, done)


def _wait_for(ready: ReadyEvent | None) -> str | None:
    """Returns what went wrong."""
    if ready is not None:
        caught = Caught(in_generator=False)
        with caught:
            ready.synchronize()
        if caught.error is not None:
            return f"the engine's event: {caught.error!r}"
    return None


_Move = Callable[["NDArray[Any]", Sequence[int], "NDArray[Any]"], None]


def parts_by_group(parts: Sequence[CopyPart], groups: int) -> list[list[CopyPart]]:
    """The parts of each layer group, their pages as plain integers (a block table's may be numpy's, without a sign: the
    difference of two of those is no distance) and ``skip`` no more than all of them. Raises ``LookupError`` for a group
    that there is not, ``TypeError`` for a page that is no number, ``ValueError`` for a negative ``skip``."""
    found: list[list[CopyPart]] = [[] for _ in range(groups)]
    for part in parts:
        if not 0 <= part.group < groups:
            raise LookupError(f"layer group {part.group}: the engine's memory has {groups}")
        if part.skip < 0:
            raise ValueError(f"skip = {part.skip}: it cannot be negative")
        if part.skip > len(part.pages) or not _PLAIN.issuperset(map(type, part.pages)):
            numbers = tuple(map(operator.index, part.pages))
            part = replace(part, pages=numbers, skip=min(part.skip, len(numbers)))
        found[part.group].append(part)
    return found


_PLAIN = frozenset((int,))


def _layer_by_layer(
    kv: PagedKV, parts: Sequence[CopyPart], move: _Move, on_layer: Callable[[int, int], None] | None
) -> str | None:
    """Returns what went wrong, or ``None``: a page number that does not exist must not bring an engine down."""
    try:
        by_group = parts_by_group(parts, len(kv.groups))
    except ENGINE_ERRORS as error:
        return f"the numbers of pages: {error!r}"
    for group, (layers, mine) in enumerate(zip(kv.groups, by_group, strict=True)):
        if not mine:
            continue
        copies = _GroupCopies(mine, len(layers), move)
        for number, layer in enumerate(layers):
            try:
                copies.run(layer, number)
            except ENGINE_ERRORS as error:
                return f"the pages of layer {number}: {error!r}"
            if on_layer is not None:
                caught = Caught(in_generator=False)
                with caught:
                    on_layer(group, number)
                if caught.error is not None:
                    return f"on_layer({group}, {number}): {caught.error!r}"
    return None


class _GroupCopies:
    """The parts of one layer group, layer after layer."""

    def __init__(self, parts: Sequence[CopyPart], layers: int, move: _Move) -> None:
        self._parts, self._layers, self._move = parts, layers, move
        self._lowest = min(min(part.pages, default=0) for part in parts)
        self._highest = max(max(part.pages, default=0) for part in parts)
        self._page_bytes: int | None = None
        self._stretches: StretchCopies | None = None

    def run(self, layer: LayerPages, number: int) -> None:
        """Raises one of ``ENGINE_ERRORS``."""
        arrays = _page_arrays(layer)
        count = min(pages.shape[0] for pages in arrays)
        if not 0 <= self._lowest <= self._highest < count:
            raise LookupError(
                f"pages {self._lowest} to {self._highest}: the engine's memory has pages 0 to {count - 1}"
            )
        page_bytes = sum(pages[0].nbytes for pages in arrays)
        if self._page_bytes not in (None, page_bytes):  # where a layer begins in a slot follows from it
            raise LayoutError(
                f"its pages have {page_bytes} bytes, those of the first layer {self._page_bytes}"
            )
        self._page_bytes = page_bytes
        rows = _dense_rows(arrays)
        if rows is None:
            for part in self._parts:
                _move_part(arrays, number, part, self._move)
            return
        if self._stretches is None:
            self._stretches = StretchCopies(self._parts, self._layers, page_bytes)
        (self._stretches.offload if self._move is _gather else self._stretches.onboard)(rows, number)


def _dense_rows(arrays: Sequence[NDArray[Any]]) -> NDArray[Any] | None:
    """The pages of a layer as rows of bytes, a view; ``None`` where a page is not one stretch of memory."""
    if len(arrays) != 1 or not arrays[0].flags.c_contiguous:
        return None
    return arrays[0].reshape(arrays[0].shape[0], -1)


def _move_part(arrays: Sequence[NDArray[Any]], layer: int, part: CopyPart, move: _Move) -> None:
    """Moves one layer of one part. Its stretch of the slot holds page after page; a page of several arrays is theirs
    one after the other."""
    import numpy as np

    page_bytes = sum(pages[0].nbytes for pages in arrays)
    total = len(part.pages)
    start = layer * total * page_bytes
    stretch = np.frombuffer(part.slot, dtype=np.uint8, count=total * page_bytes, offset=start)
    rows = stretch.reshape(total, page_bytes)[part.skip :]
    at = 0
    for pages in arrays:
        size = pages[0].nbytes
        move(pages, part.pages[part.skip :], rows[:, at : at + size])
        at += size


def _gather(pages: NDArray[Any], ids: Sequence[int], rows: NDArray[Any]) -> None:
    import numpy as np

    for page, row in zip(ids, rows, strict=True):
        np.copyto(row.reshape(pages.shape[1:]), pages[page])


def _scatter(pages: NDArray[Any], ids: Sequence[int], rows: NDArray[Any]) -> None:
    import numpy as np

    for page, row in zip(ids, rows, strict=True):
        np.copyto(pages[page], row.reshape(pages.shape[1:]))


def _page_arrays(layer: LayerPages) -> list[NDArray[Any]]:
    """The layer's arrays as bytes, with the pages first."""
    import numpy as np

    return [np.moveaxis(_bytes_of(array), layer.axis, 0) for array in layer.arrays]


def _bytes_of(array: Any) -> NDArray[Any]:
    """A numpy view of the same memory whose elements are bytes. Raises ``LayoutError`` for what has none."""
    import numpy as np

    if not isinstance(array, np.ndarray):
        device = getattr(array, "device", None)
        if device is None or device.type != "cpu":
            raise LayoutError(
                f"{type(array).__name__} on {device}: HostCopier takes numpy arrays and CPU tensors"
            )
        import torch

        array = array.detach().view(torch.uint8).numpy()
    if array.itemsize > 1 and array.strides[-1] != array.itemsize:
        raise LayoutError(f"strides {array.strides}: the last dimension of a page must be contiguous")
    found: NDArray[Any] = array.view(np.uint8)
    return found
