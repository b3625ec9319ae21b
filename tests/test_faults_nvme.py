"""The NVMe tier when somebody removes its files under it, and when the disk does not take a clear."""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.nvme_support import (
    BLOCK_BYTES,
    CLOCK,
    check_names,
    deadline,
    found,
    get,
    logs,
    make_tier,
    put,
    put_all,
    running,
    segments,
)
from tierkv.clock import FakeClock
from tierkv.ids import EVERYTHING
from tierkv.testing import faults
from tierkv.testing.faults import ShimDisk
from tierkv.testing.payloads import key_of, namespace_of
from tierkv.testing.threads import run_together
from tierkv.tier import Outcome
from tierkv.tiers.nvme import NvmeTier
from tierkv.tiers.nvme_watch import LOOK_EVERY_S

KEYS = [key_of(i) for i in range(24)]
IS_RECORD = faults.at("pwritev", "log-", header=False)

Remove = Callable[[Path], None]


def watched(tier: NvmeTier, clock: FakeClock) -> None:
    """The tier looks after its files."""
    clock.advance(LOOK_EVERY_S)
    tier.usage()


# ---- files that go away


def test_d9_d22_a_removed_segment_is_given_up_and_its_room_comes_back(tmp_path: Path) -> None:
    clock = FakeClock()
    with running(tmp_path, clock=clock, segment_bytes=4 * BLOCK_BYTES) as tier:
        put_all(tier, KEYS[:12])
        before = tier.usage()
        victim = tmp_path / segments(tmp_path)[0]
        inode = victim.stat().st_ino
        victim.unlink()
        watched(tier, clock)
        left = found(tier, KEYS[:12])
        assert 0 < len(left) < 12
        assert tier.usage().blocks == len(left)
        assert tier.usage().used_bytes < before.used_bytes
        assert tier.usage().writable
        assert tier.status()["lost_segments"] == 1
        assert inode not in _open_inodes(), "the removed file still takes room on the disk"
        put_all(tier, KEYS[:12])
        assert found(tier, KEYS[:12]) == KEYS[:12]
    with running(tmp_path, recovery="strict") as tier:
        assert found(tier, KEYS[:12]) == KEYS[:12]


def test_d11_a_removed_segment_is_not_given_up_while_it_is_read(tmp_path: Path) -> None:
    clock = FakeClock()
    gate = faults.blocked(faults.at("preadv", "segment-0", header=False))
    gate.shut = False
    with running(tmp_path, clock=clock, disk=ShimDisk(gate)) as tier:
        put_all(tier, KEYS[:2])
        gate.shut = True

        def read() -> None:
            assert get(tier, KEYS[0]) is Outcome.DONE

        def remove() -> None:
            assert gate.reached.wait(60)
            for name in segments(tmp_path):
                (tmp_path / name).unlink()
            watched(tier, clock)
            assert tier.status()["lost_segments"] == 0
            gate.open.set()

        run_together([read, remove], 60)
        gate.shut = False
        watched(tier, clock)
        assert tier.status()["lost_segments"] == 1
        assert found(tier, KEYS[:2]) == []


def _open_inodes() -> set[int]:
    found = set()
    for name in os.listdir("/proc/self/fd"):
        try:
            found.add(os.stat(f"/proc/self/fd/{name}").st_ino)
        except OSError:
            continue
    return found


def _remove_logs(path: Path) -> None:
    for file in logs(path):
        file.unlink()


def _remove_lock(path: Path) -> None:
    (path / "lock").unlink()


def _replace_lock(path: Path) -> None:
    (path / "other").write_text("")
    (path / "other").rename(path / "lock")


def _remove_checkpoint(path: Path) -> None:
    (path / "checkpoint").unlink()


def _move_away(path: Path) -> None:
    path.rename(path.with_name("moved"))


@pytest.mark.parametrize(
    "remove", [_remove_logs, _remove_lock, _replace_lock, _remove_checkpoint, _move_away, shutil.rmtree]
)
def test_d22_without_log_lock_checkpoint_or_directory_the_tier_is_read_only_and_says_so(
    tmp_path: Path, remove: Remove
) -> None:
    clock = FakeClock()
    path = tmp_path / "nvme"
    with running(path, 512 * 1024, clock=clock) as tier:
        for i in range(40):  # enough records for a checkpoint
            put_all(tier, [key_of(100 + i)])
            tier.delete([key_of(100 + i)])
        put_all(tier, KEYS[:3])
        watched(tier, clock)
        assert tier.status()["checkpoints"]
        assert tier.usage().writable
        remove(path)
        watched(tier, clock)
        assert not tier.usage().writable
        assert tier.usage().read_only
        assert "start it anew" in str(tier.status()["read_only"])
        assert put(tier, KEYS[3:4]) == [Outcome.UNAVAILABLE]
        there = found(tier, KEYS[:3])
        assert there == ([] if remove is shutil.rmtree else KEYS[:3]), "what is in memory still proves itself"
    shutil.rmtree(path, ignore_errors=True)
    with running(path) as tier:
        put_all(tier, KEYS[:3])


# ---- the order of writes


