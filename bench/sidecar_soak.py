"""`python -m bench.sidecar_soak --operations 1000000 --clients 8 --json FILE`: engines in processes of their own
against one daemon whose host RAM and disk are always full, with tenants that are at their quotas.

    --operations N   how many verbs together (default 100,000)
    --clients N      engine processes (default 8)
    --seed N         of the engines' dice; a run names its own
    --dir PATH       where the disk's files go (default .bench)

Every byte that comes back is compared with what it must be. At the end the daemon's counters must be what the engines
have counted, nobody's lease, draft or session may be left, and after a clear no byte may be in use. Ends with 1 when
something is wrong. The daemon's memory is reported: it must not grow after the first fifth of the run.
"""

from __future__ import annotations

import argparse
import json
import random
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Final

from bench.ending import unwind_at_sigterm
from bench.report import machine
from bench.side_soak_client import PATIENCE_S, PatientClient
from bench.sidecar_process import folder, start_daemon, stop
from tierkv.daemon.remote import RemoteClient
from tierkv.testing.threads import Keeper
from tierkv.units import KIB, MIB

HOST_BYTES: Final = 8 * MIB
NVME_BYTES: Final = 128 * MIB
TENANT_SHARE: Final = 0.4
"""Of three tenants: all of them together would like to have more than there is."""
WARM_SHARE: Final = 0.2
"""The part of a run after which memory is expected to grow no more."""
_LOOK_S: Final = 0.5

OFFERED: Final = ("no_room", "quota", "no_parent", "index_full", "no_store", "asleep", "damaged")
"""Reasons for a drop that is told to whoever stored; what was lost later is counted under others."""


@dataclass
class SideSoak:
    """What a run came to. ``problems`` is empty when all is well."""

    seed: int
    operations: int = 0
    clients: int = 0
    sessions: int = 0
    away: int = 0
    seconds: float = 0.0
    verified_blocks: int = 0
    memory: dict[str, dict[str, int]] = field(default_factory=dict)
    """Bytes of the daemon, by kind: after warm-up, the most after it, and at the end."""
    counted: dict[str, int] = field(default_factory=dict)
    """By the engines."""
    counters: dict[str, int] = field(default_factory=dict)
    """The daemon's."""
    tenants: dict[str, Any] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)

    def as_json(self) -> dict[str, object]:
        return {"machine": machine(), **self.__dict__, "seconds": round(self.seconds, 1)}


