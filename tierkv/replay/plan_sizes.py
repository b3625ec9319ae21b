"""Which sizes ``tierkv plan`` looks at, and what they cost."""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Final

from tierkv.errors import ConfigError
from tierkv.replay.asked import NVME, OFF, VALKEY, Capacity, capacities
from tierkv.replay.costs import Assumption
from tierkv.replay.several import Sizes
from tierkv.units import GIB, format_bytes

HOST: Final = "--host"
ENGINE: Final = "--engine-cache"
_HOST_PARTS: Final = (128, 64, 32, 16, 8, 4, 2, 1)
_NVME_PARTS: Final = (16, 8, 4, 2, 1)
RELATIVE: Final = {"host": 10.0, "nvme": 1.0, "valkey": 10.0}
"""What a byte of each tier costs beside one of NVMe, where no prices are given."""
HOURS_A_MONTH: Final = 730.5
MOST_PRICE: Final = 1e12


@dataclass(frozen=True)
class Prices:
    """``gib_month``: of one GiB of each tier for a month, or its relation to the others. ``gpu_hour``: of one GPU."""

    gib_month: Mapping[str, float]
    gpu_hour: float | None
    given: bool

    def tiers(self, blocks: Mapping[str, int], block_bytes: int) -> float:
        """A month of these sizes."""
        return sum(self.gib_month[tier] * count * block_bytes / GIB for tier, count in blocks.items())

    def gpus(self, gpu_s: float, trace_s: float) -> float:
        """A month of what takes so many GPU-seconds in each ``trace_s``."""
        if self.gpu_hour is None or not trace_s:
            return 0.0
        return gpu_s / trace_s * HOURS_A_MONTH * self.gpu_hour

    def assumptions(self, tiers: Sequence[str]) -> list[Assumption]:
        source = "given" if self.given else "relative to NVMe, since no price is given"
        found = [
            Assumption(f"{tier}_price", self.gib_month[tier], f"a GiB and month; {source}", f"--{tier}-price")
            for tier in tiers
        ]
        if self.gpu_hour is not None:
            found.append(Assumption("gpu_price", self.gpu_hour, "an hour of one GPU; given", "--gpu-price"))
        return found


def add_options(parser: argparse.ArgumentParser) -> None:
    """The options that ``sizes_of`` and ``prices_of`` read."""
    group = parser.add_argument_group("sizes and prices")
    group.add_argument(HOST, metavar="A,B", help="sizes of host RAM, such as 64GiB (default: by the trace)")
    group.add_argument(NVME, metavar="A,B", help="the same of NVMe; 0 for none (default: by the trace)")
    group.add_argument(VALKEY, metavar="A,B", help="the same of Valkey (default: none)")
    group.add_argument(
        ENGINE,
        metavar="A",
        help="what the engine's own cache holds, such as 40GiB: its hits are no gain (default: as recorded, or 0)",
    )
    for tier in RELATIVE:
        group.add_argument(f"--{tier}-price", type=float, metavar="P", help="of one GiB for a month")
    group.add_argument("--gpu-price", type=float, metavar="P", help="of one GPU for an hour")


def sizes_of(arguments: argparse.Namespace, working_set_bytes: int, block_bytes: int) -> list[Sizes]:
    """All combinations. Where none are given: powers of two up to what the whole trace takes, each with room for a
    block. Raises ``ConfigError``."""
    top = 1 << max(0, working_set_bytes - 1).bit_length()
    host = _given(arguments.host, HOST) or _powers(top, _HOST_PARTS, block_bytes)
    nvme = _given(arguments.nvme, NVME) or [OFF, *_powers(top, _NVME_PARTS, block_bytes)]
    valkey = _given(arguments.valkey, VALKEY) or [OFF]
    return [Sizes(*each) for each in product(host, nvme, valkey)]


def engine_cache_of(arguments: argparse.Namespace) -> Capacity | None:
    """``None``: nobody has said. Raises ``ConfigError``."""
    if arguments.engine_cache is None:
        return None
    found = capacities(arguments.engine_cache, ENGINE, sizes=True, may_be_off=True)
    if len(found) > 1:
        raise ConfigError(ENGINE, arguments.engine_cache, "give one size, such as 40GiB")
    return found[0]


def _given(text: str | None, option: str) -> list[Capacity]:
    return [] if text is None else capacities(text, option, sizes=True, may_be_off=option != HOST)


def _powers(top_bytes: int, parts: Sequence[int], least_bytes: int) -> list[Capacity]:
    sizes = [top_bytes // part for part in parts if top_bytes // part >= least_bytes]
    return [Capacity(format_bytes(size), None, None, size) for size in sizes]


def prices_of(arguments: argparse.Namespace, sizes: Sequence[Sizes]) -> Prices:
    """Raises ``ConfigError`` where some are given and one that is needed is not."""
    given = {tier: getattr(arguments, f"{tier}_price") for tier in RELATIVE}
    for name, price in (*given.items(), ("gpu", arguments.gpu_price)):
        if price is not None and not 0 <= price <= MOST_PRICE:
            raise ConfigError(f"--{name}-price", price, f"give a price of 0 or more, up to {MOST_PRICE:,.0f}")
    if all(price is None for price in given.values()):
        if arguments.gpu_price is not None:
            raise ConfigError(
                "--gpu-price",
                arguments.gpu_price,
                "give --host-price and --nvme-price too, to weigh it against",
            )
        return Prices(RELATIVE, None, given=False)
    needed = {name for one in sizes for name, size in one.cold() if size is not OFF} | {"host"}
    for tier in RELATIVE:
        if tier in needed and given[tier] is None:
            raise ConfigError(f"--{tier}-price", None, "prices of other tiers are given; give this one too")
    return Prices({tier: price or 0.0 for tier, price in given.items()}, arguments.gpu_price, given=True)
