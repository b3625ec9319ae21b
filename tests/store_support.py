"""Whole stores for tests: simulated by a seed, in one thread."""

from __future__ import annotations

from dataclasses import dataclass, replace

from tierkv.testing.sim_tier import Faults
from tierkv.testing.sim_workload import Workload
from tierkv.testing.sim_world import Content, Shape, world


@dataclass(frozen=True)
class Told:
    """What a simulated life of a store came to; equal for equal seeds."""

    steps: int
    nested: int
    done: dict[str, int]
    injected: dict[str, int]
    counters: dict[tuple[str, ...], int]


def simulate(
    seed: int, *, calls: int = 120, faults: Faults | None = None, cancel: bool = True, **changes: object
) -> Told:
    """One store's life under the adversary of ``seed``, with all checks. A failure names the seed."""
    shape = replace(Shape.of(seed), **changes)  # type: ignore[arg-type]
    content = Content()
    try:
        with world(shape, content, faults) as made:
            work = Workload(made, cancel_futures=cancel)
            work.run(calls)
            work.finish()
            injected: dict[str, int] = {}
            for tier in made.tiers.values():
                for fault, count in tier.injected.items():
                    injected[fault] = injected.get(fault, 0) + count
            counters = dict(made.store.counters.snapshot())
            return Told(made.sim.steps, made.sim.nested, dict(work.done), injected, counters)
    except Exception as error:
        error.add_note(f"seed {seed}: tests.store_support.simulate({seed}, calls={calls}, faults={faults})")
        raise
