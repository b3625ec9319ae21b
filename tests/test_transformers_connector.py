"""The transformers connector with a real store: reuse from each tier, isolation, and everything that is no reuse."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Iterator
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

import tierkv  # noqa: E402
from tests.daemon_process import running_daemon  # noqa: E402
from tests.transformers_support import BLOCK, FAMILIES, config_of, model_of, prompt_of  # noqa: E402
from tierkv.client import Client  # noqa: E402
from tierkv.engines.transformers import Connector  # noqa: E402
from tierkv.engines.transformers_canary import compare  # noqa: E402
from tierkv.engines.transformers_pages import given, new_cache  # noqa: E402
from tierkv.errors import IdentityError, LayoutError  # noqa: E402
from tierkv.keys import Adapter, Extras, Weights  # noqa: E402

WEIGHTS = Weights("revision", "test")
GREEDY = {"max_new_tokens": 10, "do_sample": False}


@pytest.fixture
def client(tmp_path: Path) -> Iterator[Client]:
    with tierkv.open(
        host_capacity="8 MiB", nvme_path=str(tmp_path / "nvme"), nvme_capacity="64 MiB", nvme_min_free=0
    ) as opened:
        yield opened


def _connector(client: Any, family: str = "llama", model: Any = None, **options: Any) -> Connector:
    options = {"weights": WEIGHTS, "block_tokens": BLOCK, **options}
    return Connector(client, model or model_of(family), **options)


def _to_nvme(client: Client) -> None:
    client.flush("nvme").result()
    client.evict("host")


@pytest.mark.parametrize("family", FAMILIES)
def test_the_same_tokens_from_host_ram_and_from_nvme(client: Client, family: str) -> None:
    connector, prompt = _connector(client, family), prompt_of(101)
    plain = model_of(family).generate(prompt, attention_mask=torch.ones_like(prompt), **GREEDY)
    cold = connector.generate(prompt, **GREEDY)
    assert (cold.reused_tokens, cold.reused_bytes, cold.uncacheable) == (0, 0, None)
    assert cold.tokens == tuple(plain[0].tolist())
    assert cold.stored.result().stored == 6
    warm = connector.generate(prompt, **GREEDY)
    assert (warm.tokens, warm.reused_tokens) == (cold.tokens, 96)
    assert 0 < warm.restore_s < warm.first_token_s
    _to_nvme(client)
    assert client.match(connector.chain(prompt[0].tolist())).tiers == {"host": 0, "nvme": 6}
    again = connector.generate(prompt, **GREEDY)
    assert (again.tokens, again.reused_tokens) == (cold.tokens, 96)
    full = [not layer.window_tokens for layer in connector.shape.layers]
    whole = 96 * connector.shape.token_bytes
    assert again.reused_bytes == whole if all(full) else again.reused_bytes < whole


@pytest.mark.parametrize("family", ["llama", "gemma2"])
def test_the_same_tokens_from_a_daemon_and_without_one(tmp_path: Path, family: str) -> None:
    """Another process has the store; while it is gone the model computes all of it."""
    prompt = prompt_of(101)
    plain = model_of(family).generate(prompt, attention_mask=torch.ones_like(prompt), **GREEDY)
    with running_daemon(tmp_path, host_capacity="8 MiB", host_region="1 MiB") as daemon:
        with daemon.client() as client:
            connector = _connector(client, family)
            cold = connector.generate(prompt, **GREEDY)
            assert cold.stored.result(60).stored == 6
            warm = connector.generate(prompt, **GREEDY)
            assert (cold.reused_tokens, warm.reused_tokens) == (0, 96)
            assert client.stats()["leases"] == 0
            daemon.process.kill()
            daemon.process.wait()
            alone = connector.generate(prompt, **GREEDY)
            assert (alone.reused_tokens, alone.stored.result(60).dropped) == (0, {"no_daemon": 6})
    assert cold.tokens == warm.tokens == alone.tokens == tuple(plain[0].tolist())


def test_a_second_turn_reuses_what_was_generated(client: Client) -> None:
    connector = _connector(client)
    first = connector.generate(prompt_of(40), max_new_tokens=30, do_sample=False)
    assert first.stored.result().stored == 69 // BLOCK  # the last token was never computed
    second = torch.tensor([[*first.tokens, 5, 6, 7]])
    assert connector.generate(second, **GREEDY).reused_tokens == 64


@pytest.mark.parametrize(
    ("tokens", "reused"),
    [(1, 0), (BLOCK - 1, 0), (BLOCK, BLOCK - 1), (BLOCK + 1, BLOCK), (4 * BLOCK, 63), (4 * BLOCK + 1, 64)],
)
@pytest.mark.parametrize("family", ["llama", "gemma2"])
def test_d7_a_token_is_left_to_compute(client: Client, family: str, tokens: int, reused: int) -> None:
    connector, prompt = _connector(client, family), prompt_of(tokens)
    cold = connector.generate(prompt, max_new_tokens=2, do_sample=False)
    assert cold.stored.result().stored == (tokens + 1) // BLOCK
    warm = connector.generate(prompt, max_new_tokens=2, do_sample=False)
    assert (warm.tokens, warm.reused_tokens) == (cold.tokens, reused)


def test_prompts_that_begin_alike_share_their_beginning(client: Client) -> None:
    connector = _connector(client)
    first, second = prompt_of(90), prompt_of(90).clone()
    second[0, 50] = 3
    connector.generate(first, **GREEDY).stored.result()
    alone = connector.generate(second, **GREEDY)
    assert alone.reused_tokens == 48
    assert alone.tokens == tuple(
        model_of("llama").generate(second, attention_mask=torch.ones_like(second), **GREEDY)[0].tolist()
    )


def test_d1_d2_d3_d4_nobody_gets_anothers_blocks(client: Client) -> None:
    prompt = prompt_of(70)

    def reused(extras: Extras | None = None, **options: Any) -> int:
        result = _connector(client, **options).generate(prompt, extras=extras, **GREEDY)
        result.stored.result()
        return result.reused_tokens

    def adapted(name: str, revision: str) -> Extras:
        return Extras(adapter=Adapter(name, revision))

    strangers: list[tuple[Extras | None, dict[str, Any]]] = [
        (None, {}),
        (adapted("a", "1"), {}),
        (adapted("a", "2"), {}),
        (adapted("b", "1"), {}),
        (Extras(cache_salt="x"), {}),
        (None, {"salt": "x"}),
        (None, {"salt": "y"}),
        (None, {"weights": Weights("revision", "other")}),
        (None, {"weights_epoch": 1}),
        (None, {"block_tokens": 32}),
        (None, {"model": copy.deepcopy(model_of("llama")).to(torch.bfloat16)}),
        (None, {"family": "qwen2"}),
    ]
    assert [reused(extras, **options) for extras, options in strangers] == [0] * len(strangers)
    assert all(reused(extras, **options) == 64 for extras, options in strangers)


def test_d2_an_adapter_without_a_revision_is_never_stored(client: Client) -> None:
    connector, extras = _connector(client), Extras(adapter=Adapter("a"))
    for _ in range(2):
        result = connector.generate(prompt_of(70), extras=extras, **GREEDY)
        assert (result.reused_tokens, result.stored.result().stored) == (0, 0)
        assert result.uncacheable == "adapter 'a' has no revision"


def test_an_adapter_that_nobody_names_is_never_stored(client: Client) -> None:
    model = copy.deepcopy(model_of("llama"))
    connector = _connector(client, model=model)
    model._hf_peft_config_loaded = True
    result = connector.generate(prompt_of(70), **GREEDY)
    assert "adapter" in (result.uncacheable or "")
    assert result.stored.result().stored == 0
    named = connector.generate(prompt_of(70), extras=Extras(adapter=Adapter("a", "1")), **GREEDY)
    assert named.stored.result().stored == 4


def test_a_model_in_training_is_never_stored(client: Client) -> None:
    model = copy.deepcopy(model_of("llama")).train()
    result = _connector(client, model=model).generate(prompt_of(70), **GREEDY)
    assert "training" in (result.uncacheable or "")
    assert result.stored.result().stored == 0


def test_all_misses_until_the_weights_have_a_name(client: Client) -> None:
    weights: Future[Weights] = Future()
    connector, prompt = _connector(client, weights=weights), prompt_of(70)
    result = connector.generate(prompt, **GREEDY)
    assert "not known yet" in (result.uncacheable or "")
    with pytest.raises(IdentityError, match="not known yet"):
        connector.chain(prompt[0].tolist())
    weights.set_result(WEIGHTS)
    assert connector.generate(prompt, **GREEDY).stored.result().stored == 4
    assert connector.generate(prompt, **GREEDY).reused_tokens == 64


def test_weights_that_cannot_be_named(client: Client) -> None:
    weights: Future[Weights] = Future()
    weights.set_exception(IdentityError("gone"))
    result = _connector(client, weights=weights).generate(prompt_of(30), **GREEDY)
    assert "could not be made" in (result.uncacheable or "")


@pytest.mark.parametrize("opened_before", [False, True])
def test_a_closed_store_is_a_miss(client: Client, opened_before: bool) -> None:
    connector, prompt = _connector(client), prompt_of(70)
    if opened_before:
        connector.generate(prompt, **GREEDY).stored.result()
    client.close()
    result = connector.generate(prompt, **GREEDY)
    assert (result.reused_tokens, result.stored.result().stored) == (0, 0)
    assert result.tokens[:70] == tuple(prompt[0].tolist())


def test_a_request_says_how_its_blocks_are_kept(client: Client) -> None:
    """What a call says goes before what the connector says; what is reused is kept at least so."""
    connector, prompt = _connector(client, retention=tierkv.Retention(priority=2)), prompt_of(5 * BLOCK + 1)

    def priorities() -> list[int]:
        chain = connector.chain(prompt[0].tolist())
        space = client.store.catalog.index.space(chain.namespace.digest)
        assert space is not None
        found = [space.get(block_hash) for block_hash in chain.hashes]
        return [client.store.catalog.index.priority[family] for family in found if family is not None]

    silent = connector.generate(prompt, retention=tierkv.Retention(no_store=True), max_new_tokens=2)
    assert silent.stored.result().dropped == {"no_store": 5}
    assert priorities() == []
    connector.generate(prompt[:, : 3 * BLOCK + 1], max_new_tokens=2).stored.result()
    assert priorities() == [2] * 3
    again = connector.generate(prompt, retention=tierkv.Retention(priority=7, ttl_s=100.0), max_new_tokens=2)
    assert (again.reused_tokens, again.stored.result().stored) == (3 * BLOCK, 2)
    assert priorities() == [7] * 5
    silent = connector.generate(prompt, retention=tierkv.Retention(no_store=True), max_new_tokens=2)
    assert silent.reused_tokens == 5 * BLOCK, "reads are allowed"


def test_options_of_generate_are_checked_first(client: Client) -> None:
    with pytest.raises(ValueError, match="num_beams"):
        _connector(client).generate(prompt_of(5), num_beams=2)


def test_models_that_have_no_such_cache(client: Client) -> None:
    with pytest.raises(LayoutError, match="decoder"):
        _connector(client, model=transformers.AutoModelForSeq2SeqLM.from_config(_t5()))
    rope = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4, "original_max_position_embeddings": 512}
    config = config_of("llama")
    config.rope_parameters = rope
    with pytest.raises(IdentityError, match="rope_type"):
        _connector(client, model=transformers.AutoModelForCausalLM.from_config(config).eval())


def _t5() -> Any:
    return transformers.T5Config(vocab_size=50, d_model=16, d_kv=8, d_ff=16, num_layers=1, num_heads=2)


def test_a_model_is_given_its_cache_by_the_name_that_it_has_for_it() -> None:
    class Old:
        def forward(self, past_key_values: Any = None) -> None: ...

    class New:
        def forward(self, cache: Any = None) -> None: ...

    cache = new_cache(model_of("llama").config)
    assert given(Old(), cache) == {"past_key_values": cache}
    assert given(New(), cache) == {"cache": cache}


def test_nothing_that_transformers_will_take_away_is_used(client: Client) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error", FutureWarning)
        connector = _connector(client)
        for reused in (0, 48):
            made = connector.generate(prompt_of(60), **GREEDY)
            made.stored.result(30)
            assert made.reused_tokens == reused
        assert compare(connector, prompt_of(60)).tokens == 48
