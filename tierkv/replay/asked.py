"""What the words after ``--capacity``, ``--nvme`` and ``--valkey`` mean."""

from __future__ import annotations

from dataclasses import dataclass

from tierkv.errors import ConfigError
from tierkv.replay.traces import Trace
from tierkv.units import parse_bytes

CAPACITY, NVME, VALKEY = "--capacity", "--nvme", "--valkey"
_HOW = "give a share of the trace's different blocks, such as 5%, or a number of blocks, such as 20000"
_OR_SIZE = f"{_HOW}, or a size such as 64GiB"


@dataclass(frozen=True)
class Capacity:
    """How large a tier is, as it was asked for: a share of a trace's different blocks, a number of blocks or bytes."""

    text: str
    percent: float | None
    count: int | None
    size_bytes: int | None = None

    def blocks(self, trace: Trace, block_bytes: int = 0) -> int:
        """At least one, but for a tier that is off."""
        if self.size_bytes is not None:
            return max(1, self.size_bytes // block_bytes)
        if self.percent is None:
            assert self.count is not None
            return self.count
        return max(1, int(trace.blocks * self.percent / 100))


OFF = Capacity("-", None, 0)
"""A tier that is not there."""


def capacities(
    text: str, option: str = CAPACITY, *, sizes: bool = False, may_be_off: bool = False
) -> list[Capacity]:
    """Of ``1%,5%,20000``. ``sizes``: ``64GiB`` is understood as well, since it is known what a block takes;
    ``may_be_off``: and ``0``, which stands for no such tier. Raises ``ConfigError``."""
    how = _OR_SIZE if sizes else _HOW
    return [
        OFF if may_be_off and word == "0" else _capacity(word, option, how, sizes=sizes)
        for word in words_of(text, option, how)
    ]


def _capacity(word: str, option: str, how: str, *, sizes: bool) -> Capacity:
    try:
        if word.endswith("%"):
            percent = float(word[:-1])
            if 0 < percent <= 100:
                return Capacity(f"{percent:g}%", percent, None)
        elif word[-1:].isalpha() and sizes:
            size_bytes = parse_bytes(word)
            if size_bytes > 0:
                return Capacity(word, None, None, size_bytes)
        else:
            count = int(word)
            if count > 0:
                return Capacity(word, None, count)
    except ValueError:
        pass
    raise ConfigError(option, word, f"{how}; a share is above 0 and up to 100%")


def words_of(text: str, option: str, how: str) -> list[str]:
    """The words between commas, each once. Raises ``ConfigError``."""
    words = [word.strip() for word in text.split(",")]
    if not all(words):
        raise ConfigError(option, text, f"a word is empty; {how}")
    return list(dict.fromkeys(words))
