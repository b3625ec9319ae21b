"""Tiny random models of several architectures, made once for the whole run."""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
import transformers

torch.set_num_threads(1)  # matrices this small lose by threads

BLOCK = 16
VOCABULARY = 199
SMALL = {
    "vocab_size": VOCABULARY, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 512,
    "bos_token_id": 0, "eos_token_id": None, "pad_token_id": 0,
}  # fmt: skip
FAMILIES = ("llama", "qwen2", "mistral-window", "gemma2", "deepseek")


def config_of(family: str) -> Any:
    match family:
        case "llama":
            return transformers.LlamaConfig(**SMALL)
        case "qwen2":
            return transformers.Qwen2Config(**SMALL, use_sliding_window=False)
        case "mistral-window":  # every layer looks back 40 tokens
            return transformers.MistralConfig(**SMALL, head_dim=16, sliding_window=40)
        case "gemma2":  # a window layer and a full one by turns
            return transformers.Gemma2Config(**SMALL, head_dim=24, sliding_window=40)
        case "deepseek":  # one latent for all heads, and a narrow rotary part
            return transformers.DeepseekV3Config(
                **{**SMALL, "num_key_value_heads": 4}, q_lora_rank=None, kv_lora_rank=32, qk_rope_head_dim=8,
                qk_nope_head_dim=16, v_head_dim=20, first_k_dense_replace=2,
            )  # fmt: skip
    raise AssertionError(family)


@cache
def model_of(family: str) -> Any:
    """In evaluation mode; tests that change it must copy it."""
    torch.manual_seed(7)
    return transformers.AutoModelForCausalLM.from_config(config_of(family)).eval()


def prompt_of(tokens: int, seed: int = 1) -> Any:
    """Random token ids, ``[1, tokens]``; the same seed begins alike."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(1, VOCABULARY, (1, 1024), generator=generator)[:, :tokens]
