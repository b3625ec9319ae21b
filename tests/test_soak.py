"""Every verb from many threads over three real tiers, while the server is stopped, killed and throttled and the disk is
full: no wrong byte, and everything comes back to its start. See ``bench/soak.py``; waits are reported there, not judged
here."""

from __future__ import annotations

import os
import random
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest

from bench.ending import ENDED
from bench.soak import main, report, soak
from bench.soak_trouble import TROUBLES
from bench.soak_work import Library, Worker
from tierkv.tuning import tune_malloc
from tierkv.units import MIB

ROOT = Path(__file__).parent.parent
PATIENCE_S = 60.0
FLAT_BYTES = 24 * MIB
"""What a million operations may add to the memory in use: the allocator's own waste, not blocks or books."""


def test_d9_d11_d15_d17_d22_a_short_soak(tmp_path: Path) -> None:
    result = soak(6_000, 8, seed=1, folder=tmp_path, trouble_s=0.15, progress=False)
    assert not result.problems, report(result)
    assert result.operations >= 6_000
    assert result.verified_blocks > 1_000
    assert len(result.troubles) == len(TROUBLES), result.troubles
    # Which tier has to serve in so short a life is the scheduler's choice.
    read = [result.counters.get(f"read_blocks_total/{tier}/done", 0) for tier in ("nvme", "valkey")]
    assert sum(read) > 0


def test_a_soak_sees_a_wrong_byte(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is stored is one bit off what is expected back."""

    def spoilt(self: Library, chain: object) -> list[list[object]]:
        payloads = right(self, chain)  # type: ignore[arg-type]
        first = np.array(payloads[0][0])
        first[-1] ^= 1
        return [[first, *payloads[0][1:]], *payloads[1:]]

    right = Library.payloads
    monkeypatch.setattr(Library, "payloads", spoilt)
    result = soak(2_000, 4, seed=1, folder=tmp_path, trouble_s=None, progress=False)
    assert any("WrongBytes" in problem for problem in result.problems), result.problems


def test_a_soak_sees_a_lease_that_was_not_given_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kept = []

    def forgetful(self: Worker) -> None:
        kept.append(self._client.load(self._library.chains[0][0][0], timeout_s=0.0))

    monkeypatch.setattr(Worker, "_match", forgetful)
    result = soak(200, 2, seed=1, folder=tmp_path, trouble_s=None, progress=False)
    assert any("leases are out" in problem for problem in result.problems), result.problems


def test_the_command_writes_what_it_found(tmp_path: Path) -> None:
    path = tmp_path / "soak.json"
    arguments = ["--operations", "200", "--threads", "2", "--calm", "--seed", "3"]
    assert main([*arguments, "--dir", str(tmp_path), "--json", str(path)]) == 0
    assert '"seed": 3' in path.read_text()


@pytest.mark.torture
@pytest.mark.timeout(4 * 3600)
def test_d9_d11_d15_d17_d22_a_million_operations(tmp_path: Path) -> None:
    tune_malloc()
    seed = int(os.environ.get("SOAK_SEED", random.SystemRandom().randrange(1_000_000)))
    operations = int(os.environ.get("SOAK_OPERATIONS", "1000000"))
    print(f"\nseed {seed}: python -m bench.soak --operations {operations} --seed {seed}")
    result = soak(operations, 16, seed=seed, folder=tmp_path)
    print("\n" + report(result))
    assert not result.problems
    assert result.end_bytes - result.warm_bytes < FLAT_BYTES


def test_a_soak_that_is_told_to_end_leaves_no_server_and_no_file_system_behind(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "bench.soak", "--operations", "1000000", "--dir", str(tmp_path)]
    with subprocess.Popen(command, cwd=ROOT, stderr=subprocess.PIPE, start_new_session=True) as process:
        assert process.stderr is not None
        assert process.stderr.read(1), "it says how far it is"
        process.terminate()
        process.stderr.read()
        assert process.wait(PATIENCE_S) == ENDED
    assert str(tmp_path) not in Path("/proc/mounts").read_text()
    assert not list(tmp_path.iterdir())
    assert not members_of(process.pid), "its server has ended with it"


def members_of(session: int) -> list[str]:
    """The processes of a session, but for those that are only waited for."""
    found = []
    for entry in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):
            name, _, rest = entry.read_text().rpartition(") ")
            state, _, _, its_session = rest.split()[:4]
            if int(its_session) == session and state != "Z":
                found.append(name)
    return found