def test_d21_whenever_a_record_stands_its_frame_does(tmp_path: Path) -> None:
    """A kill behind each write to the disk: a restart finds whole blocks, and no record without its frame."""
    path = tmp_path / "nvme"
    crashes: list[Path] = []

    def copy(call: str, file: str, offset: int) -> None:
        if call == "pwritev_done" and file != "segment-probe":
            crashes.append(tmp_path / f"crash-{len(crashes)}")
            shutil.copytree(path, crashes[-1])

    with running(path, disk=ShimDisk(copy)) as tier:
        for start in range(0, 12, 4):
            put_all(tier, KEYS[start : start + 4])
    most = 0
    for crash in crashes:
        with running(crash, recovery="strict") as tier:
            published = tier.usage().blocks
            assert len(found(tier, KEYS)) == published, "the log publishes a block whose frame does not stand"
            most = max(most, published)
    assert most == 12


def test_d21_a_deleted_block_stays_away_after_a_restart(tmp_path: Path) -> None:
    with running(tmp_path) as tier:
        put_all(tier, KEYS[:6])
        tier.delete(KEYS[2:4])
    with running(tmp_path) as tier:
        assert found(tier, KEYS[2:4]) == [], "what was deleted came back"
        assert found(tier, KEYS[:6]) == [*KEYS[:2], *KEYS[4:6]]


# ---- a clear that the disk does not take


def fails_from(tier_disk: ShimDisk, code: int, *calls: str) -> None:
    tier_disk.before = faults.failing(
        code, lambda call, file, offset: call in calls and file != "segment-probe"
    )


@pytest.mark.parametrize("code", [errno.EIO, errno.ENOSPC, errno.EROFS])
@pytest.mark.parametrize("call", ["pwritev", "fdatasync"])
@pytest.mark.parametrize("prefix", [EVERYTHING, namespace_of(0, 0)], ids=["everything", "namespace"])
def test_d27_a_clear_that_the_log_does_not_take_stays_cleared_after_a_restart(
    tmp_path: Path, code: int, call: str, prefix: bytes
) -> None:
    disk = ShimDisk()
    with running(tmp_path, disk=disk) as tier:
        put_all(tier, KEYS[:4])
        fails_from(disk, code, call)
        result = tier.clear(prefix, deadline())  # type: ignore[arg-type]
        assert (result.removed, result.complete) == (4, True)
        assert found(tier, KEYS[:4]) == []
        disk.heal()
    with running(tmp_path, recovery="strict") as tier:
        assert found(tier, KEYS[:4]) == []
        put_all(tier, KEYS[:4])
        check_names(tmp_path)
    with running(tmp_path, recovery="strict") as tier:
        assert found(tier, KEYS[:4]) == KEYS[:4]


def test_d27_a_clear_that_leaves_nothing_behind_even_when_the_process_dies_at_once(tmp_path: Path) -> None:
    """No orderly close: what the clear said holds for what lies on the disk."""
    disk = ShimDisk()
    with running(tmp_path / "nvme", disk=disk) as tier:
        put_all(tier, KEYS[:4])
        fails_from(disk, errno.EIO, "pwritev")
        assert tier.clear(EVERYTHING, deadline()).complete
        shutil.copytree(tmp_path / "nvme", tmp_path / "crashed")
        disk.heal()
    with running(tmp_path / "crashed", recovery="strict") as tier:
        assert found(tier, KEYS[:4]) == []


def test_d27_a_clear_that_can_do_nothing_at_all_does_not_claim_success(tmp_path: Path) -> None:
    disk = ShimDisk()
    with running(tmp_path, disk=disk) as tier:
        put_all(tier, KEYS[:4])
        fails_from(disk, errno.EROFS, "pwritev", "fdatasync", "unlink", "sync_directory")
        result = tier.clear(EVERYTHING, deadline())
        assert (result.removed, result.complete) == (4, False)
        assert "not durably" in result.detail
        assert found(tier, KEYS[:4]) == []
        disk.heal()


def test_d27_the_nth_call_of_a_clear_fails(tmp_path: Path) -> None:
    """Whatever fails, and however: what a clear calls complete is gone for good, also after a kill."""
    for times in (1, None):
        for strike in faults.each_call(*faults.disk.CALLS, times=times):
            path = tmp_path / f"{times}-{strike.nth}"
            disk = ShimDisk()
            with running(path, disk=disk) as tier:
                put_all(tier, KEYS[:4])
                disk.before = faults.failing(errno.EIO, strike=strike)
                complete = tier.clear(EVERYTHING, deadline()).complete
                shutil.copytree(path, path.with_suffix(".crashed"))
                disk.heal()
            for crashed in (path, path.with_suffix(".crashed")):
                with running(crashed) as tier:
                    assert not complete or found(tier, KEYS[:4]) == []
        assert complete, "without a fault it is complete"


def test_a_look_after_close_says_nothing(tmp_path: Path) -> None:
    tier = make_tier(tmp_path, clock=CLOCK)
    tier.usage()
    tier.start()
    tier.close(deadline())
    shutil.rmtree(tmp_path)
    assert tier.usage().writable
