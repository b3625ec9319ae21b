"""Numbers as the demo writes them."""

from __future__ import annotations


def seconds(value: float) -> str:
    """All in one unit, so that they can be compared at a glance."""
    return f"{value:.2f} s"


def times(value: float) -> str:
    return f"{value:.1f}x" if value < 9.95 else f"{value:.0f}x"
