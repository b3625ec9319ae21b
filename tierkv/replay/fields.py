"""Numbers in files that somebody else has written: what they must be, said with the name and the value."""

from __future__ import annotations

from typing import Any, Final

MOST: Final = 1 << 40
"""No count of tokens or blocks, and no size of a model's parts, is above it."""


def whole(value: Any, name: str, *, least: int = 1, most: int = MOST) -> int:
    """A whole number; one with nothing behind its point is one too. Raises ``ValueError``."""
    number = value if isinstance(value, int | float) and not isinstance(value, bool) else None
    if number is None or not least <= number <= most or number != int(number):
        raise ValueError(f"{name} = {_shown(value)} is no whole number from {least:,} to {most:,}")
    return int(number)


def finite(value: Any, name: str) -> float:
    """Any number that is one. Raises ``ValueError``."""
    if isinstance(value, int | float) and not isinstance(value, bool) and abs(value) <= MOST * 1000:
        return float(value)
    raise ValueError(f"{name} = {_shown(value)} is no number, or too large to be a time")


def _shown(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 40 else f"{text[:37]}..."
