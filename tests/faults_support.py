"""A whole store's life in named steps, to be disturbed at any of them; at the end nothing may be left over."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.client_support import (
    PATIENCE_S,
    Live,
    chain_of,
    check_lease,
    full_group,
    layout_of,
    live,
    poison_free_slots,
    put,
    window_group,
)
from tierkv.keys import Chain
from tierkv.layout import Layout
from tierkv.testing import faults
from tierkv.testing.faults import FaultyTier
from tierkv.testing.faults.leftovers import assert_only_our_files, wait_until
from tierkv.tier import BlobTier
from tierkv.units import KIB

CALL_S = 0.06
"""What one call of a tier may take."""
LOAD_S = 0.15
FLUSH_S = 0.25
SLACK_S = 5.0
"""For a busy machine: what waits for a tier that hangs would wait for ever."""

PLAIN = layout_of()
GROUPS = Layout("test", "uint8", 16, (full_group(2 * KIB), window_group(64, 1 * KIB)), 4)
"""Two layer groups, four engine blocks a block."""

Disturb = Callable[[str, "Life"], None]


def undisturbed(step: str, life: Life) -> None:
    """Nothing happens."""


@dataclass
class Life:
    """Put, flush to NVMe and Valkey, evict, load from each, clear, store again; then restart on the same directory.

    ``disturb(step, life)`` is called before each step and may break whatever it likes; ``mend`` undoes it. Each load
    gives right bytes or a miss, raises nothing and ends by its deadline.
    """

    folder: Path
    valkey: str
    layout: Layout = field(default_factory=lambda: PLAIN)
    disturb: Disturb = undisturbed
    mend: Callable[[Life], None] = lambda life: None
    wrap: Callable[[BlobTier], BlobTier] = lambda tier: tier
    settings: dict[str, Any] = field(default_factory=dict)
    nvme_s: float = CALL_S
    """What one call of the NVMe tier may take. With ``PATIENCE_S`` nothing is missed because a machine is busy."""
    valkey_s: float = CALL_S
    load_s: float = LOAD_S
    own: tuple[str, ...] = ()
    """What the test itself may leave behind, in the words of ``nothing_left``."""
    rig: Live = field(init=False)
    lives: int = 0
    cleared: bool = False
    """The clear said that it was complete."""
    loads: list[int] = field(default_factory=list)

    def run(self) -> None:
        with faults.nothing_left(besides=self.own):
            with self.opened():
                self._first_life()
                self._comes_to_rest()
            with self.opened():
                self._second_life()
                self._comes_to_rest()
                self._works_again()
                faults.assert_nothing_left(self.rig.store, nvme=self.folder)
        assert_only_our_files(self.folder)

    @contextmanager
    def opened(self) -> Iterator[None]:
        self.lives += 1
        with live(
            16,
            block_bytes=8 * KIB,
            region_blocks=2,
            nvme=self.folder,
            valkey=self.valkey,
            nvme_spec={"timeout_s": self.nvme_s},
            valkey_spec={"timeout_s": self.valkey_s},
            valkey_options={"connect_timeout_s": self.valkey_s},
            wrap=self.wrap,
            breaker_cooldown_s=0.02,
            **self.settings,
        ) as self.rig:
            try:
                yield
            finally:
                self.mend(self)

    def chain(self, blocks: int, seed: int) -> Chain:
        return chain_of(self.rig.namespace(self.layout), blocks, seed)

    # ---- steps

    def _first_life(self) -> None:
        client = self.rig.client
        first, second = self.chain(3, seed=1), self.chain(2, seed=2)
        self._step("put")
        assert put(client, first).stored == 3
        assert self.load(first) == 3
        self._step("flush nvme")
        self.flush("nvme")
        self._step("flush valkey")
        self.flush("valkey")
        client.evict("host")
        self._step("read nvme")
        self.load(first)
        client.evict("host")
        client.evict("nvme")
        self._step("read valkey")
        self.load(first)
        put(client, second)
        self._step("clear")
        self.cleared = client.clear(timeout_s=FLUSH_S).result(PATIENCE_S).complete
        assert client.match(first).blocks == 0
        self._step("look after clear")
        found = self.load(first)
        assert not found or not self.cleared, "what was cleared everywhere is served"
        put(client, second)
        self._step("flush again")
        self.flush("nvme")

    def _second_life(self) -> None:
        self._step("restart")
        first, second = self.chain(3, seed=1), self.chain(2, seed=2)
        self.load(second)
        found = self.load(first)
        assert not found or not self.cleared, "what was cleared everywhere is back after a restart"

    def _works_again(self) -> None:
        """With the fault gone, all tiers serve."""
        self.mend(self)
        self.rig.settle()
        for tier in ("nvme", "valkey"):
            self._serves(tier)

    def _serves(self, tier: str) -> None:
        client, chain = self.rig.client, self.chain(2, seed=len(tier))

        def again() -> bool:
            put(client, chain)
            written = client.flush(tier, timeout_s=PATIENCE_S).result(PATIENCE_S)
            client.evict("host")
            return not written.failed and self.load(chain, timeout_s=PATIENCE_S) == 2

        wait_until(again, f"{tier} takes and gives blocks again", PATIENCE_S)

    def _step(self, name: str) -> None:
        self.disturb(name, self)

    def _comes_to_rest(self) -> None:
        self.mend(self)
        faults.assert_nothing_left(self.rig.store, nvme=self.folder, patience_s=PATIENCE_S)

    # ---- calls with their promises

    def flush(self, tier: str) -> None:
        began_s = time.monotonic()
        report = self.rig.client.flush(tier, timeout_s=FLUSH_S).result(PATIENCE_S)
        assert time.monotonic() - began_s < FLUSH_S + SLACK_S
        assert report.written + report.failed <= report.wanted

    def load(self, chain: Chain, timeout_s: float | None = None) -> int:
        """Loads into poison and checks every byte; how many blocks there were."""
        timeout_s = self.load_s if timeout_s is None else timeout_s
        poison_free_slots(self.rig.store)
        began_s = time.monotonic()
        with self.rig.client.load(chain, timeout_s=timeout_s) as lease:
            assert time.monotonic() - began_s < timeout_s + SLACK_S
            check_lease(self.rig.store, lease)
            self.loads.append(len(lease))
            return len(lease)


class FaultyTiers:
    """Wraps the tiers of all lives of a store; the one named ``tier`` fails as ``strike`` and ``way`` say."""

    def __init__(self, tier: str, strike: faults.Strike, way: faults.Way) -> None:
        self._name = tier
        self._strike = strike
        self._way = way
        self._made: list[FaultyTier] = []

    def wrap(self, tier: BlobTier) -> BlobTier:
        if tier.name != self._name:
            return tier
        self._made.append(FaultyTier(tier, self._strike, self._way, slow_s=0.01))
        return self._made[-1]

    def mend(self, life: Life) -> None:
        """Lets go on what hangs. The strike goes on counting: the next life may still be hit."""
        for tier in self._made:
            tier.release()
        if life.lives > 1:
            self._strike.heal()
