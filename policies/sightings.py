"""When something was seen last, for as many different things as one wants to remember, and at most twice as many."""

from __future__ import annotations

SHARDS = 64
"""A dict that grows stops the world for as long as it copies itself; one of 64 does so for a millisecond at most."""


class Sightings:
    """Two generations of marks. New and renewed ones go to the young generation; when that holds ``history`` of them it
    becomes the old one, and what was old is forgotten. Memory: some 110 bytes for each mark, so 220 times ``history``.
    """

    def __init__(self, history: int) -> None:
        self.history = history
        self.rotations = 0
        self._young = _empty()
        self._old = _empty()
        self._count = 0

    def __len__(self) -> int:
        """Marks that are kept, those of both generations twice."""
        return sum(map(len, self._young)) + sum(map(len, self._old))

    def see(self, mark: int, note: int) -> int | None:
        """Remembers the note with the mark, and returns the one that was there."""
        shard = mark % SHARDS
        young = self._young[shard]
        before = young.get(mark)
        if before is not None:
            young[mark] = note
            return before
        before = self._old[shard].get(mark)
        if self._count >= self.history:
            self._old, self._young = self._young, _empty()
            self._count = 0
            self.rotations += 1
            young = self._young[shard]
        young[mark] = note
        self._count += 1
        return before


def _empty() -> list[dict[int, int]]:
    return [{} for _ in range(SHARDS)]
