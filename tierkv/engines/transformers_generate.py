"""``model.generate`` that goes on from a cache instead of computing the whole prompt.

Only options under which the cache holds one plain sequence are let through: then the first tokens of the output name
the keys and values of the cache one by one.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from tierkv.clock import Clock, SystemClock
from tierkv.engines.transformers_pages import given

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import DynamicCache, PreTrainedModel

# What `generate` takes beside the fields of GenerationConfig without a change to keys and values.
_HARMLESS = frozenset({
    "attention_mask", "generation_config", "logits_processor", "prefix_allowed_tokens_fn", "stopping_criteria",
    "streamer", "tokenizer",
})  # fmt: skip

# Settings under which one sequence's cache is not what `generate` fills, and the value that is fine.
_ONLY = {
    "num_beams": 1,
    "num_return_sequences": 1,
    "use_cache": True,
    "cache_implementation": None,
    "prefill_chunk_size": None,
    "token_healing": False,
}

# Settings of decoding by guess and check.
_SPECULATIVE = ("prompt_lookup_num_tokens", "assistant_early_exit", "use_mtp")


@dataclass(frozen=True)
class Generated:
    """What ``generate_from`` brings back."""

    output: Any
    """What ``model.generate`` returned: token ids ``[1, tokens]``, or its output object."""
    tokens: tuple[int, ...]
    """The prompt and what was generated."""
    cache: DynamicCache
    """Keys and values of all tokens but the last; other caches are left as they were."""
    settled_tokens: int
    """How many leading tokens of ``cache`` are final: computed and accepted."""
    first_token_s: float
    """From the call to the first new token."""


def generate_from(
    model: PreTrainedModel,
    input_ids: Tensor,
    cache: DynamicCache,
    *,
    clock: Clock | None = None,
    **options: Any,
) -> Generated:
    """``model.generate`` on a prompt whose first tokens are in ``cache`` already.

    ``input_ids`` is the whole prompt, ``[1, tokens]``; ``cache`` holds the keys and values of a true prefix of it, at
    least one token shorter (an empty one from ``new_cache`` computes all), and is grown in place. ``options`` are those
    of ``generate``, sampling included. Blocks the calling thread. Raises ``ValueError`` for a cache that is not shorter
    than the prompt and for options under which the cache would not hold one plain sequence; see ``check_options``.
    """
    check_options(model, input_ids, options)
    prompt = input_ids.shape[1]
    if cache.get_seq_length() >= prompt:
        raise ValueError(
            f"the cache holds {cache.get_seq_length()} tokens, the prompt has {prompt}: leave one to compute"
        )
    ticker = _FirstToken(clock or SystemClock())
    criteria = [*(options.pop("stopping_criteria", None) or ()), ticker]
    options["attention_mask"] = input_ids.new_ones(input_ids.shape)
    output = model.generate(
        input_ids, **given(model, cache), stopping_criteria=_criteria_list(criteria), **options
    )
    sequences = getattr(output, "sequences", output)
    tokens = tuple(sequences[0].tolist())
    speculative = any(_setting(model, options, name) for name in _SPECULATIVE)
    settled = prompt if speculative else len(tokens) - 1
    return Generated(output, tokens, cache, min(settled, cache.get_seq_length()), ticker.after_s)


def check_options(model: PreTrainedModel, input_ids: Tensor, options: Mapping[str, Any]) -> None:
    """Raises ``ValueError``, with the way out, for a call of ``generate`` that cannot go on from stored blocks:
    several sequences, padding, beams, another cache, input beside the tokens."""
    from transformers import GenerationConfig

    if input_ids.ndim != 2 or input_ids.shape[0] != 1 or input_ids.shape[1] < 1:
        raise ValueError(
            f"input_ids of shape {tuple(input_ids.shape)}: give one prompt at a time, [1, tokens]"
        )
    mask = options.get("attention_mask")
    if mask is not None and (mask.shape != input_ids.shape or not bool((mask == 1).all())):
        raise ValueError("attention_mask hides tokens: give the prompt without padding")
    known = GenerationConfig()
    for name in options:
        if name not in _HARMLESS and not hasattr(known, name):
            raise ValueError(
                f"{name}: it could change keys and values beside the tokens; call model.generate itself"
            )
    for name, only in _ONLY.items():
        value = _setting(model, options, name)
        if value is not None and value != only:
            raise ValueError(f"{name} = {value!r}: only {only!r} keeps one plain sequence in the cache")


def _setting(model: PreTrainedModel, options: Mapping[str, Any], name: str) -> Any:
    """A setting as ``generate`` will see it: the call's, else its configuration's, else the model's."""
    if options.get(name) is not None:
        return options[name]
    own = options.get("generation_config")
    if own is not None and getattr(own, name, None) is not None:
        return getattr(own, name)
    return getattr(model.generation_config, name, None)


def _criteria_list(criteria: list[Any]) -> Any:
    from transformers import StoppingCriteriaList

    return StoppingCriteriaList(criteria)


class _FirstToken:
    """A stopping criterion that never stops and notes when it is first asked: after the first token."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._start_s = clock.now_s()
        self.after_s = 0.0
        self._seen = False

    def __call__(self, input_ids: Tensor, scores: Any, **_: Any) -> Tensor:
        if not self._seen:
            self._seen, self.after_s = True, self._clock.now_s() - self._start_s
        return input_ids.new_zeros(input_ids.shape[0]).bool()
