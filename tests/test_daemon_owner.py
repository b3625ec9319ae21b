"""D24, D25, D26: who owns a socket and a directory, how a daemon ends, and clients in forked or ending processes."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.client_support import chain_of, payloads_of
from tests.daemon_load import check_lease, descriptors_of, open_space
from tests.daemon_process import (
    PATIENCE_S,
    ROOT,
    Daemon,
    environment,
    run_tierkv,
    running_daemon,
    write_config,
)
from tests.valkey_server import eventually
from tierkv.daemon.remote import RemoteClient
from tierkv.errors import Away, ForkError, TierKVError

SMALL = {"host_capacity": "4 MiB", "host_region": "1 MiB"}


@pytest.fixture(scope="module")
def daemon(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Daemon]:
    with running_daemon(tmp_path_factory.mktemp("owner"), **SMALL) as daemon:
        yield daemon


# ---- one name, one owner


def test_d24_two_daemons_side_by_side_do_not_see_each_other(daemon: Daemon, tmp_path: Path) -> None:
    with running_daemon(tmp_path, **SMALL) as other, daemon.client() as one, other.client() as two:
        chain = chain_of(open_space(one), 2)
        open_space(two)
        assert one.put(chain, payloads_of(chain)).stored == 2
        assert (one.match(chain).blocks, two.match(chain).blocks) == (2, 0)
        one.clear().result(PATIENCE_S)


def test_d24_a_second_daemon_on_the_same_socket_is_refused_in_words(daemon: Daemon) -> None:
    second = run_tierkv("serve", "--config", daemon.config)
    assert second.returncode
    assert str(daemon.pid) in second.stderr
    assert str(daemon.socket) in second.stderr
    assert "another path" in second.stderr
    with daemon.client() as client:
        assert client.health().ready, "the first one is not disturbed"


def test_d24_a_second_daemon_on_the_same_directory_is_refused_in_words(tmp_path: Path) -> None:
    disk = {"nvme_path": str(tmp_path / "disk"), "nvme_capacity": "16 MiB", "nvme_min_free": 0}
    (tmp_path / "one").mkdir()
    (tmp_path / "two").mkdir()
    with running_daemon(tmp_path / "one", **SMALL, **disk) as first:
        config = write_config(tmp_path / "two", **SMALL, **disk)
        second = run_tierkv("serve", "--config", config)
        assert second.returncode
        assert f"{first.pid}" in second.stderr
        assert str(tmp_path / "disk") in second.stderr
        assert not (tmp_path / "two" / "t.sock").exists(), "it leaves no socket behind"


def test_d24_of_eight_that_start_at_once_one_wins(tmp_path: Path) -> None:
    """A dead daemon's socket and lock lie there already."""
    config = write_config(tmp_path, **SMALL)
    (tmp_path / "t.sock.lock").write_text("1\n")
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as dead:
        dead.bind(str(tmp_path / "t.sock"))
    daemons = [
        subprocess.Popen(
            [sys.executable, "-m", "tierkv.cli", "serve", "--config", str(config)],
            stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, env=environment(),
        )
        for _ in range(8)
    ]  # fmt: skip
    try:
        eventually(lambda: sum(one.poll() is None for one in daemons) == 1, "one is left", 2 * PATIENCE_S)
        with RemoteClient(str(tmp_path / "t.sock")) as client:
            eventually(lambda: client.health().ready, "it serves", PATIENCE_S)
        [winner] = [one for one in daemons if one.poll() is None]
        for one in daemons:
            if one is not winner:
                assert one.returncode
                assert one.stderr is not None
                assert "another daemon" in one.stderr.read()
    finally:
        for one in daemons:
            one.kill()
            one.wait()
            assert one.stderr is not None
            one.stderr.close()


def wait_long(client: RemoteClient) -> None:
    with pytest.raises(Away):
        client.events(10**9, timeout_s=50.0)


@pytest.mark.parametrize("state", ["idle", "in a call"])
def test_d25_a_daemon_ends_at_once_with_clients_at_it(tmp_path: Path, state: str) -> None:
    """SIGTERM: less than 2 s; a busy machine may need more for itself, but nobody waits 5 s for a thread in vain."""
    with running_daemon(tmp_path, **SMALL) as daemon, daemon.client() as client:
        open_space(client)
        waiting = []
        if state == "in a call":
            waiting = [threading.Thread(target=wait_long, args=(client,))]
        for thread in waiting:
            thread.start()
        start_s = time.monotonic()
        assert daemon.stop() == 0
        assert time.monotonic() - start_s < 4.5
        for thread in waiting:
            thread.join(PATIENCE_S)
        assert not daemon.socket.exists()


# ---- D26: clients in processes that fork or end


def in_a_child(call: Callable[[], str]) -> str:
    """What ``call`` says in a forked child."""
    read, write = os.pipe()
    pid = os.fork()
    if pid == 0:  # nothing of pytest may run here
        said = b"died"
        try:
            signal.alarm(60)
            said = call().encode()
        finally:
            os.write(write, said)
            os._exit(0)
    os.close(write)
    with open(read, "rb") as pipe:
        answer = pipe.read().decode()
    os.waitpid(pid, 0)
    return answer


