"""A trace: which blocks each request asked for, and when. What all formats are read into.

Blocks are small integers in the order in which they appear first. A block implies those before it, as a hash that is
chained does; a trace in which the same block follows two different ones is refused.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Final, NamedTuple

import numpy as np

from tierkv.errors import TierKVError

NO_PARENT = -1
MOST_REQUEST_BLOCKS: Final = 1 << 20
"""Of a prompt; above it a file is not taken seriously."""


class TraceError(TierKVError):
    """A trace cannot be read; says where and why."""


class Request(NamedTuple):
    """One prompt."""

    at_s: float
    """From the start of the trace."""
    ids: list[int]
    """Its full blocks, from the first one on."""
    tokens: int
    """Of the whole prompt, also those that fill no block."""
    own: int = 0
    """Leading blocks that the engine had itself, where it was recorded."""


class Prompt(NamedTuple):
    """A request as a file has it."""

    at_s: float
    names: Sequence[object]
    """Of its full blocks."""
    tokens: int
    own: int = 0


@dataclass(frozen=True)
class Trace:
    """Requests in the order of their time."""

    name: str
    block_tokens: int
    requests: Sequence[Request]

    @cached_property
    def blocks(self) -> int:
        """Different blocks."""
        return 1 + max((max(request.ids) for request in self.requests if request.ids), default=-1)

    @cached_property
    def references(self) -> int:
        """Blocks asked for, each as often as it was."""
        return sum(len(request.ids) for request in self.requests)

    @cached_property
    def seconds(self) -> float:
        return self.requests[-1].at_s - self.requests[0].at_s if self.requests else 0.0

    @cached_property
    def tokens(self) -> int:
        return sum(request.tokens for request in self.requests)

    @cached_property
    def parents(self) -> list[int]:
        """By block: the one before it, or ``NO_PARENT``."""
        found = [NO_PARENT] * self.blocks
        seen = bytearray(self.blocks)
        for request in self.requests:
            before = NO_PARENT
            for ident in request.ids:
                if not seen[ident]:
                    seen[ident] = 1
                    found[ident] = before
                elif found[ident] != before:
                    raise TraceError(
                        f"{self.name}: block {ident} {_follows(before)} in the request at {request.at_s:.3f} s and "
                        f"{_follows(found[ident])} earlier: its name does not stand for the prompt before it"
                    )
                before = ident
        return found

    @cached_property
    def hashes(self) -> list[bytes]:
        """By block: eight bytes that look like a hash, the same for the same number."""
        mixed = mix(np.arange(self.blocks, dtype=np.uint64)).tobytes()
        return [mixed[start : start + 8] for start in range(0, len(mixed), 8)]


def _follows(block: int) -> str:
    return "begins the prompt" if block == NO_PARENT else f"follows block {block}"


class TraceClock:
    """The time of the request that is replayed, for policies that look at a clock."""

    def __init__(self) -> None:
        self.at_s = 0.0

    def now_s(self) -> float:
        return self.at_s

    def unix_s(self) -> float:
        return self.at_s


Words = np.ndarray[tuple[int], np.dtype[np.uint64]]


def mix(words: Words) -> Words:
    """The finaliser of splitmix64 (Steele, Lea, Flood 2014): numbers in a row become as good as random."""
    mixed = (words + np.uint64(1)) * np.uint64(0x9E3779B97F4A7C15)
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        mixed = (mixed ^ mixed >> np.uint64(shift)) * np.uint64(factor)
    return mixed ^ mixed >> np.uint64(31)


def numbered(prompts: Iterable[Prompt]) -> list[Request]:
    """Requests with blocks of any names, numbered in the order in which they appear first; sorted by time."""
    numbers: defaultdict[object, int] = defaultdict()
    numbers.default_factory = numbers.__len__
    found = []
    for one in sorted(prompts, key=lambda prompt: prompt.at_s):
        found.append(Request(one.at_s, list(map(numbers.__getitem__, one.names)), one.tokens, one.own))
    return found
