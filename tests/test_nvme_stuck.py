"""An NVMe directory where some calls fail for ever (rights that were taken away, no descriptors left): it does not
grow, forgets what it was told to forget, says why it takes nothing, and goes on when it can."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from tests.nvme_support import (
    deadline,
    disk_bytes,
    found,
    get,
    logs,
    put,
    put_all,
    quick_folder,
    running,
    segments,
)
from tierkv.clock import FakeClock
from tierkv.testing.faults.disk import Hook, ShimDisk
from tierkv.testing.payloads import key_of
from tierkv.tier import Outcome
from tierkv.tiers.nvme_space import RETRY_S
from tierkv.units import KIB, MIB


def refusing(call: str, name: str, code: int = errno.EACCES) -> Hook:
    def before(what: str, file: str, offset: int) -> None:
        if what == call and file.startswith(name):
            raise OSError(code, os.strerror(code))

    return before


def test_d21_a_segment_whose_name_stays_holds_nothing_any_more(tmp_path: Path) -> None:
    disk, keys = ShimDisk(), [key_of(i) for i in range(8)]
    with running(tmp_path, disk=disk) as tier:
        put_all(tier, keys)
        disk.before = refusing("unlink", "segment-")
        while tier._space.release_one():
            pass
        assert "could not be removed" in tier._space.note
        assert segments(tmp_path)
        assert all((tmp_path / name).stat().st_size == 0 for name in segments(tmp_path)), "its bytes are free"
        tier.delete(keys)
        disk.heal()
        put_all(tier, keys[:1])
    with running(tmp_path) as tier:
        assert found(tier, keys) == keys[:1], "what was deleted stays away"
        assert tier.status()["recovery"] == "1 blocks recovered"


def test_d22_logs_whose_names_stay_hold_nothing_any_more(tmp_path: Path) -> None:
    disk = ShimDisk(refusing("unlink", "log-"))
    with quick_folder(tmp_path) as folder:
        with running(folder, MIB, disk=disk) as tier:
            for turn in range(400):
                key = key_of(turn)
                put_all(tier, [key], 4 * KIB)
                tier.delete([key])
            put_all(tier, [key_of(1000)], 4 * KIB)
            assert tier.status()["checkpoints"] > 2  # type: ignore[operator]
            assert sum(log.stat().st_size for log in logs(folder)) < 128 * KIB
            assert disk_bytes(folder) <= MIB
            disk.heal()
        with running(folder, MIB) as tier:
            assert found(tier, [key_of(1000), key_of(1)], 4 * KIB) == [key_of(1000)]
            assert len(logs(folder)) <= 2


PLACES = [("open", errno.EMFILE), ("open", errno.EACCES), ("pwritev", errno.EIO), ("rename", errno.EACCES)]


@pytest.mark.parametrize(
    ("call", "code"), PLACES, ids=[f"{call}-{errno.errorcode[code]}" for call, code in PLACES]
)
def test_d22_without_checkpoints_the_log_stays_short_and_the_tier_says_why(
    tmp_path: Path, call: str, code: int
) -> None:
    disk, clock, kept = ShimDisk(), FakeClock(), [key_of(9000 + i) for i in range(4)]
    with quick_folder(tmp_path) as folder:
        with running(folder, MIB, disk=disk, clock=clock) as tier:
            put_all(tier, kept, 4 * KIB)
            descriptors = len(os.listdir("/proc/self/fd"))
            disk.before = refusing(call, "checkpoint.new", code)
            for turn in range(1000):
                put(tier, [key_of(turn)], 4 * KIB)
                tier.delete([key_of(turn)])
                clock.advance(RETRY_S / 4)
                tier.usage()
            assert disk_bytes(folder) <= MIB
            assert sum(log.stat().st_size for log in logs(folder)) <= 128 * KIB
            assert len(os.listdir("/proc/self/fd")) < descriptors + 8
            assert tier.usage().read_only
            assert tier.status()["read_only"] == f"writing a checkpoint: {os.strerror(code)}"
            assert found(tier, kept, 4 * KIB) == kept, "reads go on"
            assert put(tier, [key_of(5000)], 4 * KIB) == [Outcome.UNAVAILABLE]
            disk.heal()
            clock.advance(600.0)
            for _ in range(100):  # a portion of the checkpoint each
                tier.usage()
            assert tier.usage().writable
            put_all(tier, [key_of(6000)], 4 * KIB)
        with running(folder, MIB) as tier:
            assert found(tier, [*kept, key_of(6000), key_of(5)], 4 * KIB) == [*kept, key_of(6000)]


def test_a_checkpoint_that_fails_now_and_then_stops_nothing(tmp_path: Path) -> None:
    disk, struck = ShimDisk(), 0

    def now_and_then(what: str, file: str, offset: int) -> None:
        nonlocal struck
        if what == "open" and file == "checkpoint.new":
            struck += 1
            if struck % 2:
                raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    disk.before = now_and_then
    with quick_folder(tmp_path) as folder, running(folder, MIB, disk=disk) as tier:
        for turn in range(1000):
            put_all(tier, [key_of(turn)], 4 * KIB)
            tier.delete([key_of(turn)])
        assert struck > 4
        assert get(tier, key_of(999), 4 * KIB) is Outcome.MISS


@pytest.mark.parametrize("code", [errno.EIO, errno.EROFS, errno.EDQUOT])
def test_d17_a_log_that_fails_for_a_while_stops_the_tier_for_a_while(tmp_path: Path, code: int) -> None:
    clock, keys = FakeClock(), [key_of(i) for i in range(8)]
    disk = ShimDisk()
    with running(tmp_path, disk=disk, clock=clock) as tier:
        put_all(tier, keys[:3])
        disk.before = refusing("pwritev", "log-", code)
        tries = 0
        for _ in range(100):
            tries += put(tier, keys[3:4]) == [Outcome.UNAVAILABLE] and bool(tier.usage().read_only)
            tier.delete(keys[2:3])
            clock.advance(1.0)
        assert tries == 100
        assert os.strerror(code) in str(tier.status()["read_only"])
        disk.heal()
        clock.advance(600.0)
        assert tier.usage().writable
        put_all(tier, keys[4:])
        assert found(tier, keys) == [*keys[:2], *keys[4:]]
    with running(tmp_path) as tier:
        assert found(tier, keys) == [*keys[:2], *keys[4:]], "a tombstone that had to wait was forgotten"


def test_d27_without_an_index_the_tier_is_read_only_for_good(tmp_path: Path) -> None:
    clock, keys = FakeClock(), [key_of(i) for i in range(4)]
    disk = ShimDisk()
    with running(tmp_path, disk=disk, clock=clock) as tier:
        put_all(tier, keys)
        disk.before = refusing("pwritev", "log-", errno.ENOSPC)
        assert "the next start finds nothing" in tier.clear(keys[0][:4], deadline()).detail
        tier.delete(keys)
        tier._journal.bury([])
        tier._journal.append(bytes(256))
        disk.heal()
        clock.advance(10_000.0)
        tier._journal.look_again()
        assert "No space left" in tier._journal.read_only
        assert tier.usage().read_only
        assert put(tier, keys) == [Outcome.UNAVAILABLE] * 4
