"""Payloads that say which block they belong to, so that any foreign, torn or missing byte is seen at once.

Each byte follows from the key and its position. Destinations are poisoned before a load, and every buffer stands
between two guard pages, so that a write beside it is seen as well.
"""

from __future__ import annotations

import hashlib
import mmap
import struct
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tierkv import frame
from tierkv.errors import FrameError
from tierkv.frame import FrameHeader
from tierkv.ids import (
    NAMESPACE_TAG_BYTES,
    TENANT_TAG_BYTES,
    BlockHash,
    BlockKey,
    KeyPrefix,
    NamespaceDigest,
)
from tierkv.tier import Item, Want
from tierkv.units import ALIGN_BYTES, align_up

POISON = 0xAA

_STEP = 0x9E3779B97F4A7C15
_WORD_MASK = (1 << 64) - 1
_MIX = np.uint64(0xBF58476D1CE4E5B9)
_SHIFT = np.uint64(29)
_WORD_BYTES = 8
_CHUNK_WORDS = 1 << 17
_RAMP: NDArray[np.uint64] = np.arange(_CHUNK_WORDS, dtype=np.uint64) * np.uint64(_STEP)

Buffer = bytes | bytearray | memoryview


def payload_of(key: BlockKey, length_bytes: int) -> bytes:
    """The ``length_bytes`` bytes that belong to ``key``; a shorter payload is the front of a longer one."""
    seed = np.frombuffer(hashlib.blake2b(key, digest_size=_WORD_BYTES).digest(), dtype=np.uint64)
    words = align_up(length_bytes, _WORD_BYTES) // _WORD_BYTES
    pieces = [
        _mixed(seed, start, min(_CHUNK_WORDS, words - start)) for start in range(0, words, _CHUNK_WORDS)
    ]
    return b"".join(piece.tobytes() for piece in pieces)[:length_bytes]


def _mixed(seed: NDArray[np.uint64], start: int, count: int) -> NDArray[np.uint64]:
    base = seed + np.uint64(start * _STEP & _WORD_MASK)
    values: NDArray[np.uint64] = _RAMP[:count] + base
    values ^= values >> _SHIFT
    values *= _MIX
    values ^= values >> _SHIFT
    return values


def fill(buffer: memoryview, key: BlockKey) -> None:
    """Writes the payload of ``key`` over all of ``buffer``."""
    _array(buffer)[:] = np.frombuffer(payload_of(key, len(buffer)), dtype=np.uint8)


def check(buffer: Buffer, key: BlockKey) -> None:
    """Raises ``AssertionError`` that names the first wrong byte unless all of ``buffer`` is the payload of ``key``."""
    found = _array(buffer)
    wanted = np.frombuffer(payload_of(key, len(found)), dtype=np.uint8)
    if np.array_equal(found, wanted):
        return
    at = int(np.flatnonzero(found != wanted)[0])
    rest = found[at:]
    looks = (
        "poison, never written"
        if (rest[:64] == POISON).all()
        else "zeros"
        if not rest[:64].any()
        else "foreign"
    )
    raise AssertionError(f"payload of {key.hex()}: byte {at} of {len(found)} is wrong (from there: {looks})")


def poison(buffer: memoryview) -> None:
    """Fills ``buffer`` with 0xAA."""
    _array(buffer)[:] = POISON


def is_poisoned(buffer: Buffer) -> bool:
    """True while every byte of ``buffer`` is 0xAA."""
    return bool((_array(buffer) == POISON).all())


def _array(buffer: Buffer) -> NDArray[np.uint8]:
    return np.frombuffer(buffer, dtype=np.uint8)


def aligned(length_bytes: int) -> memoryview:
    """A writable buffer on a 4096-byte boundary; it frees itself when no view of it is left."""
    if length_bytes == 0:
        return memoryview(bytearray())
    return memoryview(mmap.mmap(-1, align_up(length_bytes)))[:length_bytes]


class Guarded:
    """A poisoned, aligned ``view`` of whole pages between two poisoned guard pages."""

    def __init__(self, length_bytes: int) -> None:
        self._whole = aligned(length_bytes + 2 * ALIGN_BYTES)
        poison(self._whole)
        self.view = self._whole[ALIGN_BYTES:-ALIGN_BYTES]

    def guards_intact(self) -> bool:
        return is_poisoned(self._whole[:ALIGN_BYTES]) and is_poisoned(self._whole[-ALIGN_BYTES:])


