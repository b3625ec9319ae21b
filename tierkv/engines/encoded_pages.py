"""Blocks that are encoded where the engine's bytes are, before they leave for host RAM: so about half of the bytes are
copied, and host RAM keeps twice as many blocks.

A block of such a namespace *is* its encoded form, which has a fixed size. Nothing behind the engine knows of it: to
the copier, the store, its tiers and their checksums it is a block like any other, and no edge encodes it again, for
its layout declares no inside. In every layer it is one page:

    the scales of each segment | a byte for each number, in the order of the page | zeros up to 16 bytes

The numbers are those of ``tierkv.codec_scaled``, without its front, which the namespace stands for, and without its
exceptions: a block that holds what is not finite, or what no scale reaches, has no such form and is not stored.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from tierkv.copier import LayerPages, PagedKV
from tierkv.engines.encoded_rows import NUMBERS, GpuRows, HostRows, Rows
from tierkv.errors import ConfigError, LayoutError
from tierkv.layout import ITEM_BYTES, GroupKind, LayerGroup, Layout, Segment
from tierkv.units import align_up

if TYPE_CHECKING:
    from torch import Tensor

PAGE_STEP_BYTES = 16
"""Encoded pages are a multiple of this, so that each begins where kernels and copy engines like it."""
FORM = 1
"""Changes whenever the same numbers would lie otherwise: it is part of the layout's name."""


@dataclass(frozen=True)
class Place:
    """Where one segment lies in an encoded page."""

    segment: Segment
    scales: slice
    numbers: slice


@dataclass(frozen=True)
class PageForm:
    """What the encoded page of one layer is made of."""

    places: tuple[Place, ...]
    page_bytes: int


@dataclass(frozen=True)
class Encoded:
    """Some blocks, encoded: page i of ``kv`` is the i-th of them."""

    kv: PagedKV
    whole: int
    """How many leading blocks have this form: the next one holds what it cannot hold."""


@dataclass
class EncodedCounts:
    """Blocks, since the start."""

    encoded: int = 0
    refused: int = 0
    """Not encoded, or behind one that was not."""


def form_of(codec: str, group: LayerGroup) -> PageForm:
    """The scales of all segments, then the numbers of all."""
    sizes = [NUMBERS[codec].scale_bytes(segment) for segment in group.inside]
    places, scales_at, numbers_at = [], 0, sum(sizes)
    for segment, size in zip(group.inside, sizes, strict=True):
        numbers = slice(numbers_at, numbers_at + segment.numbers)
        places.append(Place(segment, slice(scales_at, scales_at + size), numbers))
        scales_at, numbers_at = scales_at + size, numbers.stop
    return PageForm(tuple(places), align_up(numbers_at, PAGE_STEP_BYTES))


def encoded_layout(layout: Layout, codec: str) -> Layout:
    """What blocks of this layout are once they are encoded. Raises ``ConfigError`` for a codec that has no such form,
    ``LayoutError`` for pages whose inside is not declared, or of which a block has several."""
    if codec not in NUMBERS:
        raise ConfigError(
            "lossy_codec", codec, f"encoded where the bytes are, it is one of {sorted(NUMBERS)}"
        )
    if layout.dtype not in ITEM_BYTES:
        raise LayoutError(f"numbers of {layout.dtype}: {codec} encodes those of {sorted(ITEM_BYTES)}")
    for number, group in enumerate(layout.groups):
        if not group.inside or group.kind is GroupKind.STATE or layout.pages_of(number) != 1:
            raise LayoutError(
                f"layer group {group.name!r}: to be encoded, a block is one page whose inside is declared"
            )
    groups = [
        replace(group, page_bytes=form_of(codec, group).page_bytes, inside=()) for group in layout.groups
    ]
    return replace(
        layout,
        layout_id=f"{layout.layout_id}/{codec}-pages-{FORM}",
        dtype=f"{codec} of {layout.dtype}",
        groups=tuple(groups),
    )


