"""What a simulated client waits for."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any


@dataclass
class Waiting:
    """A future and what to do with its result."""

    what: str
    future: Future[Any]
    take: Callable[[Any], None]
    cancelled: Callable[[], None]
    due_s: float
    """When its deadline is over."""
    jumped_s: float
    """How far the clock had jumped when it began."""
    done_s: list[float] = field(default_factory=list)
