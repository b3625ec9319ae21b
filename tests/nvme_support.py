"""What the tests of the NVMe tier share: a tier in a folder, and its files read without it."""

from __future__ import annotations

import os
import struct
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tierkv.clock import Deadline, SystemClock
from tierkv.errors import FrameError
from tierkv.ids import BlockKey
from tierkv.testing.faults.leftovers import NVME_FILES
from tierkv.testing.payloads import Destination, make_item
from tierkv.tier import Item, Outcome
from tierkv.tiers.nvme import NvmeTier
from tierkv.units import KIB, MIB

CLOCK = SystemClock()
BLOCK_BYTES = 16 * KIB


def deadline(timeout_s: float = 60.0) -> Deadline:
    return Deadline(CLOCK, timeout_s)


def make_tier(path: Path, capacity_bytes: int = 4 * MIB, **settings: Any) -> NvmeTier:
    return NvmeTier(path, capacity_bytes, **{"clock": CLOCK, "min_free_bytes": 0, **settings})


@contextmanager
def running(path: Path, capacity_bytes: int = 4 * MIB, **settings: Any) -> Iterator[NvmeTier]:
    tier = make_tier(path, capacity_bytes, **settings)
    tier.start()
    try:
        yield tier
    finally:
        tier.close(deadline())


@contextmanager
def quick_folder(otherwise: Path) -> Iterator[Path]:
    """A folder in memory where there is some, for tests that start a tier hundreds of times: a sync costs nothing."""
    if not os.access("/dev/shm", os.W_OK):
        yield otherwise
        return
    with tempfile.TemporaryDirectory(dir="/dev/shm", prefix="tierkv-test-") as name:
        yield Path(name)


def outcomes_of(
    call: Callable[..., None], batch: Sequence[Any], until: Deadline | None = None
) -> list[Outcome]:
    seen: dict[int, Outcome] = {}
    call(batch, until or deadline(), seen.__setitem__)
    assert sorted(seen) == list(range(len(batch)))
    return [seen[i] for i in range(len(batch))]


def put(
    tier: NvmeTier, keys: Sequence[BlockKey], length_bytes: int = BLOCK_BYTES, **header: Any
) -> list[Outcome]:
    items: list[Item] = [make_item(key, length_bytes, **header) for key in keys]
    return outcomes_of(tier.put_from, items)


def put_all(tier: NvmeTier, keys: Sequence[BlockKey], length_bytes: int = BLOCK_BYTES, **header: Any) -> None:
    assert set(put(tier, keys, length_bytes, **header)) <= {Outcome.DONE}


def get(tier: NvmeTier, key: BlockKey, length_bytes: int = BLOCK_BYTES) -> Outcome:
    """Reads into poison. What claims to be done must be the right block, as far as the store's checks let it pass."""
    place = Destination(key, length_bytes)
    [outcome] = outcomes_of(tier.get_into, [place.want])
    if outcome is Outcome.DONE:
        try:
            place.verified()
        except FrameError:
            return Outcome.CORRUPT
        place.check(length_bytes)
    return outcome


def found(tier: NvmeTier, keys: Sequence[BlockKey], length_bytes: int = BLOCK_BYTES) -> list[BlockKey]:
    """Those of ``keys`` that come back whole."""
    return [key for key in keys if get(tier, key, length_bytes) is Outcome.DONE]


def names(path: Path) -> list[str]:
    return sorted(os.listdir(path))


def check_names(path: Path) -> None:
    strangers = [name for name in names(path) if not NVME_FILES.fullmatch(name)]
    assert not strangers, f"left beside segments, log, checkpoint and lock: {strangers}"


def disk_bytes(path: Path) -> int:
    return sum((path / name).stat().st_size for name in names(path))


def segments(path: Path) -> list[str]:
    return [name for name in names(path) if name.startswith("segment-")]


def logs(path: Path) -> list[Path]:
    return [path / name for name in names(path) if name.startswith("log-")]


# The files read by the letter of docs/tiers-nvme.md, with none of the tier's code.


@dataclass(frozen=True)
class Frame:
    file: Path
    offset: int
    slot_bytes: int
    stored_bytes: int


def locate(path: Path, key: BlockKey) -> Frame | None:
    """Where the log says that the key's frame stands. Trusts every checksum."""
    records = []
    for file in [path / "checkpoint", *logs(path)]:
        raw = file.read_bytes()[256:] if file.exists() else b""
        records += [raw[at : at + 256] for at in range(0, len(raw) - 255, 256)]
    frame, newest = None, 0
    for record in records:
        seq, kind, prefix_bytes, segment, slot, pages = struct.unpack_from("<QBB2xIII", record, 8)
        name = record[40:72]
        hit = key.startswith(name[:prefix_bytes]) if kind == 3 else name == key
        if seq <= newest or not hit:
            continue
        newest = seq
        file = path / f"segment-{segment:08d}"
        if kind != 1 or not file.exists():
            frame = None
            continue
        (stored_bytes,) = struct.unpack_from("<Q", record, 208)
        frame = Frame(file, 4096 + slot * pages * 4096, pages * 4096, stored_bytes)
    return frame


def peek(path: Path, key: BlockKey) -> bytes | None:
    frame = locate(path, key)
    if frame is None:
        return None
    with open(frame.file, "rb") as file:
        file.seek(frame.offset)
        return file.read(4096 + frame.stored_bytes)


def poke(path: Path, key: BlockKey, raw: bytes) -> None:
    frame = locate(path, key)
    assert frame is not None
    with open(frame.file, "r+b") as file:
        file.seek(frame.offset)
        file.write(raw[: frame.slot_bytes].ljust(frame.slot_bytes, b"\0"))
        file.flush()
        os.fsync(file.fileno())
