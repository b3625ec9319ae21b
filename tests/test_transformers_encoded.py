"""``encode_at="device"`` under the transformers connector: what comes back is what an edge with the same codec gives
back, host RAM holds the smaller form, and what has no such form is not stored."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

import tierkv  # noqa: E402
from tests.daemon_process import running_daemon  # noqa: E402
from tests.transformers_support import BLOCK, FAMILIES, model_of, prompt_of  # noqa: E402
from tierkv.client import Client  # noqa: E402
from tierkv.engines import transformers as connector_module  # noqa: E402
from tierkv.engines.encoded_pages import EncodedCounts, PageCodec  # noqa: E402
from tierkv.engines.transformers import NOT_ENCODED, Connector  # noqa: E402
from tierkv.engines.transformers_canary import compare  # noqa: E402
from tierkv.engines.transformers_pages import settle  # noqa: E402
from tierkv.errors import ConfigError, LayoutError  # noqa: E402
from tierkv.keys import Weights  # noqa: E402
from tierkv.quote import CodecSpeed  # noqa: E402
from tierkv.units import MIB  # noqa: E402

CODECS = ("int8", "fp8_e4m3")
GREEDY = {"max_new_tokens": 10, "do_sample": False}


class AlwaysPays(CodecSpeed):
    def pays(self) -> bool:
        return True


def opened(folder: Path, codec: str = "raw") -> Any:
    client = tierkv.open(
        host_capacity="16 MiB",
        nvme_path=str(folder),
        nvme_capacity="64 MiB",
        nvme_min_free=0,
        nvme_codec=codec,
    )
    client.store.edges[client.store.tier_number("nvme")].codec_speed = AlwaysPays()
    return client


@pytest.fixture
def client(tmp_path: Path) -> Iterator[Client]:
    with opened(tmp_path / "nvme") as made:
        yield made


def connector_of(
    client: Any, model: Any, codec: str | None, where: Any = "device", **options: Any
) -> Connector:
    options = {"block_tokens": BLOCK, **options}
    return Connector(client, model, Weights("revision", "t"), lossy_codec=codec, encode_at=where, **options)


def encoding_of(connector: Connector) -> PageCodec:
    assert connector.encoding is not None
    return connector.encoding


def generated(connector: Connector, prompt: Any) -> Any:
    made = connector.generate(prompt, **GREEDY)
    made.stored.result(30)
    return made


def out_of_host_ram(client: Client) -> None:
    client.flush("nvme").result(30)
    client.evict("host")


def layers_of(connector: Connector, prompt: Any) -> list[Any]:
    """What the store gives back, from each layer's first token that it still needs."""
    restored = connector.restore(prompt[0].tolist())
    found = []
    for layer, shape in zip(restored.cache.layers, connector.shape.layers, strict=True):
        first = 0 if shape.window_tokens is None else max(0, restored.tokens - shape.window_tokens)
        found += [layer.keys[:, :, first:], layer.values[:, :, first:]]
    return found


def encoded_parts(client: Client) -> int:
    return client.store.counters.snapshot().get(("encoded_blocks_total", "nvme", "encoded"), 0)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize("family", FAMILIES)
def test_the_same_numbers_and_tokens_as_from_an_edge(
    tmp_path: Path, family: str, codec: str, dtype: str
) -> None:
    model, prompt = copy.deepcopy(model_of(family)).to(getattr(torch, dtype)), prompt_of(200)
    with opened(tmp_path / "edge", codec) as at_edge, opened(tmp_path / "device") as at_device:
        by_edge = connector_of(at_edge, model, codec, "edge", block_tokens=4 * BLOCK)
        by_device = connector_of(at_device, model, codec, block_tokens=4 * BLOCK)
        cold = [generated(each, prompt) for each in (by_edge, by_device)]
        assert [each.stored.result().stored for each in cold] == [3, 3]
        out_of_host_ram(at_edge)
        assert encoded_parts(at_edge) > 0
        ours, theirs = layers_of(by_device, prompt), layers_of(by_edge, prompt)
        assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))
        warm = [generated(each, prompt) for each in (by_edge, by_device)]
        assert [each.reused_tokens for each in warm] == [192, 192]
        assert warm[0].tokens == warm[1].tokens
        assert encoding_of(by_device).counts == EncodedCounts(encoded=3)
        out_of_host_ram(at_device)
        from_disk = layers_of(by_device, prompt)
        assert all(torch.equal(a, b) for a, b in zip(ours, from_disk, strict=True))


