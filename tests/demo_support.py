"""The demo on a tiny random model, which knows words as numbers. It is loaded by name, in processes of its own: only
there is torch imported.
"""

from __future__ import annotations

import argparse
import re
import sys
import zlib
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from tierkv.demo.acts import EMBEDDED
from tierkv.demo.command import play
from tierkv.demo.engine import Loaded
from tierkv.keys import Weights

BLOCK = 64
VOCABULARY = 4096
SIZES = {
    "host": "16 MiB", "nvme": "32 MiB", "small_host": "1 MiB", "small_nvme": "16 MiB", "valkey_memory": "64 MiB",
    "flush_s": 30.0,
}  # fmt: skip
"""The long text is some 2,900 words, 1.4 MiB of keys and values; the others are some 940 words each."""


class Words:
    """A tokenizer, as far as the demo needs one."""

    def apply_chat_template(self, chat: list[dict[str, str]], **_: Any) -> str:
        return " ".join(f"<{turn['role']}> {turn['content']}" for turn in chat)

    def __call__(self, text: str, **_: Any) -> Any:
        import torch

        ids = [zlib.crc32(word.encode()) % VOCABULARY for word in re.findall(r"\S+", text)]
        return SimpleNamespace(input_ids=torch.tensor([ids]))

    def decode(self, tokens: Any, **_: Any) -> str:
        return " ".join(str(token) for token in tokens)


def tiny(say: Any) -> Loaded:
    """A loader, see ``tierkv.demo.engine.load``."""
    import torch
    import transformers

    say("making a tiny model")
    torch.set_num_threads(1)
    torch.manual_seed(7)
    config = transformers.LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=8192, bos_token_id=0, eos_token_id=None, pad_token_id=0,
    )  # fmt: skip
    model = transformers.AutoModelForCausalLM.from_config(config).eval()
    return Loaded(model, Words(), Weights("revision", "tiny"), BLOCK)


SHORT_TOKENS = 100
"""Fewer than any text of the demo has."""


def mistaken(say: Any) -> Loaded:
    """A model that says something else when the beginning of a prompt comes from a store."""
    import torch

    loaded = tiny(say)
    output = loaded.model.lm_head.weight

    def turn(_module: Any, given: tuple[Any, ...], options: dict[str, Any]) -> None:
        # How a cache is handed on differs between releases of transformers; the end of a prompt alone is short in all.
        tokens = (given[0] if given else options["input_ids"]).shape[1]
        restored = 1 < tokens < SHORT_TOKENS
        if restored or tokens >= SHORT_TOKENS:
            with torch.no_grad():
                output.copy_(-output.abs() if restored else output.abs())

    loaded.model.register_forward_pre_hook(turn, with_kwargs=True)
    return loaded


def options(folder: Path, valkey: str = EMBEDDED) -> argparse.Namespace:
    """Those of the command line, with everything in one folder."""
    (folder / "disk").mkdir(exist_ok=True)
    return argparse.Namespace(
        valkey=valkey, dir=folder / "disk", chart=folder / "chart.png", json=folder / "facts.json"
    )


if __name__ == "__main__":
    # python -m tests.demo_support FOLDER: the whole demo, for tests that interrupt it
    sys.exit(play(options(Path(sys.argv[1])), "tests.demo_support:tiny", **SIZES))
