"""What a start makes of a directory: torn, doubled, shuffled and damaged records, other versions, a large index."""

from __future__ import annotations

import os
import random
import shutil
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import xxhash

from tests.nvme_support import (
    check_names,
    deadline,
    found,
    get,
    locate,
    logs,
    names,
    put,
    put_all,
    quick_folder,
    running,
    segments,
)
from tierkv.errors import ConfigError, FormatError, TierError
from tierkv.frame import pack, unpack
from tierkv.ids import EVERYTHING
from tierkv.testing.faults.disk import ShimDisk
from tierkv.testing.payloads import header_of, key_of, make_item, tenant_of
from tierkv.tier import Outcome, Presence
from tierkv.tiers.nvme_record import (
    LOG_MAGIC,
    SEGMENT_MAGIC,
    file_header,
    frame_header_of,
    key_and_expiry_in,
    key_in,
    publish_record,
    tombstone_record,
)
from tierkv.units import GIB, KIB, MIB

KEYS = [key_of(i) for i in range(12)]


def only_log(path: Path) -> Path:
    [log] = logs(path)
    return log


def records_of(log: Path) -> list[bytes]:
    raw = log.read_bytes()
    return [raw[at : at + 256] for at in range(256, len(raw), 256)]


def write_log(log: Path, records: list[bytes]) -> None:
    log.write_bytes(log.read_bytes()[:256] + b"".join(records))


@pytest.fixture
def path(tmp_path: Path) -> Iterator[Path]:
    """A directory in which a tier stored ``KEYS`` and deleted the first two."""
    with quick_folder(tmp_path) as folder:
        with running(folder / "nvme") as tier:
            put_all(tier, KEYS)
            tier.delete(KEYS[:2])
        yield folder / "nvme"


def test_d23_restart_finds_blocks_and_writes_no_segment(path: Path) -> None:
    written = []

    def watch(call: str, name: str, offset: int) -> None:
        if call == "pwritev":
            written.append(name)

    before = {name: (path / name).read_bytes() for name in segments(path)}
    with running(path, disk=ShimDisk(watch), recovery="strict") as tier:
        assert tier.probe(KEYS, deadline()) == [Presence.ABSENT] * 2 + [Presence.PRESENT] * 10
        assert [header.key for header in tier.scan()] == KEYS[2:]
        assert found(tier, KEYS) == KEYS[2:]
    assert set(written) == {"segment-probe"}, "recovery wrote into the directory"
    assert {name: (path / name).read_bytes() for name in segments(path)} == before


def test_d23_scan_yields_the_headers_that_were_stored(tmp_path: Path) -> None:
    items = [make_item(key_of(i), 5000, epoch=i, expires_ms=4_000_000_000_000 + i) for i in range(5)]
    with running(tmp_path) as tier:
        tier.put_from(items, deadline(), lambda i, outcome: None)
    with running(tmp_path) as tier:
        assert list(tier.scan()) == [unpack(item.header) for item in items]


def test_d21_torn_tail_at_every_byte_of_the_last_record(path: Path) -> None:
    with running(path) as tier:
        put_all(tier, [key_of(100)])
    whole = only_log(path).read_bytes()
    copy = path.parent / "copy"
    for left in range(256):
        shutil.copytree(path, copy)
        only_log(copy).write_bytes(whole[: len(whole) - 256 + left])
        with running(copy) as tier:
            assert tier.probe([*KEYS[2:], key_of(100)], deadline()) == [Presence.PRESENT] * 10 + [
                Presence.ABSENT
            ]
            assert tier.status()["dropped_records"] == (1 if left else 0)
            put_all(tier, [key_of(101)])
        with running(copy, recovery="strict") as tier:
            assert found(tier, [*KEYS, key_of(100), key_of(101)]) == [*KEYS[2:], key_of(101)]
        shutil.rmtree(copy)


