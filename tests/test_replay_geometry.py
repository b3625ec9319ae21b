"""What models take and cost: beside what their makers publish, and formulas worked out by hand."""

import json
from pathlib import Path

import numpy as np
import pytest

from tierkv.errors import ConfigError
from tierkv.replay.geometry import geometry_from, geometry_of

KIB = 1024
# (bytes of a token in bf16, parameters in 1e9 that a token passes through less the embeddings, as published)
KNOWN = {
    "llama-3.1-8b": (128 * KIB, 8.03 - 2 * 0.525),
    "llama-3.1-70b": (320 * KIB, 70.55 - 2 * 1.05),
    "llama-3.1-405b": (504 * KIB, 405.9 - 2 * 2.1),
    "qwen2.5-7b": (56 * KIB, 6.53),
    "qwen2.5-32b": (256 * KIB, 31.0),
    "qwen2.5-72b": (320 * KIB, 70.0),
    "qwen3-8b": (144 * KIB, 6.95),
    "qwen3-32b": (256 * KIB, 31.2),
    "mixtral-8x7b": (128 * KIB, 12.9 - 2 * 0.131),
    "qwen3-235b-a22b": (188 * KIB, 22.0 - 2 * 0.62),
    "gemma-3-27b": (496 * KIB, 25.6),
    "deepseek-v3": (70_272, 37.0 - 2 * 0.93),
}


@pytest.mark.parametrize("name", KNOWN)
def test_well_known_models_are_as_published(name: str) -> None:
    token_bytes, billions = KNOWN[name]
    geometry = geometry_of(name)
    assert geometry.token_bytes == token_bytes
    assert geometry.token_flops / 2e9 == pytest.approx(billions, rel=0.03)


def test_a_model_of_ones_own(tmp_path: Path) -> None:
    path = tmp_path / "tiny" / "config.json"
    path.parent.mkdir()
    config = {
        "num_hidden_layers": 4,
        "hidden_size": 64,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "intermediate_size": 128,
        "torch_dtype": "float32",
        "layer_types": ["full_attention", "sliding_attention", "linear_attention", "sliding_attention"],
        "sliding_window": 10,
    }
    path.write_text(json.dumps({"vision_config": {}, "text_config": config}))
    geometry = geometry_of(str(path))
    assert geometry_of(str(path.parent)) == geometry
    assert geometry.name == "tiny"
    one_layer = 2 * 2 * 16 * 4
    assert geometry.token_bytes == 3 * one_layer
    assert geometry_of(str(path), "fp8").token_bytes == 3 * one_layer / 4
    assert (geometry.state_layers, [group.window_tokens for group in geometry.groups]) == (1, [None, 10])
    # Behind 100 tokens an engine needs all of one layer and the window of two.
    assert geometry.bytes_of(np.array([100.0]))[0] == one_layer * (100 + 2 * 10)
    # Pairs, token by token: a token attends to half a pair of itself, as the sums of integrals have it.
    first, stop = np.array([4.0]), np.array([30.0])
    full = (30**2 - 4**2) / 2
    window = (10**2 / 2 + 20 * 10) - 4**2 / 2
    pair = 4 * 4 * 16
    linear = geometry.token_flops * 26
    assert geometry.flops(first, stop)[0] == pytest.approx(linear + pair * (full + 2 * window))


@pytest.mark.parametrize(
    ("more", "windows"),
    [
        ({}, [None]),
        ({"sliding_window": 8}, [8]),
        ({"sliding_window": 8, "use_sliding_window": False}, [None]),
        ({"sliding_window": 8, "use_sliding_window": True, "max_window_layers": 3}, [None, 8]),
        ({"sliding_window": 8, "sliding_window_pattern": 2}, [8, None]),
        ({"sliding_window": 8, "model_type": "gemma2"}, [8, None]),
    ],
)
def test_how_windows_are_said(more: dict[str, object], windows: list[int | None]) -> None:
    config = {"num_hidden_layers": 4, "hidden_size": 64, "num_attention_heads": 4, **more}
    assert [group.window_tokens for group in geometry_from("x", config).groups] == windows


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("{", "cannot be read as JSON"),
        ("[]", "one object"),
        ("{}", "it has no num_hidden_layers"),
        ('{"num_hidden_layers": 2, "hidden_size": 8}', "num_attention_heads"),
        ('{"num_hidden_layers": "many", "hidden_size": 8, "num_attention_heads": 2}', "ValueError"),
        ('{"num_hidden_layers": 2, "hidden_size": 8, "num_attention_heads": 2, "dtype": "int3"}', "--kv-dtype"),
        ('{"num_hidden_layers": 1, "hidden_size": 8, "num_attention_heads": 2, "layer_types": ["mamba"]}',
         "nothing to store"),
    ],
)  # fmt: skip
def test_a_bad_config_is_told(tmp_path: Path, text: str, told: str) -> None:
    path = tmp_path / "config.json"
    path.write_text(text)
    with pytest.raises(ConfigError, match="--") as error:
        geometry_of(str(path))
    assert told in str(error.value)
