"""A writer process under load, to be killed: every verb from a few threads over host RAM, a disk and a real server.

What its tiers acknowledge goes through a pipe to the parent, which keeps the books (``tests/crash_check.py``).
"""

from __future__ import annotations

import json
import os
import random
import sys
import threading
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from tests.client_support import chain_of, check_lease, full_group, held, layout_of, payloads_of, spec_of
from tests.crash_points import PointDisk, Points, Telling
from tierkv.arena import Arena
from tierkv.client import Client
from tierkv.clock import SystemClock
from tierkv.edges import Write
from tierkv.executor import ThreadExecutor
from tierkv.ids import BlockKey
from tierkv.keys import Chain
from tierkv.namespaces import OpenNamespace
from tierkv.policies.always import AlwaysPolicy
from tierkv.policies.lru import LruPolicy
from tierkv.policies.on_hit import OnHitPolicy
from tierkv.store import BlobSpec, Limits, TieredStore
from tierkv.testing.threads import run_together
from tierkv.tier import BlobTier
from tierkv.tiers.host import HostTier
from tierkv.tiers.nvme import NvmeTier
from tierkv.tiers.nvme_disk import Disk
from tierkv.tiers.valkey import ValkeyTier
from tierkv.units import KIB

CAPACITY_BYTES = 768 * KIB
SEEDS, BLOCKS = 8, 6
THREADS = 3
PATIENCE_S = 60.0

Line = tuple[str, str, list[str]]
"""Verb, tier, names in hexadecimal digits."""


@dataclass
class Rig:
    """A store over a directory and a server, with the namespaces of the writer."""

    client: Client
    store: TieredStore
    spaces: list[OpenNamespace]
    tiers: list[BlobTier]

    def chains(self) -> Iterator[Chain]:
        """The longest prompt of each kind that the writer knows; the others are fronts of these."""
        for space in self.spaces:
            for seed in range(SEEDS):
                yield chain_of(space, BLOCKS, seed)


def keys_of(chain: Chain, position: int) -> list[BlockKey]:
    """All parts of one block."""
    return [
        chain.namespace.block_key(chain.hashes[position], part.index) for part in chain.namespace.layout.parts
    ]


@contextmanager
def opened(
    path: Path | None,
    address: str | None,
    *,
    host_bytes: int = 256 * KIB,
    disk: Disk | None = None,
    wrap: Any = lambda tier: tier,
    write: Write = "never",
    **settings: Any,
) -> Iterator[Rig]:
    """A store over what is given of the two tiers. One that never writes leaves them as they are."""
    clock = SystemClock()
    specs = []
    if path is not None:
        nvme = NvmeTier(
            path,
            CAPACITY_BYTES,
            clock=clock,
            min_free_bytes=0,
            segment_bytes=64 * KIB,
            workers=3,
            disk=disk,
            **settings,
        )
        specs.append(BlobSpec(wrap(nvme), LruPolicy(), AlwaysPolicy(), write, timeout_s=PATIENCE_S))
    if address is not None:
        valkey = ValkeyTier(address, workers=2, clock=clock)
        specs.append(BlobSpec(wrap(valkey), None, AlwaysPolicy(), write, timeout_s=PATIENCE_S))
    limits = Limits(max_families=1024, load_deadline_s=PATIENCE_S, shutdown_deadline_s=10.0)
    host = HostTier(Arena(host_bytes, 32 * KIB))
    store = TieredStore(host, LruPolicy(), specs, OnHitPolicy(), limits, clock, ThreadExecutor(clock))
    store.start(populate=False)
    client = Client(store, owner="crash")
    spaces = [
        client.open_namespace(spec_of()),
        client.open_namespace(spec_of(layout_of(full_group(), full_group(8 * KIB, "second")))),
        client.open_namespace(spec_of(salt="cleared")),
    ]
    try:
        yield Rig(client, store, spaces, [spec.tier for spec in specs])
    finally:
        stuck = store.close()
        assert stuck == [], stuck


