"""``tierkv.connect(private=...)``: one sidecar for the processes of an engine, which ends with them."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

import tierkv
from tests.daemon_process import PATIENCE_S, ROOT, environment, payloads_of, spec_of, tokens_of
from tests.valkey_server import eventually
from tierkv.config import load_config
from tierkv.daemon.listening import lock_of, try_lock, unlock
from tierkv.daemon.private_place import place_of, start_lock_of
from tierkv.daemon.private_settings import environment_of, values_of
from tierkv.errors import ConfigError, SidecarError

SMALL: dict[str, Any] = {"host_capacity": "4 MiB", "host_populate": False}
WORDS = ["host_capacity=4 MiB", "host_populate=no"]


@pytest.fixture(autouse=True)
def runtime(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Where sockets are, for this test alone; pytest's own folders have names that are too long."""
    for name in list(os.environ):
        if name.startswith("TIERKV_"):
            monkeypatch.delenv(name)
    with tempfile.TemporaryDirectory() as folder:
        monkeypatch.setenv("XDG_RUNTIME_DIR", folder)
        yield Path(folder, "tierkv")


class Engine:
    """A process of an engine; see ``tests.private_engine``."""

    def __init__(self, runtime: Path, name: str, words: Sequence[str] = WORDS) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-m", "tests.private_engine", name, *words],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=ROOT,
            env=environment(XDG_RUNTIME_DIR=str(runtime.parent)),
        )  # fmt: skip
        self.facts: dict[str, Any] = {}

    def ready(self) -> dict[str, Any]:
        if not self.facts:
            self.facts = self._hear()
        return self.facts

    def ask(self, what: str) -> Any:
        self.say(what)
        return self._hear()

    def say(self, what: str) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(what + "\n")
        self.process.stdin.flush()

    def _hear(self) -> Any:
        assert self.process.stdout is not None
        assert self.process.stderr is not None
        line = self.process.stdout.readline()
        assert line, self.process.stderr.read()
        return json.loads(line)


@contextlib.contextmanager
def engines(runtime: Path, count: int, name: str = "e") -> Iterator[list[Engine]]:
    """So many processes, started at once."""
    started = [Engine(runtime, name) for _ in range(count)]
    try:
        yield started
    finally:
        for engine in started:
            engine.process.kill()
            engine.process.wait()
            for pipe in (engine.process.stdin, engine.process.stdout, engine.process.stderr):
                with contextlib.suppress(BrokenPipeError):  # what it did not read any more
                    pipe.close()  # type: ignore[union-attr]


def lives(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):  # gone before the file was opened, or before it was read
        return False
    return state != "Z"


def nothing_left(runtime: Path, *sidecars: int) -> None:
    eventually(lambda: not any(map(lives, sidecars)), "the sidecar has ended", PATIENCE_S)
    assert list(runtime.iterdir()) == []


def use(client: Any) -> int:
    """Stores two blocks and finds them."""
    chain = client.open_namespace(spec_of()).chain(tokens_of(2))
    client.put(chain, payloads_of(2))
    with client.load(chain) as lease:
        return len(lease)


# ---- one process


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="needs two cores")
def test_a_sidecar_is_not_bound_to_the_core_that_a_worker_bound_itself_to(runtime: Path) -> None:
    """A worker of vLLM spins on its core; a sidecar that was left there answered nothing for a minute."""
    cores = os.sched_getaffinity(0)
    found: list[set[int]] = []

    def start() -> None:
        os.sched_setaffinity(0, {min(cores)})  # of this thread, and so of what it starts
        with tierkv.connect(private="bound", **SMALL) as client:
            found.append(os.sched_getaffinity(client.sidecar.child.pid))

    thread = threading.Thread(target=start)
    thread.start()
    thread.join(PATIENCE_S)
    assert found == [cores]
    nothing_left(runtime)


def test_d25_d26_a_sidecar_comes_and_goes_with_its_client(
    runtime: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "tierkv")
    with tierkv.connect(private="engine 7", **SMALL) as client:
        sidecar = client.sidecar.child.pid
        assert use(client) == 2
        assert client.sidecar.path.parent == runtime
        assert runtime.stat().st_mode & 0o777 == 0o700
        assert client.sidecar.path.stat().st_mode & 0o777 == 0o600
    assert not lives(sidecar)
    nothing_left(runtime)
    client.close()  # once more
    assert f"sidecar {sidecar}: serving on {client.sidecar.path}" in caplog.text
    assert not [record for record in caplog.records if record.levelno > logging.INFO]


