"""``tierkv status``, ``match``, ``explain``, ``pin``, ``clear``, ``doctor``: as a user runs them, and a real daemon."""

from __future__ import annotations

import dataclasses
import json
import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import pytest

from tests.daemon_process import (
    PATIENCE_S,
    Daemon,
    environment,
    payloads_of,
    run_tierkv,
    running_daemon,
    spec_of,
    tokens_of,
    write_config,
)
from tests.valkey_server import running_server
from tierkv.tiers.nvme_lock import DirectoryLock
from tierkv.tiers.nvme_recover import LOCK_NAME


class Beside(NamedTuple):
    daemon: Daemon
    client: Any
    chain: Any
    digest: str


@pytest.fixture(scope="module")
def beside() -> Iterator[Beside]:
    with (
        TemporaryDirectory(prefix="tierkv-") as name,
        running_daemon(Path(name), sidecar_group=os.getgid(), sidecar_mode="0666") as daemon,
    ):
        Path(name).chmod(0o755)  # other users may come in
        with daemon.client() as client:
            space = client.open_namespace(spec_of("hushed up"))
            chain = space.chain(tokens_of(4))
            assert client.put(chain, payloads_of(4)).stored == 4
            yield Beside(daemon, client, chain, space.namespace.digest.hex())


def test_status(beside: Beside) -> None:
    done = run_tierkv("status", "--config", beside.daemon.config, "--settings")
    assert (done.returncode, done.stderr) == (0, "")
    lines = done.stdout.splitlines()
    assert f"process {beside.daemon.pid}," in lines[0]
    assert lines[0].endswith(": ok, ready")
    assert "  host: 256 KiB of 32 MiB used" in lines
    assert any(line.startswith(f"  test (pid {os.getpid()}): ") for line in lines)
    assert any(line.startswith(f"  {beside.digest}: 4 blocks of 16 tokens, test") for line in lines)
    assert any(line.startswith("  host.capacity = 32 MiB (file ") for line in lines)
    assert "hushed up" not in done.stdout
    told = json.loads(run_tierkv("status", "--json", "--socket", beside.daemon.socket).stdout)
    assert told["pid"] == beside.daemon.pid
    assert [one["digest"] for one in told["namespaces"]["latest"]] == [beside.digest]


def test_the_socket_is_found_where_the_configuration_says(beside: Beside) -> None:
    for environ in (
        {"TIERKV_CONFIG": str(beside.daemon.config)},
        {"TIERKV_SIDECAR_SOCKET": str(beside.daemon.socket)},
    ):
        assert run_tierkv("status", **environ).returncode == 0
    # What only the daemon needs is not looked at.
    other = {"TIERKV_NVME_PATH": "/proc/nowhere", "TIERKV_HOST_CAPACITY": "900 TiB"}
    assert run_tierkv("status", "--config", beside.daemon.config, **other).returncode == 0


def test_match_in_every_dress(beside: Beside, tmp_path: Path) -> None:
    numbers, as_json, hashes = tmp_path / "ids.txt", tmp_path / "ids.json", tmp_path / "hashes"
    numbers.write_text("\n".join(map(str, tokens_of(5))))
    as_json.write_text(json.dumps(tokens_of(5)))
    hashes.write_text("\n".join(one.hex() for one in beside.chain.hashes))
    for words in (
        ("--tokens", json.dumps(tokens_of(5))),
        ("--tokens", " ".join(map(str, tokens_of(5)))),
        ("--tokens", numbers),
        ("--tokens", as_json),
        ("--namespace", beside.digest, "--tokens", as_json),
        ("--namespace", beside.digest[:8], "--hashes", hashes),
        ("--hashes", ",".join(one.hex() for one in beside.chain.hashes)),
    ):
        done = run_tierkv("match", "--socket", beside.daemon.socket, *words)
        assert (done.returncode, done.stderr) == (0, ""), words
        assert done.stdout.startswith("4 of "), words
        assert done.stdout.endswith("4 in host\n"), words
    done = subprocess.run(
        [sys.executable, "-m", "tierkv.cli", "match", "--json", "--socket", beside.daemon.socket, "--tokens", "-"],
        input=json.dumps(tokens_of(2)), capture_output=True, text=True, check=True, env=environment(),
    )  # fmt: skip
    assert json.loads(done.stdout)["blocks"] == 2


def test_explain(beside: Beside) -> None:
    words = ("explain", "--socket", beside.daemon.socket, "--tokens", json.dumps(tokens_of(2, first=5)))
    done = run_tierkv(*words)
    assert done.stdout.startswith("0 of 2 blocks can be had (0 tokens)\nfirst missing: block 0 ")
    assert json.loads(run_tierkv(*words, "--json").stdout)["causes"] == {"never_stored": 2}


