"""A canary: what comes back from the store beside what the model computes, on request.

Meant for a sample of requests where a lossy codec is in use, or to see whether a store gives back what it was given. It
computes the whole prompt, so it costs what the store was to save.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from tierkv.engines.transformers import Connector
from tierkv.engines.transformers_pages import given, new_cache
from tierkv.keys import Extras

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class Canary:
    """Errors are root mean squares over all restored tokens, relative to the computed numbers' own."""

    tokens: int
    """Restored and compared; 0: the store had nothing."""
    key_errors: tuple[float, ...]
    """One for each layer."""
    value_errors: tuple[float, ...]

    @property
    def worst(self) -> float:
        """Infinite where what came back is finite and what was computed is not, or the other way round."""
        return max((*self.key_errors, *self.value_errors), default=0.0)


def compare(connector: Connector, input_ids: Tensor, *, extras: Extras | None = None) -> Canary:
    """Restores a prompt ``[1, tokens]`` and computes it. Layers with a window are compared where they were restored.

    Blocks the calling thread. Raises ``IdentityError`` for a prompt that cannot be named, ``ValueError`` for
    several at once.
    """
    import torch

    if input_ids.ndim != 2 or input_ids.shape[0] != 1:
        raise ValueError(
            f"input_ids of shape {tuple(input_ids.shape)}: give one prompt at a time, [1, tokens]"
        )
    restored = connector.restore(input_ids[0].tolist(), extras)
    if not restored.tokens:
        return Canary(0, (), ())
    computed = new_cache(connector.model.config)
    with torch.inference_mode():
        connector.model(input_ids[:, : restored.tokens], **given(connector.model, computed))
    pairs = list(zip(restored.cache.layers, computed.layers, connector.shape.layers, strict=True))
    first = [
        0 if layer.window_tokens is None else max(0, restored.tokens - layer.window_tokens)
        for *_, layer in pairs
    ]
    keys = [_error(a.keys, b.keys, at) for (a, b, _), at in zip(pairs, first, strict=True)]
    values = [_error(a.values, b.values, at) for (a, b, _), at in zip(pairs, first, strict=True)]
    return Canary(restored.tokens, tuple(keys), tuple(values))


def _error(restored: Any, computed: Any, first: int) -> float:
    ours, theirs = restored[:, :, first:].double(), computed[:, :, first : restored.shape[2]].double()
    apart = (ours - theirs).masked_fill((ours == theirs) | (ours.isnan() & theirs.isnan()), 0)
    wrong = float((apart**2).sum())
    if not math.isfinite(wrong):
        return math.inf
    whole = float((theirs.masked_fill(~theirs.isfinite(), 0) ** 2).sum())
    return math.sqrt(wrong / whole) if whole else float(wrong > 0)