def test_d23_a_record_with_any_flipped_byte_is_dropped(path: Path) -> None:
    records = records_of(only_log(path))
    victim = next(i for i, record in enumerate(records) if record[40:72] == KEYS[7])
    copy = path.parent / "copy"
    for at in range(256):
        shutil.copytree(path, copy)
        broken = bytearray(records[victim])
        broken[at] ^= 1 << (at % 8)
        write_log(only_log(copy), [*records[:victim], bytes(broken), *records[victim + 1 :]])
        with running(copy) as tier:
            assert tier.probe(KEYS[2:], deadline()) == [
                Presence.ABSENT if key == KEYS[7] else Presence.PRESENT for key in KEYS[2:]
            ]
        shutil.rmtree(copy)


def test_d23_duplicated_and_reordered_records(path: Path) -> None:
    with running(path) as tier:
        tier.clear(tenant_of(9), deadline())
        put_all(tier, KEYS[:1])
    log = only_log(path)
    records = records_of(log)
    for seed in range(20):
        dice = random.Random(seed)
        shuffled = [*records, *dice.choices(records, k=10)]
        dice.shuffle(shuffled)
        write_log(log, shuffled)
        with running(path, recovery="strict") as tier:
            assert sorted(header.key for header in tier.scan()) == sorted([KEYS[0], *KEYS[2:]])
            assert found(tier, KEYS) == [KEYS[0], *KEYS[2:]]


def test_d23_a_hole_in_the_log_is_stepped_over(path: Path) -> None:
    """Two threads append, the first is killed before it has written: zeros stand before whole records."""
    log = only_log(path)
    records = records_of(log)
    write_log(log, [*records[:5], bytes(256), bytes(256), *records[5:], bytes(512)])
    with running(path, recovery="strict") as tier:
        assert found(tier, KEYS) == KEYS[2:]
        assert tier.status()["dropped_records"] == 0


def test_d21_orphan_frames_are_not_resurrected(path: Path) -> None:
    """The frames stand whole in their slots, but without a record they are nothing."""
    log = only_log(path)
    write_log(log, [record for record in records_of(log) if record[40:72] not in KEYS[4:8]])
    with running(path) as tier:
        assert found(tier, KEYS) == [*KEYS[2:4], *KEYS[8:]]


def test_d21_of_two_records_for_one_slot_the_later_counts(path: Path) -> None:
    """The tombstone between them was lost with the page it stood on."""
    frame = locate(path, KEYS[5])
    assert frame is not None
    with running(path) as tier:
        tier.delete([KEYS[5]])
        put_all(tier, [key_of(200)])
    assert locate(path, key_of(200)) == frame, "the slot was not used again"
    log = only_log(path)
    write_log(
        log, [record for record in records_of(log) if not (record[16] == 2 and record[40:72] == KEYS[5])]
    )
    with running(path) as tier:
        assert found(tier, [*KEYS, key_of(200)]) == [*KEYS[2:5], *KEYS[6:], key_of(200)]


def test_d21_the_later_record_of_a_slot_counts_whichever_key_was_known_first(path: Path) -> None:
    frame = locate(path, KEYS[5])
    with running(path) as tier:
        tier.delete([KEYS[5]])
        put_all(tier, [key_of(200)])
        tier.delete([key_of(200)])
        put_all(tier, [KEYS[5]])
    assert locate(path, KEYS[5]) == frame, "the slot was not used again"
    log = only_log(path)
    lost = [
        record for record in records_of(log) if record[16] == 2 and record[40:72] in (KEYS[5], key_of(200))
    ]
    assert len(lost) == 2
    write_log(log, [record for record in records_of(log) if record not in lost])
    with running(path) as tier:
        assert found(tier, [*KEYS, key_of(200)]) == KEYS[2:]
        assert tier.probe([key_of(200)], deadline()) == [Presence.ABSENT]


def test_d21_records_of_a_segment_that_was_given_up_do_not_count_for_one_of_its_number(path: Path) -> None:
    """A segment that is given up leaves its records in the log, and after a restart its number is free again."""
    (path / segments(path)[-1]).unlink()
    with running(path, recovery="strict") as tier:
        left = found(tier, KEYS)
        assert len(left) < 10
        put_all(tier, [key_of(1000)])
        there = sorted(header.key for header in tier.scan())
    with running(path, recovery="strict") as tier:
        assert sorted(header.key for header in tier.scan()) == there
        assert found(tier, KEYS) == left


