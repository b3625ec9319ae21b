"""``match`` takes no lock: what it says while other threads store, evict and make the index grow."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import numpy as np
import pytest

import tierkv
from tierkv.client import Client
from tierkv.index import ONE_DICT
from tierkv.layout import GroupKind, LayerGroup, Layout
from tierkv.testing.threads import switching_every

BLOCK = 4096
LAYOUT = Layout("t", "u8", 16, (LayerGroup("all", GroupKind.FULL, 1, BLOCK, 16),))
PAYLOAD = np.zeros(BLOCK, dtype=np.uint8)
MATCHES = 1500


def spec_of(name: str) -> tierkv.NamespaceSpec:
    return tierkv.NamespaceSpec(weights=tierkv.Weights("revision", name), layout=LAYOUT, engine="t")


def tokens_of(blocks: int, seed: int) -> np.ndarray:
    tokens = np.arange(16 * blocks + 1, dtype=np.int32)
    tokens[0] = -1 - seed
    return tokens


@pytest.fixture
def client() -> Iterator[Client]:
    with switching_every(2e-6), tierkv.open(host_capacity="16 MiB") as client:
        yield client


@pytest.mark.parametrize("blocks", [1, 12, 300])
def test_a_pinned_run_is_always_found_whole_and_a_stranger_never(client: Client, blocks: int) -> None:
    space = client.open_namespace(spec_of("one"))
    pinned, stranger = (space.chain(tokens_of(blocks, seed)) for seed in (0, 1))
    client.put(pinned, [PAYLOAD] * blocks)
    stop, failed = threading.Event(), []

    def churn(number: int) -> None:
        seed = 1000 * (number + 1)
        try:
            while not stop.is_set():
                seed += 1
                count = 1 + seed % 60
                client.put(space.chain(tokens_of(count, seed)), [PAYLOAD] * count)
        except BaseException as error:
            failed.append(error)
            raise

    with client.load(pinned) as lease:
        assert len(lease) == blocks
        threads = [threading.Thread(target=churn, args=(number,)) for number in range(3)]
        for thread in threads:
            thread.start()
        try:
            for _ in range(MATCHES):
                assert client.match(pinned).blocks == blocks
                assert client.match(stranger).blocks == 0
        finally:
            stop.set()
            for thread in threads:
                thread.join()
    assert not failed


def test_nothing_is_missed_while_a_namespace_outgrows_one_dict(client: Client) -> None:
    """The dict of a small namespace is cut up when it grows; who looks meanwhile sees the old one or the new ones."""
    for turn in range(30):
        space = client.open_namespace(spec_of(f"turn {turn}"))
        filling, known, more = (space.chain(tokens_of(blocks, blocks)) for blocks in (ONE_DICT - 9, 8, 2))
        client.put(filling, [PAYLOAD] * (ONE_DICT - 9))
        client.put(known, [PAYLOAD] * 8)  # the last to be moved
        thread = threading.Thread(target=client.put, args=(more, [PAYLOAD] * 2))
        with client.load(known):
            thread.start()
            while thread.is_alive():
                assert client.match(known).blocks == 8
        assert len(space.space.dicts[0]) < ONE_DICT / 2, "it was cut up"
        client.clear(namespace=space.namespace).result(30)
