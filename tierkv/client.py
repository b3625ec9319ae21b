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
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from tierkv.clearing import ClearReport, Evicted
from tierkv.clock import Deadline
from tierkv.copier import CopyPart, PagedKV, ReadyEvent
from tierkv.errors import ClosedError, ForkError, HandleError, IdentityError
from tierkv.events import Event
from tierkv.flush import FlushReport, flush_tier
from tierkv.handles import Draft, Lease, Sealed
from tierkv.ids import EVERYTHING, FamilyId, KeyPrefix
from tierkv.index import IN_HOST, USABLE, Space
from tierkv.intake import Retention, Stored
from tierkv.jobs import Priority
from tierkv.keys import Chain, Extras, Namespace, NamespaceSpec, tenant_prefix
from tierkv.layout import GroupKind
from tierkv.prefetching import Prefetch
from tierkv.store import TieredStore

Payload = Any
"""Anything with the buffer protocol that is C-contiguous: bytes, memoryview, numpy array."""


@dataclass(frozen=True)
class Match:
    """The longest run of blocks that need not be computed, as far as is known here and now."""

    chain: Chain
    blocks: int
    tokens: int
    """Never more than the prompt's length - 1; 0 when the engine already has as much."""
    tiers: Mapping[str, int]
    """How many of the blocks each tier holds."""


class OpenNamespace:
    """A namespace that the store has opened, with the ranks that live on this host."""

    def __init__(self, namespace: Namespace, space: Space, ranks: tuple[int, ...]) -> None:
        self.namespace = namespace
        self.space = space
        self.ranks = ranks

    def chain(
        self,
        tokens: Any = None,
        *,
        engine_hashes: Sequence[bytes] | None = None,
        num_tokens: int | None = None,
        extras: Extras | None = None,
    ) -> Chain:
        """See ``tierkv.keys.Namespace.chain``."""
        return self.namespace.chain(
            tokens, engine_hashes=engine_hashes, num_tokens=num_tokens, extras=extras if extras is not None else Extras()
        )

    def parts_of(self, rank: int) -> tuple[int, ...]:
        """The parts that a rank holds, in the order of the layer groups."""
        layout = self.namespace.layout
        return tuple(layout.part_index(group, rank) for group in range(len(layout.groups)))


