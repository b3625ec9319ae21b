"""Capacity, free-space floor, size classes, and a disk that is full: on real file systems, also one of 64 MiB."""

from __future__ import annotations

import errno
import subprocess
from collections.abc import Iterator
from io import RawIOBase
from pathlib import Path

import pytest

from tests.nvme_support import (
    BLOCK_BYTES,
    check_names,
    deadline,
    disk_bytes,
    found,
    get,
    make_tier,
    names,
    put,
    put_all,
    running,
    segments,
)
from tierkv.clock import FakeClock
from tierkv.errors import ConfigError
from tierkv.ids import EVERYTHING, BlockKey
from tierkv.testing.faults.disk import ShimDisk
from tierkv.testing.payloads import key_of, make_item
from tierkv.tier import Outcome
from tierkv.tiers.nvme import NvmeTier
from tierkv.tiers.nvme_disk import Disk
from tierkv.units import GIB, KIB, MIB

KEYS = [key_of(i) for i in range(200)]
SLOT_BYTES = BLOCK_BYTES + 4 * KIB


def fill(tier: NvmeTier, keys: list[BlockKey], length_bytes: int = BLOCK_BYTES) -> list[BlockKey]:
    """Stores until the tier is full; gives what was taken."""
    taken = []
    for key in keys:
        [outcome] = put(tier, [key], length_bytes)
        if outcome is Outcome.FULL:
            return taken
        assert outcome is Outcome.DONE
        taken.append(key)
    pytest.fail("the tier takes more than its capacity")


# capacity


def test_d22_capacity_counts_every_file_and_what_earlier_runs_left(tmp_path: Path) -> None:
    with running(tmp_path, MIB) as tier:
        taken = fill(tier, KEYS)
        assert len(taken) * SLOT_BYTES > 0.8 * MIB, "much of the capacity is not used"
        assert disk_bytes(tmp_path) <= MIB
    with running(tmp_path, MIB) as tier:
        assert put(tier, [key_of(1000)]) == [Outcome.FULL]
        tier.delete(taken[:1])
        assert put(tier, [key_of(1000), key_of(1001)]) == [Outcome.DONE, Outcome.FULL]
        assert found(tier, taken) == taken[1:]
    assert disk_bytes(tmp_path) <= MIB
    check_names(tmp_path)


@pytest.mark.parametrize("capacity_bytes", [256 * KIB, 4 * MIB])
def test_d22_long_work_stays_within_the_capacity(tmp_path: Path, capacity_bytes: int) -> None:
    """Small blocks, many records: the log and its checkpoints count as well, also while one is being written."""
    with running(tmp_path, capacity_bytes) as tier:
        resident: list[BlockKey] = []
        fresh = (key_of(i) for i in range(10**6))
        while tier.status()["checkpoints"] != 3:
            keys = [next(fresh) for _ in range(20)]
            outcomes = put(tier, keys, 100)
            assert set(outcomes) <= {Outcome.DONE, Outcome.FULL}
            resident += [key for key, outcome in zip(keys, outcomes, strict=True) if outcome is Outcome.DONE]
            if Outcome.FULL in outcomes:
                tier.delete(resident[:15])
                del resident[:15]
            assert disk_bytes(tmp_path) <= capacity_bytes
        assert found(tier, resident, 100) == resident


def test_d22_a_smaller_capacity_gives_segments_up(tmp_path: Path) -> None:
    with running(tmp_path, 2 * MIB) as tier:
        taken = fill(tier, KEYS)
    with running(tmp_path, MIB) as tier:
        left = found(tier, taken)
        assert 0.3 * len(taken) < len(left) < 0.6 * len(taken)
        assert disk_bytes(tmp_path) <= MIB
        assert sorted(header.key for header in tier.scan()) == sorted(left)
        assert tier.usage().blocks == len(left)
        if put(tier, [key_of(1000)]) == [Outcome.DONE]:
            tier.delete([key_of(1000)])
    with running(tmp_path, 2 * MIB, recovery="strict") as tier:
        assert set(found(tier, taken)) == set(left)
        put_all(tier, [key for key in taken if key not in left])
        assert found(tier, taken) == taken


