"""A whole store for simulations, made by a seed: how large it is, what it stores, which tiers it has, how they fail.

Everything is small, so that a few hundred events fill, empty and fill it again. The tiers' content outlives a store, so
that another one can be opened over it.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any
from unittest.mock import patch

from tierkv import reading
from tierkv.arena import Arena
from tierkv.client import Client
from tierkv.clock import FakeClock
from tierkv.codec import codec_named
from tierkv.due import Due
from tierkv.edges import Write
from tierkv.frame import HEADER_BYTES
from tierkv.ids import BlockKey
from tierkv.keys import NamespaceSpec, Weights
from tierkv.layout import GroupKind, LayerGroup, Layout
from tierkv.policies.always import AlwaysPolicy
from tierkv.policies.by_priority import with_priorities
from tierkv.policies.density import DensityPolicy
from tierkv.policies.lru import LruPolicy
from tierkv.policies.on_hit import OnHitPolicy
from tierkv.policies.seen_twice import SeenTwicePolicy
from tierkv.policy import EvictionPolicy, LoadQuote, Promotion
from tierkv.prefetching import Prefetch
from tierkv.store import BlobSpec, Limits, TieredStore
from tierkv.testing.memory import MemoryBlobTier, MemoryStorage
from tierkv.testing.payloads import payload_of
from tierkv.testing.sim import SimExecutor
from tierkv.testing.sim_locks import simulated_locks
from tierkv.testing.sim_tier import Faults, SimTier
from tierkv.tier import Usage
from tierkv.tiers.host import HostTier
from tierkv.units import align_up

FULL, WINDOW, STATE = GroupKind.FULL, GroupKind.WINDOW, GroupKind.STATE

LAYOUTS: Mapping[str, Layout] = {
    "plain": Layout("sim", "u8", 16, (LayerGroup("all", FULL, 2, 2048, 16),)),
    "odd sizes": Layout("sim", "u8", 16, (LayerGroup("all", FULL, 3, 1001, 16),)),
    "large": Layout("sim", "u8", 16, (LayerGroup("all", FULL, 2, 5000, 16),)),
    "window": Layout(
        "sim",
        "u8",
        4,
        (LayerGroup("full", FULL, 2, 512, 4), LayerGroup("window", WINDOW, 1, 600, 8, window_tokens=24)),
        engine_blocks=4,
        tp_size=2,
    ),
    "state": Layout(
        "sim", "u8", 8, (LayerGroup("full", FULL, 1, 1024, 8), LayerGroup("state", STATE, 2, 3000, 8))
    ),
    "latent": Layout(
        "sim",
        "u8",
        8,
        (LayerGroup("latent", FULL, 2, 900, 8, replicated=True), LayerGroup("index", FULL, 1, 256, 8)),
        tp_size=2,
    ),
}
"""Shapes of blocks: one part or several, a window, a state, two ranks, n = 4, parts of different sizes."""


def family_stride(layout: Layout) -> int:
    """Bytes of host RAM that a whole block takes."""
    return sum(align_up(part.payload_bytes) for part in layout.parts)


def bytes_of(key: BlockKey, length_bytes: int) -> bytes:
    """The payload of a part: the first half says whose it is, the second can be compressed."""
    head = payload_of(key, length_bytes // 2)
    return head + head[:64] * ((length_bytes - len(head)) // 64) + head[: (length_bytes - len(head)) % 64]


class DicePromotion:
    """A promotion policy without reason."""

    name = "dice"

    def __init__(self, seed: int) -> None:
        self._dice = random.Random(f"promotion {seed}")

    def decide(self, quote: LoadQuote, usage: Usage) -> Promotion:
        return self._dice.choice((Promotion.RECOMPUTE, Promotion.SERVE, Promotion.PROMOTE, Promotion.PROMOTE))

    def counters(self) -> Mapping[str, int]:
        return {}


@dataclass(frozen=True)
class Shape:
    """What a seed chose."""

    seed: int
    layouts: tuple[str, ...]
    region_bytes: int
    host_bytes: int
    nvme_bytes: int | None
    valkey_bytes: int | None
    writes: tuple[Write, Write]
    limits: Limits
    eviction: str
    admission: str
    codec: str
    dice_promotion: bool
    nest_chance: float
    lock_chance: float
    advance_chance: float

    @staticmethod
    def of(seed: int, layouts: tuple[str, ...] | None = None) -> Shape:
        """``layouts``: names of shapes of blocks that shall not be left to the seed."""
        dice = random.Random(f"shape {seed}")
        names = layouts or tuple(dice.sample(list(LAYOUTS), dice.choice((1, 1, 2))))
        largest_part = max(align_up(part.payload_bytes) for name in names for part in LAYOUTS[name].parts)
        family = max(family_stride(LAYOUTS[name]) for name in names)
        region = largest_part * dice.choice((1, 1, 2, 4))
        blocks = dice.randint(3, 12)
        parts = max(len(LAYOUTS[name].parts) for name in names)
        frame = family + parts * HEADER_BYTES
        writes: list[Write] = ["through", "on_evict", "on_evict", "never"]
        return Shape(
            seed=seed,
            layouts=names,
            region_bytes=region,
            host_bytes=max(align_up(blocks * family, region), region * parts),
            nvme_bytes=dice.choice((None, 2, 5, 10, 20, 40)) and dice.choice((2, 5, 10, 20, 40)) * frame,
            valkey_bytes=dice.choice((None, 1, 1, 1)) and dice.choice((3, 10, 40)) * frame,
            writes=(dice.choice(writes), dice.choice(writes)),
            limits=Limits(
                max_families=dice.choice((12, 40, 400, 400)),
                queue_bytes=dice.choice((2, 8, 1000)) * family,
                in_flight_bytes=dice.choice((1, 4, 1000)) * family,
                low_watermark=dice.choice((0.1, 0.3, 0.5)),
                high_watermark=dice.choice((0.5, 0.7, 1.0)),
                load_deadline_s=2.0,
                lease_deadline_s=3.0,
                breaker_failures=dice.choice((1, 3)),
                breaker_cooldown_s=0.5,
                scrub_s=2.0,
            ),
            eviction=random.Random(f"eviction {seed}").choice(("lru", "density")),
            admission=dice.choice(("always", "always", "seen_twice")),
            codec=dice.choice(("raw", "raw", "lz4")),
            dice_promotion=dice.random() < 0.3,
            nest_chance=dice.choice((0.0, 0.0, 0.1, 0.3)),
            lock_chance=dice.choice((0.0, 0.0, 0.02, 0.1)),
            advance_chance=dice.choice((0.01, 0.05, 0.2)),
        )


@dataclass
class World:
    """A running store with all that belongs to the simulation."""

    shape: Shape
    sim: SimExecutor
    store: TieredStore
    client: Client
    tiers: dict[str, SimTier]
    prefetches: list[Prefetch] = field(default_factory=list)
    life: int = 0
    """Lives of other stores on the same content before this one."""
    killed: bool = False

    def abandon(self) -> None:
        """Its process ends here and now: nothing of it moves any more, and nothing is closed."""
        self.killed = True
        self.sim.held += 1  # until the end of days
        self.store.host.close()  # the kernel does that

    def specs(self) -> list[NamespaceSpec]:
        return [
            NamespaceSpec(Weights("revision", f"w {name}"), LAYOUTS[name], "sim", salt=f"tenant {i}")
            for i, name in enumerate(self.shape.layouts)
        ]

    def under_way(self) -> list[Prefetch]:
        self.prefetches[:] = [one for one in self.prefetches if not one._over]
        return self.prefetches


@dataclass
class Content:
    """What the tiers hold, from one store to the next."""

    nvme: MemoryStorage = field(default_factory=MemoryStorage)
    valkey: MemoryStorage = field(default_factory=MemoryStorage)


@contextmanager
def world(
    shape: Shape,
    content: Content | None = None,
    faults: Faults | None = None,
    *,
    start_s: float = 1000.0,
    life: int = 0,
) -> Iterator[World]:
    """Builds and starts a store, single-threaded down to its locks. Closes it when all went well. ``life``: how many
    stores have lived on this content before."""
    content = content or Content()
    clock = FakeClock(start_s)
    seed = shape.seed + life * 1_000_003
    sim = SimExecutor(clock, seed, advance_chance=shape.advance_chance, nest_chance=shape.nest_chance)
    prefetches: list[Prefetch] = []

    class Recorded(Prefetch):
        def begin(self) -> None:
            prefetches.append(self)
            super().begin()

    class Waited(Due[Any]):
        """Who waits for it in a thread of its own lets all others go on meanwhile."""

        def result(self, timeout: float | None = None) -> Any:
            sim.run_until(lambda: self.done() or self.deadline.over())
            if not self.done():
                self.end_if_over()
            sim.run_until(self.done)
            return super().result(timeout)

    with (
        simulated_locks(sim, shape.lock_chance),
        patch.object(reading, "Prefetch", Recorded),
        patch.object(reading, "Due", Waited),
    ):
        tiers, specs = _tiers(shape, content, sim, faults, seed)
        store = TieredStore(
            HostTier(Arena(shape.host_bytes, shape.region_bytes)),
            _eviction(shape),
            specs,
            DicePromotion(shape.seed) if shape.dice_promotion else OnHitPolicy(),
            shape.limits,
            clock,
            sim,
        )
        store.start(populate=False)
        made = World(shape, sim, store, Client(store, owner="sim"), tiers, prefetches, life)
        yield made
        if not made.killed:
            made.client.close()  # not after a failure: that would only hide it
        assert store.scrub.damaged_at_s is None, "the scrub took a good block for a damaged one"


def _tiers(
    shape: Shape, content: Content, sim: SimExecutor, faults: Faults | None, seed: int
) -> tuple[dict[str, SimTier], list[BlobSpec]]:
    tiers: dict[str, SimTier] = {}
    specs: list[BlobSpec] = []
    if shape.nvme_bytes:
        truth = MemoryBlobTier(shape.nvme_bytes, workers=2, storage=content.nvme)
        tiers["nvme"] = SimTier("nvme", truth, sim, seed, faults)
        specs.append(_spec(shape, tiers["nvme"], _eviction(shape), shape.writes[0]))
    if shape.valkey_bytes:
        truth = MemoryBlobTier(shape.valkey_bytes, workers=3, evicts_itself=True)
        truth.storage = content.valkey
        tiers["valkey"] = SimTier("valkey", truth, sim, seed, faults)
        specs.append(_spec(shape, tiers["valkey"], None, shape.writes[1]))
    return tiers, specs


def _eviction(shape: Shape) -> EvictionPolicy:
    return LruPolicy(families=16) if shape.eviction == "lru" else with_priorities(DensityPolicy)


def _spec(shape: Shape, tier: SimTier, eviction: EvictionPolicy | None, write: Write) -> BlobSpec:
    admission = AlwaysPolicy() if shape.admission == "always" else SeenTwicePolicy(history=64)
    return BlobSpec(tier, eviction, admission, write, codec_named(shape.codec), timeout_s=1.0)
