"""Handles: each transition consumes its receiver, and what is dropped goes back exactly once."""

from __future__ import annotations

import gc
from collections.abc import Sequence

import pytest

from tests.client_support import spec_of
from tierkv.arena import Arena
from tierkv.errors import HandleError
from tierkv.frame import checksum
from tierkv.handles import Draft, DraftBlocks, Lease, Sealed
from tierkv.ids import FamilyId, Slot
from tierkv.index import NO_SLOT
from tierkv.keys import Chain, Namespace
from tierkv.testing.payloads import fill, key_of, payload_of
from tierkv.tiers.host import HostTier
from tierkv.units import KIB

SIZE = 4 * KIB - 96  # less than its slot


class Lending:
    """Who lends: two families, one part each."""

    def __init__(self, host: HostTier) -> None:
        slots = host.reserve(2, SIZE)
        assert slots is not None
        self.memory = host
        self.slots = slots
        self.taken_back: list[Lease] = []
        self.let_gone: list[FamilyId] = []

    def slot_of(self, family: FamilyId, part: int) -> Slot:
        return self.slots[family - 1] if part == 0 else Slot(NO_SLOT)

    def take_back(self, lease: Lease) -> None:
        self.taken_back.append(lease)

    def let_go(self, families: Sequence[FamilyId]) -> None:
        self.let_gone += families


class Pool:
    """Host memory, and what became of the drafts."""

    def __init__(self) -> None:
        self.host = HostTier(Arena(64 * KIB, 64 * KIB))
        self.namespace = Namespace(spec_of())
        self.discarded: list[DraftBlocks] = []

    def chain(self, tokens: int = 48) -> Chain:
        return self.namespace.chain(list(range(tokens)))

    def draft(self, count: int = 2) -> Draft:
        slots = self.host.reserve(count, SIZE)
        assert slots is not None
        blocks = DraftBlocks(self.chain(), range(count), (0,), (SIZE,), [(slot,) for slot in slots])
        return Draft(blocks, self.host, self.discarded.append)

    def lease(self, tokens: int = 48) -> tuple[Lease, Lending]:
        lending = Lending(self.host)
        return Lease(lending, self.chain(tokens), [FamilyId(1), FamilyId(2)], "test", 0.0), lending


@pytest.fixture
def pool() -> Pool:
    return Pool()


def test_a_draft_is_exactly_its_payload_and_writable(pool: Pool) -> None:
    draft = pool.draft()
    assert len(draft) == 2
    for i in range(2):
        assert len(draft.view(i, 0)) == SIZE
        fill(draft.view(i, 0), key_of(i))
    sealed = draft.seal()
    assert sealed.checksums == [(checksum(payload_of(key_of(i), SIZE)),) for i in range(2)]
    sealed.drop()


def test_sealing_consumes_the_draft(pool: Pool) -> None:
    draft = pool.draft()
    sealed = draft.seal()
    for use in (draft.seal, lambda: draft.view(0, 0), lambda: len(draft), lambda: draft.blocks):
        with pytest.raises(HandleError, match="sealed or dropped"):
            use()
    draft.drop()
    assert pool.discarded == []
    sealed.drop()


def test_registering_consumes_what_was_sealed(pool: Pool) -> None:
    sealed = pool.draft().seal()
    assert len(sealed.take().slots) == 2
    with pytest.raises(HandleError, match="registered or dropped"):
        sealed.take()
    sealed.drop()
    assert pool.discarded == []


@pytest.mark.parametrize("seal", [False, True])
def test_dropping_gives_the_slots_back_once(pool: Pool, seal: bool) -> None:
    handle: Draft | Sealed = pool.draft()
    if seal:
        assert isinstance(handle, Draft)
        handle = handle.seal()
    handle.drop()
    handle.drop()
    assert len(pool.discarded) == 1


@pytest.mark.parametrize("seal", [False, True])
def test_leaving_the_block_gives_the_slots_back(pool: Pool, seal: bool) -> None:
    def run() -> None:
        handle: Draft | Sealed = pool.draft()
        with handle.seal() if seal else handle:  # type: ignore[union-attr]
            raise KeyError("an engine's own error")

    with pytest.raises(KeyError):
        run()
    gc.collect()
    assert len(pool.discarded) == 1


@pytest.mark.parametrize("seal", [False, True])
def test_a_forgotten_handle_gives_its_slots_back(pool: Pool, seal: bool) -> None:
    handle: Draft | Sealed = pool.draft()
    if seal:
        assert isinstance(handle, Draft)
        handle = handle.seal()
    del handle
    gc.collect()
    assert len(pool.discarded) == 1


def test_a_lease_reads_and_does_not_write(pool: Pool) -> None:
    lease, _ = pool.lease()
    view = lease.view(0)
    assert len(view) == pool.namespace.layout.parts[0].payload_bytes
    assert view.readonly
    assert lease.ref(1, 0).family == 2
    lease.release()


def test_a_part_that_is_not_there_is_named(pool: Pool) -> None:
    lease, _ = pool.lease()
    for use in (lease.ref, lease.view):
        with pytest.raises(HandleError, match="block 1 was stored without part 3"):
            use(1, 3)
    lease.release()


def test_a_lease_is_released_once(pool: Pool) -> None:
    lease, lending = pool.lease()
    with lease:
        assert not lease.released
    lease.release()
    assert lending.taken_back == [lease]
    assert lease.released
    for use in (lease.view, lease.ref):
        with pytest.raises(HandleError, match="released"):
            use(0, 0)


def test_a_reference_tells_when_its_slot_was_used_again(pool: Pool) -> None:
    lease, lending = pool.lease()
    before = lease.ref(0, 0)
    pool.host.release([before.slot])
    assert pool.host.reserve(1, SIZE) == [before.slot]
    assert lease.ref(0, 0).generation != before.generation
    lease.release()
    assert lending.taken_back == [lease]


@pytest.mark.parametrize(("prompt_tokens", "covered"), [(32, 31), (33, 32), (48, 32)])
def test_d7_a_lease_never_covers_all_of_a_prompt(pool: Pool, prompt_tokens: int, covered: int) -> None:
    lease, _ = pool.lease(prompt_tokens)
    assert lease.tokens == covered
    lease.release()


def test_a_lease_that_is_shortened_lets_its_tail_go_and_no_more() -> None:
    lease, lending = Pool().lease()
    lease.shorten(2)
    lease.shorten(1)
    lease.shorten(5)
    assert (len(lease), lending.let_gone) == (1, [2])
    lease.release()
    lease.shorten(0)
    assert (lending.taken_back, lending.let_gone) == ([lease], [2])
