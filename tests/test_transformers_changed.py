"""A model that computes in other numbers than when its connector was made, and what a canary says of numbers that are
none."""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

import tierkv  # noqa: E402
from tests.transformers_support import BLOCK, model_of, prompt_of  # noqa: E402
from tierkv.client import Client  # noqa: E402
from tierkv.engines.transformers import Connector  # noqa: E402
from tierkv.engines.transformers_canary import Canary, compare  # noqa: E402
from tierkv.engines.transformers_pages import computes_in  # noqa: E402
from tierkv.keys import Weights  # noqa: E402

GREEDY = {"max_new_tokens": 6, "do_sample": False}
PATIENCE_S = 20.0


@pytest.fixture
def client() -> Iterator[Client]:
    with tierkv.open(host_capacity="16 MiB") as opened:
        yield opened


def connector_of(client: Client, dtype: str, codec: str | None = None) -> Connector:
    return Connector(
        client,
        copy.deepcopy(model_of("llama")).to(getattr(torch, dtype)),
        Weights("revision", "t"),
        block_tokens=BLOCK,
        lossy_codec=codec,
        encode_at="edge" if codec is None else "device",
    )


def generated(connector: Connector, prompt: Any) -> Any:
    made = connector.generate(prompt, **GREEDY)
    made.stored.result(PATIENCE_S)
    return made


@pytest.mark.parametrize("codec", [None, "int8"])
@pytest.mark.parametrize(
    ("before", "after"), [("float16", "bfloat16"), ("float32", "bfloat16"), ("float32", "float64")]
)
def test_d4_a_model_that_was_cast_stores_nothing_under_the_old_name_and_reuses_nothing(
    client: Client, before: str, after: str, codec: str | None
) -> None:
    """Two kinds of numbers may be of one size: then nothing but their name tells their bytes apart."""
    cast, other = connector_of(client, before, codec), connector_of(client, before, codec)
    prompt = prompt_of(101)
    cast.model.to(getattr(torch, after))
    expected = cast.model.generate(prompt, **GREEDY)[0].tolist()
    for _ in range(2):
        made = generated(cast, prompt)
        assert (list(made.tokens), made.reused_tokens, made.stored.result().stored) == (expected, 0, 0)
        assert f"computes in {after}, and in {before}" in made.uncacheable
    assert generated(other, prompt).reused_tokens == 0
    assert list(generated(cast, prompt).tokens) == expected, "what another model stored was taken"
    cast.model.to(getattr(torch, before))
    assert generated(cast, prompt).reused_tokens == 96


def test_d4_under_autocast_the_model_is_another_one(client: Client) -> None:
    connector, prompt = connector_of(client, "float32"), prompt_of(101)
    with torch.autocast("cpu", torch.bfloat16):
        made = generated(connector, prompt)
        assert "under autocast to bfloat16" in made.uncacheable
    assert generated(connector, prompt).reused_tokens == 0
    with torch.autocast("cpu", torch.bfloat16):
        assert generated(connector, prompt).reused_tokens == 0
    assert generated(connector, prompt).reused_tokens == 96


@pytest.mark.parametrize("codec", [None, "int8"])
def test_d4_a_cache_of_other_numbers_is_not_stored_whoever_made_them(
    client: Client, codec: str | None, caplog: pytest.LogCaptureFixture
) -> None:
    """Nothing says so before the model has computed."""
    connector, prompt = connector_of(client, "float16", codec), prompt_of(101)
    connector.model.to(torch.bfloat16)
    connector._computes_in = computes_in(connector.model)
    for _ in range(2):
        made = generated(connector, prompt)
        assert (made.reused_tokens, made.stored.result().stored) == (0, 0)
    assert len([text for text in caplog.messages if "bfloat16 and not of float16" in text]) == 1


def test_d4_a_cache_that_cannot_be_cut_is_not_stored_and_generate_goes_on(
    client: Client, caplog: pytest.LogCaptureFixture
) -> None:
    """Under autocast keys are of other numbers than values."""
    connector, prompt = connector_of(client, "float32"), prompt_of(101)
    with torch.autocast("cpu", torch.bfloat16):
        connector._computes_in = computes_in(connector.model)
        for _ in range(2):
            made = generated(connector, prompt)
            assert (made.uncacheable, made.stored.result().stored) == (None, 0)
    assert len([text for text in caplog.messages if "cannot be cut into blocks" in text]) == 1


# ---- the canary


def spoiled(connector: Connector, value: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """The last layer's values come back with a number that is none."""
    restore = connector.restore

    def broken(*given: Any, **named: Any) -> Any:
        found = restore(*given, **named)
        found.cache.layers[-1].values[0, 0, 3, 0] = value
        return found

    monkeypatch.setattr(connector, "restore", broken)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_a_canary_is_not_silent_about_what_is_no_number(
    client: Client, value: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    connector, prompt = connector_of(client, "float32"), prompt_of(101)
    generated(connector, prompt)
    spoiled(connector, value, monkeypatch)
    found = compare(connector, prompt)
    assert math.isinf(found.worst)
    assert found.value_errors[:-1] == (0.0,) * (len(found.value_errors) - 1)


def test_a_canary_knows_numbers_that_the_model_makes_so() -> None:
    from tierkv.engines.transformers_canary import _error

    odd = torch.tensor([[[[1.0, float("nan"), float("inf"), -2.0]]]])
    assert _error(odd, odd.clone(), 0) == 0.0
    other = odd.clone()
    other[..., 3] = 2.0
    assert _error(other, odd, 0) == pytest.approx(4 / math.sqrt(5))
    assert math.isinf(_error(odd, torch.ones_like(odd), 0))


def test_the_worst_of_nothing_is_nothing() -> None:
    assert Canary(0, (), ()).worst == 0.0


def test_a_canary_takes_one_prompt(client: Client) -> None:
    connector = connector_of(client, "float32")
    with pytest.raises(ValueError, match="one prompt at a time"):
        compare(connector, torch.cat([prompt_of(20), prompt_of(20, seed=2)]))
