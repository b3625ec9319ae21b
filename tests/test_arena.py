"""The arena: slots never overlap, sizes share it, and what is given back is whole again."""

from __future__ import annotations

import fcntl
import itertools
import mmap
import os
import random

import pytest

from tierkv.arena import Arena, address_of
from tierkv.errors import ConfigError, HandleError
from tierkv.ids import Slot
from tierkv.testing.payloads import check, fill, key_of
from tierkv.units import ALIGN_BYTES, KIB, MIB


def make(regions: int = 4, region_bytes: int = 64 * KIB, **options: bool) -> Arena:
    return Arena(regions * region_bytes, region_bytes, **options)


def take(arena: Arena, count: int, slot_bytes: int) -> list[Slot]:
    slots = arena.reserve(count, slot_bytes)
    assert slots is not None
    return slots


def test_slots_are_aligned_disjoint_and_inside() -> None:
    arena = make()
    slots = take(arena, 10, 5000) + take(arena, 3, 20_000)
    spans = sorted((arena.offset(slot), arena.offset(slot) + arena.stride_of(slot)) for slot in slots)
    assert all(end <= start for (_, end), (start, _) in itertools.pairwise(spans))
    assert spans[0][0] >= 0
    assert spans[-1][1] <= arena.capacity_bytes
    for slot in slots:
        view = arena.view(slot)
        assert len(view) == arena.stride_of(slot)
        assert address_of(view) % ALIGN_BYTES == 0
    views = [arena.view(slot) for slot in slots]
    for i, view in enumerate(views):
        fill(view, key_of(i))
    for i, view in enumerate(views):
        check(view, key_of(i))
    del view, views
    arena.close()


def test_reserve_is_all_or_nothing() -> None:
    arena = make(regions=2)
    assert arena.reserve(33, 4096) is None
    assert arena.used_bytes == 0
    assert len(take(arena, 32, 4096)) == 32
    assert arena.used_bytes == arena.capacity_bytes
    assert arena.reserve(1, 1) is None


def test_reserve_of_nothing() -> None:
    arena = make()
    assert arena.reserve(0, 4096) == []
    assert arena.used_bytes == 0


def test_d16_an_oversized_block_is_refused_with_the_way_out() -> None:
    arena = make(region_bytes=64 * KIB)
    with pytest.raises(
        ConfigError, match=r"host\.region.*does not fit; give host.region at least 69632 bytes"
    ):
        arena.reserve(1, 64 * KIB + 1)
    assert arena.stride_for(64 * KIB) == 64 * KIB


@pytest.mark.parametrize(
    ("capacity", "region"), [(MIB, 4000), (MIB, 4097), (MIB, 0), (4096, 8192), (0, 4096)]
)
def test_d29_impossible_sizes_are_refused(capacity: int, region: int) -> None:
    with pytest.raises(ConfigError):
        Arena(capacity, region)


def test_what_does_not_make_a_region_is_not_promised() -> None:
    assert Arena(10 * 4096 + 4095, 2 * 4096).capacity_bytes == 10 * 4096


def test_an_empty_region_is_carved_for_another_size() -> None:
    arena = make(regions=2)
    small = take(arena, 32, 4096)
    assert arena.reserve(1, 64 * KIB) is None
    first_region = [slot for slot in small if arena.region_of(slot) == 0]
    arena.release(first_region[:-1])
    assert arena.reserve(1, 64 * KIB) is None
    assert arena.free_slots(64 * KIB) == 0
    arena.release(first_region[-1:])
    assert arena.free_slots(64 * KIB) == 1
    [large] = take(arena, 1, 64 * KIB)
    assert arena.region_of(large) == 0
    assert arena.free_slots(4096) == 0


