"""The hbm tier in CPU tensors passes the contract of slot tiers; hot blocks are served from it, and only while
leased."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

import tierkv  # noqa: E402
from tests.transformers_support import BLOCK, model_of, prompt_of  # noqa: E402
from tierkv.client import Client  # noqa: E402
from tierkv.engines.hot_blocks import HotBlocks  # noqa: E402
from tierkv.engines.transformers import Connector  # noqa: E402
from tierkv.errors import ConfigError, HandleError  # noqa: E402
from tierkv.keys import Weights  # noqa: E402
from tierkv.testing.slot_tier import SlotTierContract  # noqa: E402
from tierkv.tiers.hbm import HbmTier  # noqa: E402
from tierkv.units import MIB  # noqa: E402

GREEDY = {"max_new_tokens": 6, "do_sample": False}


class TestHbm(SlotTierContract):
    operations = 2000

    def make_tier(self) -> HbmTier:
        return HbmTier(self.capacity_bytes, region_bytes=MIB)

    def used_and_free_bytes(self, tier: HbmTier) -> tuple[int, int]:
        used = tier.usage().used_bytes
        return used, tier.capacity_bytes - used


def test_a_capacity_without_a_region_is_refused() -> None:
    with pytest.raises(ConfigError, match="hbm_bytes = 100"):
        HbmTier(100)


def test_a_capacity_that_is_no_number_of_bytes_is_refused() -> None:
    size: Any
    for size in ("64 MiB", 2.5e6):
        with pytest.raises(ConfigError, match="a whole number of bytes"):
            HbmTier(size)


def test_slots_may_be_larger_than_a_region_is_by_default() -> None:
    tier = HbmTier(13 * MIB, region_bytes=2 * MIB, slot_bytes=3 * MIB)
    assert (tier.region_bytes, tier.capacity_bytes) == (3 * MIB, 12 * MIB)
    assert len(tier.reserve(4, 3 * MIB) or []) == 4
    assert HbmTier(64 * MIB, region_bytes=8 * MIB, slot_bytes=3 * MIB).region_bytes == 6 * MIB


def test_a_slot_is_seen_as_a_tensor_and_as_memory() -> None:
    tier = HbmTier(MIB)
    [slot] = tier.reserve(1, 5000) or []
    tier.tensor(slot).fill_(7)
    assert bytes(tier.view(slot)[:3]) == b"\7\7\7"
    assert tier.tensor(slot).numel() == 8192
    with pytest.raises(HandleError):
        tier.tensor(slot + 10**6)


# ---- hot blocks


@pytest.fixture
def client(tmp_path: Path) -> Iterator[Client]:
    with tierkv.open(host_capacity="8 MiB") as opened:
        yield opened


def connector_of(client: Client, family: str = "llama", hbm_bytes: int = 4 * MIB) -> Connector:
    return Connector(
        client, model_of(family), Weights("revision", "t"), block_tokens=BLOCK, hbm_bytes=hbm_bytes
    )


def generated(connector: Connector, prompt: Any) -> Any:
    made = connector.generate(prompt, **GREEDY)
    made.stored.result(30)
    return made


def hot_of(connector: Connector) -> HotBlocks:
    assert connector.hot is not None
    return connector.hot


@pytest.mark.parametrize("family", ["llama", "qwen2", "deepseek"])
def test_blocks_that_come_again_and_again_come_from_the_device(client: Client, family: str) -> None:
    connector, prompt = connector_of(client, family), prompt_of(101)
    runs = [generated(connector, prompt) for _ in range(5)]
    assert len({run.tokens for run in runs}) == 1
    assert [run.reused_tokens for run in runs] == [0, 96, 96, 96, 96]
    counts = hot_of(connector).counts
    assert counts.promoted == 6, "from their second onboard on"
    assert counts.served == 12
    assert len(hot_of(connector)) == 6


def test_the_bytes_really_come_from_the_device(client: Client) -> None:
    """What lies in the device's memory is changed by hand; then the answer changes."""
    connector, prompt = connector_of(client), prompt_of(101)
    expected = [generated(connector, prompt) for _ in range(3)][-1]
    hot = hot_of(connector)
    assert len(hot) == 6
    for block in hot._by_id.values():
        for slot in block.slots.values():
            hot.tier.tensor(slot).view(torch.float32).mul_(-3)
    assert generated(connector, prompt).tokens != expected.tokens
    assert hot.counts.served == 6


def test_what_is_cleared_or_renamed_is_not_served(client: Client) -> None:
    connector, prompt = connector_of(client), prompt_of(101)
    for _ in range(3):
        generated(connector, prompt)
    served = hot_of(connector).counts.served
    assert client.clear().result(30)
    assert generated(connector, prompt).reused_tokens == 0
    other = Connector(
        client, model_of("llama"), Weights("revision", "other"), block_tokens=BLOCK, hbm_bytes=MIB
    )
    assert generated(other, prompt).reused_tokens == 0
    assert hot_of(connector).counts.served == served


def test_d16_a_full_device_evicts_what_was_used_longest_ago(client: Client) -> None:
    block_bytes = BLOCK * connector_of(client).shape.token_bytes
    connector = connector_of(client, hbm_bytes=8 * block_bytes)
    prompts = [prompt_of(70, seed=seed) for seed in range(4)]
    for prompt in prompts:
        for _ in range(3):
            generated(connector, prompt)
    hot = hot_of(connector)
    assert hot.tier.usage().used_bytes <= hot.tier.capacity_bytes
    assert hot.counts.evicted > 0
    assert len(hot) == 8
    before = hot.counts.served
    assert generated(connector, prompts[-1]).reused_tokens == 64
    assert hot.counts.served == before + 4
    assert hot.counts.failed == 0


def test_windows_are_served_where_all_of_a_block_is_wanted(client: Client) -> None:
    """A block whose window layers are out of reach has no place here: it would not be whole."""
    connector, prompt = connector_of(client, "gemma2"), prompt_of(101)
    runs = [generated(connector, prompt) for _ in range(4)]
    assert len({run.tokens for run in runs}) == 1
    counts = hot_of(connector).counts
    assert 0 < counts.promoted < 6
    assert counts.served >= counts.promoted


def test_blocks_that_are_larger_than_an_eighth_find_a_place(client: Client) -> None:
    block_bytes = BLOCK * connector_of(client).shape.token_bytes
    connector, prompt = connector_of(client, hbm_bytes=6 * block_bytes), prompt_of(101)
    assert [generated(connector, prompt).reused_tokens for _ in range(4)] == [0, 96, 96, 96]
    assert hot_of(connector).counts.promoted == 6


def test_memory_for_less_than_a_block_is_refused(client: Client) -> None:
    block_bytes = BLOCK * connector_of(client).shape.token_bytes
    with pytest.raises(ConfigError, match=f"hbm_bytes = {block_bytes - 1}: give at least {block_bytes}"):
        connector_of(client, hbm_bytes=block_bytes - 1)
