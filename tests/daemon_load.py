"""A client under load, for tests that kill it or its daemon: every byte that it is given must be the right one."""

from __future__ import annotations

import os
import random
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import tierkv
from tests.client_support import chain_of, full_group, layout_of, payloads_of, spec_of
from tierkv.daemon.remote import RemoteClient
from tierkv.testing.payloads import check
from tierkv.units import KIB

LAYOUT = layout_of(full_group(64 * KIB))
PROMPTS = 40
"""Different ones, of up to six blocks: more than a small arena holds."""


def open_space(client: RemoteClient) -> Any:
    return client.open_namespace(spec_of(LAYOUT))


def check_lease(lease: tierkv.Lease) -> None:
    key = lease.chain.namespace.block_key
    for i in range(len(lease)):
        check(lease.view(i), key(lease.chain.hashes[i], 0))


class Load:
    """Stores, loads, holds leases and drafts; ``step`` is one random act."""

    def __init__(self, client: RemoteClient, seed: int) -> None:
        self.client = client
        self.space = open_space(client)
        self._dice = random.Random(seed)
        self._leases: list[tierkv.Lease] = []
        self._drafts: list[tierkv.Draft] = []
        self.loaded = 0

    def step(self) -> None:
        chain = chain_of(self.space, self._dice.randint(1, 6), seed=self._dice.randrange(PROMPTS))
        act = self._dice.random()
        if act < 0.4:
            self.client.put(chain, payloads_of(chain))
        elif act < 0.6:
            self._hold(self._leases, self.client.load(chain, timeout_s=1.0))
        elif act < 0.7:
            draft = self.client.reserve(chain)
            if draft is not None:
                draft.view(0, 0)[:] = bytes(64 * KIB)
                self._hold(self._drafts, draft)
        elif act < 0.8:
            self.client.match(chain)
        else:
            with self.client.load(chain, timeout_s=1.0) as lease:
                check_lease(lease)
                self.loaded += len(lease)

    def _hold(self, held: list[Any], one: Any) -> None:
        held.append(one)
        if len(held) > 3:
            first = held.pop(0)
            if isinstance(first, tierkv.Lease):
                check_lease(first)
                first.release()
            else:
                first.drop()

    def let_go(self) -> None:
        for lease in self._leases:
            lease.release()
        for draft in self._drafts:
            draft.drop()
        self._leases.clear()
        self._drafts.clear()


def child(work: Callable[[Callable[[], None]], None]) -> tuple[int, int]:
    """Forks a process that does ``work(tick)`` and is to be killed; returns its pid and a pipe that gets a byte at each
    ``tick``, and an ``x`` when the work raises."""
    read, write = os.pipe()
    pid = os.fork()
    if pid == 0:  # nothing of pytest may run here
        said = b"x"
        try:
            signal.alarm(120)
            work(lambda: os.write(write, b"."))  # type: ignore[func-returns-value, arg-type, return-value]
            said = b"e"
        finally:
            os.write(write, said)
            os._exit(0)
    os.close(write)
    return pid, read


def load_in_child(socket: Path, seed: int) -> tuple[int, int]:
    def work(tick: Callable[[], None]) -> None:
        load = Load(RemoteClient(str(socket), owner=f"load {seed}", call_s=60.0), seed)
        while True:
            load.step()
            tick()

    return child(work)


# ---- what a process has


def descriptors_of(pid: int) -> int:
    return len(os.listdir(f"/proc/{pid}/fd"))


def mappings_of(pid: int) -> int:
    """Of memory that daemons share."""
    return Path(f"/proc/{pid}/maps").read_text().count("/memfd:tierkv")


def memory_of(pid: int, kind: str) -> int:
    """Bytes that are resident: ``RssAnon``, ``RssShmem`` ..."""
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        name, _, value = line.partition(":")
        if name == kind:
            return int(value.split()[0]) * KIB
    raise AssertionError(kind)


def threads_of(pid: int) -> int:
    return len(os.listdir(f"/proc/{pid}/task"))
