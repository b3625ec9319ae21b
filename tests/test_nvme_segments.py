"""The table of segments by itself: what threads could meet in it and no test of the tier brings about."""

from __future__ import annotations

from tierkv.testing.payloads import key_of
from tierkv.tiers.nvme_segments import Segment, SegmentTable
from tierkv.units import KIB

SLOT_BYTES = 256 * KIB


def table_of(*slots: int, slot_bytes: int = SLOT_BYTES) -> SegmentTable:
    table = SegmentTable()
    for count in slots:
        number = table.next_number()
        table.add(Segment(number, f"segment-{number}", -1, 4096 + count * slot_bytes, slot_bytes, count, 1))
    return table


def store(table: SegmentTable, number: int) -> tuple[Segment, int]:
    place = table.take(SLOT_BYTES)
    assert place is not None
    table.bind(*place, key_of(number), 10 + number, 100, 0)
    table.let_go(*place)
    return place


def test_a_block_stored_again_while_its_segment_is_given_up_stays() -> None:
    table = table_of(2, 2)
    old, slot = store(table, 1)
    table.retire(old)
    assert table.find(key_of(1)) is None
    new = store(table, 1)
    assert new[0] is not old
    table.unbind(old, slot)
    assert table.find(key_of(1)) == new
    assert table.blocks == 1


def test_a_slot_is_free_when_the_last_hold_goes() -> None:
    table = table_of(1)
    place = store(table, 1)
    table.hold(*place)
    table.hold(*place)
    table.unbind(*place)
    assert table.take(SLOT_BYTES) is None
    table.let_go(*place)
    assert table.take(SLOT_BYTES) is None
    assert not table.empties
    table.let_go(*place)
    assert table.empties
    assert table.empty_bytes == table.file_bytes
    assert table.take(SLOT_BYTES) == place
    assert table.empty_bytes == 0


def test_low_segments_fill_first_so_that_high_ones_fall_empty() -> None:
    table = table_of(2, 2, 2)
    places = [store(table, number) for number in range(6)]
    assert [segment.number for segment, _ in places] == [1, 1, 2, 2, 3, 3]
    for segment, slot in (places[5], places[0]):
        table.hold(segment, slot)
        table.unbind(segment, slot)
        table.let_go(segment, slot)
    assert store(table, 9)[0].number == 1


def test_used_and_free_make_the_whole() -> None:
    table = table_of(5, 3)
    for number in range(6):
        store(table, number)
    free = sum(len(segment.free) for segment in table.segments.values())
    assert table.blocks + free == table.slots == 8
    assert table.live_bytes == 6 * SLOT_BYTES


def test_a_class_goes_with_its_last_segment() -> None:
    table = table_of(1)
    near_bytes = SLOT_BYTES - 4 * KIB
    assert table.class_for(near_bytes) == SLOT_BYTES
    [segment] = table.segments.values()
    table.retire(segment)
    assert table.class_for(near_bytes) == near_bytes
    assert (table.take(SLOT_BYTES), table.slots, table.file_bytes, table.empty_bytes) == (None, 0, 0, 0)
