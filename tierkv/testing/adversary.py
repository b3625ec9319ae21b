"""Lets a store live under a seeded adversary: one seed again, a range of them, or as many as time allows.

    python -m tierkv.testing.adversary --seed 17 --verbose      one life, told call by call
    python -m tierkv.testing.adversary --seeds 0:1000           these
    python -m tierkv.testing.adversary --minutes 10             from --from on, as far as it gets

Ends with 1 when a seed failed; each is printed with its error and the command that replays it.
"""

from __future__ import annotations

import argparse
import logging
import sys
import time
import traceback
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from itertools import count, takewhile

from tierkv.testing.sim_life import SeedFailed, Told, live

MOST_FAILURES = 20
"""After this many failing seeds there is nothing more to learn."""


def main(arguments: list[str] | None = None) -> int:
    """The command line. Returns its exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m tierkv.testing.adversary", description=(__doc__ or "").split("\n")[0]
    )
    which = parser.add_mutually_exclusive_group(required=True)
    which.add_argument("--seed", type=int, metavar="N", help="this one, with the whole error")
    which.add_argument("--seeds", type=_range, metavar="FIRST:END", help="those from FIRST to END - 1")
    which.add_argument("--minutes", type=float, metavar="M", help="as many as can be lived in M minutes")
    parser.add_argument(
        "--from", dest="first", type=int, default=0, metavar="N", help="where --minutes begins (0)"
    )
    parser.add_argument("--verbose", action="store_true", help="tell what happens, call by call")
    given = parser.parse_args(arguments)
    with _quiet_log(verbose=given.verbose):
        if given.seed is not None:
            return _replay(given.seed)
        seeds = given.seeds if given.seeds is not None else until(given.minutes * 60, given.first)
        return 1 if try_seeds(seeds) else 0


def _range(text: str) -> range:
    first, _, end = text.partition(":")
    return range(int(first), int(end))


def until(seconds: float, first: int = 0) -> Iterator[int]:
    """Seeds from ``first`` on, until that much real time has passed."""
    end_s = time.monotonic() + seconds
    return takewhile(lambda _: time.monotonic() < end_s, count(first))


def try_seeds(seeds: Iterable[int], *, every_s: float = 20.0) -> list[int]:
    """Lives all of them, prints progress and every seed that fails; returns those."""
    failed: list[int] = []
    begun_s = told_s = time.monotonic()
    lived = 0
    for seed in seeds:
        lived += 1
        try:
            live(seed)
        except SeedFailed as error:
            failed.append(seed)
            print(f"FAILED {error}", flush=True)
        now_s = time.monotonic()
        if now_s - told_s >= every_s:
            told_s = now_s
            print(
                f"{lived} seeds in {now_s - begun_s:.0f} s, the last one {seed}, {len(failed)} failed",
                flush=True,
            )
        if len(failed) == MOST_FAILURES:
            break
    print(f"{lived} seeds lived, {len(failed)} failed{': ' + str(failed) if failed else ''}", flush=True)
    return failed


def _replay(seed: int) -> int:
    try:
        told = live(seed)
    except SeedFailed:
        traceback.print_exc()
        return 1
    _report(seed, told)
    return 0


def _report(seed: int, told: Told) -> None:
    print(f"seed {seed} passed: {told.steps} events, {told.nested} of them inside others")
    for name, number in sorted(told.done.items()):
        print(f"  {name}: {number}")
    for name, number in sorted(told.injected.items()):
        print(f"  fault {name}: {number}")


@contextmanager
def _quiet_log(*, verbose: bool) -> Iterator[None]:
    """The store's own warnings are no news here, unless somebody wants the whole story."""
    log = logging.getLogger("tierkv")
    before = log.level
    handler = logging.StreamHandler(sys.stdout)
    if verbose:
        log.addHandler(handler)
    log.setLevel(logging.DEBUG if verbose else logging.CRITICAL)
    try:
        yield
    finally:
        log.removeHandler(handler)
        log.setLevel(before)


if __name__ == "__main__":
    sys.exit(main())
