"""The dict that forgets nothing: what may be hit, and with which bytes. A miss is always allowed, wrong bytes never."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from tierkv.handles import Lease
from tierkv.ids import BlockHash, NamespaceDigest
from tierkv.keys import Chain
from tierkv.reading import Match
from tierkv.testing.sim_world import bytes_of


@dataclass(eq=False)
class Reading:
    """A match or load that is going on: it may bring what could be hit at any moment since it began."""

    chain: Chain
    limit: int


@dataclass(eq=False)
class Clear:
    """A clear that is going on, and what it took away."""

    namespace: NamespaceDigest | None
    stored_meanwhile: set[tuple[NamespaceDigest, BlockHash]] = field(default_factory=set)
    forgotten: dict[NamespaceDigest, set[BlockHash]] = field(default_factory=dict)


class Model:
    """Which blocks have been stored since they were cleared last.

    What is on its way in counts from the moment at which it is given (``begin``), since nobody sees when exactly it
    becomes visible; so does what a clear could not reach. ``truthful_hints``: no tier says that it holds what it does
    not, so that a match must keep within the model as well as a lease.
    """

    def __init__(self, *, truthful_hints: bool) -> None:
        self._truthful_hints = truthful_hints
        self._stored: dict[NamespaceDigest, set[BlockHash]] = {}
        self._coming: Counter[tuple[NamespaceDigest, BlockHash]] = Counter()
        self._readings: list[Reading] = []
        self._clears: list[Clear] = []

    def begin(self, chain: Chain, positions: range) -> None:
        """These blocks may become visible from now on, until ``end``."""
        for position in positions:
            self._coming[chain.namespace.digest, chain.hashes[position]] += 1

    def end(self, chain: Chain, positions: range, *, stored: bool) -> None:
        for position in positions:
            self._coming[chain.namespace.digest, chain.hashes[position]] -= 1
            if stored:
                self._stored.setdefault(chain.namespace.digest, set()).add(chain.hashes[position])
                for clear in self._clears:
                    clear.stored_meanwhile.add((chain.namespace.digest, chain.hashes[position]))

    def begin_clear(self, namespace: NamespaceDigest | None) -> Clear:
        """A clear is called. Until it returns nobody knows which blocks are still there."""
        clear = Clear(namespace)
        self._clears.append(clear)
        return clear

    def end_clear(self, clear: Clear) -> None:
        """It has returned: what was stored before it began is gone, here and now."""
        self._clears.remove(clear)
        for reading in self._readings:
            reading.limit = max(reading.limit, self.may_hit(reading.chain))
        for digest in list(self._stored):
            if clear.namespace is None or digest == clear.namespace:
                clear.forgotten[digest] = self._stored.pop(digest)
        for digest, block_hash in clear.stored_meanwhile:
            self._stored.setdefault(digest, set()).add(block_hash)

    def not_cleared(self, clear: Clear) -> None:
        """A tier could not be reached, as the report says: what it holds may be found again."""
        for digest, hashes in clear.forgotten.items():
            self._stored.setdefault(digest, set()).update(hashes)

    def may_hit(self, chain: Chain) -> int:
        """Length of the longest run that may be there."""
        digest = chain.namespace.digest
        stored = self._stored.get(digest, set())
        for i, block_hash in enumerate(chain.hashes):
            if block_hash not in stored and self._coming[digest, block_hash] <= 0:
                return i
        return len(chain)

    def begin_reading(self, chain: Chain) -> Reading:
        reading = Reading(chain, self.may_hit(chain))
        self._readings.append(reading)
        return reading

    def end_reading(self, reading: Reading) -> None:
        reading.limit = max(reading.limit, self.may_hit(reading.chain))
        self._readings.remove(reading)

    def check_match(self, match: Match, reading: Reading, local_computed: int = 0) -> None:
        chain = match.chain
        limit = reading.limit if self._truthful_hints else len(chain)
        assert match.blocks <= limit, f"{match.blocks} blocks are matched, {limit} can be there"
        assert 0 <= match.tokens <= max(0, chain.num_tokens - 1), (
            f"{match.tokens} of {chain.num_tokens} tokens"
        )
        assert match.tokens == 0 or match.tokens > local_computed
        assert match.tokens <= match.blocks * chain.namespace.layout.block_tokens

    def check_lease(self, lease: Lease, reading: Reading) -> None:
        """Every byte of a run that was just leased."""
        assert len(lease) <= reading.limit, f"{len(lease)} blocks are leased, {reading.limit} can be there"
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
