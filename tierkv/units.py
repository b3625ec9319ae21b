"""Sizes and times as people write them: ``"4 GiB"``, ``"250 ms"``."""

from __future__ import annotations

import re

KIB = 1024
MIB = 1024 * KIB
GIB = 1024 * MIB
TIB = 1024 * GIB

ALIGN_BYTES = 4096
"""Slots, headers and disk offsets are multiples of this: a page, and the strictest O_DIRECT alignment."""

_SIZES = {
    "": 1, "b": 1,
    "k": KIB, "kb": 1000, "kib": KIB,
    "m": MIB, "mb": 1000**2, "mib": MIB,
    "g": GIB, "gb": 1000**3, "gib": GIB,
    "t": TIB, "tb": 1000**4, "tib": TIB,
}  # fmt: skip
_TIMES = {"": 1.0, "us": 1e-6, "ms": 1e-3, "s": 1.0, "min": 60.0, "h": 3600.0, "d": 86400.0}
_QUANTITY = re.compile(r"\s*([0-9]+(?:\.[0-9]+)?|\.[0-9]+)\s*([a-zA-Z]*)\s*")


def align_up(count_bytes: int, align_bytes: int = ALIGN_BYTES) -> int:
    """The smallest multiple of ``align_bytes`` that is not below ``count_bytes``."""
    return -(-count_bytes // align_bytes) * align_bytes


def parse_bytes(text: str | int) -> int:
    """``"4 GiB"``, ``"512MB"``, ``"64k"`` or a plain integer, as bytes. Raises ``ValueError`` with what it takes."""
    if isinstance(text, bool):
        raise ValueError(f"{text!r} is not a size")
    if isinstance(text, int):
        if text < 0:
            raise ValueError(f"{text!r} is negative; a size is at least 0")
        return text
    number, unit = _split(text, "a size such as '512 MiB', '4 GiB' or a number of bytes")
    if unit not in _SIZES:
        raise ValueError(f"{text!r} has no known unit; use B, KiB, MiB, GiB, TiB or KB, MB, GB, TB")
    return round(number * _SIZES[unit])


def parse_seconds(text: str | float) -> float:
    """``"250 ms"``, ``"2 s"``, ``"1 h"`` or a plain number, as seconds. Raises ``ValueError``."""
    if isinstance(text, bool):
        raise ValueError(f"{text!r} is not a time")
    if isinstance(text, int | float):
        if not 0 <= text < float("inf"):
            raise ValueError(f"{text!r} is not a time of at least 0 seconds")
        return float(text)
    number, unit = _split(text, "a time such as '250 ms', '2 s' or '1 h'")
    if unit not in _TIMES:
        raise ValueError(f"{text!r} has no known unit; use us, ms, s, min, h or d")
    return number * _TIMES[unit]


def _split(text: str, wanted: str) -> tuple[float, str]:
    found = _QUANTITY.fullmatch(text)
    if found is None:
        raise ValueError(f"{text!r} is not {wanted}")
    return float(found[1]), found[2].lower()


def format_bytes(count_bytes: float) -> str:
    """Short, in binary units: ``"1.5 GiB"``."""
    for unit, size in (("TiB", TIB), ("GiB", GIB), ("MiB", MIB), ("KiB", KIB)):
        if abs(count_bytes) >= size:
            return f"{count_bytes / size:.4g} {unit}"
    return f"{count_bytes:.0f} B"


def format_seconds(seconds: float) -> str:
    """Short, in the unit that reads best: ``"12.5 ms"``."""
    if seconds >= 100:
        return f"{seconds:,.0f} s"
    if seconds >= 1 or seconds == 0:
        return f"{seconds:.3g} s"
    if seconds >= 1e-3:
        return f"{seconds * 1e3:.3g} ms"
    return f"{seconds * 1e6:.3g} us"
