"""The paged view of a DynamicCache, and going on from one: tiny random models, real blocks of bytes."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any, TypeVar

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from tests.transformers_support import BLOCK, FAMILIES, SMALL, config_of, model_of, prompt_of  # noqa: E402
from tierkv.copier import CopyPart, HostCopier, PagedKV  # noqa: E402
from tierkv.engines.transformers import layout_id_of  # noqa: E402
from tierkv.engines.transformers_generate import check_options, generate_from  # noqa: E402
from tierkv.engines.transformers_pages import (  # noqa: E402
    CacheShape,
    LayerShape,
    blank_cache,
    block_tokens_for,
    cut_cache,
    given,
    layout_of,
    new_cache,
    pages_of,
    shape_of,
)
from tierkv.errors import IdentityError, LayoutError  # noqa: E402
from tierkv.layout import MIN_PART_BYTES, GroupKind, Layout  # noqa: E402

T = TypeVar("T")


def _computed(model: Any, input_ids: Any) -> Any:
    cache = new_cache(model.config)
    with torch.inference_mode():
        model(input_ids, **given(model, cache))
    return cache


class _Inline:
    """An executor that works at once."""

    def open_lane(self, lane: str, workers: int) -> None: ...

    def run(self, lane: str, work: Callable[[], T], done: Callable[[T], None]) -> None:
        done(work())

    def call_later(self, delay_s: float, call: Callable[[], None]) -> Any:
        raise NotImplementedError

    def close(self, timeout_s: float) -> list[str]:
        return []


def _slots(layout: Layout, blocks: int) -> list[list[bytearray]]:
    """For each block and group, poisoned memory."""
    return [[bytearray(b"\xaa" * part.payload_bytes) for part in layout.parts] for _ in range(blocks)]


def _parts(slots: list[list[bytearray]], first: int = 0) -> list[CopyPart]:
    return [
        CopyPart(group, memoryview(slot), (number,))
        for number, groups in enumerate(slots)
        for group, slot in enumerate(groups)
        if number >= first
    ]


def _offload(kv: PagedKV, layout: Layout, blocks: int) -> list[list[bytearray]]:
    copier, slots, errors = HostCopier(_Inline()), _slots(layout, blocks), []
    copier.check(kv, layout)
    copier.offload(kv, _parts(slots), None, errors.append)
    assert errors == [None]
    return slots


def _onboard(kv: PagedKV, layout: Layout, parts: list[CopyPart]) -> None:
    copier, errors = HostCopier(_Inline()), []
    copier.check(kv, layout)
    copier.onboard(kv, parts, errors.append)
    assert errors == [None]


def _through_slots(model: Any, cache: Any, blocks: int) -> Any:
    """A new cache with the first blocks of another, having gone through host slots. Window groups bring only what the
    layout says they need."""
    shape = shape_of(cache)
    layout = layout_of(shape, BLOCK, "test")
    slots = _offload(pages_of(cache, shape, BLOCK), layout, blocks)
    restored = blank_cache(model.config, shape, blocks * BLOCK)
    for layer in restored.layers:
        layer.keys.fill_(float("nan"))
        layer.values.fill_(float("nan"))
    needed = [layout.trailing_blocks(group) for group in range(len(layout.groups))]
    parts = [
        part
        for part in _parts(slots)
        if needed[part.group] is None or part.pages[0] >= blocks - (needed[part.group] or 0)
    ]
    _onboard(pages_of(restored, shape, BLOCK), layout, parts)
    return restored


@pytest.mark.parametrize("family", FAMILIES)
def test_d9_logits_and_tokens_are_equal_over_two_reuses(family: str) -> None:
    model, prompt = model_of(family), prompt_of(101)
    cold = generate_from(model, prompt, new_cache(model.config), max_new_tokens=30, do_sample=False)
    assert cold.settled_tokens == cold.cache.get_seq_length() == 130
    own = copy.deepcopy(cold.cache)
    cut_cache(own, 96)
    with torch.inference_mode():
        expected = model(prompt[:, 96:], **given(model, own)).logits
        torch.testing.assert_close(expected, model(prompt).logits[:, 96:], rtol=1e-4, atol=1e-5)
    for _ in range(2):
        restored = _through_slots(model, cold.cache, 6)
        with torch.inference_mode():
            logits = model(prompt[:, 96:], **given(model, copy.deepcopy(restored))).logits
        assert torch.equal(logits, expected)
        again = generate_from(model, prompt, restored, max_new_tokens=30, do_sample=False)
        assert again.tokens == cold.tokens
        cold = again


@pytest.mark.parametrize("family", FAMILIES)
def test_plain_generate_is_what_generate_from_does(family: str) -> None:
    model, prompt = model_of(family), prompt_of(77)
    plain = model.generate(
        prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=20, do_sample=False, use_cache=False
    )
    ours = generate_from(model, prompt, new_cache(model.config), max_new_tokens=20, do_sample=False)
    assert ours.tokens == tuple(plain[0].tolist())
    assert ours.first_token_s > 0


def test_a_block_lies_layer_by_layer_keys_before_values() -> None:
    model = model_of("llama")
    cache = _computed(model, prompt_of(40))
    shape = shape_of(cache)
    slots = _offload(pages_of(cache, shape, BLOCK), layout_of(shape, BLOCK, "test"), 2)
    for number, (slot,) in enumerate(slots):
        block = torch.frombuffer(slot, dtype=torch.float32).reshape(2, 2, 2, BLOCK, 16)
        for layer in range(2):
            span = slice(number * BLOCK, (number + 1) * BLOCK)
            assert torch.equal(block[layer, 0], cache.layers[layer].keys[0, :, span])
            assert torch.equal(block[layer, 1], cache.layers[layer].values[0, :, span])


def test_pages_are_views_and_outlive_further_computing() -> None:
    model = model_of("llama")
    cache = _computed(model, prompt_of(48))
    shape = shape_of(cache)
    layout = layout_of(shape, BLOCK, "test")
    kv = pages_of(cache, shape, BLOCK)
    assert kv.groups[0][0].arrays[0].data_ptr() == cache.layers[0].keys.data_ptr()
    before = _offload(kv, layout, 3)
    with torch.inference_mode():
        model(prompt_of(9, seed=2), **given(model, cache))
    assert _offload(kv, layout, 3) == before == _offload(pages_of(cache, shape, BLOCK), layout, 3)


def test_pages_of_bfloat16_and_of_a_cropped_cache() -> None:
    model = copy.deepcopy(model_of("qwen2")).to(torch.bfloat16)
    cache = _computed(model, prompt_of(70))
    shape = shape_of(cache)
    assert (shape.dtype, shape.itemsize_bytes, shape.token_bytes) == ("bfloat16", 2, 2 * 2 * 2 * 16 * 2)
    whole = _offload(pages_of(cache, shape, BLOCK), layout_of(shape, BLOCK, "test"), 4)
    cut_cache(cache, 50)
    assert cache.get_seq_length() == 50
    assert _offload(pages_of(cache, shape, BLOCK), layout_of(shape, BLOCK, "test"), 3) == whole[:3]


@pytest.mark.parametrize("tokens", [0, 1, BLOCK - 1])
def test_d6_a_cache_shorter_than_a_block_has_no_pages(tokens: int) -> None:
    model = model_of("llama")
    shape = shape_of(_computed(model, prompt_of(1)))
    for layer in pages_of(blank_cache(model.config, shape, tokens), shape, BLOCK).groups[0]:
        assert [array.shape[1] for array in layer.arrays] == [0, 0]


def test_a_shortened_cache_goes_on() -> None:
    """A run of blocks may come back shorter than it was asked for."""
    model, prompt = model_of("llama"), prompt_of(100)
    expected = generate_from(model, prompt, new_cache(model.config), max_new_tokens=12, do_sample=False)
    restored = _through_slots(model, expected.cache, 5)
    cut_cache(restored, 2 * BLOCK)
    assert restored.get_seq_length() == 32
    again = generate_from(model, prompt, restored, max_new_tokens=12, do_sample=False)
    assert again.tokens == expected.tokens


def test_groups_of_full_and_window_layers() -> None:
    shape = shape_of(_computed(model_of("gemma2"), prompt_of(60)))
    layout = layout_of(shape, BLOCK, "test")
    assert {(group.kind, group.window_tokens) for group in layout.groups} == {
        (GroupKind.FULL, None),
        (GroupKind.WINDOW, 40),
    }
    assert sum(part.payload_bytes for part in layout.parts) == shape.token_bytes * BLOCK


def test_a_latent_and_its_rotary_part_differ_in_width() -> None:
    shape = shape_of(_computed(model_of("deepseek"), prompt_of(3)))
    assert shape.layers == (LayerShape(1, 32, 8),) * 2


def test_block_tokens_make_blocks_worth_an_io() -> None:
    smollm2 = (LayerShape(3, 64, 64),) * 30
    assert block_tokens_for(CacheShape(smollm2, "float32", 4)) == 16
    assert block_tokens_for(CacheShape(smollm2, "bfloat16", 2)) == 32
    mixed = CacheShape((LayerShape(2, 64, 64), LayerShape(2, 64, 64, window_tokens=256)), "float32", 4)
    tokens = block_tokens_for(mixed)
    assert tokens % 16 == 0
    assert min(part.payload_bytes for part in layout_of(mixed, tokens, "test").parts) >= MIN_PART_BYTES


def test_caches_that_cannot_be_cut() -> None:
    config = model_of("llama").config
    with pytest.raises(LayoutError, match="empty"):
        shape_of(new_cache(config))
    two = transformers.DynamicCache(config=config)
    two.update(torch.zeros(2, 2, 5, 16), torch.zeros(2, 2, 5, 16), 0)
    two.update(torch.zeros(2, 2, 5, 16), torch.zeros(2, 2, 5, 16), 1)
    with pytest.raises(LayoutError, match="2 sequences"):
        shape_of(two)
    with pytest.raises(LayoutError, match="StaticLayer"):
        shape_of(transformers.StaticCache(config=config, max_cache_len=8))
    forgetful = transformers.DynamicCache(config=model_of("gemma2").config)
    with torch.inference_mode():
        model_of("gemma2")(prompt_of(90), **given(model_of("gemma2"), forgetful))
    with pytest.raises(LayoutError, match="in a cache of 90 tokens"):
        pages_of(forgetful, shape_of(forgetful), BLOCK)
    shape = shape_of(_computed(model_of("llama"), prompt_of(2)))
    with pytest.raises(LayoutError, match="window"):
        blank_cache(model_of("mistral-window").config, shape, BLOCK)


def test_d7_the_cache_leaves_a_token_to_compute() -> None:
    model, prompt = model_of("llama"), prompt_of(2 * BLOCK)
    cache = _computed(model, prompt)
    with pytest.raises(ValueError, match="leave one"):
        generate_from(model, prompt, cache, max_new_tokens=3)
    cut_cache(cache, 2 * BLOCK - 1)
    fresh = generate_from(model, prompt, new_cache(model.config), max_new_tokens=3, do_sample=False)
    assert generate_from(model, prompt, cache, max_new_tokens=3, do_sample=False).tokens == fresh.tokens


def test_sampling_and_other_options_pass_through() -> None:
    model, prompt = model_of("llama"), prompt_of(50)
    seen: list[int] = []

    def stop_at_54(input_ids: Any, scores: Any, **_: Any) -> Any:
        seen.append(input_ids.shape[1])
        return torch.full((1,), input_ids.shape[1] >= 54)

    options = {"do_sample": True, "temperature": 0.8, "top_k": 20, "max_new_tokens": 9}
    torch.manual_seed(3)
    cold = generate_from(model, prompt, new_cache(model.config), **options)
    torch.manual_seed(3)
    warm = generate_from(
        model, prompt, _through_slots(model, cold.cache, 3), **options, stopping_criteria=[stop_at_54],
        return_dict_in_generate=True, output_scores=True,
    )  # fmt: skip
    assert seen == [51, 52, 53, 54]
    assert warm.tokens == cold.tokens[:54]
    assert len(warm.output.scores) == 4


def test_d6_guessed_tokens_are_not_settled() -> None:
    model, prompt = model_of("llama"), prompt_of(20).repeat(1, 3)
    plain = generate_from(model, prompt, new_cache(model.config), max_new_tokens=12, do_sample=False)
    guessed = generate_from(
        model, prompt, new_cache(model.config), max_new_tokens=12, do_sample=False, prompt_lookup_num_tokens=4
    )
    assert guessed.tokens == plain.tokens
    assert guessed.settled_tokens == prompt.shape[1]


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"num_beams": 2}, "num_beams"),
        ({"num_return_sequences": 2, "do_sample": True}, "num_return_sequences"),
        ({"use_cache": False}, "use_cache"),
        ({"cache_implementation": "static"}, "cache_implementation"),
        ({"prefill_chunk_size": 8}, "prefill_chunk_size"),
        ({"inputs_embeds": torch.zeros(1, 5, 64)}, "inputs_embeds"),
        ({"assistant_model": object()}, "assistant_model"),
        ({"attention_mask": torch.tensor([[0, 1, 1, 1, 1]])}, "padding"),
        ({"attention_mask": torch.ones(1, 4)}, "padding"),
        ({"generation_config": transformers.GenerationConfig(num_beams=3)}, "num_beams"),
    ],
)
def test_options_that_one_plain_sequence_does_not_have(options: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        check_options(model_of("llama"), prompt_of(5), options)


@pytest.mark.parametrize("shape", [(5,), (2, 5), (1, 0)])
def test_one_prompt_at_a_time(shape: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match="one prompt"):
        check_options(model_of("llama"), torch.ones(shape, dtype=torch.long), {})


def test_d4_the_layout_id_tells_configurations_apart() -> None:
    base = layout_id_of(config_of("llama"))
    assert base == layout_id_of(config_of("llama"))
    renamed = config_of("llama")
    renamed._name_or_path = "elsewhere"
    assert layout_id_of(renamed) == base
    others = [
        transformers.LlamaConfig(**SMALL, rms_norm_eps=1e-3),
        transformers.LlamaConfig(**SMALL, rope_parameters={"rope_type": "default", "rope_theta": 5e5}),
        transformers.LlamaConfig(
            **SMALL, rope_parameters={"rope_type": "linear", "factor": 2.0, "rope_theta": 1e4}
        ),
        config_of("qwen2"),
    ]
    assert len({base, *map(layout_id_of, others)}) == 5


def test_keys_that_depend_on_the_length_of_the_prompt_are_refused() -> None:
    rope = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4, "original_max_position_embeddings": 512}
    with pytest.raises(IdentityError, match="dynamic"):
        layout_id_of(transformers.LlamaConfig(**SMALL, rope_parameters=rope))
