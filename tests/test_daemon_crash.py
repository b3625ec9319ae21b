"""D25, D15: kill -9 of clients and of the daemon at random moments under load; afterwards everything is as it was."""

from __future__ import annotations

import gc
import os
import random
import select
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.client_support import chain_of, full_group, layout_of, payloads_of, spec_of
from tests.daemon_load import (
    Load,
    check_lease,
    child,
    descriptors_of,
    load_in_child,
    mappings_of,
    memory_of,
    open_space,
    threads_of,
)
from tests.daemon_process import PATIENCE_S, Daemon, running_daemon
from tests.valkey_server import eventually
from tierkv.daemon.remote import RemoteClient
from tierkv.errors import Away
from tierkv.units import MIB

ARENA_BYTES = 128 * MIB
SETTINGS: dict[str, Any] = {
    "host_capacity": "128 MiB",
    "host_region": "1 MiB",
    "host_populate": False,  # so that all of it counts against the limit
    "limits_lease_deadline": "1 h",
    "memory_bytes": ARENA_BYTES * 3 // 2,
}
MINE = 3 * 64 * 1024
CYCLES = [
    pytest.param(10, id="10"),
    pytest.param(100, id="100", marks=[pytest.mark.torture, pytest.mark.timeout(3600)]),
]


def used_bytes(client: RemoteClient) -> int:
    tiers = client.stats()["tiers"]
    assert isinstance(tiers, dict)
    return int(tiers["host"]["used_bytes"])


def at_rest(client: RemoteClient) -> bool:
    """Nothing is held, and all slots are free again."""
    client.clear().result(PATIENCE_S)
    return client.stats()["leases"] == 0 and used_bytes(client) == 0


