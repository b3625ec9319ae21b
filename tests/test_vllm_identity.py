"""Whose bytes an engine's blocks are: the namespace has all that changes the KV of a token, and only that."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.stand_in_vllm import worker_modules
from tierkv.engines.vllm_options import Options
from tierkv.errors import IdentityError
from tierkv.layout import GroupKind

modules = worker_modules()
identity = modules["vllm_identity"]
COMMIT = "0123456789abcdef0123456789abcdef01234567"


class HfConfig(SimpleNamespace):
    def to_dict(self) -> dict[str, Any]:
        return dict(vars(self))


def model(**changes: Any) -> Any:
    hf = HfConfig(
        architectures=["LlamaForCausalLM"], rope_parameters={"rope_type": "yarn"}, sliding_window=None
    )
    return SimpleNamespace(
        **{
            "model": "org/model", "revision": COMMIT, "model_weights": "", "hf_config": hf, "dtype": "torch.bfloat16",
            "quantization": None, "quantization_config": None, "model_impl": "auto", "max_model_len": 2048,
            "multimodal_config": None, "hf_image_processor_config": {},
        }
        | changes
    )  # fmt: skip


def seeing(**changes: Any) -> Any:
    return SimpleNamespace(
        **{"mm_processor_kwargs": None, "media_io_kwargs": {}, "mm_processor_cache_gb": 4} | changes
    )


def lora(**changes: Any) -> Any:
    return SimpleNamespace(
        **{
            "target_modules": None, "lora_dtype": "torch.bfloat16", "enable_tower_connector_lora": False,
            "max_lora_rank": 16,
        }
        | changes
    )  # fmt: skip


def config(**changes: Any) -> Any:
    return SimpleNamespace(
        **{
            "model_config": model(),
            "load_config": SimpleNamespace(load_format="auto"),
            "cache_config": SimpleNamespace(cache_dtype="auto", kv_cache_layout="BHNC"),
            "parallel_config": SimpleNamespace(
                tensor_parallel_size=1, pipeline_parallel_size=1, prefill_context_parallel_size=1,
                decode_context_parallel_size=2, cp_kv_cache_interleave_size=1,
            ),
            "speculative_config": None,
            "lora_config": None,
        }
        | changes
    )  # fmt: skip


def layout_id(its: Any, dtypes: tuple[str, str] = ("bfloat16", "uint8")) -> str:
    group = modules["vllm_layout"].CacheGroup(0, GroupKind.FULL, 16, None, False, ("a", "b"))
    messages = modules["vllm_messages"]
    layers = {
        name: messages.LayerFacts((2, 16, 8), dtype, 512) for name, dtype in zip("ab", dtypes, strict=True)
    }
    facts = messages.WorkerFacts("cpu", "CPU_ATTN/vec", layers)
    found: str = identity.layout_of(its, [group], facts, 16, Options()).layout_id
    return found


def with_hf(**fields: Any) -> Any:
    its = model()
    vars(its.hf_config).update(fields)
    return config(model_config=its)


def with_parallel(**fields: Any) -> Any:
    its = config()
    vars(its.parallel_config).update(fields)
    return its


def drafting(**changes: Any) -> Any:
    draft = model(**{"model": "org/draft"} | changes)
    return config(speculative_config=SimpleNamespace(draft_model_config=draft))


DIFFERENT: dict[str, tuple[Any, Any]] = {
    "rope": (config(), with_hf(rope_parameters={"rope_type": "yarn", "factor": 4.0})),
    "window": (config(), with_hf(sliding_window=64)),
    "architecture": (config(), with_hf(architectures=["OtherForCausalLM"])),
    "dtype": (config(), config(model_config=model(dtype="torch.float16"))),
    "quantization": (config(), config(model_config=model(quantization="fp8"))),
    "options of the quantization": (config(), config(model_config=model(quantization_config={"ignore": ["k"]}))),
    "code of the model": (config(), config(model_config=model(model_impl="transformers"))),
    "length, where rope depends on it": tuple(
        config(model_config=model(hf_config=HfConfig(rope_parameters={"type": "longrope"}), max_model_len=length))
        for length in (2048, 4096)
    ),  # type: ignore[dict-item]
    "tokens on a rank in a row": (config(), with_parallel(cp_kv_cache_interleave_size=8)),
    "what becomes of images": tuple(
        config(model_config=model(multimodal_config=seeing(mm_processor_kwargs=kwargs)))
        for kwargs in (None, {"do_normalize": False})
    ),  # type: ignore[dict-item]
    "files about images": tuple(
        config(model_config=model(multimodal_config=seeing(), hf_image_processor_config={"image_mean": [mean]}))
        for mean in (0.5, 0.6)
    ),  # type: ignore[dict-item]
    "parts that adapters change": (
        config(lora_config=lora()), config(lora_config=lora(target_modules=["q_proj"])),
    ),
    "dtype of adapters": (config(lora_config=lora()), config(lora_config=lora(lora_dtype="torch.float32"))),
    "draft model's dtype": (drafting(), drafting(dtype="torch.float16")),
}  # fmt: skip


@pytest.mark.parametrize("field", DIFFERENT)
def test_d4_engines_that_differ_in_what_changes_kv_share_nothing(field: str) -> None:
    one, other = DIFFERENT[field]
    assert layout_id(one) == layout_id(one)
    assert layout_id(one) != layout_id(other)


def test_d4_layers_that_have_each_others_dtype_share_nothing() -> None:
    assert layout_id(config(), ("bfloat16", "uint8")) != layout_id(config(), ("uint8", "bfloat16"))


SAME: dict[str, Callable[[], Any]] = {
    "another length": lambda: config(model_config=model(max_model_len=4096)),
    "a name of the folder": lambda: with_hf(_name_or_path="/elsewhere"),
    "adapters as they are": lambda: config(lora_config=lora(max_lora_rank=64)),
}


@pytest.mark.parametrize("what", SAME)
def test_what_changes_no_kv_separates_no_engines(what: str) -> None:
    assert layout_id(config()) == layout_id(SAME[what]())


def test_d4_weights_in_an_object_store_have_no_name_of_their_own(tmp_path: Path) -> None:
    """vLLM puts the rest of the model into a folder: what lies there is the same whichever weights those are."""
    (tmp_path / "tokenizer.npz").write_bytes(b"no weights")
    elsewhere = config(model_config=model(model=str(tmp_path), model_weights="s3://bucket/model"))
    with pytest.raises(IdentityError, match="s3://bucket/model"):
        identity.weights_of(elsewhere, Options())
    named = identity.weights_of(elsewhere, Options(weights_revision="mine"))
    assert (named.kind, named.value) == ("revision", "mine")


@pytest.mark.parametrize("load_format", ["dummy", "tensorizer", "ipc_cache", "somebody's"])
def test_d4_weights_that_no_file_of_the_model_holds_have_no_name_of_their_own(load_format: str) -> None:
    its = config(load_config=SimpleNamespace(load_format=load_format))
    with pytest.raises(IdentityError, match="weights_revision"):
        identity.weights_of(its, Options())


def test_d4_weights_of_a_known_commit_are_named_by_it() -> None:
    assert identity.weights_of(config(), Options()).value == f"org/model@{COMMIT}"
    both = identity.weights_of(drafting(revision=COMMIT[::-1]), Options()).value
    assert both == f"org/model@{COMMIT}+org/draft@{COMMIT[::-1]}"
