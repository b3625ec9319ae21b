"""Whose bytes these are: the namespace of an engine, from vLLM's configuration and what its workers have found.

vLLM's block hashes say which tokens, and which adapter's name and path, image, salt and embeddings they had. They do
not say which weights, which layout, which KV dtype or which positions' scaling: that is the namespace's.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import secrets
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from tierkv.digest import default_cache_folder, digest_of
from tierkv.engines.vllm_layout import CacheGroup, layer_groups_of
from tierkv.engines.vllm_messages import WorkerFacts
from tierkv.engines.vllm_options import EXTRA, Options, check_hashes
from tierkv.errors import ConfigError, IdentityError, LayoutError
from tierkv.keys import NamespaceSpec, Weights
from tierkv.layout import Layout, engine_blocks_for

if TYPE_CHECKING:
    from vllm.config import VllmConfig

_COMMIT = re.compile(r"[0-9a-f]{40}")
_NAMES_ONLY = frozenset({"_name_or_path", "_commit_hash", "transformers_version", "torch_dtype"})
"""Fields of a model's configuration that say where it came from, not what it computes."""
_OF_THE_MODELS_FILES = frozenset(
    {
        "auto", "bitsandbytes", "fastsafetensors", "gguf", "hf", "instanttensor", "mistral", "npcache", "pt",
        "runai_streamer", "runai_streamer_sharded", "safetensors", "sharded_state",
    }
)  # fmt: skip
"""Ways to load that take the weights from the folder or the repository that the model is named by. Others take them
from another process, or from where an option of their own says."""
_OF_IMAGES = ("mm_processor_kwargs", "media_io_kwargs", "mm_device_do_normalize", "language_model_only",
              "mm_encoder_attn_dtype", "video_pruning_rate", "video_pruning_method")  # fmt: skip
"""What becomes of an image before the model sees it: vLLM's hash of it is of the image as it came."""
_LENGTH_DEPENDENT_ROPE = frozenset({"dynamic", "longrope", "su"})


def hash_scheme_of(config: VllmConfig, options: Options) -> str:
    """vLLM's name for its block hashes. Raises ``ConfigError`` where they are too weak for the store."""
    name = str(config.cache_config.prefix_caching_hash_algo)
    check_hashes(name, options)
    return f"vllm-{name}"


def layout_of(
    config: VllmConfig, groups: Sequence[CacheGroup], facts: WorkerFacts, hash_tokens: int, options: Options
) -> Layout:
    """Raises ``LayoutError``, and ``ConfigError`` for a ``block_tokens`` that does not fit."""
    layer_groups = layer_groups_of(groups, facts)
    parallel = config.parallel_config
    blocks = engine_blocks_of(options, hash_tokens) or engine_blocks_for(layer_groups, hash_tokens)
    dtypes = sorted({layer.dtype for layer in facts.layers.values()})
    return Layout(
        _layout_id(config, groups, facts),
        f"{config.cache_config.cache_dtype}:{'+'.join(dtypes)}",
        hash_tokens,
        layer_groups,
        blocks,
        tp_size=parallel.tensor_parallel_size,
        pp_size=parallel.pipeline_parallel_size,
        cp_size=parallel.prefill_context_parallel_size,
    )


def engine_blocks_of(options: Options, hash_tokens: int) -> int | None:
    """How many of the engine's hashes a block of the store covers, where the options say it. Raises ``ConfigError``
    for ``block_tokens`` that do not fit."""
    if options.block_tokens is None:
        return None
    blocks, rest = divmod(options.block_tokens, hash_tokens)
    if rest or not blocks:
        hint = f"it must be a multiple of {hash_tokens}, what one hash of the engine covers"
        raise ConfigError(f"{EXTRA}.block_tokens", options.block_tokens, hint)
    return blocks


def _layout_id(config: VllmConfig, groups: Sequence[CacheGroup], facts: WorkerFacts) -> str:
    layers = [
        [(name, facts.layers[name].dtype, *facts.layers[name].shape) for name in group.layers]
        for group in groups
    ]
    parallel = config.parallel_config
    told = {
        "layers": layers,
        "model": model_facts(config),
        "tokens_spread_over": parallel.decode_context_parallel_size,
        "tokens_at_a_time": getattr(parallel, "cp_kv_cache_interleave_size", None),
        "cache_layout": str(getattr(config.cache_config, "kv_cache_layout", None)),
    }
    digest = hashlib.sha256(json.dumps(told, sort_keys=True, default=str).encode()).hexdigest()[:32]
    return f"vllm-{facts.device}-{facts.kernels}-{digest}"


def model_facts(config: VllmConfig) -> dict[str, Any]:
    """What beside the weights changes the keys and values of a token."""
    facts = _facts_of(config.model_config)
    draft = _draft_of(config)
    if draft is not None:
        facts["draft"] = _facts_of(draft)
    adapters = None if config.lora_config is None else _adapter_facts(config.lora_config, config.model_config)
    if adapters:
        facts["adapters"] = adapters
    return facts


