"""The contract of a slot tier. Subclass ``SlotTierContract`` in your tests; see ``docs/testing.md``.

    class TestMySlots(SlotTierContract):
        def make_tier(self): return MySlots(self.capacity_bytes)
        def close_tier(self, tier): tier.close()
        def used_and_free_bytes(self, tier): return tier.used_bytes, tier.free_bytes

A slot counts with the whole length of its view; what is not in use is free, also where it is not carved yet.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import pairwise
from typing import Any

import numpy as np
import pytest

from tierkv.errors import ConfigError, HandleError
from tierkv.ids import Slot
from tierkv.testing.payloads import check, fill, key_of, poison
from tierkv.testing.threads import run_together
from tierkv.tier import SlotTier
from tierkv.units import ALIGN_BYTES, KIB, MIB, align_up


class SlotTierContract:
    """What the store relies on. Each test runs on a tier of its own."""

    capacity_bytes = 8 * MIB
    """Of the tier that ``make_tier`` makes: room for two slots of each size at once."""
    slot_sizes = (4096, 5000, 64 * KIB, 100_001, MIB)
    """Sizes to mix, each at most the largest that the tier takes; the last one is the full-size one."""
    operations = 10_000
    patience_s = 60.0

    # ---- what a subclass gives

    def make_tier(self) -> SlotTier:
        """A new tier of ``capacity_bytes`` with all of its slots free."""
        raise NotImplementedError("give the contract a tier: override make_tier")

    def close_tier(self, tier: Any) -> None:
        """Gives back what ``make_tier`` took."""

    def used_and_free_bytes(self, tier: Any) -> tuple[int, int]:
        raise NotImplementedError("override used_and_free_bytes")

    # ---- tools

    @contextmanager
    def running(self, tier: SlotTier) -> Iterator[SlotTier]:
        try:
            yield tier
        finally:
            self.close_tier(tier)

    @pytest.fixture
    def tier(self) -> Iterator[SlotTier]:
        with self.running(self.make_tier()) as tier:
            yield tier

    def reserve(self, tier: SlotTier, count: int, slot_bytes: int) -> list[Slot]:
        slots = tier.reserve(count, slot_bytes)
        assert slots is not None, f"no room for {count} slots of {slot_bytes} bytes"
        assert len(slots) == count
        return slots

    def fill_up(self, tier: SlotTier, slot_bytes: int) -> list[Slot]:
        """Reserves one slot after the other until there is no more room."""
        slots: list[Slot] = []
        while (more := tier.reserve(1, slot_bytes)) is not None:
            slots += more
            assert len(slots) <= self.capacity_bytes // ALIGN_BYTES, "the tier never says that it is full"
        return slots

    def check_accounts(self, tier: SlotTier, held: Sequence[Slot]) -> None:
        used, free = self.used_and_free_bytes(tier)
        assert used + free == self.capacity_bytes, f"used {used} + free {free} is not {self.capacity_bytes}"
        assert used == sum(len(tier.view(slot)) for slot in held), f"{used} bytes used by {len(held)} slots"

    # ---- one slot

    @pytest.mark.parametrize("slot_bytes", [1, 511, 4095, 4096, 4097, 64 * KIB, 100_001])
    def test_views_are_whole_pages_on_a_page_boundary(self, tier: SlotTier, slot_bytes: int) -> None:
        for slot in self.reserve(tier, 3, slot_bytes):
            view = tier.view(slot)
            assert len(view) >= slot_bytes
            assert len(view) % ALIGN_BYTES == 0
            assert _address(view) % ALIGN_BYTES == 0
            assert not view.readonly
            assert view.format == "B"
            assert view.contiguous
            assert _address(tier.view(slot)) == _address(view), "a second view lies elsewhere"

    def test_no_slots(self, tier: SlotTier) -> None:
        assert tier.reserve(0, 4096) == []
        tier.release([])
        self.check_accounts(tier, [])

    # ---- many slots

    def test_views_are_disjoint(self, tier: SlotTier) -> None:
        slots = [slot for size in self.slot_sizes for slot in self.reserve(tier, 2, size)]
        assert len(set(slots)) == len(slots)
        _check_disjoint(tier, slots)
        for slot in slots:
            fill(tier.view(slot), key_of(slot))
        for slot in slots:
            check(tier.view(slot), key_of(slot))

    def test_d16_reserve_takes_all_or_nothing(self, tier: SlotTier) -> None:
        slot_bytes = self.slot_sizes[0]
        most = len(self.fill_up(tier, slot_bytes))
        with self.running(self.make_tier()) as fresh:
            assert fresh.reserve(most + 1, slot_bytes) is None
            self.check_accounts(fresh, [])
            slots = self.reserve(fresh, most, slot_bytes)
            self.check_accounts(fresh, slots)
            assert fresh.reserve(1, slot_bytes) is None
            fresh.release(slots[:1])
            assert fresh.reserve(2, slot_bytes) is None
            self.check_accounts(fresh, slots[1:])
            self.reserve(fresh, 1, slot_bytes)

    def test_d16_oversize_is_refused_and_harms_nothing(self, tier: SlotTier) -> None:
        [slot] = self.reserve(tier, 1, self.slot_sizes[0])
        fill(tier.view(slot), key_of(1))
        try:
            assert tier.reserve(1, self.capacity_bytes + 1) is None
        except ConfigError:  # a size that could never be reserved may be called a mistake of the caller
            pass
        check(tier.view(slot), key_of(1))
        self.check_accounts(tier, [slot])

    def test_released_slots_are_used_again(self, tier: SlotTier) -> None:
        slot_bytes = self.slot_sizes[2]
        slots = self.fill_up(tier, slot_bytes)
        for _ in range(20):
            tier.release(slots[::2])
            again = self.reserve(tier, len(slots[::2]), slot_bytes)
            slots = [*again, *slots[1::2]]
            assert len(set(slots)) == len(slots)
            self.check_accounts(tier, slots)
        _check_disjoint(tier, slots)

    def test_d15_counts_return_to_the_start(self, tier: SlotTier) -> None:
        before = self.used_and_free_bytes(tier)
        for size in self.slot_sizes:
            for _ in range(200):
                tier.release(self.reserve(tier, 2, size))
        assert self.used_and_free_bytes(tier) == before

    def test_a_second_release_is_refused(self, tier: SlotTier) -> None:
        first, second = self.reserve(tier, 2, self.slot_sizes[0])
        tier.release([first])
        with pytest.raises(HandleError):
            tier.release([first])
        self.check_accounts(tier, [second])
        again = self.fill_up(tier, self.slot_sizes[0])
        assert second not in again
        assert len(set(again)) == len(again), "a slot was handed out twice"
        _check_disjoint(tier, [second, *again])

    def test_the_same_slot_twice_in_one_release_is_refused(self, tier: SlotTier) -> None:
        [slot] = self.reserve(tier, 1, self.slot_sizes[0])
        with pytest.raises(HandleError):
            tier.release([slot, slot])
        again = self.fill_up(tier, self.slot_sizes[0])
        assert len(set(again)) == len(again), "a slot was handed out twice"
        _check_disjoint(tier, again)

    def test_release_of_a_slot_that_never_was_is_refused(self, tier: SlotTier) -> None:
        slots = self.reserve(tier, 2, self.slot_sizes[0])
        for strange in (Slot(10**9), Slot(-1)):
            with pytest.raises(HandleError):
                tier.release([strange])
        self.check_accounts(tier, slots)

    # ---- no fragmentation

    def test_d16_a_full_size_allocation_works_after_many_mixed_ones(self, tier: SlotTier) -> None:
        full_size = self.slot_sizes[-1]
        with self.running(self.make_tier()) as fresh:  # not this one: what it carves now it might keep
            most = len(self.fill_up(fresh, full_size))
        dice = random.Random(16)
        held: dict[Slot, int] = {}
        for number in range(self.operations):
            if dice.random() < 0.55:
                slots = tier.reserve(dice.randint(1, 4), dice.choice(self.slot_sizes))
                for slot in slots or ():
                    assert slot not in held, f"slot {slot} was handed out while in use"
                    held[slot] = number
                    _stamp(tier.view(slot), number)
            elif held:
                slot = dice.choice(list(held))
                _check_stamp(tier.view(slot), held.pop(slot))
                tier.release([slot])
            if number % 500 == 0:
                self.check_accounts(tier, list(held))
                _check_disjoint(tier, list(held))
        for slot, number in held.items():
            _check_stamp(tier.view(slot), number)
        tier.release(held)
        assert len(self.reserve(tier, most, full_size)) == most

    # ---- many threads

    def test_d11_many_threads_never_share_a_slot(self, tier: SlotTier) -> None:
        def work(seed: int) -> None:
            dice = random.Random(seed)
            for _ in range(60):
                slots = tier.reserve(dice.randint(1, 3), dice.choice(self.slot_sizes[:3]))
                for slot in slots or ():
                    fill(tier.view(slot), key_of(seed))
                for slot in slots or ():
                    check(tier.view(slot), key_of(seed))
                    poison(tier.view(slot))
                tier.release(slots or ())

        run_together([partial(work, seed) for seed in range(8)], self.patience_s)
        self.check_accounts(tier, [])


def _address(view: memoryview) -> int:
    return int(np.frombuffer(view, dtype=np.uint8).ctypes.data)


def _check_disjoint(tier: SlotTier, slots: Sequence[Slot]) -> None:
    places = sorted((_address(view), len(view)) for view in map(tier.view, slots))
    for (start, length), (following, _) in pairwise(places):
        assert start + length <= following, "two slots overlap"


def _stamp(view: memoryview, number: int) -> None:
    """Marks the start of some sixteen pages and the end, which is quick and finds an overlap."""
    mark = number.to_bytes(8, "little")
    for at in range(0, len(view), align_up(max(1, len(view) // 16))):
        view[at : at + 8] = mark
    view[-8:] = mark


def _check_stamp(view: memoryview, number: int) -> None:
    mark = number.to_bytes(8, "little")
    starts = [*range(0, len(view), align_up(max(1, len(view) // 16))), len(view) - 8]
    assert all(view[at : at + 8] == mark for at in starts), "a slot in use was written by another"
