"""Engines in processes of their own against one daemon: no wrong byte, the daemon's counters are what the engines have
counted, and all that they held comes back. See ``bench/sidecar_soak.py``."""

from __future__ import annotations

import os
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from bench import sidecar_soak
from bench.side_soak_client import PatientClient, run
from bench.sidecar_soak import HOST_BYTES, differences, main, report, soak
from bench.soak_work import Library
from tests.client_support import spec_of
from tests.daemon_process import running_daemon
from tierkv.units import MIB

FLAT_BYTES = 24 * MIB
"""What a million operations may add to the daemon's own memory: the allocator's waste, not blocks or books."""


def test_d9_d15_d28_a_short_soak(tmp_path: Path) -> None:
    result = soak(3_000, 4, seed=1, place=tmp_path, progress=False)
    assert not result.problems, report(result)
    assert result.operations >= 3_000
    assert result.verified_blocks > 1_000
    assert result.sessions > 4, "some left and came back"
    assert result.counted["hit_blocks_total"] > 1_000
    assert result.counted["stored_bytes_total/host"] > HOST_BYTES
    assert result.counters["read_blocks_total/nvme/done"] > 0
    tenants = result.tenants["tenants"].values()
    assert sum(its["made_way_blocks"] for its in tenants) > 0, "quotas were reached"
    assert all(its["held_bytes"][tier] <= its["quota_bytes"][tier] for its in tenants for tier in ("nvme",))


def test_a_soak_sees_a_wrong_byte(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is stored is one bit off what is expected back."""

    def spoilt(self: Library, chain: Any) -> list[list[Any]]:
        payloads = right(self, chain)
        first = np.array(payloads[0][0])
        first[-1] ^= 1
        return [[first, *payloads[0][1:]], *payloads[1:]]

    right = Library.payloads
    with running_daemon(tmp_path, host_capacity="8 MiB", host_region="256 KiB") as daemon:
        monkeypatch.setattr(Library, "payloads", spoilt)
        told = run(str(daemon.socket), 0, 400, 1)
        assert "WrongBytes" in str(told["problem"])


def test_a_soak_sees_what_was_not_given_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sidecar_soak, "PATIENCE_S", 3.0)
    with (
        running_daemon(tmp_path, host_capacity="8 MiB") as daemon,
        PatientClient(str(daemon.socket)) as forgetful,
        PatientClient(str(daemon.socket)) as watcher,
    ):
        space = forgetful.open_namespace(spec_of())
        draft = forgetful.reserve(space.chain(list(range(33))))
        assert draft is not None
        with pytest.raises(AssertionError, match="are left"):
            sidecar_soak._wait_until_quiet(watcher)
        draft.drop()


def test_a_soak_sees_counters_that_do_not_add_up() -> None:
    counted = {"leased_blocks_total": 5, "hit_blocks_total": 5, "dropped_blocks_total/host/quota": 2}
    counters = {"leased_blocks_total": 5, "hit_blocks_total/host": 3, "hit_blocks_total/nvme": 2}
    assert differences(counted, counters | {"dropped_blocks_total/host/quota": 2}) == []
    assert len(differences(counted, counters)) == 1
    assert len(differences(counted, counters | {"stored_blocks_total/host": 1})) == 2
    assert differences({}, {"dropped_blocks_total/host/dropped_dirty": 7}) == [], "nobody was told of these"


def test_the_command_writes_what_it_found(tmp_path: Path) -> None:
    path = tmp_path / "soak.json"
    arguments = ["--operations", "200", "--clients", "2", "--seed", "3"]
    assert main([*arguments, "--dir", str(tmp_path), "--json", str(path)]) == 0
    assert '"seed": 3' in path.read_text()


@pytest.mark.torture
@pytest.mark.timeout(4 * 3600)
def test_d9_d15_d28_a_million_operations(tmp_path: Path) -> None:
    seed = int(os.environ.get("SOAK_SEED", random.SystemRandom().randrange(1_000_000)))
    operations = int(os.environ.get("SOAK_OPERATIONS", "1000000"))
    print(f"\nseed {seed}: python -m bench.sidecar_soak --operations {operations} --seed {seed}")
    result = soak(operations, 8, seed=seed, place=tmp_path)
    print("\n" + report(result))
    assert not result.problems
    grown = result.memory["most_after_it"]["private"] - result.memory["after_warm_up"]["private"]
    assert grown < FLAT_BYTES
