"""What a model's keys and values take, and what it costs to compute them, from its ``config.json``.

Bytes: two vectors of every KV head in every layer, or one latent vector a layer (MLA, DeepSeek-V2, 2024). Layers with a
sliding window keep no more than the window. Operations: two for each parameter that a token passes through (Kaplan and
others, "Scaling laws for neural language models", 2020), and four for each element of a query head and each token that
is attended to. Layers with a state of fixed size (Mamba, linear attention) add operations and no bytes a token.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tierkv.errors import ConfigError
from tierkv.replay.models import MODELS

OPTION = "--model"
_DTYPE_BYTES = {"float32": 4.0, "bfloat16": 2.0, "float16": 2.0, "fp8": 1.0, "float8_e4m3fn": 1.0}
KV_DTYPES = ("bfloat16", "float16", "float32", "fp8")
_FULL, _WINDOW, _STATE = "full_attention", "sliding_attention", "linear_attention"
_WINDOWED = (_WINDOW, "chunked_attention", "local_attention")
Config = Mapping[str, Any]
Numbers = NDArray[np.float64]


@dataclass(frozen=True)
class Group:
    """Layers of one kind."""

    layers: int
    window_tokens: int | None
    """``None``: all tokens are attended to."""
    token_bytes: float
    """Of one token in all of these layers."""
    pair_flops: float
    """For one token and one that it attends to, in all of these layers."""


@dataclass(frozen=True)
class Geometry:
    """One model."""

    name: str
    groups: tuple[Group, ...]
    token_flops: float
    """For each token, whatever it attends to."""
    state_layers: int
    dtype: str

    @property
    def token_bytes(self) -> float:
        """What a token takes where all that a model computes is kept."""
        return sum(group.token_bytes for group in self.groups)

    def bytes_of(self, tokens: Numbers) -> Numbers:
        """What goes to an engine that goes on behind so many tokens: of a window no more than the window."""
        found = np.zeros_like(tokens)
        for group in self.groups:
            kept = tokens if group.window_tokens is None else np.minimum(tokens, group.window_tokens)
            found += group.token_bytes * kept
        return found

    def flops(self, first: Numbers, stop: Numbers) -> Numbers:
        """To compute the tokens from place ``first`` up to ``stop`` when those before are there."""
        found = self.token_flops * (stop - first)
        for group in self.groups:
            window = group.window_tokens
            found += group.pair_flops * (_pairs(stop, window) - _pairs(first, window))
        return found

    def described(self) -> str:
        kinds = ", ".join(
            f"{group.layers} with all tokens"
            if group.window_tokens is None
            else f"{group.layers} with a window of {group.window_tokens:,}"
            for group in self.groups
        )
        state = f", {self.state_layers} with a state (not counted)" if self.state_layers else ""
        return f"{kinds}{state}; {self.token_bytes / 1024:,.4g} KiB a token in {self.dtype}"


def _pairs(tokens: Numbers, window: int | None) -> Numbers:
    """Pairs of a token and one that it attends to, over a whole prompt."""
    near = tokens if window is None else np.minimum(tokens, window)
    return near * near / 2 + (tokens - near) * near


def geometry_of(word: str, kv_dtype: str | None = None) -> Geometry:
    """Of a well-known model's name or a ``config.json``. Raises ``ConfigError``."""
    if word.lower() in MODELS:
        return geometry_from(word.lower(), MODELS[word.lower()], kv_dtype)
    path = Path(word)
    if path.is_dir():
        path /= "config.json"
    if not path.is_file():
        raise ConfigError(OPTION, word, f"name a model's config.json, or one of {', '.join(sorted(MODELS))}")
    try:
        config = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise ConfigError(OPTION, word, f"it cannot be read as JSON: {error}") from None
    if not isinstance(config, dict):
        raise ConfigError(OPTION, word, "a config.json holds one object; name the model's own")
    try:
        return geometry_from(path.parent.name or path.name, config, kv_dtype)
    except (TypeError, ValueError, ZeroDivisionError, AttributeError) as error:
        raise ConfigError(
            OPTION, word, f"a field is not what a config.json has ({type(error).__name__}: {error})"
        ) from None


