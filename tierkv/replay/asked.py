"""What the words after ``--capacity``, ``--nvme`` and ``--valkey`` mean."""

from __future__ import annotations

from dataclasses import dataclass

from tierkv.errors import ConfigError
from tierkv.replay.traces import Trace
from tierkv.units import format_bytes, parse_bytes

CAPACITY, NVME, VALKEY = "--capacity", "--nvme", "--valkey"
_HOW = "give a share of the trace's different blocks, such as 5%, or a number of blocks, such as 20000"
_OR_SIZE = f"{_HOW}, or a size such as 64GiB"
_MOST_BLOCKS, _MOST_BYTES = 1 << 40, 1 << 60


@dataclass(frozen=True)
class Capacity:
    """How large a tier is, as it was asked for: a share of a trace's different blocks, a number of blocks or bytes."""

    text: str
    percent: float | None
    count: int | None
    size_bytes: int | None = None
    option: str = CAPACITY
    """That asked for it."""

    def blocks(self, trace: Trace, block_bytes: int = 0) -> int:
        """At least one, but for a tier that is off. Raises ``ConfigError`` for a size that holds none."""
        if self.size_bytes is not None:
            if self.size_bytes < block_bytes:
                one = f"a block of {trace.block_tokens} tokens takes {format_bytes(block_bytes)}"
                raise ConfigError(self.option, self.text, f"it holds nothing: {one}; give more than that")
            return self.size_bytes // block_bytes
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
        OFF if may_be_off and _bytes(word) == 0 else _capacity(word, option, how, sizes=sizes)
        for word in words_of(text, option, how)
    ]


def _bytes(word: str) -> int | None:
    """``None``: it is no size."""
    try:
        return parse_bytes(word)
    except ValueError:
        return None


def _capacity(word: str, option: str, how: str, *, sizes: bool) -> Capacity:
    has_unit, size_bytes = word[-1:].isalpha(), _bytes(word)
    if has_unit and size_bytes is not None and not sizes:
        raise ConfigError(option, word, f"{_HOW}; a size needs --model or --block-bytes beside it")
    try:
        if word.endswith("%"):
            percent = float(word[:-1])
            if 0 < percent <= 100:
                return Capacity(f"{percent:g}%", percent, None, option=option)
        elif has_unit:
            if size_bytes is not None and 0 < size_bytes <= _MOST_BYTES:
                return Capacity(word, None, None, size_bytes, option)
        else:
            count = int(word)
            if 0 < count <= _MOST_BLOCKS:
                return Capacity(word, None, count, option=option)
    except ValueError:
        pass
    raise ConfigError(option, word, f"{how}; a share is above 0 and up to 100%")


def words_of(text: str, option: str, how: str) -> list[str]:
    """The words between commas, each once. Raises ``ConfigError``."""
    words = [word.strip() for word in text.split(",")]
    if not all(words):
        raise ConfigError(option, text, f"a word is empty; {how}")
    return list(dict.fromkeys(words))
