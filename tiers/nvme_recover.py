"""What a start makes of a directory: which files are ours, which version they have, which blocks the log published.

Recovery reads the checkpoint, the log and one page of each segment; it reads no frame and writes no segment. Modes:

- ``quiet``: what does not verify is dropped and counted.
- ``strict``: what does not verify is a ``TierError`` that names file and place. A hole of zeros in the log, a header
  page that was never written and a log file below the checkpoint are no damage: a kill leaves them.
- ``none``: everything is removed, the directory starts empty.

A file of a future version is a ``FormatError`` in every mode, before anything is touched.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from tierkv.errors import ConfigError, FormatError, TierError
from tierkv.ids import KEY_BYTES, BlockKey
from tierkv.tiers.nvme_checkpoint import CHECKPOINT_NAME, NEW_NAME, PORTION_BYTES
from tierkv.tiers.nvme_disk import Disk, aligned_buffer, read_fully, write_fully
from tierkv.tiers.nvme_log import LOG_HEADER_BYTES, LogFile
from tierkv.tiers.nvme_record import (
    CHECKPOINT_MAGIC,
    KEY_AT,
    LOG_MAGIC,
    RECORD_BYTES,
    RECORD_DTYPE,
    SEGMENT_MAGIC,
    VERSION,
    Damaged,
    FileHeader,
    Kind,
    file_header,
    read_file_header,
    record_is_whole,
)
from tierkv.tiers.nvme_segments import SEGMENT_HEADER_BYTES, Segment
from tierkv.units import ALIGN_BYTES

MODES = ("quiet", "none", "strict")
LOCK_NAME = "lock"
PROBE_NAME = "segment-probe"
_SEGMENT_NAME = re.compile(r"segment-(\d{8})")
_LOG_NAME = re.compile(r"log-(\d{8})")
_IGNORED = {LOCK_NAME, "lost+found"}
_LEFTOVERS = {PROBE_NAME, NEW_NAME}


def segment_name(number: int) -> str:
    return f"segment-{number:08d}"


@dataclass(slots=True)
class Recovered:
    """What was found. The descriptors in it are open and now the caller's."""

    segments: list[Segment] = field(default_factory=list)
    """With their live blocks bound to ``keys`` and columns, but in no table yet."""
    logs: list[LogFile] = field(default_factory=list)
    next_seq: int = 1
    blocks: int = 0
    dropped_records: int = 0
    damaged: bool = False
    """Something did not verify and was dropped."""
    message: str = "started empty"


class _Scene:
    """The files of one directory while it is being recovered."""

    def __init__(self, disk: Disk, directory: str, strict: bool) -> None:
        self.disk = disk
        self.directory = directory
        self.strict = strict
        self.dropped: list[str] = []
        names = set(disk.names(directory)) - _IGNORED
        self.leftovers = sorted(names & _LEFTOVERS)
        self.has_checkpoint = CHECKPOINT_NAME in names
        self.logs = {int(found[1]): name for name in sorted(names) if (found := _LOG_NAME.fullmatch(name))}
        self.segments = {
            int(found[1]): name for name in sorted(names) if (found := _SEGMENT_NAME.fullmatch(name))
        }
        known = {CHECKPOINT_NAME, *_LEFTOVERS, *self.logs.values(), *self.segments.values()}
        folders = {name for name in names & known if disk.is_directory(self.path(name))}
        if strangers := sorted(names - known | folders):
            hint = f"it holds {strangers[0]!r}, which is not tierkv's; give the tier a directory of its own"
            raise ConfigError("path", directory, hint)

    def path(self, name: str) -> str:
        return os.path.join(self.directory, name)

    def ours(self) -> list[str]:
        checkpoint = [CHECKPOINT_NAME] if self.has_checkpoint else []
        return [*checkpoint, *self.logs.values(), *self.segments.values()]

    def damaged(self, name: str, why: str) -> None:
        """Damage: an error in strict mode, else a line in the message."""
        if self.strict:
            hint = "start with recovery='quiet' to drop it, or recovery='none' to drop everything"
            raise TierError(f"{self.path(name)}: {why}; {hint}")
        self.dropped.append(f"{name}: {why}")

    def header(self, name: str) -> FileHeader | None:
        """A file's header; ``None`` when it was never written. Raises ``Damaged``."""
        magic = SEGMENT_MAGIC if name in self.segments.values() else LOG_MAGIC
        if name == CHECKPOINT_NAME:
            magic = CHECKPOINT_MAGIC
        fd = self.disk.open(self.path(name), os.O_RDONLY)
        try:
            raw = bytearray(RECORD_BYTES)
            count = read_fully(self.disk, fd, (memoryview(raw),), len(raw), 0)
        finally:
            self.disk.close(fd)
        return read_file_header(bytes(raw[:count]), magic)


