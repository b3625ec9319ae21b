"""Loans: one client holds the lease, another one copies, as a scheduler and its workers do."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest

from tests.client_support import PATIENCE_S, Live, Peeking, chain_of, live, put_all
from tierkv.client import Client
from tierkv.copier import LayerPages, PagedKV
from tierkv.daemon.remote import RemoteClient
from tierkv.errors import HandleError
from tierkv.handles import SlotMemory
from tierkv.loans import LentRun, Loan, borrow, lend
from tierkv.testing.payloads import check

pytestmark = pytest.mark.usefixtures("face")


@contextmanager
def worker_of(rig: Live) -> Iterator[tuple[Client | RemoteClient, SlotMemory]]:
    """A second client of the store, and the memory that it sees."""
    if isinstance(rig.client, Peeking):
        with RemoteClient(str(rig.client.server.path), call_s=PATIENCE_S) as client:
            client.health()
            assert client.link.memory is not None
            assert client.link.memory is not rig.client.link.memory  # mapped a second time
            yield client, client.link.memory
    else:
        yield rig.client, rig.store.host


def pages(count: int) -> tuple[np.ndarray, PagedKV]:
    memory = np.full((count, 4096), 0xAA, np.uint8)
    return memory, PagedKV(((LayerPages((memory,)),),))


def test_d8_a_borrower_copies_what_another_has_leased() -> None:
    with live() as rig:
        space = rig.namespace()
        chain = chain_of(space, 3)
        put_all(rig.client, chain)
        with worker_of(rig) as (worker, memory), rig.client.load(chain) as lease:
            worker.open_namespace(space.namespace.spec)
            run = borrow(Loan(*tuple(lend(lease))), chain, memory)
            assert run is not None
            assert len(run) == len(lease) == 3
            there, kv = pages(4)
            assert worker.onboard(run, kv, [[[3]], [[1]], [[0]]]).result(PATIENCE_S)
            for block, page in enumerate((3, 1, 0)):
                check(memoryview(there[page]), space.namespace.block_key(chain.hashes[block], 0))
            assert (there[2] == 0xAA).all()
            run.release()
            assert rig.client.stats()["leases"] == 1


def test_d15_what_was_lent_and_given_back_is_noticed_after_the_copy() -> None:
    """The lender lets go and the slots get other blocks: the borrower's copy is no success."""
    with live(host_blocks=4) as rig:
        space = rig.namespace()
        chain = chain_of(space, 3)
        put_all(rig.client, chain)
        with worker_of(rig) as (worker, memory):
            worker.open_namespace(space.namespace.spec)
            with rig.client.load(chain) as lease:
                loan = lend(lease)
            rig.client.clear().result(PATIENCE_S)
            put_all(rig.client, chain_of(space, 4, seed=1))
            run = borrow(loan, chain, memory)
            assert run is not None
            _, kv = pages(3)
            assert not worker.onboard(run, kv, [[[0]], [[1]], [[2]]]).result(PATIENCE_S)
            assert isinstance(run.lessor, LentRun)
            assert run.lessor.whole((0,)) == 0


def test_a_loan_of_another_memory_is_none() -> None:
    with live() as rig:
        space = rig.namespace()
        chain = chain_of(space, 2)
        put_all(rig.client, chain)
        with worker_of(rig) as (_, memory), rig.client.load(chain) as lease:
            other = lend(lease)._replace(instance=bytes(16))
            assert borrow(other, chain, memory) is None
            assert borrow(other, chain, None) is None


def test_a_shortened_lease_lends_what_is_left_and_a_released_one_nothing() -> None:
    with live() as rig:
        space = rig.namespace()
        chain = chain_of(space, 3)
        put_all(rig.client, chain)
        with rig.client.load(chain) as lease:
            lease.shorten(2)
            assert lend(lease).blocks == 2
        with pytest.raises(HandleError):
            lend(lease)


def test_a_lease_tells_which_tiers_its_load_has_read(tmp_path: Path) -> None:
    with live(nvme=tmp_path / "nvme") as rig:
        chain = chain_of(rig.namespace(), 3)
        put_all(rig.client, chain)
        rig.flush("nvme")
        with rig.client.load(chain) as lease:
            assert lease.colder == {}
        rig.client.evict("host")
        with rig.client.load(chain) as lease:
            assert lease.colder == {"nvme": 3}
