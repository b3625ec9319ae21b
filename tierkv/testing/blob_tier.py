"""The contract of a blob tier. Subclass ``BlobTierContract`` in your tests; see ``docs/testing.md``.

    class TestMyTier(BlobTierContract):
        @pytest.fixture(autouse=True)
        def _folder(self, tmp_path): self.folder = tmp_path

        def make_tier(self): return MyTier(self.folder / uuid4().hex)
        def peek(self, tier, key): ...      # the stored bytes, read without the tier
        def poke(self, tier, key, raw): ... # the stored bytes, written without the tier
        def reopen(self, tier): return MyTier(tier.folder)   # only where caps.persistent

The tier needs room for 64 MiB, and must not evict on its own below that. Payloads follow from their keys and
destinations are poisoned and guarded, so that no foreign, torn, late or missing byte stays unseen.
"""

from __future__ import annotations

from tierkv.testing.blob_basics import BlobTierBasics
from tierkv.testing.blob_hardships import BlobTierHardships


class BlobTierContract(BlobTierBasics, BlobTierHardships):
    """What the store relies on. Every tier passes all of it."""
