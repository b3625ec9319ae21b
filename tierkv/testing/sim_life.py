"""A store's life by one number: the seed chooses what the store is, what goes wrong, how its lives end.

``live(seed)`` is what the tests and ``python -m tierkv.testing.adversary`` call, so a failing seed is the reproduction.
``simulate`` is the same with parts of the choice made by a test.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from tierkv import frame
from tierkv.ids import BlockKey
from tierkv.index import USABLE
from tierkv.keys import Chain
from tierkv.testing.invariants import check_invariants, families
from tierkv.testing.sim_clients import MAX_BLOCKS
from tierkv.testing.sim_model import check_bytes
from tierkv.testing.sim_tier import Faults, Mood
from tierkv.testing.sim_workload import Workload
from tierkv.testing.sim_world import Content, Shape, World, world

FAULTS = Faults(
    lost=0.03,
    damaged=0.08,
    corrupt=0.02,
    timeout=0.02,
    unavailable=0.02,
    full=0.02,
    false_presence=0.05,
    false_absence=0.05,
    outage=0.02,
)


End = Literal["rest", "stop", "kill"]

_ENDS: Sequence[Sequence[End]] = (
    ("rest",),
    ("rest",),
    ("stop", "rest"),
    ("kill", "rest"),
    ("rest", "kill", "stop"),
)


@dataclass
class Told:
    """What simulated lives of stores came to; equal for equal seeds."""

    steps: int = 0
    nested: int = 0
    done: Counter[str] = field(default_factory=Counter)
    injected: Counter[str] = field(default_factory=Counter)
    counters: Counter[tuple[str, ...]] = field(default_factory=Counter)

    def add(self, made: World, work: Workload) -> None:
        """The end of one life."""
        self.steps += made.sim.steps
        self.nested += made.sim.nested
        self.done.update(work.done)
        for tier in made.tiers.values():
            self.injected.update(tier.injected)
        self.counters.update(made.store.counters.snapshot())


class SeedFailed(AssertionError):
    """A life went wrong: the seed, what was wrong first, and the command that replays it."""

    def __init__(self, seed: int, error: Exception) -> None:
        super().__init__(f"seed {seed}: {type(error).__name__}: {error}; again: {command_for(seed)}")
        self.seed = seed


class _Naming:
    """Whatever goes wrong inside becomes a ``SeedFailed``."""

    def __init__(self, seed: int) -> None:
        self._seed = seed

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if isinstance(error, Exception):
            raise SeedFailed(self._seed, error) from error


def live(seed: int) -> Told:
    """A life in which everything is the seed's choice. Raises ``SeedFailed``."""
    dice = random.Random(f"life {seed}")
    faults = dice.choice((None, FAULTS, Faults.some(dice.choice((0.5, 1.0, 3.0)))))
    patient = dice.random() < 0.1
    moods: Sequence[Mood] = dice.sample(list(Mood), dice.randrange(len(Mood)))
    ends = dice.choice(_ENDS)
    with _Naming(seed):
        return simulate(
            seed,
            calls=120 // len(ends),
            faults=faults,
            patient=patient,
            moods=() if patient else moods,
            ends=ends,
        )


def command_for(seed: int) -> str:
    """What replays a seed."""
    return f"python -m tierkv.testing.adversary --seed {seed} --verbose"


