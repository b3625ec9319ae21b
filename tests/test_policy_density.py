"""DensityPolicy keeps the eviction contract."""

from tierkv.policies.density import DensityPolicy
from tierkv.policy import EvictionPolicy
from tierkv.testing.eviction import EvictionPolicyContract


class TestDensity(EvictionPolicyContract):
    def make_policy(self) -> EvictionPolicy:
        return DensityPolicy()
