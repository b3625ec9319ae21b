"""The contract of a blob tier on real directories: direct and buffered, large and small segments, and on tmpfs."""

from __future__ import annotations

import errno
import uuid
from pathlib import Path

import pytest

from tests.nvme_support import make_tier, peek, poke
from tierkv.ids import BlockKey
from tierkv.testing.blob_tier import BlobTierContract
from tierkv.testing.faults.disk import ShimDisk
from tierkv.tiers.nvme import NvmeTier
from tierkv.tiers.nvme_disk import Disk
from tierkv.units import KIB, MIB


def no_direct(call: str, path: str, offset: int) -> None:
    if call == "open_direct":
        raise OSError(errno.EINVAL, "no O_DIRECT here")


class OnADisk(BlobTierContract):
    segment_bytes: int | None = None

    @pytest.fixture(autouse=True)
    def _folder(self, tmp_path: Path) -> None:
        self.folder = tmp_path

    def disk(self) -> Disk:
        return Disk()

    def at(self, path: Path) -> NvmeTier:
        return make_tier(path, 64 * MIB, segment_bytes=self.segment_bytes, disk=self.disk())

    def make_tier(self) -> NvmeTier:
        return self.at(self.folder / uuid.uuid4().hex)

    def reopen(self, tier: NvmeTier) -> NvmeTier:
        return self.at(Path(str(tier.status()["path"])))

    def peek(self, tier: NvmeTier, key: BlockKey) -> bytes | None:
        return peek(Path(str(tier.status()["path"])), key)

    def poke(self, tier: NvmeTier, key: BlockKey, raw: bytes) -> None:
        poke(Path(str(tier.status()["path"])), key, raw)


class TestDirect(OnADisk):
    pass


class TestSmallSegments(OnADisk):
    segment_bytes = 64 * KIB


class TestBuffered(OnADisk):
    def disk(self) -> Disk:
        return ShimDisk(no_direct)
