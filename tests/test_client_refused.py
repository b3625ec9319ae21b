"""Why a daemon is away, or does not take a client: told by each call of a person, by the health and by the log."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
from pathlib import Path

import pytest

import tierkv
from tests.daemon_process import PATIENCE_S, environment, running_daemon, spec_of, tokens_of
from tests.valkey_server import eventually
from tierkv.daemon import link
from tierkv.daemon.remote import RemoteClient
from tierkv.errors import Away, ConfigError, TierKVError


def lines_about(caplog: pytest.LogCaptureFixture, path: Path) -> list[str]:
    return [line for line in caplog.messages if str(path) in line]


def reasons(client: RemoteClient) -> set[str]:
    """Asked often, while the client looks for the daemon."""
    return {str(client.health()) for _ in range(20)}


def test_that_no_daemon_is_there_is_in_the_log_and_each_answer_says_why(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """It looked like a cache that never hits: nothing was logged, and why was told once."""
    caplog.set_level(logging.WARNING, "tierkv")
    path = tmp_path / "t.sock"
    with tierkv.connect(f"unix://{path}") as client:
        chain = client.open_namespace(spec_of()).chain(tokens_of(2))
        assert client.match(chain).blocks == 0
        assert all("No such file or directory" in told for told in reasons(client))
        with pytest.raises(Away, match=f"no daemon answers at {path}: .*No such file"):
            client.stats()
        eventually(lambda: lines_about(caplog, path), "nothing was logged")
        (away,) = lines_about(caplog, path)
        assert "no daemon answers" in away
        assert "loads are misses and nothing is stored" in away
        with running_daemon(tmp_path):
            eventually(lambda: client.health().ready, "it was not found")
            eventually(lambda: "is there again" in caplog.text, "that was not logged")


def test_a_refusal_is_told_by_every_call_and_in_the_log(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    caplog.set_level(logging.WARNING, "tierkv")
    with running_daemon(tmp_path) as daemon:
        monkeypatch.setattr(link, "TOKEN_BYTES", 3)
        with daemon.client() as client:
            chain = client.open_namespace(spec_of()).chain(tokens_of(2))
            assert client.match(chain).blocks == 0
            assert all("refuses this client: a session's name of 3 bytes" in told for told in reasons(client))
            eventually(lambda: lines_about(caplog, daemon.socket), "nothing was logged")
    assert ["refuses this client" in line for line in lines_about(caplog, daemon.socket)] == [True]


def test_another_version_is_told_by_every_call(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with running_daemon(tmp_path) as daemon:
        monkeypatch.setattr(link, "VERSION", 99)
        with daemon.client() as client:
            with pytest.raises(TierKVError, match="not 99"):
                client.open_namespace(spec_of())
            assert all("version 1 of the protocol, not 99" in told for told in reasons(client))


@pytest.mark.parametrize("owner", [5, None, b"engine"])
def test_an_owner_that_is_no_text_is_refused_at_once(owner: object) -> None:
    """The daemon refused it, and the client took that for a daemon that is away."""
    with pytest.raises(ConfigError, match=r"connect owner = .*: a text is expected"):
        tierkv.connect("unix:///nowhere/t.sock", owner=owner)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become somebody else")
def test_who_may_not_connect_is_not_told_to_start_another_daemon(tmp_path: Path) -> None:
    code = (
        "import os, sys; from tierkv import cli; import tierkv.cli_status; os.setgroups([]); os.setuid(54321)\n"
        "sys.exit(cli.main(['status', '--socket', sys.argv[1]]))"
    )
    with running_daemon(tmp_path) as daemon:
        os.chmod(tmp_path, 0o755)
        done = subprocess.run(
            [sys.executable, "-c", code, str(daemon.socket)], capture_output=True, text=True, check=False,
            timeout=PATIENCE_S, env=environment(),
        )  # fmt: skip
    assert (done.returncode, done.stderr.count("\n")) == (1, 1)
    assert "this user (54321) may not connect" in done.stderr
    assert "sidecar.group" in done.stderr
    assert "tierkv serve" not in done.stderr
