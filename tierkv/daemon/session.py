"""What the daemon keeps for an engine: its namespaces, the leases it holds, the slots it is writing.

A session is all connections of one engine process. It outlives them as long as it holds something and its process
lives: a process whose connection broke may still read what it leased and write what it reserved, so it may come back
and go on. All is taken back when it says goodbye, or is known to be gone (see ``sessions``).

Handles are numbers that the client chooses, each once, so that it can give up what it never got an answer about.
"""

from __future__ import annotations

import itertools
import threading
from collections import OrderedDict
from collections.abc import Collection
from concurrent.futures import Future
from typing import Any, TypeVar

from tierkv.client import Client
from tierkv.daemon.watches import SessionWatches
from tierkv.daemon.wire import WireError
from tierkv.daemon.words import Words, hear_chain, hear_digest, take
from tierkv.errors import HandleError
from tierkv.handles import Draft, Lease
from tierkv.ids import HASH_BYTES
from tierkv.keys import Chain
from tierkv.namespaces import OpenNamespace
from tierkv.store import TieredStore

H = TypeVar("H", Lease, Draft)
KNOWN_CHAINS = 16
MOST_HANDLES = 65_536
"""Leases and drafts that one session may hold."""
MOST_GIVEN_UP = 4096
"""Numbers that are remembered, of handles that were given up before they were there."""
MOST_REPORTS = 64
"""Clears, flushes and sleeps whose result was not asked for yet; the oldest is forgotten."""


class Session:
    """Thread-safe: the connections of an engine are served by several threads."""

    def __init__(self, store: TieredStore, token: bytes, pid: int, owner: str) -> None:
        self.token = token
        self.pid = pid
        self.uid: int | None = None
        """The user that the kernel says the peer is."""
        self.owner = owner
        self.client = Client(store, owner=owner)
        self.watches = SessionWatches(self.client)
        self.connections = 0
        """Under the lock of the book of sessions."""
        self.calls = 0
        self._lock = threading.Lock()
        self._leases: dict[int, Lease] = {}
        self._drafts: dict[int, Draft] = {}
        self._given_up: OrderedDict[int, None] = OrderedDict()
        self._over = False
        self._chains: OrderedDict[tuple[bytes, bytes, int], Chain] = OrderedDict()
        self._reports: OrderedDict[int, Future[Any]] = OrderedDict()
        self._numbers = itertools.count(1)

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
        hashes = take(words, "hashes", bytes)
        # The last hash stands for those before it; whether they are the same is looked at nevertheless.
        name = (take(words, "namespace", bytes), hashes[-HASH_BYTES:], take(words, "tokens", int))
        chain = self._chains.get(name)
        if chain is None or chain.joined != hashes:
            chain = hear_chain(words, self.namespace(words).namespace)
        with self._lock:
            self._chains[name] = chain
            self._chains.move_to_end(name)
            if len(self._chains) > KNOWN_CHAINS:
                self._chains.popitem(last=False)
        return chain

    # -- handles --------------------------------------------------------------------------------------------------

    def keep_lease(self, number: int, lease: Lease) -> None:
        """Raises ``HandleError`` when nobody wants it any more; it is released then."""
        if not self._keep(self._leases, number, lease):
            lease.release()
            raise HandleError(f"lease {number} was given up, or is there already")

    def keep_draft(self, number: int, draft: Draft) -> None:
        """Raises ``HandleError`` when nobody wants it any more; it is dropped then."""
        if not self._keep(self._drafts, number, draft):
            draft.drop()
            raise HandleError(f"draft {number} was given up, or is there already")

    def _keep(self, handles: dict[int, H], number: int, handle: H) -> bool:
        with self._lock:
            if self._over or number in self._given_up or number in handles or self.held >= MOST_HANDLES:
                return False
            handles[number] = handle
        return True

    def end_lease(self, number: int) -> None:
        lease = self._take(self._leases, number)
        if lease is not None:
            lease.release()

    def shorten_lease(self, number: int, blocks: int) -> None:
        with self._lock:
            lease = self._leases.get(number)
        if lease is not None:
            lease.shorten(max(0, blocks))

    def drop_draft(self, number: int) -> None:
        draft = self._take(self._drafts, number)
        if draft is not None:
            draft.drop()

    def take_draft(self, number: int) -> Draft:
        """Raises ``UnknownHandle``."""
        with self._lock:
            draft = self._drafts.pop(number, None)
        if draft is None:
            raise UnknownHandle(f"draft {number} is none of this session's")
        return draft

    def _take(self, handles: dict[int, H], number: int) -> H | None:
        """One that is not there (yet) must not be kept when it comes."""
        with self._lock:
            handle = handles.pop(number, None)
            if handle is None:
                self._given_up[number] = None
                if len(self._given_up) > MOST_GIVEN_UP:
                    self._given_up.popitem(last=False)
            return handle

    def holds(self, lease: Lease) -> bool:
        with self._lock:
            return any(its is lease for its in self._leases.values())

    @property
    def over(self) -> bool:
        """It has said goodbye, or its process has ended."""
        return self._over

    @property
    def held(self) -> int:
        """Leases, drafts, announcements and watches."""
        return len(self._leases) + len(self._drafts) + self.watches.held

    # -- what is awaited ------------------------------------------------------------------------------------------

    def keep_report(self, future: Future[Any]) -> int:
        """Something that was begun; ``report`` tells its result."""
        with self._lock:
            number = next(self._numbers)
            self._reports[number] = future
            if len(self._reports) > MOST_REPORTS:
                self._reports.popitem(last=False)
        return number

    def report(self, number: int) -> Future[Any]:
        """Raises ``UnknownHandle``."""
        with self._lock:
            future = self._reports.pop(number, None)
        if future is None:
            raise UnknownHandle(f"report {number} is none of this session's")
        return future

    # -- the end --------------------------------------------------------------------------------------------------

    def end(self, writing: Collection[int] = ()) -> None:
        """Takes back all leases, and all drafts but those that are still being ``writing``; what comes later is not
        kept."""
        with self._lock:
            self._over = True
            leases, self._leases = list(self._leases.values()), {}
            drafts = [draft for number, draft in self._drafts.items() if number not in writing]
            self._drafts = {number: its for number, its in self._drafts.items() if number in writing}
        for lease in leases:
            lease.release()
        for draft in drafts:
            draft.drop()
        self.watches.close()

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
                **self.client.watching.facts(),
                "calls": self.calls,
            }


class UnknownNamespace(WireError):
    """The peer speaks of a namespace that it has not opened here: after a restart of the daemon, say."""


class UnknownHandle(WireError):
    """The peer speaks of a handle that it has not got here."""