class PageCodec:
    """Encodes and decodes the pages of one layout, torch tensors on one device. Thread-safe.

    What it does on a GPU is handed to torch's current stream: it comes after what the engine has given to that stream,
    and before what the engine gives to it from then on. It takes as much memory there as the encoded blocks have.
    """

    def __init__(self, layout: Layout, codec: str) -> None:
        self.layout = encoded_layout(layout, codec)
        """Of the blocks as the store has them."""
        self._codec = codec
        self._dtype = layout.dtype
        self._forms = [form_of(codec, group) for group in layout.groups]
        self.counts = EncodedCounts()
        self._lock = threading.Lock()
        self._by_kind: dict[str, Rows] = {}

    def blank(self, blocks: int, device: Any) -> PagedKV:
        """Pages for that many encoded blocks, their memory not yet written: onboard into them, then ``decode``. The
        layers of a block lie side by side, as in a slot, so that a block is copied in one piece."""
        import torch

        made = []
        for group, form in zip(self.layout.groups, self._forms, strict=True):
            whole = torch.empty((blocks, group.layers, form.page_bytes), dtype=torch.uint8, device=device)
            made.append(tuple(LayerPages((whole[:, layer],)) for layer in range(group.layers)))
        return PagedKV(tuple(made))

    def encode(self, kv: PagedKV, first: int, blocks: int) -> Encoded:
        """The pages ``first`` to ``first + blocks`` of an engine. When this returns, nothing reads the engine's pages
        any more, and all is encoded: the host has seen which blocks are whole. Raises ``LayoutError``, also for pages
        that there are not, and ``RuntimeError`` where the device has no memory left."""
        _check_span(kv, range(first, first + blocks))
        if not blocks:
            return Encoded(self.blank(0, _device_of(kv)), 0)
        whole = 0
        try:
            found = self._encode(kv, first, blocks)
            whole = found.whole
        finally:
            with self._lock:
                self.counts.encoded += whole
                self.counts.refused += blocks - whole
        return found

    def prepare(self, kv: PagedKV) -> PagedKV:
        """Encodes the first page, whatever it holds, so that what has to be compiled is, and returns what encoded pages
        look like. Raises as ``encode`` does, and ``MissingDependency`` for a GPU without CuPy."""
        return self._encode(kv, 0, 1).kv

    def _encode(self, kv: PagedKV, first: int, blocks: int) -> Encoded:
        import torch

        device = _device_of(kv)
        made = self.blank(blocks, device)
        wrong = torch.zeros(blocks, dtype=torch.bool, device=device)
        with torch.no_grad():
            for form, layers, targets in zip(self._forms, kv.groups, made.groups, strict=True):
                for layer, target in zip(layers, targets, strict=True):
                    wrong |= self._encode_layer(form, layer, slice(first, first + blocks), target.arrays[0])
        found = wrong.tolist()
        return Encoded(made, found.index(True) if True in found else blocks)

    def decode(self, encoded: PagedKV, kv: PagedKV, wanted: Sequence[range]) -> None:
        """Fills an engine's pages: page i from the i-th encoded block, for each layer group those of a range. Raises as
        ``encode`` does."""
        import torch

        for span, *its in zip(wanted, encoded.groups, kv.groups, strict=True):
            if len(span):
                for layers in its:
                    _check_span(PagedKV((layers,)), span)
        with torch.no_grad():
            for form, sources, layers, span in zip(
                self._forms, encoded.groups, kv.groups, wanted, strict=True
            ):
                if not len(span):
                    continue
                for source, layer in zip(sources, layers, strict=True):
                    self._decode_layer(form, source.arrays[0], layer, slice(span.start, span.stop))

    def _encode_layer(self, form: PageForm, layer: LayerPages, chosen: slice, target: Tensor) -> Tensor:
        """Returns which of the blocks have no such form."""
        import torch

        blocks = target.shape[0]
        wrong = torch.zeros(blocks, dtype=torch.bool, device=target.device)
        rows_of = self._rows(target.device.type)
        end = 0
        for array, places in _places_of(form, layer, self._dtype):
            pages = array.movedim(layer.axis, 0)[chosen].reshape(blocks, -1)
            at = 0
            for place in places:
                size, outer = place.segment.numbers, place.segment.outer
                values = pages[:, at : at + size].reshape(
                    blocks * outer, place.segment.tokens, place.segment.inner
                )
                made = rows_of.encode(values.contiguous())
                target[:, place.scales] = made.scales.reshape(blocks, -1)
                target[:, place.numbers] = made.kept.reshape(blocks, -1)
                wrong |= made.wrong.reshape(blocks, outer).any(dim=1)
                at, end = at + size, place.numbers.stop
        target[:, end:] = 0  # equal blocks are equal bytes
        return wrong

    def _decode_layer(self, form: PageForm, source: Tensor, layer: LayerPages, chosen: slice) -> None:
        import torch

        encoded = source[chosen]
        blocks = encoded.shape[0]
        rows_of = self._rows(source.device.type)
        for array, places in _places_of(form, layer, self._dtype):
            pieces = []
            for place in places:
                segment = place.segment
                kept = _own(encoded[:, place.numbers]).reshape(-1, segment.tokens, segment.inner)
                scales = _own(encoded[:, place.scales]).reshape(blocks * segment.outer, -1)
                pieces.append(rows_of.decode(kept, scales, array.dtype).reshape(blocks, -1))
            pages = array.movedim(layer.axis, 0)[chosen]
            pages.copy_((pieces[0] if len(pieces) == 1 else torch.cat(pieces, dim=1)).reshape(pages.shape))

    def _rows(self, kind: str) -> Rows:
        with self._lock:
            if kind not in self._by_kind:
                self._by_kind[kind] = GpuRows(self._codec) if kind == "cuda" else HostRows(self._codec)
            return self._by_kind[kind]


