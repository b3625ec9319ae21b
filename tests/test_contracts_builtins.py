"""The host tier passes the slot-tier contract. Other built-in parts have files of their own."""

from tierkv.arena import Arena
from tierkv.testing.slot_tier import SlotTierContract
from tierkv.tiers.host import HostTier
from tierkv.units import MIB


class TestHost(SlotTierContract):
    def make_tier(self) -> HostTier:
        return HostTier(Arena(self.capacity_bytes, region_bytes=MIB))

    def close_tier(self, tier: HostTier) -> None:
        tier.close()

    def used_and_free_bytes(self, tier: HostTier) -> tuple[int, int]:
        return tier.arena.used_bytes, tier.free_bytes()
