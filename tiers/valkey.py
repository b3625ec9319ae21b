"""The coldest tier: a Valkey server, shared by many machines or private to one process. See ``docs/tiers-valkey.md``.

One key a block; its value is the 512 bytes of the frame header and the stored bytes. The server forgets on its own (a
TTL on every key, its eviction policy), so that what is known of its residency is a hint. Whatever goes wrong between
here and there is an ``Outcome``, never an exception, and costs at most the deadline.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

from tierkv.clock import Clock, Deadline, SystemClock
from tierkv.errors import ConfigError, TierError
from tierkv.frame import HEADER_BYTES, FrameHeader
from tierkv.ids import BlockKey, KeyPrefix
from tierkv.tier import ClearResult, DoneCallback, Item, Outcome, Presence, TierCaps, Usage, Want
from tierkv.tiers import valkey_exchange as exchange
from tierkv.tiers.valkey_dial import DEFAULT_LIMIT_BYTES, Dialer, Greeting
from tierkv.tiers.valkey_embedded import EmbeddedServer
from tierkv.tiers.valkey_pool import Loan, Pool
from tierkv.tiers.valkey_resp import Connection
from tierkv.tiers.valkey_stream import LinkError, LinkGarbled, LinkLost, LinkRefused, Patience
from tierkv.tiers.valkey_url import EMBEDDED, Address, TlsFiles, parse_address
from tierkv.tiers.valkey_usage import UsageGauge, usage_of
from tierkv.units import GIB, MIB

DAY_S = 86_400.0

_CONTROL_S = 1.0
"""Time for what has no deadline of its own: ``delete`` and the greeting at the start."""
_EMBEDDED_START_S = 10.0
_FORGOTTEN_KEYS = 65_536
_MAX_GARBLED = 3
"""Replies out of step that one batch puts up with."""

_Exchange = Callable[[Loan, "deque[int]", Patience], None]


@dataclass(frozen=True, slots=True)
class _Node:
    """One server and the connections to it."""

    address: Address
    pool: Pool


class ValkeyTier:
    """A ``BlobTier`` on one server. Thread-safe: up to ``workers`` threads work at once, others wait their turn.

    ``address`` is described in ``valkey_url``. ``ttl_s`` is the life of a block whose item has none of its own.
    ``embedded_bytes`` is the memory of the embedded server. Raises ``ConfigError`` for options that make no sense.
    """

    name = "valkey"

    def __init__(
        self,
        address: str,
        *,
        workers: int = 4,
        ttl_s: float = DAY_S,
        connect_timeout_s: float = 1.0,
        tls_files: TlsFiles | None = None,
        embedded_bytes: int = GIB,
        clock: Clock | None = None,
    ) -> None:
        _at_least("valkey.connections", workers, 1)
        _at_least("valkey.ttl", ttl_s, 0.001)
        _at_least("valkey.connect_timeout_s", connect_timeout_s, 0.001)
        self._clock = clock or SystemClock()
        self._ttl_s = ttl_s
        self._connect_timeout_s = connect_timeout_s
        self._tls_files = tls_files or TlsFiles()
        self._embedded: EmbeddedServer | None = None
        self._node: _Node | None = None
        if address == EMBEDDED:
            _at_least("valkey.embedded_memory", embedded_bytes, 4 * MIB)
            self._embedded = EmbeddedServer(embedded_bytes)
        self.caps = TierCaps(
            persistent=self._embedded is None,
            scannable=False,
            evicts_itself=True,
            workers=workers,
            max_block_bytes=DEFAULT_LIMIT_BYTES,
        )
        if self._embedded is None:
            self._node = self._make_node(parse_address(address))
        self._lock = threading.Lock()
        self._trouble = "" if self._embedded is None else "not started"
        self._forgotten: dict[BlockKey, None] = {}
        self._gauge = UsageGauge(self._clock)

    # ---- life

    def start(self) -> None:
        """Greets the server. One that is absent is no error; one that will never serve us is a ``TierError``."""
        if self._embedded is not None:
            self._embedded.start(Deadline(SystemClock(), _EMBEDDED_START_S))
            self._node = self._make_node(Address(path=self._embedded.path))
        self._gauge.expire()
        assert self._node is not None
        try:
            with self._node.pool.lend(Patience(self._soon())):
                self._trouble = ""
        except LinkRefused as error:
            self.close(self._soon())
            raise TierError(f"{self._node.address}: {error}") from error
        except LinkError as error:
            self._trouble = str(error)

    def close(self, deadline: Deadline) -> None:
        """Closes the connections and ends the embedded server."""
        if self._node is not None:
            self._node.pool.close()
        if self._embedded is not None:
            self._embedded.stop()

    # ---- blocks

    def get_into(self, wants: Sequence[Want], deadline: Deadline, on_done: DoneCallback) -> None:
        """Reads each block: pipelined GETs, straight into its buffers."""
        known: Sequence[int] = range(len(wants))
        if self._forgotten:
            known = self._known([want.key for want in wants])
            for i in sorted(set(range(len(wants))) - set(known)):
                on_done(i, Outcome.MISS)

        def fetch(loan: Loan, todo: deque[int], patience: Patience) -> None:
            exchange.fetch(loan, wants, todo, patience, on_done)

        self._work(known, deadline, fetch, on_done, garbled=Outcome.CORRUPT)

    def put_from(self, items: Sequence[Item], deadline: Deadline, on_done: DoneCallback) -> None:
        """Writes each block: pipelined SETs, straight from its buffers. ``DONE`` after the server's OK."""

        def report(i: int, outcome: Outcome) -> None:
            if outcome is Outcome.DONE and self._forgotten:
                with self._lock:
                    self._forgotten.pop(items[i].key, None)
            on_done(i, outcome)

        tell = report if self._forgotten else on_done

        def store(loan: Loan, todo: deque[int], patience: Patience) -> None:
            exchange.store(loan, items, todo, self._ttl_s, patience, tell)

        self._work(range(len(items)), deadline, store, on_done, garbled=Outcome.UNAVAILABLE)

    def probe(self, keys: Sequence[BlockKey], deadline: Deadline) -> list[Presence]:
        """Asks for each key, pipelined. What is not answered in time is ``UNKNOWN``."""
        seen = [Presence.ABSENT] * len(keys)
        known = self._known(keys)
        for i in known:
            seen[i] = Presence.UNKNOWN

        def found(i: int, there: bool) -> None:
            seen[i] = Presence.PRESENT if there else Presence.ABSENT

        def ask(loan: Loan, todo: deque[int], patience: Patience) -> None:
            exchange.exists(loan, keys, todo, patience, found)

        self._work(known, deadline, ask, _nobody, garbled=Outcome.UNAVAILABLE)
        return seen

    # ---- forgetting

    def delete(self, keys: Sequence[BlockKey]) -> None:
        """Forgets the keys. While the server cannot be reached, this process at least finds them no more.

        It remembers up to 65,536 such keys and removes them when the server is back; beyond that the oldest may be
        found again.
        """
        left = self._unlink(keys, self._soon())
        if not left:
            return
        with self._lock:
            for key in left:
                self._forgotten[key] = None
            while len(self._forgotten) > _FORGOTTEN_KEYS:
                del self._forgotten[next(iter(self._forgotten))]

    def clear(self, prefix: KeyPrefix, deadline: Deadline) -> ClearResult:
        """Scans the server for the prefix and removes what it finds. Complete only when the scan came to its end."""
        removed = 0
        node = self._node
        if node is None:
            return ClearResult(0, complete=False, detail=self._trouble, kept=("the server is not started",))

        def count(more: int) -> None:
            nonlocal removed
            removed += more

        try:
            patience = Patience(deadline)
            # A scan cannot be taken up again on another connection, so it starts on one that is not stale.
            with node.pool.lend(patience, fresh=True) as loan:
                trouble = exchange.unlink_prefix(loan, prefix, patience, count)
        except LinkError as error:
            trouble = str(error)
        self._gauge.expire()
        if trouble:
            self._trouble = trouble
            return ClearResult(
                removed,
                complete=False,
                detail=trouble,
                kept=(f"{node.address} may still hold blocks: {trouble}",),
            )
        with self._lock:
            self._forgotten = {key: None for key in self._forgotten if not key.startswith(prefix)}
        return ClearResult(removed, complete=True)

    def scan(self) -> Iterator[FrameHeader]:
        """Nothing: what lies on the server is asked for key by key."""
        return iter(())

    # ---- what is known of the server

    def usage(self) -> Usage:
        """Asks the server at most every two seconds, and waits for it no longer than a tenth of one."""
        return self._gauge.read(self._ask_usage)

    def status(self) -> dict[str, object]:
        node, greeting = self._node, None
        opened = idle = dialled = 0
        if node is not None:
            greeting, dialled = node.pool.greeting, node.pool.dialled
            opened, idle = node.pool.counts()
        return {
            "address": EMBEDDED if self._embedded is not None else str(node.address) if node else "",
            "embedded_socket": self._embedded.path if self._embedded is not None else "",
            "reachable": not self._trouble,
            "trouble": self._trouble,
            "server_version": greeting.version if greeting else "",
            "server_read_only": greeting.read_only if greeting else False,
            "max_value_bytes": greeting.limit_bytes if greeting else DEFAULT_LIMIT_BYTES,
            "ttl_s": self._ttl_s,
            "connections_open": opened,
            "connections_idle": idle,
            "connections_made": dialled,
            "keys_to_forget": len(self._forgotten),
        }

    # ---- inside

    def _make_node(self, address: Address) -> _Node:
        dialer = Dialer(address, self._tls_files)

        def dial(patience: Patience) -> tuple[Connection, Greeting]:
            connection, greeting = dialer.dial(patience)
            if greeting.limit_bytes != self.caps.max_block_bytes:
                self.caps = replace(self.caps, max_block_bytes=greeting.limit_bytes)
            return connection, greeting

        return _Node(address, Pool(dial, self.caps.workers + 1, self._connect_timeout_s))

    def _by_node(self, indexes: Sequence[int]) -> list[tuple[_Node, deque[int]]]:
        """The positions of a batch by the server that holds them: the seam where a cluster's slots will be."""
        return [(self._node, deque(indexes))] if self._node is not None and len(indexes) else []

    def _known(self, keys: Sequence[BlockKey]) -> Sequence[int]:
        """The positions of the keys that were not deleted."""
        if not self._forgotten:
            return range(len(keys))
        with self._lock:
            return [i for i, key in enumerate(keys) if key not in self._forgotten]

    def _work(
        self,
        indexes: Sequence[int],
        deadline: Deadline,
        step: _Exchange,
        fail: DoneCallback,
        garbled: Outcome,
    ) -> None:
        if self._node is None:
            for i in indexes:
                fail(i, Outcome.UNAVAILABLE)  # not started
        for node, todo in self._by_node(indexes):
            self._work_off(node, todo, deadline, step, fail, garbled)

    def _work_off(
        self,
        node: _Node,
        todo: deque[int],
        deadline: Deadline,
        step: _Exchange,
        fail: DoneCallback,
        garbled: Outcome,
    ) -> None:
        """Runs ``step`` until ``todo`` is empty: once more on a fresh connection when one was lost in the middle.

        That is right because reading, writing and deleting a block twice is the same as once. A reply out of step
        costs its connection and its block; the rest goes on.
        """
        patience = Patience(deadline)
        lost, out_of_step, fresh = False, 0, False
        while todo:
            lent = False
            try:
                with node.pool.lend(patience, fresh=fresh) as loan:
                    lent = True
                    step(loan, todo, patience)
                self._trouble = loan.complaint
                return
            except LinkLost as error:
                failure: LinkError = error
                if lent and not lost:
                    lost = fresh = True
                    continue
            except LinkGarbled as error:
                failure = error
                out_of_step += 1
                fresh = True
                fail(todo.popleft(), garbled)
                if out_of_step < _MAX_GARBLED:
                    continue
            except LinkError as error:
                failure = error
            self._trouble = str(failure)
            outcome = Outcome.UNAVAILABLE if isinstance(failure, LinkGarbled) else failure.outcome
            while todo:
                fail(todo.popleft(), outcome)

    def _unlink(self, keys: Sequence[BlockKey], deadline: Deadline) -> list[BlockKey]:
        """Gives the keys that may still be there."""
        gone: set[int] = set()

        def unlink(loan: Loan, todo: deque[int], patience: Patience) -> None:
            exchange.unlink(loan, keys, todo, patience, gone.add)

        self._work(range(len(keys)), deadline, unlink, _nobody, garbled=Outcome.UNAVAILABLE)
        return [key for i, key in enumerate(keys) if i not in gone]

    def _unlink_forgotten(self, deadline: Deadline) -> None:
        """What could not be deleted before. A block that is stored again meanwhile may go with it: a miss."""
        with self._lock:
            keys = list(self._forgotten)
        left = set(self._unlink(keys, deadline))
        with self._lock:
            for key in keys:
                if key not in left:
                    self._forgotten.pop(key, None)

    def _ask_usage(self, deadline: Deadline) -> Usage | None:
        """``None`` when the server does not answer in time."""
        node = self._node
        if node is None:
            return None
        if self._forgotten:
            self._unlink_forgotten(deadline)
        answers: list[Usage] = []

        def ask(loan: Loan, todo: deque[int], patience: Patience) -> None:
            info = loan.connection.ask(patience, b"INFO")
            blocks = loan.connection.ask(patience, b"DBSIZE")
            todo.clear()
            usage = usage_of(info, blocks, loan.greeting.limit_bytes - HEADER_BYTES)
            if usage is not None:
                answers.append(usage)

        self._work([0], deadline, ask, _nobody, garbled=Outcome.UNAVAILABLE)
        return answers[0] if answers else None

    def _soon(self) -> Deadline:
        return Deadline(self._clock, _CONTROL_S)


def _nobody(_i: int, _outcome: Outcome) -> None:
    """For work whose failures are seen in what it left undone."""


def _at_least(key: str, value: float, low: float) -> None:
    if not value >= low:
        raise ConfigError(key, value, f"it must be at least {low:g}")
