"""A block goes to the colder tier when it will probably be used again before it leaves there.

Writing every block wears a disk out and pushes out what does come back; waiting for the second sighting
(``seen_twice``) writes four times less, and loses hits where the tier is large or most blocks do come back. This gate
finds out which it is:

- as long as the tier has free room, a block is let in: it pushes nobody out;
- a block that was seen before is let in when it came back within the time that the tier keeps a block, else it would
  probably be gone again before its next use;
- a block that is new is let in when enough such blocks come back within that time, as long as not too much is written.
  One prompt in sixteen, chosen by a hash, is always left out, and what becomes of those tells.

The second sighting is the doorkeeper of TinyLFU (Einziger, Friedman, Manes, 2017); a control group that is left out to
measure is that of "Flashield" and its kin (Eisenman and others, NSDI 2019) in the simplest form.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import deque
from collections.abc import Mapping

from tierkv.policies.sightings import Sightings
from tierkv.policy import BlockInfo, Verdict
from tierkv.tier import Usage

LEFT_OUT_BELOW = 16
"""Of 256, by the hash's first byte."""
DEPTHS = (4, 16, 64)
"""New blocks are judged apart by their place in the prompt: heads come back more often than tails."""
OPEN_ABOVE, CLOSED_BELOW = 0.12, 0.09
"""Share of new blocks that come back in time, from which on new blocks are let in, and below which no more."""
MOST_SHARE = 0.45
"""They are let in as long as less than this part of all that is offered is written,"""
MOSTLY = 0.5
"""or when more than this share of them comes back."""
LEAST_TRIALS, MOST_TRIALS = 64, 1024
"""At the most all are halved: what happened lately counts more."""
PATIENCE = 0.5
"""Of the time in which as many blocks are offered as the tier has room for: what comes back so soon is in time. The
tier keeps a block for longer than that, since it does not take all."""
HISTORY = 4
"""Marks for each block that the tier has room for,"""
LEAST_HISTORY, MOST_HISTORY = 4096, 1 << 17
"""but at least and at most so many."""
LEAST_SHARE = 1 / 64


class _Class:
    """New blocks of one kind: how many of those that were left out came back in time."""

    def __init__(self) -> None:
        self._trials = self._successes = 0.0
        self.open, self.mostly = True, False

    def note(self, *, came_back: bool) -> None:
        self._trials += 1
        self._successes += came_back
        if self._trials >= MOST_TRIALS:
            self._trials /= 2
            self._successes /= 2
        if self._trials >= LEAST_TRIALS:
            share = self._successes / self._trials
            self.open = share > (CLOSED_BELOW if self.open else OPEN_ABOVE)
            self.mostly = share > MOSTLY


class WorthWritingPolicy:
    """Named ``density`` in the configuration: it lets in what promises hits for its place. A sighting is a question to
    ``admit``; time is counted in those. Tenants do not see each other's sightings. Memory: some 900 bytes for each
    block that the tier has room for, but at most 30 MB. Not thread-safe: the store
    calls it under its lock.
    """

    name = "density"

    def __init__(self) -> None:
        self._seen = Sightings(LEAST_HISTORY)
        self._questions = 0
        self._let_in_share = 1.0
        """Of the questions lately."""
        self._left_out: deque[tuple[int, int, int]] = deque()
        """(question, mark, class) of new blocks that were left out to see what becomes of them."""
        self._last: int | None = None
        self._leaves_out = False
        """Whether new blocks of the prompt that is asked about are left out."""
        self._back: dict[int, bool] = {}
        """By mark of one that was left out: whether it has come back."""
        self._classes = [_Class() for _ in range(len(DEPTHS) + 1)]
        self._counts = dict.fromkeys(("admitted", "rejected", "let_in_new", "left_out"), 0)

    def admit(self, info: BlockInfo, block_hash: bytes, usage: Usage) -> Verdict:
        places = max(1, usage.capacity_bytes // max(1, info.bytes))
        self._seen.history = min(max(HISTORY * places, LEAST_HISTORY), MOST_HISTORY)
        self._questions += 1
        mark = int.from_bytes(block_hash[:8], "big") ^ info.tenant
        before = self._seen.see(mark, self._questions)
        if info.parent is None or info.parent != self._last:  # blocks of one prompt are asked about in a row
            self._leaves_out = bool(block_hash) and block_hash[0] < LEFT_OUT_BELOW
        self._last = info.id
        self._judge(min(int(PATIENCE * places), MOST_HISTORY))
        if before is None:
            admitted = self._lets_in_new(block_hash, mark, info, usage)
        else:
            if mark in self._back:
                self._back[mark] = True
            keeps = places / max(self._let_in_share, LEAST_SHARE)
            admitted = _has_room(info, usage) or self._questions - before <= keeps
        self._let_in_share += (admitted - self._let_in_share) / min(places, self._questions + 1)
        self._counts["admitted" if admitted else "rejected"] += 1
        return Verdict.ADMIT if admitted else Verdict.REJECT

    def _lets_in_new(self, block_hash: bytes, mark: int, info: BlockInfo, usage: Usage) -> bool:
        its_class = bisect_right(DEPTHS, info.depth)
        if self._leaves_out:
            self._left_out.append((self._questions, mark, its_class))
            self._back[mark] = False
            self._counts["left_out"] += 1
            return False
        known = self._classes[its_class]
        if _has_room(info, usage) or known.mostly or (known.open and self._let_in_share < MOST_SHARE):
            self._counts["let_in_new"] += 1
            return True
        return False

    def _judge(self, patience: int) -> None:
        """Those that were left out long enough ago have come back by now, or have not in time."""
        while self._left_out and self._questions - self._left_out[0][0] >= patience:
            _, mark, its_class = self._left_out.popleft()
            self._classes[its_class].note(came_back=self._back.pop(mark, False))

    def counters(self) -> Mapping[str, int]:
        return dict(self._counts)


def _has_room(info: BlockInfo, usage: Usage) -> bool:
    return usage.used_bytes + info.bytes <= usage.capacity_bytes
