"""Blocks stored without the part of a window that has moved on, and layouts that no arena could hold."""

import pytest

import tierkv
from tests.valkey_server import running_server
from tierkv.errors import ConfigError
from tierkv.layout import GroupKind, LayerGroup, Layout

BLOCKS = 6
FULL = LayerGroup("full", GroupKind.FULL, 1, 4096, 16)
WINDOW = LayerGroup("window", GroupKind.WINDOW, 1, 8192, 16, window_tokens=32)
SPEC = tierkv.NamespaceSpec(
    weights=tierkv.Weights("revision", "1"), layout=Layout("t", "u8", 16, (FULL, WINDOW)), engine="t"
)


def full_payload(block: int) -> bytes:
    return bytes([1 + block]) * 4096


def window_payload(block: int) -> bytes:
    return bytes([101 + block]) * 8192


def test_d8_another_process_finds_blocks_without_a_window_part_on_the_server() -> None:
    with running_server() as server:
        url = f"valkey://127.0.0.1:{server.port}"
        with tierkv.open(host_capacity="8 MiB", valkey_url=url) as client:
            chain = client.open_namespace(SPEC).chain(list(range(16 * BLOCKS + 1)))
            early = BLOCKS - 2  # the window reaches back over two blocks
            client.put(chain, [full_payload(i) for i in range(early)], absent=[1])
            client.put(
                chain, [[full_payload(i), window_payload(i)] for i in range(early, BLOCKS)], first=early
            )
            assert client.flush("valkey").result(10).written == BLOCKS
        with tierkv.open(host_capacity="8 MiB", valkey_url=url) as other:
            other.open_namespace(SPEC)
            with other.load(chain, timeout_s=10) as lease:
                assert len(lease) == BLOCKS
                assert [bytes(lease.view(i, 0)) for i in range(BLOCKS)] == list(
                    map(full_payload, range(BLOCKS))
                )
                assert bytes(lease.view(BLOCKS - 1, 1)) == window_payload(BLOCKS - 1)
        with tierkv.open(host_capacity="8 MiB", valkey_url=url) as third:
            space = third.open_namespace(SPEC)
            with third.load(space.chain(list(range(16 * early + 1))), timeout_s=10) as lease:
                assert len(lease) == 0, "there is no window to go on from"


def test_d29_more_sizes_than_regions_are_refused_when_the_namespace_is_opened() -> None:
    with (
        tierkv.open(host_capacity="1 MiB", host_region="1 MiB") as client,
        pytest.raises(ConfigError, match=r"2 sizes and the arena only 1 regions"),
    ):
        client.open_namespace(SPEC)
