"""How often something was seen lately, counted in little memory and sometimes too high.

The count-min sketch of Cormode and Muthukrishnan (2005) with the aging of TinyLFU (Einziger, Friedman, Manes, 2017):
four rows of small counters, of which the smallest counts; all are halved once in so many sightings.
"""

from __future__ import annotations

_ROWS = 4
_MOST = 15
_SAMPLES_PER_PLACE = 10
LEAST_WIDTH = 1024
_LEAST_PLACES = 128
_FACTORS = (
    0x9E3779B97F4A7C15,
    0xBF58476D1CE4E5B9,
    0x94D049BB133111EB,
    0xD6E8FEB86659FD93,
)
_WORD = (1 << 64) - 1


class FrequencySketch:
    """Memory: some 16 bytes for each place of the cache. Starts anew, empty, when the cache has grown twofold."""

    def __init__(self) -> None:
        self._width = 0
        self._rows: list[bytearray] = []
        self._seen = 0
        self._samples = 0
        self.fit(1)

    def fit(self, places: int) -> None:
        """Makes it wide enough for a cache of so many blocks."""
        if 4 * places > self._width or not self._rows:
            self._width = max(LEAST_WIDTH, 1 << (8 * places - 1).bit_length())
            self._rows = [bytearray(self._width) for _ in range(_ROWS)]
            self._seen = 0
        self._samples = _SAMPLES_PER_PLACE * max(places, _LEAST_PLACES)

    def see(self, word: int) -> None:
        """``word``: 64 bits that stand for what was seen."""
        places = self._places(word)
        least = min(row[place] for row, place in zip(self._rows, places, strict=True))
        if least < _MOST:
            for row, place in zip(self._rows, places, strict=True):
                if row[place] == least:
                    row[place] = least + 1
        self._seen += 1
        if self._seen >= self._samples:
            self._seen //= 2
            self._rows = [bytearray(row.translate(_HALVED)) for row in self._rows]

    def count(self, word: int) -> int:
        return min(row[place] for row, place in zip(self._rows, self._places(word), strict=True))

    def _places(self, word: int) -> list[int]:
        shift = 64 - (self._width - 1).bit_length()
        return [((word ^ word >> 32) * factor & _WORD) >> shift for factor in _FACTORS]


_HALVED = bytes(count // 2 for count in range(256))
