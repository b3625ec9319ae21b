"""Copies of pages that lie at equal distances are put together; what they bring is what page by page would bring."""

from __future__ import annotations

import random
from collections.abc import Sequence

import numpy as np
import pytest
from numpy.typing import NDArray

from tierkv.copier import CopyPart
from tierkv.stretch_copies import StretchCopies

LAYERS, PAGES, PAGE_BYTES, SLOTS = 3, 24, 64, 16

Memory = NDArray[np.uint8]
NUMBERS = {
    "ascending": [4, 5, 6, 7, 8],
    "descending": [9, 8, 7, 6],
    "down to the first": [3, 2, 1, 0],
    "every second": [2, 4, 6, 8],
    "one": [7],
    "two": [9, 3],
    "a gap": [1, 2, 3, 7, 8, 20],
    "there and back": [5, 6, 7, 6, 5],
    "the same again": [5, 5, 5, 6, 7],
}


def _parts(
    slots: Memory, order: Sequence[int], numbers: Sequence[int], pages: int = 1, skip: int = 0
) -> list[CopyPart]:
    """Block by block, ``pages`` of the numbers each, into the slots in that order."""
    blocks = [tuple(numbers[at : at + pages]) for at in range(0, len(numbers), pages)]
    return [
        CopyPart(0, memoryview(slots[slot]), its, min(skip, len(its)))
        for slot, its in zip(order, blocks, strict=False)
    ]


def _page_by_page(memory: Memory, slots: Memory, parts: Sequence[CopyPart], *, into_slots: bool) -> None:
    for part in parts:
        slot = np.frombuffer(part.slot, np.uint8)
        for layer in range(LAYERS):
            for place in range(part.skip, len(part.pages)):
                start = (layer * len(part.pages) + place) * PAGE_BYTES
                if into_slots:
                    slot[start : start + PAGE_BYTES] = memory[layer, part.pages[place]]
                else:
                    memory[layer, part.pages[place]] = slot[start : start + PAGE_BYTES]


def _memory(seed: int, pages_a_block: int) -> tuple[Memory, Memory]:
    dice = np.random.default_rng(seed)
    memory = dice.integers(0, 256, (LAYERS, PAGES, PAGE_BYTES), np.uint8)
    slots = dice.integers(0, 256, (SLOTS, LAYERS * pages_a_block * PAGE_BYTES + 32), np.uint8)
    return memory, slots


def _check(numbers: Sequence[int], order: Sequence[int], pages: int = 1, skip: int = 0) -> None:
    for into_slots in (True, False):
        ours, our_slots = _memory(1, pages)
        wanted, wanted_slots = ours.copy(), our_slots.copy()
        copies = StretchCopies(_parts(our_slots, order, numbers, pages, skip), LAYERS, PAGE_BYTES)
        for layer in range(LAYERS):
            (copies.offload if into_slots else copies.onboard)(ours[layer], layer)
        _page_by_page(
            wanted, wanted_slots, _parts(wanted_slots, order, numbers, pages, skip), into_slots=into_slots
        )
        assert np.array_equal(ours, wanted)
        assert np.array_equal(our_slots, wanted_slots)


@pytest.mark.parametrize("slots", ["up", "down", "every third", "anywhere"])
@pytest.mark.parametrize("numbers", NUMBERS.values(), ids=NUMBERS.keys())
def test_runs_of_pages_and_slots_bring_what_page_by_page_brings(numbers: list[int], slots: str) -> None:
    order = {
        "up": list(range(SLOTS)),
        "down": list(range(SLOTS))[::-1],
        "every third": list(range(0, SLOTS, 3)),
        "anywhere": random.Random(3).sample(range(SLOTS), SLOTS),
    }[slots]
    _check(numbers, order)


@pytest.mark.parametrize("skip", [0, 1, 2, 3])
def test_blocks_of_several_pages_of_which_the_first_ones_are_left_alone(skip: int) -> None:
    _check([3, 4, 5, 6, 7, 8, 20, 19, 18], [2, 3, 4], pages=3, skip=skip)


def test_any_pages_in_any_order() -> None:
    dice = random.Random(5)
    for _ in range(200):
        count = dice.randint(1, 12)
        numbers = (
            dice.choices(range(PAGES), k=count) if dice.random() < 0.3 else dice.sample(range(PAGES), count)
        )
        numbers.sort(reverse=dice.random() < 0.5)
        # Each block has its own slot: two writers into one would leave the order to chance.
        _check(list(dict.fromkeys(numbers)), dice.sample(range(SLOTS), SLOTS), pages=dice.randint(1, 3))


def test_blocks_with_different_numbers_of_pages_are_no_run() -> None:
    memory, slots = _memory(2, 4)
    views = [memoryview(slots[slot]) for slot in range(3)]
    parts = [CopyPart(0, views[0], (1,)), CopyPart(0, views[1], (2, 3)), CopyPart(0, views[2], (4,))]
    copies = StretchCopies(parts, LAYERS, PAGE_BYTES)
    wanted, wanted_slots = memory.copy(), slots.copy()
    for layer in range(LAYERS):
        copies.offload(memory[layer], layer)
    its = [CopyPart(0, memoryview(wanted_slots[slot]), part.pages) for slot, part in enumerate(parts)]
    _page_by_page(wanted, wanted_slots, its, into_slots=True)
    assert np.array_equal(slots, wanted_slots)


def test_neighbours_are_one_copy() -> None:
    _, slots = _memory(3, 1)
    copies = StretchCopies(_parts(slots, range(SLOTS), range(12)), LAYERS, PAGE_BYTES)
    assert len(copies._runs) == 1


def test_a_slot_that_is_too_small_is_refused_before_a_byte_is_moved() -> None:
    small = np.zeros(LAYERS * PAGE_BYTES - 1, np.uint8)
    with pytest.raises(ValueError, match="191 bytes for 3 layers of 64 bytes"):
        StretchCopies([CopyPart(0, memoryview(small), (0,))], LAYERS, PAGE_BYTES)