def _own(piece: Tensor) -> Tensor:
    """The same bytes at the beginning of memory of their own: kernels read several at once."""
    import torch

    return piece.clone(memory_format=torch.contiguous_format)


def _check_span(kv: PagedKV, span: range) -> None:
    """Raises ``LayoutError`` unless all arrays have these pages: a slice of torch's counts negative ones from the end
    and leaves out what there is not."""
    counts = [array.shape[layer.axis] for group in kv.groups for layer in group for array in layer.arrays]
    pages = min(counts, default=0)
    if not 0 <= span.start <= span.stop <= pages or span.step != 1:
        raise LayoutError(f"pages {span.start} to {span.stop - 1}: there are pages 0 to {pages - 1}")


def _device_of(kv: PagedKV) -> Any:
    """Raises ``LayoutError`` for a model that is spread over several."""
    devices = {array.device for group in kv.groups for layer in group for array in layer.arrays}
    if len(devices) != 1:
        raise LayoutError(f"pages on {sorted(map(str, devices))}: they must be on one device to be encoded")
    return devices.pop()


def _places_of(form: PageForm, layer: LayerPages, dtype: str) -> Iterator[tuple[Tensor, list[Place]]]:
    """The arrays of a layer with what each has of a page. Raises ``LayoutError`` for other numbers than were declared
    and for an array in which a segment would not end."""
    places = list(form.places)
    for array in layer.arrays:
        if str(array.dtype) != f"torch.{dtype}":
            raise LayoutError(f"pages of {array.dtype}, declared {dtype}")
        left = array.numel() // array.shape[layer.axis] if array.shape[layer.axis] else 0
        mine: list[Place] = []
        while places and left >= places[0].segment.numbers:
            left -= places[0].segment.numbers
            mine.append(places.pop(0))
        if left:
            raise LayoutError(f"an array of {tuple(array.shape)}: its pages are not whole segments")
        if mine:
            yield array, mine
    if places:
        raise LayoutError(f"{len(places)} segments of a page are in no array")