def test_d26_a_client_used_after_a_fork_says_so_also_with_threads_at_work(daemon: Daemon) -> None:
    with daemon.client() as client:
        space = open_space(client)
        chain = chain_of(space, 2)
        client.put(chain, payloads_of(chain))
        stop = threading.Event()

        def work() -> None:
            while not stop.is_set():
                client.load(chain).release()

        threads = [threading.Thread(target=work) for _ in range(4)]
        for thread in threads:
            thread.start()
        lease = client.load(chain)

        def child() -> str:
            wrong = []
            for name, verb in {
                "match": lambda: client.match(chain),
                "load": lambda: client.load(chain),
                "put": lambda: client.put(chain, payloads_of(chain)),
                "stats": client.stats,
                "view": lambda: lease.view(0),
            }.items():
                try:
                    verb()
                    wrong.append(name)
                except ForkError:
                    pass
                except TierKVError as error:
                    wrong.append(f"{name}: {error!r}")
            lease.release()
            client.close()
            return "; ".join(wrong) or "all well"

        for _ in range(10):
            assert in_a_child(child) == "all well"
        stop.set()
        for thread in threads:
            thread.join(PATIENCE_S)
        check_lease(lease)
        # A release has no answer: the last ones may still be on their way, on other connections.
        eventually(lambda: client.stats()["leases"] <= 1, "all others are released", PATIENCE_S)
        assert client.stats()["leases"] == 1, "what the children did not say was not heard"
        lease.release()


def test_d26_a_child_of_a_dead_client_keeps_nothing(daemon: Daemon) -> None:
    """It has inherited the connections, and lives on: the session ends with its process all the same."""
    with daemon.client() as observer:
        open_space(observer)
        start = descriptors_of(daemon.pid)
        read, write = os.pipe()
        pid = os.fork()
        if pid == 0:
            try:
                client = RemoteClient(str(daemon.socket))
                chain = chain_of(open_space(client), 2, seed=3)
                client.put(chain, payloads_of(chain))
                client.load(chain)
                grandchild = os.fork()
                if grandchild == 0:
                    signal.pause()
                os.write(write, f"{grandchild}\n".encode())
                signal.pause()
            finally:
                os._exit(0)
        grandchild = int(os.read(read, 20))
        try:
            assert observer.stats()["leases"] == 1
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
            eventually(lambda: observer.stats()["leases"] == 0, "the lease is taken back", PATIENCE_S)
            eventually(lambda: descriptors_of(daemon.pid) == start, "and so are its descriptors", PATIENCE_S)
        finally:
            os.kill(grandchild, signal.SIGKILL)
            os.close(read)
            os.close(write)


SCRIPT = """
    import os, signal, sys
    import tierkv
    from tests.daemon_process import spec_of, tokens_of
    client = tierkv.connect("unix://" + sys.argv[1], owner="script")
    space = client.open_namespace(spec_of())
    chain = space.chain(tokens_of(3))
    assert client.put(chain, [bytes([7]) * 65536] * 3).stored + client.match(chain).blocks >= 3
    lease = client.load(chain)
    assert len(lease) == 3 and bytes(lease.view(2)) == bytes([7]) * 65536
    draft = client.reserve(space.chain(tokens_of(1, first=os.getpid() % 20_000 + 1)))
    assert "/dev/shm" not in open("/proc/self/maps").read()
    if sys.argv[2] == "exception":
        raise KeyError("on purpose")
    if sys.argv[2] == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    if sys.argv[2] == "close":
        lease.release()
        client.close()
"""
ENDS = {"exit": 0, "close": 0, "exception": 1, "kill": -signal.SIGKILL}


def run_script(python: str, daemon: Daemon, how: str) -> None:
    done = subprocess.run(
        [python, "-c", textwrap.dedent(SCRIPT), str(daemon.socket), how],
        capture_output=True, text=True, timeout=PATIENCE_S, env=environment(), cwd=ROOT, check=False,
    )  # fmt: skip
    assert done.returncode == ENDS[how], done.stderr
    assert "tracker" not in done.stderr
    assert ("KeyError" in done.stderr) == (how == "exception"), done.stderr
    if how != "exception":
        assert not done.stderr, done.stderr


@pytest.mark.parametrize("how", ENDS)
def test_d26_however_a_client_ends_nothing_is_left(daemon: Daemon, how: str) -> None:
    with daemon.client() as observer:
        open_space(observer)
        start = descriptors_of(daemon.pid)
        run_script(sys.executable, daemon, how)
        eventually(lambda: observer.stats()["leases"] == 0, "no lease is left", PATIENCE_S)
        eventually(lambda: descriptors_of(daemon.pid) <= start, "no connection is left", PATIENCE_S)
        observer.clear().result(PATIENCE_S)
        eventually(
            lambda: observer.stats()["tiers"]["host"]["used_bytes"] == 0,  # type: ignore[index]
            "no slot is left", PATIENCE_S,
        )  # fmt: skip


VERSIONS = Path.home() / ".pyenv/versions"
PYTHONS = [path for version in ("3.12", "3.13") for path in VERSIONS.glob(f"{version}.*/bin/python3")]


@pytest.mark.torture
@pytest.mark.timeout(900)
@pytest.mark.parametrize("python", PYTHONS, ids=lambda path: path.parts[-3])
def test_d26_clients_on_other_pythons(daemon: Daemon, tmp_path: Path, python: Path) -> None:
    subprocess.run([str(python), "-m", "venv", str(tmp_path / "venv")], check=True)
    own = str(tmp_path / "venv" / "bin" / "python")
    subprocess.run([own, "-m", "pip", "install", "-q", "numpy", "xxhash", "msgpack"], check=True)
    for how in ENDS:
        run_script(own, daemon, how)