def test_d16_mixed_sizes_ten_thousand_steps_then_a_slot_of_full_size() -> None:
    """Whatever was carved in between, an arena that is empty again takes the largest slots there are."""
    dice = random.Random(16)
    arena = make(regions=6)
    out: list[Slot] = []
    for _ in range(10_000):
        if out and dice.random() < 0.5:
            slot = out.pop(dice.randrange(len(out)))
            arena.release([slot])
        else:
            count, size = dice.randint(1, 4), dice.choice([1, 4096, 4097, 12_000, 30_000, 64 * KIB])
            free = arena.free_slots(size)
            slots = arena.reserve(count, size)
            assert (slots is not None) == (free >= count)
            out += slots or []
        assert len(set(out)) == len(out)
    assert arena.used_bytes == sum(arena.stride_of(slot) for slot in out)
    arena.release(out)
    assert arena.used_bytes == 0
    assert len(take(arena, 6, 64 * KIB)) == 6


def test_a_slot_cannot_be_given_back_to_an_empty_region() -> None:
    arena = make()
    slots = take(arena, 1, 4096)
    arena.release(slots)
    with pytest.raises(HandleError, match="twice"):
        arena.release(slots)


def test_slots_of_a_region_are_all_its_slots() -> None:
    arena = make()
    slots = take(arena, 32, 4096)
    assert {slot for slot in slots if arena.region_of(slot) == 0} == set(arena.slots_of_region(0))
    assert len(arena.slots_of_region(3)) == 0


@pytest.mark.parametrize("memfd", [False, True])
def test_populate_changes_nothing_that_is_there(memfd: bool) -> None:
    arena = make(memfd=memfd)
    slots = take(arena, 8, 4096)
    for i, slot in enumerate(slots):
        fill(arena.view(slot), key_of(i))
    assert arena.populate(lambda: False) in (0, arena.capacity_bytes)  # 0: a kernel that cannot
    for i, slot in enumerate(slots):
        check(arena.view(slot), key_of(i))
    arena.close()


def test_populate_stops_when_it_is_told() -> None:
    arena = make()
    assert arena.populate(lambda: True) == 0
    arena.close()


def test_d26_a_memfd_has_its_size_for_good() -> None:
    arena = make(memfd=True)
    assert arena.fd is not None
    assert os.fstat(arena.fd).st_size == arena.capacity_bytes
    for size in (0, arena.capacity_bytes + 4096):
        with pytest.raises(PermissionError):
            os.ftruncate(arena.fd, size)
    with pytest.raises(PermissionError):
        fcntl.fcntl(arena.fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_WRITE)
    arena.close()


def test_d15_the_table_of_slots_has_one_writer() -> None:
    """A process that is served from it could tell others that a slot is still what it was."""
    arena = make(memfd=True)
    fd = arena.table.fd
    assert fd is not None
    size_bytes = os.fstat(fd).st_size
    with pytest.raises(PermissionError):
        mmap.mmap(fd, size_bytes)
    with pytest.raises(PermissionError):
        os.pwrite(fd, b"x", 0)
    with mmap.mmap(fd, size_bytes, prot=mmap.PROT_READ) as other:
        before = other[:]
        take(arena, 1, 4096)
        assert other[:] != before, "what the owner writes is seen"
    for size in (0, size_bytes + 4096):
        with pytest.raises(PermissionError):
            os.ftruncate(fd, size)
    with pytest.raises(PermissionError):
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_WRITE)
    arena.close()


def test_another_mapping_of_the_memfd_sees_the_slots() -> None:
    arena = make(memfd=True)
    [slot] = take(arena, 1, 4096)
    fill(arena.view(slot), key_of(7))
    assert arena.fd is not None
    with mmap.mmap(arena.fd, arena.capacity_bytes, access=mmap.ACCESS_READ) as other:
        start = arena.offset(slot)
        check(other[start : start + 4096], key_of(7))
    arena.close()


def test_a_view_that_outlives_the_arena_keeps_its_bytes() -> None:
    arena = make(memfd=True)
    [slot] = take(arena, 1, 4096)
    view = arena.view(slot)
    fill(view, key_of(1))
    arena.close()
    check(view, key_of(1))
    assert arena.fd is None
