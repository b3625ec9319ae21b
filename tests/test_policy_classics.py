"""The classic policies keep the eviction contract, as the store uses them: leaves first."""

import pytest

from tierkv import registry
from tierkv.policy import EvictionPolicy
from tierkv.testing.eviction import EvictionPolicyContract

CLASSICS = ("slru", "lfu", "arc", "s3fifo", "sieve", "w_tinylfu", "gdsf")


@pytest.mark.parametrize("name", CLASSICS, scope="class")
class TestClassics(EvictionPolicyContract):
    @pytest.fixture(autouse=True)
    def _named(self, name: str) -> None:
        self.policy_name = name

    def make_policy(self) -> EvictionPolicy:
        made: EvictionPolicy = registry.load("eviction", self.policy_name, "host.eviction")()
        return made