class Teller:
    """The child's end of the pipe. A line is in the pipe before the call that says it returns."""

    def __init__(self, fd: int) -> None:
        self._fd = fd
        self.lock = threading.RLock()

    def __call__(self, verb: str, tier: str, names: Sequence[bytes] = ()) -> None:
        line = json.dumps([verb, tier, [name.hex() for name in names]]).encode() + b"\n"
        with self.lock:
            os.write(self._fd, line)


def store_in_steps(rig: Rig, chain: Chain, points: Points) -> None:
    """What ``put`` does, with a point after each step."""
    draft = rig.client.reserve(chain)
    if draft is None:
        return
    points.reach("host: reserved")
    payloads = payloads_of(chain, draft.blocks.positions)
    for i, buffers in enumerate(payloads):
        draft.fill(i, [memoryview(buffer) for buffer in buffers])
        if i == len(draft) // 2:
            points.reach("host: half copied")
    points.reach("host: copied")
    sealed = draft.seal()
    points.reach("host: sealed")
    rig.client.commit(sealed, chain)
    points.reach("host: committed")


def tell_persistent(rig: Rig, chain: Chain, say: Teller) -> None:
    """After a flush: the front of the chain that the disk holds. Nobody can begin to delete it while this is said."""
    report = rig.client.flush("nvme", timeout_s=PATIENCE_S).result(PATIENCE_S)
    with say.lock:
        there = held(rig.store, chain)["nvme"]
        front = [i for i in there if there[: i + 1] == list(range(i + 1))]
        if report.failed == 0:
            say("persistent", "nvme", [key for i in front for key in keys_of(chain, i)])


def one_step(rig: Rig, points: Points, say: Teller, dice: random.Random) -> None:
    client = rig.client
    chain = chain_of(dice.choice(rig.spaces), dice.randint(1, BLOCKS), dice.randrange(SEEDS))
    match dice.randrange(20):
        case 0:
            client.evict(dice.choice(["host", "host", "nvme"]))
        case 1:
            client.clear(namespace=rig.spaces[2], timeout_s=PATIENCE_S).result(PATIENCE_S)
        case 2 | 3 | 4:
            store_in_steps(rig, chain, points)
            tell_persistent(rig, chain, say)
        case 5:
            client.flush("valkey", timeout_s=PATIENCE_S).result(PATIENCE_S)
        case number if number < 14:
            store_in_steps(rig, chain, points)
        case _:
            with client.load(chain) as lease:
                check_lease(rig.store, lease)


Life = Callable[[Rig, Points, Teller], None]


def load_of(seed: int, steps: int) -> Life:
    """Threads that do all there is to do, each in an order of its own."""

    def life(rig: Rig, points: Points, say: Teller) -> None:
        def work(number: int) -> None:
            dice = random.Random(f"{seed} {number}")
            for _ in range(steps):
                one_step(rig, points, say, dice)

        run_together([partial(work, number) for number in range(THREADS)], PATIENCE_S)

    return life


def run_child(
    path: Path,
    address: str,
    points: Points,
    life: Life,
    *,
    lines: int | None = None,
    disk: Disk | None = None,
) -> tuple[int, list[Line]]:
    """A life in a child process, which ends in good order unless it is killed. Returns its exit status and what it
    said. After ``lines`` lines, if that is given, the parent kills it."""
    reader, writer = os.pipe()
    pid = os.fork()
    if pid == 0:
        status = 1
        try:
            os.close(reader)
            say = Teller(writer)
            wrap = partial(Telling, points=points, say=say)
            disk = disk or PointDisk(points)
            with opened(path, address, disk=disk, wrap=wrap, write="through") as rig:
                life(rig, points, say)
            status = 0
        finally:
            if status:
                traceback.print_exc(file=sys.stderr)
                sys.stderr.flush()
            os._exit(status)
    os.close(writer)
    said: list[Line] = []
    with os.fdopen(reader, "rb") as output:
        for line in output:
            if not line.endswith(b"\n"):
                break  # it died while it said this, so it had not begun to do it
            verb, tier, names = json.loads(line)
            said.append((verb, tier, names))
            if len(said) == lines:
                os.kill(pid, 9)
    _, status = os.waitpid(pid, 0)
    return status, said