def test_pin_and_clear(beside: Beside) -> None:
    space = beside.client.open_namespace(spec_of("to be cleared"))
    digest = space.namespace.digest.hex()
    chain = space.chain(tokens_of(3))
    beside.client.put(chain, payloads_of(3))
    prompt = ("--socket", beside.daemon.socket, "--namespace", digest, "--tokens", json.dumps(tokens_of(3)))
    assert run_tierkv("pin", *prompt, "--ttl", "10 min").stdout.startswith(
        "3 of 3 blocks are pinned\n192 KiB of 8 MiB"
    )
    assert json.loads(run_tierkv("pin", *prompt, "--off", "--json").stdout)["unpinned"] == 3
    assert run_tierkv("pin", *prompt, "--off", "--ttl", "1 s").returncode == 2
    done = run_tierkv("clear", "--socket", beside.daemon.socket, "--namespace", digest)
    assert (done.returncode, done.stdout) == (0, "host: 3 blocks removed, all of it is gone\n")
    assert beside.client.match(chain).blocks == 0
    assert beside.client.match(beside.chain).blocks == 4


def test_clear_of_a_tenant_takes_the_salt_from_a_file(beside: Beside, tmp_path: Path) -> None:
    chain = beside.client.open_namespace(spec_of("hush")).chain(tokens_of(1))
    beside.client.put(chain, payloads_of(1))
    (tmp_path / "salt").write_text("hush\n")
    done = run_tierkv(
        "clear", "--socket", beside.daemon.socket, "--tenant-salt-file", tmp_path / "salt", "--json"
    )
    assert json.loads(done.stdout)["complete"] is True
    assert beside.client.match(chain).blocks == 0


WRONG: dict[str, tuple[tuple[str, ...], int, str]] = {
    "no daemon": (("status", "--socket", "/nowhere/t.sock"), 1, "start one with `tierkv serve`"),
    "no namespace of that name": (
        ("match", "--namespace", "0" * 8, "--tokens", "[1]"),
        1,
        "no namespace begins with",
    ),
    "too few digits": (("match", "--namespace", "abc", "--tokens", "[1]"), 1, "first 8 digits"),
    "no file": (("match", "--tokens", "/nowhere"), 2, "--tokens = '/nowhere': No such file"),
    "no list": (("match", "--tokens", "[1, 2"), 2, "no list of token ids"),
    "no numbers": (("match", "--tokens", "[[1]]"), 2, "a list of token ids is expected"),
    "no salt": (("clear", "--tenant-salt-file", "/nowhere"), 2, "name a file with the salt"),
    "no configuration": (("status", "--config", "/nowhere.toml"), 2, "name an existing file"),
}


@pytest.mark.parametrize("case", WRONG)
def test_what_is_wrong_is_one_line(beside: Beside, case: str) -> None:
    words, status, text = WRONG[case]
    socket = () if {"--socket", "--config"} & set(words) else ("--socket", beside.daemon.socket)
    done = run_tierkv(*words, *socket)
    assert (done.returncode, done.stdout) == (status, "")
    assert done.stderr.count("\n") == 1
    assert done.stderr.startswith(f"tierkv {words[0]}: ")
    assert text in done.stderr
    done = run_tierkv(*words, *socket, "--json")
    assert done.returncode == status
    assert text in json.loads(done.stdout)["error"]["message"]


@pytest.mark.parametrize(
    "words", [("match",), ("explain",), ("pin",), ("clear",), ("clear", "--everything", "--namespace", "x")]
)
def test_a_prompt_or_a_target_must_be_named(words: tuple[str, ...]) -> None:
    done = run_tierkv(*words)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith(f"usage: tierkv {words[0]}")
    done = run_tierkv(*words, "--json")
    assert (done.returncode, json.loads(done.stdout)["error"]["kind"]) == (2, "UsageError")


def test_several_namespaces_must_be_told_apart(beside: Beside) -> None:
    beside.client.open_namespace(spec_of("one more"))
    done = run_tierkv("match", "--socket", beside.daemon.socket, "--tokens", "[1]")
    assert done.returncode == 2
    assert "`tierkv status` lists them" in done.stderr


def test_blocks_that_an_engine_names_are_not_asked_for_by_tokens(beside: Beside) -> None:
    """It said "this namespace takes engine_hashes", which is no option of any command."""
    spec = dataclasses.replace(spec_of("by hashes"), hash_scheme="an-engine:sha256")
    digest = beside.client.open_namespace(spec).namespace.digest.hex()
    done = run_tierkv("match", "--socket", beside.daemon.socket, "--namespace", digest, "--tokens", "[1]")
    assert done.returncode == 1
    assert digest[:16] in done.stderr
    assert "ask by the hashes of its blocks (--hashes)" in done.stderr


def test_that_no_engine_has_been_there_is_said(tmp_path: Path) -> None:
    """It was told to name one of none."""
    with running_daemon(tmp_path) as daemon:
        done = run_tierkv("match", "--socket", daemon.socket, "--tokens", "[1]")
    assert done.returncode == 2
    assert "no engine has opened one since the daemon's start" in done.stderr


