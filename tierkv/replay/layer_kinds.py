"""What each layer of a model is, by the many words in which a ``config.json`` says so.

A model whose layers are not all alike names them one by one (``layer_types``), by a period (Jamba, Qwen3-Next, Gemma),
by the numbers of those that attend (Bamba), or by a letter for each (Nemotron-H).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from tierkv.replay.fields import whole

FULL: Final = "all tokens"
WINDOW: Final = "a window"
STATE: Final = "a state of fixed size"
NOTHING: Final = "no attention and no state"
Config = Mapping[str, Any]

_WINDOWED = ("sliding_attention", "chunked_attention", "local_attention")
_ATTENDS = ("full_attention", "attention", "hybrid")
_LETTERS = {"*": FULL, "M": STATE, "-": NOTHING, "E": NOTHING}


def kinds_of(config: Config, layers: int) -> list[str]:
    """From the first layer on. Raises ``ValueError``."""
    found = _one_by_one(config, layers)
    if found is None:
        found = _by_period(config, layers)
    if found is None:
        found = _windowed(config, layers)
    if len(found) < layers:
        raise ValueError(f"it says what {len(found):,} of its {layers:,} layers are")
    return found[:layers]  # some name those behind the last too, which guess further tokens


def _one_by_one(config: Config, layers: int) -> list[str] | None:
    named = config.get("layer_types") or config.get("layers_block_type")
    if named:
        if not isinstance(named, list):
            raise ValueError("layer_types is no list")
        return [_kind(str(one)) for one in named]
    letters = config.get("hybrid_override_pattern")
    if letters:
        if not set(letters) <= set(_LETTERS):
            raise ValueError(f"hybrid_override_pattern has other letters than {' '.join(_LETTERS)}")
        return [_LETTERS[letter] for letter in letters]
    if config.get("attn_type_list"):
        return [FULL if one else STATE for one in config["attn_type_list"]]
    attending = config.get("attn_layer_indices")
    return None if not attending else [FULL if at in attending else STATE for at in range(layers)]


def _by_period(config: Config, layers: int) -> list[str] | None:
    """The other layers hold a state."""
    if config.get("attn_layer_period"):
        period = whole(config["attn_layer_period"], "attn_layer_period")
        offset = whole(config.get("attn_layer_offset", 0), "attn_layer_offset", least=0)
    elif config.get("full_attention_interval"):
        period = whole(config["full_attention_interval"], "full_attention_interval")
        offset = period - 1
    else:
        return None
    return [FULL if at % period == offset else STATE for at in range(layers)]


def _windowed(config: Config, layers: int) -> list[str]:
    if not config.get("sliding_window") or config.get("use_sliding_window") is False:
        return [FULL] * layers
    every = config.get("sliding_window_pattern") or config.get("_sliding_window_pattern")
    if every is None and config.get("model_type") == "gemma2":
        every = 2
    if every:
        every = whole(every, "sliding_window_pattern")
        return [FULL if (at + 1) % every == 0 else WINDOW for at in range(layers)]
    first = 0
    if config.get("use_sliding_window"):
        first = whole(config.get("max_window_layers") or 0, "max_window_layers", least=0)
    return [FULL if at < first else WINDOW for at in range(layers)]


def _kind(word: str) -> str:
    if word in _WINDOWED:
        return WINDOW
    return FULL if word in _ATTENDS else STATE
