"""Several sessions on one edge: each gets its share of the bytes, whatever the others ask for."""

from __future__ import annotations

import random
import subprocess
import sys
import threading
from collections import Counter, deque
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests import daemon_process
from tests.client_support import DAEMON, FACE, Gate, chain_of, live, put_all
from tests.valkey_server import eventually
from tierkv.client import Client
from tierkv.jobs import Job, Priority, TierQueue
from tierkv.turns import LEAST_COST, Turns, waiting
from tierkv.units import KIB, MIB

UP = "tier>host"


# ---- whose turn it is


def served(turns: Turns[tuple[int, int]], count: int) -> Counter[int]:
    """Bytes by party of the next so many."""
    found: Counter[int] = Counter()
    for _ in range(count):
        party, size = turns.take()
        found[party] += size
    return found


def test_equals_get_equal_bytes_whatever_the_size_of_their_pieces() -> None:
    turns: Turns[tuple[int, int]] = Turns()
    for party, size in ((1, MIB), (2, 4 * MIB), (3, 128 * KIB)):
        for _ in range(64 * MIB // size):
            turns.add(party, (party, size), size)
    got: Counter[int] = Counter()
    while all(any(True for _ in turns.newest(party)) for party in (1, 2, 3)):
        party, size = turns.take()
        got[party] += size
        assert max(got.values()) - min(got[one] for one in (1, 2, 3)) <= 8 * MIB
    assert sum(got.values()) > 128 * MIB


def test_one_party_alone_is_a_plain_line() -> None:
    turns: Turns[int] = Turns()
    for i in range(10):
        turns.add(7, i, MIB)
    assert turns.first() == 0
    assert [turns.take() for _ in range(4)] == [0, 1, 2, 3]
    turns.put_back(7, 3, MIB)
    assert list(turns) == [3, 4, 5, 6, 7, 8, 9]
    turns.remove(7, 5)
    assert [turns.take() for _ in range(6)] == [3, 4, 6, 7, 8, 9]
    assert not turns
    assert turns.first() is None


def test_who_comes_late_begins_at_the_present() -> None:
    """Nobody saves up turns by asking for nothing."""
    turns: Turns[tuple[int, int]] = Turns()
    for _ in range(100):
        turns.add(1, (1, MIB), MIB)
    served(turns, 50)
    for _ in range(100):
        turns.add(2, (2, MIB), MIB)
    got = served(turns, 20)
    assert abs(got[1] - got[2]) <= MIB


def test_who_comes_back_at_once_gains_nothing() -> None:
    """Asking in small pieces, with nothing waiting in between, is no way past those who wait."""
    turns: Turns[tuple[int, int]] = Turns()
    for _ in range(200):
        turns.add(1, (1, MIB), MIB)
    got: Counter[int] = Counter()
    turns.add(2, (2, 8 * MIB), 8 * MIB)
    for _ in range(100):
        party, size = turns.take()
        got[party] += size
        if party == 2:
            turns.add(2, (2, 8 * MIB), 8 * MIB)
    assert abs(got[1] - got[2]) <= 8 * MIB


def test_what_costs_no_bytes_has_its_turn_too() -> None:
    turns: Turns[tuple[int, int]] = Turns()
    for _ in range(1000):
        turns.add(1, (1, 1), 0)
    for _ in range(1000):
        turns.add(2, (2, 1), LEAST_COST)
    got = served(turns, 500)
    assert got[1] == got[2] == 250


def test_books_of_those_who_left_do_not_pile_up() -> None:
    turns: Turns[int] = Turns()
    for party in range(1000):
        turns.add(party, party, MIB)
        turns.take()
    assert not turns._at, "nobody waits"
    for _ in range(5000):
        turns.add(-1, -1, MIB)
    for party in range(2000):
        turns.add(party, party, MIB)
        assert turns.take() == -1 or turns.take() in (-1, party)
    assert len(turns._at) < 300


def test_at_random_nobody_waits_behind_more_than_its_share() -> None:
    """While two wait all the time their bytes never differ by more than their largest pieces."""
    for seed in range(40):
        dice = random.Random(seed)
        turns: Turns[tuple[int, int]] = Turns()
        largest = [dice.choice((100 * KIB, MIB, 8 * MIB)) for _ in range(2)]
        got: Counter[int] = Counter()
        for _ in range(300):
            for party in (0, 1):
                while sum(1 for _ in turns.newest(party)) < dice.randint(1, 5):
                    size = dice.randint(LEAST_COST, largest[party])
                    turns.add(party, (party, size), size)
            party, size = turns.take()
            got[party] += size
            assert abs(got[0] - got[1]) <= sum(largest), f"seed {seed}"


# ---- the queue of a tier


class OneByOne:
    """An executor whose workers move when they are told to."""

    def __init__(self) -> None:
        self.under_way: deque[Callable[[], None]] = deque()

    def open_lane(self, lane: str, workers: int) -> None:
        pass

    def run(self, lane: str, work: Callable[[], None], done: Callable[[None], None]) -> None:
        self.under_way.append(lambda: done(work()))  # type: ignore[func-returns-value]

    def step(self) -> None:
        self.under_way.popleft()()


class Rig:
    def __init__(self, workers: int = 1, queue_bytes: int = 64 * MIB) -> None:
        self.executor = OneByOne()
        self.queue = TierQueue(
            self.executor,
            "tier",
            workers,
            queue_bytes=queue_bytes,
            in_flight_bytes=queue_bytes,  # type: ignore[arg-type]
        )
        self.done: list[int] = []
        self.ousted: list[int] = []

    def submit(self, whose: int, size: int = MIB, priority: Priority = Priority.ONBOARD) -> bool:
        return self.queue.submit(
            Job(
                priority,
                UP,
                size,
                lambda: self.done.append(whose),
                lambda: None,
                whose,
                lambda: self.ousted.append(whose),
            )
        )


def test_a_flood_of_one_session_leaves_the_other_its_half() -> None:
    rig = Rig()
    for _ in range(60):
        assert rig.submit(1)
    for turn in range(20):
        if turn < 4:
            assert rig.submit(2)
        rig.executor.step()
    assert rig.done[:9].count(2) >= 4, "each of its jobs went after one of the other's at most"
    assert rig.done.count(1) == 16


def test_a_full_queue_makes_room_for_who_has_less_in_it() -> None:
    rig = Rig(queue_bytes=16 * MIB)
    while rig.submit(1):
        pass
    assert rig.queue.pending_bytes(UP) == 17 * MIB, "16 wait, one is under way"
    for _ in range(8):
        assert rig.submit(2)
    assert not rig.submit(2), "they have equal shares now"
    assert not rig.submit(1)
    assert rig.ousted == [1] * 8
    assert rig.queue.pending_bytes(UP) == 17 * MIB
    while rig.executor.under_way:
        rig.executor.step()
    assert Counter(rig.done) == {1: 9, 2: 8}
    assert rig.queue.pending_bytes(UP) == 0
    assert not rig.queue._queued_by


def test_the_least_urgent_gives_way_first() -> None:
    rig = Rig(queue_bytes=8 * MIB)
    rig.submit(1)
    for priority in (Priority.PREFETCH, Priority.ONBOARD) * 4:
        rig.submit(1, priority=priority)
    rig.submit(2)
    assert rig.ousted == [1]
    assert [job.priority for job in waiting(rig.queue._waiting) if job.whose == 1].count(
        Priority.PREFETCH
    ) == 3


def test_the_stores_own_jobs_are_never_turned_out() -> None:
    rig = Rig(queue_bytes=4 * MIB)
    kept = [Job(Priority.DEMOTE, UP, MIB, lambda: None, lambda: None) for _ in range(5)]
    assert all(rig.queue.submit(job) for job in kept)
    assert not rig.submit(2)
    assert not rig.ousted


def test_every_job_ends_once_whoever_floods() -> None:
    for seed in range(20):
        dice = random.Random(seed)
        rig = Rig(workers=3, queue_bytes=16 * MIB)
        taken = 0
        for _ in range(400):
            if dice.random() < 0.6:
                taken += rig.submit(
                    dice.randrange(4), dice.randint(0, 4 * MIB), dice.choice(list(Priority)[:3])
                )
            elif rig.executor.under_way:
                rig.executor.step()
            assert sum(rig.queue._queued_by.values()) == rig.queue._queued.get(UP, 0) <= 16 * MIB
        while rig.executor.under_way:
            rig.executor.step()
        assert len(rig.done) + len(rig.ousted) == taken
        assert rig.queue.busy() == 0


# ---- whole stores


def test_a_load_is_not_behind_all_that_another_client_asked_for(tmp_path: Path) -> None:
    """One client asks for everything there is on the disk; one block of another is read second."""
    order: list[bytes] = []
    gate = Gate("get_into")
    with live(64, nvme=tmp_path / "kv", nvme_options={"workers": 1}) as rig:
        space = rig.namespace()
        flood = [chain_of(space, 4, seed) for seed in range(10)]
        for chain in [*flood, small := chain_of(space, 1, seed=99)]:
            put_all(rig.client, chain)
        rig.flush("nvme")
        rig.client.evict("host")
        other = Client(rig.store, owner="other")
        other.open_namespace(space.namespace.spec)
        tier: Any = rig.tiers["nvme"]
        read = tier.tier.get_into

        def noting(wants: Any, deadline: Any, on_done: Any) -> None:
            order.extend(bytes(want.key) for want in wants)
            read(wants, deadline, on_done)

        tier.tier.get_into, tier.before = noting, gate
        loads = [rig.client.load_async(chain) for chain in flood]
        gate.reached()
        late = other.load_async(small)
        gate.open()
        assert len(late.result(20.0)) == 1
        late.result().release()
        for load in loads:
            with load.result(20.0) as lease:
                assert len(lease) == 4
        wanted = space.namespace.block_key(small.hashes[0], 0)
        assert order.index(wanted) <= 2 * 4, "behind the load that was under way, and one more at most"


def test_namespaces_take_turns_in_being_written_through(tmp_path: Path) -> None:
    with live(64, nvme=tmp_path / "kv", nvme_spec={"write": "through"}) as rig:
        edge = rig.store.edges[1]
        with rig.store.catalog.lock:
            edge.clearing += 1  # no demotion begins
        a, b = rig.namespace(salt="a"), rig.namespace(salt="b")
        for seed in range(10):
            put_all(rig.client, chain_of(a, 4, seed))
        for seed in range(3):
            put_all(rig.client, chain_of(b, 1, seed))
        with rig.store.catalog.lock:
            spaces = rig.store.catalog.index.space_of
            first = [edge.backlog.pop() for _ in range(6)]
            turns = [spaces[family] for family in first]
            edge.backlog.put_back(first)
            edge.clearing -= 1
        assert turns[:6].count(spaces_number(rig, b)) == 3
        rig.store.reaper.kick()
        eventually(lambda: not rig.store.catalog.index.array("dirty").any(), "all is written")


def spaces_number(rig: Any, space: Any) -> int:
    return int(rig.store.catalog.index.space(space.namespace.digest).number)


# ---- sessions of several processes

SCRIPT = """
import sys
from tests.client_support import chain_of, spec_of
from tierkv.daemon.remote import RemoteClient
path, blocks, first, last = sys.argv[1], *map(int, sys.argv[2:])
with RemoteClient(path, owner="fair", call_s=60.0) as client:
    space = client.open_namespace(spec_of())
    loads = [client.load_async(chain_of(space, blocks, seed), timeout_s=60.0) for seed in range(first, last)]
    print("asked", flush=True)
    found = 0
    for load in loads:
        with load.result(60.0) as lease:
            found += len(lease)
    print(found, flush=True)
"""


def engine(path: Path, blocks: int, seeds: range) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", SCRIPT, str(path), *map(str, (blocks, seeds.start, seeds.stop))],
        stdout=subprocess.PIPE,
        text=True,
        cwd=daemon_process.ROOT,
    )


