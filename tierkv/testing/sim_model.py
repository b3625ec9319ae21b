"""The dict that forgets nothing: what may be hit, and with which bytes. A miss is always allowed, wrong bytes never."""

from __future__ import annotations

from collections import Counter

from tierkv.handles import Lease
from tierkv.ids import BlockHash, NamespaceDigest
from tierkv.keys import Chain
from tierkv.reading import Match
from tierkv.testing.sim_world import bytes_of


class Model:
    """Which blocks have been stored since they were cleared last.

    What is on its way in counts from the moment at which it is given (``begin``), since nobody sees when exactly it
    becomes visible; so does what a clear could not reach.
    """

    def __init__(self) -> None:
        self._stored: dict[NamespaceDigest, set[BlockHash]] = {}
        self._coming: Counter[tuple[NamespaceDigest, BlockHash]] = Counter()

    def begin(self, chain: Chain, positions: range) -> None:
        """These blocks may become visible from now on, until ``end``."""
        for position in positions:
            self._coming[chain.namespace.digest, chain.hashes[position]] += 1

    def end(self, chain: Chain, positions: range, *, stored: bool) -> None:
        for position in positions:
            self._coming[chain.namespace.digest, chain.hashes[position]] -= 1
            if stored:
                self._stored.setdefault(chain.namespace.digest, set()).add(chain.hashes[position])

    def clear(self, namespace: NamespaceDigest | None) -> dict[NamespaceDigest, set[BlockHash]]:
        """Forgets; returns what was forgotten."""
        gone = {d: s for d, s in self._stored.items() if namespace is None or d == namespace}
        for digest in gone:
            del self._stored[digest]
        return gone

    def not_cleared(self, forgotten: dict[NamespaceDigest, set[BlockHash]]) -> None:
        """A tier could not be reached, as the report says: what it holds may be found again."""
        for digest, hashes in forgotten.items():
            self._stored.setdefault(digest, set()).update(hashes)

    def may_hit(self, chain: Chain) -> int:
        """Length of the longest run that may be there."""
        digest = chain.namespace.digest
        stored = self._stored.get(digest, set())
        for i, block_hash in enumerate(chain.hashes):
            if block_hash not in stored and self._coming[digest, block_hash] <= 0:
                return i
        return len(chain)

    def check_match(self, match: Match, local_computed: int = 0) -> None:
        chain = match.chain
        limit = self.may_hit(chain)
        assert match.blocks <= limit, f"{match.blocks} blocks are matched, {limit} can be there"
        assert 0 <= match.tokens <= max(0, chain.num_tokens - 1), (
            f"{match.tokens} of {chain.num_tokens} tokens"
        )
        assert match.tokens == 0 or match.tokens > local_computed
        assert match.tokens <= match.blocks * chain.namespace.layout.block_tokens

    def check_lease(self, lease: Lease) -> None:
        """Every byte of a run that was just leased."""
        limit = self.may_hit(lease.chain)
        assert len(lease) <= limit, f"{len(lease)} blocks are leased, {limit} can be there"
        assert 0 <= lease.tokens <= max(0, lease.chain.num_tokens - 1)
        check_bytes(lease)


def check_bytes(lease: Lease) -> None:
    """Every byte under a lease, of all parts that its blocks have."""
    chain = lease.chain
    for i, family in enumerate(lease.families):
        for part in chain.namespace.layout.parts:
            if lease._lessor is None or lease._lessor.slot_of(family, part.index) < 0:
                continue
            wanted = bytes_of(chain.namespace.block_key(chain.hashes[i], part.index), part.payload_bytes)
            assert lease.view(i, part.index) == wanted, (
                f"block {i}, part {part.index} of a lease has wrong bytes"
            )
