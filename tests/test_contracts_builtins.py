"""The built-in host tier and LRU pass their contracts. The codecs, nvme and valkey have their own files."""

from tierkv.arena import Arena
from tierkv.policies.lru import LruPolicy
from tierkv.policy import EvictionPolicy
from tierkv.testing.eviction import EvictionPolicyContract
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


class TestLru(EvictionPolicyContract):
    def make_policy(self) -> EvictionPolicy:
        return LruPolicy()
