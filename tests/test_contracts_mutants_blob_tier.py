"""Every test of the blob-tier contract has teeth: for each broken tier here, the named test fails."""

import os
import threading
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from importlib import import_module
from pathlib import Path

import pytest
from contracts_support import Meeting, assert_catches

from tierkv import frame
from tierkv.clock import Deadline
from tierkv.errors import FrameError
from tierkv.frame import HEADER_BYTES, FrameHeader
from tierkv.ids import EVERYTHING, BlockKey, KeyPrefix
from tierkv.testing.blob_tier import BlobTierContract
from tierkv.testing.memory import MemoryBlobTier, MemoryStorage
from tierkv.tier import ClearResult, DoneCallback, Item, Outcome, Presence, Usage, Want
from tierkv.units import MIB


class DoneTwice(MemoryBlobTier):
    def get_into(self, wants: Sequence[Want], deadline: Deadline, on_done: DoneCallback) -> None:
        super().get_into(wants, deadline, on_done)
        if wants:
            on_done(0, Outcome.DONE)


class ReportsOneTooFew(MemoryBlobTier):
    def put_from(self, items: Sequence[Item], deadline: Deadline, on_done: DoneCallback) -> None:
        super().put_from(items, deadline, lambda i, outcome: on_done(i, outcome) if i != 5 else None)


class ReportsARepeatedKeyOnce(MemoryBlobTier):
    def get_into(self, wants: Sequence[Want], deadline: Deadline, on_done: DoneCallback) -> None:
        keys = [want.key for want in wants]
        super().get_into(
            wants, deadline, lambda i, outcome: on_done(i, outcome) if keys.index(keys[i]) == i else None
        )


class ReportsFromAnotherThread(MemoryBlobTier):
    def get_into(self, wants: Sequence[Want], deadline: Deadline, on_done: DoneCallback) -> None:
        thread = threading.Thread(target=super().get_into, args=(wants, deadline, on_done))
        thread.start()
        thread.join()


class MixesUpTheOrder(MemoryBlobTier):
    def get_into(self, wants: Sequence[Want], deadline: Deadline, on_done: DoneCallback) -> None:
        super().get_into(wants, deadline, lambda i, outcome: on_done(len(wants) - 1 - i, outcome))


class DropsTheLastByte(MemoryBlobTier):
    def _write(self, item: Item) -> Outcome:
        return super()._write(replace(item, stored_bytes=max(0, item.stored_bytes - 1)))


class ForgetsStoredBytes(MemoryBlobTier):
    def _read(self, want: Want) -> Outcome:
        outcome = super()._read(want)
        want.stored_bytes = len(want.payload)
        return outcome


class RewritesTheHeader(MemoryBlobTier):
    def _read(self, want: Want) -> Outcome:
        outcome = super()._read(want)
        if outcome is Outcome.DONE:
            want.header[:HEADER_BYTES] = frame.pack(replace(frame.unpack(want.header), expires_ms=12345))
        return outcome


class ChangesTheSource(MemoryBlobTier):
    def _write(self, item: Item) -> Outcome:
        outcome = super()._write(item)
        item.header[HEADER_BYTES] = 0
        return outcome


class WritesBesideTheBuffer(MemoryBlobTier):
    def _read(self, want: Want) -> Outcome:
        outcome = super()._read(want)
        memoryview(want.payload.obj)[-1:] = b"\0"
        return outcome


class SaysDoneForAMiss(MemoryBlobTier):
    def _read(self, want: Want) -> Outcome:
        super()._read(want)
        return Outcome.DONE


class ChecksThePadding(MemoryBlobTier):
    def _write(self, item: Item) -> Outcome:
        padding = set(item.payload[item.stored_bytes :])
        return super()._write(item) if padding <= {0xAA} else Outcome.CORRUPT


class RefusesASecondPut(MemoryBlobTier):
    def _write(self, item: Item) -> Outcome:
        return Outcome.FULL if item.key in self.storage.frames else super()._write(item)


class CountsASecondPutAsTwo(MemoryBlobTier):
    puts = 0

    def _write(self, item: Item) -> Outcome:
        self.puts += 1
        return super()._write(item)

    def usage(self) -> Usage:
        return replace(super().usage(), blocks=self.puts)


class TakesTheTtlForMilliseconds(MemoryBlobTier):
    def _write(self, item: Item) -> Outcome:
        return super()._write(item) if item.ttl_s is None else Outcome.DONE


