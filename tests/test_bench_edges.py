"""Every row of the benchmark runs on tiny sizes with the real parts, and its bytes come back right."""

import sys
from pathlib import Path

import pytest

from bench.edge_codec import way_of
from bench.edge_import import ImportTierkv
from bench.edge_keys import KeysChain
from bench.edge_nvme import NvmeEdge
from bench.edge_valkey import ValkeyEdge
from bench.edges import EXPERIMENTS, SUMS
from bench.harness import Experiment, Settings, Unavailable, run_rounds, summarise
from tierkv.layout import GroupKind, LayerGroup
from tierkv.units import KIB

TINY = {
    "block_bytes": 64 * KIB,
    "memory_blocks": 4,
    "disk_blocks": 16,
    "batch_blocks": 8,
    "batches": 1,
    "index_blocks": 8,
    "chain_tokens": 16 * 20,
}

ASKED_FOR = {
    "host_put",
    "host_load_1",
    "host_load_64",
    "nvme_read",
    "nvme_write",
    "nvme_cpu",
    "valkey_get_cpu",
    "valkey_set_cpu",
    "keys_chain",
    "import_tierkv",
}


@pytest.mark.parametrize("experiment", EXPERIMENTS, ids=lambda experiment: experiment.name)
def test_every_experiment_runs_and_checks_its_bytes(experiment: Experiment, tmp_path: Path) -> None:
    settings = Settings(tmp_path, rounds=1, attempts=1, **TINY)
    try:
        with experiment.open(settings) as sides:
            pairs = run_rounds(sides, settings.rounds, lambda text: None)
    except Unavailable as error:
        pytest.skip(str(error))
    for row in experiment.rows:
        result = summarise(row, pairs, 1)
        assert result.value > 0
        assert result.limit > 0
        assert row.definition
    assert not list(tmp_path.iterdir()), "an experiment leaves nothing behind"


def test_every_row_that_was_asked_for_is_there_once() -> None:
    names = [row.name for experiment in EXPERIMENTS for row in experiment.rows] + [
        worst.name for worst in SUMS
    ]
    assert len(names) == len(set(names))
    assert set(names) >= ASKED_FOR


def test_sums_are_of_rows_that_exist() -> None:
    names = {row.name for experiment in EXPERIMENTS for row in experiment.rows}
    assert {name for worst in SUMS for name in worst.of} <= names


def test_the_bounds_are_the_ones_that_were_set() -> None:
    rows = [
        *NvmeEdge("read").rows,
        *NvmeEdge("write").rows,
        *ValkeyEdge("get", "tcp").rows,
        *KeysChain().rows,
    ]
    rows += [
        row for experiment in EXPERIMENTS if experiment.name.startswith("host") for row in experiment.rows
    ]
    rows += ImportTierkv().rows
    bounds = {row.name: str(row.reach) for row in rows if row.reach is not None}
    assert bounds == {
        "host_put": "ratio >= 0.85",
        "host_load_1": "value <= 8",
        "host_load_64": "value <= 1",
        "nvme_read": "ratio >= 0.9",
        "nvme_write": "ratio >= 0.9",
        "nvme_cpu_read": "ratio <= 1.5",
        "nvme_cpu_write": "ratio <= 1.5",
        "valkey_get_cpu_tcp": "ratio <= 1.25",
        "keys_chain": "ratio <= 1.3",
        "import_tierkv": "excess <= 60",
    }


@pytest.mark.parametrize("package", ["blosc2", "zstandard"])
def test_a_package_that_cannot_be_imported_costs_its_own_rows_only(
    package: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / f"{package}.py").write_text("import no_such_module_as_this\n")
    monkeypatch.delitem(sys.modules, package, raising=False)
    monkeypatch.syspath_prepend(tmp_path)
    group = LayerGroup("g", GroupKind.FULL, 1, 4096, 16)
    with pytest.raises(Unavailable, match=f"{package!r} cannot be imported: .*no_such_module_as_this"):
        way_of("zstd" if package == "zstandard" else package, group)
