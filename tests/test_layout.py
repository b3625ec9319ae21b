"""Layouts: parts and their sizes, masks, how many engine blocks a block takes, and what is refused."""

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tierkv.errors import LayoutError
from tierkv.layout import (
    MAX_PARTS,
    MIN_PART_BYTES,
    GroupKind,
    LayerGroup,
    Layout,
    engine_blocks_for,
)
from tierkv.units import KIB

FULL = LayerGroup("full", GroupKind.FULL, layers=4, page_bytes=16 * KIB, engine_block_tokens=16)
WINDOW = LayerGroup(
    "win", GroupKind.WINDOW, layers=6, page_bytes=8 * KIB, engine_block_tokens=32, window_tokens=100
)
STATE = LayerGroup("state", GroupKind.STATE, layers=2, page_bytes=64 * KIB, engine_block_tokens=64)
LATENT = LayerGroup(
    "latent", GroupKind.FULL, layers=8, page_bytes=18 * KIB, engine_block_tokens=16, replicated=True
)


def make(*groups: LayerGroup, **changes: Any) -> Layout:
    own: dict[str, Any] = {
        "layout_id": "t",
        "dtype": "bfloat16",
        "hash_tokens": 16,
        "groups": groups or (FULL,),
    }
    return Layout(**(own | changes))


def test_one_group_on_one_rank_is_one_part() -> None:
    layout = make()
    assert [(part.index, part.group, part.rank, part.payload_bytes) for part in layout.parts] == [
        (0, 0, 0, 64 * KIB)
    ]
    assert layout.block_tokens == 16
    assert layout.mask_of() == 1


def test_parts_go_by_group_and_rank_and_a_replicated_group_has_one() -> None:
    layout = make(FULL, WINDOW, LATENT, engine_blocks=4, tp_size=2)
    assert [(part.index, part.group, part.rank) for part in layout.parts] == [
        (0, 0, 0),
        (1, 0, 1),
        (2, 1, 0),
        (3, 1, 1),
        (4, 2, None),
    ]
    for group, rank, index in ((0, 0, 0), (0, 1, 1), (1, 0, 2), (1, 1, 3), (2, 0, 4), (2, 1, 4)):
        assert layout.part_index(group, rank) == index
    assert layout.mask_of() == 0b11111
    assert layout.mask_of([0]) == 0b10101
    assert layout.mask_of([1]) == 0b11010
    assert layout.mask_of([]) == 0b10000
    assert [layout.group_mask(group) for group in range(3)] == [0b00011, 0b01100, 0b10000]


def test_sizes_follow_from_pages() -> None:
    layout = make(FULL, WINDOW, STATE, engine_blocks=4)
    assert layout.block_tokens == 64
    assert [layout.pages_of(group) for group in range(3)] == [4, 2, 1]
    assert [layout.payload_bytes(group) for group in range(3)] == [
        4 * 4 * 16 * KIB,
        6 * 2 * 8 * KIB,
        2 * 64 * KIB,
    ]
    assert [part.payload_bytes for part in layout.parts] == [
        layout.payload_bytes(group) for group in range(3)
    ]


def test_ranks_multiply() -> None:
    layout = make(FULL, tp_size=2, pp_size=3, cp_size=2)
    assert layout.ranks == len(layout.parts) == 12