class DeletesNothing(MemoryBlobTier):
    def delete(self, keys: Sequence[BlockKey]) -> None:
        pass


class DeletesTooMuch(MemoryBlobTier):
    def delete(self, keys: Sequence[BlockKey]) -> None:
        self.clear(EVERYTHING, Deadline.__new__(Deadline))


class IgnoresThePrefix(MemoryBlobTier):
    def clear(self, prefix: KeyPrefix, deadline: Deadline) -> ClearResult:
        return super().clear(EVERYTHING, deadline)


class ClearsOnlyNamespaces(MemoryBlobTier):
    def clear(self, prefix: KeyPrefix, deadline: Deadline) -> ClearResult:
        return super().clear(prefix, deadline) if len(prefix) == 12 else ClearResult(0, complete=True)


class ClaimsAClear(MemoryBlobTier):
    def clear(self, prefix: KeyPrefix, deadline: Deadline) -> ClearResult:
        return ClearResult(0, complete=True) if deadline.over() else super().clear(prefix, deadline)


class ProbesInSortedOrder(MemoryBlobTier):
    def probe(self, keys: Sequence[BlockKey], deadline: Deadline) -> list[Presence]:
        return super().probe(sorted(keys), deadline)


class ProbesAbsentWithoutTime(MemoryBlobTier):
    def probe(self, keys: Sequence[BlockKey], deadline: Deadline) -> list[Presence]:
        return [Presence.ABSENT] * len(keys) if deadline.over() else super().probe(keys, deadline)


class ProbesPresent(MemoryBlobTier):
    def probe(self, keys: Sequence[BlockKey], deadline: Deadline) -> list[Presence]:
        return [Presence.PRESENT] * len(keys)


class ShowsAnObject(MemoryBlobTier):
    def status(self) -> dict[str, object]:
        return {"lock": self._lock}


class StandsStillInUsage(MemoryBlobTier):
    def usage(self) -> Usage:
        return replace(super().usage(), used_bytes=0)


class NeverGivesRoomBack(MemoryBlobTier):
    def _forget(self, key: BlockKey) -> None:
        self.storage.frames.pop(key, None)


class PromisesTooMuchRoom(MemoryBlobTier):
    def usage(self) -> Usage:
        return replace(super().usage(), largest_free_bytes=self.caps.max_block_bytes)

    def _write(self, item: Item) -> Outcome:
        return super()._write(item) if item.stored_bytes <= MIB else Outcome.FULL


class TakesAnySize(MemoryBlobTier):
    def _write(self, item: Item) -> Outcome:
        self.storage.frames[item.key] = bytes(item.header[:HEADER_BYTES]) + item.payload[: item.stored_bytes]
        return Outcome.DONE


class EvictsForAnOversize(MemoryBlobTier):
    def _write(self, item: Item) -> Outcome:
        if item.stored_bytes > self.caps.max_block_bytes:
            self.storage.frames.clear()
        return super()._write(item)


class CutsToTheBuffer(MemoryBlobTier):
    def _read(self, want: Want) -> Outcome:
        raw = self.storage.frames.get(want.key, b"")
        if len(raw) - HEADER_BYTES <= len(want.payload):
            return super()._read(want)
        want.header[:HEADER_BYTES] = raw[:HEADER_BYTES]
        want.payload[:] = raw[HEADER_BYTES:][: len(want.payload)]
        want.stored_bytes = len(want.payload)
        return Outcome.DONE


