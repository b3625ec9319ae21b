"""Getting blocks back: match, load, lease, and the copy into an engine's pages."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from tierkv.ceiling import Tally
from tierkv.clock import Deadline, patience_s
from tierkv.copier import KnownMemory, PagedKV, told_once
from tierkv.due import Due
from tierkv.executor import await_result, deliver
from tierkv.explaining import Explainer
from tierkv.explanation import Explanation
from tierkv.handles import Lease, SlotMemory, SlotRef
from tierkv.ids import FamilyId, Slot
from tierkv.index import USABLE, Space
from tierkv.jobs import Priority
from tierkv.keys import Adapter, Chain
from tierkv.layout import GroupKind
from tierkv.loans import LentRun
from tierkv.logs import RareLog
from tierkv.paging import Pages, copies_of
from tierkv.prefetching import Fetched, Prefetch
from tierkv.retaining import raise_run, stay_of
from tierkv.retention import Retention

if TYPE_CHECKING:
    from tierkv.store import TieredStore

_MATCHES, _MATCHED = ("match_total",), ("match_blocks_total",)


@dataclass(frozen=True)
class Match:
    """The longest run of blocks that need not be computed, as far as is known here and now."""

    chain: Chain = field(repr=False)
    blocks: int
    tokens: int
    """Never more than the prompt's length - 1; 0 when the engine already has as much."""
    tiers: Mapping[str, int]
    """How many of the blocks each tier holds."""