def simulate(
    seed: int,
    *,
    calls: int = 120,
    faults: Faults | None = None,
    restart: bool = True,
    layouts: tuple[str, ...] | None = None,
    patient: bool = False,
    moods: Sequence[Mood] = (),
    ends: Sequence[End] = ("rest",),
    **changes: Any,
) -> Told:
    """Stores' lives under the adversary of ``seed``, with all checks, and what the last one leaves behind.

    ``ends``: how each life ends, of stores that follow each other on the same content: brought to rest and closed,
    closed in the middle of everything (``stop``), or killed. ``layouts`` and ``changes``: parts of the shape that shall
    not be left to the seed.
    """
    shape = replace(Shape.of(seed, layouts), **changes)
    if patient:
        shape = replace(shape, advance_chance=0.0)
    content = Content()
    now_s, told, work = 1000.0, Told(), None
    for life, end in enumerate(ends):
        with world(shape, content, faults, start_s=now_s, life=life) as made:
            work = Workload(made, patient=patient, moods=moods, before=work)
            work.run(calls)
            if end == "rest":
                work.finish()
                _check_content_if_told(made, work)
            elif end == "stop":
                work.stop()
            else:
                work.kill()
            told.add(made, work)
            now_s = made.sim.clock.now_s()
    if restart and work is not None:
        with world(shape, content, start_s=now_s, life=len(ends)) as again:
            check_restart(again, content, work)
    return told


def _check_content_if_told(made: World, work: Workload) -> None:
    lost = any(tier.injected.get("lost") for tier in made.tiers.values())
    if not lost and "clears that reached not all" not in work.done:
        check_content(made)


def check_content(made: World) -> None:
    """A tier that the store evicts from, and that loses nothing by itself, holds exactly what the catalog says."""
    if "nvme" not in made.tiers:
        return
    catalog = made.store.catalog
    index, number = catalog.index, made.store.tier_number("nvme")
    said: set[BlockKey] = set()
    for family in families(catalog):
        space, block_hash, held = (
            index.spaces[index.space_of[family]],
            index.hashes[family],
            index.residency[number][family],
        )
        assert block_hash is not None
        said |= {space.key(block_hash, part) for part in range(held.bit_length()) if held >> part & 1}
    there = set(made.tiers["nvme"].truth.storage.frames)
    assert said == there, (
        f"{len(there - said)} blocks lie in the tier unknown, {len(said - there)} are not there"
    )


def check_restart(again: World, content: Content, before: Workload) -> None:
    """The next store finds every chain whose blocks lie whole on the persistent medium, byte by byte."""
    spaces = [again.client.open_namespace(space.namespace.spec) for space in before.spaces]
    if "nvme" not in again.tiers:
        return
    check_invariants(again.store, ())
    on_disk = _whole_families(content)
    chains = [
        (space, space.chain(tokens[: MAX_BLOCKS * space.namespace.layout.block_tokens + 1]))
        for space in spaces
        for tokens in before.prompts
    ]
    for space, chain in chains:
        wanted = _leading(chain, on_disk)
        found = again.store.catalog.find_run(space.space, chain.hashes, USABLE)
        assert len(found) >= wanted, f"{wanted} blocks of a chain lie on the medium, {len(found)} are found"
    for _, chain in chains:
        _check_loads(again, chain)


def _whole_families(content: Content) -> set[tuple[bytes, bytes]]:
    """Those that do not expire."""
    parts: dict[tuple[bytes, bytes], int] = {}
    expected: dict[tuple[bytes, bytes], int] = {}
    expiring: set[tuple[bytes, bytes]] = set()
    for raw in content.nvme.frames.values():
        header = frame.unpack(raw)
        name = (header.namespace, header.block_hash)
        parts[name] = parts.get(name, 0) | 1 << header.part
        expected[name] = expected.get(name, 0) | header.expected_parts
        if header.expires_ms:
            expiring.add(name)
    return {name for name in parts if name not in expiring and parts[name] & expected[name] == expected[name]}


def _leading(chain: Chain, there: set[tuple[bytes, bytes]]) -> int:
    names: Sequence[tuple[bytes, bytes]] = [(chain.namespace.digest, one) for one in chain.hashes]
    return next((i for i, name in enumerate(names) if name not in there), len(names))


def _check_loads(again: World, chain: Chain) -> None:
    future = again.client.load_async(chain)
    again.sim.run_until(future.done, seconds=60)
    with future.result() as lease:
        check_bytes(lease)
