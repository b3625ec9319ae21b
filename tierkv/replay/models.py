"""Well-known models: the fields of each ``config.json`` that say what its keys and values take, as published."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, Final


def _dense(layers: int, hidden: int, heads: int, kv_heads: int, wide: int, **more: Any) -> dict[str, Any]:
    return {
        "num_hidden_layers": layers,
        "hidden_size": hidden,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "intermediate_size": wide,
        **more,
    }


def _alternating(layers: int) -> list[str]:
    return ["sliding_attention" if at % 2 == 0 else "full_attention" for at in range(layers)]


def _gpt_oss(layers: int) -> dict[str, Any]:
    return _dense(layers, 2880, 64, 8, 2880, head_dim=64, num_experts_per_tok=4, sliding_window=128,
                  layer_types=_alternating(layers))  # fmt: skip


MODELS: Final[Mapping[str, Mapping[str, Any]]] = {
    "llama-3.1-8b": _dense(32, 4096, 32, 8, 14336),
    "llama-3.1-70b": _dense(80, 8192, 64, 8, 28672),
    "llama-3.1-405b": _dense(126, 16384, 128, 8, 53248),
    "mistral-7b": _dense(32, 4096, 32, 8, 14336),
    "mixtral-8x7b": _dense(32, 4096, 32, 8, 14336, num_experts_per_tok=2),
    "qwen2.5-7b": _dense(28, 3584, 28, 4, 18944),
    "qwen2.5-32b": _dense(64, 5120, 40, 8, 27648),
    "qwen2.5-72b": _dense(80, 8192, 64, 8, 29568),
    "qwen3-8b": _dense(36, 4096, 32, 8, 12288, head_dim=128),
    "qwen3-32b": _dense(64, 5120, 64, 8, 25600, head_dim=128),
    "qwen3-30b-a3b": _dense(48, 2048, 32, 4, 6144, head_dim=128, num_experts_per_tok=8,
                            moe_intermediate_size=768),
    "qwen3-235b-a22b": _dense(94, 4096, 64, 4, 12288, head_dim=128, num_experts_per_tok=8,
                              moe_intermediate_size=1536),
    "gemma-3-27b": _dense(62, 5376, 32, 16, 21504, head_dim=128, sliding_window=1024, sliding_window_pattern=6),
    "gpt-oss-20b": _gpt_oss(24),
    "gpt-oss-120b": _gpt_oss(36),
    "deepseek-v3": {
        **_dense(61, 7168, 128, 128, 18432),
        "kv_lora_rank": 512, "q_lora_rank": 1536,
        "qk_rope_head_dim": 64, "qk_nope_head_dim": 128, "v_head_dim": 128,
        "num_experts_per_tok": 8, "moe_intermediate_size": 2048,
        "n_shared_experts": 1, "first_k_dense_replace": 3,
    },
}  # fmt: skip

_OF_A_RELEASE: Final = re.compile(r"-(instruct|it|chat|base|hf|fp8|awq|gptq|v0\.[23]|\d{4})(?=-|$)")
"""In names of published weights: what says how they were trained or packed, and nothing of the cache."""


def well_known(word: str) -> str | None:
    """The name here of ``Qwen/Qwen2.5-7B-Instruct`` and the like; ``None``: it is not known."""
    name = _OF_A_RELEASE.sub("", word.lower().rpartition("/")[2]).removeprefix("meta-")
    return name if name in MODELS else None