class Reader:
    """Matches, loads, leases. Thread-safe."""

    def __init__(self, store: TieredStore) -> None:
        self._store = store
        self._whose = next(store.askers)
        self._leases = store.leases
        self._clock = store.clock
        self._log = RareLog(store.clock)
        self._lease_s = store.limits.lease_deadline_s
        self._load_s = store.limits.load_deadline_s
        self.memory: SlotMemory = store.host
        self._engines = KnownMemory(store.copier)
        self.tally = Tally()
        """What this client has asked and got."""

    def peek(self, space: Space, chain: Chain) -> Match:
        """What a match would find. Nothing is counted, for nobody asks in order to load."""
        families = self._store.catalog.find_run(space, chain.hashes, USABLE)
        blocks = self._usable(space, chain, families)
        tokens = _tokens(chain, blocks, 0)
        return Match(chain, blocks, tokens, self._store.catalog.held_by_tier(families[:blocks]))

    def match(self, space: Space, chain: Chain, local_computed: int) -> Match:
        """From the local index, at once."""
        catalog = self._store.catalog
        families = catalog.find_run(space, chain.hashes, USABLE)
        blocks = self._usable(space, chain, families)
        tokens = _tokens(chain, blocks, local_computed)
        if not chain.asked:
            own = local_computed // chain.namespace.layout.block_tokens
            question = self._store.ceiling.look(
                (space.tally, self.tally), space.mark, chain.hashes, own, blocks
            )
            if question is not None:
                chain.asked.append(question)
                self._note(chain, own)
        if not tokens:
            blocks = 0
        self._store.counters.add_all(((1, _MATCHES), (blocks, _MATCHED)))
        return Match(chain, blocks, tokens, catalog.held_by_tier(families[:blocks]))

    def explain(self, space: Space, chain: Chain, adapters: Iterable[Adapter]) -> Explanation:
        """Why blocks of the chain are a miss."""
        families = self._store.catalog.find_run(space, chain.hashes, USABLE)
        usable = self._usable(space, chain, families) if space.trailing else None
        return Explainer(self._store, space, chain, adapters).explain(usable)

    def _usable(self, space: Space, chain: Chain, families: Sequence[FamilyId]) -> int:
        """Blocks that an engine can go on from, with at least one token left to compute."""
        if not space.trailing:
            return len(families)
        layout = chain.namespace.layout
        if any(group.kind is GroupKind.STATE for group in layout.groups):
            # A state stands exactly at a block's end: it cannot be taken back by one token.
            families = families[: max(0, chain.num_tokens - 1) // layout.block_tokens]
        return self._store.catalog.usable_blocks(space, families)

    def prefetch(
        self,
        space: Space,
        chain: Chain,
        timeout_s: float | None,
        local_computed: int,
        retention: Retention | None,
    ) -> Future[Match]:
        """Brings a chain into host RAM and holds nothing afterwards."""
        future: Due[Match] = Due(self._deadline(timeout_s))
        retain = self._retainer(space, chain, retention)

        def done(fetched: Fetched) -> None:
            retain(len(fetched.families))
            self._store.catalog.unpin(fetched.pinned)
            deliver(future, self.match(space, chain, local_computed))

        self._begin(space, chain, future, Priority.PREFETCH, done)
        return future

    def load(
        self, space: Space, chain: Chain, timeout_s: float | None, owner: str, retention: Retention | None
    ) -> Future[Lease]:
        """Brings a chain into host RAM and leases what is there."""
        return self._load(space, chain, self._deadline(timeout_s), owner, retention)

    def _load(
        self, space: Space, chain: Chain, deadline: Deadline, owner: str, retention: Retention | None
    ) -> Future[Lease]:
        future: Due[Lease] = Due(deadline)
        retain = self._retainer(space, chain, retention)

        def done(fetched: Fetched) -> None:
            lease = self._lease(space, chain, fetched, owner)
            retain(len(lease))
            if not deliver(future, lease):
                lease.release()

        self._begin(space, chain, future, Priority.ONBOARD, done)
        return future

    def load_now(
        self, space: Space, chain: Chain, timeout_s: float | None, owner: str, retention: Retention | None
    ) -> Lease:
        """The same, and waits for it; starts nothing when all blocks are in host RAM."""
        start_s = self._clock.now_s()
        timeout_s = self._load_s if timeout_s is None else timeout_s
        lease = self._lease_resident(space, chain, timeout_s, owner, retention)
        if lease is not None:
            return lease
        left_s = timeout_s - (self._clock.now_s() - start_s)
        deadline = Deadline(self._clock, left_s)
        return await_result(self._load(space, chain, deadline, owner, retention), Lease.release)

    def _retainer(self, space: Space, chain: Chain, retention: Retention | None) -> Callable[[int], None]:
        """What a request that loads wishes for the leading blocks that it gets, from now on. Raises ``ConfigError``."""
        catalog = self._store.catalog
        if retention is None or retention.no_store:
            return lambda blocks: None
        stay = stay_of(catalog, retention, loads=True)

        def retain(blocks: int) -> None:
            raise_run(catalog, space, chain.hashes, range(blocks), stay)
            self._store.reaper.kick_if_short()  # copies with an earlier end are to be written anew

        return retain

    def _lease_resident(
        self, space: Space, chain: Chain, timeout_s: float, owner: str, retention: Retention | None
    ) -> Lease | None:
        """A lease at once when all blocks are in host RAM, else ``None``."""
        if space.trailing:
            return None  # which blocks an engine can go on from takes a closer look
        retain = None if retention is None else self._retainer(space, chain, retention)
        families = self._store.catalog.lease_run(space, chain.hashes, patience_s(timeout_s))
        if families is None:
            return None
        if retain is not None:
            retain(len(families))
        question = chain.asked.pop() if chain.asked else None
        if question is None:
            self._note(chain, 0)
        self._store.ceiling.give_all((space.tally, self.tally), len(families), question)
        return self._out(chain, families, owner)

    def _deadline(self, timeout_s: float | None) -> Deadline:
        return Deadline(self._clock, self._load_s if timeout_s is None else timeout_s)

    def _begin(
        self,
        space: Space,
        chain: Chain,
        future: Due[Any],
        priority: Priority,
        done: Callable[[Fetched], None],
    ) -> None:
        prefetch = Prefetch(
            self._store, space, chain, len(chain), future.deadline, priority, done, self._whose
        )
        future.ends_by(prefetch.expire)
        prefetch.begin()

    def _lease(self, space: Space, chain: Chain, fetched: Fetched, owner: str) -> Lease:
        catalog, families = self._store.catalog, fetched.families
        blocks = self._usable(space, chain, families)
        shortfall = fetched.shortfall
        if blocks < len(families):
            families = families[:blocks]
            shortfall = "no_place_to_go_on"
        catalog.touch_and_unpin(families, fetched.pinned[blocks:])
        self._count(space, chain, families, fetched.sources, shortfall)
        lease = self._out(chain, families, owner)
        colder = Counter(fetched.sources[family] for family in families if family in fetched.sources)
        lease.colder = {catalog.tiers[tier].name: count for tier, count in colder.items()}
        return lease

    def _count(
        self,
        space: Space,
        chain: Chain,
        families: Sequence[FamilyId],
        sources: Mapping[FamilyId, int],
        shortfall: str | None,
    ) -> None:
        """A request has got these; the blocks that it had itself count neither as hits nor as misses."""
        store = self._store
        question = chain.asked.pop() if chain.asked else None
        if question is None:
            self._note(chain, 0)
        tallies = (space.tally, self.tally)
        store.ceiling.give(tallies, space.mark, chain.hashes, len(families), question)
        own = question.own if question is not None else 0
        if shortfall is not None and len(chain) > max(own, len(families)):
            count = len(chain) - max(own, len(families))
            store.counters.add(count, "missed_blocks_total", shortfall)
        colder = Counter(sources[family] for family in families[own:] if family in sources)
        for tier, count in colder.items():
            name = store.catalog.tiers[tier].name
            store.counters.add(count, "hit_blocks_total", name)
            store.counters.add(count * chain.namespace.layout.block_tokens, "hit_tokens_total", name)

    def _note(self, chain: Chain, own: int) -> None:
        """A new request, for whoever records them: it has not looked before."""
        traffic = self._store.traffic
        if traffic.listened and chain.hashes:
            namespace = chain.namespace
            traffic.note(namespace.digest, chain.hashes, chain.num_tokens, namespace.layout.block_tokens, own)

    def _out(self, chain: Chain, families: Sequence[FamilyId], owner: str) -> Lease:
        lease = Lease(self, chain, families, owner, self._clock.now_s() + self._lease_s)
        self._leases.add(lease)
        self._store.hot.note(chain.namespace.digest, chain.hashes, len(families))
        return lease

    def slot_of(self, family: FamilyId, part: int) -> Slot:
        """Where a leased family's part lies."""
        return self._store.catalog.slot_of(family, part)

    def expects(self, family: FamilyId) -> int:
        """Bitmap of the parts that make a leased family whole."""
        return int(self._store.catalog.index.expected[family])

    def take_back(self, lease: Lease) -> None:
        """The end of a lease."""
        self._leases.remove(lease)
        self._store.catalog.unpin(lease.families)

    def let_go(self, families: Sequence[FamilyId]) -> None:
        """The tail of a lease that was shortened."""
        self._store.catalog.unpin(families)

    def onboard(
        self,
        lease: Lease,
        kv: PagedKV,
        pages: Pages,
        parts: tuple[int, ...],
        skip: int,
        on_layer: Callable[[int, int], None] | None,
    ) -> Future[bool]:
        """Starts the copy into the engine's pages."""
        store = self._store
        self._engines.check(kv, lease.chain.namespace)
        future: Future[bool] = Future()
        lent = lease.lessor if isinstance(lease.lessor, LentRun) else None
        found = copies_of(lent or self, lease, pages, parts, skip)
        if found is None:
            store.counters.add(1, "onboarded_parts_total", "failed")
            deliver(future, False)
            return future
        refs = [ref for ref, _ in found]
        copies = [copy for _, copy in found]
        found.clear()

        def done(error: str | None) -> None:
            copies.clear()
            held = not lease.released and self._still_hold(refs, lent)
            damaged = store.catalog.damaged if lent is None else ()
            sound = not damaged or damaged.isdisjoint(ref.family for ref in refs)
            whole = error is None and held and sound
            if error is not None:
                self._log.warning(
                    "onboard", "the copy of %d parts into an engine failed: %s", len(refs), error
                )
            store.counters.add(len(refs), "onboarded_parts_total", "done" if whole else "failed")
            deliver(future, whole)

        tell = told_once(done, lambda: store.counters.add(1, "stray_completions_total", "onboard"))
        store.copier.onboard(kv, copies, tell, on_layer)
        return future

    def _still_hold(self, refs: Sequence[SlotRef], lent: LentRun | None) -> bool:
        """After a copy: whether the slots hold what was leased."""
        if lent is not None:
            return all(lent.still_holds(ref.family, ref.part) for ref in refs)
        generation = self._store.host.generation
        return all(generation(ref.slot) == ref.generation for ref in refs)


def _tokens(chain: Chain, blocks: int, local_computed: int) -> int:
    tokens = max(0, min(blocks * chain.namespace.layout.block_tokens, chain.num_tokens - 1))
    return tokens if tokens > local_computed else 0
