"""What the daemon keeps for an engine: its namespaces, the leases it holds, the slots it is writing.

A session is all connections of one engine process. Its leases end with its last connection. The slots that it was
writing are another matter: a process that only hangs may still write, so they wait until the process is known to be
gone (pidfd), and so do the leases of one that was thrown out.
"""

from __future__ import annotations

import itertools
import threading
from collections import OrderedDict
from typing import TypeVar

from tierkv.client import Client
from tierkv.daemon.wire import WireError
from tierkv.daemon.words import Words, hear_chain, hear_digest
from tierkv.errors import HandleError
from tierkv.handles import Draft, Lease
from tierkv.keys import Chain
from tierkv.namespaces import OpenNamespace
from tierkv.store import TieredStore

H = TypeVar("H")
KNOWN_CHAINS = 16
MOST_HANDLES = 65_536
"""Leases, and drafts, that one session may hold."""


class Session:
    """Thread-safe: the connections of an engine are served by several threads."""

    def __init__(self, store: TieredStore, token: bytes, pid: int, owner: str) -> None:
        self.token = token
        self.pid = pid
        self.owner = owner
        self.client = Client(store, owner=owner)
        self.connections = 0
        """Under the daemon's lock."""
        self.calls = 0
        self._lock = threading.Lock()
        self._numbers = itertools.count(1)
        self._leases: dict[int, Lease] = {}
        self._drafts: dict[int, Draft] = {}
        self._chains: OrderedDict[tuple[bytes, bytes, int], Chain] = OrderedDict()

    # -- names ----------------------------------------------------------------------------------------------------

    def namespace(self, words: Words) -> OpenNamespace:
        """Raises ``UnknownNamespace`` for one that this session has not opened: it opens it and asks again."""
        opened = self.client.opened(hear_digest(words))
        if opened is None:
            raise UnknownNamespace("this session has not opened the namespace")
        return opened

    def chain(self, words: Words) -> Chain:
        """The same object for the same prompt, as long as it was asked for lately: what is counted of a request hangs
        on its chain."""
        namespace = self.namespace(words).namespace
        name = (namespace.digest, words.get("hashes", b""), words.get("tokens", 0))
        with self._lock:
            chain = self._chains.get(name)
            if chain is not None:
                self._chains.move_to_end(name)
                return chain
        chain = hear_chain(words, namespace)
        with self._lock:
            self._chains[name] = chain
            if len(self._chains) > KNOWN_CHAINS:
                self._chains.popitem(last=False)
        return chain

    # -- handles --------------------------------------------------------------------------------------------------

    def keep_lease(self, lease: Lease) -> int:
        return self._keep(self._leases, lease)

    def keep_draft(self, draft: Draft) -> int:
        return self._keep(self._drafts, draft)

    def _keep(self, handles: dict[int, H], handle: H) -> int:
        with self._lock:
            if len(handles) >= MOST_HANDLES:
                raise HandleError(f"this session holds {len(handles)} handles already; release some")
            number = next(self._numbers)
            handles[number] = handle
        return number

    def end_lease(self, number: int) -> None:
        with self._lock:
            lease = self._leases.pop(number, None)
        if lease is not None:
            lease.release()

    def take_draft(self, number: int) -> Draft:
        with self._lock:
            draft = self._drafts.pop(number, None)
        if draft is None:
            raise WireError(f"draft {number} is none of this session's")
        return draft

    def holds(self, lease: Lease) -> bool:
        return lease in self._leases.values()

    def facts(self) -> dict[str, object]:
        """For people."""
        with self._lock:
            blocks = sum(len(lease) for lease in self._leases.values())
            return {
                "owner": self.owner,
                "pid": self.pid,
                "connections": self.connections,
                "leases": len(self._leases),
                "leased_blocks": blocks,
                "drafts": len(self._drafts),
                "calls": self.calls,
            }

    def end_leases(self) -> None:
        """All of them: nobody reads any more."""
        with self._lock:
            leases, self._leases = list(self._leases.values()), {}
        for lease in leases:
            lease.release()

    def end_drafts(self) -> None:
        """All of them: nobody writes any more."""
        with self._lock:
            drafts, self._drafts = list(self._drafts.values()), {}
        for draft in drafts:
            draft.drop()

    @property
    def writes(self) -> bool:
        """Whether slots are out that the process may be writing."""
        return bool(self._drafts)

    @property
    def reads(self) -> bool:
        return bool(self._leases)


class UnknownNamespace(WireError):
    """The peer speaks of a namespace that it has not opened here: after a restart of the daemon, say."""
