"""Which blocks requests ask for, kept for a while for whoever records it (``tierkv record``).

A comparison of policies needs what was asked for, also what was missed; events only tell what was stored. As long as
nobody listens a request costs one look at a flag. Whoever listens asks again and again; when nobody has for
``LISTEN_S``, it is over. The ring is bounded, and who is too slow is told how many requests are lost.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Final, NamedTuple

from tierkv.clock import Clock
from tierkv.ids import BlockHash, NamespaceDigest

LISTEN_S: Final = 30.0
MOST_REQUESTS: Final = 16_384
MOST_BLOCKS: Final = 1 << 18
"""In the ring: some 20 MiB, and only while somebody listens."""
MOST_AT_ONCE: Final = 1 << 15
"""Blocks in one answer, or one request where it alone has more."""


class Asked(NamedTuple):
    """One request. ``own``: its leading blocks that the engine had itself."""

    at_s: float
    """On the store's clock."""
    namespace: NamespaceDigest
    hashes: Sequence[BlockHash]
    tokens: int
    block_tokens: int
    own: int


@dataclass(frozen=True)
class Heard:
    """What was asked behind some number."""

    recording: int
    """The same as long as somebody listened all the time."""
    now_s: float
    last: int
    """The number of the last of these requests."""
    lost: int
    """Requests before them that the ring has forgotten."""
    requests: Sequence[Asked]


class Traffic:
    """Thread-safe; its lock is a leaf that is held for microseconds."""

    def __init__(self, clock: Clock) -> None:
        self.listened = False
        """Whether ``note`` is to be called."""
        self._clock = clock
        self._lock = threading.Lock()
        self._ring: deque[Asked] = deque()
        self._blocks = 0
        self._last = 0
        self._recording = 0
        self._until_s = 0.0

    def note(
        self,
        namespace: NamespaceDigest,
        hashes: Sequence[BlockHash],
        tokens: int,
        block_tokens: int,
        own: int,
    ) -> None:
        """A request asks for blocks. The ring keeps the sequence."""
        now_s = self._clock.now_s()
        with self._lock:
            if now_s > self._until_s:
                self._end()
                return
            self._last += 1
            self._ring.append(Asked(now_s, namespace, hashes, tokens, block_tokens, own))
            self._blocks += len(hashes)
            while len(self._ring) > MOST_REQUESTS or (self._blocks > MOST_BLOCKS and len(self._ring) > 1):
                self._blocks -= len(self._ring.popleft().hashes)

    def listen(self, after: int | None) -> Heard:
        """What was asked behind the number ``after``, oldest first, up to ``MOST_AT_ONCE`` blocks; ``None``: from now
        on. Keeps it going for ``LISTEN_S``."""
        now_s = self._clock.now_s()
        with self._lock:
            if self.listened and now_s > self._until_s:
                self._end()
            if not self.listened:
                self.listened = True
                self._recording += 1
            self._until_s = now_s + LISTEN_S
            oldest = self._last - len(self._ring)
            after = self._last if after is None else min(max(0, after), self._last)
            found: list[Asked] = []
            blocks = 0
            for asked in islice(self._ring, max(after, oldest) - oldest, None):
                if found and blocks + len(asked.hashes) > MOST_AT_ONCE:
                    break
                found.append(asked)
                blocks += len(asked.hashes)
            last = max(after, oldest) + len(found)
            return Heard(self._recording, now_s, last, max(0, oldest - after), found)

    def _end(self) -> None:
        self.listened = False
        self._ring.clear()
        self._blocks = 0