def test_d21_a_record_for_a_frame_of_another_block_is_corrupt_and_forgotten(path: Path) -> None:
    frame, other = locate(path, KEYS[5]), locate(path, KEYS[6])
    assert frame is not None
    assert other is not None
    with open(frame.file, "r+b") as file:
        file.seek(other.offset)
        raw = file.read(other.slot_bytes)
        file.seek(frame.offset)
        file.write(raw)
        os.fsync(file.fileno())
    with running(path) as tier:
        assert get(tier, KEYS[5]) is Outcome.CORRUPT
        assert get(tier, KEYS[5]) is Outcome.MISS
        assert tier.status()["corrupt_reads"] == 1
        put_all(tier, [KEYS[5]])
        assert found(tier, KEYS) == KEYS[2:]


# modes and versions


def break_record(path: Path) -> str:
    log = only_log(path)
    records = records_of(log)
    write_log(log, [*records[:4], b"\xff" * 256, *records[5:]])
    return log.name


def break_segment_header(path: Path) -> str:
    name = segments(path)[0]
    with open(path / name, "r+b") as file:
        file.seek(100)
        file.write(b"\xff")
    return name


def break_log_header(path: Path) -> str:
    log = only_log(path)
    log.write_bytes(b"\xff" + log.read_bytes()[1:])
    return log.name


def shorten_segment(path: Path) -> str:
    name = segments(path)[0]
    os.truncate(path / name, (path / name).stat().st_size - 4096)
    return name


def spoil_checkpoint(path: Path) -> str:
    (path / "checkpoint").write_bytes(b"not a checkpoint" * 100)
    return "checkpoint"


DAMAGE = [break_record, break_segment_header, break_log_header, shorten_segment, spoil_checkpoint]


@pytest.mark.parametrize("damage", DAMAGE)
def test_d23_strict_names_the_damage_and_quiet_drops_it(path: Path, damage) -> None:
    name = damage(path)
    before = names(path)
    with pytest.raises(TierError, match=f"{name}.*recovery='quiet'"), running(path, recovery="strict"):
        pass
    assert names(path) == before
    with running(path) as tier:
        assert name in str(tier.status()["recovery"])
        assert set(found(tier, KEYS)) <= set(KEYS[2:])
        put_all(tier, KEYS)
    with running(path, recovery="strict") as tier:
        assert found(tier, KEYS) == KEYS


@pytest.mark.parametrize("left_bytes", [0, 1, 100, 255, 256, 300, 4095, 4097, 9000])
def test_d23_a_file_of_any_length_does_not_keep_a_start_from_going_on(path: Path, left_bytes: int) -> None:
    with running(path) as tier:
        tier._journal.checkpoint_now()
    for name in ["checkpoint", logs(path)[0].name, segments(path)[0]]:
        copy = path.parent / f"copy-{name}"
        shutil.copytree(path, copy)
        os.truncate(copy / name, left_bytes)
        with running(copy) as tier:
            assert set(found(tier, KEYS)) <= set(KEYS[2:])
            put_all(tier, KEYS)
        with running(copy, recovery="strict") as tier:
            assert found(tier, KEYS) == KEYS


def test_recovery_none_starts_empty(path: Path) -> None:
    with running(path, recovery="none") as tier:
        assert tier.usage().blocks == 0
        assert list(tier.scan()) == []
        assert names(path) == ["lock", "log-00000001"]
        put_all(tier, KEYS[:1])
    with running(path) as tier:
        assert found(tier, KEYS) == KEYS[:1]


def with_version(path: Path, name: str, version: int) -> None:
    magic = (path / name).read_bytes()[:4]
    with open(path / name, "r+b") as file:
        file.write(file_header(magic, *range(6), version=version))


@pytest.fixture
def with_checkpoint(path: Path) -> Path:
    with running(path) as tier:
        while not tier.status()["checkpoints"]:
            put_all(tier, KEYS)
            tier.delete(KEYS)
        put_all(tier, KEYS)
    assert (path / "checkpoint").exists()
    return path


