"""``evict`` ends by its deadline, also when the server stands still: in this process, and in a daemon's."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.client_support import chain_of, live, put_all
from tests.valkey_server import ValkeyServer, running_server
from tierkv.catalog import LOCK_BATCH
from tierkv.testing.faults.process import hung

pytestmark = pytest.mark.usefixtures("face")

BLOCKS = 5 * LOCK_BATCH


@pytest.fixture(scope="module")
def server() -> Iterator[ValkeyServer]:
    with running_server() as server:
        yield server


def test_d25_evict_from_a_server_that_stands_still_ends_in_time(server: ValkeyServer) -> None:
    with live(BLOCKS, valkey=server.address) as rig:
        chain = chain_of(rig.namespace(), BLOCKS)
        put_all(rig.client, chain)
        rig.flush("valkey")
        with hung(server.pid):
            found = rig.client.evict("valkey", timeout_s=0.1)
        # A batch waits as long as the server may take, which is longer than all the time there is.
        assert found.evicted <= LOCK_BATCH
        assert found.left == BLOCKS - found.evicted
        rest = rig.client.evict("valkey")
        assert (rest.evicted, rest.left) == (found.left, 0)
        assert rig.client.match(chain).blocks == BLOCKS


def test_without_time_everything_is_left() -> None:
    with live(4) as rig:
        chain = chain_of(rig.namespace(), 4)
        put_all(rig.client, chain)
        found = rig.client.evict("host", timeout_s=0.0)
        assert (found.evicted, found.left) == (0, 4)
        assert rig.client.match(chain).blocks == 4