def test_a_process_that_floods_the_disk_leaves_another_its_share(tmp_path: Path) -> None:
    """One engine asks for ten prompts at once, another for three; each of these is read behind one of the others."""
    order: list[bytes] = []
    opened = threading.Event()
    face = FACE.set(DAEMON)
    try:
        one, patient = {"workers": 1}, {"timeout_s": 120.0}
        with live(
            64, nvme=tmp_path / "kv", nvme_options=one, nvme_spec=patient, load_deadline_s=120.0
        ) as rig:
            space = rig.namespace()
            floods, smalls = range(10), range(50, 53)
            for seed in (*floods, *smalls):
                put_all(rig.client, chain_of(space, 4, seed))
            rig.flush("nvme")
            rig.client.evict("host")
            tier: Any = rig.tiers["nvme"]
            read, queue = tier.tier.get_into, rig.store.edges[1].queue

            def noting(wants: Any, deadline: Any, on_done: Any) -> None:
                order.extend(bytes(want.key) for want in wants)
                read(wants, deadline, on_done)

            def asked() -> int:
                with queue._lock:
                    return sum(job.priority is Priority.ONBOARD for job in waiting(queue._waiting))

            def before(call: str) -> None:
                assert call != "get_into" or opened.wait(120.0)

            tier.tier.get_into, tier.before = noting, before
            server: Any = rig.client
            loud = engine(server.server.path, 4, floods)
            eventually(lambda: asked() == 9, "one is being read, the others wait", 60.0)
            quiet = engine(server.server.path, 4, smalls)
            eventually(lambda: asked() == 12, "the second has asked for all", 60.0)
            opened.set()
            assert quiet.communicate(timeout=60)[0].split() == ["asked", "12"]
            assert loud.communicate(timeout=60)[0].split() == ["asked", "40"]
            key = space.namespace.block_key
            theirs = {key(block, 0) for seed in smalls for block in chain_of(space, 4, seed).hashes}
            read_first = [block in theirs for block in order[: 4 * 7]]
            assert sum(read_first) == 12, "of the first seven prompts that were read three are the second's"
    finally:
        opened.set()
        FACE.reset(face)