def fill(client: RemoteClient) -> None:
    """Twice the arena, so that each of its pages was touched."""
    space = client.open_namespace(spec_of(layout_of(full_group(MIB))))
    for number in range(2 * ARENA_BYTES // MIB // 16):
        client.put(chain_of(space, 16, seed=number), [bytes(MIB)] * 16)
    client.clear().result(PATIENCE_S)


def killed_at_a_random_moment(children: list[tuple[int, int]], dice: random.Random) -> None:
    """Each when it is well at work; what it said until then must be no complaint."""
    for pid, pipe in children:
        said = b""
        while len(said) < 5 + dice.randrange(200):
            ready, _, _ = select.select([pipe], [], [], PATIENCE_S)
            assert ready, "the client under load hangs"
            said += os.read(pipe, 100)
            assert b"x" not in said, "the client under load has seen something wrong"
            assert said.strip(b".") == b""
        os.kill(pid, signal.SIGKILL)
    for pid, pipe in children:
        os.waitpid(pid, 0)
        assert b"x" not in os.read(pipe, 1_000_000)
        os.close(pipe)


@pytest.mark.parametrize("cycles", CYCLES)
def test_d15_d25_clients_that_are_killed_leave_nothing_behind(tmp_path: Path, cycles: int) -> None:
    """In one and a half arenas of memory, which the kernel keeps where this user may ask it to."""
    dice = random.Random(1)
    with running_daemon(tmp_path, **SETTINGS) as daemon, daemon.client() as client:
        space = open_space(client)
        fill(client)
        client.put(chain_of(space, 3), payloads_of(chain_of(space, 3)))
        with client.load(chain_of(space, 3)) as mine:
            facts = lambda: (descriptors_of(daemon.pid), mappings_of(daemon.pid), threads_of(daemon.pid))  # noqa: E731
            start, anonymous = facts(), memory_of(daemon.pid, "RssAnon")
            for cycle in range(cycles):
                children = [load_in_child(daemon.socket, dice.randrange(1 << 30)) for _ in range(2)]
                killed_at_a_random_moment(children, dice)
                check_lease(mine)
                eventually(
                    lambda: facts() == start, f"{facts()} is {start} again (cycle {cycle})", PATIENCE_S
                )
                assert memory_of(daemon.pid, "RssShmem") <= 1.05 * ARENA_BYTES
                assert memory_of(daemon.pid, "RssAnon") <= anonymous + 16 * MIB, (
                    "the ring of events, and no more"
                )
                client.clear().result(PATIENCE_S)
                eventually(lambda: used_bytes(client) == MINE, "the slots of the dead are free", PATIENCE_S)
                assert client.stats()["leases"] == 1
            check_lease(mine)
        assert at_rest(client)
        for pid in (daemon.pid, os.getpid()):
            assert "/dev/shm" not in Path(f"/proc/{pid}/maps").read_text()


@pytest.mark.parametrize("cycles", CYCLES)
def test_d24_d25_a_daemon_that_is_killed_is_a_miss_until_it_is_back(tmp_path: Path, cycles: int) -> None:
    dice = random.Random(2)
    disk = {"nvme_path": str(tmp_path / "disk"), "nvme_capacity": "16 MiB", "nvme_min_free": 0}
    client = RemoteClient(str(tmp_path / "t.sock"), owner="survivor", call_s=PATIENCE_S)
    with client:
        load = Load(client, 3)
        start = None
        for _ in range(cycles):
            with running_daemon(tmp_path, **SETTINGS, **disk) as daemon:
                eventually(lambda: there(client), "the client has found the daemon", PATIENCE_S)
                for _ in range(20 + dice.randrange(60)):
                    load.step()
                found = (descriptors_of(os.getpid()), mappings_of(os.getpid()))
                start = found if start is None else start
                kill_under(daemon, load, dice)
                load.step()
                load.let_go()
                gc.collect()
        assert load.loaded, "the load has had hits"
        with running_daemon(tmp_path, **SETTINGS, **disk):
            eventually(lambda: there(client), "the client has found the daemon", PATIENCE_S)
            gc.collect()
            assert mappings_of(os.getpid()) <= 2, "arena and table of one daemon"
            assert client.link.reconnects == cycles
            eventually(lambda: at_rest(client), "nothing is held", PATIENCE_S)
            assert start is not None
            assert descriptors_of(os.getpid()) <= start[0] + 2
    assert mappings_of(os.getpid()) == 0


def there(client: RemoteClient) -> bool:
    try:
        client.stats()
    except Away:
        return False
    return True


def kill_under(daemon: Daemon, load: Load, dice: random.Random) -> None:
    """While threads of the client are in the middle of calls."""
    from tierkv.testing.threads import run_together

    loads = [Load(load.client, dice.randrange(1 << 30)) for _ in range(3)]

    def work(its: Load) -> None:
        for _ in range(30):
            its.step()
        its.let_go()

    def kill() -> None:
        for _ in range(dice.randrange(10)):
            load.step()
        daemon.process.kill()
        daemon.process.wait()

    run_together([kill, *(lambda its=its: work(its) for its in loads)], PATIENCE_S)  # type: ignore[misc]


def test_d15_d25_a_client_that_stands_still_keeps_what_it_holds(tmp_path: Path) -> None:
    """It is stopped in the middle of a put, with a lease that is overdue meanwhile, and others want all of the room.
    When it goes on it finds its bytes, what it writes hits nobody, and with it all of that is gone."""
    with (
        running_daemon(
            tmp_path, host_capacity="4 MiB", host_region="1 MiB", limits_lease_deadline="1 s"
        ) as daemon,
        daemon.client() as client,
    ):

        def work(tick: Callable[[], None]) -> None:
            mine = RemoteClient(str(daemon.socket), call_s=PATIENCE_S)
            space = open_space(mine)
            chain = chain_of(space, 6, seed=99)
            mine.put(chain, payloads_of(chain))
            lease, draft = mine.load(chain), mine.reserve(chain_of(space, 2, seed=98))
            assert draft is not None
            assert len(lease) == 6
            draft.view(0, 0)[:] = b"\xbb" * (64 * 1024)
            tick()
            os.kill(os.getpid(), signal.SIGSTOP)
            draft.view(1, 0)[:] = b"\xcc" * (64 * 1024)
            check_lease(lease)
            tick()
            signal.pause()

        pid, pipe = child(work)
        load = Load(client, 5)
        try:
            assert os.read(pipe, 1) == b"."
            eventually(lambda: "is disconnected: a lease is past" in daemon.log, "it is overdue", PATIENCE_S)
            for _ in range(200):
                load.step()
            os.kill(pid, signal.SIGCONT)
            assert os.read(pipe, 1) == b"."
            for _ in range(100):
                load.step()
        finally:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
            os.close(pipe)
        load.let_go()
        assert load.loaded
        eventually(lambda: at_rest(client), "nothing is held", PATIENCE_S)
        assert "Traceback" not in daemon.log
