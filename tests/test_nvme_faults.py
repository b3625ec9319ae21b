"""A disk that errs, stops short, is interrupted or does not come back; readers and writers that meet in a slot."""

from __future__ import annotations

import errno
from functools import partial
from pathlib import Path

import pytest

from tests.nvme_support import (
    BLOCK_BYTES,
    check_names,
    deadline,
    found,
    get,
    locate,
    make_tier,
    outcomes_of,
    put,
    put_all,
    running,
)
from tierkv.errors import ConfigError, TierError
from tierkv.ids import EVERYTHING
from tierkv.testing import faults
from tierkv.testing.faults.disk import Gate, Place, ShimDisk
from tierkv.testing.faults.strike import Strike
from tierkv.testing.payloads import Destination, key_of, make_item
from tierkv.testing.threads import run_together
from tierkv.tier import Outcome, Presence
from tierkv.tiers.nvme import NvmeTier
from tierkv.units import KIB, MIB

KEYS = [key_of(i) for i in range(64)]
PATIENCE_S = 60.0


def is_frame(call: str, path: str, offset: int, wanted: str = "pwritev") -> bool:
    return call == wanted and path.startswith("segment-0") and offset > 0


def is_record(call: str, path: str, offset: int) -> bool:
    return call == "pwritev" and path.startswith("log-") and offset > 0


def failing(place: Place, code: int, times: int = 10**9) -> ShimDisk:
    return ShimDisk(faults.failing(code, place, Strike(1, times=times)))


# errors


@pytest.mark.parametrize("code", [errno.EIO, errno.EINVAL, errno.EAGAIN])
def test_d10_a_failed_frame_write_is_invisible_and_its_slot_returns(tmp_path: Path, code: int) -> None:
    with running(tmp_path, disk=failing(is_frame, code, 3)) as tier:
        assert put(tier, KEYS[:4]) == [Outcome.UNAVAILABLE] * 3 + [Outcome.DONE]
        assert tier.probe(KEYS[:4], deadline()) == [Presence.ABSENT] * 3 + [Presence.PRESENT]
        assert tier.usage().blocks == 1
        put_all(tier, KEYS[:3])
        assert found(tier, KEYS[:4]) == KEYS[:4]
        tier.delete(KEYS)
        assert tier.usage().used_bytes == 0
        assert tier.status()["empty_segments"] == tier.status()["segments"]


def test_d10_a_failed_log_write_is_invisible_and_makes_the_tier_read_only(tmp_path: Path) -> None:
    with running(tmp_path) as tier:
        put_all(tier, KEYS[:2])
    with running(tmp_path, disk=failing(is_record, errno.EIO)) as tier:
        assert put(tier, KEYS[2:4]) == [Outcome.UNAVAILABLE] * 2
        assert put(tier, KEYS[2:4]) == [Outcome.UNAVAILABLE] * 2
        assert not tier.usage().writable
        assert found(tier, KEYS) == KEYS[:2]
        tier.delete(KEYS[:1])
        assert found(tier, KEYS) == KEYS[1:2]
        result = tier.clear(EVERYTHING, deadline())
        assert (result.removed, result.complete) == (1, True)
        assert "the next start finds nothing" in result.detail
        assert found(tier, KEYS) == []
    with running(tmp_path, recovery="strict") as tier:
        assert found(tier, KEYS) == []


@pytest.mark.parametrize(
    ("code", "outcome", "after"),
    [
        (errno.EIO, Outcome.CORRUPT, Outcome.MISS),
        (errno.EINVAL, Outcome.UNAVAILABLE, Outcome.DONE),
        (errno.EAGAIN, Outcome.UNAVAILABLE, Outcome.DONE),
    ],
)
def test_d09_a_failed_read(tmp_path: Path, code: int, outcome: Outcome, after: Outcome) -> None:
    """A bad medium loses the block, any other error says nothing about it."""
    stops = partial(is_frame, wanted="preadv")
    with running(tmp_path, disk=failing(stops, code, 1)) as tier:
        put_all(tier, KEYS[:5])
        places = [Destination(key, BLOCK_BYTES) for key in KEYS[:5]]
        outcomes = outcomes_of(tier.get_into, [place.want for place in places])
        assert outcomes == [outcome] + [Outcome.DONE] * 4
        assert get(tier, KEYS[0]) is after
        put_all(tier, KEYS[:1])
        assert found(tier, KEYS[:5]) == KEYS[:5]


