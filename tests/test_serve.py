"""``tierkv serve``: how it starts, what it takes of the machine, how it ends. With real processes."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
from pathlib import Path

import pytest

from tests.daemon_process import (
    PATIENCE_S,
    Daemon,
    payloads_of,
    run_tierkv,
    running_daemon,
    spec_of,
    tokens_of,
    write_config,
)
from tests.valkey_server import eventually, running_server
from tierkv.units import KIB, MIB

# ---- the start


def test_it_tells_systemd_when_it_is_ready_and_when_it_stops(tmp_path: Path) -> None:
    with running_daemon(tmp_path) as daemon:
        assert daemon.told == ["READY=1"]
        with daemon.client() as client:
            assert client.health().state in ("ok", "degraded")
        assert daemon.stop() == 0
        daemon.wait_for("STOPPING=1")
    assert not daemon.socket.exists()
    assert [line.split(" INFO ")[-1] for line in daemon.log.splitlines()][-2:] == [
        f"serving on {daemon.socket}",
        "stopping",
    ]


WRONG: dict[str, tuple[dict[str, object], str]] = {
    "unknown setting": ({"sidecar_sockets": "/x"}, "sidecar.sockets = '/x': no such setting (did you mean"),
    "no folder for the socket": ({"sidecar_socket": "/nowhere/t.sock"}, "sidecar.socket = '/nowhere/t.sock': No such"),
    "no folder for HTTP": ({"sidecar_http": "unix:///nowhere/h.sock"}, "sidecar.http = '/nowhere/h.sock': No such"),
    "no token": ({"sidecar_http": "127.0.0.1:0"}, "set sidecar.token_file or TIERKV_SIDECAR_TOKEN"),
    "no file of a token": (
        {"sidecar_http": "127.0.0.1:0", "sidecar_token_file": "/nowhere"}, "sidecar.token_file = '/nowhere': No such"
    ),
    "an address of others": (
        {"sidecar_http": "192.0.2.1:80", "sidecar_token_file": "{token}"}, "sidecar.http = '192.0.2.1:80': nobody can"
    ),
    "more than there is": ({"host_capacity": "900 TiB"}, "host.capacity = '900 TiB': it does not fit"),
}  # fmt: skip


@pytest.mark.parametrize("case", WRONG)
def test_d29_what_keeps_it_from_starting_is_one_line(tmp_path: Path, case: str) -> None:
    settings, text = WRONG[case]
    (tmp_path / "token").write_text("t" * 32)
    filled = {name: str(value).format(token=tmp_path / "token") for name, value in settings.items()}
    done = run_tierkv("serve", "--config", write_config(tmp_path, **filled))
    assert done.returncode == 2
    lines = [line for line in done.stderr.splitlines() if " INFO " not in line]
    assert len(lines) == 1
    assert lines[0].startswith("tierkv serve: ")
    assert text in lines[0]


def test_no_configuration_file_is_named(tmp_path: Path) -> None:
    done = run_tierkv("serve", "--config", tmp_path / "none.toml")
    assert done.returncode == 2
    assert done.stderr.count("\n") == 1
    assert "name an existing file" in done.stderr


def test_d24_of_two_daemons_on_one_socket_or_one_disk_the_second_refuses(tmp_path: Path) -> None:
    disk = {"nvme_path": str(tmp_path / "disk"), "nvme_capacity": "64 MiB", "nvme_min_free": 0}
    other = tmp_path / "other"
    other.mkdir()
    with running_daemon(tmp_path, **disk) as daemon:
        done = run_tierkv("serve", "--socket", daemon.socket, TIERKV_HOST_CAPACITY="4 MiB")
        assert done.returncode == 1, "another start may mend it, which systemd is told by this"
        assert f"another daemon (pid {daemon.pid}) listens on it" in done.stderr
        done = run_tierkv("serve", "--config", write_config(other, **disk))
        assert done.returncode == 1
        assert f"is owned by process {daemon.pid}" in done.stderr
        with daemon.client() as client:
            assert client.health().ready
        with running_daemon(other) as second, second.client() as its:
            its.open_namespace(spec_of())
            assert run_tierkv("status", "--socket", second.socket).returncode == 0


def test_a_port_that_another_has_is_no_wrong_configuration(tmp_path: Path) -> None:
    """Under systemd a start that ends with 2 is the last one, and the port may be free a second later."""
    (tmp_path / "token").write_text("t" * 32)
    with socket.create_server(("127.0.0.1", 0)) as other:
        place = f"127.0.0.1:{other.getsockname()[1]}"
        config = write_config(tmp_path, sidecar_http=place, sidecar_token_file=str(tmp_path / "token"))
        done = run_tierkv("serve", "--config", config)
    assert done.returncode == 1
    assert f"sidecar.http = '{place}': nobody can listen there: Address already in use" in done.stderr


# ---- what it takes


def test_d29_shared_memory_is_within_five_percent_and_no_gpu_library_is_there(tmp_path: Path) -> None:
    with running_daemon(
        tmp_path, host_capacity="256 MiB", sidecar_http=f"unix://{tmp_path}/h.sock"
    ) as daemon:
        eventually(lambda: daemon.ask("/readyz")[0] == 200, "its RAM is populated", PATIENCE_S)
        shared, own = _resident_bytes(daemon, "RssShmem"), _resident_bytes(daemon, "RssAnon")
        assert 256 * MIB <= shared <= 269 * MIB
        assert own < 128 * MIB
        maps = Path(f"/proc/{daemon.pid}/maps").read_text()
        assert not [word for word in ("libcuda", "nvidia", "libtorch", "/dev/shm") if word in maps]


def _resident_bytes(daemon: Daemon, what: str) -> int:
    for line in Path(f"/proc/{daemon.pid}/status").read_text().splitlines():
        name, _, rest = line.partition(":")
        if name == what:
            return int(rest.split()[0]) * KIB
    raise AssertionError(f"/proc says nothing of {what}")


def test_noise_on_the_socket_does_not_flood_the_log(tmp_path: Path) -> None:
    with running_daemon(tmp_path) as daemon:
        for noise in (b"\xff" * 100, b"\0\0\0\0", b"\x05\0\0\0abc"):
            for _ in range(50):
                with socket.socket(socket.AF_UNIX) as one:
                    one.settimeout(PATIENCE_S)
                    one.connect(str(daemon.socket))
                    one.sendall(noise)
                    one.shutdown(socket.SHUT_WR)
                    while one.recv(4096):
                        pass
        assert run_tierkv("status", "--socket", daemon.socket).returncode == 0
        assert daemon.log.count("\n") < 20


# ---- the end


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_d25_it_stops_at_once_when_nothing_is_to_be_drained(tmp_path: Path, number: signal.Signals) -> None:
    """Whoever is connected and says nothing is not waited for; the deadline would be far beyond the test's patience."""
    settings = {"nvme_path": str(tmp_path / "disk"), "nvme_capacity": "64 MiB", "nvme_min_free": 0}
    with running_daemon(
        tmp_path, limits_shutdown_deadline="1 h", sidecar_http=f"unix://{tmp_path}/h.sock", **settings
    ) as daemon:
        idle = daemon.connect_http()
        idle.request("GET", "/healthz")
        idle.getresponse().read()
        with daemon.client() as client, socket.socket(socket.AF_UNIX) as mute:
            mute.connect(str(daemon.socket))
            chain = client.open_namespace(spec_of()).chain(tokens_of(2))
            client.put(chain, payloads_of(2))
            assert client.flush("nvme").result(PATIENCE_S).failed == 0
            lease = client.load(chain)
            assert len(lease) == 2
            daemon.process.send_signal(number)
            assert daemon.process.wait(PATIENCE_S) == 0
            lease.release()
        idle.close()


