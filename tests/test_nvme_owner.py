"""One process owns a directory: eight that start at once, an owner that is killed, an owner that forks."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.nvme_support import put_all, running
from tierkv.errors import DirectoryInUse
from tierkv.testing.payloads import key_of

OWNER = """
import sys
from pathlib import Path
from tests.nvme_support import deadline, make_tier
from tierkv.errors import DirectoryInUse
tier = make_tier(Path(sys.argv[1]))
print("ready", flush=True)
sys.stdin.readline()
try:
    tier.start()
except DirectoryInUse as error:
    print("refused", error.owner_pid, error, flush=True)
else:
    print("owner", flush=True)
    sys.stdin.readline()
    tier.close(deadline())
"""


FORKING_OWNER = """
import os
import sys
from pathlib import Path
from tests.nvme_support import make_tier
tier = make_tier(Path(sys.argv[1]))
tier.start()
if os.fork() == 0:
    print("forked", flush=True)
os.read(0, 1)
os._exit(0)
"""


def start_owner(path: Path, code: str = OWNER) -> subprocess.Popen[str]:
    """A process that waits for a line, takes the directory, and keeps it until the next line."""
    return subprocess.Popen(
        [sys.executable, "-c", code, str(path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )


def say(process: subprocess.Popen[str]) -> None:
    assert process.stdin is not None
    process.stdin.write("\n")
    process.stdin.flush()


def hear(process: subprocess.Popen[str]) -> list[str]:
    assert process.stdout is not None
    return process.stdout.readline().split(maxsplit=2)


def end(processes: list[subprocess.Popen[str]]) -> None:
    for process in processes:
        process.kill()
        process.communicate()


def test_d24_eight_processes_at_once_have_one_owner(tmp_path: Path) -> None:
    processes = [start_owner(tmp_path / "nvme") for _ in range(8)]
    try:
        assert [hear(process) for process in processes] == [["ready"]] * 8
        for process in processes:
            say(process)
        answers = {process.pid: hear(process) for process in processes}
        owners = [pid for pid, answer in answers.items() if answer == ["owner"]]
        assert len(owners) == 1, answers
        for pid, answer in answers.items():
            if pid != owners[0]:
                assert answer[:2] == ["refused", str(owners[0])], answer
                assert f"process {owners[0]}" in answer[2]
    finally:
        end(processes)


def test_d24_a_killed_owner_frees_the_directory_at_once(tmp_path: Path) -> None:
    process = start_owner(tmp_path)
    try:
        assert hear(process) == ["ready"]
        say(process)
        assert hear(process) == ["owner"]
        with pytest.raises(DirectoryInUse, match=f"owned by process {process.pid}"), running(tmp_path):
            pass
        process.send_signal(signal.SIGKILL)
        process.wait()
        with running(tmp_path) as tier:
            put_all(tier, [key_of(1)])
    finally:
        end([process])


def test_d24_a_second_tier_in_one_process_is_refused(tmp_path: Path) -> None:
    with running(tmp_path) as tier:
        with pytest.raises(DirectoryInUse, match=f"process {os.getpid()}"), running(tmp_path):
            pass
        put_all(tier, [key_of(1)])
        with pytest.raises(DirectoryInUse), running(tmp_path):
            pass
    with running(tmp_path), running(tmp_path.parent / "another"):
        pass


def test_d24_a_forked_child_does_not_keep_the_directory(tmp_path: Path) -> None:
    """A lock belongs to an open file, which a child shares; it must let go, or it would outlive a killed owner."""
    process = start_owner(tmp_path, FORKING_OWNER)
    try:
        assert hear(process) == ["forked"]
        with pytest.raises(DirectoryInUse), running(tmp_path):
            pass
        process.send_signal(signal.SIGKILL)
        process.wait()
        with running(tmp_path) as tier:  # the child still lives: it waits for the end of its input
            put_all(tier, [key_of(1)])
    finally:
        end([process])