@pytest.mark.parametrize("kind", ["checkpoint", "log", "segment"])
@pytest.mark.parametrize("recovery", ["quiet", "none", "strict"])
def test_d23_a_future_version_is_refused_and_untouched(
    with_checkpoint: Path, kind: str, recovery: str
) -> None:
    path = with_checkpoint
    name = next(name for name in names(path) if name.startswith(kind))
    with_version(path, name, 2)
    before = {name: (path / name).read_bytes() for name in names(path)}
    with pytest.raises(FormatError, match=f"{name} has format version 2"), running(path, recovery=recovery):
        pass
    assert {name: (path / name).read_bytes() for name in names(path)} == before


@pytest.mark.parametrize("kind", ["checkpoint", "log", "segment"])
def test_d23_a_past_version_is_dropped_and_said_so(with_checkpoint: Path, kind: str) -> None:
    path = with_checkpoint
    name = next(name for name in names(path) if name.startswith(kind))
    with_version(path, name, 0)
    with pytest.raises(FormatError, match=f"{name} has format version 0"), running(path, recovery="strict"):
        pass
    with running(path) as tier:
        assert tier.usage().blocks == 0
        assert f"{name} has an older format version" in str(tier.status()["recovery"])
        put_all(tier, KEYS)
        assert found(tier, KEYS) == KEYS
    check_names(path)