@pytest.mark.parametrize(("codec", "most"), [("int8", 0.02), ("fp8_e4m3", 0.06)])
def test_the_canary_measures_it_in_host_ram_too(client: Client, codec: str, most: float) -> None:
    connector, prompt = connector_of(client, model_of("llama"), codec, block_tokens=4 * BLOCK), prompt_of(200)
    generated(connector, prompt)
    found = compare(connector, prompt)
    assert found.tokens == 192
    assert 1e-4 < found.worst < most


def test_host_ram_holds_the_smaller_form(client: Client) -> None:
    """A quarter of fp32, and as much is copied."""
    model, prompt = model_of("llama"), prompt_of(4 * BLOCK + 1)
    sizes = {}
    for codec, where in ((None, "edge"), ("int8", "device")):
        connector = connector_of(client, model, codec, where, block_tokens=4 * BLOCK)
        generated(connector, prompt)
        sizes[where] = (connector.layout.payload_bytes(0), generated(connector, prompt).reused_bytes)
    assert sizes["edge"][0] == sizes["edge"][1]
    assert sizes["device"][0] == sizes["device"][1] < 0.3 * sizes["edge"][0]


@pytest.mark.parametrize("edge", [*CODECS, "planes_zstd", "lz4"])
def test_no_edge_loses_more_of_an_encoded_block(tmp_path: Path, edge: str) -> None:
    prompt = prompt_of(101)
    with opened(tmp_path / "nvme", edge) as client:
        connector = connector_of(client, model_of("gemma2"), "int8")
        generated(connector, prompt)
        before = layers_of(connector, prompt)
        out_of_host_ram(client)
        after = layers_of(connector, prompt)
        assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))
        if edge in CODECS:
            assert encoded_parts(client) == 0


def test_d4_nobody_gets_blocks_of_another_form(client: Client) -> None:
    prompt = prompt_of(101)
    kinds = [
        (None, "edge"),
        ("int8", "edge"),
        ("fp8_e4m3", "edge"),
        ("int8", "device"),
        ("fp8_e4m3", "device"),
    ]
    connectors = [connector_of(client, model_of("llama"), codec, where) for codec, where in kinds]
    assert [generated(each, prompt).reused_tokens for each in connectors] == [0] * 5
    assert [generated(each, prompt).reused_tokens for each in connectors] == [96] * 5
    half = connector_of(client, copy.deepcopy(model_of("llama")).to(torch.bfloat16), "int8")
    assert generated(half, prompt).reused_tokens == 0


@pytest.mark.parametrize("codec", CODECS)
def test_a_daemon_holds_encoded_blocks_as_well(tmp_path: Path, codec: str) -> None:
    prompt = prompt_of(101)
    with (
        opened(tmp_path / "nvme") as alone,
        running_daemon(tmp_path, host_capacity="8 MiB", host_region="1 MiB") as daemon,
        daemon.client() as remote,
    ):
        connectors = [connector_of(each, model_of("gemma2"), codec) for each in (alone, remote)]
        runs = [[generated(each, prompt) for _ in range(2)] for each in connectors]
        assert [[run.reused_tokens for run in each] for each in runs] == [[0, 96], [0, 96]]
        assert runs[0][1].tokens == runs[1][1].tokens


@pytest.mark.parametrize("codec", CODECS)
def test_hot_blocks_are_held_encoded(client: Client, codec: str) -> None:
    prompt = prompt_of(101)
    plain, hot = (connector_of(client, model_of("llama"), codec, hbm_bytes=each) for each in (0, 4 * MIB))
    generated(plain, prompt)
    expected = layers_of(plain, prompt)
    runs = [generated(hot, prompt) for _ in range(4)]
    assert len({run.tokens for run in runs}) == 1
    assert hot.hot is not None
    assert (hot.hot.counts.promoted, hot.hot.counts.served) == (6, 12)
    assert all(torch.equal(a, b) for a, b in zip(expected, layers_of(hot, prompt), strict=True))


# ---- what has no such form


def broken_at(token: int, value: float) -> Any:
    """A model whose first layer makes a key of one token something that no scale reaches."""
    model = copy.deepcopy(model_of("llama"))

    def spoil(module: Any, given: Any, made: Any) -> Any:
        if made.shape[1] > token:
            made[:, token] = value
        return made

    model.model.layers[0].self_attn.k_proj.register_forward_hook(spoil)
    return model