class ForgetsItsCapacity(MemoryBlobTier):
    def start(self) -> None:
        super().start()
        self._capacity_bytes *= 2

    def usage(self) -> Usage:
        return replace(super().usage(), capacity_bytes=self._capacity_bytes // 2)


class EvictsInSecret(MemoryBlobTier):
    def _write(self, item: Item) -> Outcome:
        if super()._write(item) is Outcome.FULL:
            self._forget(next(iter(self.storage.frames)))
        return super()._write(item)


class HangsWithoutTime(MemoryBlobTier):
    def __init__(self, *args: object, **kwargs: object) -> None:
        super().__init__()
        self._end = threading.Event()

    def get_into(self, wants: Sequence[Want], deadline: Deadline, on_done: DoneCallback) -> None:
        if deadline.over():
            self._end.wait()
        super().get_into(wants, deadline, on_done)

    def close(self, deadline: Deadline) -> None:
        self._end.set()


class MissesWithoutTime(MemoryBlobTier):
    def get_into(self, wants: Sequence[Want], deadline: Deadline, on_done: DoneCallback) -> None:
        super().get_into(
            wants, deadline, lambda i, outcome: on_done(i, Outcome.MISS if deadline.over() else outcome)
        )


class IsFullWithoutTime(MemoryBlobTier):
    def put_from(self, items: Sequence[Item], deadline: Deadline, on_done: DoneCallback) -> None:
        super().put_from(
            items, deadline, lambda i, outcome: on_done(i, Outcome.FULL if deadline.over() else outcome)
        )


class SaysDoneWithoutTime(MemoryBlobTier):
    def put_from(self, items: Sequence[Item], deadline: Deadline, on_done: DoneCallback) -> None:
        super().put_from(items, deadline, lambda i, _: on_done(i, Outcome.DONE))


class PublishesTornBlocks(MemoryBlobTier):
    def put_from(self, items: Sequence[Item], deadline: Deadline, on_done: DoneCallback) -> None:
        super().put_from(items, deadline, on_done)
        if deadline.over():
            for item in items:
                self.storage.frames[item.key] = bytes(item.header[:HEADER_BYTES]) + item.payload[:100]


class WritesAfterTheCall(MemoryBlobTier):
    """As a tier would whose I/O outlives a timeout: here it comes to its end at close."""

    def __init__(self, capacity_bytes: int) -> None:
        super().__init__(capacity_bytes)
        self._late: list[Want] = []

    def get_into(self, wants: Sequence[Want], deadline: Deadline, on_done: DoneCallback) -> None:
        if deadline.over():
            self._late.extend(wants)
        super().get_into(wants, deadline, on_done)

    def close(self, deadline: Deadline) -> None:
        for want in self._late:
            self._read(want)


class ReadsAfterTheCall(MemoryBlobTier):
    """Keeps the caller's buffer instead of its bytes."""

    def __init__(self, capacity_bytes: int) -> None:
        super().__init__(capacity_bytes)
        self._kept: dict[BlockKey, Item] = {}

    def _write(self, item: Item) -> Outcome:
        self._kept[item.key] = item
        return super()._write(item)

    def _read(self, want: Want) -> Outcome:
        if want.key in self._kept:
            super()._write(self._kept.pop(want.key))
        return super()._read(want)


class RaisesOnDamage(MemoryBlobTier):
    def _read(self, want: Want) -> Outcome:
        if want.key in self.storage.frames:
            frame.unpack(self.storage.frames[want.key])
        return super()._read(want)


class MendsWhatItReads(MemoryBlobTier):
    """Writes a fitting header over whatever came: damage passes for a block."""

    def _read(self, want: Want) -> Outcome:
        outcome = super()._read(want)
        if outcome is Outcome.DONE:
            stored = want.payload[: want.stored_bytes]
            total = frame.checksum(stored)
            old = frame.unpack(want.header)
            whole = replace(old, key=want.key, stored_bytes=len(stored), stored_checksum=total)
            want.header[:HEADER_BYTES] = frame.pack(whole)
        return outcome


class RaisesOnTooMuch(MemoryBlobTier):
    def _read(self, want: Want) -> Outcome:
        outcome = super()._read(want)
        if outcome is Outcome.DONE:
            header = frame.unpack(want.header)
            if want.stored_bytes > header.stored_bytes:
                raise FrameError("length", "too long")
        return outcome


class BreaksAfterDamage(MemoryBlobTier):
    broken = False

    def _read(self, want: Want) -> Outcome:
        outcome = super()._read(want)
        if outcome is Outcome.DONE and frame.checksum(want.payload[: want.stored_bytes]) != (
            frame.unpack(want.header).stored_checksum
        ):
            self.broken = True
        return Outcome.UNAVAILABLE if self.broken else outcome


class SharesAScratchBuffer(MemoryBlobTier):
    """Two writers meet between the copy into the one scratch buffer and the copy out of it."""

    def __init__(self, capacity_bytes: int) -> None:
        super().__init__(capacity_bytes)
        self._scratch = b""
        self._meeting = Meeting()

    def _write(self, item: Item) -> Outcome:
        self._scratch = bytes(item.header[:HEADER_BYTES]) + item.payload[: item.stored_bytes]
        self._meeting.wait()
        self.storage.frames[item.key] = self._scratch
        return Outcome.DONE


class LosesARace(MemoryBlobTier):
    """Refuses a key that another thread is writing."""

    def __init__(self, capacity_bytes: int) -> None:
        super().__init__(capacity_bytes)
        self._meet = threading.Barrier(8)

    def _write(self, item: Item) -> Outcome:
        return super()._write(item) if self._meet.wait(10.0) == 0 else Outcome.UNAVAILABLE


class LeavesAThread(MemoryBlobTier):
    def start(self) -> None:
        threading.Thread(target=threading.Event().wait, args=(30.0,), daemon=True).start()


class LeavesADescriptor(MemoryBlobTier):
    def start(self) -> None:
        os.open("/dev/null", os.O_RDONLY)  # one for each of two short lives: the process can bear it


class Persistent(MemoryBlobTier):
    def __init__(self, capacity_bytes: int, storage: MemoryStorage | None = None) -> None:
        super().__init__(capacity_bytes, storage=storage or MemoryStorage())


class LosesTheLastBlock(Persistent):
    def close(self, deadline: Deadline) -> None:
        self.storage.frames.popitem()


class BringsBackTheDeleted(Persistent):
    deleted: dict[BlockKey, bytes] = {}

    def delete(self, keys: Sequence[BlockKey]) -> None:
        self.deleted = {key: self.storage.frames[key] for key in keys}
        super().delete(keys)

    def close(self, deadline: Deadline) -> None:
        self.storage.frames |= self.deleted


class BringsBackTheCleared(Persistent):
    before: dict[BlockKey, bytes] = {}

    def clear(self, prefix: KeyPrefix, deadline: Deadline) -> ClearResult:
        self.before = dict(self.storage.frames)
        return super().clear(prefix, deadline)

    def close(self, deadline: Deadline) -> None:
        self.storage.frames = {**self.before, **self.storage.frames}


class ScansTooFew(Persistent):
    def scan(self) -> Iterator[FrameHeader]:
        yield from list(super().scan())[1:]


class ScansOtherHeaders(Persistent):
    def scan(self) -> Iterator[FrameHeader]:
        for header in super().scan():
            yield replace(header, depth=0, parent_hash=None)


class ReportsNothingAsDone(MemoryBlobTier):
    def put_from(self, items: Sequence[Item], deadline: Deadline, on_done: DoneCallback) -> None:
        super().put_from(items, deadline, on_done)
        if not items:
            on_done(0, Outcome.DONE)


class HangsInClose(MemoryBlobTier):
    def close(self, deadline: Deadline) -> None:
        if deadline.over():
            threading.Event().wait(30.0)


class LoadsPickles(MemoryBlobTier):
    def _read(self, want: Want) -> Outcome:
        raw = self.storage.frames.get(want.key, b"")
        if raw.startswith(b"cos"):
            with suppress(FileExistsError):
                import_module("pickle").loads(raw)
        return super()._read(want)


class HidesItsHeader(MemoryBlobTier):
    """Stores something else than the header that it was given."""

    def _write(self, item: Item) -> Outcome:
        outcome = super()._write(item)
        self.storage.frames[item.key] = bytes(HEADER_BYTES) + self.storage.frames[item.key][HEADER_BYTES:]
        return outcome


class StartsWithABlock(MemoryBlobTier):
    def start(self) -> None:
        self.storage.frames[BlockKey(bytes(32))] = bytes(HEADER_BYTES)

    def scan(self) -> Iterator[FrameHeader]:
        yield self  # type: ignore[misc]


CAUGHT_BY = {
    DoneTwice: "test_batch_of_mixed_sizes_and_misses",
    ReportsOneTooFew: "test_batch_of_mixed_sizes_and_misses",
    ReportsARepeatedKeyOnce: "test_batch_in_another_order_and_with_a_repeated_key",
    ReportsFromAnotherThread: "test_round_trip",
    MixesUpTheOrder: "test_batch_of_mixed_sizes_and_misses",
    DropsTheLastByte: "test_round_trip",
    ForgetsStoredBytes: "test_round_trip_into_a_larger_buffer",
    RewritesTheHeader: "test_round_trip",
    ChangesTheSource: "test_round_trip",
    WritesBesideTheBuffer: "test_round_trip",
    SaysDoneForAMiss: "test_unknown_key_is_a_miss",
    ChecksThePadding: "test_padding_means_nothing",
    RefusesASecondPut: "test_put_twice_leaves_one_whole_block",
    CountsASecondPutAsTwo: "test_put_twice_leaves_one_whole_block",
    TakesTheTtlForMilliseconds: "test_a_ttl_in_the_future_hides_nothing",
    DeletesNothing: "test_delete",
    DeletesTooMuch: "test_delete",
    IgnoresThePrefix: "test_d27_clear_takes_the_prefix_and_nothing_else",
    ClearsOnlyNamespaces: "test_d27_clear_takes_the_prefix_and_nothing_else",
    ClaimsAClear: "test_d27_clear_without_time_does_not_claim_success",
    ProbesInSortedOrder: "test_probe_answers_in_order",
    ProbesAbsentWithoutTime: "test_probe_without_time_returns_and_tells_the_truth",
    ProbesPresent: "test_unknown_key_is_a_miss",
    ShowsAnObject: "test_caps_name_and_status",
    StandsStillInUsage: "test_usage_follows_the_blocks",
    NeverGivesRoomBack: "test_usage_follows_the_blocks",
    PromisesTooMuchRoom: "test_largest_free_finds_room",
    TakesAnySize: "test_d16_oversize_is_refused_and_harms_nothing",
    EvictsForAnOversize: "test_d16_oversize_is_refused_and_harms_nothing",
    CutsToTheBuffer: "test_a_block_larger_than_the_buffer_is_corrupt",
    ForgetsItsCapacity: "test_d22_capacity_is_kept",
    EvictsInSecret: "test_d22_capacity_is_kept",
    HangsWithoutTime: "test_reads_without_time_return_and_tell_the_truth",
    MissesWithoutTime: "test_reads_without_time_return_and_tell_the_truth",
    IsFullWithoutTime: "test_writes_without_time_return_and_tell_the_truth",
    SaysDoneWithoutTime: "test_writes_without_time_return_and_tell_the_truth",
    PublishesTornBlocks: "test_writes_without_time_return_and_tell_the_truth",
    WritesAfterTheCall: "test_buffers_are_let_go_when_the_call_returns",
    ReadsAfterTheCall: "test_sources_may_be_reused_when_the_call_returns",
    RaisesOnDamage: "test_d18_truncated",
    MendsWhatItReads: "test_d18_foreign_block",
    RaisesOnTooMuch: "test_d18_extended",
    BreaksAfterDamage: "test_d09_one_flipped_bit",
    SharesAScratchBuffer: "test_d21_many_threads",
    LosesARace: "test_d21_eight_threads_store_one_key",
    LeavesAThread: "test_close_leaves_no_thread_and_no_descriptor",
    LeavesADescriptor: "test_close_leaves_no_thread_and_no_descriptor",
    LosesTheLastBlock: "test_d23_a_new_start_finds_what_was_done",
    BringsBackTheDeleted: "test_d23_a_new_start_finds_what_was_done",
    BringsBackTheCleared: "test_d23_a_new_start_finds_what_was_done",
    ScansTooFew: "test_d23_a_new_start_finds_what_was_done",
    ScansOtherHeaders: "test_d23_a_new_start_finds_what_was_done",
    ReportsNothingAsDone: "test_empty_batches",
    HangsInClose: "test_close_without_time_returns",
    LoadsPickles: "test_d18_pickle_runs_nothing",
    HidesItsHeader: "test_d03_peek_sees_header_and_payload",
    StartsWithABlock: "test_a_new_tier_is_empty",
}


def contract_for(tier_class: type[MemoryBlobTier]) -> type[BlobTierContract]:
    class Contract(BlobTierContract):
        patience_s = 1.0

        def make_tier(self) -> MemoryBlobTier:
            return tier_class(64 * MIB)

        def peek(self, tier: MemoryBlobTier, key: BlockKey) -> bytes | None:
            return tier.storage.frames.get(key)

        def poke(self, tier: MemoryBlobTier, key: BlockKey, raw: bytes) -> None:
            tier.storage.frames[key] = raw

        def reopen(self, tier: Persistent) -> MemoryBlobTier:
            return type(tier)(64 * MIB, tier.storage)

    return Contract


@pytest.mark.usefixtures("leaks_on_purpose")
@pytest.mark.parametrize(("mutant", "test"), CAUGHT_BY.items(), ids=[mutant.__name__ for mutant in CAUGHT_BY])
def test_the_contract_catches(mutant: type[MemoryBlobTier], test: str, tmp_path: Path) -> None:
    assert_catches(contract_for(mutant), test, tmp_path, "tier")


def test_every_test_of_the_contract_has_a_mutant() -> None:
    tests = {name for name in dir(BlobTierContract) if name.startswith("test_")}
    assert tests == set(CAUGHT_BY.values())