def test_a_client_comes_back_after_the_sidecar_was_killed(
    runtime: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with tierkv.connect(private="e", **SMALL) as client, tierkv.connect(private="e") as other:
        first = client.sidecar.child.pid
        assert other.sidecar.child is None
        assert use(client) == use(other) == 2
        chain = client.open_namespace(spec_of()).chain(tokens_of(2))
        os.kill(first, signal.SIGKILL)
        eventually(lambda: not lives(first), "it is dead", PATIENCE_S)
        assert client.match(chain).blocks == 0
        assert client.put(chain, payloads_of(2)).stored in (0, 2)
        eventually(lambda: use(client) == 2, "another one runs", PATIENCE_S)
        eventually(lambda: other.match(chain).blocks == 2, "the other client has found it", PATIENCE_S)
        (second,) = {one.sidecar.child.pid for one in (client, other) if one.sidecar.child} - {first}
        told = other.link.call("settings", {}, time.monotonic() + PATIENCE_S)
        assert told["pid"] == second
        assert told["values"]["host.capacity"][1] == "4 MiB"  # whoever of them has started it
        assert "ended with status -9" in caplog.text
    nothing_left(runtime, second)


def test_d29_other_settings_are_refused_by_name(runtime: Path) -> None:
    with tierkv.connect(private="e", **SMALL) as client:
        pid = client.sidecar.child.pid
        with pytest.raises(
            ConfigError, match=rf"host.capacity = '8 MiB': .*'e' \(pid {pid}\) runs with 4 MiB"
        ):
            tierkv.connect(private="e", **{**SMALL, "host_capacity": "8 MiB"})
        with pytest.raises(ConfigError, match=r"nvme.path = '/x': .* runs with None"):
            tierkv.connect(private="e", **SMALL, nvme_path="/x", nvme_capacity="1 MiB", nvme_min_free=0)
        with tierkv.connect(private="e", host_capacity=4 * 2**20, host_populate=False) as same:
            assert same.health().ready
        assert use(client) == 2
        assert len(client.stats()) > 1
    nothing_left(runtime)


def test_d29_what_keeps_it_from_starting_is_said(runtime: Path) -> None:
    with pytest.raises(
        ConfigError, match=r"host_capacty = '4 MiB': no such setting .did you mean 'host_capacity'"
    ):
        tierkv.connect(private="e", host_capacty="4 MiB")
    with pytest.raises(ConfigError, match=r"sidecar.socket = '/x': the socket of a private sidecar follows"):
        tierkv.connect(private="e", sidecar_socket="/x")
    with pytest.raises(ConfigError, match="not both"):
        tierkv.connect("unix:///x", private="e")
    with pytest.raises(ConfigError, match="host_capacity = '4 MiB': a daemon has its own configuration"):
        tierkv.connect(host_capacity="4 MiB")
    with pytest.raises(ConfigError, match="private = ''"):
        tierkv.connect(private="")
    with pytest.raises(
        SidecarError, match=r"'e' ended with status 2: .*sidecar.http = '/nowhere/h': No such file"
    ):
        tierkv.connect(private="e", **SMALL, sidecar_http="unix:///nowhere/h")
    nothing_left(runtime)


def test_a_client_whose_connections_break_finds_the_sidecar_still_there(runtime: Path) -> None:
    with tierkv.connect(private="e", **SMALL) as client:
        first = client.sidecar.child
        assert use(client) == 2
        chain = client.open_namespace(spec_of()).chain(tokens_of(2))
        for line in list(client.link._open):
            line.sock.shutdown(socket.SHUT_RDWR)
        eventually(lambda: client.match(chain).blocks == 2, "it is back, with what it had stored", PATIENCE_S)
        assert client.sidecar.child is first
    nothing_left(runtime)


def test_d26_an_import_starts_nothing() -> None:
    code = "import tierkv, os; print(len(os.listdir('/proc/self/task')), len(os.listdir('/proc/self/fd')))"
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT)
    assert ran.stdout == "1 4\n"  # one thread; the standard files, and the folder that is listed