def test_d25_a_question_that_is_being_answered_does_not_hold_it_up(tmp_path: Path) -> None:
    """A prefetch that waits for a server that hangs, asked over HTTP for ten minutes."""
    with running_server() as server:
        settings = {"valkey_url": server.address, "valkey_timeout": "1 h", "limits_shutdown_deadline": "1 s"}
        with running_daemon(tmp_path, sidecar_http=f"unix://{tmp_path}/h.sock", **settings) as daemon:
            with daemon.client() as client:
                space = client.open_namespace(spec_of())
                client.put(space.chain(tokens_of(2)), payloads_of(2))
                assert client.flush("valkey").result(PATIENCE_S).failed == 0
                client.evict("host")
            os.kill(server.pid, signal.SIGSTOP)
            try:
                waiting = daemon.connect_http()
                digest = space.namespace.digest.hex()
                question = f'{{"namespace": "{digest}", "tokens": {tokens_of(2)}, "timeout_s": 600}}'
                waiting.request("POST", "/v1/prefetch", question)
                eventually(
                    lambda: daemon.metrics()["tierkv_http_requests_under_way", ()] == 2,
                    "it is asked",
                    PATIENCE_S,
                )
                assert daemon.stop() == 0
                waiting.close()
            finally:
                os.kill(server.pid, signal.SIGCONT)


def test_what_only_host_ram_holds_is_drained_to_the_disk(tmp_path: Path) -> None:
    disk = {"nvme_path": str(tmp_path / "disk"), "nvme_capacity": "64 MiB", "nvme_min_free": 0}
    patient = {"limits_shutdown_deadline": "1 min", **disk}
    with running_daemon(tmp_path, **patient) as daemon:
        with daemon.client() as client:
            chain = client.open_namespace(spec_of()).chain(tokens_of(20))
            assert client.put(chain, payloads_of(20)).stored == 20
        assert daemon.stop() == 0
    with running_daemon(tmp_path, **patient) as daemon, daemon.client() as client:
        chain = client.open_namespace(spec_of()).chain(tokens_of(20))
        assert client.match(chain).blocks == 20
        with client.load(chain, timeout_s=PATIENCE_S) as lease:
            assert [bytes(lease.view(i)[:2]) for i in range(20)] == [bytes([i, i]) for i in range(20)]


def test_with_a_server_that_hangs_it_stops_by_its_deadline(tmp_path: Path) -> None:
    """Blocks that nobody can take are given up: the deadline ends the wait, and the process with it."""
    with running_server() as server:
        settings = {
            "valkey_url": server.address,
            "valkey_write": "through",
            "limits_shutdown_deadline": "1 s",
        }
        with running_daemon(tmp_path, **settings, valkey_timeout="1 h") as daemon:
            os.kill(server.pid, signal.SIGSTOP)
            try:
                with daemon.client() as client:
                    chain = client.open_namespace(spec_of()).chain(tokens_of(20))
                    assert client.put(chain, payloads_of(20)).stored == 20
                assert daemon.stop() == 0
            finally:
                os.kill(server.pid, signal.SIGCONT)


def test_the_process_that_it_shall_end_with_is_gone_already(tmp_path: Path) -> None:
    """See ``test_private_sidecar`` for those that live."""
    parent = subprocess.Popen(["true"])
    parent.wait()
    done = run_tierkv("serve", "--config", write_config(tmp_path), "--with-parent", parent.pid)
    assert done.returncode == 0
    assert f"process {parent.pid}, whose sidecar this is, has ended" in done.stderr
