"""Values as msgpack and JSON can say them."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np


def plain(value: Any) -> Any:
    """Tuples of a key are joined by ``/``; a number that JSON has no word for is nothing."""
    if isinstance(value, dict):
        return {
            "/".join(map(str, key)) if isinstance(key, tuple) else str(key): plain(item)
            for key, item in value.items()
        }
    if isinstance(value, list | tuple | set | frozenset):
        return [plain(item) for item in value]
    if isinstance(value, np.generic):
        value = value.item()
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, bytes):
        return value.hex()
    return str(value) if isinstance(value, Path) else value