def geometry_from(name: str, config: Config, kv_dtype: str | None = None) -> Geometry:
    """Of the fields of a ``config.json``. Raises ``ConfigError``."""
    config = _text_part(config)
    layers = int(_first(config, "num_hidden_layers", "n_layer", "num_layers"))
    dtype = kv_dtype or str(config.get("dtype") or config.get("torch_dtype") or "bfloat16")
    if dtype not in _DTYPE_BYTES:
        raise ConfigError("--kv-dtype", dtype, f"it is none of {', '.join(KV_DTYPES)}; name one of them")
    attention = _latent(config) if config.get("kv_lora_rank") else _heads(config)
    kinds = _kinds(config, layers)
    window = config.get("sliding_window") or config.get("attention_chunk_size")
    groups = []
    for kind, count in Counter(kinds).items():
        if kind == _STATE:
            continue
        size = int(window) if kind == _WINDOW and window else None
        kept_bytes = attention.kept * _DTYPE_BYTES[dtype]
        groups.append(Group(count, size, count * kept_bytes, count * attention.pair_flops))
    if not groups:
        raise ConfigError(OPTION, name, "no layer of it keeps keys and values, so there is nothing to store")
    token_flops = 2.0 * (layers * attention.weights + _feed_forward(config, layers))
    return Geometry(name, tuple(groups), token_flops, kinds.count(_STATE), dtype)


@dataclass(frozen=True)
class _Attention:
    """Of one layer."""

    kept: float
    """Numbers that a token leaves behind."""
    pair_flops: float
    weights: float


def _heads(config: Config) -> _Attention:
    hidden = int(_first(config, "hidden_size", "n_embd"))
    heads = int(_first(config, "num_attention_heads", "n_head"))
    shared = config.get("num_key_value_heads") or config.get("n_head_kv")
    kv_heads = int(shared or (1 if config.get("multi_query") else heads))
    size = int(config.get("head_dim") or hidden // heads)
    return _Attention(2.0 * kv_heads * size, 4.0 * heads * size, 2.0 * hidden * size * (heads + kv_heads))


def _latent(config: Config) -> _Attention:
    hidden, heads = int(config["hidden_size"]), int(config["num_attention_heads"])
    rank, rope = int(config["kv_lora_rank"]), int(config["qk_rope_head_dim"])
    plain, value = int(config["qk_nope_head_dim"]), int(config["v_head_dim"])
    queries = heads * (plain + rope)
    asked = config.get("q_lora_rank")
    weights = int(asked) * (hidden + queries) if asked else hidden * queries
    weights += hidden * (rank + rope) + rank * heads * (plain + value) + heads * value * hidden
    return _Attention(float(rank + rope), 2.0 * heads * (plain + rope + value), float(weights))


def _feed_forward(config: Config, layers: int) -> float:
    """Parameters that one token passes through, in all layers."""
    hidden = int(_first(config, "hidden_size", "n_embd"))
    wide = int(config.get("intermediate_size") or config.get("n_inner") or 4 * hidden)
    gates = 2 if config.get("model_type") in ("gpt2", "gptj", "falcon", "opt", "phi", "gpt_neox") else 3
    chosen = config.get("num_experts_per_tok") or config.get("moe_topk") or config.get("experts_per_token")
    if not chosen:
        return float(layers * gates * hidden * wide)
    expert = int(config.get("moe_intermediate_size") or wide)
    dense = int(config.get("first_k_dense_replace") or 0)
    used = int(chosen) * expert + int(config.get("n_shared_experts") or 0) * expert
    used += int(config.get("shared_expert_intermediate_size") or 0)
    return float(gates * hidden * (dense * wide + (layers - dense) * used))


def _kinds(config: Config, layers: int) -> list[str]:
    """What each layer is, from the first one on."""
    named = config.get("layer_types") or config.get("layers_block_type")
    if named:
        return [_kind(str(one)) for one in named[:layers]]
    if not config.get("sliding_window") or config.get("use_sliding_window") is False:
        return [_FULL] * layers
    every = config.get("sliding_window_pattern") or config.get("_sliding_window_pattern")
    if every is None and config.get("model_type") == "gemma2":
        every = 2
    if every:
        return [_FULL if (at + 1) % int(every) == 0 else _WINDOW for at in range(layers)]
    first = int(config.get("max_window_layers") or 0) if config.get("use_sliding_window") else 0
    return [_FULL if at < first else _WINDOW for at in range(layers)]


def _kind(word: str) -> str:
    if word in _WINDOWED:
        return _WINDOW
    return _FULL if word in (_FULL, "attention") else _STATE


def _text_part(config: Config) -> Config:
    """Models that see or hear have the part that reads text inside."""
    for name in ("text_config", "llm_config", "language_config", "thinker_config"):
        inner = config.get(name)
        if isinstance(inner, Mapping) and "num_hidden_layers" not in config:
            return _text_part(inner)
    return config


def _first(config: Config, *names: str) -> Any:
    for name in names:
        if config.get(name):
            return config[name]
    raise ConfigError(OPTION, _some(config), f"it has no {' or '.join(names)}; name a model's config.json")


def _some(names: Iterable[str]) -> str:
    found = list(names)
    return f"{', '.join(found[:4])}{', ...' if len(found) > 4 else ''}"
