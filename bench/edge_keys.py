"""Row ``keys_chain``: the block hashes of a long prompt."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import numpy as np

from bench.harness import Reach, Row, Sample, Settings, Sides
from bench.limit_chain import bare_chain, bare_chain_joined
from bench.names import BLOCK_TOKENS, namespace_for


class KeysChain:
    name = "keys_chain"
    rows = (
        Row(
            "keys_chain",
            "ms",
            "ms",
            "wall time to name 131,072 tokens (an int32 array) in blocks of 16; limit: the bare loop of chained sha256",
            Reach("ratio", "<=", 1.3),
        ),
    )

    @contextmanager
    def open(self, settings: Settings) -> Iterator[Sides]:
        namespace = namespace_for(settings.block_bytes)
        tokens = np.random.default_rng(7).integers(0, 128_000, settings.chain_tokens, dtype=np.int32)
        bare = _faster_of(
            lambda: bare_chain(tokens, BLOCK_TOKENS, namespace.root),
            lambda: bare_chain_joined(tokens, BLOCK_TOKENS, namespace.root),
        )

        def check() -> None:
            if list(namespace.chain(tokens).hashes) != bare():
                raise RuntimeError("keys_chain: the two sides name the blocks differently")

        yield Sides(lambda: _timed(lambda: namespace.chain(tokens)), lambda: _timed(bare), check)


def _timed(call: Callable[[], object]) -> Sample:
    start_s = time.perf_counter()
    kept = call()
    elapsed_s = time.perf_counter() - start_s
    del kept  # freed outside of the timing, on both sides
    return {"ms": elapsed_s * 1e3}


def _faster_of(*forms: Callable[[], list[bytes]]) -> Callable[[], list[bytes]]:
    return min(forms, key=lambda form: min(_timed(form)["ms"] for _ in range(7)))
