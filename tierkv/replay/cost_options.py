"""The options of the command line that say what computing and loading cost."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping
from typing import Final

from tierkv.errors import ConfigError
from tierkv.replay.costs import Costs
from tierkv.replay.geometry import KV_DTYPES, OPTION, geometry_of
from tierkv.replay.hardware import LINK_SHARE, UTILISATION, gpus_of
from tierkv.units import parse_bytes

DEFAULT_MODEL, DEFAULT_GPU = "llama-3.1-8b", "h100"
NVME_BYTES_PER_S: Final = 6e9
NVME_LATENCY_S: Final = 200e-6
VALKEY_BYTES_PER_S: Final = 2.5e9
VALKEY_LATENCY_S: Final = 1e-3


def add_options(parser: argparse.ArgumentParser) -> None:
    """The options that ``costs_of`` reads."""
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
    for name, what in (
        ("--utilisation", f"share of the GPU's operations that a prefill reaches (default: {UTILISATION})"),
        ("--link-bytes-per-s", "host RAM to GPU, such as 50GB (default: the GPU's PCIe)"),
        ("--nvme-bytes-per-s", f"(default: {NVME_BYTES_PER_S / 1e9:g}GB)"),
        ("--nvme-latency-s", f"(default: {NVME_LATENCY_S:g})"),
        ("--valkey-bytes-per-s", f"(default: {VALKEY_BYTES_PER_S / 1e9:g}GB)"),
        ("--valkey-latency-s", f"(default: {VALKEY_LATENCY_S:g})"),
    ):
        group.add_argument(name, metavar="N", help=what)


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
    given = {name: getattr(arguments, name) for name in _NAMES if getattr(arguments, name) is not None}
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
            "nvme": _number(given, "nvme_latency_s", NVME_LATENCY_S),
            "valkey": _number(given, "valkey_latency_s", VALKEY_LATENCY_S),
        },
        int(block) or None,
        frozenset("--" + name.replace("_", "-") for name in given),
    )


def _number(given: Mapping[str, str], name: str, default: float, most: float = float("inf")) -> float:
    return _read(given, name, default, float, f"a number above 0{'' if most > 1 else ' and up to 1'}", most)


def _size(given: Mapping[str, str], name: str, default: float) -> float:
    return _read(given, name, default, parse_bytes, "a size above 0, such as 64MiB or 6GB", float("inf"))


def _read(
    given: Mapping[str, str],
    name: str,
    default: float,
    how: Callable[[str], float],
    wanted: str,
    most: float,
) -> float:
    text = given.get(name)
    if text is None:
        return default
    try:
        value = float(how(text))
        if 0 < value <= most and value < float("inf"):
            return value
    except ValueError:
        pass
    raise ConfigError("--" + name.replace("_", "-"), text, f"give {wanted}")
