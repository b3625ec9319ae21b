"""`python -m bench.soak --operations 1000000 --threads 16 --json FILE`: every verb from many threads over three real
tiers while the server is stopped, killed and throttled and the disk is full.

    --operations N   how many verbs together, at least: it goes on until each trouble was there (default 100,000)
    --threads N      callers (default 16)
    --seed N         of the callers' and the troubles' dice; a run names its own (threads' order is the machine's)
    --trouble S      about how long each trouble and each peace lasts, in seconds (default 1)
    --calm           no trouble at all: what the waits are without it
    --dir PATH       where the files go when no small file system can be mounted (default .bench)

Ends with 1 when a byte was wrong or something did not come back to its start. Waits are reported, and beside them
those of a control: a future that a thread completes at its deadline, with no store in between. With more threads than
cores these are late as well, and that part of a delay is the interpreter's lock and the machine, not the store. The
process is tuned as the daemon's is: one look of the collector at everything takes longer than a wait may be late.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path

from bench.ending import unwind_at_sigterm
from bench.report import machine
from bench.soak_measure import Control, Waits, resident_bytes
from bench.soak_rig import Rig, soak_rig
from bench.soak_trouble import Troubles
from bench.soak_work import Library, Worker
from tierkv.testing.faults.leftovers import assert_nothing_left, nothing_left
from tierkv.testing.threads import Keeper
from tierkv.tuning import SWITCH_INTERVAL_S, tune_interpreter, tune_malloc
from tierkv.units import MIB

WARM_SHARE = 0.2
"""The part of a run after which memory is expected to grow no more."""
_LOOK_S = 0.25


@dataclass
class Soak:
    """What a run came to. ``problems`` is empty when all is well."""

    seed: int
    operations: int = 0
    seconds: float = 0.0
    verified_blocks: int = 0
    waits: dict[str, Waits] = field(default_factory=dict)
    troubles: Counter[str] = field(default_factory=Counter)
    control: dict[str, object] = field(default_factory=dict)
    warm_bytes: int = 0
    end_bytes: int = 0
    counters: dict[str, int] = field(default_factory=dict)
    small_disk: bool = False
    problems: list[str] = field(default_factory=list)

    def as_json(self) -> dict[str, object]:
        return {
            "machine": machine(),
            "seed": self.seed,
            "operations": self.operations,
            "seconds": round(self.seconds, 1),
            "verified_blocks": self.verified_blocks,
            "problems": self.problems,
            "waits": {name: waits.as_json() for name, waits in sorted(self.waits.items())},
            "control": self.control,
            "resident_bytes": {"after_warm_up": self.warm_bytes, "at_end": self.end_bytes},
            "troubles": dict(self.troubles),
            "disk_filled_for_real": self.small_disk,
            "counters": self.counters,
        }


def soak(
    operations: int,
    threads: int,
    *,
    seed: int,
    folder: Path,
    trouble_s: float | None = 1.0,
    progress: bool = True,
) -> Soak:
    """Runs a soak. Wrong bytes and leftovers are in ``problems``; nothing is judged that depends on speed."""
    result = Soak(seed)
    with nothing_left(patience_s=20.0), soak_rig(folder) as rig:
        _work(rig, result, operations, threads, trouble_s, progress)
        _end(rig, result)
    return result


def _work(
    rig: Rig, result: Soak, operations: int, threads: int, trouble_s: float | None, progress: bool
) -> None:
    library = Library(rig.spaces)
    result.small_disk = rig.small_disk
    before = sys.getswitchinterval()
    sys.setswitchinterval(SWITCH_INTERVAL_S)
    started_s = time.monotonic()
    with ExitStack() as stack:
        stack.callback(sys.setswitchinterval, before)
        control = stack.enter_context(Control())
        troubles = Troubles(rig, result.seed, trouble_s or 0.0)
        if trouble_s is not None:
            stack.enter_context(troubles.going_on())
        workers = [Worker(rig, library, control, result.seed, number) for number in range(threads)]
        crew = _Crew(workers, operations, troubles.all_met if trouble_s is not None else lambda: True)
        while crew.wait(_LOOK_S):
            if not result.warm_bytes and crew.done() >= WARM_SHARE * operations:
                result.warm_bytes = resident_bytes()
            if progress:
                _show(crew, operations, troubles.now, started_s)
        result.end_bytes = resident_bytes()
        result.control = control.as_json()
        result.problems += crew.problems
    result.seconds = time.monotonic() - started_s
    result.operations, result.verified_blocks = crew.done(), sum(worker.verified_blocks for worker in workers)
    result.troubles = troubles.met
    for worker in workers:
        for name, waits in worker.waits.items():
            result.waits.setdefault(name, Waits()).add(waits)


class _Crew:
    """Threads that work until all is done and ``enough`` says so, or until one of them has found something wrong."""

    def __init__(self, workers: Sequence[Worker], operations: int, enough: Callable[[], bool]) -> None:
        self._workers = workers
        self._enough = enough
        self._share = -(-operations // len(workers))
        self._stop = threading.Event()
        self._keepers = [Keeper() for _ in workers]
        self._threads = [
            threading.Thread(target=self._run, args=pair, name="soak-worker", daemon=True)
            for pair in zip(workers, self._keepers, strict=True)
        ]
        for thread in self._threads:
            thread.start()

    def _run(self, worker: Worker, keeper: Keeper) -> None:
        with keeper:
            while not self._stop.is_set() and (worker.done < self._share or not self._enough()):
                worker.step()
        if keeper.error is not None:
            self._stop.set()

    def wait(self, seconds: float) -> bool:
        """True while somebody works; returns after that time at the latest."""
        end_s = time.monotonic() + seconds
        for thread in self._threads:
            thread.join(max(0.0, end_s - time.monotonic()))
        return any(thread.is_alive() for thread in self._threads)

    def done(self) -> int:
        return sum(worker.done for worker in self._workers)

    @property
    def problems(self) -> list[str]:
        return [repr(keeper.error) for keeper in self._keepers if keeper.error is not None]


def _end(rig: Rig, result: Soak) -> None:
    """All is whole again and nobody calls any more: nothing may be left, in any tier."""
    keeper = Keeper()
    with keeper:
        rig.link.heal()
        assert_nothing_left(rig.store, nvme=rig.nvme, patience_s=30.0)
        stats = rig.client.stats()
        assert not stats["leases"], f"{stats['leases']} leases are out"
        _clear_all(rig)
        assert not rig.store.catalog.index.size, f"{rig.store.catalog.index.size} families after a clear"
        used_bytes = rig.store.host.usage().used_bytes
        assert not used_bytes, f"{used_bytes} bytes of host RAM are not free after a clear"
        on_disk = rig.store.edges[1].tier.refresh_usage()
        assert not on_disk.used_bytes, f"{on_disk.used_bytes} bytes on the disk after a clear"
        corrupt = rig.store.counters.snapshot()
        bad = {"/".join(labels): n for labels, n in corrupt.items() if labels[0] == "corrupt_blocks_total"}
        assert not bad, f"blocks did not verify: {bad}"
    if keeper.error is not None:
        result.problems.append(repr(keeper.error))
    result.counters = {
        "/".join(labels): value for labels, value in sorted(rig.store.counters.snapshot().items())
    }


def _clear_all(rig: Rig) -> None:
    """The breaker may be open yet, so once may not be enough."""
    end_s = time.monotonic() + 30.0
    while not (report := rig.client.clear(timeout_s=5.0).result()).complete:
        assert time.monotonic() < end_s, f"the clear at the end does not come through: {report}"
        time.sleep(0.2)


def _show(crew: _Crew, operations: int, trouble: str, started_s: float) -> None:
    seconds = time.monotonic() - started_s
    text = (
        f"{crew.done():,} of {operations:,}, {crew.done() / seconds:,.0f}/s, {trouble}, "
        f"{resident_bytes() / MIB:.0f} MiB"
    )
    print(f"\r\x1b[K{text}", end="", file=sys.stderr, flush=True)


def report(result: Soak) -> str:
    """For people."""
    lines = [
        f"{machine()}",
        f"seed {result.seed}: {result.operations:,} operations in {result.seconds:.0f} s",
        f"{result.verified_blocks:,} blocks verified",
        f"troubles: {dict(result.troubles)}, disk {'filled' if result.small_disk else 'said to be full'}",
        f"resident memory: {result.warm_bytes / MIB:.1f} MiB after warm-up, {result.end_bytes / MIB:.1f} at the end",
        f"waits without a store: {result.control}",
    ]
    for name, waits in sorted(result.waits.items()):
        lines.append(f"  {name:14s} " + ", ".join(f"{what} {n}" for what, n in waits.as_json().items()))
    lines += [f"PROBLEM: {problem}" for problem in result.problems] or ["no wrong byte, nothing left over"]
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m bench.soak", description=(__doc__ or "").partition("\n\n")[0]
    )
    parser.add_argument("--operations", type=int, default=100_000, metavar="N")
    parser.add_argument("--threads", type=int, default=16, metavar="N")
    parser.add_argument("--seed", type=int, metavar="N")
    parser.add_argument("--trouble", type=float, default=1.0, metavar="S")
    parser.add_argument("--calm", action="store_true", help="no trouble")
    parser.add_argument("--dir", type=Path, default=Path(".bench"), metavar="PATH")
    parser.add_argument("--json", type=Path, metavar="FILE")
    options = parser.parse_args(arguments)
    tune_malloc()
    tune_interpreter()
    seed = random.SystemRandom().randrange(1_000_000) if options.seed is None else options.seed
    result = soak(
        options.operations,
        options.threads,
        seed=seed,
        folder=options.dir,
        trouble_s=None if options.calm else options.trouble,
    )
    print("\n" + report(result))
    if options.json is not None:
        options.json.parent.mkdir(parents=True, exist_ok=True)
        options.json.write_text(json.dumps(result.as_json(), indent=2) + "\n")
    return 1 if result.problems else 0


if __name__ == "__main__":
    unwind_at_sigterm()
    sys.exit(main())
