"""How much memory this process may use: what the machine has, what its control groups and resource limits allow."""

from __future__ import annotations

import resource
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

_UNLIMITED_BYTES = 1 << 60
"""Version 1 control groups write "no limit" as a number near 2^63."""


@dataclass(frozen=True)
class Machine:
    """Where facts about this machine are read; tests name other folders."""

    proc: Path = Path("/proc")
    cgroup: Path = Path("/sys/fs/cgroup")


@dataclass(frozen=True)
class MemoryLimit:
    bytes: int
    where: str
    """In words, for a message: ``"the control group's limit (/sys/fs/cgroup/memory.max)"``."""


def smallest_memory_limit(machine: Machine) -> MemoryLimit | None:
    """The limit that is met first; ``None`` where nothing can be read."""
    return min(memory_limits(machine), key=lambda limit: limit.bytes, default=None)


def memory_limits(machine: Machine) -> Iterator[MemoryLimit]:
    """All limits that apply to this process: physical RAM, control groups (versions 1 and 2), address space."""
    physical = _physical_bytes(machine.proc / "meminfo")
    if physical is not None:
        yield MemoryLimit(physical, "the RAM of this machine")
    for path in _limit_files(machine):
        limit = _number_in(path)
        if limit is not None and limit < _UNLIMITED_BYTES:
            yield MemoryLimit(limit, f"the control group's memory limit ({path})")
    soft, _ = resource.getrlimit(resource.RLIMIT_AS)
    if soft != resource.RLIM_INFINITY:
        yield MemoryLimit(soft, "the limit of the address space (ulimit -v)")


def lockable_bytes() -> int | None:
    """What this process may lock into memory (``RLIMIT_MEMLOCK``); ``None``: as much as it likes."""
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    return None if soft == resource.RLIM_INFINITY else soft


def _physical_bytes(meminfo: Path) -> int | None:
    for line in _lines(meminfo):
        name, _, rest = line.partition(":")
        if name == "MemTotal":
            return int(rest.split()[0]) * 1024
    return None


def _limit_files(machine: Machine) -> Iterator[Path]:
    """A group is bound by its own limit and by those of all groups above it.

    Inside a container the path in ``/proc/self/cgroup`` may be the host's and not exist here; then the top of what is
    mounted is the container's own group.
    """
    for line in _lines(machine.proc / "self" / "cgroup"):
        _, controllers, group = line.split(":", 2)
        if controllers == "":
            top, name = machine.cgroup, "memory.max"
        elif "memory" in controllers.split(","):
            top, name = machine.cgroup / "memory", "memory.limit_in_bytes"
        else:
            continue
        steps = [step for step in group.split("/") if step not in ("", "..")]
        for depth in range(len(steps), -1, -1):
            yield top.joinpath(*steps[:depth], name)


def _number_in(path: Path) -> int | None:
    text = "".join(_lines(path)).strip()
    return int(text) if text.isascii() and text.isdecimal() else None  # "max" in version 2


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text().splitlines()
    except OSError:
        return []  # not on this machine: the limit does not exist
