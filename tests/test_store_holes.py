"""What is in the way of a load: cancelled reads of the same blocks, holes in the chain, deletes that are not over."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.client_support import (
    PATIENCE_S,
    Gate,
    Hooked,
    audit,
    chain_of,
    check_lease,
    live,
    loaded,
    put,
    put_all,
)
from tests.nvme_support import peek, poke
from tierkv.clock import Deadline
from tierkv.index import IN_HOST
from tierkv.leaving import Leaving
from tierkv.tier import DoneCallback, Outcome, Want


def in_host(rig: object, chain: object) -> list[bool]:
    catalog = rig.store.catalog  # type: ignore[attr-defined]
    space = rig.client.open_namespace(chain.namespace.spec).space  # type: ignore[attr-defined]
    families = [space.get(one) for one in chain.hashes]  # type: ignore[attr-defined]
    return [family is not None and bool(catalog.index.state[family] & IN_HOST) for family in families]


def test_who_comes_after_a_cancel_waits_for_the_read_and_has_it_begun_again(tmp_path: Path) -> None:
    """The first client's deadline cancels the read; the second comes while the disk still has the call."""
    with live(4, nvme=tmp_path) as rig:
        chain = chain_of(rig.namespace(), 3)
        put_all(rig.client, chain)
        rig.flush("nvme")
        rig.client.evict("host")
        gate = rig.tiers["nvme"].before = Gate("get_into")
        assert len(gate.outlasts(lambda timeout_s: rig.client.load_async(chain, timeout_s=timeout_s))) == 0
        second = rig.client.load_async(chain, timeout_s=PATIENCE_S)
        assert not second.done(), "it must not take a read that was given up for a miss"
        gate.open()
        with second.result(PATIENCE_S) as lease:
            assert len(lease) == 3
            check_lease(rig.store, lease)
        rig.settle()
        audit(rig.store)


def test_d17_who_comes_after_a_cancel_waits_no_longer_than_its_own_deadline(tmp_path: Path) -> None:
    with live(4, nvme=tmp_path) as rig:
        chain = chain_of(rig.namespace(), 3)
        put_all(rig.client, chain)
        rig.flush("nvme")
        rig.client.evict("host")
        gate = rig.tiers["nvme"].before = Gate("get_into")
        for _ in range(3):
            assert (
                len(gate.outlasts(lambda timeout_s: rig.client.load_async(chain, timeout_s=timeout_s))) == 0
            )
        gate.open()
        rig.settle()
        audit(rig.store)
        assert loaded(rig.client, chain) == 3


def test_what_lies_behind_a_hole_takes_no_room(tmp_path: Path) -> None:
    """Block 1 of 6 is gone from the disk: of those behind it none comes into host RAM, though the disk has them."""
    with live(8, nvme=tmp_path, nvme_options={"workers": 1}) as rig:
        chain = chain_of(rig.namespace(), 6)
        put_all(rig.client, chain)
        rig.flush("nvme")
        rig.client.evict("host")
        rig.tiers["nvme"].tier.delete([chain.namespace.block_key(chain.hashes[1], 0)])
        assert loaded(rig.client, chain) == 1
        rig.settle()
        assert in_host(rig, chain) == [True, False, False, False, False, False]
        assert rig.store.host.usage().used_bytes == 4096
        audit(rig.store)
        put_all(rig.client, chain)
        assert loaded(rig.client, chain) == 6


@pytest.mark.parametrize("honest", [True, False])
def test_a_block_is_not_written_to_a_tier_while_it_is_deleted_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *, honest: bool
) -> None:
    """``evict`` has taken the block off the catalog and stands before the delete; a flush wants it there again. With
    the mark taken away the delete kills the copy that the flush has just written."""
    with live(4, nvme=tmp_path) as rig:
        chain = chain_of(rig.namespace(), 2)
        put_all(rig.client, chain)
        rig.flush("nvme")
        if not honest:
            monkeypatch.setattr(Leaving, "_add", _marks_nothing)
        gate = rig.tiers["nvme"].before = Gate("delete")
        evicting = threading.Thread(target=rig.client.evict, args=("nvme",), daemon=True)
        evicting.start()
        gate.reached()
        flushing = rig.client.flush("nvme")
        if not honest:
            assert flushing.result(PATIENCE_S).written == 2
        gate.open()
        evicting.join(PATIENCE_S)
        report = flushing.result(PATIENCE_S)
        assert (report.written, report.failed) == (2, 0)
        rig.client.evict("host")
        assert loaded(rig.client, chain) == (2 if honest else 0)
        rig.settle()


def _marks_nothing(
    self: Leaving, going: object, family: int, *, evicted: bool, reason: str, keys: object = None
) -> None:
    number = going.edge.number  # type: ignore[attr-defined]
    going.keys += self._catalog._keys_in(family, number)  # type: ignore[attr-defined,arg-type]
    self._catalog._lose(family, number, evicted=evicted, reason=reason)  # type: ignore[arg-type]


class LateHooked(Hooked):
    """Tells what it has read only when ``before("telling")`` has returned."""

    def get_into(self, wants: Sequence[Want], deadline: Deadline, on_done: DoneCallback) -> None:
        told: list[tuple[int, Outcome]] = []
        self.tier.get_into(wants, deadline, lambda i, outcome: told.append((i, outcome)))
        self.before("telling")
        for one in told:
            on_done(*one)


def test_d30_a_block_that_lands_after_its_parent_has_gone_is_not_kept(tmp_path: Path) -> None:
    """Its waiter has left, so nothing holds the parent, whose only copy was in host RAM."""
    with live(4, nvme=tmp_path, wrap=LateHooked) as rig:
        space = rig.namespace()
        chain = chain_of(space, 2)
        put_all(rig.client, chain)
        rig.flush("nvme")
        rig.client.evict("host")
        assert loaded(rig.client, chain_of(space, 1)) == 1
        inner = rig.tiers["nvme"].tier
        assert isinstance(inner, LateHooked)
        gate = inner.before = Gate("telling")
        with gate.outlasts(lambda timeout_s: rig.client.load_async(chain, timeout_s=timeout_s)) as lease:
            assert len(lease) == 1
        head = space.space.get(chain.hashes[0])
        assert head is not None
        with rig.store.catalog.lock:
            for tier in (1, 0):
                rig.store.catalog._lose(head, tier, evicted=False, reason="corrupt")
        gate.open()
        rig.settle()
        assert in_host(rig, chain) == [False, False]


def test_d30_a_block_whose_parent_is_damaged_is_not_stored_without_it(tmp_path: Path) -> None:
    """The disk still has the block, so it is known; but nobody could get to it."""
    with live(4, nvme=tmp_path) as rig:
        chain = chain_of(rig.namespace(), 3)
        put_all(rig.client, chain)
        rig.flush("nvme")
        rig.client.evict("host")
        key = chain.namespace.block_key(chain.hashes[0], 0)
        raw = peek(tmp_path, key)
        assert raw is not None
        poke(tmp_path, key, raw[:-1] + bytes([raw[-1] ^ 1]))
        assert loaded(rig.client, chain) == 0
        rig.client.evict("host")  # what of the rest had landed meanwhile
        stored = put(rig.client, chain, 1, 1)
        assert (stored.stored, stored.dropped) == (0, {"no_parent": 1})
        assert in_host(rig, chain) == [False, False, False]
        put_all(rig.client, chain)
        assert loaded(rig.client, chain) == 3
        rig.settle()
        audit(rig.store)