def test_two_engines_do_not_see_each_other(runtime: Path) -> None:
    long = "an id of many words, /slashes/ and ümlauts " * 20
    with (
        tierkv.connect(private=long + "1", **SMALL) as one,
        tierkv.connect(private=long + "2", **SMALL) as two,
    ):
        assert one.sidecar.path != two.sidecar.path
        assert use(one) == 2
        chain = two.open_namespace(spec_of()).chain(tokens_of(2))
        assert two.match(chain).blocks == 0
    nothing_left(runtime)


# ---- where


def test_a_place_that_is_too_long_or_not_private_is_not_taken(tmp_path: Path) -> None:
    deep = tmp_path / ("x" * 100)
    deep.mkdir()
    short = tmp_path / "t"
    short.mkdir()
    environ = {"XDG_RUNTIME_DIR": str(deep), "TMPDIR": str(short)}
    path = place_of("e", environ)
    assert path == short / f"tierkv-{os.getuid()}" / path.name
    assert place_of("e", environ) == path
    path.parent.chmod(0o777)
    assert place_of("e", environ).parent == Path(f"/tmp/tierkv-{os.getuid()}")
    path.parent.rmdir()
    path.parent.symlink_to(tmp_path)
    assert place_of("e", environ).parent == Path(f"/tmp/tierkv-{os.getuid()}")


def test_settings_say_the_same_as_environment_variables(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "t.toml").write_text("limits.load_deadline = '7 s'\nhost.pin_budget = '1 MiB'")
    monkeypatch.chdir(tmp_path)
    environ = {
        "TIERKV_CONFIG": "t.toml",
        "TIERKV_LIMITS_QUEUE": "9 MiB",
        "TIERKV_HOST_PIN_BUDGET": "2 MiB",
        "HOME": "/",
    }
    settings: dict[str, Any] = {
        "host_capacity": 8 * 2**20, "host_populate": False, "limits_shutdown_deadline": 1.5, "nvme_path": None,
        "host_low_watermark": 0.25, "weights_cache": tmp_path / "w", "limits_queue": "8 MiB",
    }  # fmt: skip
    wanted = load_config(environ=environ, **settings)
    monkeypatch.chdir("/")
    given = environment_of(settings, {**environ, "TIERKV_CONFIG": str(tmp_path / "t.toml")})
    assert values_of(load_config(environ={**given, "HOME": "/"})) == values_of(wanted)
    assert wanted.limits.queue_bytes == 8 * 2**20


# ---- processes


def test_d24_eight_processes_that_start_at_once_have_one_sidecar(runtime: Path) -> None:
    with engines(runtime, 8) as eight:
        facts = [engine.ready() for engine in eight]
        assert len({one["sidecar"] for one in facts}) == 1
        assert [one["started"] for one in facts].count(True) == 1
        starter = next(engine for engine in eight if engine.facts["started"])
        others = [engine for engine in eight if engine is not starter]
        assert starter.ask("put") == 2
        assert [engine.ask("count") for engine in eight] == [2] * 8
        assert [path.name for path in runtime.iterdir() if path.suffix == ".start"] == []
        for engine in others[:3]:  # in three ways, and the sidecar stays
            assert engine.ask("close") == "closed"
        others[3].process.kill()
        others[4].say("raise")
        others[5].say("exit")
        for engine in others[3:6]:
            engine.process.wait(PATIENCE_S)
        assert starter.ask("count") == others[6].ask("count") == 2
        sidecar = facts[0]["sidecar"]
        starter.process.send_signal(signal.SIGKILL)  # and now it goes
        eventually(lambda: not lives(sidecar), "it has died with its process", PATIENCE_S)
        eventually(lambda: others[6].ask("put") == 2, "the last one has started another", PATIENCE_S)
        assert others[6].ask("close") == "closed"
        nothing_left(runtime)


def test_d25_nothing_is_left_however_the_engine_ends(runtime: Path) -> None:
    with contextlib.ExitStack() as undo:
        four = {
            way: undo.enter_context(engines(runtime, 1, way))[0]
            for way in ("kill", "raise", "exit", "end of input")
        }
        sidecars = {engine.ready()["sidecar"] for engine in four.values()}
        assert len(sidecars) == 4
        assert [engine.ask("put") for engine in four.values()] == [2] * 4
        four["kill"].process.kill()
        four["raise"].say("raise")
        four["exit"].say("exit")
        assert four["end of input"].process.stdin is not None
        four["end of input"].process.stdin.close()
        for engine in four.values():
            engine.process.wait(PATIENCE_S)
        nothing_left(runtime, *sidecars)