@pytest.mark.parametrize("kind", ["checkpoint", "log", "segment"])
def test_d23_a_flipped_bit_in_a_version_is_no_other_version(with_checkpoint: Path, kind: str) -> None:
    path = with_checkpoint
    name = next(name for name in names(path) if name.startswith(kind))
    with running(path) as tier:
        stored = found(tier, KEYS)
    assert stored
    whole = (path / name).read_bytes()
    for bit in range(16):
        raw = bytearray(whole)
        raw[4 + bit // 8] ^= 1 << bit % 8
        (path / name).write_bytes(raw)
        with running(path) as tier:
            assert found(tier, KEYS) == stored, f"bit {bit}"


# clear and checkpoints


def test_d27_clear_is_synced_before_it_says_complete(path: Path) -> None:
    events: list[str] = []
    disk = ShimDisk(lambda call, name, offset: events.append(f"{call} {name}"))
    with running(path, disk=disk) as tier:
        events.clear()
        assert tier.clear(EVERYTHING, deadline()).complete
        assert events[-1].startswith("fdatasync log-")
        events.clear()
        put_all(tier, KEYS)
        assert not [event for event in events if "sync" in event], "an ordinary store waited for a sync"
    with running(path) as tier:
        assert found(tier, KEYS) == KEYS


@pytest.mark.parametrize("damage", [b"\0", b"\xff"])
@pytest.mark.parametrize("window_bytes", [256, 4096])
def test_d23_a_damaged_page_of_the_checkpoint_costs_what_stands_in_it(
    path: Path, damage: bytes, window_bytes: int
) -> None:
    more = [key_of(200 + i) for i in range(28)]
    with running(path) as tier:
        put_all(tier, more)
        tier._journal.checkpoint_now()
        put_all(tier, KEYS[:1])
        assert tier.clear(more[0][:12], deadline()).complete is True
        put_all(tier, [*more, *KEYS])
        tier._journal.checkpoint_now()
        tier.delete(KEYS[:2])
    whole, stored, copy = (path / "checkpoint").read_bytes(), [*KEYS[2:], *more], path.parent / "copy"
    assert len(whole) >= 2 * 4096
    for at in range(0, len(whole), window_bytes):
        shutil.copytree(path, copy)
        broken = whole[:at] + damage * window_bytes + whole[at + window_bytes :]
        (copy / "checkpoint").write_bytes(broken[: len(whole)])
        with running(copy) as tier:
            kept = found(tier, [*KEYS, *more])
            assert set(kept) <= set(stored), "what was deleted stays away"
            assert len(stored) - len(kept) <= window_bytes // 256
            put_all(tier, KEYS)
        with running(copy, recovery="strict") as tier:
            assert set(found(tier, [*KEYS, *more])) == {*kept, *KEYS}
        shutil.rmtree(copy)


@pytest.mark.parametrize("damage", [b"\0", b"\xff"])
@pytest.mark.parametrize("window_bytes", [256, 4096])
def test_d27_no_damaged_page_of_the_log_brings_cleared_blocks_back(
    path: Path, damage: bytes, window_bytes: int
) -> None:
    with running(path) as tier:
        assert tier.clear(KEYS[0][:12], deadline()).complete
        put_all(tier, KEYS[3:5])
    log = only_log(path)
    whole = log.read_bytes()
    copy = path.parent / "copy"
    for at in range(0, len(whole), window_bytes):
        shutil.copytree(path, copy)
        broken = whole[:at] + damage * window_bytes + whole[at + window_bytes :]
        (copy / log.name).write_bytes(broken[: len(whole)])
        with running(copy) as tier:
            assert set(found(tier, KEYS)) <= set(KEYS[3:5])
            put_all(tier, KEYS[:1])
        with running(copy, recovery="strict") as tier:
            assert KEYS[0] in found(tier, KEYS), "and the log is whole again"
        shutil.rmtree(copy)


def test_a_cleared_block_stored_again_is_found_after_a_restart(path: Path) -> None:
    with running(path) as tier:
        assert tier.clear(KEYS[0][:12], deadline()).removed == 10
        put_all(tier, KEYS[3:5])
    with running(path, recovery="strict") as tier:
        assert found(tier, KEYS) == KEYS[3:5]


def test_d23_a_checkpoint_is_on_the_disk_before_it_takes_the_logs_place(tmp_path: Path) -> None:
    """Else a power loss could leave neither."""
    events: list[str] = []
    disk = ShimDisk(lambda call, name, offset: events.append(f"{call} {name}"))
    with running(tmp_path, MIB, disk=disk) as tier:
        while not tier.status()["checkpoints"]:
            put_all(tier, KEYS)
            tier.delete(KEYS[1:])
    rename = events.index("rename checkpoint.new")
    assert events[rename - 1] == "fdatasync checkpoint.new"
    assert events[rename + 1].startswith("sync_directory ")
    assert events[rename + 2] == "unlink log-00000001"


def test_d23_a_log_that_a_checkpoint_replaced_does_not_count(tmp_path: Path) -> None:
    """Its unlink did not come through, while that of the log with the tombstones did."""
    with running(tmp_path, MIB) as tier:
        put_all(tier, KEYS)
        old = (tmp_path / "log-00000001").read_bytes()
        while tier.status()["checkpoints"] != 1:
            put_all(tier, [key_of(1000)])
            tier.delete([key_of(1000)])
        tier.delete(KEYS[:6])
        while tier.status()["checkpoints"] != 2:
            put_all(tier, [key_of(1000)])
            tier.delete([key_of(1000)])
    (tmp_path / "log-00000001").write_bytes(old)
    with running(tmp_path, MIB, recovery="strict") as tier:
        assert [header.key for header in tier.scan()] == KEYS[6:]
        assert not (tmp_path / "log-00000001").exists()


def test_checkpoints_keep_the_log_short_and_lose_nothing(tmp_path: Path) -> None:
    with running(tmp_path, 2 * MIB) as tier:
        limit_bytes = 256 * 4 * (128 + tier.status()["segments"] * 1000)
        for turn in range(200):
            keys = [key_of(1000 * turn + i) for i in range(4)]
            put_all(tier, keys, 8 * KIB)
            if turn >= 5:
                tier.delete([key_of(1000 * (turn - 5) + i) for i in range(4)])
            assert sum(log.stat().st_size for log in logs(tmp_path)) <= limit_bytes
        assert tier.status()["checkpoints"] > 3
        expected = [key_of(1000 * turn + i) for turn in range(195, 200) for i in range(4)]
        assert [header.key for header in tier.scan()] == expected
    with running(tmp_path, 2 * MIB, recovery="strict") as tier:
        assert [header.key for header in tier.scan()] == expected
        assert found(tier, expected, 8 * KIB) == expected


def test_d23_recovery_of_100_000_blocks(tmp_path: Path) -> None:
    """Within 5 seconds, which is ten times what it takes; the limit is there for what is worse than linear."""
    count, slots = 100_000, 25_000
    records = bytearray(file_header(LOG_MAGIC, 1))
    page = memoryview(bytearray(4096))
    keys = [key_of(i) for i in range(count)]
    for number in range(4):
        header = file_header(SEGMENT_MAGIC, number + 1, 8192, slots, number + 1, 4096 + slots * 8192)
        with open(tmp_path / f"segment-{number + 1:08d}", "wb") as file:
            file.write(header.ljust(4096, b"\0"))
            file.truncate(4096 + slots * 8192)
    for i, key in enumerate(keys):
        page[:512] = pack(header_of(key, b"", stored_bytes=4096, decoded_bytes=4096))
        records += publish_record(100 + 2 * i, 1 + i // slots, i % slots, 8192, page)
        if i % 3 == 0:
            records += tombstone_record(101 + 2 * i, key)
    (tmp_path / "log-00000001").write_bytes(records)
    began_s = time.monotonic()
    with running(tmp_path, 2 * GIB) as tier:
        assert time.monotonic() - began_s < 5.0
        assert tier.usage().blocks == count - len(range(0, count, 3))
        live = [key for i, key in enumerate(keys) if i % 3]
        assert [header.key for header in tier.scan()] == live


def test_the_fields_that_the_records_copy_stand_where_the_frame_puts_them() -> None:
    header = header_of(key_of(1), b"x" * 77, expires_ms=123_456_789)
    page = memoryview(pack(header).ljust(4096, b"\xaa"))
    assert key_in(page) == key_of(1)
    assert key_and_expiry_in(page) == (key_of(1), 123_456_789)
    record = publish_record(5, 6, 7, 8192, page)
    assert frame_header_of(record) == header
    assert int.from_bytes(record[208:216], "little") == 77
    assert record[:8] == xxhash.xxh3_64_intdigest(record[8:]).to_bytes(8, "little")


@pytest.mark.parametrize("name", ["notes.txt", "segment-1", "log-0000001x"])
def test_d29_a_directory_with_other_files_is_refused_and_untouched(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_text("mine")
    with pytest.raises(ConfigError, match=f"{name}.*directory of its own"), running(tmp_path):
        pass
    assert names(tmp_path) == [name]


def test_leftovers_of_a_kill_are_removed(path: Path) -> None:
    (path / "checkpoint.new").write_bytes(b"half")
    (path / "segment-probe").write_bytes(b"half")
    (path / "segment-00000099").write_bytes(bytes(8192))
    (path / "log-00000099").write_bytes(b"")
    with running(path, recovery="strict") as tier:
        check_names(path)
        assert not (path / "segment-00000099").exists()
        assert found(tier, KEYS) == KEYS[2:]


def test_expired_blocks_are_misses_and_make_way(tmp_path: Path) -> None:
    with running(tmp_path) as tier:
        put_all(tier, KEYS[:2], expires_ms=1000)
        put_all(tier, KEYS[2:4], expires_ms=4_000_000_000_000)
        assert [get(tier, key) for key in KEYS[:4]] == [Outcome.MISS] * 2 + [Outcome.DONE] * 2
        assert put(tier, KEYS[:1]) == [Outcome.DONE]
        assert get(tier, KEYS[0]) is Outcome.DONE
        assert len(list(tier.scan())) == 3
    with running(tmp_path) as tier:
        assert found(tier, KEYS[:4]) == [KEYS[0], *KEYS[2:4]]


@pytest.mark.parametrize("recovery", ["quiet", "strict", "none"])
def test_a_directory_where_a_file_should_be(tmp_path: Path, recovery: str) -> None:
    """Nothing in it is ours to remove, so it is named like any other stranger."""
    (tmp_path / "segment-00000000").mkdir()
    with (
        pytest.raises(ConfigError, match=r"segment-00000000.*not tierkv's"),
        running(tmp_path, recovery=recovery),
    ):
        pass
    assert (tmp_path / "segment-00000000").is_dir()
