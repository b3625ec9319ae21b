"""What a model's keys and values take, and what it costs to compute them, from its ``config.json``.

Bytes: two vectors of every KV head in every layer, or one latent vector a layer (MLA, DeepSeek-V2, 2024). Layers with a
sliding window keep no more than the window. Operations: two for each parameter that a token passes through (Kaplan and
others, "Scaling laws for neural language models", 2020), and four for each element of a query head and each token that
is attended to. Layers with a state of fixed size (Mamba, linear attention) add operations and no bytes a token.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from tierkv.errors import ConfigError
from tierkv.replay.fields import whole
from tierkv.replay.layer_kinds import NOTHING, STATE, WINDOW, Config, kinds_of
from tierkv.replay.models import MODELS, well_known

OPTION = "--model"
_DTYPE_BYTES = {"float32": 4.0, "bfloat16": 2.0, "float16": 2.0, "fp8": 1.0, "float8_e4m3fn": 1.0}
KV_DTYPES = ("bfloat16", "float16", "float32", "fp8")
MOST_LAYERS, MOST_SIZE = 10_000, 10_000_000
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
    path = Path(word)
    if path.is_dir():
        path /= "config.json"
    known = word.lower() if word.lower() in MODELS else None if path.is_file() else well_known(word)
    if known is not None:
        return geometry_from(known, MODELS[known], kv_dtype)
    if not path.is_file():
        raise ConfigError(OPTION, word, f"name a model's config.json, or one of {', '.join(sorted(MODELS))}")
    try:
        config = json.loads(path.read_text())
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError(OPTION, word, f"it cannot be read as JSON: {error}") from None
    if not isinstance(config, dict):
        raise ConfigError(OPTION, word, "a config.json holds one object; name the model's own")
    try:
        name = path.absolute().parent.name if path.name == "config.json" else path.stem
        return geometry_from(name, config, kv_dtype)
    except ConfigError:
        raise
    except (TypeError, ValueError, AttributeError) as error:
        said = str(error) if type(error) is ValueError else f"{type(error).__name__}: {error}"
        raise ConfigError(OPTION, word, f"{said}; name a model's own config.json") from None


def geometry_from(name: str, config: Config, kv_dtype: str | None = None) -> Geometry:
    """Of the fields of a ``config.json``. Raises ``ValueError`` for what is wrong with one, and ``ConfigError`` where
    the dtype has to be given."""
    config = _text_part(config)
    layers = _field(config, "num_hidden_layers", "n_layer", "num_layers", most=MOST_LAYERS)
    dtype = (kv_dtype or str(config.get("dtype") or config.get("torch_dtype") or "bfloat16")).removeprefix(
        "torch."
    )
    if dtype not in _DTYPE_BYTES:
        raise ConfigError("--kv-dtype", dtype, f"it is none of {', '.join(KV_DTYPES)}; name one of them")
    attention = _latent(config) if config.get("kv_lora_rank") else _heads(config)
    kinds = kinds_of(config, layers)
    window = _maybe(config, "sliding_window", "attention_chunk_size")
    groups = []
    for kind, count in Counter(kinds).items():
        if kind in (STATE, NOTHING):
            continue
        size = window if kind == WINDOW else None
        kept_bytes = attention.kept * _DTYPE_BYTES[dtype]
        groups.append(Group(count, size, count * kept_bytes, count * attention.pair_flops))
    if not groups:
        raise ValueError("no layer of it keeps keys and values, so there is nothing to store")
    token_flops = 2.0 * (layers * attention.weights + _feed_forward(config, layers))
    return Geometry(name, tuple(groups), token_flops, kinds.count(STATE), dtype)


@dataclass(frozen=True)
class _Attention:
    """Of one layer."""

    kept: float
    """Numbers that a token leaves behind."""
    pair_flops: float
    weights: float


def _heads(config: Config) -> _Attention:
    hidden = _field(config, "hidden_size", "n_embd")
    heads = _field(config, "num_attention_heads", "n_head")
    shared = _maybe(config, "num_key_value_heads", "num_kv_heads", "n_head_kv", "multi_query_group_num")
    kv_heads = shared or (1 if config.get("multi_query") else heads)
    if kv_heads > heads:
        raise ValueError(f"it has {kv_heads} heads of keys and values and {heads} of queries")
    size = _maybe(config, "head_dim", "kv_channels") or hidden // heads
    if not size:
        raise ValueError(f"{heads} heads do not fit in its hidden size of {hidden}")
    return _Attention(2.0 * kv_heads * size, 4.0 * heads * size, 2.0 * hidden * size * (heads + kv_heads))


def _latent(config: Config) -> _Attention:
    hidden, heads = _field(config, "hidden_size"), _field(config, "num_attention_heads")
    rank, rope = _field(config, "kv_lora_rank"), _field(config, "qk_rope_head_dim")
    plain, value = _field(config, "qk_nope_head_dim"), _field(config, "v_head_dim")
    queries = heads * (plain + rope)
    asked = _maybe(config, "q_lora_rank")
    weights = asked * (hidden + queries) if asked else hidden * queries
    weights += hidden * (rank + rope) + rank * heads * (plain + value) + heads * value * hidden
    return _Attention(float(rank + rope), 2.0 * heads * (plain + rope + value), float(weights))


def _feed_forward(config: Config, layers: int) -> float:
    """Parameters that one token passes through, in all layers."""
    hidden = _field(config, "hidden_size", "n_embd")
    wide = _maybe(config, "intermediate_size", "ffn_hidden_size", "n_inner") or 4 * hidden
    gates = 2 if config.get("model_type") in ("gpt2", "gptj", "falcon", "opt", "phi", "gpt_neox") else 3
    chosen = _maybe(config, "num_experts_per_tok", "moe_topk", "experts_per_token")
    if not chosen:
        return float(layers * gates * hidden * wide)
    expert = _maybe(config, "moe_intermediate_size") or wide
    dense = _maybe(config, "first_k_dense_replace") or 0
    used = chosen * expert + (_maybe(config, "n_shared_experts") or 0) * expert
    used += _maybe(config, "shared_expert_intermediate_size") or 0
    return float(gates * hidden * (dense * wide + (layers - dense) * used))


def _text_part(config: Config) -> Config:
    """Models that see or hear have the part that reads text inside."""
    for name in ("text_config", "llm_config", "language_config", "thinker_config"):
        inner = config.get(name)
        if isinstance(inner, Mapping) and "num_hidden_layers" not in config:
            return _text_part(inner)
    return config


def _field(config: Config, *names: str, most: int = MOST_SIZE) -> int:
    """Raises ``ValueError`` where none of these is there."""
    found = _maybe(config, *names, most=most)
    if found is None:
        raise ValueError(f"it has no {' or '.join(names)}")
    return found


def _maybe(config: Config, *names: str, most: int = MOST_SIZE) -> int | None:
    """The first of these that is there and is not 0."""
    for name in names:
        if config.get(name):
            return whole(config[name], name, most=most)
    return None
