"""Models for the tests: random ones that take no time and whose words depend on every block they are given, and a
real one. Each is made once, in a folder of the user's cache."""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path

from tierkv.demo.model import converted

MADE = 4
"""Changes whenever the same name would be another model."""
SIZES = {
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "vocab_size": 2048,
    "max_position_embeddings": 4096,
    "initializer_range": 0.15,
}
"""With the usual range a random model says the same word again and again, whatever its cache holds."""
RANK = 8


def model(name: str) -> Path:
    """The folder of a model."""
    if name == "smollm2":
        return converted(print)
    home = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "tierkv" / "test-models"
    folder = home / f"{name}-{MADE}"
    if not folder.is_dir():
        home.mkdir(parents=True, exist_ok=True)
        partial = Path(tempfile.mkdtemp(prefix=f".{name}.", dir=home))
        MODELS[name](partial)
        try:
            partial.rename(folder)
        except OSError:  # another process was faster
            shutil.rmtree(partial)
    return folder


def _llama(folder: Path, seed: int = 0) -> None:
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(seed)
    LlamaForCausalLM(LlamaConfig(**SIZES)).float().save_pretrained(folder)


def _other(folder: Path) -> None:
    """The same in all but the weights."""
    _llama(folder, 1)


def _hybrid(folder: Path) -> None:
    """Half of its layers look back 64 tokens, the others at everything: two groups of layers, two block tables."""
    import torch
    from transformers import Gemma3ForCausalLM, Gemma3TextConfig

    torch.manual_seed(0)
    kinds = ["sliding_attention", "full_attention"] * 2
    config = Gemma3TextConfig(**SIZES, sliding_window=64, layer_types=kinds, query_pre_attn_scalar=64)
    model = Gemma3ForCausalLM(config).float()
    with torch.no_grad():
        model.get_input_embeddings().weight.mul_(0.05)  # else the last token alone says what comes next
    model.save_pretrained(folder)


MODELS: dict[str, Callable[[Path], None]] = {"llama": _llama, "other": _other, "hybrid": _hybrid}


def write_adapter(folder: Path, seed: int) -> None:
    """A LoRA adapter for ``llama``, strong enough to change what it says."""
    import torch
    from safetensors.torch import save_file

    generator = torch.Generator().manual_seed(seed)
    hidden, kv = SIZES["hidden_size"], 2 * 64
    tensors = {}
    for layer in range(int(SIZES["num_hidden_layers"])):
        for module, out in (("q_proj", hidden), ("v_proj", kv)):
            name = f"base_model.model.model.layers.{layer}.self_attn.{module}"
            tensors[f"{name}.lora_A.weight"] = torch.randn(RANK, int(hidden), generator=generator) * 0.2
            tensors[f"{name}.lora_B.weight"] = torch.randn(int(out), RANK, generator=generator) * 0.2
    folder.mkdir(parents=True, exist_ok=True)
    save_file(tensors, folder / "adapter_model.safetensors")
    config = {
        "peft_type": "LORA", "task_type": "CAUSAL_LM", "r": RANK, "lora_alpha": RANK, "bias": "none",
        "target_modules": ["q_proj", "v_proj"], "base_model_name_or_path": "llama", "lora_dropout": 0.0,
    }  # fmt: skip
    (folder / "adapter_config.json").write_text(json.dumps(config))
