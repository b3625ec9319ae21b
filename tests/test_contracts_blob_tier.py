"""MemoryBlobTier passes the blob-tier contract in all of its forms."""

from tierkv.ids import BlockKey
from tierkv.testing.blob_tier import BlobTierContract
from tierkv.testing.memory import MemoryBlobTier, MemoryStorage
from tierkv.units import MIB


class MemoryHooks(BlobTierContract):
    def make_tier(self) -> MemoryBlobTier:
        return MemoryBlobTier(64 * MIB)

    def peek(self, tier: MemoryBlobTier, key: BlockKey) -> bytes | None:
        return tier.storage.frames.get(key)

    def poke(self, tier: MemoryBlobTier, key: BlockKey, raw: bytes) -> None:
        assert key in tier.storage.frames
        tier.storage.frames[key] = raw


class TestMemory(MemoryHooks):
    pass


class TestMemoryPersistent(MemoryHooks):
    def make_tier(self) -> MemoryBlobTier:
        return MemoryBlobTier(64 * MIB, storage=MemoryStorage())

    def reopen(self, tier: MemoryBlobTier) -> MemoryBlobTier:
        return MemoryBlobTier(64 * MIB, storage=tier.storage)


class TestMemoryThatEvictsItself(MemoryHooks):
    def make_tier(self) -> MemoryBlobTier:
        return MemoryBlobTier(64 * MIB, evicts_itself=True)


class TestMemoryOfSmallBlocks(MemoryHooks):
    def make_tier(self) -> MemoryBlobTier:
        return MemoryBlobTier(64 * MIB, max_block_bytes=MIB, workers=16)
