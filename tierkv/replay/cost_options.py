"""The options of the command line that say what computing and loading cost."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Collection, Mapping
from typing import Final

from tierkv.errors import ConfigError
from tierkv.replay.costs import Costs
from tierkv.replay.geometry import KV_DTYPES, OPTION, geometry_of
from tierkv.replay.hardware import LINK_SHARE, UTILISATION, gpus_of
from tierkv.units import parse_bytes, parse_seconds

DEFAULT_MODEL, DEFAULT_GPU = "llama-3.1-8b", "h100"
NVME_BYTES_PER_S: Final = 6e9
NVME_LATENCY_S: Final = 200e-6
VALKEY_BYTES_PER_S: Final = 2.5e9
VALKEY_LATENCY_S: Final = 1e-3


def add_options(parser: argparse.ArgumentParser, *, link: bool = True) -> None:
    """The options that ``costs_of`` reads; ``link``: that of the way to the engine too."""
    group = parser.add_argument_group("what computing and loading cost")
    group.add_argument(
        OPTION,
        metavar="NAME",
        help=f"a config.json, or a well-known name (default: {DEFAULT_MODEL})",
    )
    group.add_argument("--kv-dtype", choices=KV_DTYPES, help="of the cache (default: the model's own)")
    group.add_argument("--gpu", metavar="NAME", help=f"such as h100 or 8xa100 (default: {DEFAULT_GPU})")
    group.add_argument("--block-bytes", metavar="SIZE", help="of a block (default: the model's)")
    group.add_argument(
        "--prefill-tokens-per-s", metavar="N", help="as measured (default: reckoned from the operations)"
    )
    options = (
        ("--utilisation", f"share of the GPU's operations that a prefill reaches (default: {UTILISATION})"),
        ("--link-bytes-per-s", "host RAM to GPU, such as 50GB (default: the GPU's PCIe)"),
        ("--nvme-bytes-per-s", f"(default: {NVME_BYTES_PER_S / 1e9:g}GB)"),
        ("--nvme-latency-s", f"(default: {NVME_LATENCY_S:g})"),
        ("--valkey-bytes-per-s", f"(default: {VALKEY_BYTES_PER_S / 1e9:g}GB)"),
        ("--valkey-latency-s", f"(default: {VALKEY_LATENCY_S:g})"),
    )
    for name, what in options:
        if link or name != "--link-bytes-per-s":
            group.add_argument(name, metavar="N", help=what)


def refuse_speeds_of_others(arguments: argparse.Namespace, tiers: Collection[str]) -> None:
    """A speed of a tier that is not there would change nothing. Raises ``ConfigError``."""
    for tier in ("nvme", "valkey"):
        for what in ("bytes_per_s", "latency_s"):
            value = getattr(arguments, f"{tier}_{what}")
            if value is not None and tier not in tiers:
                option = f"--{tier}-{what}".replace("_", "-")
                raise ConfigError(
                    option, value, f"there is no such tier; give --{tier} as well, or leave it out"
                )


_NAMES: Final = (
    "model",
    "kv_dtype",
    "gpu",
    "block_bytes",
    "prefill_tokens_per_s",
    "utilisation",
    "link_bytes_per_s",
    "nvme_bytes_per_s",
    "nvme_latency_s",
    "valkey_bytes_per_s",
    "valkey_latency_s",
)


def costs_of(arguments: argparse.Namespace) -> Costs:
    """Raises ``ConfigError``."""
    asked = {name: getattr(arguments, name, None) for name in _NAMES}
    given = {name: value for name, value in asked.items() if value is not None}
    gpu_word = given.get("gpu", DEFAULT_GPU)
    gpus, _, gpu = gpus_of(gpu_word)
    block = _size(given, "block_bytes", 0.0)
    return Costs(
        geometry_of(given.get("model", DEFAULT_MODEL), given.get("kv_dtype")),
        gpu_word,
        gpus,
        gpu,
        _number(given, "utilisation", UTILISATION, most=1.0),
        _number(given, "prefill_tokens_per_s", 0.0) or None,
        _size(given, "link_bytes_per_s", LINK_SHARE * gpu.link_bytes_per_s * gpus),
        {
            "nvme": _size(given, "nvme_bytes_per_s", NVME_BYTES_PER_S),
            "valkey": _size(given, "valkey_bytes_per_s", VALKEY_BYTES_PER_S),
        },
        {
            "nvme": _seconds(given, "nvme_latency_s", NVME_LATENCY_S),
            "valkey": _seconds(given, "valkey_latency_s", VALKEY_LATENCY_S),
        },
        int(block) or None,
        frozenset("--" + name.replace("_", "-") for name in given),
    )


_LEAST, _MOST = 1e-9, 1e18
"""Of speeds and sizes: beyond them a product of some is no number any more."""
_MOST_LATENCY_S = 3600.0


def _number(given: Mapping[str, str], name: str, default: float, most: float = _MOST) -> float:
    wanted = f"a number above 0{'' if most > 1 else ' and up to 1'}"
    return _read(given, name, default, float, wanted, _LEAST, most)


def _size(given: Mapping[str, str], name: str, default: float) -> float:
    return _read(given, name, default, parse_bytes, "a size above 0, such as 64MiB or 6GB", _LEAST, _MOST)


def _seconds(given: Mapping[str, str], name: str, default: float) -> float:
    def seconds(text: str) -> float:
        return parse_seconds(text) if text[-1:].isalpha() else float(text)

    wanted = "seconds of 0 or more, up to an hour, such as 0.0002 or 200us"
    return _read(given, name, default, seconds, wanted, 0.0, _MOST_LATENCY_S)


def _read(
    given: Mapping[str, str],
    name: str,
    default: float,
    how: Callable[[str], float],
    wanted: str,
    least: float,
    most: float,
) -> float:
    text = given.get(name)
    if text is None:
        return default
    try:
        value = float(how(text))
        if least <= value <= most:
            return value
    except (ValueError, OverflowError):
        pass
    raise ConfigError("--" + name.replace("_", "-"), text, f"give {wanted}")