@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_block_that_is_not_finite_is_not_stored_and_it_is_said(
    client: Client, codec: str, value: float, caplog: pytest.LogCaptureFixture
) -> None:
    connector, prompt = connector_of(client, broken_at(40, value), codec), prompt_of(101)
    for _ in range(2):
        stored = connector.generate(prompt, **GREEDY).stored.result(30)
    assert stored.dropped == {NOT_ENCODED: 4}
    assert client.match(connector.chain(prompt[0].tolist())).blocks == 2
    assert encoding_of(connector).counts == EncodedCounts(encoded=2, refused=8)
    assert len([text for text in caplog.messages if "not finite" in text]) == 1
    assert len(layers_of(connector, prompt)[0][0, 0]) == 2 * BLOCK


def test_a_first_block_that_is_not_finite_stores_nothing(client: Client) -> None:
    connector, prompt = connector_of(client, broken_at(0, float("nan")), "int8"), prompt_of(101)
    assert connector.generate(prompt, **GREEDY).stored.result(30).dropped == {NOT_ENCODED: 6}
    assert client.match(connector.chain(prompt[0].tolist())).blocks == 0


@pytest.mark.parametrize("where", ["encode", "decode", "blank"])
def test_a_device_without_memory_left_is_a_miss(
    client: Client, where: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    connector, prompt = connector_of(client, model_of("llama"), "int8"), prompt_of(101)
    expected = generated(connector, prompt) if where != "encode" else None

    def none_left(*_: Any) -> Any:
        raise torch.OutOfMemoryError("no memory")

    monkeypatch.setattr(encoding_of(connector), where, none_left)
    runs = [connector.generate(prompt, **GREEDY) for _ in range(2)]
    assert [run.reused_tokens for run in runs] == [0, 0]
    if expected is None:
        assert runs[1].stored.result(30).dropped == {NOT_ENCODED: 6}
    else:
        assert {run.tokens for run in runs} == {expected.tokens}
    assert len([text for text in caplog.messages if "no memory" in text]) == (2 if where == "blank" else 1)


def test_a_closed_store_is_a_miss(client: Client) -> None:
    connector, prompt = connector_of(client, broken_at(40, float("nan")), "int8"), prompt_of(101)
    first = generated(connector, prompt)
    client.close()
    again = connector.generate(prompt, **GREEDY)
    assert (again.reused_tokens, again.tokens) == (0, first.tokens)
    assert again.stored.result(30).stored == 0


@pytest.mark.parametrize(
    ("codec", "where", "says"),
    [
        (None, "device", "name the codec"),
        ("int8", "gpu", "'edge' or 'device'"),
        ("planes_zstd", "device", r"one of \['fp8_e4m3', 'int8'\]"),
    ],
)
def test_options_that_make_no_sense(client: Client, codec: str | None, where: str, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        connector_of(client, model_of("llama"), codec, where)


def test_numbers_that_no_codec_scales(client: Client) -> None:
    with pytest.raises(LayoutError, match="float64"):
        connector_of(client, copy.deepcopy(model_of("llama")).double(), "int8")


# ---- order


@pytest.mark.parametrize("codec", [None, "int8"])
def test_d12_memory_that_is_given_anew_is_settled_before_an_onboard_writes_to_it(
    client: Client, codec: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What torch gives out may be another tensor's that a GPU still reads; a copier writes on other streams."""
    where = "edge" if codec is None else "device"
    connector, prompt = connector_of(client, model_of("llama"), codec, where), prompt_of(101)
    generated(connector, prompt)
    order: list[Any] = []
    onboard = client.onboard
    monkeypatch.setattr(connector_module, "settle", order.append)
    monkeypatch.setattr(
        client, "onboard", lambda *given, **named: (order.append("onboard"), onboard(*given, **named))[1]
    )
    assert generated(connector, prompt).reused_tokens == 96
    assert order == [torch.device("cpu"), "onboard"]


def test_settle_waits_for_the_current_stream_of_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    waited: list[Any] = []
    stream = SimpleNamespace(synchronize=lambda: waited.append("waited"))
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: (waited.append(device), stream)[1])
    settle(torch.device("cpu"))
    assert not waited
    settle(torch.device("cuda:1"))
    assert waited == [torch.device("cuda:1"), "waited"]