class Crew:
    """Engine processes, each with a thread that listens to it."""

    def __init__(self, path: str, clients: int, operations: int, seed: int) -> None:
        self.done = [0] * clients
        self.told: list[dict[str, Any]] = []
        share = -(-operations // clients)
        self._processes = [
            subprocess.Popen(
                [sys.executable, "-m", "bench.side_soak_client", path, str(number), str(share), str(seed)],
                stdout=subprocess.PIPE,
                text=True,
            )
            for number in range(clients)
        ]
        self._threads = [
            threading.Thread(target=self._listen, args=(number,), daemon=True) for number in range(clients)
        ]
        for thread in self._threads:
            thread.start()

    def _listen(self, number: int) -> None:
        """Lines are numbers of operations done, the last one is all that was counted."""
        stdout = self._processes[number].stdout
        assert stdout is not None
        for line in stdout:
            said = json.loads(line)
            if isinstance(said, dict):
                self.told.append(said)
                self.done[number] = said["done"]
            else:
                self.done[number] = said

    def wait(self, seconds: float) -> bool:
        """True while an engine works; returns after that time at the latest."""
        end_s = time.monotonic() + seconds
        for thread in self._threads:
            thread.join(max(0.0, end_s - time.monotonic()))
        return any(thread.is_alive() for thread in self._threads)

    def close(self) -> None:
        for process in self._processes:
            if process.poll() is None:
                process.kill()
            process.wait()
        for thread in self._threads:
            thread.join()
        for process in self._processes:
            if process.stdout is not None:
                process.stdout.close()


class Memory:
    """Of a process, as it goes on."""

    def __init__(self, pid: int) -> None:
        self._status = Path(f"/proc/{pid}/status")
        self.warm: dict[str, int] = {}
        self.most: dict[str, int] = {}
        self.now: dict[str, int] = {}

    def look(self, *, warm: bool) -> None:
        lines = dict(line.split(":", 1) for line in self._status.read_text().splitlines())
        self.now = {
            "private": int(lines["RssAnon"].split()[0]) * KIB,
            "resident": int(lines["VmRSS"].split()[0]) * KIB,
            "threads": int(lines["Threads"]),
        }
        if warm:
            self.warm = self.warm or self.now
            self.most = {kind: max(size, self.most.get(kind, 0)) for kind, size in self.now.items()}

    def facts(self) -> dict[str, dict[str, int]]:
        return {"after_warm_up": self.warm, "most_after_it": self.most, "at_end": self.now}


def soak(operations: int, clients: int, *, seed: int, place: Path, progress: bool = True) -> SideSoak:
    """Runs a soak. Nothing is judged that depends on speed, nor is memory: that is for who reads."""
    result = SideSoak(seed, clients=clients)
    place.mkdir(parents=True, exist_ok=True)
    with folder() as short, TemporaryDirectory(dir=place, prefix="side-soak-") as disk:
        with _daemon(short, Path(disk)) as process:
            _work(result, process.pid, str(short / "socket"), operations, progress)
        if process.returncode != 0:
            result.problems.append(f"the daemon ended with {process.returncode}")
    return result


@contextmanager
def _daemon(short: Path, disk: Path) -> Iterator[subprocess.Popen[bytes]]:
    process, _ = start_daemon(
        short,
        HOST_BYTES,
        host_region=256 * KIB,
        nvme_path=str(disk / "nvme"),
        nvme_capacity=NVME_BYTES,
        nvme_min_free=0,
        limits_tenant_share=TENANT_SHARE,
    )
    try:
        yield process
    finally:
        stop(process)


def _work(result: SideSoak, pid: int, path: str, operations: int, progress: bool) -> None:
    started_s = time.monotonic()
    memory = Memory(pid)
    crew = Crew(path, result.clients, operations, result.seed)
    try:
        while crew.wait(_LOOK_S):
            done = sum(crew.done)
            memory.look(warm=done >= WARM_SHARE * operations)
            if progress:
                _show(done, operations, memory.now["private"], started_s)
    finally:
        crew.close()
    result.seconds = time.monotonic() - started_s
    result.operations = sum(told["done"] for told in crew.told)
    result.verified_blocks = sum(told["verified_blocks"] for told in crew.told)
    result.sessions = sum(told["sessions"] for told in crew.told)
    result.away = sum(told["away"] for told in crew.told)
    result.problems += [told["problem"] for told in crew.told if told["problem"]]
    if len(crew.told) < result.clients:
        result.problems.append(f"{result.clients - len(crew.told)} engines have not told what they counted")
    counted: Counter[str] = Counter()
    for told in crew.told:
        counted.update(told["counted"])
    result.counted = dict(sorted(counted.items()))
    keeper = Keeper()
    with keeper, PatientClient(path, owner="soak", call_s=PATIENCE_S) as client:
        _end(result, client)
    if keeper.error is not None:
        result.problems.append(repr(keeper.error))
    memory.look(warm=True)
    result.memory = memory.facts()


def _end(result: SideSoak, client: RemoteClient) -> None:
    """All engines have gone: the books must be equal, and nothing may be left of them."""
    _wait_until_quiet(client)
    stats: Any = client.stats()
    result.counters, result.tenants = stats["counters"], stats["tenants"]
    result.problems += differences(result.counted, result.counters)
    corrupt = {
        name: count for name, count in result.counters.items() if name.startswith("corrupt_blocks_total")
    }
    if corrupt:
        result.problems.append(f"blocks did not verify: {corrupt}")
    until_s = time.monotonic() + PATIENCE_S
    while not client.clear(timeout_s=5.0).result(PATIENCE_S).complete:
        assert time.monotonic() < until_s, "the clear at the end does not come through"
    status = _wait_until_quiet(client, empty=True)
    assert not status["blocks"], f"{status['blocks']} blocks after a clear"
    for name, its in status["tenants"]["tenants"].items():
        left = [*its["held_bytes"].values(), *its["coming_bytes"].values()]
        assert not any(left), f"tenant {name} holds {left} after a clear"


def _wait_until_quiet(client: RemoteClient, *, empty: bool = False) -> dict[str, Any]:
    """The daemon's status when it has taken back all that the engines held, and nothing is on its way; ``empty``: and
    the tiers say that nothing is in them."""
    until_s = time.monotonic() + PATIENCE_S
    while True:
        reply = client.link.call("ask", {"question": "status", "body": b""}, until_s + PATIENCE_S)
        status: dict[str, Any] = json.loads(reply["answer"])
        sessions, leases = status["sessions"]["sessions"], status["leases"]["count"]
        pending = sum(edge["pending_bytes"] for edge in status["edges"].values())
        held = leases + sum(one["drafts"] for one in sessions) + len(sessions) - 1
        used = {name: tier["used_bytes"] for name, tier in status["tiers"].items() if tier["used_bytes"]}
        if not held and not pending and not (empty and used):
            return status
        assert time.monotonic() < until_s, (
            f"{leases} leases, {pending} bytes, sessions {sessions}, {used} are left"
        )
        time.sleep(0.05)


def differences(counted: Mapping[str, int], counters: Mapping[str, int]) -> list[str]:
    """Where the daemon's counters are not what its engines have counted."""
    names = ["stored_blocks_total/host", "stored_bytes_total/host", "leased_blocks_total"]
    names += ["match_total", "match_blocks_total", *(f"dropped_blocks_total/host/{why}" for why in OFFERED)]
    said = {name: counters.get(name, 0) for name in names}
    said["hit_blocks_total"] = sum(
        count for name, count in counters.items() if name.startswith("hit_blocks_total/")
    )
    for name in counted:
        said.setdefault(name, counters.get(name, 0))
    return [
        f"{name}: the engines counted {counted.get(name, 0)}, the daemon {count}"
        for name, count in said.items()
        if count != counted.get(name, 0)
    ]


def _show(done: int, operations: int, memory_bytes: int, started_s: float) -> None:
    seconds = time.monotonic() - started_s
    text = f"{done:,} of {operations:,}, {done / seconds:,.0f}/s, daemon {memory_bytes / MIB:.1f} MiB"
    print(f"\r\x1b[K{text}", end="", file=sys.stderr, flush=True)


def report(result: SideSoak) -> str:
    """For people."""
    who = f"{result.clients} engines in {result.sessions} sessions"
    lines = [
        machine(),
        f"seed {result.seed}: {result.operations:,} operations of {who}, {result.seconds:.0f} s",
        f"{result.verified_blocks:,} blocks verified; the daemon was out of reach {result.away} times",
    ]
    for when, sizes in result.memory.items():
        told = {kind: size if kind == "threads" else f"{size / MIB:.1f} MiB" for kind, size in sizes.items()}
        lines.append(f"daemon {when}: {told}")
    lines += [f"  {name}: {count:,}" for name, count in result.counted.items()]
    lines += [f"PROBLEM: {problem}" for problem in result.problems] or ["no wrong byte, nothing left over"]
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m bench.sidecar_soak", description=(__doc__ or "").partition("\n\n")[0]
    )
    parser.add_argument("--operations", type=int, default=100_000, metavar="N")
    parser.add_argument("--clients", type=int, default=8, metavar="N")
    parser.add_argument("--seed", type=int, metavar="N")
    parser.add_argument("--dir", type=Path, default=Path(".bench"), metavar="PATH")
    parser.add_argument("--json", type=Path, metavar="FILE")
    options = parser.parse_args(arguments)
    seed = random.SystemRandom().randrange(1_000_000) if options.seed is None else options.seed
    result = soak(options.operations, options.clients, seed=seed, place=options.dir)
    print("\n" + report(result))
    if options.json is not None:
        options.json.parent.mkdir(parents=True, exist_ok=True)
        options.json.write_text(json.dumps(result.as_json(), indent=2) + "\n")
    return 1 if result.problems else 0


if __name__ == "__main__":
    unwind_at_sigterm()
    with suppress(KeyboardInterrupt):
        sys.exit(main())
