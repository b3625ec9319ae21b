"""What clients do, by a seed: they store, load, lease, pin, cancel, clear, sleep, and their tiers change their mood.

Every byte that a client gets is compared with the model, and every wait with its deadline.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from typing import Any

import numpy as np

from tierkv.clearing import ClearReport
from tierkv.handles import Draft, Lease
from tierkv.keys import Chain
from tierkv.layout import GroupKind
from tierkv.namespaces import OpenNamespace
from tierkv.reading import Match
from tierkv.testing.invariants import LeaseWatch
from tierkv.testing.sim_engine import engine_memory, some_retention, some_wish
from tierkv.testing.sim_model import Clear, Model, check_bytes
from tierkv.testing.sim_tier import Mood
from tierkv.testing.sim_waiting import Waiting
from tierkv.testing.sim_world import World, bytes_of

MAX_BLOCKS = 8
PATIENCE_S = 120.0
"""Simulated: whatever a client waits for must have come by then."""


class Clients:
    """Their verbs, and what they hold. One call after the other; ``tierkv.testing.sim_workload`` drives them."""

    def __init__(
        self, world: World, model: Model, dice: random.Random, moods: tuple[Mood, ...], *, patient: bool
    ) -> None:
        self.world = world
        self.client = world.client
        self.model = model
        self.watch = LeaseWatch()
        self.done: dict[str, int] = {}
        """How often each verb was called, and what came of it."""
        self.spaces: list[OpenNamespace] = []
        self.prompts: list[list[int]] = []
        self._patient = patient
        self._moods = moods
        self._dice = dice
        self._leases: list[Lease] = []
        self._drafts: list[tuple[Draft, Chain, tuple[int, ...]]] = []
        self._pinned: list[Chain] = []
        self._waiting: list[Waiting] = []
        self._jumped_s = 0.0

    def _some_call(self) -> Callable[[], None]:
        verbs: list[tuple[int, Callable[[], None]]] = [
            (30, self._put),
            (6, self._reserve),
            (6, self._end_draft),
            (8, self._offload),
            (8, self._match),
            (20, self._load),
            (6, self._load_now),
            (3, self._pin),
            (3, self._unpin),
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
            (3, self._change_mood),
            (2, self._let_time_pass),
        ]
        verb = self._dice.choices([verb for _, verb in verbs], [weight for weight, _ in verbs])[0]

        def call() -> None:
            if self.world.store.closed:
                return  # its process is gone
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

        def end(_: object) -> None:
            self.model.end(chain, given, stored=True)

        future = self.client.offload(kv, pages, chain, first=positions.start, rank=rank, retention=retention)
        # After a cancel nobody is told when the copy is over: its blocks may come for ever.
        self._wait("offload", future, end)

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

        timeout_s = self._timeout_s()
        future = self.client.load_async(
            chain, timeout_s=timeout_s, owner="a client", retention=some_wish(self._dice)
        )
        self._wait("load", future, take, lambda: self.model.end_reading(reading), within_s=timeout_s)

    def _load_now(self) -> None:
        """In the calling thread: others go on meanwhile."""
        if self._could_wait_for_itself():
            return
        _, chain = self._chain()
        reading = self.model.begin_reading(chain)
        lease = self.client.load(chain, timeout_s=self._timeout_s())
        self.model.end_reading(reading)
        self.model.check_lease(lease, reading)
        self.watch.add(lease)
        self._leases.append(lease)

    def _could_wait_for_itself(self) -> bool:
        """Inside another event, which stands still: it may be the read that the patient would wait for."""
        return self._patient and self.world.sim.inside

    def _pin(self) -> None:
        if self._could_wait_for_itself():
            return
        _, chain = self._chain()
        reading = self.model.begin_reading(chain)
        ttl_s = self._dice.choice((None, None, 2.0))
        pinned = self.client.pin(chain, timeout_s=self._timeout_s(), ttl_s=ttl_s)
        self.model.end_reading(reading)
        assert pinned <= reading.limit, f"{pinned} blocks are pinned, {reading.limit} can be there"
        self._pinned.append(chain)

    def _unpin(self) -> None:
        if self._pinned:
            chain = self._pinned.pop(self._dice.randrange(len(self._pinned)))
            assert 0 <= self.client.unpin(chain) <= len(chain)

    def _timeout_s(self) -> float | None:
        return self._deadline_s(None, None, 5.0, 0.0, 0.003, 0.03)

    def _prefetch(self) -> None:
        _, chain = self._chain()
        reading = self.model.begin_reading(chain)

        def take(match: Match) -> None:
            self.model.end_reading(reading)
            self.model.check_match(match, reading)

        timeout_s = self._timeout_s()
        future = self.client.prefetch(chain, timeout_s=timeout_s, retention=some_wish(self._dice))
        self._wait("load", future, take, lambda: self.model.end_reading(reading), within_s=timeout_s)

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
        timeout_s = self._deadline_s(0.01, 30.0) or 30.0
        future = self.client.clear(namespace=namespace, timeout_s=timeout_s)
        self._end_clear(clear, future, timeout_s)

    def _end_clear(self, clear: Clear, future: Future[ClearReport], within_s: float) -> None:
        self.model.end_clear(clear)

        def reached_not_all() -> None:
            self._count("clears that reached not all")
            self.model.not_cleared(clear)

        def report(done: Future[ClearReport]) -> None:
            if not done.cancelled() and not done.result().complete:
                reached_not_all()

        # At once, not when this client looks: others may find again what was not reached.
        future.add_done_callback(report)
        self._wait("clear", future, cancelled=reached_not_all, within_s=within_s)

    def _evict(self) -> None:
        space = self._dice.choice((None, None, *self.spaces))
        self.client.evict(self._dice.choice(["host", *self.world.tiers]), namespace=space)

    def _flush(self) -> None:
        if self.world.tiers:
            tier = self._dice.choice(list(self.world.tiers))
            timeout_s = self._deadline_s(0.01, 5.0) or 5.0
            self._wait("flush", self.client.flush(tier, timeout_s=timeout_s), within_s=timeout_s)

    def _move_down(self) -> None:
        """So that later loads have something to bring back."""
        if self.world.tiers:
            tier = self._dice.choice(list(self.world.tiers))
            self._wait(
                "flush",
                self.client.flush(tier),
                self._moved,
                within_s=30.0,
            )

    def _moved(self, _: object) -> None:
        if not self.world.store.closed:
            self._count("moved", self.client.evict("host").evicted)

    def _sleep(self) -> None:
        future = self.client.sleep(keep=self._dice.random() < 0.5, timeout_s=5.0)
        self._wait("flush", future, within_s=5.0)

    def _wake(self) -> None:
        self.client.wake()

    def _bump_epoch(self) -> None:
        old = self._dice.choice(self.spaces)
        clear = self.model.begin_clear(old.namespace.digest)
        new, future = self.client.bump_epoch(old.namespace)
        if old in self.spaces:
            self.spaces[self.spaces.index(old)] = new
        self._end_clear(clear, future, 30.0)

    def _lose_remotely(self) -> None:
        """The server evicts on its own."""
        if "valkey" in self.world.tiers:
            truth = self.world.tiers["valkey"].truth
            truth.delete([key for key in list(truth.storage.frames) if self._dice.random() < 0.3])

    def _let_time_pass(self) -> None:
        """The clock jumps: a machine that was suspended, say."""
        if not self._patient:
            seconds = self._dice.choice((0.01, 0.5, 0.5, 3.0, 3.0, 25.0))
            self._jumped_s += seconds
            self.world.sim.clock.advance(seconds)

    def _change_mood(self) -> None:
        """A tier falls ill, fills up, hangs, lies, or is well again."""
        if self.world.tiers and self._moods:
            tier = self._dice.choice(list(self.world.tiers.values()))
            mood = self._dice.choice((Mood.WELL, *self._moods))
            tier.mood = mood
            self._count(f"mood {mood.value}")
            if mood is Mood.HUNG:
                self.world.sim.stall(tier.name, self._dice.choice((0.2, 2.0, 20.0)))

    def _wait(
        self,
        what: str,
        future: Future[Any],
        take: Callable[[Any], None] = lambda _: None,
        cancelled: Callable[[], None] = lambda: None,
        *,
        within_s: float | None = None,
    ) -> None:
        """``within_s``: the call's deadline; without one that of loads, or none for a copy."""
        if within_s is None:
            within_s = (
                PATIENCE_S if what in ("offload", "onboard") else self.world.shape.limits.load_deadline_s
            )
        clock = self.world.sim.clock
        one = Waiting(what, future, take, cancelled, clock.now_s() + within_s, self._jumped_s)
        future.add_done_callback(lambda _: one.done_s.append(clock.now_s()))
        self._waiting.append(one)

    def _deadline_s(self, *choices: float | None) -> float | None:
        """One of several, unless clients are patient."""
        return PATIENCE_S if self._patient else self._dice.choice(choices)