def threads_of(pid: int) -> int:
    """Those of a killed process may outlive the first one for a moment, and hold its locks."""
    try:
        return len(os.listdir(f"/proc/{pid}/task"))
    except FileNotFoundError:
        return 0


def test_d25_what_a_sidecar_leaves_that_dies_with_its_engine_goes_at_the_next_start(runtime: Path) -> None:
    with engines(runtime, 1, "old") as (engine,):
        sidecar = engine.ready()["sidecar"]
        os.kill(engine.process.pid, signal.SIGSTOP)
        os.kill(sidecar, signal.SIGKILL)
        engine.process.kill()
        eventually(lambda: not lives(sidecar) and threads_of(sidecar) <= 1, "it is dead", PATIENCE_S)
    assert list(runtime.iterdir()) != []
    with tierkv.connect(private="new", **SMALL) as client:
        assert {path.stem.partition(".")[0] for path in runtime.iterdir()} == {client.sidecar.path.stem}
    nothing_left(runtime)


def test_d15_the_announcement_of_a_process_that_dies_is_abandoned(runtime: Path) -> None:
    with tierkv.connect(private="e", **SMALL) as client, engines(runtime, 1) as (engine,):
        assert not engine.ready()["started"]
        chain = client.open_namespace(spec_of()).chain(tokens_of(2))
        future = client.watch(chain, grace_s=PATIENCE_S, timeout_s=2 * PATIENCE_S)
        assert engine.ask("announce") is True
        assert not future.done()
        engine.process.kill()
        assert future.result(PATIENCE_S).end == "abandoned"


def test_with_parent_need_not_be_the_parent(tmp_path: Path) -> None:
    other = subprocess.Popen(["sleep", "600"])
    serve = subprocess.Popen(
        [sys.executable, "-m", "tierkv.cli", "serve", "--socket", str(tmp_path / "s"), "--with-parent", str(other.pid)],
        env=environment(TIERKV_HOST_CAPACITY="4 MiB"), stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    assert serve.stderr is not None
    lines = []
    with serve.stderr:
        for line in serve.stderr:
            lines.append(line)
            if "serving on" in line:
                other.kill()
    other.wait()
    assert serve.wait(PATIENCE_S) == 0
    assert f"process {other.pid}, whose sidecar this is, has ended" in lines[-1]
    assert list(tmp_path.iterdir()) == []


# ---- locks


def test_a_lock_that_is_removed_is_never_held_by_two(tmp_path: Path) -> None:
    path = tmp_path / "lock"
    first = try_lock(path)
    assert first is not None
    assert try_lock(path) is None
    late = os.open(path, os.O_RDWR)  # who has opened it, and is about to lock it
    unlock(path, first)
    assert not path.exists()
    second = try_lock(path)
    assert second is not None
    assert os.fstat(late).st_ino != os.fstat(second).st_ino
    os.close(late)
    unlock(path, second)


def test_who_waits_for_a_start_that_does_not_end_is_told_so(
    runtime: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tierkv.daemon.private.READY_S", 0.3)
    lock = start_lock_of(place_of("e", os.environ))
    fd = try_lock(lock)
    assert fd is not None
    with pytest.raises(SidecarError, match=f"process {os.getpid()} is starting it"):
        tierkv.connect(private="e", **SMALL)
    unlock(lock, fd)
    held = try_lock(lock_of(place_of("e", os.environ)))  # one that listens no more, and does not end
    assert held is not None
    with pytest.raises(SidecarError, match="an earlier one has not ended yet"):
        tierkv.connect(private="e", **SMALL)
    unlock(lock_of(place_of("e", os.environ)), held)
    nothing_left(runtime)


def test_one_that_is_not_ready_in_time_is_ended(runtime: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tierkv.daemon.private.READY_S", 0.0)
    with pytest.raises(SidecarError, match="was not ready in time"):
        tierkv.connect(private="e", **SMALL)
    nothing_left(runtime)
