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


def config(**more: object) -> str:
    return json.dumps({"num_hidden_layers": 4, "hidden_size": 64, "num_attention_heads": 4, **more})


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("{", "cannot be read as JSON"),
        ("[]", "one object"),
        ("{}", "it has no num_hidden_layers"),
        ('{"num_hidden_layers": 2, "hidden_size": 8}', "num_attention_heads"),
        ('{"num_hidden_layers": "many", "hidden_size": 8, "num_attention_heads": 2}',
         "num_hidden_layers = 'many' is no whole number"),
        ('{"num_hidden_layers": 2, "hidden_size": 8, "num_attention_heads": 2, "dtype": "int3"}', "--kv-dtype"),
        ('{"num_hidden_layers": 1, "hidden_size": 8, "num_attention_heads": 2, "layer_types": ["mamba"]}',
         "nothing to store"),
        ("[" * 100_000, "cannot be read as JSON"),
        (config(num_hidden_layers=1e30), "num_hidden_layers = 1e+30"),
        (config(num_hidden_layers=10**12), "num_hidden_layers = 1000000000000"),
        (config(num_hidden_layers=float("inf")), "num_hidden_layers = inf"),
        (config(num_hidden_layers=-2), "num_hidden_layers = -2"),
        (config(num_hidden_layers=True), "num_hidden_layers = True"),
        (config(hidden_size=float("nan")), "hidden_size = nan"),
        (config(head_dim=-4), "head_dim = -4"),
        (config(head_dim=4.5), "head_dim = 4.5"),
        (config(hidden_size=3), "4 heads do not fit"),
        (config(num_key_value_heads=8), "8 heads of keys and values and 4 of queries"),
        (config(num_attention_heads=[4]), "num_attention_heads = [4]"),
        (config(kv_lora_rank=8), "it has no qk_rope_head_dim"),
        (config(sliding_window=-1), "sliding_window = -1"),
        (config(sliding_window=8, sliding_window_pattern="x"), "sliding_window_pattern = 'x'"),
        (config(layer_types=["full_attention"]), "it says what 1 of its 4 layers are"),
        (config(layer_types="full_attention"), "layer_types is no list"),
        (config(hybrid_override_pattern="M*X-"), "hybrid_override_pattern"),
        (config(attn_layer_period=-1), "attn_layer_period = -1"),
    ],
)  # fmt: skip
def test_a_bad_config_is_told(tmp_path: Path, text: str, told: str) -> None:
    path = tmp_path / "config.json"
    path.write_text(text)
    with pytest.raises(ConfigError, match="--") as error:
        geometry_of(str(path))
    assert told in str(error.value)
    assert "Error" not in str(error.value)


@pytest.mark.parametrize(
    ("more", "attend", "token_numbers"),
    [
        ({"attn_layer_period": 4, "attn_layer_offset": 2}, 1, 2 * 4 * 16),  # Jamba
        ({"full_attention_interval": 2}, 2, 2 * 4 * 16),  # Qwen3-Next
        ({"hybrid_override_pattern": "M-*E"}, 1, 2 * 4 * 16),  # Nemotron-H
        ({"attn_layer_indices": [0, 2, 3]}, 3, 2 * 4 * 16),  # Bamba
        ({"attn_type_list": [0, 1, 0, 1]}, 2, 2 * 4 * 16),  # MiniMax
        ({"layers_block_type": ["mamba", "hybrid"] * 2}, 2, 2 * 4 * 16),  # Zamba
        ({"layer_types": ["full_attention"] * 6}, 4, 2 * 4 * 16),
        ({"num_kv_heads": 2, "multi_query": True}, 4, 2 * 2 * 16),  # Falcon 40B
        ({"multi_query": True}, 4, 2 * 1 * 16),  # Falcon 7B
        ({"multi_query_group_num": 2, "kv_channels": 32}, 4, 2 * 2 * 32),  # ChatGLM
        ({"torch_dtype": "torch.bfloat16"}, 4, 2 * 4 * 16),
    ],
)
def test_words_of_other_families(more: dict[str, object], attend: int, token_numbers: int) -> None:
    geometry = geometry_from("x", json.loads(config(**more)))
    assert sum(group.layers for group in geometry.groups) == attend
    assert geometry.token_bytes == attend * token_numbers * 2


def test_names_as_they_are_published(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for published, known in {
        "meta-llama/Llama-3.1-8B-Instruct": "llama-3.1-8b",
        "meta-llama/Meta-Llama-3.1-70B": "llama-3.1-70b",
        "mistralai/Mistral-7B-Instruct-v0.3": "mistral-7b",
        "Qwen/Qwen3-235B-A22B-Instruct-2507": "qwen3-235b-a22b",
        "deepseek-ai/DeepSeek-V3-0324": "deepseek-v3",
        "google/gemma-3-27b-it": "gemma-3-27b",
    }.items():
        assert geometry_of(published) == geometry_of(known)
    with pytest.raises(ConfigError, match="one of deepseek-v3"):
        geometry_of("mistralai/Mistral-7B-v0.1")  # has a window that later ones have not
    # What is there is what is meant.
    monkeypatch.chdir(tmp_path)
    own = tmp_path / "models" / "Llama-3.1-8B"
    own.mkdir(parents=True)
    (own / "config.json").write_text(config())
    assert geometry_of("models/Llama-3.1-8B").token_bytes == 4 * 2 * 4 * 16 * 2
    monkeypatch.chdir(own)
    assert geometry_of("config.json").name == "Llama-3.1-8B"
