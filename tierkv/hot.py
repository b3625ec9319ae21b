"""Which prefixes were loaded most of late: what a page for operators shows.

A load of n blocks counts for its prefixes of 1, 2, 4, 8 ... blocks. A load only leaves a note, which costs about a
microsecond; once a second the notes are taken into a table of bounded size: a Misra-Gries summary (1982) that merges
batches as in Agarwal and others, "Mergeable Summaries" (2012), so a prefix with more than one load in ``MOST_KEPT`` of
all is never missing. Counts fade to half in ``HALF_S``, hence "of late". Beyond ``MOST_NOTED`` loads between two looks
the oldest notes are lost: in such a crowd the rest is a fair sample.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Sequence
from operator import itemgetter
from typing import Any, Final, NamedTuple

from tierkv.clock import Clock
from tierkv.ids import BlockHash, NamespaceDigest

LENGTHS: Final = tuple(1 << power for power in range(18))
"""Of the prefixes that are counted, in blocks."""
MOST_KEPT: Final = 1024
MOST_NOTED: Final = 1024
HALF_S: Final = 300.0
_SAME: Final = 0.8
"""A prefix that is so often part of a longer one says nothing beside it."""
_FAINT: Final = 0.01

Name = tuple[NamespaceDigest, BlockHash]
_Note = tuple[NamespaceDigest, Sequence[BlockHash]]


class HotPrefix(NamedTuple):
    """The first ``blocks`` blocks of some prompts, of which the last has this hash."""

    namespace: NamespaceDigest
    block_hash: BlockHash
    blocks: int
    loads: float
    """Of late; faded."""


class _Seen:
    """An entry of the table."""

    __slots__ = ("loads", "place", "shorter")

    def __init__(self, place: int, shorter: Name | None) -> None:
        self.loads = 0.0
        self.place = place
        self.shorter = shorter


def _first_and_more(places: int) -> Callable[[Sequence[BlockHash]], Any]:
    return itemgetter(*(length - 1 for length in LENGTHS[:places]))


_MARKS: Final = tuple(_first_and_more(places) for places in range(1, len(LENGTHS) + 1))


class HotPrefixes:
    """``note`` and ``top`` from any thread; ``take_in`` from one at a time."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._noted: deque[_Note] = deque(maxlen=MOST_NOTED)
        self._seen: dict[Name, _Seen] = {}
        self._lock = threading.Lock()
        self._faded_s = clock.now_s()

    def note(self, namespace: NamespaceDigest, hashes: Sequence[BlockHash], blocks: int) -> None:
        """A request has got the first ``blocks`` blocks of a chain with these hashes."""
        if blocks:
            places = min(blocks.bit_length(), len(LENGTHS))
            marks = _MARKS[places - 1](hashes)
            self._noted.append((namespace, marks if places > 1 else (marks,)))

    def take_in(self) -> None:
        """Takes the notes into the table."""
        with self._lock:
            self._fade()
            for _ in range(len(self._noted)):
                namespace, marks = self._noted.popleft()
                shorter: Name | None = None
                for place, mark in enumerate(marks):
                    name = (namespace, mark)
                    seen = self._seen.get(name)
                    if seen is None:
                        seen = self._seen[name] = _Seen(place, shorter)
                    seen.loads += 1
                    shorter = name
            if len(self._seen) > MOST_KEPT:
                self._shrink()

    def _fade(self) -> None:
        now_s = self._clock.now_s()
        factor = 0.5 ** ((now_s - self._faded_s) / HALF_S)
        self._faded_s = now_s
        for name, seen in list(self._seen.items()):
            seen.loads *= factor
            if seen.loads < _FAINT:
                del self._seen[name]

    def _shrink(self) -> None:
        """What the first beyond the bound has is taken from all."""
        least = sorted((seen.loads for seen in self._seen.values()), reverse=True)[MOST_KEPT]
        for name, seen in list(self._seen.items()):
            seen.loads -= least
            if seen.loads <= 0:
                del self._seen[name]

    def top(self, count: int) -> list[HotPrefix]:
        """Those that saved most blocks, the first of them first. A prefix is left out where nearly all of its loads are
        those of a longer one."""
        self.take_in()
        with self._lock:
            told = {
                seen.shorter
                for seen in self._seen.values()
                if seen.shorter in self._seen and seen.loads >= _SAME * self._seen[seen.shorter].loads
            }
            left = [(name, seen) for name, seen in self._seen.items() if name not in told]
            left.sort(key=lambda one: (-one[1].loads * LENGTHS[one[1].place], one[0]))
            return [
                HotPrefix(*name, LENGTHS[seen.place], round(seen.loads, 3)) for name, seen in left[:count]
            ]
