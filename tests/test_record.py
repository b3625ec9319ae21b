"""``tierkv record``: what a real daemon was asked for, as a trace that ``tierkv replay`` reads; the ring behind it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

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
)
from tierkv import cli_record
from tierkv.clock import FakeClock
from tierkv.ids import BlockHash, NamespaceDigest
from tierkv.replay.formats import read_trace
from tierkv.traffic import LISTEN_S, MOST_AT_ONCE, MOST_BLOCKS, MOST_REQUESTS, Traffic


@pytest.fixture(scope="module")
def daemon() -> Iterator[Daemon]:
    with TemporaryDirectory(prefix="tierkv-") as name, running_daemon(Path(name)) as found:
        yield found


@contextmanager
def recording(daemon: Daemon, file: Path, *words: str) -> Iterator[subprocess.Popen[str]]:
    """A recorder that has begun. It is ended by SIGTERM when the block is over."""
    process = subprocess.Popen(
        [sys.executable, "-m", "tierkv.cli", "record", str(file), "--socket", str(daemon.socket), *words],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environment(),
    )
    try:
        assert process.stderr is not None
        assert process.stderr.readline() == "tierkv record: recording\n"
        yield process
    finally:
        if process.poll() is None:
            process.send_signal(signal.SIGTERM)
            process.wait(PATIENCE_S)


def test_what_was_asked_for_is_what_is_replayed(daemon: Daemon, tmp_path: Path) -> None:
    file = tmp_path / "traffic.jsonl.gz"
    with daemon.client() as client:
        space = client.open_namespace(spec_of("a salt"))
        client.match(space.chain(tokens_of(9, first=500)))  # before the recording
        with recording(daemon, file) as recorder:
            first = space.chain([*tokens_of(4), 1, 2, 3])
            assert client.match(first).blocks == 0
            assert client.put(first, payloads_of(4)).stored == 4
            again = space.chain(tokens_of(4))
            assert client.match(again).blocks == 4
            with client.load(again) as lease:  # of the same request
                assert len(lease) == 4
            with client.load(space.chain(tokens_of(4)[:32])) as lease:  # without a look before
                assert len(lease) == 2
            client.match(space.chain(tokens_of(2) + tokens_of(2, first=700)))
            client.match(space.chain(tokens_of(3)), local_computed=16)
            with client.load(space.chain(tokens_of(3, first=900))) as lease:  # a miss without a look before
                assert not len(lease)
            recorder.send_signal(signal.SIGTERM)
            out, _ = recorder.communicate(timeout=PATIENCE_S)
            assert recorder.returncode == 0
    assert "6 requests for 20 blocks of 16 tokens, 9 of them different" in out
    trace = read_trace(file)
    assert trace.block_tokens == 16
    assert [request.ids for request in trace.requests] == [
        [0, 1, 2, 3], [0, 1, 2, 3], [0, 1], [0, 1, 4, 5], [0, 1, 2], [6, 7, 8],
    ]  # fmt: skip
    assert [request.tokens for request in trace.requests] == [68, 65, 32, 66, 49, 49]
    times = [request.at_s for request in trace.requests]
    assert times == sorted(times)
    assert times[0] == 0
    replayed = run_tierkv("replay", file, "--policy", "lru", "--capacity", "100%")
    assert replayed.returncode == 0, replayed.stderr
    assert "20 blocks asked for, 9 of them different, 16 tokens each" in replayed.stdout


def test_a_chosen_namespace_and_its_own_blocks(daemon: Daemon, tmp_path: Path) -> None:
    file = tmp_path / "traffic.jsonl"
    with daemon.client() as client:
        one, other = (client.open_namespace(spec_of(salt)) for salt in ("one", "other"))
        digest = one.namespace.digest.hex()
        with recording(daemon, file, "--namespace", digest[:12].upper(), "--json") as recorder:
            client.match(one.chain(tokens_of(3)), local_computed=16)
            client.match(other.chain(tokens_of(3)))
            client.match(one.chain(tokens_of(1)), local_computed=16)  # it asks for nothing
            recorder.send_signal(signal.SIGINT)
            out, _ = recorder.communicate(timeout=PATIENCE_S)
    told = json.loads(out)
    assert (told["requests"], told["blocks"], told["left_out"], told["lost"]) == (1, 3, 1, 0)
    (line,) = file.read_text().splitlines()
    assert json.loads(line) == {
        "timestamp": 0, "input_length": 49, "block_tokens": 16, "own_blocks": 1, "hash_ranges": [[0, 3]],
    }  # fmt: skip


def test_it_ends_by_itself(daemon: Daemon, tmp_path: Path) -> None:
    file = tmp_path / "traffic.jsonl"
    done = run_tierkv("record", file, "--for", "1 ms", "--socket", daemon.socket)
    assert (done.returncode, file.read_text()) == (0, "")
    assert "0 requests for 0 blocks" in done.stdout


def test_a_daemon_that_goes_leaves_what_was_recorded(tmp_path: Path) -> None:
    file = tmp_path / "traffic.jsonl.gz"
    with (
        TemporaryDirectory(prefix="tierkv-") as name,
        running_daemon(Path(name)) as daemon,
        recording(daemon, file) as recorder,
    ):
        assert daemon.stop() == 0
        out, err = recorder.communicate(timeout=PATIENCE_S)
    assert recorder.returncode == 1
    assert "what was recorded until then is in the file" in err
    assert "0 requests" in out


@pytest.mark.parametrize(
    ("words", "status", "told"),
    [
        (["/no/such/folder/x"], 2, "FILE = '/no/such/folder/x': its folder is not there"),
        (["x", "--namespace", "the first"], 2, "--namespace = 'the first': give the first hex digits"),
        (["x", "--socket", "/no/such/socket"], 1, "start one with tierkv serve"),
    ],
)
def test_what_cannot_be_done_is_said(tmp_path: Path, words: list[str], status: int, told: str) -> None:
    place = [str(tmp_path / words[0])] if words[0] == "x" else words[:1]
    done = run_tierkv("record", *place, *words[1:])
    assert done.returncode == status
    assert told in done.stderr
    assert "Traceback" not in done.stderr
    assert not (tmp_path / "x").exists()


@pytest.mark.parametrize(
    ("words", "kind"),
    [
        (["--socket", "/no/such/socket"], "NoDaemon"),
        (["--namespace", "the first"], "ConfigError"),
    ],
)
def test_errors_as_json(tmp_path: Path, words: list[str], kind: str) -> None:
    done = run_tierkv("record", str(tmp_path / "x"), "--json", *words)
    error = json.loads(done.stdout)["error"]
    assert error["kind"] == kind
    assert done.stderr == f"tierkv record: {error['message']}\n"


@pytest.mark.skipif(os.getuid() != 0, reason="only root can become somebody else")
def test_only_operators_are_told(tmp_path: Path) -> None:
    with (
        TemporaryDirectory(prefix="tierkv-") as name,
        running_daemon(Path(name), sidecar_group=os.getgid(), sidecar_mode="0666") as daemon,
    ):
        Path(name).chmod(0o755)
        code = (
            "import os, sys, time\n"
            "from tierkv.daemon.link import Link\n"
            "os.setgid(65534); os.setuid(65534)\n"
            "print(Link(sys.argv[1], 'test').call('requests', {}, time.monotonic() + 60))\n"
        )
        done = subprocess.run(
            [sys.executable, "-c", code, str(daemon.socket)],
            capture_output=True, text=True, check=False, env=environment(),
        )  # fmt: skip
    assert done.returncode != 0
    assert "only root and the daemon's own user" in done.stderr


# ---- the ring

SPACE = NamespaceDigest(b"n" * 32)


def hashes(count: int) -> list[BlockHash]:
    return [BlockHash(number.to_bytes(32, "big")) for number in range(count)]


def note(traffic: Traffic, blocks: list[BlockHash]) -> None:
    """As the store does it."""
    if traffic.listened:
        traffic.note(SPACE, blocks, 16 * len(blocks), 16, 0)


def test_nothing_is_kept_while_nobody_listens() -> None:
    clock = FakeClock()
    traffic = Traffic(clock)
    note(traffic, hashes(2))
    first = traffic.listen(None)
    assert (first.last, first.lost, list(first.requests)) == (0, 0, [])
    note(traffic, hashes(3))
    clock.advance(LISTEN_S)
    heard = traffic.listen(first.last)
    assert [len(asked.hashes) for asked in heard.requests] == [3]
    assert heard.recording == first.recording
    clock.advance(LISTEN_S + 1)
    note(traffic, hashes(4))
    assert not traffic.listened
    later = traffic.listen(heard.last)
    assert (later.recording, list(later.requests)) == (first.recording + 1, [])


@pytest.mark.parametrize(("count", "blocks"), [(MOST_REQUESTS + 5, 1), (10, MOST_BLOCKS // 4)])
def test_who_is_slow_is_told_what_is_lost(count: int, blocks: int) -> None:
    traffic = Traffic(FakeClock())
    after, lost, got = traffic.listen(None).last, 0, 0
    chain = hashes(blocks)
    for _ in range(count):
        note(traffic, chain)
    while (heard := traffic.listen(after)).requests:
        assert len(heard.requests) == 1 or sum(len(one.hashes) for one in heard.requests) <= MOST_AT_ONCE
        after, lost, got = heard.last, lost + heard.lost, got + len(heard.requests)
    assert got + lost == count
    assert got * blocks <= MOST_BLOCKS
    assert lost > 0


class Told:
    """A link that answers what it was given."""

    def __init__(self, *answers: dict[str, Any]) -> None:
        self.answers = list(answers)
        self.asked: list[Any] = []

    def call(self, verb: str, words: dict[str, Any], deadline_s: float) -> dict[str, Any]:
        self.asked.append(words.get("after"))
        return self.answers.pop(0)


def test_losses_and_restarts_are_said() -> None:
    def answer(recording: int, last: int, lost: int = 0) -> dict[str, Any]:
        return {"pid": 7, "recording": recording, "now_s": 0.0, "last": last, "lost": lost, "requests": []}

    link = Told(answer(1, 5), answer(1, 9, lost=4), answer(2, 0))
    said: list[str] = []
    recorder = cli_record.Recording(link, cli_record.Numbering(None), said.append)  # type: ignore[arg-type]
    for _ in range(3):
        assert recorder.look() == []
    assert link.asked == [None, 5, 9]
    assert recorder.lost == 4
    assert ["4 requests are missing" in said[0], "started anew" in said[1]] == [True, True]


def test_too_many_blocks_end_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cli_record, "MOST_BLOCKS", 3)
    requests = [
        [float(at), SPACE, 32, 16, 0, names * 8 + names.upper() * 8] for at, names in enumerate([b"a", b"b"])
    ]
    answer = {"pid": 7, "recording": 1, "now_s": 0.0, "last": 2, "lost": 0, "requests": requests}
    recorder = cli_record.Recording(Told(answer), cli_record.Numbering(None), print)  # type: ignore[arg-type]
    (line,) = recorder.look()
    assert json.loads(line)["hash_ranges"] == [[0, 2]]
    assert "complete so far" in str(recorder.full)


def test_ranges() -> None:
    assert cli_record.ranges([0, 1, 2, 7, 8, 3]) == [[0, 3], [7, 2], [3, 1]]
