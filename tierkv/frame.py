"""The frame that stands before every stored block and lets it prove itself.

512 bytes, little-endian, the same in every tier (NVMe pads it to one page of 4096). A block key cannot be turned back,
so the header also holds what a restart needs to rebuild families. It never holds a salt. Layout, by offset:

    0    4   magic "TKVF"              4    2   version
    6    1   codec                     7    1   flags: 1 = no colder tier than this one
    8    32  block key                 40   32  namespace digest
    72   32  block hash                104  32  parent hash (zeros with depth 0)
    136  4   depth                     140  2   part
    142  1   priority, signed          143  1   reserved, zero
    144  8   expected parts (bitmap)   152  8   weights epoch
    160  8   expiry, ms since 1970 (0: none)
    168  8   decoded bytes             176  8   stored bytes
    184  8   checksum of decoded bytes 192  8   checksum of stored bytes
    200  304 reserved, zeros           504  8   checksum of bytes 0..503

What earlier releases left zero reads as what it meant then: priority 0, every tier.
Checksums are xxh3_64: they guard against accidents, not attackers (the key, a sha256 digest, guards the name).
"""

from __future__ import annotations

import struct
from dataclasses import dataclass

import xxhash

from tierkv.errors import FrameError
from tierkv.ids import BlockHash, BlockKey, NamespaceDigest

HEADER_BYTES = 512
MAGIC = b"TKVF"
VERSION = 1

_BODY = struct.Struct("<4sHBB32s32s32s32sIHbxQQQQQQQ")
_CHECK = struct.Struct("<Q")
_CHECK_AT = HEADER_BYTES - _CHECK.size
_PADDING = bytes(_CHECK_AT - _BODY.size)


@dataclass(slots=True)
class FrameHeader:
    """All that is known of a stored block without its payload. Nobody changes one; it is not frozen because that would
    make each block that is read several microseconds dearer."""

    key: BlockKey
    namespace: NamespaceDigest
    block_hash: BlockHash
    parent_hash: BlockHash | None
    """``None`` for the first block of a prompt."""
    depth: int
    """Blocks before this one in its prompt."""
    part: int
    expected_parts: int
    """Bitmap of the parts that make the family whole on the host that stored it."""
    epoch: int
    expires_ms: int
    """Milliseconds since 1970; 0 means that the block does not expire."""
    codec: int
    decoded_bytes: int
    stored_bytes: int
    decoded_checksum: int
    """Of the bytes before a codec. A lossy one gives other bytes back, for which the stored checksum stands."""
    stored_checksum: int
    priority: int = 0
    """-127 to 127; higher stays longer."""
    no_colder: bool = False
    """Who stored the block wants it in no tier that is colder than the one where this frame lies."""


NO_COLDER = 1
"""The flag of ``FrameHeader.no_colder``."""


def checksum(data: bytes | bytearray | memoryview) -> int:
    """xxh3_64 of ``data``."""
    return xxhash.xxh3_64_intdigest(data)


def pack(header: FrameHeader) -> bytes:
    """The 512 bytes of a header."""
    body = _BODY.pack(
        MAGIC,
        VERSION,
        header.codec,
        NO_COLDER if header.no_colder else 0,
        header.key,
        header.namespace,
        header.block_hash,
        header.parent_hash if header.parent_hash is not None else bytes(32),
        header.depth,
        header.part,
        header.priority,
        header.expected_parts,
        header.epoch,
        header.expires_ms,
        header.decoded_bytes,
        header.stored_bytes,
        header.decoded_checksum,
        header.stored_checksum,
    )
    front = body + _PADDING
    return front + _CHECK.pack(checksum(front))


def unpack(raw: bytes | memoryview) -> FrameHeader:
    """Reads the first 512 bytes of ``raw``. Raises ``FrameError`` when they are no header of this version."""
    if len(raw) < HEADER_BYTES:
        raise FrameError("short_header", f"{len(raw)} bytes instead of {HEADER_BYTES}")
    front = bytes(raw[:_CHECK_AT])
    fields = _BODY.unpack_from(front)
    if fields[0] != MAGIC:
        raise FrameError("magic", f"starts with {fields[0]!r}")
    if fields[1] != VERSION:
        raise FrameError("version", f"frame version {fields[1]}, this release reads {VERSION}")
    if _CHECK.unpack_from(raw, _CHECK_AT)[0] != checksum(front):
        raise FrameError("header_checksum", "the header was damaged")
    (_, _, codec, flags, key, namespace, block_hash, parent_hash, depth, part, priority, *numbers) = fields
    expected, epoch, expires_ms, decoded, stored, decoded_sum, stored_sum = numbers
    return FrameHeader(
        key=BlockKey(key),
        namespace=NamespaceDigest(namespace),
        block_hash=BlockHash(block_hash),
        parent_hash=BlockHash(parent_hash) if depth else None,
        depth=depth,
        part=part,
        expected_parts=expected,
        epoch=epoch,
        expires_ms=expires_ms,
        codec=codec,
        decoded_bytes=decoded,
        stored_bytes=stored,
        decoded_checksum=decoded_sum,
        stored_checksum=stored_sum,
        priority=priority,
        no_colder=bool(flags & NO_COLDER),
    )


def verify(header: FrameHeader, key: BlockKey, stored: memoryview) -> None:
    """Checks that ``stored``, all the bytes that came back, are the block named ``key``. Raises ``FrameError``."""
    if header.key != key:
        raise FrameError("key", "the frame belongs to another block")
    if header.stored_bytes != len(stored):
        raise FrameError("length", f"{len(stored)} bytes came back, the frame says {header.stored_bytes}")
    if checksum(stored) != header.stored_checksum:
        raise FrameError("checksum", "the stored bytes were damaged")
