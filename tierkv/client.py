"""What engines and people call: the embedded client of a store in the same process.

    client = tierkv.open(host_capacity="4 GiB", nvme_path="/var/cache/tierkv")
    space = client.open_namespace(tierkv.NamespaceSpec(weights=..., layout=..., engine="my-engine"))
    chain = space.chain(tokens)
    with client.load(chain) as lease: ...          # blocks in host RAM, pinned

A cache may always answer "miss": no verb raises for what can happen in operation. Verbs that take time return a
``concurrent.futures.Future``; ``client.aio`` has the same ones as coroutines. Every verb may be called from any thread.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import replace

from tierkv.aio import AsyncVerbs
from tierkv.arguments import checked
from tierkv.clearing import ClearReport, Evicted
from tierkv.clock import Clock
from tierkv.copier import Copier, PagedKV, ReadyEvent
from tierkv.errors import ClosedError, ForkError, HandleError, IdentityError
from tierkv.events import Event
from tierkv.explanation import Explanation
from tierkv.filling import Payload
from tierkv.flush import FlushReport, empty_host, flush_tier
from tierkv.handles import Draft, Lease, Sealed
from tierkv.health import Health
from tierkv.ids import EVERYTHING, KeyPrefix
from tierkv.intake import Stored
from tierkv.keys import Adapter, Chain, Namespace, NamespaceSpec, chain_of_blocks, tenant_prefix
from tierkv.namespaces import OpenNamespace, opened_by_others
from tierkv.paging import Pages
from tierkv.reading import Match, Reader
from tierkv.retention import KEEP, Retention, check_ttl
from tierkv.store import TieredStore
from tierkv.watching import DEFAULT_S, Announcement, Watched, Watching
from tierkv.writing import Writer

MOST_ADAPTERS = 256


@checked
class Client:
    """The verbs. Made by ``tierkv.open``; ``close`` it, or use it as a context manager.

    After a ``fork`` the child's copy raises ``ForkError``, after ``close`` every verb raises ``ClosedError``.
    """

    def __init__(self, store: TieredStore, *, owner: str = "client") -> None:
        self.store = store
        self._owner = owner
        self._pid = os.getpid()
        self._open: dict[bytes, OpenNamespace] = {}
        self._adapters: dict[Adapter, None] = {}
        """Adapters that chains were made with, the oldest first; for explanations."""
        self._reader = Reader(store)
        self._writer = Writer(store)
        self.watching = Watching(store, self._reader)
        """What it has announced and waits for."""

    @property
    def clock(self) -> Clock:
        """The store's."""
        return self.store.clock

    @property
    def copier(self) -> Copier:
        """What moves bytes between an engine's pages and host RAM; it knows which memory it can reach."""
        return self.store.copier

    # -- names ----------------------------------------------------------------------------------------------------

    def open_namespace(self, spec: NamespaceSpec, *, ranks: Sequence[int] | None = None) -> OpenNamespace:
        """Declares what blocks look like. ``ranks``: those on this host (default: as opened before, else all); a
        block is whole when all of their parts are there. Raises ``ConfigError`` when a block does not fit into the
        arena."""
        self._check()
        namespace = Namespace(spec)
        known = self._open.get(namespace.digest)
        if known is not None and (ranks is None or tuple(ranks) == known.ranks):
            return known
        chosen = tuple(range(spec.layout.ranks)) if ranks is None else tuple(ranks)
        self.store.host.arena.check_fit(part.payload_bytes for part in spec.layout.parts)
        opened = OpenNamespace(namespace, self.store.claim(namespace, chosen), chosen)
        self.store.clearing.drop_unfit(opened.space)
        self._open[namespace.digest] = opened
        return opened

    def opened(self, digest: bytes) -> OpenNamespace | None:
        """The namespace of that digest, if this client has opened it."""
        self._check()
        return self._open.get(digest)

    def adopt(self, digest: bytes) -> OpenNamespace | None:
        """The namespace of that digest, if any client of this store has opened it."""
        self._check()
        opened = self._open.get(digest) or opened_by_others(self.store.catalog.index, digest)
        if opened is not None:
            self._open[digest] = opened
        return opened

    def _opened(self, chain: Chain) -> OpenNamespace:
        if self._pid != os.getpid() or self.store.closed:
            self._check()
        opened = self._open.get(chain.namespace.digest)
        if opened is None:
            raise IdentityError(
                "the chain's namespace was not opened with this client; call open_namespace first"
            )
        if chain.opening is not None and chain.opening.extras.adapter is not None:
            self._note_adapter(chain.opening.extras.adapter)
        return opened

    def _note_adapter(self, adapter: Adapter) -> None:
        if adapter not in self._adapters:
            self._adapters[adapter] = None
            if len(self._adapters) > MOST_ADAPTERS:
                self._adapters.pop(next(iter(self._adapters)), None)

    # -- finding --------------------------------------------------------------------------------------------------

    def match(self, chain: Chain, *, local_computed: int = 0) -> Match:
        """Answers from the local index at once and asks no server. ``local_computed``: tokens the engine has itself."""
        return self._reader.match(self._opened(chain).space, chain, local_computed)

    def prefetch(
        self,
        chain: Chain,
        *,
        timeout_s: float | None = None,
        local_computed: int = 0,
        retention: Retention | None = None,
    ) -> Future[Match]:
        """Brings what the colder tiers have into host RAM, as far as the deadline allows; asks the remote tier about
        the rest. Holds nothing when it is over. ``retention``: as for ``load``."""
        space = self._opened(chain).space
        return self._reader.prefetch(space, chain, timeout_s, local_computed, retention)

    def load_async(
        self,
        chain: Chain,
        *,
        timeout_s: float | None = None,
        owner: str | None = None,
        retention: Retention | None = None,
    ) -> Future[Lease]:
        """Prefetch, then a lease on what is there (perhaps nothing: its length is 0). ``retention`` is what this
        request wishes for the blocks that it gets: they are kept at least so."""
        space = self._opened(chain).space
        return self._reader.load(space, chain, timeout_s, owner or self._owner, retention)

    def load(
        self,
        chain: Chain,
        *,
        timeout_s: float | None = None,
        owner: str | None = None,
        retention: Retention | None = None,
    ) -> Lease:
        """Like ``load_async``, and waits for it until the deadline: ``timeout_s`` from now, else
        ``limits.load_deadline``. When all blocks are in host RAM this takes microseconds and starts nothing. With
        ``timeout_s=0`` it gets what is in host RAM. The store's own lock is waited for until 10 ms after the deadline;
        when threads contend so long, a small ``timeout_s`` gets less than is there, for the reason ``deadline``."""
        space = self._opened(chain).space
        return self._reader.load_now(space, chain, timeout_s, owner or self._owner, retention)

    def explain(
        self,
        chain: Chain | None = None,
        *,
        namespace: Namespace | OpenNamespace | None = None,
        hashes: Sequence[bytes | str] = (),
    ) -> Explanation:
        """Why blocks are a miss: of a chain, or of block hashes (32 bytes or their hex) of a namespace, in the order of
        the prompt. ``str()`` of the answer tells it in a few lines. Takes milliseconds and asks no server. It also
        tells of the same prompt under other names, tenants' among them: it is an operator's verb."""
        if chain is None:
            if namespace is None:
                raise IdentityError("explain needs a chain, or block hashes and their namespace")
            chain = chain_of_blocks(_named(namespace), hashes)
        space = self._opened(chain).space
        return self._reader.explain(space, chain, self._adapters)

    # -- storing --------------------------------------------------------------------------------------------------

    def reserve(
        self,
        chain: Chain,
        *,
        first: int = 0,
        count: int | None = None,
        rank: int = 0,
        absent: Sequence[int] = (),
        retention: Retention = KEEP,
        result: Stored | None = None,
    ) -> Draft | None:
        """Slots for those of the blocks ``first .. first + count`` that host RAM lacks; ``None`` when none is needed or
        there is no room. Write into them, ``seal``, then ``commit``. ``absent``: layer groups that these blocks will
        not have on any rank (a window that has moved on). ``retention`` raises what of them is there already; give it
        to ``commit`` too."""
        opened = self._opened(chain)
        last = len(chain) if count is None else first + count
        result = Stored() if result is None else result
        parts = opened.parts_of(rank, absent)
        return self._writer.reserve(opened.space, chain, range(first, last), parts, retention, result)

    def commit(
        self,
        sealed: Sealed,
        chain: Chain,
        *,
        absent: Sequence[int] = (),
        retention: Retention = KEEP,
        result: Stored | None = None,
    ) -> Stored:
        """Registers sealed blocks; from now on they can be matched."""
        opened = self._opened(chain)
        if sealed.namespace_digest != chain.namespace.digest:
            raise HandleError(
                "the sealed blocks are of another namespace than the chain; commit them with theirs"
            )
        result = Stored() if result is None else result
        return self._writer.commit(opened.space, sealed, retention, opened.expected(absent), result)

    def put(
        self,
        chain: Chain,
        payloads: Sequence[Payload],
        *,
        first: int = 0,
        rank: int = 0,
        absent: Sequence[int] = (),
        retention: Retention = KEEP,
    ) -> Stored:
        """Copies blocks into host RAM and registers them: block ``first + i`` is ``payloads[i]``, one buffer, or a list
        of one for each layer group. Never waits for a colder tier: what finds no room is dropped and counted."""
        opened = self._opened(chain)
        parts = opened.parts_of(rank, absent)
        return self._writer.put(
            opened.space, chain, first, payloads, parts, retention, opened.expected(absent)
        )

    # -- telling others -------------------------------------------------------------------------------------------

    def announce(
        self, chain: Chain, *, first: int = 0, count: int | None = None, timeout_s: float = DEFAULT_S
    ) -> Announcement:
        """Says that the blocks ``first .. first + count`` are about to be stored, so that others who want them can
        wait. Ends when they are all there, with ``cancel``, after ``timeout_s``, and with this client."""
        space = self._opened(chain).space
        return self.watching.announce(space, chain, _range(chain, first, count), timeout_s)

    def watch(
        self, chain: Chain, *, count: int | None = None, grace_s: float = 0.0, timeout_s: float = DEFAULT_S
    ) -> Future[Watched]:
        """Waits until the first ``count`` blocks (default: all) are usable, as long as somebody has announced the next
        one; for the announcement of a block it waits ``grace_s``. The future tells how that ended and what is there:
        at once when there is nothing to wait for. Nothing is held for the waiter, and no server is asked."""
        space = self._opened(chain).space
        return self.watching.watch(space, chain, len(chain) if count is None else count, grace_s, timeout_s)

    # -- engines' paged memory ------------------------------------------------------------------------------------

    def offload(
        self,
        kv: PagedKV,
        pages: Pages,
        chain: Chain,
        *,
        first: int = 0,
        rank: int = 0,
        absent: Sequence[int] = (),
        ready: ReadyEvent | None = None,
        retention: Retention = KEEP,
    ) -> Future[Stored]:
        """Copies blocks out of an engine's paged memory and registers them. Returns at once.

        ``pages[i][group]`` are the pages of block ``first + i`` in that layer group, in the order of their tokens. The
        copy waits for ``ready``. The pages may be reused when the future is done, not before.
        """
        opened = self._opened(chain)
        parts = opened.parts_of(rank, absent)
        return self._writer.offload(
            opened.space, chain, first, kv, pages, parts, retention, opened.expected(absent), ready
        )

    def onboard(
        self,
        lease: Lease,
        kv: PagedKV,
        pages: Pages,
        *,
        rank: int = 0,
        skip: int = 0,
        on_layer: Callable[[int, int], None] | None = None,
    ) -> Future[bool]:
        """Copies the lease's blocks into an engine's pages, layer by layer; ``pages[i][group]`` are those of block i.

        ``skip``: the first k engine blocks (in units of the layout's ``hash_tokens``) are left alone, and so is a group
        whose pages are given as empty. ``on_layer(group, layer)`` is called when a layer has arrived. The future gives
        True when all bytes are there. The caller keeps the lease until then.
        """
        opened = self._opened(lease.chain)
        return self._reader.onboard(lease, kv, pages, opened.parts_of(rank), skip, on_layer)

    # -- keeping and taking out -----------------------------------------------------------------------------------

    def pin(
        self,
        chain: Chain,
        *,
        timeout_s: float | None = None,
        ttl_s: float | None = None,
        owner: str | None = None,
    ) -> int:
        """Loads a chain and keeps its blocks in host RAM, until ``unpin`` or for ``ttl_s``. Returns how many are pinned
        now: those from the head on that were found and that ``host.pin_budget`` has room for. Pinning a chain again
        takes the place of its earlier pin. A pin does not put off the end of a block's ``ttl_s``."""
        if ttl_s is not None:
            check_ttl(ttl_s)
        pins, owner = self.store.pins, owner or self._owner
        most = pins.at_most(self._opened(chain).space, chain)
        lease = self.load(replace(chain, hashes=chain.hashes[:most]), timeout_s=timeout_s, owner="pin")
        found = len(lease) + (len(chain) - most if len(lease) == most else 0)
        pinned = pins.add(chain, lease, owner, ttl_s)
        if pinned < found:
            pins.note_refused(found - pinned, owner)
        return pinned

    def unpin(self, chain: Chain) -> int:
        """Lets a pinned chain go; returns how many blocks were pinned."""
        self._opened(chain)
        return self.store.pins.remove(chain)

    def flush(self, tier: str, *, timeout_s: float = 30.0) -> Future[FlushReport]:
        """Writes every block that is in host RAM and not in the tier, heads of chains first."""
        self._check()
        return flush_tier(self.store, tier, timeout_s)

    def evict(
        self, tier: str, *, namespace: Namespace | OpenNamespace | None = None, timeout_s: float = 30.0
    ) -> Evicted:
        """Takes out of a tier what another tier holds too, as far as time goes. Last copies stay: ``flush`` first."""
        self._check()
        prefix = EVERYTHING if namespace is None else _named(namespace).prefix
        return self.store.clearing.evict(self.store.tier_number(tier), prefix, timeout_s)

    def clear(
        self,
        *,
        namespace: Namespace | OpenNamespace | None = None,
        tenant_salt: str | None = None,
        timeout_s: float = 30.0,
    ) -> Future[ClearReport]:
        """Forgets everything, a namespace, or all of a tenant, in every tier. Nothing of it can be matched as soon as
        this returns; the future tells what each tier did."""
        self._check()
        if namespace is not None and tenant_salt is not None:
            raise IdentityError("give a namespace or a tenant's salt, not both")
        prefix: KeyPrefix = EVERYTHING
        if namespace is not None:
            prefix = _named(namespace).prefix
        elif tenant_salt is not None:
            prefix = tenant_prefix(tenant_salt)
        self.store.pins.remove_under(prefix)
        return self.store.clearing.clear(prefix, timeout_s)

    def bump_epoch(
        self, namespace: Namespace | OpenNamespace, *, timeout_s: float = 30.0
    ) -> tuple[OpenNamespace, Future[ClearReport]]:
        """The weights have changed in place: blocks of the old epoch are cleared, the new namespace is opened."""
        namespace = _named(namespace)
        opened = self._open.get(namespace.digest)
        cleared = self.clear(namespace=namespace, timeout_s=timeout_s)
        spec = replace(namespace.spec, weights_epoch=namespace.spec.weights_epoch + 1)
        return self.open_namespace(spec, ranks=opened.ranks if opened is not None else None), cleared

    def sleep(self, *, keep: bool, timeout_s: float = 30.0) -> Future[Evicted]:
        """Frees host RAM while the engine sleeps. ``keep`` first writes what is only there to the first persistent
        tier; what could not be written stays. Without it all of host RAM is dropped. Nothing is stored until
        ``wake``."""
        self._check()
        self._writer.asleep = True
        return empty_host(self.store, timeout_s) if keep else self.store.clearing.drop_host()

    def wake(self) -> None:
        """Stores again."""
        self._check()
        self._writer.asleep = False

    # -- facts and life -------------------------------------------------------------------------------------------

    def report_prefill(self, tokens: int, seconds: float) -> None:
        """Tells how long the engine took to compute that many tokens; ``break_even`` decides by it."""
        self._check()
        self.store.prefill.observe(tokens, seconds)

    def stats(self) -> dict[str, object]:
        """Plain values: fill of the tiers, edges, counters (see ``docs/metrics.md``); ``asked`` is what requests asked
        for, got, and would have got from an endless cache, ``asked_here`` the same for this client."""
        self._check()
        return {**self.store.stats(), "asked_here": self._reader.tally.values()}

    def health(self) -> Health:
        """``ok``, ``degraded`` or ``unhealthy``, with the reasons in sentences. Asks no tier and takes microseconds."""
        self._check()
        return self.store.health()

    def events(self, after: int = 0, *, timeout_s: float = 0.0) -> list[Event]:
        """Events with sequence numbers above ``after``, oldest first; waits up to ``timeout_s`` for the first."""
        self._check()
        return self.store.events.wait(after, timeout_s) if timeout_s else self.store.events.since(after)

    def close(self, timeout_s: float | None = None) -> None:
        """Releases what this client holds and closes the store. Harmless the second time, and in a forked child."""
        if self._pid == os.getpid():
            self.store.pins.remove_under(EVERYTHING)
            self.store.close(timeout_s)

    @property
    def aio(self) -> AsyncVerbs:
        """The verbs that take time, as coroutines."""
        return AsyncVerbs(self)

    def _check(self) -> None:
        if self._pid != os.getpid():
            raise ForkError(
                f"this client was made in process {self._pid} and is used in its child {os.getpid()}; "
                "open a client after the fork"
            )
        if self.store.closed:
            raise ClosedError("this client was closed")

    def __enter__(self) -> Client:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _range(chain: Chain, first: int, count: int | None) -> range:
    return range(first, len(chain) if count is None else first + count)


def _named(namespace: Namespace | OpenNamespace) -> Namespace:
    return namespace.namespace if isinstance(namespace, OpenNamespace) else namespace
