"""The models of the benchmarks with vLLM, as folders."""

from __future__ import annotations

import sys
from pathlib import Path

from tierkv.demo.model import converted


def smollm2() -> Path:
    """SmolLM2-135M-Instruct."""
    return converted(lambda text: print(text, file=sys.stderr, flush=True))


def tiny() -> Path:
    """A random Llama of 4 layers, that of the tests: its prompts cost next to nothing."""
    from tests.vllm.models import model

    return model("llama")
