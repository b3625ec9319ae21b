"""Codecs on the edges of a store: who is encoded, what comes back, and when it does not pay."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgpack
import numpy as np
import pytest

import tierkv
from tests.valkey_server import running_server
from tierkv.client import Client
from tierkv.codec_numbers import narrow, widen, words_of
from tierkv.daemon.words import hear_spec, say_spec
from tierkv.errors import IdentityError, LayoutError
from tierkv.keys import Chain, NamespaceSpec, Weights
from tierkv.layout import GroupKind, LayerGroup, Layout, Segment
from tierkv.quote import CodecSpeed

INSIDE = (Segment(2, 128, 64),)
GROUP = LayerGroup("g", GroupKind.FULL, 2, 2 * 128 * 64 * 2, 128, inside=INSIDE)
LAYOUT = Layout("test", "bfloat16", 128, (GROUP,))
BLOCKS = 4


def spec(lossy: str | None = None) -> NamespaceSpec:
    return NamespaceSpec(Weights("revision", "x"), LAYOUT, "test", lossy_codec=lossy)


@contextmanager
def opened(tmp_path: Path, **settings: Any) -> Iterator[Client]:
    with tierkv.open(
        host_capacity="8 MiB",
        nvme_path=str(tmp_path / "n"),
        nvme_capacity="64 MiB",
        nvme_min_free=0,
        **settings,
    ) as client:
        yield client


def payloads() -> list[bytes]:
    dice = np.random.default_rng(5)
    return [
        narrow(dice.normal(0, 1, LAYOUT.payload_bytes(0) // 2).astype(np.float32), "bfloat16").tobytes()
        for _ in range(BLOCKS)
    ]


def there_and_back(client: Client, lossy: str | None) -> tuple[list[bytes], dict[str, int]]:
    """Through the disk; what comes back, and the counters of codecs and bytes."""
    chain = client.open_namespace(spec(lossy)).chain(list(range(128 * BLOCKS + 1)))
    assert client.put(chain, payloads()).stored == BLOCKS
    assert client.flush("nvme").result(30).written == BLOCKS
    client.evict("host")
    back = loaded(client, chain)
    counters = {"/".join(name): value for name, value in client.store.counters.snapshot().items()}
    return back, {
        name: value for name, value in counters.items() if name.startswith(("enc", "written_bytes"))
    }


def loaded(client: Client, chain: Chain) -> list[bytes]:
    with client.load(chain) as lease:
        return [bytes(lease.view(i)) for i in range(len(lease))]


@pytest.mark.parametrize("codec", ["planes_zstd", "lz4"])
def test_lossless_codecs_serve_every_namespace(tmp_path: Path, codec: str) -> None:
    with opened(tmp_path, nvme_codec=codec) as client:
        back, counts = there_and_back(client, None)
        assert back == payloads()
        met = {name: n for name, n in counts.items() if name.startswith("encoded")}
        assert sum(met.values()) == BLOCKS
        if codec == "planes_zstd" and "encoded_blocks_total/nvme/encoded" in met:
            assert counts["written_bytes_total/nvme"] < sum(map(len, payloads()))


@pytest.mark.parametrize("codec", ["int8", "fp8_e4m3"])
def test_d4_lossy_codecs_encode_only_blocks_whose_name_says_so(tmp_path: Path, codec: str) -> None:
    with opened(tmp_path, nvme_codec=codec) as client:
        back, counts = there_and_back(client, None)
        assert back == payloads()
        assert counts["encoded_blocks_total/nvme/not_asked_for"] == BLOCKS
        client.store.edges[client.store.tier_number("nvme")].codec_speed = AlwaysPays()
        back, counts = there_and_back(client, codec)
        assert counts["encoded_blocks_total/nvme/encoded"] == BLOCKS
        assert back != payloads()
        assert len(back) == BLOCKS
        for before, after in zip(payloads(), back, strict=True):
            old, new = (widen(words_of(raw, "bfloat16"), "bfloat16") for raw in (before, after))
            assert np.sqrt(((old - new) ** 2).mean() / (old**2).mean()) < 0.04
        other = "fp8_e4m3" if codec == "int8" else "int8"
        assert there_and_back(client, other)[0] == payloads()


def test_d4_a_lossy_namespace_is_another_namespace(tmp_path: Path) -> None:
    with opened(tmp_path) as client:
        names = [client.open_namespace(spec(lossy)).namespace.digest for lossy in (None, "int8", "fp8_e4m3")]
        assert len(set(names)) == 3


class AlwaysPays(CodecSpeed):
    def pays(self) -> bool:
        return True


class NeverPays(CodecSpeed):
    def pays(self) -> bool:
        return False


@pytest.mark.parametrize("codec", ["int9", "planes_zstd", "raw", ""])
def test_a_namespace_names_only_codecs_that_lose_something(codec: str) -> None:
    with pytest.raises(IdentityError, match=r"lossy_codec = .*'fp8_e4m3', 'int8'"):
        spec(codec)


@pytest.mark.parametrize(
    ("settings", "lossy", "says"),
    [
        ({"nvme_codec": "raw"}, "int8", "names int8, but nvme.codec is raw"),
        ({"nvme_codec": "int8"}, "fp8_e4m3", "names fp8_e4m3, but nvme.codec is int8"),
        ({"nvme_codec": "int8"}, "int8", None),
        ({"nvme_codec": "int8"}, None, None),
    ],
)
def test_a_lossy_codec_that_no_edge_has_is_said_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, settings: Any, lossy: str | None, says: str | None
) -> None:
    with opened(tmp_path, **settings) as client, Client(client.store) as other:
        for each in (client, client, other):
            each.open_namespace(spec(lossy))
    found = [record.getMessage() for record in caplog.records if " names " in record.getMessage()]
    assert len(found) == (says is not None)
    assert says is None or says in found[0]


def test_blocks_that_come_encoded_want_no_edge(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    layout = replace(LAYOUT, groups=(replace(GROUP, inside=()),))
    with opened(tmp_path) as client:
        client.open_namespace(replace(spec("int8"), layout=layout))
    assert not [record for record in caplog.records if " names " in record.getMessage()]


def test_a_link_that_is_quicker_than_the_codec_gets_raw_blocks(tmp_path: Path) -> None:
    with opened(tmp_path, nvme_codec="planes_zstd") as client:
        client.store.edges[client.store.tier_number("nvme")].codec_speed = NeverPays()
        back, counts = there_and_back(client, None)
        assert back == payloads()
        assert counts["encoded_blocks_total/nvme/passed_over"] == BLOCKS
        assert "encoded_blocks_total/nvme/encoded" not in counts


def test_a_damaged_lossy_block_is_a_miss(tmp_path: Path) -> None:
    """Nobody can compare the decoded bytes with what was stored, so the stored bytes' own checksum must do."""
    with opened(tmp_path, nvme_codec="int8") as client:
        client.store.edges[client.store.tier_number("nvme")].codec_speed = AlwaysPays()
        chain = client.open_namespace(spec("int8")).chain(list(range(128 * BLOCKS + 1)))
        client.put(chain, payloads())
        assert client.flush("nvme").result(30).written == BLOCKS
        client.evict("host")
        changed = 0
        for file in sorted((tmp_path / "n").rglob("*")):
            if file.is_file() and file.stat().st_size > 1 << 16:
                with file.open("r+b") as raw:
                    content = raw.read()
                    at = content.find(chain.hashes[1])
                    if at >= 0:
                        raw.seek(at - 72 + 4096 + 30_000)
                        raw.write(bytes([content[at - 72 + 4096 + 30_000] ^ 4]))
                        changed += 1
        assert changed == 1
        assert len(loaded(client, chain)) == 1
        assert client.store.counters.snapshot()[("corrupt_blocks_total", "nvme", "checksum")] == 1


