"""``tierkv replay`` with ``--nvme`` or ``--valkey``: host RAM and the tiers behind it."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from itertools import product
from typing import Final

from tierkv import registry
from tierkv.config_table import BY_KEY
from tierkv.errors import ConfigError
from tierkv.replay import chart
from tierkv.replay.asked import CAPACITY, NVME, OFF, VALKEY, Capacity, capacities
from tierkv.replay.chosen import ADMISSION, PROMOTION, admissions, evictions, promotion
from tierkv.replay.cost_options import add_options as add_cost_options
from tierkv.replay.cost_options import costs_of, refuse_speeds_of_others
from tierkv.replay.files import check_places, read, write_files
from tierkv.replay.progress import Progress
from tierkv.replay.several import Replayed, Sizes, Ways, parts, replay_all
from tierkv.replay.several_report import Wear, as_json, tables
from tierkv.replay.traces import Trace

WRITE, TBW = "--write", "--nvme-tbw"
_MOST_TBW: Final = 1e9
_OF_SEVERAL: Final = ("admission", "promotion", "write", "nvme_tbw", "gpu", "prefill_tokens_per_s",
                      "utilisation", "nvme_bytes_per_s", "nvme_latency_s", "valkey_bytes_per_s",
                      "valkey_latency_s")  # fmt: skip


def default_of(key: str) -> str:
    """What the configuration chooses when nobody says anything."""
    return str(BY_KEY[key].default)


def add_options(parser: argparse.ArgumentParser) -> None:
    """All that is for several tiers."""
    group = parser.add_argument_group(
        "colder tiers", "With one of the first two, --capacity is that of host RAM."
    )
    group.add_argument(
        NVME,
        metavar="C,D",
        help="capacities of an NVMe tier behind it: as for --capacity, or 4TiB; 0 for none",
    )
    group.add_argument(VALKEY, metavar="C,D", help="the same for a Valkey server")
    group.add_argument(
        ADMISSION,
        metavar="A,B",
        help=f"what colder tiers take: {', '.join(registry.names('admission'))} (default: "
        f"{default_of('nvme.admission')})",
    )
    group.add_argument(
        PROMOTION,
        metavar="A",
        help=f"what is loaded: {', '.join(registry.names('promotion'))} (default: {default_of('host.promotion')})",
    )
    group.add_argument(
        WRITE,
        choices=("on_evict", "through"),
        help="when blocks go to colder tiers (default: on_evict)",
    )
    group.add_argument(
        TBW,
        type=float,
        metavar="TB",
        help="what the drive endures, by its data sheet (default: its capacity once a day for five years)",
    )
    add_cost_options(parser, link=False)


def is_asked(arguments: argparse.Namespace) -> bool:
    """Whether the words are about several tiers."""
    return arguments.nvme is not None or arguments.valkey is not None


def refuse_what_is_for_several(arguments: argparse.Namespace) -> None:
    """An option that would do nothing is an error. Raises ``ConfigError``."""
    for name in _OF_SEVERAL:
        value = getattr(arguments, name)
        if value is not None:
            option = "--" + name.replace("_", "-")
            raise ConfigError(option, value, f"it is for several tiers; give {NVME} as well (0 for none)")


def block_bytes_if_asked(arguments: argparse.Namespace) -> Callable[[Trace], int] | None:
    """What a block of a trace takes, where a model or a size was named."""
    if arguments.model is None and arguments.block_bytes is None and arguments.kv_dtype is None:
        return None
    costs = costs_of(arguments)
    return lambda trace: costs.block_bytes(trace.block_tokens)


def main(arguments: argparse.Namespace) -> int:
    """Replays, prints the tables and writes the files. Raises ``ConfigError`` and ``TraceError``."""
    ways = _ways(arguments)
    sizes = _sizes(arguments)
    there = {name for size in sizes for name, one in size.cold() if one is not OFF}
    refuse_speeds_of_others(arguments, there)
    costs, wear = costs_of(arguments), _wear(arguments)
    if wear.tbw is not None and "nvme" not in there:
        raise ConfigError(TBW, wear.tbw, "there is no such tier; give --nvme as well, or leave it out")
    check_places(arguments)
    progress = Progress(sys.stderr, 1 + parts(sizes, ways))
    try:
        trace = read(arguments.trace, arguments.block_tokens, progress)
        found: list[Replayed] = replay_all(trace, sizes, ways, costs, progress)
    finally:
        progress.end()
    print("\n".join(tables(trace, found, costs, wear)))
    chosen = {"promotion": ways.promotion[0], "write": ways.write}
    write_files(
        arguments,
        lambda: as_json(trace, found, costs, wear, **chosen),
        lambda path: chart.draw_several(path, trace, found),
    )
    return 0


def _ways(arguments: argparse.Namespace) -> Ways:
    word = arguments.promotion or default_of("host.promotion")
    return Ways(
        evictions(arguments.policy),
        admissions(arguments.admission or default_of("nvme.admission")),
        (word, promotion(word)),
        "through" if arguments.write == "through" else "on_evict",
    )


def _sizes(arguments: argparse.Namespace) -> list[Sizes]:
    def cold(option: str, text: str | None) -> list[Capacity]:
        return [OFF] if text is None else capacities(text, option, sizes=True, may_be_off=True)

    host = capacities(arguments.capacity, CAPACITY, sizes=True)
    nvme, valkey = cold(NVME, arguments.nvme), cold(VALKEY, arguments.valkey)
    return [Sizes(*each) for each in product(host, nvme, valkey)]


def _wear(arguments: argparse.Namespace) -> Wear:
    tbw = arguments.nvme_tbw
    if tbw is not None and not 0 < tbw <= _MOST_TBW:
        raise ConfigError(TBW, tbw, "give terabytes above 0, as the drive's data sheet has them")
    return Wear(tbw)
