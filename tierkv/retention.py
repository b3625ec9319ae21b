"""How long and how far down somebody wants the blocks of a request kept.

    Retention(priority=5)                 stays longer than what has less
    Retention(ttl_s=3600)                 is a miss everywhere an hour after the call
    Retention(coldest="host")             never on a disk, never on the wire
    Retention(no_store=True)              nothing of this request is stored

All of it but ``no_store`` and ``coldest`` is soft: room for others may end it sooner. What stays whatever comes is
``client.pin``. ``docs/lifecycle.md`` tells what happens to a block that several calls want kept differently.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from numbers import Integral
from typing import NamedTuple

from tierkv.errors import ConfigError

MAX_PRIORITY = 127
MAX_TTL_S = 1e11
"""About 3000 years. What lies beyond would fit into no frame, nor into what a server takes."""


@dataclass(frozen=True, slots=True)
class Retention:
    """What one call wishes for its blocks. Plain data; raises ``ConfigError`` for what makes no sense."""

    priority: int = 0
    """-127 to 127: in every tier, lower leaves before higher."""
    ttl_s: float | None = None
    """Seconds from the call on, after which the blocks are misses in every tier. ``None``: no wish, so a new block
    stays until its room is needed. ``math.inf``: never, also where an earlier call said when."""
    coldest: str | None = None
    """Name of the coldest tier that may hold the blocks: ``"host"`` keeps them off disks and servers. ``None``: any."""
    no_store: bool = False
    """The call stores nothing, in no tier. It may still load what is there."""

    def __post_init__(self) -> None:
        if not _is_whole(self.priority):
            raise ConfigError("priority", self.priority, "it must be a whole number, 0 for none")
        if not -MAX_PRIORITY <= self.priority <= MAX_PRIORITY:
            raise ConfigError("priority", self.priority, f"it must be from -{MAX_PRIORITY} to {MAX_PRIORITY}")
        if self.ttl_s is not None and not _is_endless(self.ttl_s):
            check_ttl(self.ttl_s)
        if self.coldest is not None and not isinstance(self.coldest, str):
            raise ConfigError("coldest", self.coldest, "it must be the name of a tier, such as 'host'")
        if not _is_bool(self.no_store):
            raise ConfigError("no_store", self.no_store, "it must be True or False")
        if self.no_store and (self.priority or self.ttl_s is not None or self.coldest is not None):
            raise ConfigError(
                "no_store", True, "what is not stored has no priority, ttl_s or coldest; leave them out"
            )


def _is_whole(value: object) -> bool:
    return isinstance(value, Integral) and not isinstance(value, bool)


def _is_endless(ttl_s: object) -> bool:
    return isinstance(ttl_s, float) and ttl_s == math.inf


def _is_bool(value: object) -> bool:
    return isinstance(value, bool)


def check_ttl(ttl_s: object) -> None:
    """Raises ``ConfigError`` for what is no time that a block or a pin could last."""
    if not isinstance(ttl_s, int | float) or isinstance(ttl_s, bool) or not 0 < ttl_s <= MAX_TTL_S:
        raise ConfigError(
            "ttl_s", ttl_s, "it must be a number of seconds above 0; None, or math.inf for blocks, for no end"
        )


KEEP = Retention()
"""No wish: priority 0, no end, any tier."""


class Stay(NamedTuple):
    """A retention in the store's own terms, from the moment of the call on."""

    priority: int = 0
    expires_s: float | None = None
    """On the store's clock; ``math.inf``: never; ``None``: no wish."""
    ttl_s: float = math.inf
    """What ``expires_s`` was made from: tells how much an extension is worth."""
    barred: int = 0
    """Bitmap of the tiers that may not hold the blocks."""


NO_WISH = Stay()