class Client:
    """The verbs. Made by ``tierkv.open``; ``close`` it, or use it as a context manager."""

    def __init__(self, store: TieredStore, *, owner: str = "client") -> None:
        self.store = store
        self._owner = owner
        self._pid = os.getpid()
        self._open: dict[bytes, OpenNamespace] = {}
        self._pins: dict[tuple[bytes, bytes], Lease] = {}
        self._asleep = False

    # -- names ----------------------------------------------------------------------------------------------------

    def open_namespace(self, spec: NamespaceSpec, *, ranks: Sequence[int] | None = None) -> OpenNamespace:
        """Declares what blocks look like. ``ranks``: those on this host (default: all); a block is whole when all of
        their parts are there."""
        self._check()
        namespace = Namespace(spec)
        known = self._open.get(namespace.digest)
        if known is not None and (ranks is None or tuple(ranks) == known.ranks):
            return known
        chosen = tuple(range(spec.layout.ranks)) if ranks is None else tuple(ranks)
        for part in spec.layout.parts:
            self.store.host.arena.stride_for(part.payload_bytes)  # refused here rather than at every put
        opened = OpenNamespace(namespace, self.store.catalog.claim(namespace, chosen), chosen)
        self._open[namespace.digest] = opened
        return opened

    def _space(self, chain: Chain) -> Space:
        self._check()
        opened = self._open.get(chain.namespace.digest)
        if opened is None:
            raise IdentityError("the chain's namespace was not opened with this client; call open_namespace first")
        return opened.space

    # -- finding --------------------------------------------------------------------------------------------------

    def match(self, chain: Chain, *, local_computed: int = 0) -> Match:
        """Answers from the local index at once; asks no server. ``local_computed``: tokens that the engine has itself."""
        space = self._space(chain)
        catalog = self.store.catalog
        families = catalog.find_run(space, chain.hashes, USABLE)
        blocks = self._usable(space, chain, families)
        tokens = self._tokens(chain, blocks, local_computed)
        held = {
            column.name: sum(
                1
                for family in families[:blocks]
                if (expected := catalog.index.expected[family])
                and catalog.index.residency[column.number][family] & expected == expected
            )
            for column in catalog.tiers
        }
        self.store.counters.add(1, "match_total")
        self.store.counters.add(blocks, "match_blocks_total")
        return Match(chain, blocks if tokens else 0, tokens, held)

    def _usable(self, space: Space, chain: Chain, families: Sequence[FamilyId]) -> int:
        """Blocks that an engine can go on from, with at least one token left to compute."""
        layout = chain.namespace.layout
        if any(group.kind is GroupKind.STATE for group in layout.groups):
            # A state stands exactly at a block's end: it cannot be taken back by one token.
            families = families[: max(0, chain.num_tokens - 1) // layout.block_tokens]
        return self.store.catalog.usable_blocks(space, families)

    def _tokens(self, chain: Chain, blocks: int, local_computed: int) -> int:
        tokens = max(0, min(blocks * chain.namespace.layout.block_tokens, chain.num_tokens - 1))
        return tokens if tokens > local_computed else 0

    def prefetch(
        self, chain: Chain, *, timeout_s: float | None = None, local_computed: int = 0
    ) -> Future[Match]:
        """Brings what the colder tiers have into host RAM, as far as the deadline allows; asks the remote tier about
        the rest. Holds nothing when it is over."""
        future: Future[Match] = Future()

        def done(families: list[FamilyId]) -> None:
            self.store.catalog.unpin(families)
            future.set_result(self.match(chain, local_computed=local_computed))

        self._begin(chain, timeout_s, Priority.PREFETCH, done)
        return future

    def load_async(self, chain: Chain, *, timeout_s: float | None = None, owner: str | None = None) -> Future[Lease]:
        """Prefetch, then a lease on what is there (perhaps none: its length is 0)."""
        future: Future[Lease] = Future()
        space = self._space(chain)

        def done(families: list[FamilyId]) -> None:
            lease = self._lease(space, chain, families, owner)
            if not future.set_running_or_notify_cancel():
                lease.release()
                return
            future.set_result(lease)

        self._begin(chain, timeout_s, Priority.ONBOARD, done)
        return future

    def load(self, chain: Chain, *, timeout_s: float | None = None, owner: str | None = None) -> Lease:
        """Like ``load_async``, and waits for it: until the deadline at the latest. When all blocks are in host RAM
        this is quick and starts nothing."""
        space = self._space(chain)
        hashes = chain.hashes
        families = self.store.catalog.pin_run(space, hashes, IN_HOST)
        if len(families) == len(hashes):
            return self._lease(space, chain, families, owner)
        self.store.catalog.unpin(families)
        return self.load_async(chain, timeout_s=timeout_s, owner=owner).result()

    def _begin(
        self, chain: Chain, timeout_s: float | None, priority: Priority, done: Callable[[list[FamilyId]], None]
    ) -> None:
        space = self._space(chain)
        limit = len(chain)
        deadline = Deadline(
            self.store.clock, self.store.limits.load_deadline_s if timeout_s is None else timeout_s
        )
        Prefetch(self.store, space, chain, limit, deadline, priority, done).begin()

    def _lease(self, space: Space, chain: Chain, families: list[FamilyId], owner: str | None) -> Lease:
        store = self.store
        catalog = store.catalog
        blocks = self._usable(space, chain, families) if space.trailing else len(families)
        if blocks < len(families):
            catalog.unpin(families[blocks:])
            families = families[:blocks]
        if families:
            catalog.touch(families)
        lease = Lease(
            store.leases.next_number(),
            chain,
            families,
            self._tokens(chain, blocks, 0),
            owner or self._owner,
            store.clock.now_s() + store.limits.lease_deadline_s,
            store.host,
            catalog.slot_of,
            self._give_back,
        )
        store.leases.add(lease)
        store.counters.add(blocks, "lease_blocks_total")
        return lease

    def _give_back(self, lease: Lease) -> None:
        self.store.leases.remove(lease)
        self.store.catalog.unpin(lease.families)

    # -- storing --------------------------------------------------------------------------------------------------

    def reserve(
        self, chain: Chain, *, first: int = 0, count: int | None = None, rank: int = 0, result: Stored | None = None
    ) -> Draft | None:
        """Slots for those of the blocks ``first .. first + count`` that host RAM lacks; ``None`` when none is needed or
        there is no room. Write, ``seal``, then ``commit``."""
        space = self._space(chain)
        opened = self._open[chain.namespace.digest]
        result = Stored() if result is None else result
        last = len(chain) if count is None else first + count
        if not 0 <= first <= last <= len(chain):
            raise HandleError(f"blocks {first} to {last}: the chain has {len(chain)} full blocks")
        if self._asleep:
            result.drop("asleep", last - first)
            return None
        draft = self.store.intake.reserve(space, chain, range(first, last), opened.parts_of(rank), result)
        if result.dropped:
            self._count_drops(result)
            self.store.reaper.kick()
        return draft

    def commit(
        self, sealed: Sealed, chain: Chain, *, retention: Retention | None = None, result: Stored | None = None
    ) -> Stored:
        """Registers sealed blocks; from now on they can be matched."""
        space = self._space(chain)
        result = Stored() if result is None else result
        already = dict(result.dropped)
        self.store.intake.register(space, sealed, retention or _KEEP, result)
        self.store.counters.add(result.stored, "stored_blocks_total", "host")
        for reason, count in result.dropped.items():
            self.store.counters.add(count - already.get(reason, 0), "dropped_blocks_total", "host", reason)
        if self.store.edges:
            self.store.reaper.kick_if_short()
        return result

    def put(
        self,
        chain: Chain,
        payloads: Sequence[Payload],
        *,
        first: int = 0,
        rank: int = 0,
        priority: int = 0,
        ttl_s: float | None = None,
    ) -> Stored:
        """Copies blocks into host RAM and registers them: block ``first + i`` is ``payloads[i]``, one buffer, or one for
        each layer group. Never waits for a colder tier: what finds no room is dropped and counted."""
        result = Stored()
        draft = self.reserve(chain, first=first, count=len(payloads), rank=rank, result=result)
        if draft is None:
            return result
        with draft:
            blocks = draft.blocks
            for i, position in enumerate(blocks.positions):
                given = payloads[position - first]
                buffers = given if isinstance(given, list | tuple) else (given,)
                if len(buffers) != len(blocks.parts):
                    raise HandleError(f"block {position}: {len(buffers)} buffers for {len(blocks.parts)} layer groups")
                for part, buffer in zip(blocks.parts, buffers, strict=True):
                    _fill(draft.view(i, part), buffer, position)
            sealed = draft.seal()
        expires_s = None if ttl_s is None else self.store.clock.now_s() + ttl_s
        if expires_s is not None:
            self.store.upkeep.has_expiry = True
        return self.commit(sealed, chain, retention=Retention(priority, expires_s), result=result)

    def _count_drops(self, result: Stored) -> None:
        for reason, count in result.dropped.items():
            self.store.counters.add(count, "dropped_blocks_total", "host", reason)

    # -- engines' paged memory ------------------------------------------------------------------------------------

    def offload(
        self,
        kv: PagedKV,
        pages: Sequence[Sequence[Sequence[int]]],
        chain: Chain,
        *,
        first: int = 0,
        rank: int = 0,
        ready: ReadyEvent | None = None,
        retention: Retention | None = None,
    ) -> Future[Stored]:
        """Copies blocks out of an engine's paged memory and registers them. Returns at once.

        ``pages[i][group]`` are the pages of block ``first + i`` in that layer group, in the order of their tokens. The
        copy waits for ``ready``. The pages must not be reused before the future is done, and they may be after.
        """
        result = Stored()
        future: Future[Stored] = Future()
        draft = self.reserve(chain, first=first, count=len(pages), rank=rank, result=result)
        if draft is None:
            future.set_result(result)
            return future
        blocks = draft.blocks
        layout = chain.namespace.layout
        parts = [
            CopyPart(layout.parts[part].group, draft.view(i, part), tuple(pages[position - first][layout.parts[part].group]))
            for i, position in enumerate(blocks.positions)
            for part in blocks.parts
        ]

        def done(error: str | None) -> None:
            parts.clear()
            if error is not None:
                draft.drop()
                result.drop("copy_failed", len(blocks.positions))
                self._count_drops(Stored(dropped={"copy_failed": len(blocks.positions)}))
                future.set_result(result)
                return
            future.set_result(self.commit(draft.seal(), chain, retention=retention, result=result))

        self.store.copier.offload(kv, parts, ready, done)
        return future

    def onboard(
        self,
        lease: Lease,
        kv: PagedKV,
        pages: Sequence[Sequence[Sequence[int]]],
        *,
        rank: int = 0,
        skip: int = 0,
        on_layer: Callable[[int, int], None] | None = None,
    ) -> Future[bool]:
        """Copies the lease's blocks into an engine's pages, layer by layer. ``pages[i][group]`` are the pages of block i.

        ``skip``: the first k engine blocks (in units of the layout's ``hash_tokens``) are left alone. The future gives
        True when all bytes are there. The caller keeps the lease until then.
        """
        layout = lease.chain.namespace.layout
        opened = self._open[lease.chain.namespace.digest]
        parts = []
        for i in range(min(len(lease), len(pages))):
            for part in opened.parts_of(rank):
                group = layout.parts[part].group
                hashes_a_page = layout.groups[group].engine_block_tokens // layout.hash_tokens
                skipped = max(0, skip - i * layout.engine_blocks) // hashes_a_page
                chosen = tuple(pages[i][group])
                if skipped < len(chosen):
                    parts.append(CopyPart(group, self.store.host.view(lease.ref(i, part).slot), chosen, skipped))
        refs = [lease.ref(i, part) for i in range(min(len(lease), len(pages))) for part in opened.parts_of(rank)]
        future: Future[bool] = Future()

        def done(error: str | None) -> None:
            parts.clear()
            generation = self.store.host.generation
            whole = error is None and not lease.released and all(generation(ref.slot) == ref.generation for ref in refs)
            if whole:
                self.store.counters.add(len(lease), "onboarded_blocks_total")
            else:
                self.store.counters.add(1, "onboard_failed_total")
            future.set_result(whole)

        self.store.copier.onboard(kv, parts, done, on_layer)
        return future

    # -- keeping and taking out -----------------------------------------------------------------------------------

    def pin(self, chain: Chain, *, timeout_s: float | None = None) -> int:
        """Loads a chain and keeps its blocks in host RAM until ``unpin``; returns how many are pinned."""
        self.unpin(chain)
        lease = self.load(chain, timeout_s=timeout_s, owner="pin")
        lease.at_s = float("inf")
        if not len(lease):
            lease.release()
            return 0
        self._pins[self._pin_name(chain)] = lease
        return len(lease)

    def unpin(self, chain: Chain) -> int:
        """Lets a pinned chain go; returns how many blocks were pinned."""
        lease = self._pins.pop(self._pin_name(chain), None) if chain.hashes else None
        if lease is None:
            return 0
        blocks = len(lease)
        lease.release()
        return blocks

    def _pin_name(self, chain: Chain) -> tuple[bytes, bytes]:
        return chain.namespace.digest, chain.hashes[-1] if chain.hashes else b""

    def flush(self, tier: str, *, timeout_s: float = 30.0) -> Future[FlushReport]:
        """Writes every block that is in host RAM and not in the tier, heads of chains first."""
        self._check()
        return flush_tier(self.store, tier, timeout_s)

    def evict(self, tier: str, *, namespace: Namespace | None = None) -> Evicted:
        """Takes blocks out of one tier that another tier also holds. Last copies stay: ``flush`` first, or ``clear``."""
        self._check()
        prefix = EVERYTHING if namespace is None else namespace.prefix
        return self.store.clearing.evict(self.store.tier_number(tier), prefix)

    def clear(
        self, *, namespace: Namespace | None = None, tenant_salt: str | None = None, timeout_s: float = 30.0
    ) -> Future[ClearReport]:
        """Forgets everything, a namespace, or all of a tenant, in every tier. Nothing of it can be matched as soon as
        this returns; the future tells what each tier did."""
        self._check()
        if namespace is not None and tenant_salt is not None:
            raise IdentityError("give a namespace or a tenant's salt, not both")
        prefix: KeyPrefix = EVERYTHING
        if namespace is not None:
            prefix = namespace.prefix
        elif tenant_salt is not None:
            prefix = tenant_prefix(tenant_salt)
        for name, lease in list(self._pins.items()):
            if lease.chain.namespace.prefix.startswith(prefix):
                self._pins.pop(name, None)
                lease.release()
        return self.store.clearing.clear(prefix, timeout_s)

    def bump_epoch(self, namespace: Namespace, *, timeout_s: float = 30.0) -> tuple[OpenNamespace, Future[ClearReport]]:
        """The weights have changed in place: blocks of the old epoch are cleared, the new namespace is opened."""
        opened = self._open.get(namespace.digest)
        ranks = opened.ranks if opened is not None else None
        cleared = self.clear(namespace=namespace, timeout_s=timeout_s)
        spec = replace(namespace.spec, weights_epoch=namespace.spec.weights_epoch + 1)
        return self.open_namespace(spec, ranks=ranks), cleared

    def sleep(self, *, keep: bool, timeout_s: float = 30.0) -> Future[Evicted]:
        """Frees host RAM while the engine sleeps. ``keep`` writes what is only there to the first persistent tier first;
        without it, what has no copy elsewhere is dropped. Nothing is stored until ``wake``."""
        self._check()
        self._asleep = True
        future: Future[Evicted] = Future()

        def leave(_: object = None) -> None:
            gone = self.store.clearing.evict(self.store.tier_number("host"), EVERYTHING)
            if not keep:
                gone.evicted += self.store.clearing.drop_host()
                gone.kept_last_copy = 0
            future.set_result(gone)

        target = next((edge.name for edge in self.store.edges.values() if edge.tier.caps.persistent), None)
        if keep and target is not None:
            self.flush(target, timeout_s=timeout_s).add_done_callback(leave)
        else:
            leave()
        return future

    def wake(self) -> None:
        """Stores again."""
        self._asleep = False

    # -- facts and life -------------------------------------------------------------------------------------------

    def report_prefill(self, tokens: int, seconds: float) -> None:
        """Tells how long the engine took to compute that many tokens; ``break_even`` decides by it."""
        self.store.prefill.observe(tokens, seconds)

    def stats(self) -> dict[str, object]:
        self._check()
        return self.store.stats()

    def events(self, after: int = 0, *, timeout_s: float = 0.0) -> list[Event]:
        """Events with sequence numbers above ``after``, oldest first; waits up to ``timeout_s`` for the first."""
        self._check()
        return self.store.events.wait(after, timeout_s) if timeout_s else self.store.events.since(after)

    def close(self, timeout_s: float | None = None) -> None:
        """Releases what this client holds and closes the store. Harmless the second time."""
        if self._pid != os.getpid():
            return
        for lease in list(self._pins.values()):
            lease.release()
        self._pins.clear()
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


class AsyncVerbs:
    """``await client.aio.load(chain)``: the same verbs for asyncio. The work is done by the store's threads."""

    def __init__(self, client: Client) -> None:
        self._client = client

    async def prefetch(self, chain: Chain, **options: Any) -> Match:
        return await _awaited(self._client.prefetch(chain, **options))

    async def load(self, chain: Chain, **options: Any) -> Lease:
        return await _awaited(self._client.load_async(chain, **options))

    async def put(self, chain: Chain, payloads: Sequence[Payload], **options: Any) -> Stored:
        import asyncio

        return await asyncio.to_thread(partial(self._client.put, chain, payloads, **options))

    async def offload(self, kv: PagedKV, pages: Any, chain: Chain, **options: Any) -> Stored:
        return await _awaited(self._client.offload(kv, pages, chain, **options))

    async def onboard(self, lease: Lease, kv: PagedKV, pages: Any, **options: Any) -> bool:
        return await _awaited(self._client.onboard(lease, kv, pages, **options))

    async def flush(self, tier: str, **options: Any) -> FlushReport:
        return await _awaited(self._client.flush(tier, **options))

    async def clear(self, **options: Any) -> ClearReport:
        return await _awaited(self._client.clear(**options))


async def _awaited(future: Future[Any]) -> Any:
    import asyncio

    return await asyncio.wrap_future(future)


_KEEP = Retention()


def _fill(view: memoryview, buffer: Payload, position: int) -> None:
    """Copies a payload into a slot with numpy, which lets other threads run meanwhile."""
    import numpy as np

    source = np.frombuffer(buffer, dtype=np.uint8)
    if source.nbytes != len(view):
        raise HandleError(f"block {position}: {source.nbytes} bytes given, its part has {len(view)}")
    np.copyto(np.frombuffer(view, dtype=np.uint8), source)
