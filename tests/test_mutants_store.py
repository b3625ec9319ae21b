"""Broken on purpose: each of these stores lacks one safeguard, and the test that guards it fails on it.

``docs/testing.md`` has the table. What is broken is the real code, by a patch; what catches it is a test that the
honest code passes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
import xxhash

from tests import test_client_life, test_faults_nvme, test_faults_tiers, test_valkey_faults
from tests.faults_support import PLAIN
from tests.valkey_server import ValkeyServer, running_server
from tierkv import frame, handles
from tierkv.errors import FrameError
from tierkv.frame import FrameHeader
from tierkv.ids import BlockKey
from tierkv.testing.faults import Way, proxy_before
from tierkv.tier import DoneCallback
from tierkv.tiers.nvme_journal import Hidden, Journal
from tierkv.tiers.nvme_segments import FRAME_HEADER_BYTES
from tierkv.tiers.nvme_writer import Writer, _Write
from tierkv.tiers.valkey_pool import Loan, Pool
from tierkv.tiers.valkey_resp import Connection
from tierkv.units import align_up
from tierkv.upkeep import Upkeep

Mutate = Callable[[pytest.MonkeyPatch], None]
Check = Callable[[Path, ValkeyServer], object]


@pytest.fixture(scope="module")
def server() -> Iterator[ValkeyServer]:
    with running_server() as server:
        yield server


# ---- broken


def no_checksum(patch: pytest.MonkeyPatch) -> None:
    def verify(header: FrameHeader, key: BlockKey, stored: memoryview) -> None:
        if header.key != key:
            raise FrameError("key", "the frame belongs to another block")
        if header.stored_bytes != len(stored):
            raise FrameError("length", "another length")

    patch.setattr(frame, "verify", verify)


def checksum_of_the_front_only(patch: pytest.MonkeyPatch) -> None:
    """Of the first half of what it should cover, when written as when read."""
    honest = xxhash.xxh3_64_intdigest

    def half(data: bytes | memoryview) -> int:
        return honest(data[: len(data) // 2])

    for module in (frame, handles):
        patch.setattr(module, "xxhash", SimpleNamespace(xxh3_64_intdigest=half))


def key_not_compared(patch: pytest.MonkeyPatch) -> None:
    def verify(header: FrameHeader, key: BlockKey, stored: memoryview) -> None:
        if header.stored_bytes != len(stored):
            raise FrameError("length", "another length")
        if frame.checksum(stored) != header.stored_checksum:
            raise FrameError("checksum", "the stored bytes were damaged")

    patch.setattr(frame, "verify", verify)


def lease_freed_at_its_deadline(patch: pytest.MonkeyPatch) -> None:
    honest = Upkeep.make_rounds

    def make_rounds(self: Upkeep) -> None:
        honest(self)
        for lease in self._leases.all():
            if lease.at_s <= self._clock.now_s():
                self._catalog.unpin(lease.families)  # the holder knows nothing of it

    patch.setattr(Upkeep, "make_rounds", make_rounds)


def tombstone_left_out(patch: pytest.MonkeyPatch) -> None:
    def bury(self: Journal, hidden: list[Hidden]) -> None:
        self.free(hidden)

    patch.setattr(Journal, "bury", bury)


def record_before_frame(patch: pytest.MonkeyPatch) -> None:
    honest_frame, honest_publish = Writer._write_frame, Writer._publish

    def write_frame(self: Writer, write: _Write, frame_bytes: int) -> bool:
        return True

    def publish(self: Writer, written: list[_Write], on_done: DoneCallback) -> None:
        honest_publish(self, written, on_done)
        for write in written:
            honest_frame(self, write, FRAME_HEADER_BYTES + align_up(write.item.stored_bytes))

    patch.setattr(Writer, "_write_frame", write_frame)
    patch.setattr(Writer, "_publish", publish)


def socket_kept_after_an_error(patch: pytest.MonkeyPatch) -> None:
    honest = Pool._give_back

    def give_back(self: Pool, loan: Loan, keep: bool) -> None:
        honest(self, loan, True)

    patch.setattr(Pool, "_give_back", give_back)
    patch.setattr(Connection, "in_step", lambda self: True)


# ---- what catches it


def flipped_bits_in(tier: str) -> Check:
    return lambda path, server: test_faults_tiers.lives(tier, "get_into", Way.FLIPPED, PLAIN, path, server)


def foreign_frames_from(tier: str) -> Check:
    return lambda path, server: test_faults_tiers.lives(tier, "get_into", Way.FOREIGN, PLAIN, path, server)


def a_lease_past_its_deadline(path: Path, server: ValkeyServer) -> None:
    test_client_life.test_d15_a_lease_past_its_deadline_is_reported_once_and_still_protects()


def deleted_blocks_stay_away(path: Path, server: ValkeyServer) -> None:
    test_faults_nvme.test_d21_a_deleted_block_stays_away_after_a_restart(path)


def kills_behind_each_write(path: Path, server: ValkeyServer) -> None:
    test_faults_nvme.test_d21_whenever_a_record_stands_its_frame_does(path)


def a_trickle_past_the_deadline(path: Path, server: ValkeyServer) -> None:
    server.do("FLUSHALL")
    with proxy_before(server.path) as proxy:
        test_valkey_faults.test_d17_a_trickle_ends_with_the_deadline(server, proxy, "get")


CAUGHT_BY: list[tuple[Mutate, Check, str]] = [
    (no_checksum, flipped_bits_in("nvme"), "byte"),
    (no_checksum, flipped_bits_in("valkey"), "byte"),
    (checksum_of_the_front_only, flipped_bits_in("nvme"), "byte"),
    (checksum_of_the_front_only, flipped_bits_in("valkey"), "byte"),
    (key_not_compared, foreign_frames_from("nvme"), "foreign"),
    (key_not_compared, foreign_frames_from("valkey"), "foreign"),
    (lease_freed_at_its_deadline, a_lease_past_its_deadline, "is wrong|family"),
    (tombstone_left_out, deleted_blocks_stay_away, "came back"),
    (record_before_frame, kills_behind_each_write, "whose frame does not stand"),
    (socket_kept_after_an_error, a_trickle_past_the_deadline, "Outcome"),
]


@pytest.mark.usefixtures("leaks_on_purpose")
@pytest.mark.parametrize(
    ("mutate", "check", "says"), CAUGHT_BY, ids=[f"{row[0].__name__}-{i}" for i, row in enumerate(CAUGHT_BY)]
)
def test_the_check_fails_on_the_mutant(
    mutate: Mutate, check: Check, says: str, tmp_path: Path, server: ValkeyServer
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        mutate(patch)
        with pytest.raises(AssertionError, match=says):
            check(tmp_path, server)
