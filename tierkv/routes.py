"""Which way bytes take between scattered pages and a slot: a table by the length of their contiguous runs.

A page of one layer that is contiguous is one run; pages whose neighbours in a slot are their neighbours in memory too
(contiguous across layers) merge into longer ones. Copy engines leave the SMs to the model, so they are preferred as
soon as runs are long enough that starting each copy costs little beside making it; shorter runs are gathered on the
device first, where a kernel needs microseconds for what the bus needs a hundred for. ``python -m bench.gpu``
measures all three ways for each length and prints the table for its machine.
"""

from __future__ import annotations

from dataclasses import dataclass

from tierkv.errors import ConfigError
from tierkv.streams import Route
from tierkv.units import KIB


@dataclass(frozen=True)
class RouteTable:
    """``steps``: (runs of at least so many bytes, their route), the longest first; ``short``: what is below all
    steps.

    Raises ``ConfigError`` for steps that are not in this order.
    """

    down: tuple[tuple[int, Route], ...]
    up: tuple[tuple[int, Route], ...]
    short: Route = Route.STAGED

    def __post_init__(self) -> None:
        for name, steps in (("down", self.down), ("up", self.up)):
            bounds = [bound for bound, _ in steps]
            if bounds != sorted(bounds, reverse=True):
                raise ConfigError(name, bounds, "the longest runs first")

    def route(self, *, down: bool, run_bytes: int) -> Route:
        """The way for runs of this length, to the host (``down``) or from it."""
        for bound, route in self.down if down else self.up:
            if run_bytes >= bound:
                return route
        return self.short


DEFAULT_ROUTES = RouteTable(
    down=((256 * KIB, Route.DMA),),
    up=((256 * KIB, Route.DMA),),
)
"""Reckoned, not measured: a copy engine's start takes one to two microseconds, in which a PCIe 5 bus moves some 64 to
100 KiB, so runs of 256 KiB are where starting costs no more than a tenth or two."""
