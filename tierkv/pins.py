"""Chains that somebody wants to stay in host RAM until further notice."""

from __future__ import annotations

import threading

from tierkv.handles import Lease
from tierkv.ids import KeyPrefix
from tierkv.keys import Chain

_Name = tuple[bytes, bytes]


class PinBook:
    """Leases without a deadline, by the last block of their chain. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._leases: dict[_Name, Lease] = {}

    def add(self, lease: Lease) -> int:
        """Keeps a lease in the place of an earlier one over the same chain; returns how many blocks it covers."""
        if not len(lease):
            lease.release()
            return 0
        lease.at_s = float("inf")
        with self._lock:
            earlier = self._leases.get(_name(lease.chain))
            self._leases[_name(lease.chain)] = lease
        if earlier is not None:
            earlier.release()
        return len(lease)

    def remove(self, chain: Chain) -> int:
        """Releases the lease over a chain; returns how many blocks it covered."""
        with self._lock:
            lease = self._leases.pop(_name(chain), None)
        if lease is None:
            return 0
        blocks = len(lease)
        lease.release()
        return blocks

    def remove_under(self, prefix: KeyPrefix) -> None:
        """Releases all leases of a namespace, a tenant, or everybody."""
        with self._lock:
            names = [
                name
                for name, lease in self._leases.items()
                if lease.chain.namespace.prefix.startswith(prefix)
            ]
            gone = [self._leases.pop(name) for name in names]
        for lease in gone:
            lease.release()


def _name(chain: Chain) -> _Name:
    return chain.namespace.digest, chain.hashes[-1] if chain.hashes else b""
