"""The limit of naming a prompt: the bare loop of chained sha256, by the cheapest of its forms."""

from __future__ import annotations

import hashlib

import numpy as np
from numpy.typing import NDArray


def bare_chain(tokens: NDArray[np.int32], block_tokens: int, root: bytes) -> list[bytes]:
    """sha256(previous | tokens of the block) for each full block."""
    sha256, raw, step = hashlib.sha256, tokens.tobytes(), 4 * block_tokens
    previous, digests = root, []
    for start in range(0, len(raw) - step + 1, step):
        digest = sha256(previous)
        digest.update(raw[start : start + step])
        previous = digest.digest()
        digests.append(previous)
    return digests


def bare_chain_joined(tokens: NDArray[np.int32], block_tokens: int, root: bytes) -> list[bytes]:
    """The same with one call a block over a joined string."""
    sha256, raw, step = hashlib.sha256, tokens.tobytes(), 4 * block_tokens
    previous, digests = root, []
    for start in range(0, len(raw) - step + 1, step):
        previous = sha256(previous + raw[start : start + step]).digest()
        digests.append(previous)
    return digests
