"""Blocks stored without the part of a window that has moved on, and layouts that no arena could hold."""

from pathlib import Path

import pytest

import tierkv
from tests.valkey_server import running_server
from tierkv.errors import ConfigError
from tierkv.layout import GroupKind, LayerGroup, Layout
from tierkv.testing.invariants import check_invariants

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


def test_d8_a_block_stored_without_a_part_gains_it_when_it_is_stored_again(tmp_path: Path) -> None:
    """The window had moved on when the prompt was stored; later somebody stops exactly there and has it."""
    settings = {"host_capacity": "8 MiB", "nvme_path": tmp_path, "nvme_capacity": "64 MiB"}
    with tierkv.open(**settings) as client:  # type: ignore[arg-type]
        space = client.open_namespace(SPEC)
        chain = space.chain(list(range(16 * BLOCKS + 1)))
        client.put(chain, [full_payload(i) for i in range(BLOCKS)], absent=[1])
        assert client.flush("nvme").result(10).written == BLOCKS
        with client.load(chain) as held:
            assert len(held) == 0, "there is no window to go on from"
        both = [[full_payload(i), window_payload(i)] for i in range(BLOCKS)]
        stored = client.put(chain, both[-2:], first=BLOCKS - 2)
        assert (stored.stored, stored.resident) == (2, 0)
        assert client.match(chain).blocks == BLOCKS
        assert client.put(chain, both[-2:], first=BLOCKS - 2).resident == 2
        assert client.put(chain, [full_payload(BLOCKS - 1)], first=BLOCKS - 1, absent=[1]).resident == 1
        assert client.flush("nvme").result(10).written == 2
        check_invariants(client.store)
        client.evict("host")
        with client.load(chain, timeout_s=10) as lease:
            assert len(lease) == BLOCKS
            assert [bytes(lease.view(i, 0)) for i in range(BLOCKS)] == list(map(full_payload, range(BLOCKS)))
            assert bytes(lease.view(BLOCKS - 1, 1)) == window_payload(BLOCKS - 1)
    with tierkv.open(**settings) as again:  # type: ignore[arg-type]
        again.open_namespace(SPEC)
        with again.load(chain, timeout_s=10) as lease:
            assert len(lease) == BLOCKS


def test_d11_a_block_that_somebody_holds_stays_as_it_is() -> None:
    with tierkv.open(host_capacity="8 MiB") as client:
        chain = client.open_namespace(SPEC).chain(list(range(16 * BLOCKS + 1)))
        both = [[full_payload(i), window_payload(i)] for i in range(BLOCKS)]
        client.put(chain, [full_payload(i) for i in range(BLOCKS - 2)], absent=[1])
        client.put(chain, both[-2:], first=BLOCKS - 2)
        with client.load(chain) as lease:
            assert len(lease) == BLOCKS
            assert client.put(chain, both).resident == BLOCKS
            assert [bytes(lease.view(i, 0)) for i in range(BLOCKS)] == list(map(full_payload, range(BLOCKS)))
        assert client.put(chain, both).stored == BLOCKS - 2