@contextmanager
def sharing(address: str) -> Iterator[Client]:
    with tierkv.open(host_capacity="8 MiB", valkey_url=address, valkey_codec="planes_zstd") as client:
        yield client


def test_a_reader_without_the_codec_leaves_a_shared_block_to_those_that_have_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    tokens = list(range(128 * BLOCKS + 1))
    with running_server() as server, sharing(server.address) as writer:
        assert writer.put(writer.open_namespace(spec()).chain(tokens), payloads()).stored == BLOCKS
        assert writer.flush("valkey").result(30).written == BLOCKS
        with sharing(server.address) as reader, monkeypatch.context() as patched:
            patched.setattr("tierkv.codec._by_code", dict)
            assert loaded(reader, reader.open_namespace(spec()).chain(tokens)) == []
            assert reader.store.counters.snapshot()[("corrupt_blocks_total", "valkey", "codec")] > 0
        with sharing(server.address) as other:
            assert loaded(other, other.open_namespace(spec()).chain(tokens)) == payloads()


def test_what_a_page_is_made_of_crosses_the_socket() -> None:
    said = msgpack.unpackb(msgpack.packb(say_spec(spec("int8"))))
    assert hear_spec(said) == spec("int8")
    said["layout"]["groups"][0]["inside"][0]["outer"] = -2
    with pytest.raises(LayoutError, match="outer = -2"):
        hear_spec(said)


# ---- does it pay


def speed(*, encode: float, decode: float, share: float, write: float, read: float | None) -> CodecSpeed:
    found = CodecSpeed()
    found.encoded(1000, round(1000 * share), 1000 / encode)
    found.decoded(1000, 1000 / decode)
    found.wrote(1000, 1000 / write)
    if read is not None:
        found.read(1000, 1000 / read)
    return found


@pytest.mark.parametrize(
    ("write", "read", "share", "pays"),
    [
        (100.0, 100.0, 0.5, True),  # a slow link: half of its time is more than the codec takes
        (2000.0, 2000.0, 0.5, False),  # a quick one
        (100.0, 100.0, 0.999, False),  # nothing shrinks
        (100.0, 50_000.0, 0.5, True),  # slow in one direction is enough
        (100.0, None, 0.5, True),
        (2000.0, None, 0.5, False),
    ],
)
def test_a_codec_pays_where_the_link_is_slow(
    write: float, read: float | None, share: float, pays: bool
) -> None:
    assert speed(encode=500, decode=1000, share=share, write=write, read=read).pays() is pays


def test_what_was_not_measured_is_tried_and_what_does_not_pay_is_tried_again() -> None:
    assert CodecSpeed().pays()
    found = speed(encode=500, decode=1000, share=0.5, write=5000, read=5000)
    assert [found.pays() for _ in range(64)] == ([False] * 31 + [True]) * 2
