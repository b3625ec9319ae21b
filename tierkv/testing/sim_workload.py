"""The life of a store among clients: they call at any moment and in any order; after each event the books are checked.

Clients are lanes of the simulation, so their calls come between (and, at locks and in tiers' calls, inside) all other
events. What they do stands in ``tierkv.testing.sim_clients``.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence

from tierkv.testing.invariants import Losses, check_idle, check_invariants
from tierkv.testing.sim_clients import PATIENCE_S, Clients
from tierkv.testing.sim_model import Model
from tierkv.testing.sim_tier import Mood
from tierkv.testing.sim_waiting import Waiting
from tierkv.testing.sim_world import World

CLIENTS = 3
ROUNDING_S = 1e-6


class Workload(Clients):
    """Drives a world. ``run`` does some hundred calls, ``finish`` brings everything to rest; or ``stop`` closes the
    store in the middle of it all, or ``kill`` does not even do that.

    ``patient``: no deadline of a client is short, and time does not pass as long as anything can happen. Then every
    wait ends because of what was waited for, or somebody has forgotten to say that it has come.

    ``before``: the life of the store that left behind what this one has found.
    """

    def __init__(
        self,
        world: World,
        *,
        patient: bool = False,
        moods: Sequence[Mood] = (),
        before: Workload | None = None,
    ) -> None:
        lies = any(tier.faults.false_presence for tier in world.tiers.values()) or Mood.LYING in moods
        model = before.model if before is not None else Model(truthful_hints=not lies)
        dice = random.Random(f"workload {world.shape.seed} {world.life}")
        super().__init__(world, model, dice, tuple(moods), patient=patient)
        specs = world.specs() if before is None else [space.namespace.spec for space in before.spaces]
        self.spaces += [self.client.open_namespace(spec) for spec in specs]
        self.prompts += before.prompts if before is not None else [self._prompt() for _ in range(2)]
        self.losses = Losses(world.store)
        self._exact = not (world.shape.nest_chance or world.shape.lock_chance)
        """Time does not pass inside an event, so deadlines are kept to the microsecond."""
        for number in range(CLIENTS):
            world.sim.open_lane(f"client {number}", 1)

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

    # -- checks ---------------------------------------------------------------------------------------------------

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
                continue
            self._check_deadline(one)
            one.take(one.future.result())

    def _check_deadline(self, one: Waiting) -> None:
        """A jump of the clock may have come just before; apart from that there is no excuse."""
        late_s = one.done_s[0] - one.due_s - (self._jumped_s - one.jumped_s)
        assert not self._exact or late_s <= ROUNDING_S, (
            f"a {one.what} ended {late_s:g} simulated seconds after its deadline"
        )

    # -- how a life ends ------------------------------------------------------------------------------------------

    def finish(self) -> None:
        """Lets go of everything, waits until all is at rest, and looks at the books of an idle store."""
        self._until(lambda: not self._clients_busy())
        for tier in self.world.tiers.values():
            tier.mood = Mood.WELL
        self.world.sim.unstall()
        self.client.wake()
        self._let_go()
        self._until(lambda: not self._waiting)
        self._let_go()
        self.world.sim.pass_time(40.0)  # incomplete families expire
        self._until(lambda: not self.world.sim.busy())
        self.world.store.upkeep.make_rounds()
        self._until(lambda: not self.world.sim.busy())
        with self.world.sim.quiet():
            check_idle(self.world.store)

    def _let_go(self) -> None:
        while self._leases:
            self._release()
        while self._pinned:
            self._unpin()
        self._drafts.clear()

    def stop(self) -> None:
        """The store is closed whatever is going on: nobody who waits may be forgotten."""
        self.client.close()
        late = [one.what for one in self._waiting if not one.future.done()]
        assert not late, f"the store is closed, and {late} still wait"
        for one in self._waiting:
            one.cancelled()
            if not one.future.cancelled() and one.what == "load":
                getattr(one.future.result(), "release", lambda: None)()
        self._waiting.clear()
        for lease in self._leases:
            lease.release()
        self._leases.clear()
        self._drafts.clear()

    def kill(self) -> None:
        """Its process is gone. What was on its way may have arrived or not."""
        for one in self._waiting:
            one.cancelled()
        self._waiting.clear()
        self.world.abandon()
