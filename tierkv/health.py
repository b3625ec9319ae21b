"""How a store is, in one word and a few sentences: what a person or a load balancer asks.

``ok``: all is well. ``degraded``: the store serves, but less than it should (a tier is left out, a policy was
replaced). ``unhealthy``: somebody should look; it still answers every call, with a miss where it cannot do better.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final, Literal, NamedTuple, Protocol

from tierkv.catalog import Catalog
from tierkv.clock import Clock
from tierkv.edges import Edge
from tierkv.executor import TIMERS, Executor
from tierkv.guard import trouble_of
from tierkv.scrub import Scrub
from tierkv.tiers.host import HostTier
from tierkv.units import format_bytes

State = Literal["ok", "degraded", "unhealthy"]

DAMAGE_S: Final = 3600.0
"""A damaged block in host RAM is a reason for this long: about one round of the scrub."""


class Reason(NamedTuple):
    """One thing that is not as it should be."""

    part: str
    """A tier, ``"threads"`` or ``"policies"``."""
    state: State
    sentence: str


@dataclass(frozen=True)
class Health:
    """``ready``: worth sending requests to. A store that is only degraded is; one whose RAM is not populated yet, or
    that is unhealthy, is not."""

    state: State
    ready: bool
    reasons: tuple[Reason, ...]

    def __str__(self) -> str:
        return "; ".join([self.state, *(reason.sentence for reason in self.reasons)])


class Watched(Protocol):
    """What ``health_of`` looks at: a store."""

    clock: Clock
    executor: Executor
    host: HostTier
    catalog: Catalog
    edges: dict[int, Edge]
    scrub: Scrub
    populating: bool


def health_of(store: Watched) -> Health:
    """Looks at numbers only: takes microseconds, asks no tier, holds no lock for long."""
    reasons = tuple(_reasons(store))
    states = {reason.state for reason in reasons}
    state: State = "unhealthy" if "unhealthy" in states else "degraded" if states else "ok"
    return Health(state, state != "unhealthy" and not store.populating, reasons)


def _reasons(store: Watched) -> Iterator[Reason]:
    for trouble in store.executor.threads.troubles():
        # All deadlines hang on the timers; a worker that is stuck leaves the others of its lane.
        grave = trouble.kind != "stuck" or trouble.lane == TIMERS
        yield Reason("threads", "unhealthy" if grave else "degraded", trouble.sentence)
    now_s = store.clock.now_s()
    for edge in store.edges.values():
        yield from (Reason(edge.name, "degraded", sentence) for sentence in _of_tier(edge, now_s))
    for sentence in store.catalog.failures.sentences.copy().values():
        yield Reason("policies", "degraded", sentence)
    if store.populating:
        size = format_bytes(store.host.arena.capacity_bytes)
        yield Reason(
            "host", "degraded", f"host RAM ({size}) is still being populated; first copies are slower"
        )
    damaged_at_s = store.scrub.damaged_at_s
    if damaged_at_s is not None and now_s - damaged_at_s < DAMAGE_S:
        ago_s = now_s - damaged_at_s
        yield Reason("host", "degraded", f"the scrub found damaged blocks in host RAM, {ago_s:.0f} s ago")


def _of_tier(edge: Edge, now_s: float) -> Iterator[str]:
    tier = edge.tier
    stuck = tier.stuck()
    if stuck:
        yield (
            f"tier {edge.name}: {len(stuck)} of {edge.queue.width} workers are stuck, for up to "
            f"{stuck[0].beyond_s:.0f} s beyond the deadline of {stuck[0].name}"
        )
    since_s = tier.breaker.open_since_s
    if since_s is not None:
        why = trouble_of(tier.status())
        yield (
            f"tier {edge.name} has not answered for {now_s - since_s:.0f} s{f' ({why})' if why else ''}; "
            "it is tried now and then"
        )
    elif not tier.usage().writable:
        yield f"tier {edge.name} takes nothing: {trouble_of(tier.status()) or 'it is not writable'}"
