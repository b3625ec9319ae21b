"""MemorySlotTier passes the slot-tier contract, and broken ones do not."""

from collections.abc import Iterable
from pathlib import Path

import pytest
from contracts_support import Meeting, assert_catches

from tierkv.ids import Slot
from tierkv.testing.memory_slots import MemorySlotTier
from tierkv.testing.slot_tier import SlotTierContract
from tierkv.units import ALIGN_BYTES, MIB


class Hooks(SlotTierContract):
    tier_class: type[MemorySlotTier] = MemorySlotTier

    def make_tier(self) -> MemorySlotTier:
        return self.tier_class(self.capacity_bytes)

    def used_and_free_bytes(self, tier: MemorySlotTier) -> tuple[int, int]:
        return tier.used_bytes(), tier.free_bytes()


class TestMemorySlots(Hooks):
    pass


class TestMemorySlotsOfOneRegion(Hooks):
    capacity_bytes = MIB
    slot_sizes = (4096, 4096, 8192, 8192, 65536)
    operations = 1000

    def make_tier(self) -> MemorySlotTier:
        return MemorySlotTier(self.capacity_bytes, region_bytes=MIB // 4)


# ---- broken ones


class StartsOffThePage(MemorySlotTier):
    def view(self, slot: Slot) -> memoryview:
        view = super().view(slot)
        return view[8 : len(view) - 4088] if len(view) > 4096 else view


class GivesReadOnlyViews(MemorySlotTier):
    def view(self, slot: Slot) -> memoryview:
        return super().view(slot).toreadonly()


class GivesSomething(MemorySlotTier):
    """Gives fewer slots than were asked for."""

    def reserve(self, count: int, slot_bytes: int) -> list[Slot] | None:
        while count and (slots := super().reserve(count, slot_bytes)) is None:
            count -= 1
        return slots if count else None


class RefusesNone(MemorySlotTier):
    def reserve(self, count: int, slot_bytes: int) -> list[Slot] | None:
        return super().reserve(count, slot_bytes) if count else None


class KeepsWhatItRefused(MemorySlotTier):
    def reserve(self, count: int, slot_bytes: int) -> list[Slot] | None:
        slots = super().reserve(count, slot_bytes)
        if slots is None and count > 1:
            super().reserve(1, slot_bytes)
        return slots


class Overlaps(MemorySlotTier):
    def view(self, slot: Slot) -> memoryview:
        region, start = self._region_of(slot)
        return self._memory[start : start + region.stride_bytes + ALIGN_BYTES]


class LeaksASlotInTen(MemorySlotTier):
    released = 0

    def release(self, slots: Iterable[Slot]) -> None:
        for slot in slots:
            self.released += 1
            if self.released % 10:
                super().release([slot])


class ReleasesAnything(MemorySlotTier):
    """Puts whatever comes on the free list."""

    def release(self, slots: Iterable[Slot]) -> None:
        for slot in slots:
            region, start = self._region_of(slot)
            piece = (start - region.start) // (region.stride_bytes or ALIGN_BYTES)
            region.used.discard(piece)
            region.free.append(piece)


class ReleasesEachOnce(MemorySlotTier):
    def release(self, slots: Iterable[Slot]) -> None:
        super().release(set(slots))


class IgnoresStrangers(MemorySlotTier):
    def release(self, slots: Iterable[Slot]) -> None:
        super().release([slot for slot in slots if 0 <= slot < 10**6])


class ShrinksAnOversize(MemorySlotTier):
    def reserve(self, count: int, slot_bytes: int) -> list[Slot] | None:
        return super().reserve(count, min(slot_bytes, MIB))


class NeverReusesASlot(MemorySlotTier):
    def release(self, slots: Iterable[Slot]) -> None:
        given = list(slots)
        super().release(given)
        for slot in given:
            region, _ = self._region_of(slot)
            region.free = region.free[:-1]


class KeepsRegionsCarved(MemorySlotTier):
    """External fragmentation: a region never goes back to the pool."""

    def _give_back(self, slots: list[Slot]) -> None:
        carved = [(region, region.stride_bytes, region.used | set(region.free)) for region in self._regions]
        super()._give_back(slots)
        for region, stride_bytes, pieces in carved:
            if stride_bytes and not region.stride_bytes:
                region.stride_bytes, region.free = stride_bytes, sorted(pieces)


class SharesBetweenThreads(MemorySlotTier):
    """Two threads that reserve at once get the same slot."""

    def __init__(self, capacity_bytes: int) -> None:
        super().__init__(capacity_bytes)
        self._meeting = Meeting()
        self._last: list[Slot] | None = None

    def reserve(self, count: int, slot_bytes: int) -> list[Slot] | None:
        self._last = super().reserve(count, slot_bytes)
        self._meeting.wait()
        return self._last


CAUGHT_BY = {
    StartsOffThePage: "test_views_are_whole_pages_on_a_page_boundary",
    GivesReadOnlyViews: "test_views_are_whole_pages_on_a_page_boundary",
    GivesSomething: "test_d16_reserve_takes_all_or_nothing",
    RefusesNone: "test_no_slots",
    KeepsWhatItRefused: "test_d16_reserve_takes_all_or_nothing",
    Overlaps: "test_views_are_disjoint",
    LeaksASlotInTen: "test_d15_counts_return_to_the_start",
    ReleasesAnything: "test_a_second_release_is_refused",
    ReleasesEachOnce: "test_the_same_slot_twice_in_one_release_is_refused",
    IgnoresStrangers: "test_release_of_a_slot_that_never_was_is_refused",
    ShrinksAnOversize: "test_d16_oversize_is_refused_and_harms_nothing",
    NeverReusesASlot: "test_released_slots_are_used_again",
    KeepsRegionsCarved: "test_d16_a_full_size_allocation_works_after_many_mixed_ones",
    SharesBetweenThreads: "test_d11_many_threads_never_share_a_slot",
}


@pytest.mark.parametrize(("mutant", "test"), CAUGHT_BY.items(), ids=[each.__name__ for each in CAUGHT_BY])
def test_the_contract_catches(mutant: type[MemorySlotTier], test: str, tmp_path: Path) -> None:
    contract = type("Contract", (Hooks,), {"tier_class": mutant})
    assert_catches(contract, test, tmp_path, "tier")


def test_every_test_of_the_contract_has_a_mutant() -> None:
    assert {name for name in dir(SlotTierContract) if name.startswith("test_")} == set(CAUGHT_BY.values())