def test_d09_a_segment_cut_short_under_the_tier_is_corrupt_not_a_hang(tmp_path: Path) -> None:
    with running(tmp_path) as tier:
        put_all(tier, KEYS[:5])
        frame = locate(tmp_path, KEYS[2])
        assert frame is not None
        with open(frame.file, "r+b") as file:
            file.truncate(frame.offset + 4096)
        assert [get(tier, key) for key in KEYS[:5]] == [Outcome.DONE] * 2 + [Outcome.CORRUPT] * 3
        assert [get(tier, key) for key in KEYS[:5]] == [Outcome.DONE] * 2 + [Outcome.MISS] * 3


@pytest.mark.parametrize("direct", [True, False])
@pytest.mark.parametrize("limit_bytes", [100, 511, 4096, 4097, 9000])
def test_short_and_interrupted_calls_are_taken_up_again(
    tmp_path: Path, limit_bytes: int, direct: bool
) -> None:
    """Every other call is interrupted, and one that is not moves no more than ``limit_bytes``."""
    calls = [0]

    def shorten(call: str, path: str, offset: int) -> int | None:
        if call == "open_direct" and not direct:
            raise OSError(errno.EINVAL, "no O_DIRECT")
        if call not in ("preadv", "pwritev"):
            return None
        calls[0] += 1
        if calls[0] % 2:
            raise InterruptedError
        if path.startswith("segment-"):
            return max(4096, limit_bytes // 4096 * 4096)
        return limit_bytes

    for recovery in ("quiet", "strict"):
        with running(tmp_path, disk=ShimDisk(shorten), recovery=recovery) as tier:
            put_all(tier, KEYS[:4])
            assert found(tier, KEYS[:4]) == KEYS[:4]


def test_a_disk_that_makes_no_progress_is_an_error_not_a_hang(tmp_path: Path) -> None:
    stuck = ShimDisk(lambda call, path, offset: 0 if is_frame(call, path, offset) else None)
    with running(tmp_path, disk=stuck) as tier:
        assert put(tier, KEYS[:1]) == [Outcome.UNAVAILABLE]


def test_o_direct_is_probed_by_a_real_write(tmp_path: Path) -> None:
    def refuse(call: str, path: str, offset: int) -> None:
        if call == "pwritev" and path == "segment-probe":
            raise OSError(errno.EINVAL, "Invalid argument")

    with running(tmp_path, disk=ShimDisk(refuse)) as tier:
        assert "buffered, since write and read with O_DIRECT" in str(tier.status()["io_mode"])
        put_all(tier, KEYS[:4])
        assert found(tier, KEYS[:4]) == KEYS[:4]
        check_names(tmp_path)
    with running(tmp_path) as tier:
        assert found(tier, KEYS[:4]) == KEYS[:4], "written buffered, read directly"


# a start that cannot be


def test_d29_a_path_that_is_a_file(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    for path in (tmp_path / "file", tmp_path / "file" / "below"):
        with pytest.raises(ConfigError, match="is a file"), running(path):
            pass


def test_d29_a_path_that_cannot_be_written(tmp_path: Path) -> None:
    def refuse(call: str, path: str, offset: int) -> None:
        if call in ("open", "open_direct"):
            raise OSError(errno.EROFS, "Read-only file system")

    with pytest.raises(TierError, match="Read-only file system"), running(tmp_path, disk=ShimDisk(refuse)):
        pass
    with pytest.raises(TierError, match=r"/proc/tierkv.*cannot be used"), running(Path("/proc/tierkv")):
        pass
    with pytest.raises(TierError, match="File name too long"), running(tmp_path / ("x" * 300)):
        pass
    with running(tmp_path) as tier:
        put_all(tier, KEYS[:1])


def test_d21_long_paths(tmp_path: Path) -> None:
    path = tmp_path / ("model" * 26 + "1234") / ("s" * 128) / ("x" * 250)
    with running(path) as tier:
        put_all(tier, KEYS[:3])
    with running(path) as tier:
        assert found(tier, KEYS[:3]) == KEYS[:3]


@pytest.mark.parametrize("call", ["open", "fdatasync", "pwritev", "preadv", "truncate", "sync_directory"])
def test_a_start_that_fails_leaves_the_directory_free(tmp_path: Path, call: str) -> None:
    with running(tmp_path) as tier:
        put_all(tier, KEYS[:2])
    disk = failing(lambda what, path, offset: what == call and path != "segment-probe", errno.EIO)
    tier = make_tier(tmp_path, disk=disk)
    try:
        tier.start()
    except TierError:
        pass
    else:
        tier.close(deadline())
    with running(tmp_path, recovery="strict") as tier:
        assert found(tier, KEYS[:2]) == KEYS[:2]


# slots that are read and written at once


def test_d21_a_slot_is_not_rewritten_while_it_is_read(tmp_path: Path) -> None:
    """A reader stands in the slot; its block is deleted and the tier filled up; the reader still gets its bytes."""
    gate = Gate(partial(is_frame, wanted="preadv"))
    with running(tmp_path, 512 * KIB, disk=ShimDisk(gate)) as tier:
        put_all(tier, KEYS[:1])
        place = Destination(KEYS[0], BLOCK_BYTES)
        outcomes: list[Outcome] = []

        def read() -> None:
            outcomes.extend(outcomes_of(tier.get_into, [place.want]))

        def reuse() -> None:
            assert gate.reached.wait(PATIENCE_S)
            tier.delete(KEYS[:1])
            assert put(tier, KEYS[1:])[-1] is Outcome.FULL
            gate.shut = False
            gate.open.set()

        run_together([read, reuse], PATIENCE_S)
        assert outcomes == [Outcome.DONE]
        place.check(BLOCK_BYTES)
        assert get(tier, KEYS[0]) is Outcome.MISS
        assert Outcome.DONE in put(tier, KEYS[1:]), "the slot did not come back"


def test_d21_a_slot_is_not_used_again_before_its_tombstone_stands(tmp_path: Path) -> None:
    gate = Gate(is_record)
    gate.shut = False
    with running(tmp_path, 256 * KIB, disk=ShimDisk(gate)) as tier:
        outcomes = put(tier, KEYS)
        assert outcomes[-1] is Outcome.FULL
        gate.shut = True

        def others() -> None:
            assert gate.reached.wait(PATIENCE_S)
            gate.shut = False
            assert get(tier, KEYS[0]) is Outcome.MISS
            assert put(tier, KEYS[-1:]) == [Outcome.FULL]
            gate.open.set()

        run_together([lambda: tier.delete(KEYS[:1]), others], PATIENCE_S)
        assert put(tier, KEYS[-1:]) == [Outcome.DONE]


def test_d21_a_slow_writer_is_seen_by_nobody(tmp_path: Path) -> None:
    gate = Gate(is_record)
    with running(tmp_path, disk=ShimDisk(gate)) as tier:

        def look() -> None:
            assert gate.reached.wait(PATIENCE_S)
            assert get(tier, KEYS[0]) is Outcome.MISS
            assert tier.probe(KEYS[:1], deadline()) == [Presence.PENDING]
            gate.shut = False
            gate.open.set()

        run_together([lambda: put_all(tier, KEYS[:1]), look], PATIENCE_S)
        assert get(tier, KEYS[0]) is Outcome.DONE


def test_d21_of_two_writers_of_a_key_the_later_record_counts_in_memory_and_after_a_restart(
    tmp_path: Path,
) -> None:
    gate = Gate(is_record)
    with running(tmp_path, 256 * KIB, disk=ShimDisk(gate)) as tier:

        def second() -> None:
            assert gate.reached.wait(PATIENCE_S)
            gate.shut = False
            put_all(tier, KEYS[:1])
            gate.open.set()

        run_together([lambda: put_all(tier, KEYS[:1]), second], PATIENCE_S)
        assert tier.usage().blocks == 1
        assert put(tier, KEYS[1:])[-1] is Outcome.FULL  # the slot of the first is used for another
        assert get(tier, KEYS[0]) is Outcome.DONE
        there = found(tier, KEYS)
    with running(tmp_path, 256 * KIB, recovery="strict") as tier:
        assert found(tier, KEYS) == there


def test_d23_a_checkpoint_waits_for_records_that_are_on_their_way(tmp_path: Path) -> None:
    """Their place is in the log that the checkpoint is about to replace."""
    gate = Gate(is_record)

    def churn(tier: NvmeTier, count: int) -> None:
        for i in range(count):
            put_all(tier, [key_of(1000 + i)])
            tier.delete([key_of(1000 + i)])

    with running(tmp_path, 512 * KIB, disk=ShimDisk(gate)) as tier:

        def others() -> None:
            assert gate.reached.wait(PATIENCE_S)
            gate.shut = False
            churn(tier, 60)
            assert tier.status()["checkpoints"] == 0
            gate.open.set()

        run_together([lambda: put_all(tier, KEYS[:1]), others], PATIENCE_S)
        churn(tier, 60)
        assert tier.status()["checkpoints"] != 0
        assert [header.key for header in tier.scan()] == KEYS[:1]
    with running(tmp_path, 512 * KIB, recovery="strict") as tier:
        assert found(tier, KEYS) == KEYS[:1]


@pytest.mark.parametrize("stops", [is_frame, is_record], ids=["frame", "record"])
@pytest.mark.parametrize("how", ["clear", "delete"])
@pytest.mark.parametrize("known", [False, True], ids=["new block", "known block"])
def test_d27_what_is_on_its_way_when_it_is_forgotten(
    tmp_path: Path, stops: Place, how: str, known: bool
) -> None:
    """A clear takes it along. A delete may come before or after it, in memory as after a restart."""
    gate = Gate(stops)
    gate.shut = False
    outcomes: list[Outcome] = []
    with running(tmp_path, disk=ShimDisk(gate)) as tier:
        if known:
            put_all(tier, KEYS[:1], expires_ms=4_000_000_000_000)
        gate.shut = True

        def forget() -> None:
            assert gate.reached.wait(PATIENCE_S)
            gate.shut = False
            if how == "clear":
                assert tier.clear(EVERYTHING, deadline()).complete
            else:
                tier.delete(KEYS[:1])
            gate.open.set()

        run_together([lambda: outcomes.extend(put(tier, KEYS[:1])), forget], PATIENCE_S)
        there = found(tier, KEYS[:1])
        assert len(there) == tier.usage().blocks
        if how == "clear":
            assert (outcomes, there) == ([Outcome.CANCELLED], [])
        else:
            assert outcomes == [Outcome.DONE]
    with running(tmp_path, recovery="strict") as tier:
        assert found(tier, KEYS[:1]) == there


@pytest.mark.parametrize("stops", [is_frame, is_record, lambda call, path, offset: call == "fallocate"])
def test_a_blocked_write_blocks_nobody_else(tmp_path: Path, stops: Place) -> None:
    gate = Gate(stops)
    gate.shut = False
    with running(tmp_path, disk=ShimDisk(gate)) as tier:
        put_all(tier, KEYS[:4])
        gate.shut = True
        large = partial(put_all, tier, KEYS[10:11], 200 * KIB)

        def others() -> None:
            assert gate.reached.wait(PATIENCE_S)
            gate.shut = False
            assert found(tier, KEYS[:4]) == KEYS[:4]
            put_all(tier, KEYS[4:6])
            tier.delete(KEYS[4:5])
            assert tier.clear(KEYS[0], deadline()).complete
            assert tier.usage().blocks == 4
            assert len(list(tier.scan())) == 4
            gate.open.set()

        run_together([large, others], PATIENCE_S)
        assert tier.usage().blocks == 5


def test_d16_who_waits_for_room_gives_up_at_the_deadline(tmp_path: Path) -> None:
    gate = Gate(lambda call, path, offset: call == "fallocate")
    outcomes: list[Outcome] = []
    with running(tmp_path, disk=ShimDisk(gate)) as tier:

        def wait() -> None:
            assert gate.reached.wait(PATIENCE_S)
            outcomes.extend(outcomes_of(tier.put_from, [make_item(KEYS[1], BLOCK_BYTES)], deadline(0.05)))
            gate.open.set()

        run_together([lambda: put_all(tier, KEYS[:1]), wait], PATIENCE_S)
    assert outcomes == [Outcome.TIMEOUT]


def test_d21_readers_writers_and_checkpoints_in_eight_threads(tmp_path: Path) -> None:
    """A full tier, so that slots change hands all the time; nobody ever sees a foreign byte."""

    def work(number: int) -> None:
        for turn in range(60):
            keys = [key_of((turn * 7 + number * 3 + i) % 60) for i in range(4)]
            outcomes = put(tier, keys)
            assert set(outcomes) <= {Outcome.DONE, Outcome.FULL}
            for key in keys:
                assert get(tier, key) in (Outcome.DONE, Outcome.MISS)
            tier.delete(keys if Outcome.FULL in outcomes else keys[:2])

    with running(tmp_path, MIB) as tier:
        run_together([partial(work, number) for number in range(8)], PATIENCE_S)
        there = found(tier, [key_of(i) for i in range(60)])
        assert tier.usage().blocks == len(there)
        assert tier.status()["checkpoints"]
        assert sorted(header.key for header in tier.scan()) == sorted(there)
    with running(tmp_path, MIB, recovery="strict") as tier:
        assert set(found(tier, [key_of(i) for i in range(60)])) == set(there)
        tier.clear(EVERYTHING, deadline())
        assert tier.status()["empty_segments"] == tier.status()["segments"], "a slot is still held"
