"""What the benchmarks of this package have in common: their options, progress, the table and the JSON."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from bench.harness import MIN_ROUNDS, Experiment, Result, Settings, Unavailable, Worst, measure, worst_of
from bench.report import machine, table, write_json
from tierkv.tuning import tune_malloc
from tierkv.units import KIB


@dataclass(frozen=True)
class Bench:
    """A set of experiments that are run and reported together."""

    program: str
    about: str
    experiments: tuple[Experiment, ...]
    sums: tuple[Worst, ...] = ()

    def main(self, arguments: Sequence[str] | None = None) -> int:
        parser = self._parser()
        options = parser.parse_args(arguments)
        if options.rounds is not None and options.rounds < 1:
            parser.error(
                f"--rounds {options.rounds}: at least 1 round is needed, and {MIN_ROUNDS} for a claim"
            )
        settings = _settings(options)
        chosen = self._chosen(options.only)
        if not chosen:
            print(
                f"no row is called {options.only}; there are {sorted(_names(self.experiments))}",
                file=sys.stderr,
            )
            return 2
        tune_malloc()
        results, missing = self._measure(chosen, settings)
        _progress("")
        print(f"{machine()}; {settings.rounds} rounds\n\n{table(results, missing)}")
        if options.json is not None:
            write_json(options.json, results, missing)
        return 0

    def _measure(
        self, chosen: Sequence[Experiment], settings: Settings
    ) -> tuple[list[Result], dict[str, str]]:
        results: list[Result] = []
        missing: dict[str, str] = {}
        for experiment in chosen:
            try:
                results += measure(experiment, settings, _progress)
            except Unavailable as error:
                missing |= dict.fromkeys(_names([experiment]), str(error))
        for worst in self.sums:
            if (result := worst_of(worst, results)) is not None:
                results.append(result)
            elif why := next((missing[name] for name in worst.of if name in missing), None):
                missing[worst.name] = why
        return results, missing

    def _parser(self) -> argparse.ArgumentParser:
        parser = argparse.ArgumentParser(prog=self.program, description=self.about)
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

    def _sums_of(self, experiment: Experiment) -> set[str]:
        """The names of the rows that are worked out from this experiment's."""
        return {worst.name for worst in self.sums if _names([experiment]) & set(worst.of)}

    def _chosen(self, only: Sequence[str]) -> list[Experiment]:
        if not only:
            return list(self.experiments)
        return [
            experiment
            for experiment in self.experiments
            if any(
                wanted in name
                for wanted in only
                for name in {*_names([experiment]), *self._sums_of(experiment)}
            )
        ]


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
            grown_blocks=20_000,
        )
    return Settings(options.dir, rounds=options.rounds or MIN_ROUNDS)


def _names(experiments: Sequence[Experiment]) -> set[str]:
    """The names of all rows."""
    return {row.name for experiment in experiments for row in experiment.rows}


def _progress(text: str) -> None:
    if sys.stderr.isatty():
        print(f"\r\x1b[K{text}", end="", file=sys.stderr, flush=True)
    elif text:
        print(text, file=sys.stderr, flush=True)