def test_names_of_engines_do_not_reach_the_terminal_as_they_are(beside: Beside) -> None:
    spec = dataclasses.replace(spec_of(), engine="an engine\n  \x1b[31mnothing: 0 blocks")
    with beside.daemon.client() as client:
        client.open_namespace(spec)
        lines = run_tierkv("status", "--socket", beside.daemon.socket).stdout.splitlines()
    assert any("an engine?  ?[31mnothing: 0 blocks" in line for line in lines)
    beside.client.clear(namespace=beside.client.open_namespace(spec)).result(PATIENCE_S)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become somebody else")
def test_who_is_no_operator_is_told_nothing(beside: Beside) -> None:
    """A member of the group may use the daemon, and learns nothing of other tenants."""
    code = (
        "import os, sys; from tierkv import cli; import tierkv.cli_status; os.setgroups([]); os.setuid(54321)\n"
        f"sys.exit(cli.main(['status', '--socket', {str(beside.daemon.socket)!r}]))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=False, timeout=PATIENCE_S,
        env=environment(),
    )  # fmt: skip
    assert (done.returncode, done.stdout) == (1, "")
    assert "only root and the daemon's own user" in done.stderr


# ---- doctor


def test_doctor_tries_disk_server_and_sockets(tmp_path: Path) -> None:
    with running_server() as server:
        config = write_config(
            tmp_path,
            nvme_path=str(tmp_path / "disk"),
            nvme_capacity="64 MiB",
            valkey_url=server.address,
            sidecar_http=f"unix://{tmp_path}/h.sock",
        )
        done = run_tierkv("doctor", "--config", config, "--json")
        told = json.loads(done.stdout)
        assert (done.returncode, done.stderr, told["ok"]) == (0, "", True), told
        found = {one["about"]: one for one in told["findings"]}
        assert {"memory", "locked memory", "huge pages", "open files", "nvme space", "cuda", "daemon"} <= set(
            found
        )
        assert found["valkey"]["level"] == "ok"
        assert "round trip" in found["valkey"]["text"]
        assert found["socket"]["level"] == found["http"]["level"] == "ok"
        assert "none answers" in found["daemon"]["text"]
        assert server.do("DBSIZE") == 0
    assert not (tmp_path / "disk").exists()
    done = run_tierkv("doctor", "--config", config)
    assert done.returncode == 1
    assert "BAD   valkey: no server answers" in done.stdout


def test_doctor_beside_a_daemon(beside: Beside) -> None:
    told = json.loads(run_tierkv("doctor", "--config", beside.daemon.config, "--json").stdout)
    assert [one["text"] for one in told["findings"] if one["about"] == "daemon"] == [
        f"one answers at {beside.daemon.socket}"
    ]


def test_doctor_says_that_another_has_the_directory_and_the_port(tmp_path: Path) -> None:
    folder = tmp_path / "disk"
    folder.mkdir()
    owner = DirectoryLock(str(folder), LOCK_NAME)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        token = tmp_path / "token"
        token.write_text("0123456789abcdef")
        token.chmod(0o600)
        config = write_config(
            tmp_path, nvme_path=str(folder), nvme_capacity="64 MiB", sidecar_http=f"127.0.0.1:{port}",
            sidecar_token_file=str(token),
        )  # fmt: skip
        owner.acquire()
        found = run_tierkv("doctor", "--config", config).stdout
        assert f"note  nvme owner: process {os.getpid()} owns {folder}" in found
        assert f"note  http: somebody listens on 127.0.0.1:{port}" in found
        owner.release()
    found = run_tierkv("doctor", "--config", config).stdout
    assert "nvme owner" not in found
    assert f"ok    http: 127.0.0.1:{port}, with a token" in found


def test_doctor_names_what_will_not_work(tmp_path: Path) -> None:
    token = tmp_path / "token"
    token.write_text("short")
    (tmp_path / "t.sock").mkdir()
    config = write_config(tmp_path, sidecar_http="127.0.0.1:9400", sidecar_token_file=str(token))
    done = run_tierkv("doctor", "--config", config)
    assert done.returncode == 1
    assert f"BAD   socket: {tmp_path}/t.sock is there and is no socket" in done.stdout
    assert "at least 16 printable characters" in done.stdout
    config = write_config(tmp_path, sidecar_socket=str(tmp_path / "none" / "t.sock"))
    done = run_tierkv("doctor", "--config", config)
    assert done.returncode == 1
    assert f"mkdir -m 750 {tmp_path}/none" in done.stdout


def test_doctor_with_a_wrong_configuration_says_so() -> None:
    done = run_tierkv("doctor", TIERKV_HOST_CAPACITY="4 XB")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("tierkv doctor: host.capacity = '4 XB'")
    told = json.loads(run_tierkv("doctor", "--json", TIERKV_HOST_CAPACITY="4 XB").stdout)
    assert told["error"]["message"].startswith("host.capacity = '4 XB'")
