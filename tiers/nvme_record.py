"""What the NVMe tier writes beside the frames: records of the index log, and the headers of its files.

All numbers are little-endian, all checksums xxh3_64. A **record** has 256 bytes, at a multiple of 256 in its file:

    0    8   checksum of bytes 8..255       8    8   sequence number
    16   1   kind                           17   1   length of the prefix (clear)
    18   2   zeros                          20   4   segment
    24   4   slot                           28   4   slot size in pages of 4096
    32   200 bytes 0..199 of the frame header (its key stands at 40; tombstone and clear: only the key or prefix)
    232  8   bytes 504..511 of the frame header (its checksum)
    240  16  zeros

A **file header** has 256 bytes as well: magic (4), version (2), zeros (2), six numbers of 8 bytes, zeros, and at 248
the checksum of bytes 0..247.
"""

from __future__ import annotations

import enum
import struct
from dataclasses import dataclass

import numpy as np
import xxhash

from tierkv.frame import HEADER_BYTES, FrameHeader, unpack
from tierkv.ids import KEY_BYTES, BlockKey, KeyPrefix
from tierkv.units import ALIGN_BYTES

VERSION = 1
RECORD_BYTES = 256

LOG_MAGIC = b"TKVL"
"""Numbers: generation."""
CHECKPOINT_MAGIC = b"TKVC"
"""Numbers: first generation of the log that is not in it, next sequence number, records."""
SEGMENT_MAGIC = b"TKVS"
"""Numbers: segment, slot bytes, slots, sequence number of the carving, file bytes."""


class Kind(enum.IntEnum):
    """What a record says. A record counts for its key only while no other of that key has a higher sequence."""

    PUBLISH = 1
    """This key's frame stands whole in this slot."""
    TOMBSTONE = 2
    """This key is gone."""
    CLEAR = 3
    """Every key with this prefix that was published before is gone."""


_BODY_BYTES = 200
_CHECK_AT = HEADER_BYTES - 8
_RECORD = struct.Struct("<QBBHIII200s8s16x")  # without the checksum in front
_CARRIED = struct.Struct(f"<{_BODY_BYTES}s{_CHECK_AT - _BODY_BYTES}x8s")  # of a frame header
_EXPIRES_AT = 160
_NAME = struct.Struct("<8x32s120xQ")  # key and expiry
_KEY = slice(8, 8 + KEY_BYTES)
_ZEROS_TO_CHECK = bytes(_CHECK_AT - _BODY_BYTES)
_BEFORE_KEY = bytes(_KEY.start)
_PUBLISH, _TOMBSTONE = int(Kind.PUBLISH), int(Kind.TOMBSTONE)
_digest = xxhash.xxh3_64_digest

RECORD_DTYPE = np.dtype(
    {
        "names": [
            "checksum",
            "seq",
            "kind",
            "prefix_bytes",
            "segment",
            "slot",
            "pages",
            "expires_ms",
            "stored_bytes",
        ],
        "formats": ["<u8", "<u8", "u1", "u1", "<u4", "<u4", "<u4", "<u8", "<u8"],
        "offsets": [0, 8, 16, 17, 20, 24, 28, 32 + _EXPIRES_AT, 32 + 176],
        "itemsize": RECORD_BYTES,
    }
)
KEY_AT = 32 + _KEY.start
"""Where in a record the key or prefix stands."""


def key_in(frame_header: memoryview) -> bytes:
    """The block key in a packed frame header."""
    return bytes(frame_header[_KEY])


def key_and_expiry_in(frame_header: memoryview) -> tuple[bytes, int]:
    """The block key and the expiry (milliseconds since 1970, or 0) in a packed frame header."""
    key, expires_ms = _NAME.unpack_from(frame_header)
    return key, expires_ms


def publish_record(seq: int, segment: int, slot: int, slot_bytes: int, frame_header: memoryview) -> bytes:
    body, check = _CARRIED.unpack_from(frame_header)
    rest = _RECORD.pack(seq, _PUBLISH, 0, 0, segment, slot, slot_bytes // ALIGN_BYTES, body, check)
    return _digest(rest)[::-1] + rest


def tombstone_record(seq: int, key: BlockKey) -> bytes:
    rest = _RECORD.pack(seq, _TOMBSTONE, 0, 0, 0, 0, 0, _BEFORE_KEY + key, b"")
    return _digest(rest)[::-1] + rest


CLEAR_COPIES = 17
"""So often stands a clear in the log, in more than a page of 4 KiB: a page that the disk loses does not bring back
what was cleared."""


def clear_records(seq: int, prefix: KeyPrefix) -> bytes:
    rest = _RECORD.pack(seq, Kind.CLEAR, len(prefix), 0, 0, 0, 0, _BEFORE_KEY + prefix, b"")
    return (_digest(rest)[::-1] + rest) * CLEAR_COPIES


def record_is_whole(record: memoryview) -> bool:
    """Whether the record's checksum is that of its bytes."""
    return _digest(record[8:])[::-1] == record[:8]


def frame_header_of(record: bytes) -> FrameHeader:
    """The frame header that a publish record carries. Raises ``FrameError`` when it does not prove itself."""
    return unpack(record[32 : 32 + _BODY_BYTES] + _ZEROS_TO_CHECK + record[232:240])


class Damaged(Exception):
    """A file header does not verify. ``str()`` says why; the caller knows which file."""


@dataclass(frozen=True, slots=True)
class FileHeader:
    """A file's version and numbers. The numbers mean something only when the version is ours."""

    version: int
    numbers: tuple[int, ...]


_FILE = struct.Struct("<4sH2x6Q192x")


def file_header(magic: bytes, *numbers: int, version: int = VERSION) -> bytes:
    """The 256 bytes at the front of a file."""
    front = _FILE.pack(magic, version, *numbers, *(0,) * (6 - len(numbers)))
    return front + _digest(front)[::-1]


def read_file_header(raw: bytes, magic: bytes) -> FileHeader | None:
    """Reads what ``file_header`` made; ``None`` when nothing was written yet. Raises ``Damaged``.

    The version is looked at before the checksum, since another version may keep that elsewhere; but where the checksum
    is that of this header with our version, the version is what was damaged.
    """
    if not any(raw):
        return None
    if raw[:4] != magic:
        raise Damaged(f"it starts with {raw[:4]!r} instead of {magic!r}")
    if len(raw) < RECORD_BYTES:
        raise Damaged(f"its header has {len(raw)} of {RECORD_BYTES} bytes")
    _, version, *numbers = _FILE.unpack_from(raw)
    ours = raw[:4] + VERSION.to_bytes(2, "little") + raw[6:248]
    is_ours = _digest(ours)[::-1] == raw[248:RECORD_BYTES]
    if version == VERSION and not is_ours:
        raise Damaged("its header's checksum is wrong")
    return FileHeader(VERSION if is_ours else version, tuple(numbers))
