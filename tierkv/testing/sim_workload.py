"""What clients do, by a seed: they store, load, lease, cancel, clear, sleep, at any moment and in any order.

Clients are lanes of the simulation, so their calls come between (and, at locks and in tiers' calls, inside) all other
events. After each event the store's books are checked, and every byte that a client gets is compared with the model.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from tierkv.clearing import ClearReport
from tierkv.handles import Draft, Lease
from tierkv.keys import Chain
from tierkv.layout import GroupKind
from tierkv.namespaces import OpenNamespace
from tierkv.reading import Match
from tierkv.testing.invariants import LeaseWatch, Losses, check_idle, check_invariants
from tierkv.testing.sim_engine import engine_memory, some_retention, some_wish
from tierkv.testing.sim_model import Clear, Model, check_bytes
from tierkv.testing.sim_world import World, bytes_of
from tierkv.tier import ClearResult

CLIENTS = 3
MAX_BLOCKS = 8
PATIENCE_S = 120.0
"""Simulated: whatever a client waits for must have come by then."""


@dataclass
class _Waiting:
    """A future and what to do with its result."""

    what: str
    future: Future[Any]
    take: Callable[[Any], None]
    cancelled: Callable[[], None]


class Workload:
    """Drives a world. ``run`` does some hundred calls, ``finish`` brings everything to rest.

    ``patient``: no deadline of a client is short, and time does not pass as long as anything can happen. Then every
    wait ends because of what was waited for, or somebody has forgotten to say that it has come.
    """

    def __init__(self, world: World, *, patient: bool = False) -> None:
        self.world = world
        self.client = world.client
        self.model = Model(
            truthful_hints=not any(tier.faults.false_presence for tier in world.tiers.values())
        )
        self.watch = LeaseWatch()
        self.losses = Losses(world.store)
        self.done: dict[str, int] = {}
        """How often each verb was called, and what came of it."""
        self._patient = patient
        self._dice = random.Random(f"workload {world.shape.seed}")
        self.spaces = [self.client.open_namespace(spec) for spec in world.specs()]
        self.prompts = [self._prompt() for _ in range(2)]
        self._leases: list[Lease] = []
        self._drafts: list[tuple[Draft, Chain, tuple[int, ...]]] = []
        self._waiting: list[_Waiting] = []
        for number in range(CLIENTS):
            world.sim.open_lane(f"client {number}", 1)

    # -- the loop -------------------------------------------------------------------------------------------------

    def run(self, calls: int = 120) -> None:
        sim = self.world.sim
        for _ in range(calls):
            sim.run(f"client {self._dice.randrange(CLIENTS)}", self._some_call(), lambda _: None)
            for _ in range(self._dice.randrange(6)):
                if self._patient and not sim.busy():
                    break
                sim.step()
                self.check()
            if self._patient and self._dice.random() < 0.3:
                self._until_nothing_moves()
        self._until(lambda: not self._clients_busy())

    def _until_nothing_moves(self) -> None:
        self.world.sim.settle()
        self.check()
        late = [one.what for one in self._waiting if one.what != "flush"]  # a full tier may rest for a second
        assert not late, f"nothing can happen any more, and {late} still wait; {self.world.sim}"

    def _clients_busy(self) -> bool:
        lanes = self.world.sim._lanes
        return any(
            lanes[f"client {number}"].waiting or lanes[f"client {number}"].busy for number in range(CLIENTS)
        )

    def _until(self, condition: Callable[[], bool]) -> None:
        def checked() -> bool:
            self.check()
            return condition()

        self.world.sim.run_until(checked, seconds=PATIENCE_S)

    def check(self) -> None:
        """Called when no event is going on."""
        with self.world.sim.quiet():
            self._collect()
            check_invariants(self.world.store, self.world.under_way())
            self.watch.check()
            lost = next(self.losses.orphans(), None)
            assert lost is None, lost

    def _collect(self) -> None:
        for one in [one for one in self._waiting if one.future.done()]:
            self._waiting.remove(one)
            if one.future.cancelled():
                one.cancelled()
            else:
                one.take(one.future.result())

    def finish(self) -> None:
        """Lets go of everything, waits until all is at rest, and looks at the books of an idle store."""
        self.client.wake()
        while self._leases:
            self._release()
        self._drafts.clear()
        self._until(lambda: not self._waiting)
        while self._leases:
            self._release()
        self.world.sim.pass_time(40.0)  # incomplete families expire
        self._until(lambda: not self.world.sim.busy())
        self.world.store.upkeep.make_rounds()
        self._until(lambda: not self.world.sim.busy())
        with self.world.sim.quiet():
            check_idle(self.world.store)

    # -- calls ----------------------------------------------------------------------------------------------------

    def _some_call(self) -> Callable[[], None]:
        verbs: list[tuple[int, Callable[[], None]]] = [
            (30, self._put),
            (6, self._reserve),
            (6, self._end_draft),
            (8, self._offload),
            (8, self._match),
            (22, self._load),
            (8, self._prefetch),
            (20, self._release),
            (4, self._onboard),
            (4, self._cancel),
            (2, self._clear),
            (5, self._evict),
            (4, self._flush),
            (3, self._move_down),
            (1, self._sleep),
            (2, self._wake),
            (1, self._bump_epoch),
            (2, self._lose_remotely),
            (2, self._let_time_pass),
        ]
        verb = self._dice.choices([verb for _, verb in verbs], [weight for weight, _ in verbs])[0]

        def call() -> None:
            self._count(verb.__name__)
            verb()

        return call

    def _count(self, what: str, number: int = 1) -> None:
        self.done[what] = self.done.get(what, 0) + number

    def _prompt(self) -> list[int]:
        return [self._dice.randrange(1000) for _ in range(MAX_BLOCKS * 16 + 15)]

    def _chain(self) -> tuple[OpenNamespace, Chain]:
        """A prefix of one of the prompts, or one that leaves it halfway."""
        space = self._dice.choice(self.spaces)
        tokens = list(self._dice.choice(self.prompts))
        block_tokens = space.namespace.layout.block_tokens
        if self._dice.random() < 0.2:
            at = self._dice.randrange(MAX_BLOCKS) * block_tokens
            tokens[at:] = [1000] * (len(tokens) - at)
        length = self._dice.randrange(1, MAX_BLOCKS + 1) * block_tokens + self._dice.choice((0, 1, 5))
        return space, space.chain(tokens[:length])

    def _positions(self, chain: Chain) -> range:
        if self._dice.random() < 0.75:
            return range(len(chain))
        first = self._dice.randrange(len(chain))
        return range(first, self._dice.randrange(first, len(chain)) + 1)

    def _absent(self, space: OpenNamespace) -> tuple[int, ...]:
        groups = space.namespace.layout.groups
        return tuple(
            i
            for i, group in enumerate(groups)
            if group.kind is not GroupKind.FULL and self._dice.random() < 0.2
        )

    def _payloads(
        self, space: OpenNamespace, chain: Chain, position: int, parts: tuple[int, ...]
    ) -> list[bytes]:
        layout = space.namespace.layout
        return [
            bytes_of(
                space.namespace.block_key(chain.hashes[position], part), layout.parts[part].payload_bytes
            )
            for part in parts
        ]

    def _ranks(self, space: OpenNamespace) -> list[int]:
        """Mostly all of them; sometimes one rank does not come to store its share."""
        ranks = list(space.ranks)
        self._dice.shuffle(ranks)
        return ranks if self._dice.random() < 0.8 else ranks[:1]

    def _put(self) -> None:
        space, chain = self._chain()
        positions = self._positions(chain)
        absent = self._absent(space)
        retention = some_retention(self._dice)
        for rank in self._ranks(space):
            parts = space.parts_of(rank, absent)
            payloads = [self._payloads(space, chain, position, parts) for position in positions]
            given = range(0) if retention.no_store else positions
            self.model.begin(chain, given)
            stored = self.client.put(
                chain,
                payloads,
                first=positions.start,
                rank=rank,
                absent=absent,
                retention=retention,
            )
            self.model.end(chain, given, stored=True)
            total = stored.stored + stored.resident + sum(stored.dropped.values())
            assert total == len(positions), f"{len(positions)} blocks were given, {stored} were accounted for"
            self._count("blocks stored", stored.stored)

    def _reserve(self) -> None:
        space, chain = self._chain()
        rank = self._dice.choice(space.ranks)
        draft = self.client.reserve(chain, rank=rank, retention=some_retention(self._dice))
        if draft is not None and len(self._drafts) < 2:
            self._drafts.append((draft, chain, space.parts_of(rank)))

    def _end_draft(self) -> None:
        if not self._drafts:
            return
        draft, chain, parts = self._drafts.pop(self._dice.randrange(len(self._drafts)))
        choice = self._dice.randrange(4)
        if choice == 0:
            return  # garbage collected: the slots come back all the same
        if choice == 1:
            draft.drop()
            return
        space = self.client.open_namespace(chain.namespace.spec)
        for i, position in enumerate(draft.blocks.positions):
            for part, payload in zip(parts, self._payloads(space, chain, position, parts), strict=True):
                draft.view(i, part)[:] = payload
        sealed = draft.seal()
        if choice == 2 and self._dice.random() < 0.3:
            return  # so are sealed blocks
        retention = some_retention(self._dice)
        whole = range(0 if retention.no_store else len(chain))
        self.model.begin(chain, whole)
        self.client.commit(sealed, chain, retention=retention)
        self.model.end(chain, whole, stored=True)

    def _offload(self) -> None:
        space, chain = self._chain()
        rank = self._dice.choice(space.ranks)
        positions = self._positions(chain)
        retention = some_retention(self._dice)
        kv, pages = engine_memory(self._dice, space, positions, rank, partial(self._payloads, space, chain))
        given = range(0) if retention.no_store else positions
        self.model.begin(chain, given)

        def end(stored: bool) -> None:
            self.model.end(chain, given, stored=stored)

        future = self.client.offload(kv, pages, chain, first=positions.start, rank=rank, retention=retention)
        self._wait("offload", future, lambda _: end(True), lambda: end(True))

    def _match(self) -> None:
        _, chain = self._chain()
        computed = self._dice.choice((0, 0, 16, 1000))
        reading = self.model.begin_reading(chain)
        match = self.client.match(chain, local_computed=computed)
        self.model.end_reading(reading)
        self.model.check_match(match, reading, computed)

    def _load(self) -> None:
        _, chain = self._chain()
        reading = self.model.begin_reading(chain)

        def take(lease: Lease) -> None:
            self.model.end_reading(reading)
            self.model.check_lease(lease, reading)
            self._count("blocks leased", len(lease))
            self.watch.add(lease)
            self._leases.append(lease)

        future = self.client.load_async(
            chain, timeout_s=self._timeout_s(), owner="a client", retention=some_wish(self._dice)
        )
        self._wait("load", future, take, lambda: self.model.end_reading(reading))

    def _timeout_s(self) -> float | None:
        return self._deadline_s(None, None, 5.0, 0.0, 0.003, 0.03)

    def _prefetch(self) -> None:
        _, chain = self._chain()
        reading = self.model.begin_reading(chain)

        def take(match: Match) -> None:
            self.model.end_reading(reading)
            self.model.check_match(match, reading)

        future = self.client.prefetch(chain, timeout_s=self._timeout_s(), retention=some_wish(self._dice))
        self._wait("load", future, take, lambda: self.model.end_reading(reading))

    def _release(self) -> None:
        if self._leases:
            lease = self._leases.pop(self._dice.randrange(len(self._leases)))
            check_bytes(lease)
            lease.release()

    def _onboard(self) -> None:
        held = [lease for lease in self._leases if len(lease)]
        if not held:
            return
        lease = self._dice.choice(held)
        self._leases.remove(lease)  # nobody else may release it now
        space = self.client.open_namespace(lease.chain.namespace.spec)
        rank = self._dice.choice(space.ranks)
        kv, pages = engine_memory(self._dice, space, range(len(lease)), rank, None)
        parts = space.parts_of(rank)
        there = [
            (i, part)
            for i, family in enumerate(lease.families)
            for part in parts
            if self.world.store.catalog.slot_of(family, part) >= 0
        ]

        def arrived(whole: bool) -> None:
            assert whole, "a copy from leased slots failed"
            layout = space.namespace.layout
            for i, part in there:
                group = layout.parts[part].group
                found = np.stack([layer.arrays[0][pages[i][group]] for layer in kv.groups[group]]).tobytes()
                assert [found] == self._payloads(space, lease.chain, i, (part,)), (
                    "wrong bytes in the engine's pages"
                )
            self._leases.append(lease)

        self._wait(
            "onboard",
            self.client.onboard(lease, kv, pages, rank=rank),
            arrived,
            lambda: self._leases.append(lease),
        )

    def _cancel(self) -> None:
        if self._waiting:
            self._dice.choice(self._waiting).future.cancel()

    def _clear(self) -> None:
        for _ in range(self._dice.randrange(3)):
            self._load()  # what is on its way while all is cleared must not come back
        space = self._dice.choice((None, *self.spaces))
        namespace = space.namespace if space is not None else None
        clear = self.model.begin_clear(namespace.digest if namespace is not None else None)
        future = self.client.clear(namespace=namespace, timeout_s=self._deadline_s(0.01, 30.0) or 30.0)
        self._end_clear(clear, future)

    def _end_clear(self, clear: Clear, future: Future[ClearReport]) -> None:
        self.model.end_clear(clear)

        def report(result: ClearReport) -> None:
            if not result.complete:
                self._count("clears that reached not all")
                self.model.not_cleared(clear)

        self._wait("clear", future, report, lambda: report(ClearReport({"host": ClearResult(0, False)})))

    def _evict(self) -> None:
        self.client.evict(self._dice.choice(["host", *self.world.tiers]))

    def _flush(self) -> None:
        if self.world.tiers:
            tier = self._dice.choice(list(self.world.tiers))
            timeout_s = self._deadline_s(0.01, 5.0) or 5.0
            self._wait("flush", self.client.flush(tier, timeout_s=timeout_s))

    def _move_down(self) -> None:
        """So that later loads have something to bring back."""
        if self.world.tiers:
            tier = self._dice.choice(list(self.world.tiers))
            self._wait(
                "flush",
                self.client.flush(tier),
                lambda _: self._count("moved", self.client.evict("host").evicted),
            )

    def _sleep(self) -> None:
        future = self.client.sleep(keep=self._dice.random() < 0.5, timeout_s=5.0)
        self._wait("flush", future)

    def _wake(self) -> None:
        self.client.wake()

    def _bump_epoch(self) -> None:
        old = self._dice.choice(self.spaces)
        clear = self.model.begin_clear(old.namespace.digest)
        new, future = self.client.bump_epoch(old.namespace)
        if old in self.spaces:
            self.spaces[self.spaces.index(old)] = new
        self._end_clear(clear, future)

    def _lose_remotely(self) -> None:
        """The server evicts on its own."""
        if "valkey" in self.world.tiers:
            truth = self.world.tiers["valkey"].truth
            truth.delete([key for key in list(truth.storage.frames) if self._dice.random() < 0.3])

    def _let_time_pass(self) -> None:
        if not self._patient:
            self.world.sim.clock.advance(self._dice.choice((0.01, 0.5, 3.0)))

    def _wait(
        self,
        what: str,
        future: Future[Any],
        take: Callable[[Any], None] = lambda _: None,
        cancelled: Callable[[], None] = lambda: None,
    ) -> None:
        self._waiting.append(_Waiting(what, future, take, cancelled))

    def _deadline_s(self, *choices: float | None) -> float | None:
        """One of several, unless clients are patient."""
        return PATIENCE_S if self._patient else self._dice.choice(choices)