def test_d22_free_space_floor(tmp_path: Path) -> None:
    class NearlyFull(Disk):
        def space_bytes(self, path: str) -> tuple[int, int]:
            return GIB + MIB - disk_bytes(tmp_path), 100 * GIB

    with running(tmp_path, 16 * MIB, min_free_bytes=GIB, disk=NearlyFull()) as tier:
        taken = fill(tier, KEYS)
        assert 0.8 * MIB < disk_bytes(tmp_path) <= MIB
        assert "the floor is 1 GiB" in str(tier.status()["growth"])
        assert tier.usage().largest_free_bytes < BLOCK_BYTES
        assert tier.usage().writable
        assert found(tier, taken) == taken


def test_d22_the_default_floor_is_finite(tmp_path: Path) -> None:
    with running(tmp_path, 4 * MIB, min_free_bytes=None) as tier:
        assert tier.status()["free_space_floor"] != "0 B"


@pytest.mark.parametrize("code", [errno.EOPNOTSUPP, errno.EINVAL])
def test_d22_without_fallocate_files_are_sparse_and_that_is_said(tmp_path: Path, code: int) -> None:
    def refuse(call: str, path: str, offset: int) -> None:
        if call == "fallocate":
            raise OSError(code, "no")

    with running(tmp_path, disk=ShimDisk(refuse)) as tier:
        put_all(tier, KEYS[:9])
        assert "sparse" in str(tier.status()["allocation"])
        assert found(tier, KEYS[:9]) == KEYS[:9]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"capacity_bytes": 0}, "capacity_bytes = 0: holds no block"),
        ({"capacity_bytes": 8 * KIB}, "holds no block"),
        ({"capacity_bytes": -1}, "holds no block"),
        ({"recovery": "maybe"}, "recovery = 'maybe': use one of quiet, none, strict"),
        ({"workers": 0}, "workers = 0: at least 1"),
        ({"min_free_bytes": -1}, "min_free_bytes = -1"),
        ({"segment_bytes": 100}, "segment_bytes = 100"),
    ],
)
def test_d29_impossible_settings(tmp_path: Path, settings: dict[str, int], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        make_tier(tmp_path, **settings)


def test_the_smallest_capacity_that_is_taken_holds_a_block(tmp_path: Path) -> None:
    for size in range(4 * KIB, 64 * KIB, 4 * KIB):
        try:
            tier = make_tier(tmp_path / str(size), size)
        except ConfigError:
            continue
        tier.start()
        put_all(tier, KEYS[:1], tier.caps.max_block_bytes - 4 * KIB)
        tier.close(deadline())
        assert disk_bytes(tmp_path / str(size)) <= size
        return
    pytest.fail("64 KiB hold no block")


# size classes


def test_a_class_is_the_exact_size_and_serves_blocks_that_are_a_sixteenth_smaller(tmp_path: Path) -> None:
    with running(tmp_path, 64 * MIB, segment_bytes=MIB) as tier:
        put_all(tier, KEYS[:1], 128 * KIB - 1)
        assert tier.usage().used_bytes == 132 * KIB
        put_all(tier, KEYS[1:2], 121 * KIB)  # 128 KiB with its header: within 1/16 of 132
        assert len(segments(tmp_path)) == 1
        put_all(tier, KEYS[2:3], 100 * KIB)
        assert len(segments(tmp_path)) == 2
        assert tier.usage().used_bytes == 2 * 132 * KIB + 104 * KIB


def test_companions_empty_a_segment_for_another_size(tmp_path: Path) -> None:
    with running(tmp_path, 2 * MIB) as tier:
        taken = fill(tier, KEYS)
        assert put(tier, [key_of(1000)], 64 * KIB) == [Outcome.FULL]
        before = names(tmp_path)
        companions = tier.companions(taken[0])
        assert taken[0] in companions
        tier.delete(companions)
        assert tier.companions(taken[0]) == []
        put_all(tier, [key_of(1000)], 64 * KIB)
        assert disk_bytes(tmp_path) <= 2 * MIB
        others = [key for key in taken if key not in companions]
        assert found(tier, others) == others
        assert found(tier, [key_of(1000)], 64 * KIB) == [key_of(1000)]
        assert len(names(tmp_path)) <= len(before)
    with running(tmp_path, 2 * MIB, recovery="strict") as tier:
        assert found(tier, taken) == others
        assert found(tier, [key_of(1000)], 64 * KIB) == [key_of(1000)]


def test_an_empty_segment_is_carved_for_another_size_and_old_records_do_not_count(tmp_path: Path) -> None:
    """The segment keeps its file and number; records of the earlier carving name slots that now mean other bytes."""
    with running(tmp_path, 2 * MIB) as tier:
        taken = fill(tier, KEYS, 28 * KIB)
        before = {name: (tmp_path / name).stat().st_ino for name in segments(tmp_path)}
        tier.delete(tier.companions(taken[0]))
        put_all(tier, [key_of(1000)], 60 * KIB)
        after = {name: (tmp_path / name).stat().st_ino for name in segments(tmp_path)}
        assert after == before
    with running(tmp_path, 2 * MIB, recovery="strict") as tier:
        assert found(tier, [key_of(1000)], 60 * KIB) == [key_of(1000)]
        assert tier.usage().blocks == len(found(tier, taken, 28 * KIB)) + 1


def test_d16_mixed_sizes_do_not_break_the_room_up_for_ever(tmp_path: Path) -> None:
    sizes = [4 * KIB, 20 * KIB, 52 * KIB, 100 * KIB, 130 * KIB]
    with running(tmp_path, 4 * MIB) as tier:
        resident: dict[BlockKey, int] = {}
        for i in range(600):
            key, size = key_of(i), sizes[i * 7 % 5]
            while put(tier, [key], size) == [Outcome.FULL]:
                victims = tier.companions(next(iter(resident)))
                tier.delete(victims)
                for victim in victims:
                    del resident[victim]
            resident[key] = size
        assert disk_bytes(tmp_path) <= 4 * MIB
        for key, size in resident.items():
            assert get(tier, key, size) is Outcome.DONE
        tier.delete(list(resident))
        put_all(tier, [key_of(10_000)], tier.caps.max_block_bytes - 4 * KIB)


def test_largest_free_tells_the_truth(tmp_path: Path) -> None:
    with running(tmp_path, MIB) as tier:
        for i in range(200):
            room_bytes = tier.usage().largest_free_bytes
            [outcome] = put(tier, [key_of(i)], BLOCK_BYTES)
            assert (outcome is Outcome.DONE) == (room_bytes >= BLOCK_BYTES)
            if outcome is Outcome.FULL:
                return
    pytest.fail("the tier never fills up")


# a full disk


class FullDisk(ShimDisk):
    """Takes ``writes`` frames or records and then has no space, ``failures`` times."""

    def __init__(self, kind: str, after: int, failures: int) -> None:
        super().__init__(self._fail)
        self.kind, self.left, self.failures = kind, after, failures

    def _fail(self, call: str, path: str, offset: int) -> None:
        kind = call
        if call == "pwritev" and offset > 0:
            kind = {"segment": "frame", "log": "record"}.get(path.partition("-")[0], call)
        if kind == self.kind:
            self.left -= 1
            if self.left < 0 and self.failures:
                self.failures -= 1
                raise OSError(errno.ENOSPC, "No space left on device")


@pytest.mark.parametrize("kind", ["frame", "record"])
def test_d22_no_space_once_releases_one_segment(tmp_path: Path, kind: str) -> None:
    with running(tmp_path, 4 * MIB, segment_bytes=64 * KIB, disk=FullDisk(kind, 20, 1)) as tier:
        for key in KEYS[:40]:
            put_all(tier, [key])
        there = found(tier, KEYS[:40])
        assert tier.status()["released_segments"] == 1
        assert 40 - 64 * KIB // SLOT_BYTES - 1 <= len(there) < 40
        assert KEYS[39] in there
        assert tier.usage().writable
    with running(tmp_path, 4 * MIB, recovery="strict") as tier:
        assert found(tier, KEYS[:40]) == there
    check_names(tmp_path)


@pytest.mark.parametrize("kind", ["frame", "record"])
def test_d22_no_space_for_ever_makes_the_tier_read_only(tmp_path: Path, kind: str) -> None:
    with running(tmp_path, 4 * MIB, segment_bytes=64 * KIB, disk=FullDisk(kind, 20, 10**9)) as tier:
        outcomes = [outcome for key in KEYS[:40] for outcome in put(tier, [key])]
        assert outcomes == [Outcome.DONE] * 20 + [Outcome.UNAVAILABLE] * 20
        assert not tier.usage().writable
        assert "No space left" in str(tier.status()["read_only"])
        there = found(tier, KEYS[:40])
        assert 20 - 64 * KIB // SLOT_BYTES - 1 <= len(there) <= 20, "reads do not go on"
        tier.delete(there[:1])
        assert get(tier, there[0]) is Outcome.MISS
        assert tier.clear(EVERYTHING, deadline()).complete
        assert found(tier, there) == []
    check_names(tmp_path)


@pytest.mark.parametrize("kind", ["frame", "record", "fallocate"])
def test_d22_a_tier_that_was_read_only_since_the_disk_was_full_takes_blocks_again(
    tmp_path: Path, kind: str
) -> None:
    clock = FakeClock()
    disk = FullDisk(kind, 0 if kind == "fallocate" else 20, 10**9)
    with running(tmp_path, 4 * MIB, segment_bytes=64 * KIB, disk=disk, clock=clock) as tier:
        for key in KEYS[:40]:
            put(tier, [key])
        there = found(tier, KEYS[:40])
        tier.delete(there[:4])  # the log takes no tombstones now
        there = found(tier, there)
        assert not tier.usage().writable
        free_bytes = disk.space_bytes
        disk.space_bytes = lambda path: (0, free_bytes(path)[1])  # type: ignore[method-assign]
        clock.advance(6.0)
        assert not tier.usage().writable, "the disk is full yet"
        disk.space_bytes = free_bytes  # type: ignore[method-assign]
        disk.failures = 0
        assert not tier.usage().writable, "it looks every few seconds, not always"
        clock.advance(6.0)
        assert tier.usage().writable
        assert tier.usage().used_bytes == len(there) * SLOT_BYTES
        put_all(tier, KEYS[50:60])
        kept = sorted([*there, *KEYS[50:60]])
        assert sorted(found(tier, KEYS)) == kept
    with running(tmp_path, 4 * MIB, recovery="quiet") as tier:
        assert sorted(found(tier, KEYS)) == kept, "tombstones that had to wait were forgotten"
    check_names(tmp_path)


def test_d22_a_disk_that_only_says_it_has_space_is_tried_less_and_less(tmp_path: Path) -> None:
    """As with a quota: each try would cost a segment."""
    clock = FakeClock()
    disk = FullDisk("frame", 60, 10**9)
    with running(tmp_path, 4 * MIB, segment_bytes=64 * KIB, disk=disk, clock=clock) as tier:
        for key in KEYS[:61]:
            put(tier, [key])
        assert tier.status()["released_segments"] == 1
        for key in range(1000, 1100):
            clock.advance(1.0)
            assert tier.usage()
            put(tier, [key_of(key)])
        assert 2 <= tier.status()["released_segments"] <= 6  # type: ignore[operator]
        clock.advance(601.0)
        assert tier.usage().writable


def test_d22_no_space_for_the_first_segment_makes_the_tier_read_only(tmp_path: Path) -> None:
    with running(tmp_path, disk=FullDisk("fallocate", 0, 10**9)) as tier:
        assert put(tier, KEYS[:2]) == [Outcome.UNAVAILABLE] * 2
        assert not tier.usage().writable
        assert segments(tmp_path) == []


def test_d22_no_space_to_grow_keeps_what_is_there_in_use(tmp_path: Path) -> None:
    """The segments that stand are paid for: the store goes on in them, and growth is tried again later."""
    clock = FakeClock()
    disk = FullDisk("fallocate", 2, 10**9)
    with running(tmp_path, MIB, segment_bytes=64 * KIB, disk=disk, clock=clock) as tier:
        taken = fill(tier, KEYS)
        assert len(segments(tmp_path)) == 2
        assert tier.usage().writable
        assert found(tier, taken) == taken
        tier.delete(taken[:1])
        put_all(tier, [key_of(1000)])
        disk.failures = 0
        assert put(tier, [key_of(1001)]) == [Outcome.FULL]
        clock.advance(31.0)
        put_all(tier, [key_of(1001)])
    check_names(tmp_path)


@pytest.mark.parametrize("failures", [1, 10**9])
def test_d22_no_space_for_a_checkpoint(tmp_path: Path, failures: int) -> None:
    class NoRoomToCheckpoint(ShimDisk):
        left = failures

        def open(self, path: str, flags: int) -> int:
            if path.endswith("checkpoint.new") and self.left:
                self.left -= 1
                raise OSError(errno.ENOSPC, "No space left on device")
            return super().open(path, flags)

    with running(tmp_path, 256 * KIB, disk=NoRoomToCheckpoint()) as tier:
        for i in range(60):
            put(tier, [key_of(i)])
            tier.delete([key_of(max(0, i - 5))])
        assert tier.usage().writable == (failures == 1)
        there = found(tier, KEYS[:60])
    with running(tmp_path, 256 * KIB, recovery="strict") as tier:
        assert found(tier, KEYS[:60]) == there
        put_all(tier, [key_of(1000)])


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 64 MiB, in memory."""
    folder = tmp_path / "small"
    folder.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=64m", "none", folder], check=False, capture_output=True
    )
    if mounted.returncode:
        pytest.skip(f"no tmpfs can be mounted here: {mounted.stderr.decode().strip()}")
    try:
        yield folder
    finally:
        subprocess.run(["umount", "-l", folder], check=True)


def test_d22_capacity_above_a_disk_of_64_mib(small_disk: Path) -> None:
    """Without a floor the disk is filled to the last byte, the log included."""
    with running(small_disk, 256 * MIB) as tier:
        taken = []
        for i in range(100):
            [outcome] = put(tier, [key_of(i)], MIB)
            assert outcome in (Outcome.DONE, Outcome.FULL)
            taken += [key_of(i)] if outcome is Outcome.DONE else []
        assert len(taken) > 55
        assert found(tier, taken, MIB) == taken
        for i in range(100, 2000):  # the log grows on a full disk
            tier.delete(taken[:1])
            assert put(tier, [key_of(i)], MIB) == [Outcome.DONE]
            taken = [*taken[1:], key_of(i)]
            if i % 100 == 0:
                assert tier.usage().writable, tier.status()["read_only"]
        there = found(tier, taken, MIB)
        assert len(there) > 40
    with running(small_disk, 256 * MIB, recovery="strict") as tier:
        assert set(found(tier, taken, MIB)) == set(there)
    check_names(small_disk)


def fill_up(file: Path) -> None:
    with open(file, "wb", buffering=0) as other, pytest.raises(OSError, match="No space"):
        write_for_ever(other)


def write_for_ever(file: RawIOBase) -> None:
    while True:
        file.write(bytes(64 * KIB))


def test_d22_another_program_fills_the_disk(small_disk: Path) -> None:
    with running(small_disk / "nvme", 32 * MIB) as tier:
        put_all(tier, KEYS[:4], MIB)
        fill_up(small_disk / "other")
        outcomes = {outcome for key in KEYS[4:40] for outcome in put(tier, [key], MIB)}
        assert Outcome.FULL in outcomes
        assert outcomes <= {Outcome.DONE, Outcome.FULL}
        assert found(tier, KEYS[:4], MIB) == KEYS[:4]


def test_a_put_of_what_is_there_writes_nothing_and_a_new_expiry_writes_anew(tmp_path: Path) -> None:
    frames: list[int] = []

    def watch(call: str, path: str, offset: int) -> None:
        if call == "pwritev" and path.startswith("segment-") and offset:
            frames.append(offset)

    with running(tmp_path, disk=ShimDisk(watch)) as tier:
        put_all(tier, KEYS[:1])
        put_all(tier, KEYS[:1], epoch=9)
        assert len(frames) == 1
        put_all(tier, KEYS[:1], expires_ms=4_000_000_000_000)
        assert len(frames) == 2
        assert tier.usage().blocks == 1
        assert next(tier.scan()).expires_ms == 4_000_000_000_000
        assert get(tier, KEYS[0]) is Outcome.DONE
    with running(tmp_path) as tier:
        assert [header.expires_ms for header in tier.scan()] == [4_000_000_000_000]


def test_a_header_of_another_key_is_refused(tmp_path: Path) -> None:
    with running(tmp_path) as tier:
        item = make_item(key_of(1), BLOCK_BYTES)
        item.key = key_of(2)
        seen: list[Outcome] = []
        tier.put_from([item], deadline(), lambda i, outcome: seen.append(outcome))
        assert seen == [Outcome.CORRUPT]
        assert tier.usage().blocks == 0
