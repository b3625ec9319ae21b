"""Copies between pages and slots that are plain stretches of memory: as few and as long as they can be.

Engines hand out pages, and arenas slots, mostly one beside the other. Pages at equal distances from each other whose
slots lie at equal distances too are one copy for each layer and not one for each page: numpy takes about as long to
begin a copy as to make one of 16 KiB, and holds the interpreter's lock while it begins.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import numpy as np
from numpy.lib.stride_tricks import as_strided

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Bytes = NDArray[np.uint8]


class Part(Protocol):
    """What it takes of a ``tierkv.copier.CopyPart``."""

    @property
    def slot(self) -> Any: ...

    @property
    def pages(self) -> tuple[int, ...]: ...

    @property
    def skip(self) -> int: ...


class _Page(NamedTuple):
    number: int
    slot: Bytes
    """From where the page of the first layer lies on."""
    address: int
    layer_bytes: int
    """From one layer to the next in this slot."""


class _Run(NamedTuple):
    pages: slice
    """Of the engine's pages, in the order of the slots."""
    stretches: Bytes
    """[layers, pages of the run, bytes of a page]: a view of all slots of the run."""


class StretchCopies:
    """The same parts for layer after layer. The views of the slots must live as long as this. One thread at a time."""

    def __init__(self, parts: Sequence[Part], layers: int, page_bytes: int) -> None:
        """Raises ``ValueError`` when a slot is too small for its pages."""
        self._runs = _runs_of(_pages_of(parts, layers, page_bytes), layers, page_bytes)

    def offload(self, rows: NDArray[Any], layer: int) -> None:
        """``rows``: the layer's pages, [pages, bytes of a page], uint8."""
        for run in self._runs:
            np.copyto(run.stretches[layer], rows[run.pages])

    def onboard(self, rows: NDArray[Any], layer: int) -> None:
        for run in self._runs:
            np.copyto(rows[run.pages], run.stretches[layer])


def _pages_of(parts: Sequence[Part], layers: int, page_bytes: int) -> list[_Page]:
    found = []
    for part in parts:
        slot = np.frombuffer(part.slot, np.uint8)
        layer_bytes = len(part.pages) * page_bytes
        if layers * layer_bytes > slot.size:
            raise ValueError(f"a slot of {slot.size} bytes for {layers} layers of {layer_bytes} bytes")
        address = slot.__array_interface__["data"][0]
        for place in range(part.skip, len(part.pages)):
            start = place * page_bytes
            found.append(_Page(part.pages[place], slot[start:], address + start, layer_bytes))
    return found


def _runs_of(pages: Sequence[_Page], layers: int, page_bytes: int) -> list[_Run]:
    runs = []
    start = 0
    while start < len(pages):
        stop = _end_of_run(pages, start)
        first, count = pages[start], stop - start
        step = pages[start + 1].number - first.number if count > 1 else 1
        distance = pages[start + 1].address - first.address if count > 1 else 0
        # Each page of it was found inside a slot, so all that the view reaches is memory of the slots.
        shape, strides = (layers, count, page_bytes), (first.layer_bytes, distance, 1)
        runs.append(_Run(_slice(first.number, step, count), as_strided(first.slot, shape, strides)))
        start = stop
    return runs


def _end_of_run(pages: Sequence[_Page], start: int) -> int:
    """Behind the last page that is as far from the one before as the second is from the first."""
    if start + 1 == len(pages):
        return start + 1
    first, second = pages[start], pages[start + 1]
    step, distance = second.number - first.number, second.address - first.address
    if not step or second.layer_bytes != first.layer_bytes:
        return start + 1
    stop = start + 2
    while stop < len(pages):
        before, this = pages[stop - 1], pages[stop]
        if (
            this.number - before.number != step
            or this.address - before.address != distance
            or this.layer_bytes != first.layer_bytes
        ):
            break
        stop += 1
    return stop


def _slice(first: int, step: int, count: int) -> slice:
    stop = first + count * step
    return slice(first, stop if stop >= 0 else None, step)
