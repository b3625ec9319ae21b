"""`python -m bench.codec_loss --into docs/codecs.md`: what each codec does to a model's answers, measured on SmolLM2.

The model computes the keys and values of a text's beginning; they are encoded and decoded block by block as an edge
of the store would, and the model goes on from what comes back. Shown for each codec: how large the blocks are, how
far keys and values are off, the perplexity of the text that follows, and how many of 200 greedy tokens are the same.

    --into FILE    renews the table between the two marks in FILE
    --json FILE    the same figures for machines

Needs the demo's model (`make demo`); takes some minutes.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from bench.harness import Unavailable
from bench.real_kv import BLOCK_TOKENS, cache_of, layout_of_model, model, text_tokens
from tierkv.codec import Codec, codec_named, codec_with_code, fitted
from tierkv.engines.transformers_pages import given

PREFIX_BLOCKS = 8
SCORED_TOKENS = 512
GREEDY_TOKENS = 200
CODECS = ("planes_zstd", "int8", "fp8_e4m3")
DTYPES = ("bfloat16", "float32")
"""How the cache is kept; the model itself computes in fp32."""

BEGIN, END = "<!-- measured: bench.codec_loss -->", "<!-- end of what was measured -->"


@dataclass
class Loss:
    """One row. Errors are root mean squares, relative to the numbers' own."""

    codec: str
    dtype: str
    stored_share: float
    key_error: float
    value_error: float
    perplexity: float
    same_of_greedy: int
    """Of 200 tokens that the exact cache gives, how many the model chooses as well when it is led along them."""
    first_difference: int | None
    """The first token that is another when it goes its own way; ``None``: all 200 are the same."""


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m bench.codec_loss", description="What each codec does to a model's answers."
    )
    parser.add_argument("--into", type=Path, metavar="FILE", help="renew the table in this page")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures here")
    options = parser.parse_args(arguments)
    try:
        rows = measure()
    except Unavailable as error:
        print(f"bench.codec_loss: skipped: {error}")
        return 0
    print("\n".join(table(rows)))
    if options.into is not None:
        before, _, rest = options.into.read_text().partition(BEGIN)
        _, _, after = rest.partition(END)
        options.into.write_text("\n".join([before + BEGIN, *table(rows), END]) + after)
    if options.json is not None:
        options.json.write_text(json.dumps([asdict(row) for row in rows], indent=2) + "\n")
    return 0


def measure() -> list[Loss]:
    """Raises ``Unavailable`` without the model."""
    prefix = PREFIX_BLOCKS * BLOCK_TOKENS
    tokens = text_tokens(prefix + SCORED_TOKENS)
    progress("the text's beginning is computed")
    exact = cache_of(tokens[:prefix])
    progress("200 tokens from the exact cache")
    greedy = generate(exact, tokens[prefix])
    rows = []
    for dtype in DTYPES:
        for codec in ("raw", *CODECS):
            progress(f"{codec} of {dtype}")
            rows.append(loss_of(codec, dtype, exact, tokens, greedy))
    return rows


def loss_of(codec: str, dtype: str, exact: Any, tokens: list[int], greedy: list[int]) -> Loss:
    cached, share = through(codec, dtype, exact)
    keys, values = errors(exact, cached)
    prefix = PREFIX_BLOCKS * BLOCK_TOKENS
    led = [tokens[prefix], *greedy[:-1]]
    chosen = logits(cached, led).argmax(-1).tolist()
    same = sum(a == b for a, b in zip(chosen, greedy, strict=True))
    own = (
        generate(cached, tokens[prefix])
        if codec not in ("raw", "planes_zstd") or dtype != "float32"
        else greedy
    )
    first = next((i for i, (a, b) in enumerate(zip(own, greedy, strict=True)) if a != b), None)
    return Loss(codec, dtype, share, keys, values, perplexity(cached, tokens[prefix:]), same, first)


def through(name: str, dtype: str, exact: Any) -> tuple[Any, float]:
    """The cache after each of its blocks was encoded and decoded; stored bytes for each decoded byte."""
    import numpy as np
    import torch

    from bench.real_kv import block_bytes

    layout = layout_of_model(dtype)
    [group] = layout.groups
    codec: Codec = fitted(codec_named(name), group, dtype)
    made = copy_of(exact)
    stored_bytes = total_bytes = 0
    for block in range(PREFIX_BLOCKS):
        plain = block_bytes(exact, block, dtype)
        room, back = memoryview(bytearray(2 * len(plain))), bytearray(len(plain))
        length = codec.encode_into(memoryview(plain), room)
        if length is None:
            raise RuntimeError(f"{name} encodes nothing of {dtype}")
        codec_with_code(codec.code).decode_into(room[:length], memoryview(back))
        stored_bytes, total_bytes = stored_bytes + length, total_bytes + len(plain)
        flat = torch.from_numpy(np.frombuffer(back, np.uint8)).view(getattr(torch, dtype)).float()
        span, at = slice(block * BLOCK_TOKENS, (block + 1) * BLOCK_TOKENS), 0
        for layer in made.layers:
            for tensor in (layer.keys, layer.values):
                place = tensor[0, :, span]
                place.copy_(flat[at : at + place.numel()].reshape(place.shape))
                at += place.numel()
    return made, stored_bytes / total_bytes


def copy_of(cached: Any) -> Any:
    """Another cache with the same numbers."""
    import copy

    return copy.deepcopy(cached)


def errors(exact: Any, other: Any) -> tuple[float, float]:
    """Of keys and of values."""
    found = []
    for what in ("keys", "values"):
        wrong = sum(
            float(((getattr(a, what) - getattr(b, what)) ** 2).sum())
            for a, b in zip(exact.layers, other.layers, strict=True)
        )
        whole = sum(float((getattr(a, what) ** 2).sum()) for a in exact.layers)
        found.append(math.sqrt(wrong / whole))
    return found[0], found[1]


def logits(cached: Any, tokens: list[int]) -> Any:
    """What the model says after each of these tokens, behind a copy of the cache."""
    import torch

    with torch.inference_mode():
        return model().model(torch.tensor([tokens]), **given(model().model, copy_of(cached))).logits[0]


def perplexity(cached: Any, tokens: list[int]) -> float:
    import torch

    said = torch.log_softmax(logits(cached, tokens[:-1]), -1)
    chosen = said.gather(1, torch.tensor(tokens[1:])[:, None])
    return math.exp(-float(chosen.mean()))


def generate(cached: Any, first: int) -> list[int]:
    """200 tokens, each the likeliest, behind ``first``."""
    import torch

    own, token, found = copy_of(cached), first, []
    with torch.inference_mode():
        for _ in range(GREEDY_TOKENS):
            said = model().model(torch.tensor([[token]]), **given(model().model, own)).logits[0, -1]
            token = int(said.argmax())
            found.append(token)
    return found


def table(rows: Sequence[Loss]) -> list[str]:
    lines = [
        (
            "| cache kept as | codec | stored | error of keys | of values | perplexity | led: same of 200 | "
            "alone: first other |"
        ),
        "|---|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        first = "none" if row.first_difference is None else f"token {row.first_difference + 1}"
        lines.append(
            f"| {row.dtype} | `{row.codec}` | {row.stored_share:.1%} | {row.key_error:.2%} | {row.value_error:.2%} | "
            f"{row.perplexity:.4f} | {row.same_of_greedy} | {first} |"
        )
    return lines


def progress(text: str) -> None:
    print(f"... {text}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