def _facts_of(model: Any) -> dict[str, Any]:
    fields = {name: value for name, value in model.hf_config.to_dict().items() if name not in _NAMES_ONLY}
    facts: dict[str, Any] = {
        "config": fields,
        "dtype": str(model.dtype),
        "quantization": [str(getattr(model, name, None)) for name in ("quantization", "quantization_config")],
        "code": str(getattr(model, "model_impl", None)),
    }
    if _has_length_dependent_rope(fields):
        facts["max_model_len"] = model.max_model_len
    if model.multimodal_config is not None:
        facts["images"] = [getattr(model.multimodal_config, name, None) for name in _OF_IMAGES]
        facts["image_files"] = getattr(model, "hf_image_processor_config", None)
    return facts


def _adapter_facts(lora: Any, model: Any) -> dict[str, Any]:
    """What an engine makes of an adapter's files. Nothing where it takes them as they are: such engines share what was
    computed without an adapter with engines that know none."""
    facts: dict[str, Any] = {}
    if lora.target_modules:
        facts["parts"] = sorted(lora.target_modules)
    if str(lora.lora_dtype) not in ("auto", str(model.dtype)):
        facts["dtype"] = str(lora.lora_dtype)
    if getattr(lora, "enable_tower_connector_lora", False):
        facts["towers"] = True
    return facts


def _draft_of(config: VllmConfig) -> Any:
    """The configuration of a draft model with weights of its own."""
    draft = getattr(config.speculative_config, "draft_model_config", None)
    return None if draft is None or draft.model == config.model_config.model else draft


def _has_length_dependent_rope(fields: Any) -> bool:
    if isinstance(fields, Mapping):
        return any(
            (name in ("rope_type", "type") and value in _LENGTH_DEPENDENT_ROPE)
            or _has_length_dependent_rope(value)
            for name, value in fields.items()
        )
    return False


def spec_of(config: VllmConfig, weights: Weights, layout: Layout, scheme: str, epoch: int) -> NamespaceSpec:
    from vllm import __version__

    return NamespaceSpec(weights, layout, f"vllm {__version__}", weights_epoch=epoch, hash_scheme=scheme)


def weights_of(config: VllmConfig, options: Options) -> Weights:
    """Of the model and of a draft model that has KV of its own. Reads files, once in their life: blocking. Raises
    ``IdentityError`` when nothing says which weights these are."""
    model = config.model_config
    if options.weights_revision is not None:
        return Weights("revision", options.weights_revision)
    load_format = str(config.load_config.load_format)
    if load_format not in _OF_THE_MODELS_FILES:
        raise IdentityError(
            f"no file of the model says which weights load_format={load_format} brings: name them with "
            f"{EXTRA}.weights_revision"
        )
    named = [_name_of(model)]
    draft = _draft_of(config)
    if draft is not None:
        named.append(_name_of(draft))
    if getattr(config.cache_config, "calculate_kv_scales", False):
        named.append(("scales", secrets.token_hex(16)))  # they follow from the first batch of this process
    kinds = {kind for kind, _ in named}
    value = "+".join(value for _, value in named)
    return Weights("digest" if kinds == {"digest"} else "revision", value)


def _name_of(model: Any) -> tuple[str, str]:
    path, elsewhere = str(model.model), str(getattr(model, "model_weights", "") or "")
    if elsewhere and elsewhere != path:  # an object store; the folder has the rest
        raise IdentityError(
            f"the weights are at {elsewhere!r}: name them with {EXTRA}.weights_revision, anew when they change"
        )
    if os.path.exists(path):
        return "digest", digest_of(path, cache_folder=default_cache_folder())
    commit = getattr(model.hf_config, "_commit_hash", None) or model.revision or ""
    if _COMMIT.fullmatch(str(commit)):
        return "revision", f"{path}@{commit}"
    raise IdentityError(
        f"model {path!r} is neither a folder nor of a known commit: name its weights with {EXTRA}.weights_revision"
    )


def renewed(weights: Weights) -> Weights:
    """Weights that were changed in this engine alone: a name that no other engine and no later start will have."""
    return Weights("revision", f"{weights.value.partition('#')[0]}#{secrets.token_hex(16)}")


def hashes_images(config: VllmConfig) -> bool:
    """False when vLLM names images by their place in a request only: with both of its caches off."""
    multimodal = config.model_config.multimodal_config
    off = multimodal is not None and multimodal.mm_processor_cache_gb == 0
    return bool(config.cache_config.enable_prefix_caching) or not off


def check_parallel(config: VllmConfig) -> None:
    """Raises ``LayoutError`` for engines whose ranks are not all on this host."""
    if getattr(config.parallel_config, "nnodes", 1) > 1:
        raise LayoutError("its ranks are on several hosts; a sidecar serves those of one")
