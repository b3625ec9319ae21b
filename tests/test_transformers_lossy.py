"""A lossy codec under the transformers connector: what the canary says, and that nobody else is touched by it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

import tierkv  # noqa: E402
from tests.transformers_support import BLOCK, model_of, prompt_of  # noqa: E402
from tierkv.engines.transformers import LOSSY_BLOCK_TOKENS, Connector  # noqa: E402
from tierkv.engines.transformers_canary import compare  # noqa: E402
from tierkv.errors import ConfigError  # noqa: E402
from tierkv.keys import Weights  # noqa: E402
from tierkv.quote import CodecSpeed  # noqa: E402


class AlwaysPays(CodecSpeed):
    def pays(self) -> bool:
        return True


def opened(tmp_path: Path, codec: str) -> Any:
    client = tierkv.open(
        host_capacity="16 MiB",
        nvme_path=str(tmp_path / "n"),
        nvme_capacity="64 MiB",
        nvme_min_free=0,
        nvme_codec=codec,
    )
    client.store.edges[client.store.tier_number("nvme")].codec_speed = AlwaysPays()
    return client


def connector_of(client: Any, family: str, lossy: str | None, block_tokens: int | None = BLOCK) -> Connector:
    return Connector(
        client, model_of(family), Weights("revision", "t"), block_tokens=block_tokens, lossy_codec=lossy
    )


def through_the_disk(client: Any, connector: Connector, prompt: Any) -> None:
    connector.generate(prompt, max_new_tokens=2, do_sample=False).stored.result(30)
    client.flush("nvme").result(30)
    client.evict("host")


@pytest.mark.parametrize("family", ["llama", "gemma2", "deepseek"])
@pytest.mark.parametrize(("codec", "most"), [("int8", 0.02), ("fp8_e4m3", 0.06)])
def test_the_canary_measures_what_a_codec_loses(tmp_path: Path, family: str, codec: str, most: float) -> None:
    prompt = prompt_of(200)
    with opened(tmp_path, codec) as client:
        exact, lossy = (connector_of(client, family, name, 4 * BLOCK) for name in (None, codec))
        for connector in (exact, lossy):
            assert compare(connector, prompt).tokens == 0
            through_the_disk(client, connector, prompt)
        untouched, changed = compare(exact, prompt), compare(lossy, prompt)
        assert untouched.tokens == changed.tokens == 192
        assert untouched.worst < 1e-5, "a namespace without a lossy codec lost something"
        assert 1e-4 < changed.worst < most
        assert len(changed.key_errors) == len(changed.value_errors) == len(exact.shape.layers)
        assert client.store.counters.snapshot()[("encoded_blocks_total", "nvme", "encoded")] > 0


@pytest.mark.parametrize("codec", ["int9", "planes_zstd", "raw", ""])
def test_a_codec_that_is_not_lossy_is_refused_at_once(tmp_path: Path, codec: str) -> None:
    with opened(tmp_path, "raw") as client:
        with pytest.raises(ConfigError, match=r"lossy_codec = .*one of \['fp8_e4m3', 'int8'\]"):
            connector_of(client, "llama", codec)


def test_lossy_blocks_are_long_enough_for_their_scales(tmp_path: Path) -> None:
    with opened(tmp_path, "int8") as client:
        assert connector_of(client, "llama", "int8", None).block_tokens >= LOSSY_BLOCK_TOKENS
        assert connector_of(client, "llama", "int8").block_tokens == BLOCK