@pytest.mark.parametrize(
    ("window_tokens", "block_tokens", "blocks"),
    [(1, 16, 1), (16, 16, 1), (17, 16, 2), (32, 16, 2), (33, 16, 3), (100, 64, 2)],
)
def test_a_window_needs_the_blocks_that_hold_its_past(
    window_tokens: int, block_tokens: int, blocks: int
) -> None:
    group = replace(WINDOW, window_tokens=window_tokens, engine_block_tokens=16)
    assert make(group, engine_blocks=block_tokens // 16).trailing_blocks(0) == blocks


@given(window_tokens=st.integers(1, 300), n=st.integers(1, 5), p=st.integers(1, 30))
def test_the_trailing_blocks_hold_the_window_and_no_more(window_tokens: int, n: int, p: int) -> None:
    group = replace(WINDOW, window_tokens=window_tokens, engine_block_tokens=16)
    layout = make(group, engine_blocks=n)
    trailing = layout.trailing_blocks(0)
    assert trailing is not None
    position = p * layout.block_tokens
    oldest_needed = position - window_tokens  # by the last token before the position, computed again
    first_held = position - trailing * layout.block_tokens
    assert first_held <= oldest_needed
    assert oldest_needed < first_held + layout.block_tokens


def test_full_groups_need_everything_and_states_one() -> None:
    layout = make(FULL, STATE, engine_blocks=4)
    assert layout.trailing_blocks(0) is None
    assert layout.trailing_blocks(1) == 1


GROUPS = st.builds(
    LayerGroup,
    name=st.uuids().map(str),
    kind=st.sampled_from([GroupKind.FULL, GroupKind.STATE]),
    layers=st.integers(1, 80),
    page_bytes=st.integers(1, 20_000),
    engine_block_tokens=st.sampled_from([16, 32, 48, 64]),
    replicated=st.booleans(),
)


@given(groups=st.lists(GROUPS, min_size=1, max_size=4), min_part_bytes=st.integers(1, 4_000_000))
def test_n_is_the_smallest_that_makes_parts_large_enough(
    groups: list[LayerGroup], min_part_bytes: int
) -> None:
    n = engine_blocks_for(groups, 16, min_part_bytes)
    step = engine_blocks_for(groups, 16, 1)
    growing = [i for i, group in enumerate(groups) if group.kind is not GroupKind.STATE]

    def large_enough(count: int) -> bool:
        layout = make(*groups, engine_blocks=count)
        return all(layout.payload_bytes(group) >= min_part_bytes for group in growing)

    assert large_enough(n)
    assert n % step == 0
    assert n == step or not large_enough(n - step)


def test_n_of_real_models() -> None:
    # 32 layers, 8 heads of 128 in bfloat16, keys and values: 64 KiB a layer and block of 16 tokens.
    assert engine_blocks_for([LayerGroup("l", GroupKind.FULL, 32, 64 * KIB, 16)], 16) == 1
    # One latent of 576 numbers for each of 27 layers.
    mla = LayerGroup("mla", GroupKind.FULL, 27, 576 * 2 * 16, 16, replicated=True)
    assert engine_blocks_for([mla], 16) == 2
    # A small model: 30 layers, 3 heads of 64.
    small = LayerGroup("small", GroupKind.FULL, 30, 2 * 3 * 64 * 2 * 16, 16)
    assert engine_blocks_for([small], 16) == 2
    assert engine_blocks_for([STATE], 16) == 4
    assert MIN_PART_BYTES == 512 * KIB


@pytest.mark.parametrize(
    ("make_it", "message"),
    [
        (
            lambda: replace(FULL, layers=0),
            "layer group 'full': layers = 0: it must be an integer, at least 1",
        ),
        (lambda: replace(FULL, page_bytes=-1), "page_bytes = -1"),
        (lambda: replace(FULL, page_bytes=1.5), "page_bytes = 1.5"),
        (lambda: replace(FULL, engine_block_tokens=0), "engine_block_tokens = 0"),
        (lambda: replace(WINDOW, window_tokens=None), "a window group needs its size"),
        (lambda: replace(WINDOW, window_tokens=0), "window_tokens = 0"),
        (lambda: replace(FULL, window_tokens=8), "window_tokens is for window groups"),
        (lambda: make(groups=()), r"groups = \(\): a layout has at least one layer group"),
        (lambda: make(hash_tokens=0), "hash_tokens = 0: it must be an integer of at least 1"),
        (lambda: make(engine_blocks=0), "engine_blocks = 0"),
        (lambda: make(tp_size=0), "tp_size = 0"),
        (lambda: make(pp_size=-1), "pp_size = -1"),
        (lambda: make(cp_size=0.5), "cp_size = 0.5"),
        (lambda: make(FULL, FULL), "layer groups need different names, got"),
        (lambda: make(hash_tokens=12), "engine_block_tokens = 16 is no multiple of hash_tokens = 12"),
        (
            lambda: make(WINDOW),
            r"a block of 16 tokens does not hold whole engine blocks .*choose a multiple of 2",
        ),
        (lambda: make(STATE, engine_blocks=6), "choose a multiple of 4"),
        (lambda: make(tp_size=MAX_PARTS + 1), "64 parts: a family has at most 63"),
        (lambda: make(tp_size=2**63, pp_size=2**63), "ranks: a block is spread over at most 1024"),
        (lambda: make(LATENT, cp_size=2**63), "ranks: a block is spread over at most"),
        (lambda: make(*(replace(FULL, name=str(i)) for i in range(70))), "70 parts: a family has at most 63"),
    ],
)
def test_an_impossible_layout_is_refused(make_it: Any, message: str) -> None:
    with pytest.raises(LayoutError, match=message):
        make_it()


def test_as_many_parts_as_fit() -> None:
    assert make(tp_size=MAX_PARTS).mask_of() == 2**63 - 1


def test_a_rank_that_is_not_there_is_refused() -> None:
    layout = make(FULL, LATENT, tp_size=2)
    for rank in (-1, 2):
        with pytest.raises(LayoutError, match=f"rank = {rank}: this layout has ranks 0 to 1"):
            layout.part_index(0, rank)
        with pytest.raises(LayoutError, match="this layout has ranks 0 to 1"):
            layout.mask_of([0, rank])


def test_equal_layouts_are_equal_also_after_use() -> None:
    one, other = make(tp_size=2), make(tp_size=2)
    assert len(one.parts) == 2
    assert one == other
    assert hash(one) == hash(other)