def refuse_foreign(disk: Disk, directory: str) -> None:
    """Raises ``ConfigError`` when the directory holds anything that is not the tier's; touches nothing."""
    _Scene(disk, directory, strict=False)


def read_publishes(disk: Disk, directory: str) -> Iterator[tuple[int, int, int, bytes]]:
    """(segment, slot, sequence number, record) of every publish record in checkpoint and log, in their order, dead
    ones too. May run while others append and checkpoint: the files are opened before the first is read."""
    fds = _open_published(disk, directory)
    try:
        for fd in fds:
            for _, data in _portions(disk, fd):
                yield from _publishes_in(data)
    finally:
        for fd in fds:
            disk.close(fd)


def _publishes_in(data: bytearray) -> Iterator[tuple[int, int, int, bytes]]:
    fields = np.frombuffer(data, RECORD_DTYPE, len(data) // RECORD_BYTES)
    rows = np.flatnonzero(fields["kind"] == Kind.PUBLISH)
    columns = [fields[name][rows].tolist() for name in ("segment", "slot", "seq")]
    for row, number, slot, seq in zip(rows.tolist(), *columns, strict=True):
        record = bytes(data[row * RECORD_BYTES : (row + 1) * RECORD_BYTES])
        if record_is_whole(memoryview(record)):
            yield number, slot, seq, record


def _open_published(disk: Disk, directory: str) -> list[int]:
    """The checkpoint and the log files that it does not cover. A checkpoint that is finished meanwhile unlinks files
    that were just listed; then the list is made again."""
    for _ in range(8):
        scene = _Scene(disk, directory, strict=False)
        fds: list[int] = []
        covered = 0
        try:
            if scene.has_checkpoint:
                fds.append(disk.open(scene.path(CHECKPOINT_NAME), os.O_RDONLY))
                raw = bytearray(RECORD_BYTES)
                read_fully(disk, fds[0], (memoryview(raw),), len(raw), 0)
                covered = _covered_by(bytes(raw))
            for generation, name in scene.logs.items():
                if generation >= covered:
                    fds.append(disk.open(scene.path(name), os.O_RDONLY))
        except FileNotFoundError:
            for fd in fds:
                disk.close(fd)
            continue
        return fds
    return []


def _covered_by(raw: bytes) -> int:
    try:
        header = read_file_header(raw, CHECKPOINT_MAGIC)
    except Damaged:
        return 0
    return header.numbers[0] if header is not None else 0


def recover(disk: Disk, directory: str, mode: str, open_flags: int) -> Recovered:
    """Reads a directory that this process owns. ``open_flags`` open its segments (``O_RDWR``, perhaps ``O_DIRECT``).

    Raises ``ConfigError`` (foreign files), ``FormatError`` (a future version), ``TierError`` (strict mode, damage) and
    ``OSError`` (the disk).
    """
    scene = _Scene(disk, directory, strict=mode == "strict")
    past = _check_versions(scene)
    for name in scene.leftovers:
        disk.unlink(scene.path(name))
    if mode == "none" or past:
        for name in scene.ours():
            disk.unlink(scene.path(name))
        had = f"{past} has an older format version: " if past else ""
        return Recovered(message=f"{had}started empty, {len(scene.ours())} files removed")
    found = Recovered()
    with ExitStack() as undo:
        undo.callback(_close_files, disk, found)
        _open_segments(scene, found, open_flags)
        _bind_blocks(scene, found, _read_records(scene, found))
        undo.pop_all()
    found.message = f"{found.blocks} blocks recovered"
    if found.dropped_records:
        found.message += f", {found.dropped_records} records dropped"
    found.damaged = bool(scene.dropped)
    if scene.dropped:
        found.message += "; dropped: " + ", ".join(scene.dropped[:8])
    return found


def _close_files(disk: Disk, found: Recovered) -> None:
    for fd in [*(segment.fd for segment in found.segments), *(log.fd for log in found.logs)]:
        disk.close(fd)


def _check_versions(scene: _Scene) -> str | None:
    """Refuses a future version; returns a file of a past one, if there is any."""
    past = None
    for name in scene.ours():
        try:
            header = scene.header(name)
        except Damaged:
            continue  # looked at again, file by file
        if header is not None and header.version > VERSION:
            raise FormatError(
                f"{scene.path(name)} has format version {header.version}, this release reads {VERSION}; "
                "use a newer release or another directory"
            )
        if header is not None and header.version < VERSION:
            past = name
            if scene.strict:
                raise FormatError(
                    f"{scene.path(name)} has format version {header.version}, this release reads {VERSION}; "
                    "recovery='quiet' drops it"
                )
    return past


def _open_segments(scene: _Scene, found: Recovered, open_flags: int) -> None:
    page = aligned_buffer(SEGMENT_HEADER_BYTES)
    for number, name in scene.segments.items():
        fd = scene.disk.open(scene.path(name), open_flags)
        try:
            count = read_fully(scene.disk, fd, (page,), SEGMENT_HEADER_BYTES, 0, ALIGN_BYTES)
            segment = _segment_of(
                bytes(page[: min(count, RECORD_BYTES)]), number, name, fd, scene.disk.size_bytes(fd)
            )
        except Damaged as damage:
            scene.disk.close(fd)
            scene.damaged(name, str(damage))
            scene.disk.unlink(scene.path(name))
            continue
        except OSError:
            scene.disk.close(fd)
            raise
        if segment is None:
            scene.disk.close(fd)
            scene.disk.unlink(scene.path(name))
            continue
        found.segments.append(segment)
        found.next_seq = max(found.next_seq, segment.carve_seq + 1)


def _segment_of(raw: bytes, number: int, name: str, fd: int, size_bytes: int) -> Segment | None:
    header = read_file_header(raw, SEGMENT_MAGIC)
    if header is None:
        return None  # killed between the making of the file and its header
    own_number, slot_bytes, slots, carve_seq, file_bytes, _ = header.numbers
    if own_number != number:
        raise Damaged(f"its header belongs to segment {own_number}")
    if size_bytes < file_bytes or SEGMENT_HEADER_BYTES + slots * slot_bytes > file_bytes:
        raise Damaged(f"it has {size_bytes} bytes instead of {file_bytes}")
    return Segment(number, name, fd, file_bytes, slot_bytes, slots, carve_seq)


@dataclass(slots=True)
class _Records:
    """The records of checkpoint and log that verify, as columns; ``keys`` holds one key or prefix after the other."""

    fields: npt.NDArray[np.void]
    keys: bytes


def _read_records(scene: _Scene, found: Recovered) -> _Records:
    covered = 0
    parts: list[npt.NDArray[np.void]] = []
    keys: list[bytes] = []
    if scene.has_checkpoint:
        covered = _read_checkpoint(scene, found, parts, keys)
    for generation, name in scene.logs.items():
        if generation < covered:
            scene.disk.unlink(scene.path(name))  # its unlink did not come through
            continue
        _read_log(scene, found, generation, name, parts, keys)
    fields = np.concatenate(parts) if parts else np.empty(0, RECORD_DTYPE)
    if len(fields):
        found.next_seq = max(found.next_seq, int(fields["seq"].max()) + 1)
    return _Records(fields, b"".join(keys))


def _read_checkpoint(
    scene: _Scene, found: Recovered, parts: list[npt.NDArray[np.void]], keys: list[bytes]
) -> int:
    """Reads the checkpoint and returns the first generation of the log that it does not cover. One without a whole
    header is read too: each record proves itself, and of the log nothing is left that it covers."""
    covered = next_seq = records = 0
    try:
        header = scene.header(CHECKPOINT_NAME)
        if header is None:
            raise Damaged("its header was never written")
        covered, next_seq, records, *_ = header.numbers
    except Damaged as damage:
        scene.damaged(CHECKPOINT_NAME, str(damage))
    found.next_seq = max(found.next_seq, next_seq)
    fd = scene.disk.open(scene.path(CHECKPOINT_NAME), os.O_RDONLY)
    try:
        end = _read_file(scene, found, CHECKPOINT_NAME, fd, parts, keys)
    finally:
        scene.disk.close(fd)
    if end < RECORD_BYTES * (1 + records):
        scene.damaged(CHECKPOINT_NAME, f"it ends after {end // RECORD_BYTES - 1} of {records} records")
    return covered


def _read_log(
    scene: _Scene,
    found: Recovered,
    generation: int,
    name: str,
    parts: list[npt.NDArray[np.void]],
    keys: list[bytes],
) -> None:
    """Reads a log without a whole header too: each record proves itself, and a clear may stand among them."""
    whole = False
    try:
        header = scene.header(name)
        whole = header is not None
        if header is not None and header.numbers[0] != generation:
            scene.damaged(name, f"its header belongs to generation {header.numbers[0]}")
            scene.disk.unlink(scene.path(name))
            return
    except Damaged as damage:
        scene.damaged(name, str(damage))
    fd = scene.disk.open(scene.path(name), os.O_RDWR)
    log = LogFile(generation, scene.path(name), fd, LOG_HEADER_BYTES)
    found.logs.append(log)
    log.end = _read_file(scene, found, name, fd, parts, keys)
    if not whole:
        write_fully(scene.disk, fd, (memoryview(file_header(LOG_MAGIC, generation)),), LOG_HEADER_BYTES, 0)
    scene.disk.truncate(fd, log.end)  # a torn tail is cut


def _read_file(
    scene: _Scene, found: Recovered, name: str, fd: int, parts: list[npt.NDArray[np.void]], keys: list[bytes]
) -> int:
    """Collects the records of one file that verify. Returns where the last of them ends."""
    end = RECORD_BYTES
    for offset, data in _portions(scene.disk, fd):
        view = memoryview(data)
        whole = []
        for at in range(0, len(data), RECORD_BYTES):
            record = view[at : at + RECORD_BYTES]
            if len(record) == RECORD_BYTES and record_is_whole(record):
                whole.append(at // RECORD_BYTES)
            elif any(record):
                found.dropped_records += 1
                scene.damaged(name, f"the record at byte {offset + at} does not verify")
        if whole:
            kept = np.array(whole)
            opaque = np.frombuffer(data, np.uint8, len(data) // RECORD_BYTES * RECORD_BYTES).reshape(
                -1, RECORD_BYTES
            )
            parts.append(np.frombuffer(data, RECORD_DTYPE, len(opaque))[kept])
            keys.append(opaque[kept, KEY_AT : KEY_AT + KEY_BYTES].tobytes())
            end = offset + (whole[-1] + 1) * RECORD_BYTES
    return end


def _portions(disk: Disk, fd: int) -> Iterator[tuple[int, bytearray]]:
    offset = RECORD_BYTES
    while True:
        buffer = bytearray(PORTION_BYTES)
        count = read_fully(disk, fd, (memoryview(buffer),), PORTION_BYTES, offset)
        if count:
            yield offset, buffer[:count]
        if count < PORTION_BYTES:
            return
        offset += PORTION_BYTES


def _bind_blocks(scene: _Scene, found: Recovered, records: _Records) -> None:
    """Gives each slot to the publish record that counts: the newest of its key and of its slot."""
    fields = records.fields
    kinds, seqs = fields["kind"].tolist(), fields["seq"].tolist()
    newest: dict[bytes, int] = {}
    clears: dict[bytes, int] = {}
    for row in np.argsort(fields["seq"], kind="stable").tolist():
        key = records.keys[row * KEY_BYTES : (row + 1) * KEY_BYTES]
        if kinds[row] == Kind.PUBLISH:
            newest.pop(key, None)  # so that the dict's order is that of the numbers
            newest[key] = row
        elif kinds[row] == Kind.TOMBSTONE:
            newest.pop(key, None)
        else:
            clears[key[: int(fields["prefix_bytes"][row])]] = seqs[row]
    cleared = _clear_test(clears)
    segments = {segment.number: segment for segment in found.segments}
    rows = np.fromiter(newest.values(), np.int64, len(newest))
    columns = [
        fields[name][rows].tolist()
        for name in ("seq", "segment", "slot", "pages", "stored_bytes", "expires_ms")
    ]
    for key, seq, number, slot, pages, stored_bytes, expires_ms in zip(newest, *columns, strict=True):
        segment = segments.get(number)
        if segment is None or seq < segment.carve_seq or cleared(key, seq):
            continue
        fits = slot < segment.slots and SEGMENT_HEADER_BYTES + stored_bytes <= segment.slot_bytes
        if not fits or pages * ALIGN_BYTES != segment.slot_bytes:
            found.dropped_records += 1
            scene.damaged(
                segment.name, f"the log puts {stored_bytes} bytes into slot {slot}, which it does not have"
            )
            continue
        segment.keys[slot] = BlockKey(key)  # rows come in order of their numbers: the newest of a slot stays
        segment.seq[slot] = seq
        segment.stored_bytes[slot] = stored_bytes
        segment.expires_ms[slot] = expires_ms
    for segment in found.segments:
        segment.free = [slot for slot in range(segment.slots - 1, -1, -1) if segment.keys[slot] is None]
        found.blocks += segment.slots - len(segment.free)


def _clear_test(clears: dict[bytes, int]) -> Callable[[bytes, int], bool]:
    lengths = sorted({len(prefix) for prefix in clears})

    def cleared(key: bytes, seq: int) -> bool:
        return any(seq < clears.get(key[:length], 0) for length in lengths)

    return cleared
