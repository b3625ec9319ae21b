"""`python -m bench.edges --json FILE`: each edge of the store beside its physical limit, in the same run.

    --only NAME    rows or experiments whose name contains NAME (may be repeated)
    --rounds N     rounds of ours, limit, limit, ours for each (default 12; fewer are for a look only)
    --quick        3 rounds, small sizes, no repetition: shows that it runs
    --dir PATH     where the disk rows put their files (default .bench), on the disk that is to be measured

What the rows mean stands in the JSON ("definition") and in docs; the ratio is always value / limit.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from bench.edge_host import HostLoad, HostPut
from bench.edge_import import ImportTierkv
from bench.edge_keys import KeysChain
from bench.edge_nvme import NVME_CPU, NvmeEdge
from bench.edge_valkey import VALKEY_GET_CPU, VALKEY_SET_CPU, ValkeyEdge
from bench.harness import MIN_ROUNDS, Experiment, Reach, Result, Settings, Unavailable, measure, worst_of
from bench.memory import tune_malloc
from bench.report import machine, table, write_json
from tierkv.units import KIB

EXPERIMENTS: tuple[Experiment, ...] = (
    HostPut(),
    HostLoad(1, Reach("value", "<=", 8)),
    HostLoad(64, Reach("value", "<=", 1)),
    NvmeEdge("read"),
    NvmeEdge("write"),
    ValkeyEdge("get", "tcp"),
    ValkeyEdge("get", "unix"),
    ValkeyEdge("set", "tcp"),
    ValkeyEdge("set", "unix"),
    KeysChain(),
    ImportTierkv(),
)
SUMS = (NVME_CPU, VALKEY_GET_CPU, VALKEY_SET_CPU)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = _parser()
    options = parser.parse_args(arguments)
    if options.rounds is not None and options.rounds < 1:
        parser.error(f"--rounds {options.rounds}: at least 1 round is needed, and {MIN_ROUNDS} for a claim")
    settings = _settings(options)
    chosen = _chosen(options.only)
    if not chosen:
        print(f"no row is called {options.only}; there are {sorted(_names(EXPERIMENTS))}", file=sys.stderr)
        return 2
    tune_malloc()
    results: list[Result] = []
    missing: dict[str, str] = {}
    for experiment in chosen:
        try:
            results += measure(experiment, settings, _progress)
        except Unavailable as error:
            missing |= dict.fromkeys(_names([experiment]), str(error))
    for worst in SUMS:
        if (result := worst_of(worst, results)) is not None:
            results.append(result)
        elif why := next((missing[name] for name in worst.of if name in missing), None):
            missing[worst.name] = why
    _progress("")
    print(f"{machine()}; {settings.rounds} rounds\n\n{table(results, missing)}")
    if options.json is not None:
        write_json(options.json, results, missing)
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m bench.edges", description=(__doc__ or "").partition("\n")[0]
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures here")
    parser.add_argument(
        "--only", action="append", default=[], metavar="NAME", help="only rows that contain NAME"
    )
    parser.add_argument("--rounds", type=int, metavar="N", help=f"default {MIN_ROUNDS}")
    parser.add_argument("--quick", action="store_true", help="small and short: shows that it runs")
    parser.add_argument(
        "--dir", type=Path, default=Path(".bench"), metavar="PATH", help="on the disk to measure"
    )
    return parser


def _settings(options: argparse.Namespace) -> Settings:
    if options.quick:
        return Settings(
            options.dir,
            rounds=options.rounds or 3,
            attempts=1,
            block_bytes=256 * KIB,
            memory_blocks=16,
            disk_blocks=128,
            batches=1,
            index_blocks=512,
            chain_tokens=8192,
        )
    return Settings(options.dir, rounds=options.rounds or MIN_ROUNDS)


def _names(experiments: Sequence[Experiment]) -> set[str]:
    """The names of all rows."""
    return {row.name for experiment in experiments for row in experiment.rows}


def _sums(experiment: Experiment) -> set[str]:
    """The names of the rows that are worked out from this experiment's."""
    return {worst.name for worst in SUMS if _names([experiment]) & set(worst.of)}


def _chosen(only: Sequence[str]) -> list[Experiment]:
    if not only:
        return list(EXPERIMENTS)
    return [
        experiment
        for experiment in EXPERIMENTS
        if any(wanted in name for wanted in only for name in {*_names([experiment]), *_sums(experiment)})
    ]


def _progress(text: str) -> None:
    if sys.stderr.isatty():
        print(f"\r\x1b[K{text}", end="", file=sys.stderr, flush=True)
    elif text:
        print(text, file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