# Keys and headers that need no model, no salt and no key scheme.


def tenant_of(tenant: int) -> KeyPrefix:
    """The prefix of all keys that ``key_of(..., tenant=tenant)`` makes."""
    return KeyPrefix(hashlib.sha256(b"tenant %d" % tenant).digest()[:TENANT_TAG_BYTES])


def namespace_of(tenant: int, namespace: int) -> KeyPrefix:
    """The prefix of all keys of one namespace of one tenant."""
    return KeyPrefix(tenant_of(tenant) + _namespace_digest(tenant, namespace)[:NAMESPACE_TAG_BYTES])


def _namespace_digest(tenant: int, namespace: int) -> bytes:
    return hashlib.sha256(b"namespace %d %d" % (tenant, namespace)).digest()


def key_of(number: int, *, tenant: int = 0, namespace: int = 0) -> BlockKey:
    """A key by number, shaped like the real ones: tenant tag, namespace tag, digest."""
    prefix = namespace_of(tenant, namespace)
    return BlockKey(prefix + hashlib.sha256(prefix + struct.pack("<Q", number)).digest()[: 32 - len(prefix)])


def header_of(key: BlockKey, payload: Buffer, **changes: Any) -> FrameHeader:
    """A true header for ``payload`` under ``key``; ``changes`` overwrite fields."""
    digest = hashlib.sha512(key).digest()
    total = frame.checksum(payload)
    depth = digest[0] % 4
    header = FrameHeader(
        key=key,
        namespace=NamespaceDigest(hashlib.sha256(key[:12]).digest()),
        block_hash=BlockHash(digest[:32]),
        parent_hash=BlockHash(digest[32:]) if depth else None,
        depth=depth,
        part=digest[1] % 4,
        expected_parts=0b1111,
        epoch=digest[2],
        expires_ms=0,
        codec=0,
        decoded_bytes=len(payload),
        stored_bytes=len(payload),
        decoded_checksum=total,
        stored_checksum=total,
    )
    return replace(header, **changes)


def pages(length_bytes: int) -> int:
    """The length of a payload buffer for ``length_bytes``: whole pages, at least one."""
    return max(ALIGN_BYTES, align_up(length_bytes))


def make_item(key: BlockKey, length_bytes: int, *, ttl_s: float | None = None, **changes: Any) -> Item:
    """A block to write: the payload of ``key`` with a true header, in aligned buffers whose padding is poison."""
    payload = aligned(pages(length_bytes))
    fill(payload[:length_bytes], key)
    poison(payload[length_bytes:])
    header = aligned(ALIGN_BYTES)
    poison(header)
    _array(header)[: frame.HEADER_BYTES] = np.frombuffer(
        frame.pack(header_of(key, payload[:length_bytes], **changes)), dtype=np.uint8
    )
    return Item(key=key, header=header, payload=payload, stored_bytes=length_bytes, ttl_s=ttl_s)


class Destination:
    """A ``Want`` whose buffers are poisoned and guarded."""

    def __init__(self, key: BlockKey, room_bytes: int) -> None:
        self._header = Guarded(ALIGN_BYTES)
        self._payload = Guarded(pages(room_bytes))
        self.want = Want(key=key, header=self._header.view, payload=self._payload.view)

    def verified(self) -> FrameHeader:
        """The header, after the checks that the store makes of every load. Raises ``FrameError``."""
        header = frame.unpack(self.want.header)
        if header.stored_bytes > len(self.want.payload):
            raise FrameError("length", f"{header.stored_bytes} bytes in a buffer of {len(self.want.payload)}")
        frame.verify(header, self.want.key, self.want.payload[: self.want.stored_bytes])
        return header

    def check(self, length_bytes: int) -> FrameHeader:
        """Asserts that exactly the block of ``length_bytes`` that ``make_item`` made lies here; gives its header."""
        assert self.want.stored_bytes == length_bytes, (
            f"stored_bytes {self.want.stored_bytes}, not {length_bytes}"
        )
        header = self.verified()
        check(self.want.payload[:length_bytes], self.want.key)
        self.check_guards()
        return header

    def check_guards(self) -> None:
        assert self._header.guards_intact(), "bytes were written beside the header page"
        assert self._payload.guards_intact(), "bytes were written beside the payload buffer"

    def poison(self) -> None:
        poison(self.want.header)
        poison(self.want.payload)

    def is_poisoned(self) -> bool:
        return is_poisoned(self.want.header) and is_poisoned(self.want.payload)
