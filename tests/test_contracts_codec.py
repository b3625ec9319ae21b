"""The built-in codecs pass the codec contract, and broken ones do not."""

import zlib
from pathlib import Path

import numpy as np
import pytest
from contracts_support import Meeting, assert_catches

from tierkv.codec import LZ4, RAW, Codec, RawCodec
from tierkv.errors import CodecError
from tierkv.testing.codec import CodecContract


class TestRaw(CodecContract):
    def make_codec(self) -> Codec:
        return RAW


class TestLz4(CodecContract):
    def make_codec(self) -> Codec:
        return LZ4


class Halves:
    """A lossy codec: keeps the upper byte of each pair."""

    name = "halves"
    code = 200
    identity = False
    lossless = False

    def encode_into(self, decoded: memoryview, stored: memoryview) -> int | None:
        if len(stored) < len(decoded) // 2:
            return None
        stored[: len(decoded) // 2] = bytes(decoded)[1::2]
        return len(decoded) // 2

    def decode_into(self, stored: memoryview, decoded: memoryview) -> None:
        if 2 * len(stored) != len(decoded):
            raise CodecError(f"halves: {len(stored)} stored bytes for {len(decoded)}")
        np.frombuffer(decoded, dtype=np.uint8)[:] = np.repeat(np.frombuffer(stored, dtype=np.uint8), 2)


class TestLossy(CodecContract):
    sizes = (0, 2, 512, 4096, 65536)

    def make_codec(self) -> Codec:
        return Halves()

    def close_enough(self, before: bytes, after: bytes) -> bool:
        return before[1::2] == after[1::2]


# ---- broken ones


class Zlib:
    """An honest codec to break."""

    name = "zlib"
    code = 201
    identity = False
    lossless = True

    def encode_into(self, decoded: memoryview, stored: memoryview) -> int | None:
        packed = zlib.compress(decoded, 1)
        if len(packed) > len(stored):
            return None
        stored[: len(packed)] = packed
        return len(packed)

    def decode_into(self, stored: memoryview, decoded: memoryview) -> None:
        try:
            plain = zlib.decompress(stored)
        except zlib.error as error:
            raise CodecError(f"zlib: {error}") from error
        self._give(plain, decoded)

    def _give(self, plain: bytes, decoded: memoryview) -> None:
        if len(plain) != len(decoded):
            raise CodecError(f"zlib: {len(plain)} bytes came out for a block of {len(decoded)}")
        decoded[:] = plain


class TestZlib(CodecContract):
    def make_codec(self) -> Codec:
        return Zlib()


class HasNoName(Zlib):
    name = ""


class DropsTheLastByte(Zlib):
    def encode_into(self, decoded: memoryview, stored: memoryview) -> int | None:
        return super().encode_into(decoded[: len(decoded) - 1], stored)

    def _give(self, plain: bytes, decoded: memoryview) -> None:
        super()._give(plain + b"\0" if decoded else plain, decoded)


class LosesTheLowBits(Zlib):
    def encode_into(self, decoded: memoryview, stored: memoryview) -> int | None:
        return super().encode_into(memoryview(bytes(b & 0xFE for b in decoded)), stored)


class WritesItsSource(RawCodec):
    def encode_into(self, decoded: memoryview, stored: memoryview) -> int | None:
        np.frombuffer(decoded, dtype=np.uint8)[:1] = 0
        return super().encode_into(decoded, stored)


class WantsAWritableSource(Zlib):
    def encode_into(self, decoded: memoryview, stored: memoryview) -> int | None:
        if decoded.readonly:
            raise CodecError("read-only")
        return super().encode_into(decoded, stored)


class CutsToFit(Zlib):
    def encode_into(self, decoded: memoryview, stored: memoryview) -> int | None:
        packed = zlib.compress(decoded, 1)[: len(stored)]
        stored[: len(packed)] = packed
        return len(packed)


class RaisesWhenItDoesNotFit(Zlib):
    def encode_into(self, decoded: memoryview, stored: memoryview) -> int | None:
        length = super().encode_into(decoded, stored)
        if length is None:
            raise CodecError("no room")
        return length


class WantsSpareRoom(Zlib):
    def encode_into(self, decoded: memoryview, stored: memoryview) -> int | None:
        return super().encode_into(decoded, stored[: max(0, len(stored) - 16)])


class PadsToLength(Zlib):
    def _give(self, plain: bytes, decoded: memoryview) -> None:
        super()._give(plain[: len(decoded)].ljust(len(decoded), b"\0"), decoded)


class TakesATruncated(Zlib):
    def decode_into(self, stored: memoryview, decoded: memoryview) -> None:
        try:
            plain = zlib.decompressobj().decompress(stored)
        except zlib.error as error:
            raise CodecError("zlib") from error
        self._give(plain.ljust(len(decoded), b"\0"), decoded)


class LetsItsErrorsOut(Zlib):
    def decode_into(self, stored: memoryview, decoded: memoryview) -> None:
        try:
            self._give(zlib.decompress(stored), decoded)
        except zlib.error as error:
            raise AssertionError("not a CodecError") from error


class SharesAScratchBuffer(Zlib):
    def __init__(self) -> None:
        self._meeting = Meeting()
        self._scratch = b""

    def encode_into(self, decoded: memoryview, stored: memoryview) -> int | None:
        self._scratch = bytes(decoded)
        self._meeting.wait()
        return super().encode_into(memoryview(self._scratch), stored)


CAUGHT_BY = [
    (HasNoName, "test_names_itself"),
    (DropsTheLastByte, "test_round_trip"),
    (LosesTheLowBits, "test_round_trip"),
    (WritesItsSource, "test_round_trip"),
    (WantsAWritableSource, "test_sources_may_be_read_only"),
    (CutsToFit, "test_what_does_not_fit_is_refused"),
    (RaisesWhenItDoesNotFit, "test_what_does_not_fit_is_refused"),
    (WantsSpareRoom, "test_what_does_not_fit_is_refused"),
    (PadsToLength, "test_another_decoded_length_is_an_error"),
    (TakesATruncated, "test_truncated_is_an_error"),
    (LetsItsErrorsOut, "test_damaged_is_an_error_or_other_bytes_but_nothing_worse"),
    (LetsItsErrorsOut, "test_noise_is_an_error_or_other_bytes_but_nothing_worse"),
    (SharesAScratchBuffer, "test_many_threads"),
]


@pytest.mark.parametrize(
    ("mutant", "test"), CAUGHT_BY, ids=[f"{each.__name__}-{test}" for each, test in CAUGHT_BY]
)
def test_the_contract_catches(mutant: type[Codec], test: str, tmp_path: Path) -> None:
    class Contract(CodecContract):
        def make_codec(self) -> Codec:
            return mutant()

    assert_catches(Contract, test, tmp_path, "codec")


def test_every_test_of_the_contract_has_a_mutant() -> None:
    tests = {name for name in dir(CodecContract) if name.startswith("test_")}
    assert tests == {test for _, test in CAUGHT_BY}
