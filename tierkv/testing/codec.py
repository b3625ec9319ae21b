"""The contract of a codec. Subclass ``CodecContract`` in your tests; see ``docs/testing.md``.

class TestMyCodec(CodecContract):
    def make_codec(self): return MyCodec()
    def close_enough(self, before, after): ...   # only where lossless is False
"""

from __future__ import annotations

import random
from functools import partial

import numpy as np
import pytest

from tierkv.codec import Codec
from tierkv.errors import CodecError
from tierkv.testing.payloads import Guarded, fill, is_poisoned, key_of, pages, payload_of
from tierkv.testing.threads import run_together
from tierkv.units import ALIGN_BYTES, KIB, MIB

SIZES = (0, 1, 2, 15, 511, 512, 4095, 4096, 4097, 64 * KIB, 100_001, MIB, MIB + 1)
KINDS = ("zeros", "repeats", "noise", "floats", "mixed")


def content(kind: str, length_bytes: int) -> bytes:
    """Bytes of one kind: from what shrinks most to what does not shrink at all, and numbers as KV holds them."""
    noise = payload_of(key_of(length_bytes), length_bytes)
    match kind:
        case "zeros":
            return bytes(length_bytes)
        case "repeats":
            return (bytes(range(7)) * (length_bytes // 7 + 1))[:length_bytes]
        case "floats":
            values = np.sin(np.arange(length_bytes // 2 + 1, dtype=np.float64)).astype(np.float16)
            return values.tobytes()[:length_bytes]
        case "mixed":
            return noise[: length_bytes // 2] + bytes(length_bytes - length_bytes // 2)
        case _:
            return noise


class _Window:
    """Exactly ``length_bytes`` writable bytes, with poison before and behind them."""

    def __init__(self, length_bytes: int) -> None:
        self._guarded = Guarded(pages(length_bytes))
        self.view = self._guarded.view[:length_bytes]

    def check_guards(self) -> None:
        behind = self._guarded.view[len(self.view) :]
        assert self._guarded.guards_intact(), "bytes were written beside the buffer"
        assert is_poisoned(behind), "bytes were written behind the buffer"


class CodecContract:
    """What the store relies on."""

    sizes: tuple[int, ...] = SIZES
    """Decoded lengths to try; a codec of fixed-width numbers leaves out those that are no multiple."""
    patience_s = 60.0

    # ---- what a subclass gives

    def make_codec(self) -> Codec:
        raise NotImplementedError("give the contract a codec: override make_codec")

    def close_enough(self, before: bytes, after: bytes) -> bool:
        """Whether what came back may stand for what was stored. A lossy codec overrides this with its error bound."""
        return before == after

    # ---- tools

    @pytest.fixture
    def codec(self) -> Codec:
        return self.make_codec()

    def encode(self, codec: Codec, plain: bytes, room_bytes: int) -> bytes | None:
        """Stored bytes, or ``None`` when they do not fit; checks that nothing else was touched."""
        source, target = _Window(len(plain)), _Window(room_bytes)
        source.view[:] = plain
        length = codec.encode_into(source.view, target.view)
        source.check_guards()
        target.check_guards()
        assert source.view == plain, "encode_into changed its source"
        if length is None:
            return None
        assert 0 <= length <= room_bytes, f"{length} bytes stored in a buffer of {room_bytes}"
        return bytes(target.view[:length])

    def decode(self, codec: Codec, stored: bytes, length_bytes: int) -> bytes:
        source, target = _Window(len(stored)), _Window(length_bytes)
        source.view[:] = stored
        try:
            codec.decode_into(source.view, target.view)
        finally:
            source.check_guards()
            target.check_guards()
        assert source.view == stored, "decode_into changed its source"
        return bytes(target.view)

    def encoded(self, codec: Codec, plain: bytes) -> bytes:
        stored = self.encode(codec, plain, 2 * len(plain) + 64 * KIB)
        assert stored is not None, "does not fit into twice its size and 64 KiB"
        return stored

    # ---- the way there and back

    def test_names_itself(self, codec: Codec) -> None:
        assert codec.name
        assert codec.name == codec.name.strip().lower()
        assert 0 <= codec.code <= 255
        assert isinstance(codec.lossless, bool)
        assert isinstance(codec.identity, bool)
        assert codec.lossless or not codec.identity

    @pytest.mark.parametrize("kind", KINDS)
    def test_round_trip(self, codec: Codec, kind: str) -> None:
        for length_bytes in self.sizes:
            plain = content(kind, length_bytes)
            stored = self.encoded(codec, plain)
            after = self.decode(codec, stored, length_bytes)
            assert len(after) == length_bytes
            good = plain == after if codec.lossless else self.close_enough(plain, after)
            assert good, f"{length_bytes} bytes of {kind} came back otherwise"
            if codec.identity:
                assert stored == plain

    def test_sources_may_be_read_only(self, codec: Codec) -> None:
        plain = content("mixed", 4096)
        stored, decoded = bytearray(64 * KIB), bytearray(4096)
        length = codec.encode_into(memoryview(plain), memoryview(stored))
        assert length is not None
        codec.decode_into(memoryview(bytes(stored[:length])), memoryview(decoded))
        assert codec.lossless is False or decoded == plain

    # ---- bounds

    @pytest.mark.parametrize("kind", KINDS)
    def test_what_does_not_fit_is_refused(self, codec: Codec, kind: str) -> None:
        plain = content(kind, 64 * KIB)
        needed = len(self.encoded(codec, plain))
        for room_bytes in (0, 1, needed // 2, needed - 1):
            assert self.encode(codec, plain, room_bytes) is None, f"{needed} bytes fit into {room_bytes}"
        assert self.encode(codec, plain, needed) is not None, f"{needed} bytes do not fit into {needed}"

    @pytest.mark.parametrize("wrong_bytes", [-4096, -1, 1, 4096])
    def test_another_decoded_length_is_an_error(self, codec: Codec, wrong_bytes: int) -> None:
        for kind in KINDS:
            stored = self.encoded(codec, content(kind, 64 * KIB))
            with pytest.raises(CodecError):
                self.decode(codec, stored, 64 * KIB + wrong_bytes)

    @pytest.mark.parametrize("kind", KINDS)
    def test_truncated_is_an_error(self, codec: Codec, kind: str) -> None:
        stored = self.encoded(codec, content(kind, 64 * KIB))
        for keep in sorted({0, 1, len(stored) // 2, len(stored) - 1}):
            with pytest.raises(CodecError):
                self.decode(codec, stored[:keep], 64 * KIB)

    def test_damaged_is_an_error_or_other_bytes_but_nothing_worse(self, codec: Codec) -> None:
        dice = random.Random(9)
        stored = self.encoded(codec, content("mixed", 16 * KIB))
        for _ in range(300):
            damaged = bytearray(stored)
            for _ in range(dice.randint(1, 4)):
                damaged[dice.randrange(min(len(damaged), 200))] ^= 1 << dice.randrange(8)
            try:
                self.decode(codec, bytes(damaged), 16 * KIB)
            except CodecError:
                pass

    def test_noise_is_an_error_or_other_bytes_but_nothing_worse(self, codec: Codec) -> None:
        for number in range(100):
            try:
                self.decode(codec, payload_of(key_of(number), 37 * number), 8 * KIB)
            except CodecError:
                pass

    # ---- many threads

    def test_many_threads(self, codec: Codec) -> None:
        def work(number: int) -> None:
            room = _Window(ALIGN_BYTES * 16)
            for _ in range(10):
                fill(room.view, key_of(number))
                plain = bytes(room.view)
                after = self.decode(codec, self.encoded(codec, plain), len(plain))
                assert plain == after if codec.lossless else self.close_enough(plain, after)

        run_together([partial(work, number) for number in range(8)], self.patience_s)
